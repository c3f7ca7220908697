//! A VM's disk on this host: a replica, an NBD export for QEMU, and the mirror of a move.
//!
//! The guest's writes are made one after the other under one lock, together with what the mirror has to know of them: so each
//! block that travels is whole, and two writes that overlap reach both sides in the same order. Answers do not wait under
//! the lock: a mirrored write goes to the target at once, and is answered while that is not far behind, or when it has waited long enough.
//!
//! A frozen replica takes no writes, and none is refused either: a guest that ran on while its node was started again, or
//! that its QEMU resumed by itself, would see its disk fail. Its writes wait until the disk is open again, or until the QEMU
//! that made them is gone: whoever ends or loses a QEMU calls [`Disk::hang_up`], so that no write of a dead one is made later.

use crate::disk_index::Touched;
use crate::leaving::Leaving;
use crate::libraries::Shelf;
use crate::pace::Paced;
use crate::parts::lock;
use crate::path::Carries;
use crate::snapshot::Snapshot;
use crate::tracker::unix_ms;
use anyhow::{Context, Result, anyhow, bail};
use bytes::{Bytes, BytesMut};
use godwit_api::progress::DiskProgress;
use godwit_api::{ApiError, Problem};
use godwit_export::{Answers, Backend, Put, Untaken, Wire};
use godwit_handoff::{Generation, Lineage, Ticket};
use godwit_link::{Priority, RecvHalf, SendHalf, Stream};
use godwit_nbd::{Command, Cookie, Errno, Export, Extent, Piece, Reply};
use godwit_units::{BitRate, BlockIndex, Bytes as Amount, RadosPool, VolumeId};
use godwit_volume::epoch::{Recorder, Subscriber};
use godwit_volume::fetch::Requester;
use godwit_volume::mirror::{self, Place};
use godwit_volume::order::FirstAccess;
use godwit_volume::scrub::Mend;
use godwit_volume::{
    BLOCK, Has, Holder, LINGERING, Library, Moment, Packer, Replica, Unpacker, VolumeError, Written, fet, give_way,
};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Between two looks at the clock of a mirror: how much later than its patience a write may be let go.
const TICK: Duration = Duration::from_millis(100);
/// Between two settlings of hot regions, where a guest writes.
const SETTLE: Duration = Duration::from_secs(5);
/// The same, where the disk comes in or leaves: what is not settled travels again if the node dies.
const SETTLE_INCOMING: Duration = Duration::from_secs(1);
/// The most that a read takes at once without giving others their turn.
const READ_PIECE: usize = 32 << 20;
/// Bytes that are packed before they are sent: some round trips of a fast link would be too late, a message too little.
const MOST_PACKED: usize = 256 << 10;
/// How long the source may take to close a mirror that is complete.
const CLOSING: Duration = Duration::from_secs(60);
/// Messages that are applied at once: what answers may lag behind.
const MOST_AT_ONCE: usize = 64;
/// The same in bytes, but for the last of them: a few bytes of the wire may stand for large ones.
const MOST_BYTES_AT_ONCE: usize = 1 << 20;
/// How often it is tried to have the locks of several disks at once before that is put off.
const TRIES: usize = 256;
/// What is read from the link at once, where so much has come, bytes.
const READ_AT_ONCE: usize = 128 << 10;

/// One disk.
#[derive(Debug)]
pub struct Disk {
    /// The volume.
    pub id: VolumeId,
    /// Its name, for people.
    pub name: String,
    /// QEMU connects here.
    pub socket: PathBuf,
    pub(crate) replica: Replica,
    pub(crate) order: Mutex<Option<Outgoing>>,
    /// How often something began to go from here; [`Outgoing::attempt`].
    attempts: AtomicU64,
    /// Brings what is not here; none where all is, where the disk is frozen, and before [`crate::fill`] has begun.
    pub(crate) fetch: Mutex<Option<Requester>>,
    /// The fill has something to ask for.
    pub(crate) hungry: Notify,
    /// Whether a task of [`crate::fill`] looks after this disk.
    pub(crate) filling: Mutex<bool>,
    /// Why a holder's session ended, since an answer came.
    pub(crate) trouble: Mutex<Option<String>>,
    /// In which order the guest came to its blocks.
    accesses: Mutex<FirstAccess>,
    /// Whether that has in it what was recorded before the volume was this host's: on shared storage it lies with the volume.
    inherits: AtomicBool,
    /// What pre-caches have to know of the guest's writes.
    recorder: Recorder,
    /// Told of the guest's writes while a move's memory refers to blocks.
    touched: Mutex<Option<Arc<Touched>>>,
    /// Held while an epoch ends: one that ends meanwhile is not durable by this one's sync.
    rolling: Mutex<()>,
    /// Something changed that a mirror or a waiting write may wait for.
    pub(crate) changed: watch::Sender<u64>,
    /// See [`Disk::leaves`].
    left: Mutex<Left>,
    /// The mirror's task has something to send.
    work: Notify,
    pub(crate) began: Instant,
    /// The attempt whose blocks are all here.
    complete: Mutex<Option<Ticket>>,
    receiving: Mutex<Option<Ticket>>,
    /// What need not come, because volumes of the same trust domain have it here.
    library: OnceLock<Shelf>,
    /// Since when the other side has been behind, as far as somebody looked.
    behind: Mutex<Option<Instant>>,
    failing: AtomicBool,
    /// What keeps what the guest overwrites while the volume is exported as it was.
    snapshot: Mutex<Option<Arc<Snapshot>>>,
    /// Ends the clients of the export that are there now.
    clients: Mutex<CancellationToken>,
    serving: CancellationToken,
    _guard: DropGuard,
}

/// The disk's part of a move from here.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Which of this disk's: what the other side of an earlier one said, and is still being worked off, is none of its business.
    attempt: u64,
    pub(crate) machine: Leaving,
    /// To the link, in order. Bounded by the mirror's window, by how far the target may be behind, and by what a guest may have under way.
    out: mpsc::UnboundedSender<Vec<u8>>,
}

/// How what leaves stands: see [`Leaving`].
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    figures: DiskProgress,
    may_stop: bool,
    acknowledged: u64,
    owes: u64,
}

impl Left {
    fn of(machine: &Leaving) -> Self {
        let (figures, may_stop) = (machine.progress(), machine.may_stop());
        Self { figures, may_stop, acknowledged: machine.acknowledged(), owes: machine.owes() }
    }

    /// Nothing leaves any more; what did ended with these figures.
    fn over(figures: DiskProgress) -> Self {
        Self { figures, may_stop: true, ..Self::default() }
    }
}

/// What a lock guards, if nobody holds it.
fn glimpse<T>(mutex: &Mutex<T>) -> Option<std::sync::MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}

