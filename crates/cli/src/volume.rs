//! `godwit volume`: what the controller knows of volumes, and what needs none.

use crate::args::{Global, LogFormat};
use crate::daemons::log;
use crate::failure::Failure;
use clap::{Args, Subcommand};
use godwit_export::{Backend, Listener, Plain, Stop, Tracked, serve_all, tls_from};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Between two settlings of what is tracked, as on a node.
const SETTLE: Duration = Duration::from_secs(5);

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// List them
    Ls,
    /// Serve a file or a replica over NBD, without a controller: for tools and for measuring
    Serve(ServeArgs),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Which blocks were written when is kept in the folder FILE.godwit, unless --no-track; a replica's folder keeps it itself.\nIt listens at a socket that was opened for it (LISTEN_FDS), or where it is told. SIGTERM makes all durable and ends it."
)]
pub struct ServeArgs {
    /// A raw image, a block device, or the folder of a replica
    pub file: PathBuf,
    /// Listen at this unix socket
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    pub socket: Option<PathBuf>,
    /// Listen at this TCP address
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Folder with server-cert.pem, server-key.pem and ca-cert.pem: clients have to begin TLS, with a certificate of this authority
    #[arg(long, value_name = "DIR")]
    pub tls_creds: Option<PathBuf>,
    /// Let everybody who reaches the address read and write, unencrypted
    #[arg(long, requires = "listen", conflicts_with = "tls_creds")]
    pub plain_tcp: bool,
    /// Do not keep which blocks were written when
    #[arg(long)]
    pub no_track: bool,
}

/// Serves until a signal.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    // First: what was passed has a number that the next file would get.
    let passed = Listener::passed()?;
    log(None, LogFormat::Text)?;
    let tls = args.tls_creds.as_deref().map(tls_from).transpose().map_err(anyhow::Error::from)?;
    let listener = match (passed, &args.socket, args.listen) {
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
            return Err(Failure::usage("a socket was passed by LISTEN_FDS: give neither --socket nor --listen"));
        }
        (Some(passed), None, None) => passed,
        (None, Some(path), _) => Listener::unix(path)
            .map_err(|e| Failure::from(anyhow::anyhow!("cannot listen at {}: {e}", path.display())))?,
        (None, None, Some(address)) => {
            if tls.is_none() && !args.plain_tcp && !address.ip().is_loopback() {
                return Err(Failure::usage(format!(
                    "{address} can be reached from elsewhere: give --tls-creds, or --plain-tcp if everybody there may read and write"
                )));
            }
            let (listener, address) =
                Listener::tcp(address).map_err(|e| anyhow::anyhow!("cannot listen at {address}: {e}"))?;
            tracing::info!(%address, "listening");
            listener
        }
        (None, None, None) => return Err(Failure::usage("give --socket PATH or --listen ADDR")),
    };
    let stop = Stop::new()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _in = runtime.enter();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let told = stop.clone();
    runtime.spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        told.now();
    });
    if args.no_track {
        let plain = Arc::new(Plain::open(&args.file).map_err(anyhow::Error::from)?);
        let backend: Arc<dyn Backend> = plain.clone();
        serve_all(&listener, &backend, tls.as_ref(), &stop)?;
        return Ok(plain.close().map_err(anyhow::Error::from)?);
    }
    let tracked = Arc::new(Tracked::open(&args.file).map_err(anyhow::Error::from)?);
    let (over, ended) = mpsc::channel::<()>();
    let settling = tracked.clone();
    let settler = std::thread::spawn(move || {
        while ended.recv_timeout(SETTLE) == Err(mpsc::RecvTimeoutError::Timeout) {
            if let Err(error) = settling.settle() {
                tracing::error!(%error, "the replica cannot be made durable");
            }
        }
    });
    let backend: Arc<dyn Backend> = tracked.clone();
    let served = serve_all(&listener, &backend, tls.as_ref(), &stop);
    drop((over, backend));
    drop(settler.join());
    if let Some(tracked) = Arc::into_inner(tracked) {
        tracked.close().map_err(anyhow::Error::from)?;
    }
    Ok(served?)
}

/// What of `godwit volume` needs no controller.
pub fn run(global: &Global, command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Serve(args) => serve(&args),
        VolumeCommand::Ls => crate::user::run(global, crate::args::Command::Volume(VolumeCommand::Ls)),
    }
}
