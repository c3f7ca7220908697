//! Images of volumes: `godwit volume import` and `export`.
//!
//! Formats are qemu-img's work: it reads and writes the file, and this serves it the volume over NBD, at a socket of its own. Sparse stays
//! sparse, both ways.
//!
//! An *export* is of the volume as it is when it begins ([`crate::snapshot`]). Its file has no name until it is whole and durable, so one that is
//! cut off, whoever dies, leaves nothing.
//!
//! A *move* neither waits for an export nor ends it: the VM goes, and what is left here is the volume as it was left, which nobody writes to, with
//! what the guest had overwritten before. Whoever would write to it is told to wait (a pre-cache, [`crate::precache`]) or goes first, and the
//! export breaks off (the VM itself, when it comes back; who removes the replica). Of a volume on shared storage nothing is left here, so
//! its export breaks off, too.
//!
//! An *import* overwrites the volume in its place. A copy beside it that takes its place at the end would need room for both; and the
//! stamps of what was there must go on counting, or another site's replica would be believed equal. So half an import is a volume of
//! neither the old contents nor the new. It is *marked*, durably, in the VM's file before anything is overwritten, and until all of it is
//! durable. A VM with the mark does not start, whatever died in between; another import takes the mark over.
//!
//! # What can go wrong
//!
//! *An image that leads elsewhere.* A backing file, or an extent in another file, would be read with the node's rights, which whoever made
//! the image does not have. Such an image is refused; `qemu-img convert` makes one of it that is whole.
//!
//! *A raw image that looks like one of another format*, because its guest wrote it so. It is read as what it looks like unless the
//! format is named.

use crate::actor::Input;
use crate::disk::Disk;
use crate::failpoint::{Point, reach_async};
use crate::node::Node;
use crate::parts::{Parts, lock};
use crate::snapshot::Snapshot;
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::host::Ownership;
use godwit_api::image::{CopyImage, Direction, ImageCopy, ImageOrder, ImageState};
use godwit_api::{ApiError, Problem};
use godwit_export::{Answers, Backend, Listener, Stop, serve_all};
use godwit_handoff::Owner;
use godwit_nbd::{Command, Cookie, Errno, Export, Extent, Piece, Reply};
use godwit_units::{Bytes as Amount, VolumeId};
use godwit_volume::VolumeError;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What an export is where nobody says.
const FORMAT: &str = "qcow2";
/// What is zeroed at once before an import: a pre-cache that keeps an image keeps what it held.
const ZEROED_AT_ONCE: u64 = 32 << 20;
/// How long qemu-img may take to look at an image.
const LOOKING: Duration = Duration::from_secs(30);
/// What qemu-img may say of a failure, for people.
const MOST_SAID: u64 = 4096;

/// Copies that are under way, and each volume's last one.
#[derive(Debug, Default)]
pub struct Images {
    jobs: Mutex<BTreeMap<VolumeId, Arc<Job>>>,
    /// One begins at a time.
    beginning: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Job {
    shown: watch::Sender<ImageCopy>,
    over: CancellationToken,
}

impl Job {
    fn done(&self, done: f64) {
        self.shown.send_modify(|copy| copy.done = done);
    }