impl Disk {
    /// Opens the replica in `folder`, or makes it, with its blocks there or in `pool`, and serves it at `socket`.
    ///
    /// # Errors
    /// When the replica or the socket cannot be had.
    pub fn open_or_create(
        folder: &Path,
        pool: Option<&RadosPool>,
        socket: PathBuf,
        id: VolumeId,
        name: &str,
        size: Amount,
    ) -> Result<Arc<Self>> {
        if let Some(pool) = pool.filter(|_| !Replica::exists(folder)) {
            Replica::create_in_pool(folder, pool, id, size)?;
        }
        let replica = if Replica::exists(folder) {
            let (replica, opened) = Replica::open(folder)?;
            if opened.doubted > 0 {
                tracing::warn!(
                    volume = name,
                    blocks = opened.doubted,
                    "the replica was not closed; its last writes travel again"
                );
            }
            replica
        } else {
            Replica::create(folder, id, size)?
        };
        if replica.size() != size {
            bail!("the replica of `{name}` here has {}, the volume {size}", replica.size());
        }
        Self::over(replica, folder, socket, id, name)
    }

    /// Serves a volume of shared storage at `socket`, detached until it is opened.
    ///
    /// # Errors
    /// When the socket, or this host's own folder for it, cannot be had.
    pub fn open_shared(
        place: &Path,
        folder: &Path,
        socket: PathBuf,
        id: VolumeId,
        name: &str,
        size: Amount,
        who: &str,
    ) -> Result<Arc<Self>> {
        if Replica::exists(folder) {
            bail!("there is a replica of `{name}` at {}, besides the shared volume", folder.display());
        }
        std::os::unix::fs::DirBuilderExt::mode(std::fs::DirBuilder::new().recursive(true), 0o700).create(folder)?;
        Self::over(Replica::shared(place, folder, id, size, who)?, folder, socket, id, name)
    }

    fn over(replica: Replica, folder: &Path, socket: PathBuf, id: VolumeId, name: &str) -> Result<Arc<Self>> {
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        let token = CancellationToken::new();
        let disk = Arc::new(Self {
            id,
            name: name.to_owned(),
            socket,
            accesses: Mutex::new(FirstAccess::load(folder)),
            inherits: AtomicBool::new(replica.shared_place().is_some()),
            replica,
            order: Mutex::new(None),
            attempts: AtomicU64::new(0),
            fetch: Mutex::default(),
            hungry: Notify::new(),
            filling: Mutex::default(),
            trouble: Mutex::default(),
            recorder: Recorder::new(),
            touched: Mutex::default(),
            rolling: Mutex::new(()),
            changed: watch::channel(0).0,
            left: Mutex::new(Left::over(DiskProgress::default())),
            work: Notify::new(),
            began: Instant::now(),
            complete: Mutex::default(),
            receiving: Mutex::default(),
            library: OnceLock::new(),
            behind: Mutex::default(),
            failing: AtomicBool::new(false),
            snapshot: Mutex::default(),
            clients: Mutex::new(token.child_token()),
            serving: token.clone(),
            _guard: token.clone().drop_guard(),
        });
        let weak = Arc::downgrade(&disk);
        tokio::spawn(async move {
            let mut settle = tokio::time::interval(SETTLE_INCOMING);
            let settled = Arc::new(tokio::sync::Mutex::new(Instant::now()));
            loop {
                tokio::select! {
                    () = token.cancelled() => return,
                    _ = settle.tick() => {
                        let Some(disk) = weak.upgrade() else { return };
                        // Where storage stands the last one has not ended, and one thread waits for it, not one more each second.
                        let Ok(mut settled) = settled.clone().try_lock_owned() else { continue };
                        // Its locks are held by whoever writes, for as long as that takes: they are waited for where nobody else has to.
                        tokio::task::spawn_blocking(move || {
                            let leaving = lock(&disk.order).is_some();
                            if settled.elapsed() >= SETTLE || leaving || disk.is_receiving() || disk.replica.is_shadow() {
                                *settled = Instant::now();
                                // What lingers is doubted if this node dies, and would travel again in the next try.
                                disk.settle(if leaving { 1 } else { LINGERING });
                            }
                        });
                    }
                    client = listener.accept() => {
                        let Some(disk) = weak.upgrade() else { continue };
                        let client = match client {
                            Ok((client, _)) => client,
                            Err(error) => {
                                // Files are short, as a rule; the client waits at the socket, and would be found at once again.
                                tracing::warn!(volume = disk.name, %error, "a client of the export cannot be accepted");
                                tokio::time::sleep(TICK).await;
                                continue;
                            }
                        };
                        let over = lock(&disk.clients).child_token();
                        tokio::spawn(serve(disk, client, over));
                    }
                }
            }
        });
        Ok(disk)
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> Amount {
        self.replica.size()
    }

    /// What it takes up.
    #[must_use]
    pub fn allocated(&self) -> Amount {
        self.replica.allocated()
    }

    fn settle(&self, lingering: u32) {
        if let Err(error) = self.replica.settle_after(lingering)
            && !self.failing.swap(true, Ordering::Relaxed)
        {
            tracing::error!(volume = self.name, %error, "the replica cannot be made durable");
        }
        self.store_order();
    }

    /// Where the order of first accesses is kept, if anybody here may write there now.
    fn place_of_order(&self) -> Option<&Path> {
        match self.replica.shared_place() {
            Some(_) if self.replica.is_detached() => None,
            Some(place) => Some(place),
            None => Some(self.replica.folder()),
        }
    }

    /// Puts what was recorded of a shared volume elsewhere before what is recorded here. Reads a file of up to a mebibyte, once for each time that
    /// the volume is this host's.
    fn inherit_order(&self) {
        let Some(place) = self.place_of_order() else {
            // Another host records what comes next.
            self.inherits.store(true, Ordering::Release);
            return;
        };
        if !self.inherits.load(Ordering::Acquire) {
            return;
        }
        let before = FirstAccess::load(place);
        let mut mine = lock(&self.accesses);
        if self.inherits.swap(false, Ordering::AcqRel) {
            *mine = std::mem::take(&mut *mine).after(before);
        }
    }

    fn store_order(&self) {
        self.inherit_order();
        let Some(place) = self.place_of_order() else { return };
        let fresh = lock(&self.accesses).take_fresh();
        if let Some(Err(error)) = fresh.map(|fresh| fresh.store(place)) {
            // A hint: what is lost costs time.
            tracing::debug!(volume = self.name, %error, "the order of first accesses is not stored");
        }
    }

    /// Copies a raw file in, before the guest's first write.
    ///
    /// # Errors
    /// When it is larger than the volume, or cannot be read.
    pub fn import(&self, from: &Path) -> Result<()> {
        use rustix::fs::{SeekFrom, seek};
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
        let length = file.metadata()?.len();
        if length > self.replica.size().0 {
            bail!("{} has {length} bytes, the volume `{}` {}", from.display(), self.name, self.replica.size().0);
        }
        let mut at = 0;
        let mut buffer = vec![0; 1 << 20];
        while at < length {
            let data = match seek(&file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(rustix::io::Errno::NXIO) => break,
                Err(e) => return Err(e).context("cannot find the file's data"),
            };
            let end = seek(&file, SeekFrom::Hole(data))?;
            at = data / 4096 * 4096;
            while at < end {
                let n = usize::try_from((end - at).min(buffer.len() as u64))?;
                file.read_exact_at(&mut buffer[..n], at)?;
                self.replica.write(at, &buffer[..n])?;
                at += n as u64;
            }
        }
        Ok(self.replica.commit()?)
    }

    /// Takes the guest's writes from now on, as this owner's; those that wait are made.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn open(self: &Arc<Self>, lineage: Lineage, generation: Generation) -> Result<(), VolumeError> {
        let opened = move |disk: &Self| {
            disk.replica.attach(lineage, generation)?;
            disk.replica.become_primary(lineage, generation)
        };
        self.clone().blocking(opened).await?;
        self.tell();
        Ok(())
    }

