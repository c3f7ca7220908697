//! `godwit volume`: what the controller knows of volumes, and what needs none.

use crate::args::{Global, LogFormat, PrecacheArgs};
use crate::daemons::log;
use crate::failure::Failure;
use crate::image::{ExportArgs, ImportArgs, NodeArgs};
use clap::{Args, Subcommand};
use godwit_api::Name;
use godwit_export::{Backend, Listener, Plain, Stop, Tracked, serve_all, tls_from};
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Between two settlings of what is tracked, as on a node.
const SETTLE: Duration = Duration::from_secs(5);

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// List them
    Ls,
    /// Keep a volume nearly equal at another site, for ever, in spare bandwidth; a later move there sends what differs
    #[command(
        after_help = "Again with other values, it changes them; what is not named stays as it is. The guest never waits for it.\n\nEvery --interval an epoch of writes ends, and travels when it is durable here. With --consistent the\nother site keeps the last complete epoch as an image, as a crash at that moment would have left the disk,\nwhile the next one arrives; this takes room there for one epoch, and here memory for what the guest\noverwrites meanwhile: past --image-room an epoch is given up, and the image stays at the one before.\n`godwit volume status` says so; a guest that overwrites faster than the link carries, for longer than\nthat room lasts, has no newer image. Where all disks of a VM are pre-cached so at one host, their images are of one moment,\nas one loss of power would have left them; the slowest of them sets how often that is, and one of which\nmore is overwritten than is kept keeps the others from having one, too."
    )]
    Precache(PrecacheArgs),
    /// Show pre-caches: how far each lags behind, what it has not been sent, and how fast it goes
    Status {
        /// Of this volume only
        volume: Option<Name>,
    },
    /// Compare what the replicas of a volume hold, by digests, and find, name and repair bit rot
    Verify(crate::verify::VerifyArgs),
    /// Start the VM of a volume from the image that a pre-cache left at another site, because its own is gone
    Promote(crate::promote::PromoteArgs),
    /// Serve a file or a replica over NBD, without a controller: for tools and for measuring
    Serve(ServeArgs),
    /// Copy an image of any format that qemu-img reads into a volume; into a file or a replica, without a controller
    #[command(
        override_usage = "godwit volume import [OPTIONS] <IMAGE> <FILE>\n       godwit volume import [OPTIONS] --volume <NAME> <IMAGE>"
    )]
    Import(ImportArgs),
    /// Copy a volume into an image; a file or a replica, without a controller
    Export(ExportArgs),
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
    #[arg(long, conflicts_with_all = ["tls_creds", "socket"])]
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
    // Before anybody can connect: a socket that is there is one that is served.
    let disk = Opened::open(&args.file, args.no_track)?;
    let protected = |address: SocketAddr| {
        if tls.is_some() || args.plain_tcp || address.ip().is_loopback() {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "{address} can be reached from elsewhere: give --tls-creds, or --plain-tcp if everybody there may read and write"
        )))
    };
    let listener = match (passed, &args.socket, args.listen) {
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
            return Err(Failure::usage("a socket was passed by LISTEN_FDS: give neither --socket nor --listen"));
        }
        (Some(passed), None, None) => {
            let address = passed.address();
            let address = address.map_err(|e| anyhow::anyhow!("what LISTEN_FDS passed cannot be listened at: {e}"))?;
            address.map_or(Ok(()), protected)?;
            passed
        }
        (None, Some(path), _) => Listener::unix(path)
            .map_err(|e| Failure::from(anyhow::anyhow!("cannot listen at {}: {e}", path.display())))?,
        (None, None, Some(address)) => {
            protected(address)?;
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
    serve_until(&listener, disk, tls.as_ref(), &stop)
}

/// A file that is open, and locked.
enum Opened {
    Plain(Arc<Plain>),
    Tracked(Arc<Tracked>),
}

impl Opened {
    fn open(file: &Path, no_track: bool) -> Result<Self, Failure> {
        let opened = if no_track {
            Plain::open(file).map(|plain| Self::Plain(Arc::new(plain)))
        } else {
            Tracked::open(file).map(|tracked| Self::Tracked(Arc::new(tracked)))
        };
        Ok(opened.map_err(anyhow::Error::from)?)
    }
}

