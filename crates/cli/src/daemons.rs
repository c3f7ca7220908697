//! The daemons and the authority: what needs no controller.

use crate::args::{ControllerArgs, NodeArgs, Pki, RoleArg};
use crate::failure::Failure;
use godwit_trust::{Access, Authority, Identity, Role, Validity};
use std::path::PathBuf;
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
pub fn controller(args: ControllerArgs, credentials: PathBuf) -> Result<(), Failure> {
    log()?;
    let authority = args.authority.or_else(|| Some(args.state.join(crate::enrol::AUTHORITY)).filter(|ca| ca.exists()));
    let ControllerArgs { listen, state, certificate_life, .. } = args;
    let config = godwit_controller::Config { listen, state, credentials, authority, certificate_life };
    Ok(Runtime::new()?.block_on(async { godwit_controller::run(config, told_to_end()?).await })?)
}

/// Runs a node until a signal. Its guests stay.
pub fn node(args: NodeArgs, credentials: PathBuf) -> Result<(), Failure> {
    log()?;
    let NodeArgs { name, state, run, images, address, api, control, disk, memory } = args;
    let config = godwit_node::Config {
        name,
        state,
        run,
        images,
        credentials,
        address,
        api_port: api,
        control_port: control,
        disk_port: disk,
        memory_port: memory,
    };
    Ok(Runtime::new()?.block_on(async { godwit_node::run(config, told_to_end()?).await })?)
}

/// Logs to standard error what `GODWIT_LOG` asks for: `info` unless set, or such as `warn,godwit_node=debug`.
fn log() -> Result<(), Failure> {
    let targets = match std::env::var("GODWIT_LOG") {
        Ok(text) => text.parse().map_err(|e| {
            Failure::usage(format!(
                "GODWIT_LOG=`{text}`: {e}; write a level, or levels by target such as info,godwit_node=debug"
            ))
        })?,
        Err(_) => Targets::new().with_default(LevelFilter::INFO),
    };
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
    Ok(())
}

/// Ends at SIGTERM or SIGINT.
fn told_to_end() -> std::io::Result<impl Future<Output = ()>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("told to end");
    })
}