    /// Lets go of the export's clients: their QEMU is gone, or is about to be. Writes of theirs that wait are never made.
    pub fn hang_up(&self) {
        std::mem::replace(&mut *lock(&self.clients), self.serving.child_token()).cancel();
        // Whoever is making a write now has made it when this returns.
        drop(lock(&self.order));
    }

    /// Ends it with its node: nobody is served any more, and its replica is closed. What a client has not heard of it asks the next process for;
    /// what it asks for meanwhile waits, and is never made here. Takes as long as the storage does.
    ///
    /// # Errors
    /// When the replica cannot be closed: it is found as after a crash.
    pub(crate) fn end(&self) -> Result<(), VolumeError> {
        self.serving.cancel();
        self.hang_up();
        let ended = self.replica.end();
        // A hint, for which nothing waits.
        self.store_order();
        ended
    }

    pub(crate) const fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Tells of the guest's writes from now on.
    pub(crate) fn watch(&self, touched: Arc<Touched>) {
        *lock(&self.touched) = Some(touched);
    }

    /// What the guest writes is not noted there any more; another move's watch stays.
    pub(crate) fn unwatch(&self, touched: &Arc<Touched>) {
        lock(&self.touched).take_if(|now| Arc::ptr_eq(now, touched));
    }

    /// The guest has written these.
    pub(crate) fn touched(&self, blocks: std::ops::Range<u64>) {
        if let Some(touched) = &*lock(&self.touched) {
            touched.add(blocks);
        }
    }

    /// Whether the destination of the move under way may have this block as it is here.
    pub(crate) fn is_there(&self, block: BlockIndex) -> bool {
        lock(&self.order).as_ref().is_none_or(|outgoing| outgoing.machine.is_there(block))
    }

    /// See [`Replica::mend`]; a mirror that reads the block reads it as it was before, or after. Durable when it returns.
    ///
    /// # Errors
    /// Those of [`Replica::mend`].
    pub(crate) fn mend(&self, mend: &Mend<'_>) -> Result<bool, VolumeError> {
        let changed = {
            let _whole = lock(&self.order);
            self.replica.mend(self.id, mend)?
        };
        self.replica.flush()?;
        Ok(changed)
    }

    pub(crate) const fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Another secondary of a pre-cache; none while a mirror runs.
    pub(crate) fn subscribe(&self, image: bool) -> Option<u64> {
        let order = lock(&self.order);
        (order.is_none() && self.replica.is_primary()).then(|| self.recorder.subscribe(image))
    }

    /// Ends the epoch of now if it is time to for some secondary, and makes it durable.
    pub(crate) async fn roll(self: &Arc<Self>) -> Result<(), VolumeError> {
        if !self.recorder.is_due(self.began.elapsed()) {
            return Ok(());
        }
        let roll = |disk: &Self| {
            let _alone = lock(&disk.rolling);
            {
                let _guest = lock(&disk.order);
                let now = disk.began.elapsed();
                if !disk.recorder.is_due(now) {
                    return Ok(());
                }
                disk.recorder.roll(&disk.replica, now, unix_ms())?;
            }
            disk.replica.flush()?;
            disk.recorder.settled();
            Ok(())
        };
        self.clone().blocking(roll).await
    }