/// Serves a file until it is told to stop; then it is durable.
fn serve_until(
    listener: &Listener,
    disk: Opened,
    tls: Option<&Arc<rustls::ServerConfig>>,
    stop: &Stop,
) -> Result<(), Failure> {
    let tracked = match disk {
        Opened::Tracked(tracked) => tracked,
        Opened::Plain(plain) => {
            let backend: Arc<dyn Backend> = plain.clone();
            let served = serve_all(listener, &backend, tls, stop);
            plain.close().map_err(anyhow::Error::from)?;
            return Ok(served?);
        }
    };
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
    let served = serve_all(listener, &backend, tls, stop);
    drop((over, backend));
    drop(settler.join());
    if let Some(tracked) = Arc::into_inner(tracked) {
        tracked.close().map_err(anyhow::Error::from)?;
    }
    Ok(served?)
}

/// Runs qemu-img, and says what it said when it fails.
fn qemu_img(arguments: &[&OsStr]) -> Result<Vec<u8>, Failure> {
    let output = Command::new("qemu-img").args(arguments).output();
    let output = output
        .map_err(|e| anyhow::anyhow!("cannot run qemu-img ({e}); it comes with the Debian package qemu-utils"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(anyhow::anyhow!("qemu-img: {}", said.trim()).into());
    }
    Ok(output.stdout)
}

/// Serves a file for one run of qemu-img, at a socket that nobody else reaches.
fn with_qemu_img(file: &Path, no_track: bool, arguments: impl Fn(&str) -> Vec<OsString>) -> Result<(), Failure> {
    log(None, LogFormat::Text)?;
    let disk = Opened::open(file, no_track)?;
    let folder = std::env::temp_dir().join(format!("godwit-volume.{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let socket = folder.join("socket");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let done = Listener::unix(&socket).map_err(Failure::from).and_then(|listener| {
        let stop = Stop::new()?;
        std::thread::scope(|scope| {
            let (stop, listener) = (&stop, &listener);
            let serving = scope.spawn(move || serve_until(listener, disk, None, stop));
            let arguments = arguments(&uri);
            let copied = qemu_img(&arguments.iter().map(OsString::as_os_str).collect::<Vec<_>>());
            stop.now();
            let served = serving.join().unwrap_or_else(|_| Err(anyhow::anyhow!("serving ended in a bug").into()));
            copied.and(served)
        })
    });
    let _ = std::fs::remove_dir_all(&folder);
    done
}

fn import(image: &Path, file: &Path, no_track: bool, format: Option<String>) -> Result<(), Failure> {
    let named: Vec<&OsStr> = format.iter().flat_map(|format| ["-f".as_ref(), format.as_ref()]).collect();
    let words = ["info".as_ref(), "--output=json".as_ref()];
    let info = qemu_img(&[&words[..], &named[..], &[image.as_os_str()]].concat())?;
    let info: serde_json::Value = serde_json::from_slice(&info).map_err(anyhow::Error::from)?;
    let (format, size) = (info["format"].as_str().unwrap_or("raw").to_owned(), info["virtual-size"].as_u64());
    let size = size.ok_or_else(|| anyhow::anyhow!("qemu-img does not say how large {} is", image.display()))?;
    if !file.exists() {
        std::fs::File::create_new(file)?.set_len(size.next_multiple_of(4096))?;
    }
    with_qemu_img(file, no_track, |uri| {
        let words = ["convert", "-n", "-W", "-f", &format, "-O", "raw"].map(OsString::from);
        [&words[..], &[image.into(), uri.into()]].concat()
    })
}

fn export(file: &Path, image: &Path, format: &str) -> Result<(), Failure> {
    // Reading changes no stamps: a replica's folder is opened as one, a raw file as it is.
    with_qemu_img(file, !file.is_dir(), |uri| {
        let words = ["convert", "-W", "-f", "raw", "-O", format].map(OsString::from);
        [&words[..], &[uri.into(), image.into()]].concat()
    })
}

/// What of `godwit volume` needs no controller.
pub fn run(global: &Global, command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Serve(args) => serve(&args),
        VolumeCommand::Import(ImportArgs { image: Some(image), file: Some(file), no_track, format, .. }) => {
            import(&image, &file, no_track, format)
        }
        VolumeCommand::Export(ExportArgs { node: NodeArgs { volume: None, .. }, files, format }) => match &files[..] {
            [file, image] => export(file, image, &format),
            _ => Err(Failure::usage("give FILE and IMAGE, or --volume NAME and IMAGE")),
        },
        // These ask the controller.
        command @ (VolumeCommand::Ls
        | VolumeCommand::Precache(_)
        | VolumeCommand::Verify(_)
        | VolumeCommand::Promote(_)
        | VolumeCommand::Import(_)
        | VolumeCommand::Export(_)
        | VolumeCommand::Status { .. }) => crate::user::run(global, crate::args::Command::Volume(command)),
    }
}
