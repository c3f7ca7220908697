//! `godwit volume import` and `export`: of a file that is here, or of a volume that a node holds.
//!
//! A node's volume is copied by its node; this begins it and follows it. Following is only looking: ^C, or a controller that
//! restarts, changes nothing about the copy.

use crate::failure::{Code, Failure};
use clap::Args;
use godwit_api::image::{CopyImage, Direction, ImageCopy, ImageState};
use godwit_api::{Name, Problem, PublicClient};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often the controller is asked.
const POLL: Duration = Duration::from_millis(250);
/// How long the controller, or the volume's host, may be away before following ends; the copy may go on.
const PATIENCE: Duration = Duration::from_secs(60);

/// What both ways take for a node's volume.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// A volume that a node holds, by name, instead of FILE. IMAGE is a file of its VM's host then: a path, or the name of a file in the
    /// host's image folder
    #[arg(long, value_name = "NAME")]
    pub volume: Option<Name>,
    /// Import: what the volume holds may be lost. Export: a file of this name may be replaced
    #[arg(long, requires = "volume")]
    pub overwrite: bool,
    /// Do not wait for the end
    #[arg(long, requires = "volume")]
    pub detach: bool,
    /// Say how the volume's import or export stands, and begin none
    #[arg(long, requires = "volume", conflicts_with_all = ["overwrite", "detach"])]
    pub status: bool,
    /// End the volume's import or export
    #[arg(long, requires = "volume", conflicts_with_all = ["overwrite", "detach", "status"])]
    pub cancel: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Into a node's volume: its VM is off, and stays off until the image is there, whole and durable. An import that broke off,\nwhoever died, leaves a volume whose VM does not start before it is imported again. What the image does not fill reads as\nzeroes. An image with a backing file is refused: `qemu-img convert` makes one that is whole."
)]
pub struct ImportArgs {
    /// The image
    #[arg(required_unless_present_any = ["status", "cancel"])]
    pub image: Option<PathBuf>,
    /// A raw image, a block device, or the folder of a replica; a file that is not there is made
    #[arg(required_unless_present = "volume", conflicts_with = "volume")]
    pub file: Option<PathBuf>,
    /// Do not keep which blocks were written when
    #[arg(long, conflicts_with = "volume")]
    pub no_track: bool,
    /// The image's format, where it is not what it looks like
    #[arg(long)]
    pub format: Option<String>,
    #[command(flatten)]
    pub node: NodeArgs,
}

#[derive(Debug, Args)]
#[command(
    override_usage = "godwit volume export [OPTIONS] <FILE> <IMAGE>\n       godwit volume export [OPTIONS] --volume <NAME> <IMAGE>",
    after_help = "A node's volume is exported as it is when this begins. Its VM may run, and goes on writing: the image is what a loss of power at\nthat moment would have left. Of a VM that is off it is the disk as the guest left it. The volumes of a VM are exported one by one,\neach as of its own moment. The image has its name only when it is whole.\n\nIt does not end when its VM moves away: it goes on at the host where it began. It breaks off, and says so, when its VM comes back to that\nhost meanwhile, and where the volume lies on shared storage."
)]
pub struct ExportArgs {
    /// A raw image, a block device, or the folder of a replica; then the image to write. With --volume only the image
    #[arg(value_name = "FILE", num_args = 0..=2)]
    pub files: Vec<PathBuf>,
    /// The image's format: raw, qcow2, or another one that qemu-img writes
    #[arg(long, default_value = "qcow2")]
    pub format: String,
    #[command(flatten)]
    pub node: NodeArgs,
}

/// What a command wants with a node's volume; none: it is about files that are here.
pub fn wanted(
    what: Direction,
    node: &NodeArgs,
    image: Option<PathBuf>,
    format: Option<String>,
) -> Result<Option<Wanted>, Failure> {
    let Some(volume) = node.volume.clone() else { return Ok(None) };
    let how = match (node.status, node.cancel) {
        (true, _) => How::Show,
        (_, true) => How::Cancel,
        _ => {
            let image = image.ok_or_else(|| Failure::usage("name the image"))?;
            let path = image.into_os_string().into_string();
            let path = path.map_err(|_| Failure::usage("the image's path is no UTF-8 text"))?;
            let mut key = [0; 8];
            getrandom::fill(&mut key).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
            // JSON's numbers are exact below 2^53.
            let key = u64::from_le_bytes(key) >> 11;
            let copy = CopyImage { what, path, format, overwrite: node.overwrite, key };
            How::Copy { copy: Box::new(copy), detach: node.detach }
        }
    };
    Ok(Some(Wanted { volume, how }))
}