    /// Ends the epochs of several volumes in one moment, with no write of the guest's between two of the ends, and makes them durable; each begins to go to its
    /// secondary. Whether it does for all; nothing where the guest writes to some of them all the time. In the order of their numbers, and nobody else holds
    /// the locks of two.
    pub(crate) fn roll_together(
        all: &[(Arc<Self>, Subscriber)],
        moment: Option<Moment>,
    ) -> Result<Option<bool>, VolumeError> {
        let _alone: Vec<_> = all.iter().map(|(disk, _)| lock(&disk.rolling)).collect();
        let (mut begun, mut rolled, mut failed) = (true, vec![], None);
        {
            let Some(_guests) = Self::all_at_once(all) else { return Ok(None) };
            let unix = unix_ms();
            for (disk, id) in all {
                match disk.recorder.roll_with(&disk.replica, disk.began.elapsed(), unix, (*id, moment)) {
                    Ok(one) => {
                        begun &= one;
                        rolled.push(disk);
                    }
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
        }
        // Also where one has failed: the others' epochs may have begun to go to other hosts.
        for disk in rolled {
            match disk.replica.flush() {
                Ok(()) => disk.recorder.settled(),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(Some(begun))
    }

    /// The locks of the guest's writes to all of them. Whoever waits for one holds none: else a write to one disk waited for another's storage.
    fn all_at_once(all: &[(Arc<Self>, Subscriber)]) -> Option<Vec<std::sync::MutexGuard<'_, Option<Outgoing>>>> {
        let mut first = 0;
        for _ in 0..TRIES {
            let mut guests = vec![lock(&all.get(first)?.0.order)];
            let busy = (0..all.len()).filter(|at| *at != first).find(|at| match glimpse(&all[*at].0.order) {
                Some(guard) => {
                    guests.push(guard);
                    false
                }
                None => true,
            });
            match busy {
                None => return Some(guests),
                Some(at) => first = at,
            }
        }
        None
    }

    /// Does something of a pre-cache with the replica, while no attempt of a move begins to receive it.
    pub(crate) fn unless_received<T>(&self, what: impl FnOnce() -> T) -> T {
        let _receiving = lock(&self.receiving);
        what()
    }

    pub(crate) async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        what: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        match tokio::task::spawn_blocking(move || what(&self)).await {
            Ok(done) => done,
            // By the end of the runtime, which this ends with.
            Err(error) if error.is_cancelled() => std::future::pending().await,
            Err(_) => crate::keeping::fatal("disk I/O ended in a bug"),
        }
    }

    /// Lets go of all writes that wait for the other side: the guest is stopping, and must not wait for the WAN.
    pub fn let_go(&self) {
        if let Some(outgoing) = &mut *lock(&self.order) {
            outgoing.machine.let_go();
        }
        self.tell();
    }

    /// Whether it lies on shared storage.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.replica.shared_place().is_some()
    }

    /// Refuses the guest's writes from now on; those that came before are done, and the mirror's last blocks go. What is shared is durable,
    /// and let go of.
    ///
    /// # Errors
    /// What is shared cannot be made durable, and stays here: nobody else may be given it.
    pub async fn freeze(self: &Arc<Self>) -> Result<(), VolumeError> {
        let frozen = self
            .clone()
            .blocking(|disk| {
                let mut order = lock(&disk.order);
                disk.replica.freeze();
                // What it would still bring would come after the last word about what is here.
                lock(&disk.fetch).take();
                if let Some(outgoing) = &mut *order
                    && let Err(error) = outgoing.machine.stop(&disk.replica)
                {
                    tracing::error!(volume = disk.name, %error, "the disk cannot be made durable: it stays here");
                    *order = None;
                }
                if disk.is_shared() {
                    disk.end_snapshot(
                        "the volume lies on shared storage, and is let go of for another host; begin it again there",
                    );
                    disk.recorder.clear();
                }
                // With the guest's lock still held, and none of its writes under way.
                disk.replica.detach()
            })
            .await;
        self.tell();
        frozen
    }

    /// Ends all secondaries of a volume that is another host's from here on: one that began in the meantime would not hear of what is written
    /// there. They begin with [`Disk::subscribe`], which asks under the same lock whose it is.
    fn forget_precaches(&self) {
        let guest = lock(&self.order);
        let over = self.recorder.clear();
        drop(guest);
        drop(over);
    }

    /// The VM is not here any more, or was never: without QEMU. `lost`: it is another host's.
    pub async fn rest(self: &Arc<Self>, lost: bool) {
        self.stop_mirror().await;
        let done = self.clone().blocking(move |disk| {
            if lost {
                let yields = disk.replica.detach().and_then(|()| disk.replica.become_secondary());
                disk.forget_precaches();
                yields
            } else {
                disk.replica.commit()
            }
        });
        if let Err(error) = done.await {
            tracing::error!(volume = self.name, %error, "the replica cannot be made durable");
        }
    }

    pub(crate) fn tell(&self) {
        self.changed.send_modify(|n| *n += 1);
        self.work.notify_one();
    }

    /// How the disk side of a move stands.
    #[must_use]
    pub fn progress(&self) -> DiskProgress {
        let figures = self.leaves().figures;
        let mut behind = lock(&self.behind);
        *behind = if figures.remaining.0 == 0 { None } else { behind.or_else(|| Some(Instant::now())) };
        figures
    }

    /// For how long the other side of the mirror has been behind, as of the last look at [`Disk::progress`].
    #[must_use]
    pub fn behind_for(&self) -> Duration {
        lock(&self.behind).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Begins to mirror; the task ends with the mirror, or when `over` is.
    pub fn start_mirror(
        self: &Arc<Self>,
        stream: Stream,
        over: CancellationToken,
    ) -> tokio::task::JoinHandle<Result<()>> {
        self.leave(self.mirror_from_here(), stream, over)
    }

    /// A mirror's machine, which takes the order of first accesses along.
    fn mirror_from_here(&self) -> Leaving {
        Leaving::Mirror(Box::new(mirror::Source::with_order(lock(&self.accesses).runs())))
    }

    /// Begins to say what the disk holds, to a destination that is to fetch it from `me`, or from whoever has it; otherwise as
    /// [`Disk::start_mirror`].
    pub fn start_telling(
        self: &Arc<Self>,
        me: Holder,
        lineage: Lineage,
        stream: Stream,
        over: CancellationToken,
    ) -> tokio::task::JoinHandle<Result<()>> {
        let source = fet::Source::new(me, lineage, lock(&self.accesses).runs());
        self.leave(Leaving::PostCopy(Box::new(source)), stream, over)
    }

    fn leave(
        self: &Arc<Self>,
        machine: Leaving,
        stream: Stream,
        over: CancellationToken,
    ) -> tokio::task::JoinHandle<Result<()>> {
        let (out, pieces) = mpsc::unbounded_channel();
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        // Its sets are given back when the guest's lock is free again.
        drop({
            let mut order = lock(&self.order);
            // What a mirror passes on and a pre-cache does not agree: only one of them at a time.
            let over = self.recorder.clear();
            *order = Some(Outgoing { attempt, machine, out });
            *lock(&self.left) = Left::default();
            over
        });
        let disk = self.clone();
        crate::trace::spawn(async move {
            let result = tokio::select! {
                result = disk.mirror(attempt, stream, pieces) => result,
                () = over.cancelled() => Ok(()),
            };
            disk.stop_mirror().await;
            result.with_context(|| format!("disk `{}`", disk.name))
        })
    }

    /// Ends mirroring: writes that wait for the other side are answered.
    pub async fn stop_mirror(&self) {
        let ended = lock(&self.order).take();
        if let Some(outgoing) = &ended {
            *lock(&self.left) = Left::over(outgoing.machine.progress());
        }
        let _ = self.progress();
        if let Some(named) = ended.map(|outgoing| outgoing.machine.named()).filter(|named| named.0 > 0) {
            tracing::info!(volume = self.name, %named, "the other side had blocks already, and they went by name");
        }
        self.tell();
    }

    async fn mirror(
        self: &Arc<Self>,
        attempt: u64,
        stream: Stream,
        mut pieces: mpsc::UnboundedReceiver<Vec<u8>>,
    ) -> Result<()> {
        let (mut send, mut receive) = stream.split();
        let session = send.session();
        let sending = async {
            let mut packer = Paced::new()?;
            while let Some(message) = pieces.recv().await {
                let mut wire = vec![];
                packer.push(&message, &mut wire)?;
                while wire.len() < MOST_PACKED
                    && let Ok(message) = pieces.try_recv()
                {
                    packer.push(&message, &mut wire)?;
                }
                packer.flush(&mut wire)?;
                // A guest may come to wait for its writes; nobody waits for a copy, and others' disks share the link.
                let level = lock(&self.left).figures.synchronous;
                send.set_priority(if level { Priority::Mirrored } else { Priority::Bulk });
                send.write(wire.into()).await?;
            }
            anyhow::Ok(())
        };
        let (arrived, mut messages) = mpsc::channel::<Vec<Vec<u8>>>(1);
        let receiving = async move {
            let mut unpacker = Unpacker::new()?;
            while let Some(batch) = several(&mut unpacker, &mut receive, Duration::ZERO).await? {
                if arrived.send(batch).await.is_err() {
                    break;
                }
            }
            // What came before is worked off first; its last word is among it.
            drop(arrived);
            std::future::pending().await
        };
        let driving = async {
            let mut tick = tokio::time::interval(TICK);
            let mut carries = Carries::default();
            let mut stands = Stands::Waits;
            loop {
                let (came, path) = tokio::select! {
                    // What has come is worked off first: the link bounds what waits there.
                    came = messages.recv(), if stands != Stands::Compares =>
                        (came.context("the destination closed the mirror")?, None),
                    () = self.work.notified() => (vec![], None),
                    _ = tick.tick() => (vec![], carries.look(self.began.elapsed(), &session)),
                };
                stands = self.clone().blocking(move |disk| disk.advance(attempt, &came, path)).await?;
                if stands == Stands::Over {
                    return anyhow::Ok(());
                }
            }
        };
        tokio::select! {
            result = sending => result,
            result = receiving => result,
            result = driving => result,
        }
    }

    /// One step of the machine of a move from here. A later attempt's machine is left alone.
    fn advance(&self, attempt: u64, messages: &[Vec<u8>], path: Option<(BitRate, Duration)>) -> Result<Stands> {
        let mut order = lock(&self.order);
        let outgoing = order.as_mut().filter(|outgoing| outgoing.attempt == attempt);
        let Some(outgoing) = outgoing else { return Ok(Stands::Over) };
        let began = Instant::now();
        if let Some((rate, round_trip)) = path {
            outgoing.machine.path_is(rate, round_trip);
        }
        for message in messages {
            outgoing.machine.handle(message, &self.replica)?;
        }
        if outgoing.machine.tick(self.began.elapsed()) {
            tracing::warn!(volume = self.name, "the other side does not answer; copying behind the guest's back");
        }
        let ready = outgoing.machine.poll(&self.replica)?;
        let compares = outgoing.machine.is_comparing();
        let more = !ready.is_empty() || compares;
        for message in ready {
            // The task that sends ends only with the mirror.
            let _ = outgoing.out.send(message);
        }
        let complete = outgoing.machine.is_complete();
        // Whoever finds the lock taken finds these.
        *lock(&self.left) = Left::of(&outgoing.machine);
        drop(order);
        if compares {
            // Another window comes at once.
            give_way(began);
        }
        self.changed.send_modify(|n| *n += 1);
        if more {
            self.work.notify_one();
        }
        Ok(match (complete, compares) {
            (true, _) => Stands::Over,
            (false, true) => Stands::Compares,
            (false, false) => Stands::Waits,
        })
    }

    /// Whether the guest may stop: see [`Leaving::may_stop`]. Also where nothing leaves any more: that ends the move by itself.
    pub(crate) fn may_stop(&self) -> bool {
        self.leaves().may_stop
    }

    /// See [`Leaving::acknowledged`]; nothing where nothing leaves any more.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.leaves().acknowledged
    }

    /// See [`Leaving::owes`]; nothing where nothing leaves any more.
    pub(crate) fn owes(&self) -> u64 {
        self.leaves().owes
    }

    /// How what leaves stands, or stood after its last step. A write of the guest, or a sync, takes as long as the storage does, and
    /// whoever looks from time to time must not wait for it, nor those who share the runtime.
    fn leaves(&self) -> Left {
        if let Some(Some(outgoing)) = glimpse(&self.order).as_deref() {
            *lock(&self.left) = Left::of(&outgoing.machine);
        }
        *lock(&self.left)
    }

    /// Waits until both sides have, or know, the same but for what is on its way.
    ///
    /// # Errors
    /// When the mirror has ended.
    pub async fn synchronous(&self) -> Result<()> {
        self.until(|m| m.is_none_or(Leaving::is_level)).await;
        if lock(&self.order).is_none() { bail!("the mirror has ended") } else { Ok(()) }
    }

    async fn until(&self, done: impl Fn(Option<&Leaving>) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let now = glimpse(&self.order).map(|order| done(order.as_ref().map(|o| &o.machine)));
            match now {
                Some(true) => return,
                // The sender lives as long as this disk.
                Some(false) => drop(changed.changed().await),
                // It is held by whoever writes, for as long as the storage takes: no thread of the runtime waits for that.
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// Prepares for the blocks of an attempt.
    ///
    /// # Errors
    /// When the replica cannot become a secondary.
    pub async fn receive(self: &Arc<Self>, ticket: Ticket) -> Result<(), ApiError> {
        let done = self.clone().blocking(move |disk| {
            // Blocks of an earlier attempt that are being written are waited for; later ones are not taken.
            let mut receiving = lock(&disk.receiving);
            *receiving = Some(ticket);
            *lock(&disk.complete) = None;
            disk.end_snapshot(
                "the VM comes back to this host, and its blocks with it; begin it again when the move has ended",
            );
            if disk.is_shared() {
                // Nothing comes: it is opened when it is granted. Until then QEMU sees zeroes.
                disk.replica.detach()?;
                disk.inherits.store(true, Ordering::Release);
                disk.replica.read_blank();
                disk.forget_precaches();
                *lock(&disk.complete) = Some(ticket);
                return Ok(());
            }
            disk.replica.become_secondary()?;
            disk.forget_precaches();
            // From here on it is no image of any epoch.
            disk.replica.set_complete(None)
        });
        let done = done.await;
        done.map_err(|e| ApiError::new(Problem::Failed, format!("disk `{}`: {e}", self.name)))
    }

    /// Whether blocks of an attempt come in.
    fn is_receiving(&self) -> bool {
        // It is locked for as long as some are being written.
        let Ok(receiving) = self.receiving.try_lock() else { return true };
        receiving.is_some() && *lock(&self.complete) != *receiving
    }

    /// Whether all blocks of an attempt are here, durably.
    #[must_use]
    pub fn has_everything(&self, ticket: Ticket) -> bool {
        *lock(&self.complete) == Some(ticket)
    }

    /// Blocks that come are looked up here first, in what the VM's trust domain has.
    pub(crate) fn look_up_in(&self, shelf: Shelf) {
        let _ = self.library.set(shelf);
    }

    /// The library of the VM's trust domain at this host, if it is known.
    pub(crate) fn library(&self) -> Option<Arc<Library>> {
        self.library.get()?.library()
    }

    /// Takes the blocks of an attempt, until all are here.
    ///
    /// # Errors
    /// When the stream or the replica fails.
    pub async fn apply(self: &Arc<Self>, stream: Stream, ticket: Ticket) -> Result<()> {
        let library = self.library();
        let begin = |replica: &Replica| match library {
            Some(library) => Ok(mirror::Target::with_library(replica, library)?),
            None => Ok(mirror::Target::new(replica)?),
        };
        let target = self.take(stream, ticket, begin).await?;
        self.take_order(target.order());
        Ok(())
    }

    /// Takes what the disk has to hold, until all of that is known here; the contents come when the VM runs here.
    ///
    /// # Errors
    /// When the stream or the replica fails.
    pub async fn learn(self: &Arc<Self>, stream: Stream, ticket: Ticket) -> Result<()> {
        let target = self.take(stream, ticket, |replica| Ok(fet::Target::new(replica)?)).await?;
        self.take_order(target.order());
        Ok(())
    }

    /// The order that the disk's last host recorded is of use to the fill, and to whoever has the disk next. A host that recorded none, or says
    /// nothing of it, leaves the one that is kept here.
    fn take_order(&self, runs: Vec<std::ops::Range<u64>>) {
        let told = FirstAccess::told(runs);
        if !told.runs().is_empty() {
            *lock(&self.accesses) = told;
        }
    }

    async fn take<T: Arriving>(
        self: &Arc<Self>,
        stream: Stream,
        ticket: Ticket,
        begin: impl FnOnce(&Replica) -> Result<(T, Has)> + Send + 'static,
    ) -> Result<T> {
        let (mut send, mut receive) = stream.split();
        // Short answers, for some of which the guest waits.
        send.set_priority(Priority::Interactive);
        let begun = self.clone().blocking(move |disk| {
            let receiving = lock(&disk.receiving);
            if *receiving == Some(ticket) { begin(&disk.replica) } else { Err(later_attempt()) }
        });
        let (mut target, has) = begun.await?;
        let held = move |disk: &Self, say: &mut dyn FnMut() -> Result<Vec<u8>>| {
            let receiving = lock(&disk.receiving);
            if *receiving == Some(ticket) { say() } else { Err(later_attempt()) }
        };
        let mut packer = tell(self, &mut send, has, held).await?;
        let mut unpacker = Unpacker::new()?;
        while let Some(batch) = several(&mut unpacker, &mut receive, Duration::ZERO).await? {
            let (back, answers) = self
                .clone()
                .blocking(move |disk| {
                    let receiving = lock(&disk.receiving);
                    if *receiving != Some(ticket) {
                        return (target, Err(later_attempt()));
                    }
                    let answers: Result<Vec<_>> =
                        batch.iter().filter_map(|message| target.take(message, &disk.replica).transpose()).collect();
                    (target, answers)
                })
                .await;
            target = back;
            let mut wire = vec![];
            for answer in answers? {
                packer.push(&answer, &mut wire)?;
            }
            packer.flush(&mut wire)?;
            if !wire.is_empty() {
                send.write(wire.into()).await?;
            }
            if target.has_all() {
                *lock(&self.complete) = Some(ticket);
                // Not waited for: the guest stands still.
                tokio::spawn(tokio::time::timeout(CLOSING, finish(send, receive)));
                return Ok(target);
            }
        }
        bail!("the source closed the mirror")
    }

    /// What a client of the export wants; `None`: it is answered through `later`.
    fn perform(
        self: &Arc<Self>,
        cookie: Cookie,
        command: Command,
        later: &mpsc::UnboundedSender<(Cookie, Reply)>,
        over: &CancellationToken,
    ) -> Option<Reply> {
        let job = match command {
            Command::Read { offset, length } => Job::Read { offset, length },
            Command::Write { offset, data, fua } => Job::Change(Change { offset, what: What::Data(data), fua }),
            Command::Trim { offset, length, fua } | Command::WriteZeroes { offset, length, fua, .. } => {
                Job::Change(Change { offset, what: What::Zeroes(u64::from(length)), fua })
            }
            Command::Flush => {
                self.flush_later(cookie, later);
                return None;
            }
            Command::Cache { .. } => return Some(Reply::Done),
            Command::BlockStatus { offset, length, .. } => {
                return Some(match self.replica.extents(offset, u64::from(length)) {
                    Ok(extents) => {
                        Reply::Status(extents.into_iter().map(|(n, hole)| Extent { length: to_u32(n), hole }).collect())
                    }
                    Err(error) => self.failed(&error),
                });
            }
        };
        self.attempt(cookie, job, later, over)
    }

    /// Does what moves bytes; where it cannot be done now, it is tried again when it may be.
    fn attempt(
        self: &Arc<Self>,
        cookie: Cookie,
        job: Job,
        later: &mpsc::UnboundedSender<(Cookie, Reply)>,
        over: &CancellationToken,
    ) -> Option<Reply> {
        let done = match &job {
            Job::Read { offset, length } => self.read(*offset, *length).map(Some),
            Job::Change(change) => self.make(change, over).map(|wait| {
                self.accessed(change.offset, change.length());
                self.made(cookie, change.fua, wait, later)
            }),
        };
        match done {
            Ok(reply) => reply,
            Err(error @ (VolumeError::Frozen | VolumeError::Absent(_))) => {
                let (disk, later, over) = (self.clone(), later.clone(), over.clone());
                let frozen = matches!(error, VolumeError::Frozen);
                tokio::spawn(async move {
                    let until = async { if frozen { disk.thawed().await } else { disk.here(&job.needs()).await } };
                    tokio::select! {
                        biased;
                        () = over.cancelled() => return,
                        () = until => {}
                    }
                    let again = tokio::task::spawn_blocking({
                        let later = later.clone();
                        move || disk.attempt(cookie, job, &later, &over)
                    });
                    if let Ok(Some(reply)) = again.await {
                        let _ = later.send((cookie, reply));
                    }
                });
                None
            }
            Err(error) => Some(self.failed(&error)),
        }
    }

    /// A guest's read.
    pub(crate) fn read(&self, offset: u64, length: u32) -> Result<Reply, VolumeError> {
        let mut bytes = BytesMut::zeroed((length as usize).min(READ_PIECE));
        self.replica.read(offset, &mut bytes)?;
        self.accessed(offset, u64::from(length));
        Ok(Reply::Data(vec![Piece::Data(bytes.freeze())]))
    }

    /// The order in which the guest came to its blocks.
    pub(crate) fn first_accesses(&self) -> Vec<std::ops::Range<u64>> {
        lock(&self.accesses).runs().to_vec()
    }

    /// The same, and whether it has them all, as far as anybody recorded them. Whoever asks may wait for storage.
    pub(crate) fn all_accesses(&self) -> (Vec<std::ops::Range<u64>>, bool) {
        self.inherit_order();
        let accesses = lock(&self.accesses);
        (accesses.runs().to_vec(), accesses.is_whole() && !accesses.runs().is_empty())
    }

    /// The guest has read or written here.
    fn accessed(&self, offset: u64, length: u64) {
        lock(&self.accesses).touched(godwit_volume::touched(offset, length));
    }

    /// A write was made; its answer, if it may have one now.
    fn made(
        self: &Arc<Self>,
        cookie: Cookie,
        fua: bool,
        wait: Option<Place>,
        later: &mpsc::UnboundedSender<(Cookie, Reply)>,
    ) -> Option<Reply> {
        match (wait, fua) {
            (None, false) => Some(Reply::Done),
            (None, true) => {
                self.flush_later(cookie, later);
                None
            }
            (Some(write), _) => {
                let (disk, later) = (self.clone(), later.clone());
                tokio::spawn(async move {
                    disk.until(|m| m.is_none_or(|m| m.is_answered(write))).await;
                    if fua {
                        disk.flush_later(cookie, &later);
                    } else {
                        let _ = later.send((cookie, Reply::Done));
                    }
                });
                None
            }
        }
    }

    /// Makes a change; what the mirror has to be done with before it is answered, if anything. For a client that is gone it is
    /// [`VolumeError::Frozen`].
    fn make(&self, change: &Change, over: &CancellationToken) -> Result<Option<Place>, VolumeError> {
        self.make_by(change.offset, change.length(), over, || match &change.what {
            What::Data(data) => self.replica.write(change.offset, data),
            What::Zeroes(length) => self.replica.zero(change.offset, *length),
        })
    }

    fn make_by(
        &self,
        offset: u64,
        length: u64,
        over: &CancellationToken,
        make: impl FnOnce() -> Result<Written, VolumeError>,
    ) -> Result<Option<Place>, VolumeError> {
        let mut order = lock(&self.order);
        if over.is_cancelled() {
            // As one that waits for the disk and whose client goes: it is not made, and not answered.
            return Err(VolumeError::Frozen);
        }
        let recorded = self.recorder.is_used();
        let blocks = godwit_volume::touched(offset, length);
        if recorded && let Err(error) = self.recorder.before_write(blocks.clone(), &self.replica) {
            tracing::error!(volume = self.name, %error, "what pre-caches need cannot be read; they begin anew");
            self.recorder.clear();
        }
        if let Some(snapshot) = &*lock(&self.snapshot) {
            snapshot.before_write(blocks.clone(), &self.replica);
        }
        let made = make();
        let written = match &made {
            Ok(written) => written.blocks.clone(),
            // A part may be stored: whoever has the disk as well is to have the same.
            Err(VolumeError::Io { .. }) => blocks,
            Err(_) => return made.map(|_| None),
        };
        let until = self.pass_on(&mut order, recorded, written);
        made.map(|_| until)
    }

    /// Tells whoever has to know that the guest wrote, and what its answer has to wait for.
    fn pass_on(&self, order: &mut Option<Outgoing>, recorded: bool, written: std::ops::Range<u64>) -> Option<Place> {
        if recorded {
            self.recorder.wrote(written.clone());
        }
        self.touched(written.clone());
        let outgoing = order.as_mut()?;
        match outgoing.machine.guest_wrote(written, self.began.elapsed(), &self.replica) {
            Ok(mirrored) => {
                if mirrored.messages.is_empty() {
                    // The machine has taken note of it, and sends it in its turn.
                    self.work.notify_one();
                }
                for message in mirrored.messages {
                    let _ = outgoing.out.send(message);
                }
                mirrored.until
            }
            Err(error) => {
                // The write is done; it is the mirror that cannot go on.
                tracing::error!(volume = self.name, %error, "the mirror cannot read its replica");
                *order = None;
                None
            }
        }
    }

    /// Writes what comes from an image, as a guest's write but for the order of its first accesses. Nothing: zeroes.
    ///
    /// # Errors
    /// As [`Replica::write`].
    pub(crate) fn put(&self, offset: u64, length: u64, data: Option<Bytes>) -> Result<(), VolumeError> {
        let what = data.map_or(What::Zeroes(length), What::Data);
        self.make(&Change { offset, what, fua: false }, &CancellationToken::new()).map(drop)
    }

    /// Begins to keep the volume as it is now.
    ///
    /// # Errors
    /// When there is no room for what will be overwritten.
    pub(crate) fn begin_snapshot(&self) -> Result<Arc<Snapshot>, VolumeError> {
        // Between two writes.
        let _guest = lock(&self.order);
        let snapshot = Arc::new(Snapshot::new(self.replica.folder())?);
        *lock(&self.snapshot) = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Nothing is kept any more; whoever still reads it hears why.
    pub(crate) fn end_snapshot(&self, why: &str) {
        if let Some(snapshot) = lock(&self.snapshot).take() {
            snapshot.break_off(why);
        }
    }

    /// Whether the volume is kept as it was, for somebody who copies it: its blocks must not be changed behind that one's back.
    pub(crate) fn has_snapshot(&self) -> bool {
        lock(&self.snapshot).is_some()
    }

    /// Waits until the replica takes writes.
    async fn thawed(&self) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if !self.replica.is_frozen() {
                return;
            }
            // The sender lives as long as this disk.
            let _ = changed.changed().await;
        }
    }

    fn flush_later(self: &Arc<Self>, cookie: Cookie, later: &mpsc::UnboundedSender<(Cookie, Reply)>) {
        let (disk, later) = (self.clone(), later.clone());
        tokio::task::spawn_blocking(move || {
            let reply = match disk.replica.flush() {
                Ok(()) => Reply::Done,
                Err(error) => disk.failed(&error),
            };
            let _ = later.send((cookie, reply));
        });
    }

    fn failed(&self, error: &VolumeError) -> Reply {
        tracing::warn!(volume = self.name, %error, "a request of the guest failed");
        Reply::Error(match error {
            VolumeError::Frozen => Errno::Perm,
            VolumeError::Range(_) => Errno::Invalid,
            VolumeError::Io { source, .. } => Errno::of(source),
            _ => Errno::Io,
        })
    }
}

/// How the machine of a move from here stands after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    /// It waits for the other side, or for the guest.
    Waits,
    /// It compares what the other side has said: more of that has to wait.
    Compares,
    /// That was the last step.
    Over,
}

/// What moves bytes, and may have to wait.
#[derive(Debug)]
enum Job {
    Read { offset: u64, length: u32 },
    Change(Change),
}

impl Job {
    /// The blocks that have to be here for it: all that is read, and what is written in part.
    fn needs(&self) -> Vec<std::ops::Range<u64>> {
        let (offset, length) = match self {
            Self::Read { offset, length } => return vec![godwit_volume::touched(*offset, u64::from(*length))],
            Self::Change(change) => (change.offset, change.length()),
        };
        let edges = [offset, offset.saturating_add(length)];
        let parts = edges.into_iter().filter(|edge| !edge.is_multiple_of(BLOCK)).map(|edge| edge / BLOCK);
        parts.map(|block| block..block + 1).collect()
    }
}

/// A destination's machine.
trait Arriving: Send + 'static {
    /// A message came; the answer, if it has one.
    fn take(&mut self, message: &[u8], replica: &Replica) -> Result<Option<Vec<u8>>>;
    /// Whether nothing more comes.
    fn has_all(&self) -> bool;
}