    fn is_under_way(&self) -> bool {
        self.shown.borrow().state == ImageState::Copying
    }
}

fn conflict(message: String) -> ApiError {
    ApiError::new(Problem::Conflict, message)
}

fn failed(error: &anyhow::Error) -> ApiError {
    ApiError::new(Problem::Failed, format!("{error:#}"))
}

/// Whether a VM's volumes are whole, so that it may be started.
///
/// # Errors
/// An image is being copied into one, or half of one was.
pub fn may_start(parts: &Parts) -> Result<(), ApiError> {
    let Some(volume) = parts.file().importing else { return Ok(()) };
    let disk = parts.disks().into_iter().find(|disk| disk.id == volume);
    let (vm, volume) = (&parts.name, disk.map_or_else(|| volume.0.to_string(), |disk| disk.name.clone()));
    if parts.importing.load(Ordering::Relaxed) {
        return Err(conflict(format!("`{vm}` waits for an image that is copied into `{volume}`"))
            .remedy(format!("wait, or `godwit volume import --volume {volume} --cancel`")));
    }
    Err(conflict(format!("`{vm}` cannot be started: an import into `{volume}` broke off, and it holds half an image"))
        .remedy(format!("`godwit volume import IMAGE --volume {volume}` again")))
}

/// Whether an image may be copied into a volume. There is one mark, and whoever ends takes it away: of two at once the VM would start on half of
/// the other one.
///
/// # Errors
/// One is being copied into a volume of the VM, or half of one was into another.
pub fn may_import(parts: &Parts, volume: VolumeId) -> Result<(), ApiError> {
    let under_way = parts.importing.load(Ordering::Relaxed);
    if !under_way && parts.file().importing == Some(volume) {
        return Ok(());
    }
    may_start(parts)?;
    if under_way {
        return Err(conflict(format!("an import into a volume of `{}` is just ending", parts.name)).remedy("ask again"));
    }
    Ok(())
}

/// The copy that is under way, or was the last.
///
/// # Errors
/// None is known here.
pub fn show(node: &Node, volume: VolumeId) -> Result<ImageCopy, ApiError> {
    Ok(job(node, volume)?.shown.borrow().clone())
}

fn job(node: &Node, volume: VolumeId) -> Result<Arc<Job>, ApiError> {
    lock(&node.images().jobs).get(&volume).cloned().ok_or_else(|| {
        let message = format!("{} knows of no import or export of volume {}", node.name(), volume.0);
        ApiError::new(Problem::NotFound, message).remedy("it broke off if it was under way: begin it again")
    })
}

/// Ends a copy that is under way.
///
/// # Errors
/// As [`show`].
pub async fn end(node: &Node, volume: VolumeId) -> Result<ImageCopy, ApiError> {
    let job = job(node, volume)?;
    job.over.cancel();
    let mut shown = job.shown.subscribe();
    // The sender is the job's own.
    let ended = shown.wait_for(|copy| copy.state != ImageState::Copying).await;
    ended.map(|copy| copy.clone()).map_err(|_| conflict("the copy ended in a bug".into()))
}

/// Ends what is under way with a VM that is to be removed.
pub async fn end_all(node: &Node, parts: &Parts) {
    for volume in &parts.definition().volumes {
        let _ = end(node, *volume).await;
    }
}

/// Begins a copy, or says how the same request stands.
///
/// # Errors
/// What is in the way.
pub async fn begin(node: &Arc<Node>, parts: &Arc<Parts>, order: ImageOrder) -> Result<ImageCopy, ApiError> {
    let (node, parts) = (node.clone(), parts.clone());
    // Whole, whether whoever asked still waits or not: what it marks and keeps is given up only by the copy that it begins.
    let begun = crate::trace::spawn(async move { begin_now(&node, &parts, order).await });
    begun.await.unwrap_or_else(|e| Err(ApiError::new(Problem::Failed, format!("a copy's beginning broke off: {e}"))))
}

async fn begin_now(node: &Arc<Node>, parts: &Arc<Parts>, order: ImageOrder) -> Result<ImageCopy, ApiError> {
    let _alone = node.images().beginning.lock().await;
    let ImageOrder { volume, copy, .. } = order;
    if let Ok(known) = job(node, volume) {
        let shown = known.shown.borrow().clone();
        if shown.copy.key == copy.key {
            return Ok(shown);
        }
        if known.is_under_way() {
            let what = if shown.copy.what == Direction::Import { "imported" } else { "exported" };
            return Err(
                conflict(format!("the volume is being {what}")).remedy("wait for that, or end it with --cancel")
            );
        }
    }
    let disk = parts.disks().into_iter().find(|disk| disk.id == volume);
    let disk = disk.ok_or_else(|| {
        ApiError::new(Problem::NotFound, format!("`{}` has no volume {} on {}", parts.name, volume.0, node.name()))
    })?;
    if disk.is_shadow() {
        return Err(conflict(format!("`{}` is not all here yet: it follows its VM", disk.name))
            .remedy("wait until the fill has ended: `godwit vm show` says how much is absent"));
    }
    let path = node.config().images.join(&copy.path);
    let shown = |format: String| ImageCopy {
        copy: copy.clone(),
        host: node.config().name.clone(),
        format,
        done: 0.0,
        size: disk.size(),
        began_unix_ms: crate::tracker::unix_ms(),
        state: ImageState::Copying,
        error: None,
    };
    let (work, format) = match copy.what {
        Direction::Import => begin_import(parts, &disk, &copy, path).await?,
        Direction::Export => begin_export(parts, &disk, &copy, path).await?,
    };
    let job = Arc::new(Job { shown: watch::Sender::new(shown(format)), over: CancellationToken::new() });
    lock(&node.images().jobs).insert(volume, job.clone());
    let begun = job.shown.borrow().clone();
    tracing::info!(vm = parts.name, volume = disk.name, ?copy, "an image is copied");
    tokio::spawn(carry_out(parts.clone(), disk, job, work));
    Ok(begun)
}

/// What is to be done.
#[derive(Debug)]
enum Work {
    Import { from: PathBuf, format: String, owner: Owner, was_frozen: bool },
    Export { to: PathBuf, format: String, snapshot: Arc<Snapshot>, overwrite: bool },
}

async fn begin_import(
    parts: &Arc<Parts>,
    disk: &Arc<Disk>,
    copy: &CopyImage,
    from: PathBuf,
) -> Result<(Work, String), ApiError> {
    let image = look(&from, copy.format.as_deref()).await.map_err(|e| {
        ApiError::new(Problem::Invalid, format!("{e:#}"))
            .remedy("name a file at the volume's host that `qemu-img info` reads there")
    })?;
    if image.size > disk.size() {
        let message = format!("{} holds {}, and `{}` has {}", from.display(), image.size, disk.name, disk.size());
        return Err(ApiError::new(Problem::Invalid, message).remedy("import it into a volume that is large enough"));
    }
    // Half of an earlier one is nobody's contents.
    if !copy.overwrite && parts.file().importing != Some(disk.id) {
        let written = disk.clone().blocking(|disk| disk.replica().stamp_runs()).await;
        if !written.map_err(|e| ApiError::new(Problem::Failed, e.to_string()))?.is_empty() {
            return Err(conflict(format!("`{}` was written to", disk.name))
                .remedy("say --overwrite if what it holds may be lost"));
        }
    }
    if disk.replica().is_detached() && !copy.overwrite && parts.file().importing != Some(disk.id) {
        return Err(conflict(format!("nobody knows what `{}` holds before its VM was started here", disk.name))
            .remedy("say --overwrite if what it holds may be lost"));
    }
    let was_frozen = disk.replica().is_frozen();
    let owner = parts.keeper().ask(|reply| Input::Import { volume: disk.id, reply }).await?;
    Ok((Work::Import { from, format: image.format.clone(), owner, was_frozen }, image.format))
}

async fn begin_export(
    parts: &Parts,
    disk: &Arc<Disk>,
    copy: &CopyImage,
    to: PathBuf,
) -> Result<(Work, String), ApiError> {
    may_export(parts, disk)?;
    if to.is_dir() || to.file_name().is_none() {
        return Err(
            ApiError::new(Problem::Invalid, format!("{} is a folder", to.display())).remedy("name a file in it")
        );
    }
    if !copy.overwrite && to.symlink_metadata().is_ok() {
        return Err(conflict(format!("{} exists", to.display())).remedy("say --overwrite if it may be replaced"));
    }
    // It waits for the guest's writes that are under way.
    let begun = disk.clone().blocking(|disk| disk.begin_snapshot()).await;
    let snapshot = begun.map_err(|e| ApiError::new(Problem::Failed, e.to_string()))?;
    let format = copy.format.clone().unwrap_or_else(|| FORMAT.into());
    Ok((Work::Export { to, format: format.clone(), snapshot, overwrite: copy.overwrite }, format))
}

/// Whether what is here is the volume.
fn may_export(parts: &Parts, disk: &Disk) -> Result<(), ApiError> {
    // Until it is granted elsewhere it is this host's, and nobody else writes to it.
    let ours = matches!(parts.view().ownership, Ownership::Here | Ownership::Pausing) && disk.replica().is_primary();
    if !ours {
        return Err(
            conflict(format!("`{}` is another host's now", disk.name)).remedy("ask again when its move has ended")
        );
    }
    if parts.file().importing == Some(disk.id) {
        return Err(
            conflict(format!("`{}` holds half an image", disk.name)).remedy("wait for its import, or import again")
        );
    }
    Ok(())
}

async fn carry_out(parts: Arc<Parts>, disk: Arc<Disk>, job: Arc<Job>, work: Work) {
    let imports = matches!(work, Work::Import { .. });
    let result = match work {
        Work::Import { from, format, owner, was_frozen } => {
            let result = import(&parts, &disk, &job, &from, &format, owner).await;
            // Before the VM may be started: it would lose its disk.
            if was_frozen {
                let _ = disk.freeze().await;
            }
            result.and_then(|()| {
                parts.change(|file| file.importing = None).context("cannot write down that the volume is whole")
            })
        }
        Work::Export { to, format, snapshot, overwrite } => {
            let result = export(&parts, &disk, &job, &to, &format, &snapshot, overwrite).await;
            // It says more than qemu-img, which only saw an error.
            let broken = snapshot.broken().map(str::to_owned);
            disk.end_snapshot("the export has ended");
            match broken {
                Some(why) if result.is_err() => Err(anyhow!("the export broke off: {why}")),
                _ => result,
            }
        }
    };
    if imports {
        parts.importing.store(false, Ordering::Relaxed);
    }
    let result = if job.over.is_cancelled() { result.map_err(|_| anyhow!("ended, as somebody asked")) } else { result };
    match &result {
        Ok(()) => tracing::info!(vm = parts.name, volume = disk.name, "the image is copied"),
        Err(error) => {
            tracing::warn!(vm = parts.name, volume = disk.name, error = format!("{error:#}"), "the image is not copied")
        }
    }
    job.shown.send_modify(|copy| match result {
        Ok(()) => (copy.done, copy.state) = (1.0, ImageState::Done),
        Err(error) => (copy.state, copy.error) = (ImageState::Failed, Some(failed(&error))),
    });
}

async fn import(
    parts: &Arc<Parts>,
    disk: &Arc<Disk>,
    job: &Job,
    from: &Path,
    format: &str,
    owner: Owner,
) -> Result<()> {
    disk.open(owner.lineage, owner.generation).await?;
    let over = job.over.clone();
    let zeroed = disk.clone().blocking(move |disk| {
        for (run, _) in disk.replica().stamp_runs()? {
            let (mut at, end) = (run.start * godwit_volume::BLOCK, run.end * godwit_volume::BLOCK);
            while at < end && !over.is_cancelled() {
                let length = (end - at).min(ZEROED_AT_ONCE);
                disk.put(at, length, None)?;
                at += length;
            }
        }
        Ok::<_, VolumeError>(())
    });
    zeroed.await.context("cannot empty the volume")?;
    reach_async(Point::Import, parts.id).await;
    fill(parts, disk, from, format, &job.over, |done| job.done(done)).await?;
    disk.clone().blocking(|disk| disk.replica().commit()).await.context("cannot make the volume durable")
}

/// Copies an image into a disk that is open, and reads as zeroes.
async fn fill(
    parts: &Parts,
    disk: &Arc<Disk>,
    from: &Path,
    format: &str,
    over: &CancellationToken,
    done: impl Fn(f64),
) -> Result<()> {
    let backend = Arc::new(Served { disk: disk.clone(), how: How::Filled });
    with_socket(parts, disk, backend, |uri| {
        let words = ["convert", "-p", "-n", "-W", "--target-is-zero", "-f", format, "-O", "raw"].map(OsString::from);
        qemu_img([&words[..], &[from.into(), uri.into()]].concat(), over, done)
    })
    .await
}

/// Copies an image into a disk that is new and open, of a VM that is being made: nothing says that it is there before it is whole.
///
/// # Errors
/// When it is no image, or larger than the volume, or a medium fails.
pub async fn fill_new(parts: &Parts, disk: &Arc<Disk>, from: &Path) -> Result<()> {
    let image = look(from, None).await?;
    if image.size > disk.size() {
        bail!("{} holds {}, and the volume `{}` {}", from.display(), image.size, disk.name, disk.size());
    }
    let kind = tokio::fs::metadata(from).await.with_context(|| format!("cannot look at {}", from.display()))?;
    if image.format == "raw" && kind.is_file() {
        // Nothing to be translated, and its length is the file's, which a device has none of: no detour.
        let (disk, from) = (disk.clone(), from.to_owned());
        return disk.blocking(move |disk| disk.import(&from)).await;
    }
    fill(parts, disk, from, &image.format, &CancellationToken::new(), |_| {}).await?;
    Ok(disk.clone().blocking(|disk| disk.replica().commit()).await?)
}

async fn export(
    parts: &Arc<Parts>,
    disk: &Arc<Disk>,
    job: &Job,
    to: &Path,
    format: &str,
    snapshot: &Arc<Snapshot>,
    overwrite: bool,
) -> Result<()> {
    let file = Nameless::beside(to)?;
    reach_async(Point::Export, parts.id).await;
    let backend = Arc::new(Served { disk: disk.clone(), how: How::Kept(snapshot.clone()) });
    with_socket(parts, disk, backend, |uri| {
        let words = ["convert", "-p", "-f", "raw", "-O", format].map(OsString::from);
        qemu_img([&words[..], &[uri.into(), file.path()]].concat(), &job.over, |done| job.done(done))
    })
    .await?;
    let to = to.to_owned();
    tokio::task::spawn_blocking(move || file.name(&to, overwrite)).await.context("naming the image ended in a bug")?
}

/// Serves a disk for as long as `what` takes.
async fn with_socket<F: Future<Output = Result<()>>>(
    parts: &Parts,
    disk: &Disk,
    backend: Arc<Served>,
    what: impl FnOnce(String) -> F,
) -> Result<()> {
    let socket = parts.run.join(format!("image{}.sock", disk.id.0));
    let listener = Listener::unix(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    let stop = Stop::new()?;
    let told = stop.clone();
    // Also where this is not waited for any more: a runtime does not end before its threads do.
    let stop = StopAtLast(stop);
    let serving = tokio::task::spawn_blocking(move || {
        let backend: Arc<dyn Backend> = backend;
        serve_all(&listener, &backend, None, &told)
    });
    let done = what(format!("nbd+unix:///?socket={}", escaped(&socket))).await;
    drop(stop);
    let served = serving.await.context("serving the volume ended in a bug")?;
    done.and_then(|()| Ok(served?))
}

/// Tells a server to stop when it is dropped.
struct StopAtLast(Stop);

impl Drop for StopAtLast {
    fn drop(&mut self) {
        self.0.now();
    }
}

/// A path as a URI has it.
fn escaped(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let escape = |byte: &u8| if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") };
    path.as_os_str().as_bytes().iter().map(escape).collect()
}

/// A file that has no name before it is whole.
#[derive(Debug)]
struct Nameless {
    file: std::fs::File,
    /// Where the file system knows no files without names: a name that nobody uses.
    part: Option<PathBuf>,
}

impl Nameless {
    fn beside(to: &Path) -> Result<Self> {
        let folder = to.parent().context("there is no such folder")?;
        match rustix::fs::open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Self { file: file.into(), part: None }),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL) => {
                let part =
                    folder.join(format!(".{}.godwit-part", to.file_name().unwrap_or_default().to_string_lossy()));
                let _ = std::fs::remove_file(&part);
                let file =
                    std::fs::File::create_new(&part).with_context(|| format!("cannot make {}", part.display()))?;
                Ok(Self { file, part: Some(part) })
            }
            Err(e) => Err(e).with_context(|| format!("cannot make a file in {}", folder.display())),
        }
    }

    /// For a child of this process.
    fn path(&self) -> OsString {
        match &self.part {
            Some(part) => part.into(),
            None => format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into(),
        }
    }

    /// Makes it durable, and gives it its name.
    fn name(&self, to: &Path, overwrite: bool) -> Result<()> {
        let cannot = || format!("cannot make {}", to.display());
        self.file.sync_all().with_context(cannot)?;
        let folder = to.parent().unwrap_or(Path::new("/"));
        let aside = folder.join(format!(".{}.godwit-new", to.file_name().unwrap_or_default().to_string_lossy()));
        let link = |at: &Path| {
            let from = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, from.as_str(), CWD, at, AtFlags::SYMLINK_FOLLOW)
        };
        match (&self.part, overwrite) {
            (Some(part), true) => std::fs::rename(part, to).with_context(cannot)?,
            (Some(part), false) => std::fs::hard_link(part, to).with_context(cannot)?,
            (None, false) => link(to).with_context(cannot)?,
            (None, true) => {
                let _ = std::fs::remove_file(&aside);
                link(&aside).with_context(cannot)?;
                std::fs::rename(&aside, to).with_context(cannot)?;
            }
        }
        std::fs::File::open(folder)?.sync_all().with_context(cannot)
    }
}

