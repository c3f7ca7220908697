//! The daemons and the authority: what needs no controller.

use crate::args::{ControllerArgs, Global, LogFormat, NodeArgs, Pki, RoleArg};
use crate::config::{self, NodeSettings};
use crate::enrol;
use crate::failure::Failure;
use crate::service::Manager;
use godwit_api::Name;
use godwit_trust::{Access, Authority, Credentials, Identity, Role, Validity};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// Makes an authority or a certificate.
pub fn pki(command: &Pki) -> Result<(), Failure> {
    match command {
        Pki::Init { dir } => {
            let authority = Authority::create(dir)?;
            println!("made an authority in {} (fingerprint {})", dir.display(), authority.fingerprint());
        }
        Pki::Issue { ca, role, name, out, days } => {
            let role = match role {
                RoleArg::Controller => Role::Controller,
                RoleArg::Node => Role::Node,
                RoleArg::Client => Role::Client(Access::Admin),
                RoleArg::Operator => Role::Client(Access::Operator),
            };
            let identity = Identity::new(role, name.as_str()).map_err(|e| Failure::usage(e.to_string()))?;
            Authority::open(ca)?.issue(&identity, Validity::days(*days))?.write(out)?;
            println!("issued a certificate for {identity}, good for {days} days, in {}", out.display());
        }
    }
    Ok(())
}

/// Runs the controller until a signal.
pub fn controller(args: ControllerArgs, global: &Global) -> Result<(), Failure> {
    let settings = config::controller(args, global.credentials.clone())?;
    log(settings.log.as_deref(), settings.log_format)?;
    let credentials = settings.credentials.map_or_else(|| enrol::own_credentials(&settings.state), Ok)?;
    let config = godwit_controller::Config {
        listen: settings.listen,
        state: settings.state,
        credentials,
        authority: settings.authority,
        certificate_life: settings.certificate_life,
    };
    Ok(Runtime::new()?.block_on(async {
        let manager = Arc::new(Manager::from_env());
        manager.starting("opening the store");
        let up = |controller: &Arc<godwit_controller::Controller>| {
            let (manager, controller) = (manager.clone(), controller.clone());
            tokio::spawn(async move { manager.serve(|| godwit_controller::health::look(&controller)).await });
        };
        godwit_controller::run(config, up, told_to_end(manager.clone())?).await
    })?)
}

/// For so long a node that could not start waits for what it is doing on disks.
const LETTING_GO: Duration = Duration::from_secs(5);

/// Runs a node until a signal. Its guests stay.
pub fn node(args: NodeArgs, global: &Global) -> Result<(), Failure> {
    let settings = config::node(args, global.credentials.clone())?;
    log(settings.log.as_deref(), settings.log_format)?;
    let NodeSettings {
        name,
        state,
        run,
        images,
        pool,
        address,
        api,
        control,
        disk,
        memory,
        extender,
        watch_every,
        credentials,
        ..
    } = settings;
    let credentials = credentials.map_or_else(|| enrol::own_credentials(&state), Ok)?;
    let name = match name {
        Some(name) => name,
        None => name_in(&credentials)?,
    };
    let config = godwit_node::Config {
        name,
        state,
        run,
        images,
        pool,
        credentials,
        address,
        api_port: api,
        control_port: control,
        disk_port: disk,
        memory_port: memory,
        extender: extender.map(crate::extender::ExtenderAt::offer),
        watch_every: watch_every.0,
    };
    let runtime = Runtime::new()?;
    let done = runtime.block_on(async {
        let manager = Arc::new(Manager::from_env());
        manager.starting("taking up the guests that run here");
        let up = |node: &Arc<godwit_node::node::Node>| {
            let (manager, node) = (manager.clone(), node.clone());
            tokio::spawn(async move { manager.serve(|| godwit_node::health::look(&node)).await });
        };
        let told = told_to_end(manager.clone())?;
        let told = async move {
            told.await;
            let bound = std::thread::Builder::new().name("bound".into()).spawn(end_in_time);
            if let Err(error) = bound {
                tracing::warn!(%error, "no thread that ends the node where its storage stands");
            }
        };
        godwit_node::run(config, up, told).await
    });
    match done {
        Ok(ending) => {
            // To let go of all that it holds would close files, and wait for storage that stands; the end of the process lets go of them as well.
            std::mem::forget(ending.end(runtime));
            Ok(())
        }
        Err(error) => {
            runtime.shutdown_timeout(LETTING_GO);
            Err(error.into())
        }
    }
}

/// Ends the process when a stop has taken as long as it may: what should have done so may stand with the storage itself.
fn end_in_time() {
    std::thread::sleep(godwit_node::ending::LONGEST);
    tracing::error!(
        "storage stands: the node ends without having closed all its replicas; what was written last travels again"
    );
    std::process::exit(0)
}

/// Whose certificate it is.
fn name_in(credentials: &Path) -> Result<Name, Failure> {
    let loaded = Credentials::load(credentials)?;
    let name = loaded.identity().name();
    name.parse().map_err(|e| Failure::usage(format!("the certificate in {}: {e}", credentials.display())))
}

/// Logs to standard error what `GODWIT_LOG` asks for, or `configured`: `info` unless set, or such as
/// `warn,godwit_node=debug`.
pub fn log(configured: Option<&str>, format: LogFormat) -> Result<(), Failure> {
    let targets = match (std::env::var("GODWIT_LOG"), configured) {
        (Ok(text), _) => config::log_targets(&text).map_err(|e| Failure::usage(format!("GODWIT_LOG={e}")))?,
        (Err(_), Some(text)) => config::log_targets(text).map_err(Failure::usage)?,
        (Err(_), None) => Targets::new().with_default(LevelFilter::INFO),
    };
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(colours).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
    Ok(())
}

/// Ends at SIGTERM or SIGINT.
fn told_to_end(manager: Arc<Manager>) -> std::io::Result<impl Future<Output = ()>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("told to end");
        manager.stopping();
    })
}