impl Arriving for mirror::Target {
    fn take(&mut self, message: &[u8], replica: &Replica) -> Result<Option<Vec<u8>>> {
        Ok(Some(self.handle(message, replica)?))
    }

    fn has_all(&self) -> bool {
        self.is_complete()
    }
}

impl Arriving for fet::Target {
    fn take(&mut self, message: &[u8], replica: &Replica) -> Result<Option<Vec<u8>>> {
        Ok(self.handle(message, replica)?)
    }

    fn has_all(&self) -> bool {
        self.is_complete()
    }
}

fn later_attempt() -> anyhow::Error {
    anyhow!("a later attempt receives this disk now")
}

/// What a client wants written.
#[derive(Debug)]
struct Change {
    offset: u64,
    what: What,
    fua: bool,
}

impl Change {
    fn length(&self) -> u64 {
        match &self.what {
            What::Data(data) => data.len() as u64,
            What::Zeroes(length) => *length,
        }
    }
}

#[derive(Debug)]
enum What {
    Data(Bytes),
    Zeroes(u64),
}

fn to_u32(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// All disks of a move together.
#[must_use]
pub fn sum(disks: &[Arc<Disk>]) -> DiskProgress {
    let mut all = DiskProgress { synchronous: true, ..DiskProgress::default() };
    for p in disks.iter().map(|d| d.progress()) {
        all.total += p.total;
        all.copied += p.copied;
        all.remaining += p.remaining;
        all.held += p.held;
        all.absent += p.absent;
        all.synchronous &= p.synchronous;
    }
    all
}

/// One client of the export, on threads of its own: see [`godwit_export`]. Ends when the client is let go of, or the runtime ends.
async fn serve(disk: Arc<Disk>, client: UnixStream, over: CancellationToken) {
    let client = client.into_std().and_then(|client| client.set_nonblocking(false).map(|()| client));
    let wire = match client {
        Ok(client) => Wire::new(client.into()),
        Err(error) => return tracing::warn!(volume = disk.name, %error, "a client cannot be served"),
    };
    let _hang_up = wire.hang_up();
    // What still waits when this ends is not made: the client may have come again, and made it and others after it.
    let _over = over.clone().drop_guard();
    // Bounded by the requests that a client may have under way.
    let (later, mut answers) = mpsc::unbounded_channel();
    let sink = Arc::new(OnceLock::<Answers>::new());
    let client =
        Client { disk: disk.clone(), later, over: over.clone(), runtime: Handle::current(), sink: sink.clone() };
    let (left, gone) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name(format!("nbd {}", disk.name));
    let spawned = thread.spawn(move || {
        let _left = left;
        godwit_export::serve(wire, Arc::new(client), None);
    });
    if let Err(error) = spawned {
        return tracing::warn!(volume = disk.name, %error, "no thread for a client of the export");
    }
    drop(disk);
    let passing = async {
        while let Some((cookie, reply)) = answers.recv().await {
            if let Some(sink) = sink.get() {
                sink.send(cookie, reply);
            }
        }
    };
    tokio::select! {
        () = over.cancelled() => {}
        _ = gone => {}
        () = passing => {}
    }
}

/// The disk, as one client's threads see it.
struct Client {
    disk: Arc<Disk>,
    later: mpsc::UnboundedSender<(Cookie, Reply)>,
    over: CancellationToken,
    runtime: Handle,
    /// Where what comes from `later` goes.
    sink: Arc<OnceLock<Answers>>,
}

impl Backend for Client {
    fn export(&self) -> Export {
        let (name, size) = (self.disk.name.clone(), self.disk.replica.size().0);
        Export { name, size, preferred_block: 4096, read_only: false }
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> usize {
        let read = self.disk.replica.read_now(offset, into);
        if read > 0 {
            self.disk.accessed(offset, read as u64);
        }
        read
    }

    fn file_of(&self, offset: u64, length: u64) -> Option<BorrowedFd<'_>> {
        let file = self.disk.replica.file_of(offset, length)?;
        self.disk.accessed(offset, length);
        Some(file)
    }

    fn write_by(
        &self,
        cookie: Cookie,
        offset: u64,
        length: u32,
        answers: &Answers,
        put: Put<'_>,
    ) -> Result<Option<Reply>, Untaken> {
        self.sink.get_or_init(|| answers.clone());
        let _in = self.runtime.enter();
        let (disk, length) = (&self.disk, u64::from(length));
        let file = disk.replica.file().ok_or(Untaken)?;
        let made =
            disk.make_by(offset, length, &self.over, || disk.replica.write_by(offset, length, || put(file, offset)));
        match made {
            Ok(wait) => {
                disk.accessed(offset, length);
                Ok(disk.made(cookie, false, wait, &self.later))
            }
            // It waits, and its contents are kept until then.
            Err(VolumeError::Frozen | VolumeError::Absent(_)) => Err(Untaken),
            Err(error) => Ok(Some(disk.failed(&error))),
        }
    }

    fn warm(&self, offset: u64, length: u64) {
        self.disk.replica.warm(offset, length);
    }

    fn perform(&self, cookie: Cookie, command: Command, answers: &Answers) -> Option<Reply> {
        self.sink.get_or_init(|| answers.clone());
        let _in = self.runtime.enter();
        self.disk.perform(cookie, command, &self.later, &self.over)
    }
}

/// The next messages, where several have come: a jump to another thread costs more than a block. What comes is waited for up to
/// `patience` longer, so that more comes with it. `None`: the other side has closed the stream.
pub(crate) async fn several(
    unpacker: &mut Unpacker,
    from: &mut RecvHalf,
    patience: Duration,
) -> Result<Option<Vec<Vec<u8>>>> {
    let (mut batch, mut bytes) = (vec![], 0);
    loop {
        while batch.len() < MOST_AT_ONCE
            && bytes < MOST_BYTES_AT_ONCE
            && let Some(message) = unpacker.poll()?
        {
            bytes += message.len();
            batch.push(message);
        }
        if !batch.is_empty() {
            return Ok(Some(batch));
        }
        match from.read_gathered(READ_AT_ONCE, patience).await? {
            Some(piece) => unpacker.push(&piece),
            None => return Ok(None),
        }
    }
}

/// Says what a replica has, as the link takes it: no more is read ahead than a few messages. `held` has them made while nobody else may have the replica.
///
/// # Errors
/// What `held` says, or when the stream or the replica fails.
pub(crate) async fn tell(
    disk: &Arc<Disk>,
    out: &mut SendHalf,
    mut has: Has,
    held: impl Fn(&Disk, &mut dyn FnMut() -> Result<Vec<u8>>) -> Result<Vec<u8>> + Clone + Send + 'static,
) -> Result<Packer> {
    let mut packer = Packer::new()?;
    loop {
        let held = held.clone();
        let said = disk.clone().blocking(move |disk| {
            let wire = held(disk, &mut || some_of(&mut has, &mut packer, &disk.replica))?;
            anyhow::Ok((has, packer, wire))
        });
        let wire;
        (has, packer, wire) = said.await?;
        if wire.is_empty() {
            return Ok(packer);
        }
        out.write(wire.into()).await?;
    }
}

/// The next of what a replica has, packed; empty: all was said.
fn some_of(has: &mut Has, packer: &mut Packer, replica: &Replica) -> Result<Vec<u8>> {
    let (mut wire, mut said) = (vec![], 0);
    while said < MOST_PACKED
        && let Some(message) = has.next(replica)?
    {
        said += message.len();
        packer.push(&message, &mut wire)?;
    }
    packer.flush(&mut wire)?;
    Ok(wire)
}

/// Hands what comes on to whoever works it off, until either side ends.
pub(crate) async fn hear(mut from: RecvHalf, into: mpsc::Sender<Vec<Vec<u8>>>) -> Result<()> {
    let mut unpacker = Unpacker::new()?;
    while let Some(batch) = several(&mut unpacker, &mut from, Duration::ZERO).await? {
        if into.send(batch).await.is_err() {
            return Ok(());
        }
    }
    bail!("the other side closed the session")
}

/// Ends a stream from this side, and waits for the other.
async fn finish(mut send: SendHalf, mut receive: RecvHalf) -> Result<()> {
    send.finish()?;
    while receive.read().await.is_ok_and(|piece| piece.is_some()) {}
    Ok(())
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