impl Drop for Nameless {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            let _ = std::fs::remove_file(part);
        }
    }
}

/// What an image is.
#[derive(Debug)]
struct Image {
    format: String,
    size: Amount,
}

/// Looks at an image: its format, its size, and whether all of it is in this file.
async fn look(path: &Path, format: Option<&str>) -> Result<Image> {
    let mut command = tokio::process::Command::new("qemu-img");
    command.args(["info", "--output=json"]).args(format.iter().flat_map(|format| ["-f", format])).arg(path);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(LOOKING, output).await.context("qemu-img does not end")?;
    let output = output.context("cannot run qemu-img, which comes with the Debian package qemu-utils")?;
    if !output.status.success() {
        bail!("{}", said(&output.stderr));
    }
    let info: Value = serde_json::from_slice(&output.stdout).context("qemu-img says what is no JSON")?;
    if let Some(other) = leads_to(&info, path) {
        bail!(
            "{} is no whole image: it leads to {other}, which would be read with the node's rights; make one that is whole with `qemu-img convert`",
            path.display()
        );
    }
    let format = info["format"].as_str().context("qemu-img does not say what it is")?.to_owned();
    let size = info["virtual-size"].as_u64().context("qemu-img does not say how large it is")?;
    Ok(Image { format, size: Amount(size) })
}