/// See [`wanted`].
#[derive(Debug)]
pub struct Wanted {
    pub volume: Name,
    how: How,
}

#[derive(Debug)]
enum How {
    Show,
    Cancel,
    Copy { copy: Box<CopyImage>, detach: bool },
}

/// Does it; how the copy stands then.
pub async fn run(api: &PublicClient, wanted: &Wanted) -> Result<ImageCopy, Failure> {
    let Wanted { volume, how } = wanted;
    match how {
        How::Show => Ok(api.image(volume).await?),
        How::Cancel => Ok(api.end_image(volume).await?),
        How::Copy { copy, detach: true } => Ok(api.copy_image(volume, copy).await?),
        How::Copy { copy, detach: false } => {
            let begun = api.copy_image(volume, copy).await?;
            tokio::select! {
                ended = follow(api, volume, begun) => ended,
                _ = tokio::signal::ctrl_c() => Err(Failure::new(
                    Code::Interrupted,
                    format!("it goes on; `godwit volume {} --volume {volume} --cancel` ends it", word(copy.what)),
                )),
            }
        }
    }
}

const fn word(what: Direction) -> &'static str {
    match what {
        Direction::Import => "import",
        Direction::Export => "export",
    }
}

async fn follow(api: &PublicClient, volume: &Name, mut copy: ImageCopy) -> Result<ImageCopy, Failure> {
    let (key, shows) = (copy.copy.key, std::io::stderr().is_terminal());
    let mut heard = Instant::now();
    while copy.state == ImageState::Copying {
        if shows {
            eprint!("\r{:5.1} % of {}   ", copy.done * 100.0, copy.size);
        }
        tokio::time::sleep(POLL).await;
        match api.image(volume).await {
            Ok(now) if now.copy.key == key => (copy, heard) = (now, Instant::now()),
            Ok(_) => return Err(Failure::new(Code::Failed, "somebody has begun another copy of that volume since")),
            // Its host may be starting again; then it knows nothing of this copy.
            Err(error) if error.problem == Problem::Unreachable && heard.elapsed() < PATIENCE => {}
            Err(error) if error.problem == Problem::NotFound => {
                let message = format!("the {} broke off: its host was restarted; begin it again", word(copy.copy.what));
                return Err(Failure::new(Code::Failed, message));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if shows {
        eprintln!();
    }
    Ok(copy)
}

/// Whether all is well: an error where it is not.
pub fn verdict(wanted: &Wanted, copy: &ImageCopy) -> Result<(), Failure> {
    match (&wanted.how, copy.state) {
        (How::Copy { .. }, ImageState::Failed) => {
            Err(Failure::new(Code::Failed, copy.error.as_ref().map_or_else(|| "it failed".into(), ToString::to_string)))
        }
        _ => Ok(()),
    }
}

/// For people.
pub fn show(wanted: &Wanted, copy: &ImageCopy) -> String {
    let volume = &wanted.volume;
    let (path, host, format, size) = (&copy.copy.path, &copy.host, &copy.format, copy.size);
    let what = match copy.copy.what {
        Direction::Import => format!("{path} ({format}) at {host} into `{volume}` ({size})"),
        Direction::Export => format!("`{volume}` ({size}) into {path} ({format}) at {host}"),
    };
    match copy.state {
        ImageState::Done => format!("copied {what}\n"),
        ImageState::Copying => format!("copying {what}: {:.1} %\n", copy.done * 100.0),
        ImageState::Failed => {
            let why = copy.error.as_ref().map_or_else(String::new, |e| format!(": {e}"));
            format!("did not copy {what}{}\n", crate::table::printable(&why))
        }
    }
}