/// Another file that an image leads to, as qemu-img describes it.
fn leads_to(info: &Value, own: &Path) -> Option<String> {
    const KEYS: [&str; 5] = ["filename", "backing-filename", "full-backing-filename", "data-file", "data-file-raw"];
    match info {
        Value::Object(members) => members.iter().find_map(|(key, value)| match value.as_str() {
            Some(file) if KEYS.contains(&key.as_str()) && OsStr::new(file) != own.as_os_str() => Some(file.to_owned()),
            _ => leads_to(value, own),
        }),
        Value::Array(values) => values.iter().find_map(|value| leads_to(value, own)),
        _ => None,
    }
}

fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    text.trim().strip_prefix("qemu-img: ").unwrap_or(text.trim()).to_owned()
}

/// Runs qemu-img, and shows how far it is.
async fn qemu_img(words: Vec<OsString>, over: &CancellationToken, done: impl Fn(f64)) -> Result<()> {
    let mut command = tokio::process::Command::new("qemu-img");
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().context("cannot run qemu-img, which comes with the Debian package qemu-utils")?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let progress = async {
        let Some(out) = out else { return };
        let (mut out, mut piece) = (BufReader::new(out), vec![]);
        // `    (12.34/100%)` and a carriage return.
        while matches!(out.read_until(b'\r', &mut piece).await, Ok(n) if n > 0) {
            let text = String::from_utf8_lossy(&piece);
            let number =
                text.split('(').next_back().and_then(|rest| rest.split('/').next()?.trim().parse::<f64>().ok());
            if let Some(percent) = number {
                done((percent / 100.0).clamp(0.0, 1.0));
            }
            piece.clear();
        }
    };
    let complaint = async {
        let mut text = vec![];
        if let Some(err) = err {
            let _ = err.take(MOST_SAID).read_to_end(&mut text).await;
        }
        text
    };
    let run = async { tokio::join!(child.wait(), progress, complaint) };
    tokio::select! {
        // Its drop ends qemu-img.
        () = over.cancelled() => bail!("ended"),
        (status, (), complaint) = run => {
            if status.context("qemu-img cannot be waited for")?.success() { Ok(()) } else { bail!("qemu-img: {}", said(&complaint)) }
        }
    }
}

/// The volume, as qemu-img sees it.
#[derive(Debug)]
struct Served {
    disk: Arc<Disk>,
    how: How,
}

#[derive(Debug)]
enum How {
    /// It is written.
    Filled,
    /// It is read as it was.
    Kept(Arc<Snapshot>),
}

impl Served {
    fn do_it(&self, command: Command) -> Result<Reply, VolumeError> {
        let replica = self.disk.replica();
        let durable = |fua: bool| {
            if fua {
                replica.flush()?;
            }
            Ok(Reply::Done)
        };
        match (command, &self.how) {
            (Command::Read { offset, length }, How::Kept(snapshot)) => {
                let mut bytes = vec![0; length as usize];
                snapshot.read(offset, &mut bytes, replica)?;
                Ok(Reply::Data(vec![Piece::Data(bytes.into())]))
            }
            (Command::Read { offset, length }, How::Filled) => {
                let mut bytes = vec![0; length as usize];
                replica.read(offset, &mut bytes)?;
                Ok(Reply::Data(vec![Piece::Data(bytes.into())]))
            }
            (Command::BlockStatus { offset, length, .. }, how) => {
                let found = match how {
                    How::Kept(snapshot) => snapshot.extents(offset, u64::from(length), replica)?,
                    How::Filled => replica.extents(offset, u64::from(length))?,
                };
                let extent = |(length, hole)| Extent { length: u32::try_from(length).unwrap_or(u32::MAX), hole };
                Ok(Reply::Status(found.into_iter().map(extent).collect()))
            }
            (Command::Flush | Command::Cache { .. }, How::Kept(_)) | (Command::Cache { .. }, How::Filled) => {
                Ok(Reply::Done)
            }
            (Command::Flush, How::Filled) => durable(true),
            (Command::Write { offset, data, fua }, How::Filled) => {
                self.disk.put(offset, data.len() as u64, Some(data))?;
                durable(fua)
            }
            (Command::Trim { offset, length, fua } | Command::WriteZeroes { offset, length, fua, .. }, How::Filled) => {
                self.disk.put(offset, u64::from(length), None)?;
                durable(fua)
            }
            (Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. }, How::Kept(_)) => {
                Ok(Reply::Error(Errno::Perm))
            }
        }
    }
}

impl Backend for Served {
    fn export(&self) -> Export {
        let read_only = matches!(self.how, How::Kept(_));
        Export { name: String::new(), size: self.disk.size().0, preferred_block: 4096, read_only }
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> usize {
        0
    }

    fn warm(&self, _: u64, _: u64) {}

    fn perform(&self, _: Cookie, command: Command, _: &Answers) -> Option<Reply> {
        Some(self.do_it(command).unwrap_or_else(|error| {
            tracing::warn!(volume = self.disk.name, %error, "a request of qemu-img failed");
            Reply::Error(match error {
                VolumeError::Io { source, .. } => Errno::of(&source),
                VolumeError::Range(_) => Errno::Invalid,
                _ => Errno::Io,
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_leads_to_another_file_is_found() {
        let own = Path::new("/images/a.qcow2");
        let info = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let whole = info(r#"{"filename": "/images/a.qcow2", "format-specific": {"data": {"compat": "1.1"}}}"#);
        assert_eq!(leads_to(&whole, own), None);
        for other in [
            r#"{"filename": "/images/a.qcow2", "backing-filename": "/etc/shadow"}"#,
            r#"{"filename": "/images/a.qcow2", "format-specific": {"data": {"data-file": "/etc/shadow"}}}"#,
            r#"{"filename": "/images/a.qcow2", "format-specific": {"data": {"extents": [{"filename": "/etc/shadow"}]}}}"#,
        ] {
            assert_eq!(leads_to(&info(other), own), Some("/etc/shadow".into()), "{other}");
        }
    }

    #[test]
    fn a_file_has_its_name_only_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("image");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let file = Nameless::beside(&to).unwrap();
        std::fs::write(file.path(), b"one").unwrap();
        assert!(file.part.is_some() || names() == 0, "nothing is left of one that is cut off");
        drop(file);
        assert_eq!(names(), 0);
        let file = Nameless::beside(&to).unwrap();
        std::fs::write(file.path(), b"two").unwrap();
        file.name(&to, false).unwrap();
        let again = Nameless::beside(&to).unwrap();
        std::fs::write(again.path(), b"three").unwrap();
        assert!(again.name(&to, false).is_err(), "it came meanwhile");
        assert_eq!(std::fs::read(&to).unwrap(), b"two");
        again.name(&to, true).unwrap();
        drop((file, again));
        assert_eq!((std::fs::read(&to).unwrap(), names()), (b"three".to_vec(), 1));
    }

    #[test]
    fn a_path_in_a_uri_keeps_its_bytes() {
        assert_eq!(escaped(Path::new("/run/a b%?&/x.sock")), "/run/a%20b%25%3F%26/x.sock");
    }
}
