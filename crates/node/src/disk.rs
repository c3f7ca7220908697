//! A VM's disk on this host: a replica, an NBD export for QEMU, and the mirror of a move.
//!
//! The guest's writes are made one after the other under one lock, together with what the mirror has to know of them: so each
//! block that travels is whole, and two writes that overlap reach both sides in the same order. Answers do not wait under
//! the lock: a mirrored write is answered when the target has it, or when it has waited long enough.
//!
//! A frozen replica takes no writes, and none is refused either: a guest that ran on while its node was started again, or
//! that its QEMU resumed by itself, would see its disk fail. Its writes wait until the disk is open again, or until the QEMU
//! that made them is gone: whoever ends or loses a QEMU calls [`Disk::hang_up`], so that no write of a dead one is made later.

use crate::parts::lock;
use anyhow::{Context, Result, anyhow, bail};
use bytes::{Bytes, BytesMut};
use godwit_api::progress::DiskProgress;
use godwit_api::{ApiError, Problem};
use godwit_export::{Answers, Backend, Wire};
use godwit_handoff::{Generation, Lineage, Ticket};
use godwit_link::{RecvHalf, SendHalf, Stream};
use godwit_nbd::{Command, Cookie, Errno, Export, Extent, Piece, Reply};
use godwit_units::{Bytes as Amount, VolumeId};
use godwit_volume::epoch::Recorder;
use godwit_volume::mirror::{MirrorError, Seq, Source, State, Target};
use godwit_volume::{Packer, Replica, Unpacker, VolumeError};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
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
/// The same, where a mirror comes in: what has come and is not settled comes again if the node dies.
const SETTLE_INCOMING: Duration = Duration::from_secs(1);
/// The most that a read takes at once without giving others their turn.
const READ_PIECE: usize = 32 << 20;
/// Bytes that are packed before they are sent: some round trips of a fast link would be too late, a message too little.
const MOST_PACKED: usize = 256 << 10;
/// How long the source may take to close a mirror that is complete.
const CLOSING: Duration = Duration::from_secs(60);
/// Messages that are applied at once: what answers may lag behind.
const MOST_AT_ONCE: usize = 64;

/// One disk.
#[derive(Debug)]
pub struct Disk {
    /// The volume.
    pub id: VolumeId,
    /// Its name, for people.
    pub name: String,
    /// QEMU connects here.
    pub socket: PathBuf,
    replica: Replica,
    order: Mutex<Option<Outgoing>>,
    /// What pre-caches have to know of the guest's writes.
    recorder: Recorder,
    /// Held while an epoch ends: one that ends meanwhile is not durable by this one's sync.
    rolling: Mutex<()>,
    /// Something changed that a mirror or a waiting write may wait for.
    changed: watch::Sender<u64>,
    /// The mirror's task has something to send.
    work: Notify,
    began: Instant,
    /// The attempt whose blocks are all here.
    complete: Mutex<Option<Ticket>>,
    receiving: Mutex<Option<Ticket>>,
    /// The figures of the last mirror.
    figures: Mutex<DiskProgress>,
    /// Since when the other side has been behind, as far as somebody looked.
    behind: Mutex<Option<Instant>>,
    failing: AtomicBool,
    /// Ends the clients of the export that are there now.
    clients: Mutex<CancellationToken>,
    serving: CancellationToken,
    _guard: DropGuard,
}

/// The mirror of a move from here.
#[derive(Debug)]
struct Outgoing {
    machine: Source,
    /// To the link, in order. Bounded by the mirror's window and by what a guest may have under way.
    out: mpsc::UnboundedSender<Vec<u8>>,
}

impl Disk {
    /// Opens the replica in `folder`, or makes it, and serves it at `socket`.
    ///
    /// # Errors
    /// When the replica or the socket cannot be had.
    pub fn open_or_create(folder: &Path, socket: PathBuf, id: VolumeId, name: &str, size: Amount) -> Result<Arc<Self>> {
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
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        let token = CancellationToken::new();
        let disk = Arc::new(Self {
            id,
            name: name.to_owned(),
            socket,
            replica,
            order: Mutex::new(None),
            recorder: Recorder::new(),
            rolling: Mutex::new(()),
            changed: watch::channel(0).0,
            work: Notify::new(),
            began: Instant::now(),
            complete: Mutex::default(),
            receiving: Mutex::default(),
            figures: Mutex::default(),
            behind: Mutex::default(),
            failing: AtomicBool::new(false),
            clients: Mutex::new(token.child_token()),
            serving: token.clone(),
            _guard: token.clone().drop_guard(),
        });
        let weak = Arc::downgrade(&disk);
        tokio::spawn(async move {
            let mut settle = tokio::time::interval(SETTLE_INCOMING);
            let mut settled = Instant::now();
            loop {
                tokio::select! {
                    () = token.cancelled() => return,
                    _ = settle.tick() => {
                        let Some(disk) = weak.upgrade() else { return };
                        if settled.elapsed() >= SETTLE || disk.is_receiving() {
                            settled = Instant::now();
                            tokio::task::spawn_blocking(move || disk.settle());
                        }
                    }
                    client = listener.accept() => {
                        let (Ok((client, _)), Some(disk)) = (client, weak.upgrade()) else { continue };
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

    fn settle(&self) {
        if let Err(error) = self.replica.settle_after(godwit_volume::LINGERING)
            && !self.failing.swap(true, Ordering::Relaxed)
        {
            tracing::error!(volume = self.name, %error, "the replica cannot be made durable");
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
        self.clone().blocking(move |disk| disk.replica.become_primary(lineage, generation)).await?;
        self.tell();
        Ok(())
    }

    /// Lets go of the export's clients: their QEMU is gone, or is about to be. Writes of theirs that wait are never made.
    pub fn hang_up(&self) {
        std::mem::replace(&mut *lock(&self.clients), self.serving.child_token()).cancel();
        // Whoever is making a write now has made it when this returns.
        drop(lock(&self.order));
    }

    pub(crate) const fn replica(&self) -> &Replica {
        &self.replica
    }

    pub(crate) const fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Another secondary of a pre-cache; none while a mirror runs.
    pub(crate) fn subscribe(&self, image: bool) -> Option<u64> {
        let order = lock(&self.order);
        (order.is_none() && self.replica.is_primary()).then(|| self.recorder.subscribe(image))
    }

    /// Ends the epoch of now if it is time to, and makes it durable.
    pub(crate) async fn roll(self: &Arc<Self>, interval: Duration) -> Result<(), VolumeError> {
        if !self.recorder.is_due(self.began.elapsed(), interval) {
            return Ok(());
        }
        let roll = move |disk: &Self| {
            let _alone = lock(&disk.rolling);
            {
                let _guest = lock(&disk.order);
                let now = disk.began.elapsed();
                if !disk.recorder.is_due(now, interval) {
                    return Ok(());
                }
                let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                disk.recorder.roll(&disk.replica, now, u64::try_from(unix.as_millis()).unwrap_or(u64::MAX))?;
            }
            disk.replica.flush()?;
            disk.recorder.settled();
            Ok(())
        };
        self.clone().blocking(roll).await
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
            Err(_) => crate::actor::fatal("disk I/O ended in a bug"),
        }
    }

    /// Lets go of all writes that wait for the other side: the guest is stopping, and must not wait for the WAN.
    pub fn let_go(&self) {
        if let Some(outgoing) = &mut *lock(&self.order) {
            outgoing.machine.let_go();
        }
        self.tell();
    }

    /// Refuses the guest's writes from now on; those that came before are done, and the mirror's last blocks go.
    pub async fn freeze(self: &Arc<Self>) {
        self.clone()
            .blocking(|disk| {
                let mut order = lock(&disk.order);
                disk.replica.freeze();
                if let Some(outgoing) = &mut *order {
                    outgoing.machine.stop();
                }
            })
            .await;
        self.tell();
    }

    /// The VM is not here any more, or was never: without QEMU. `lost`: it is another host's.
    pub async fn rest(self: &Arc<Self>, lost: bool) {
        self.stop_mirror().await;
        let done = self.clone().blocking(
            move |disk| {
                if lost { disk.replica.become_secondary() } else { disk.replica.commit() }
            },
        );
        if let Err(error) = done.await {
            tracing::error!(volume = self.name, %error, "the replica cannot be made durable");
        }
    }

    fn tell(&self) {
        self.changed.send_modify(|n| *n += 1);
        self.work.notify_one();
    }

    /// How the disk side of a move stands.
    #[must_use]
    pub fn progress(&self) -> DiskProgress {
        if let Some(outgoing) = &*lock(&self.order) {
            let p = outgoing.machine.progress();
            *lock(&self.figures) = DiskProgress {
                total: p.total,
                copied: p.copied,
                remaining: p.remaining,
                synchronous: outgoing.machine.is_synchronous(),
                held: p.held,
            };
        }
        let figures = *lock(&self.figures);
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
        let (out, pieces) = mpsc::unbounded_channel();
        {
            let mut order = lock(&self.order);
            // What a mirror passes on and a pre-cache does not agree: only one of them at a time.
            self.recorder.clear();
            *order = Some(Outgoing { machine: Source::new(), out });
        }
        let disk = self.clone();
        crate::trace::spawn(async move {
            let result = tokio::select! {
                result = disk.mirror(stream, pieces) => result,
                () = over.cancelled() => Ok(()),
            };
            disk.stop_mirror().await;
            result.with_context(|| format!("disk `{}`", disk.name))
        })
    }

    /// Ends mirroring: writes that wait for the other side are answered.
    pub async fn stop_mirror(&self) {
        let _ = self.progress();
        lock(&self.order).take();
        self.tell();
    }

    async fn mirror(self: &Arc<Self>, stream: Stream, mut pieces: mpsc::UnboundedReceiver<Vec<u8>>) -> Result<()> {
        let (mut send, mut receive) = stream.split();
        let sending = async {
            let mut packer = Packer::new()?;
            while let Some(message) = pieces.recv().await {
                let mut wire = vec![];
                packer.push(&message, &mut wire)?;
                while wire.len() < MOST_PACKED
                    && let Ok(message) = pieces.try_recv()
                {
                    packer.push(&message, &mut wire)?;
                }
                packer.flush(&mut wire)?;
                send.write(wire.into()).await?;
            }
            anyhow::Ok(())
        };
        let (arrived, mut messages) = mpsc::channel::<Vec<u8>>(64);
        let receiving = async move {
            let mut unpacker = Unpacker::new()?;
            while let Some(message) = next(&mut unpacker, &mut receive).await? {
                if arrived.send(message).await.is_err() {
                    break;
                }
            }
            // What came before is worked off first; its last word is among it.
            drop(arrived);
            std::future::pending().await
        };
        let driving = async {
            let mut tick = tokio::time::interval(TICK);
            loop {
                let message = tokio::select! {
                    message = messages.recv() => Some(message.context("the destination closed the mirror")?),
                    () = self.work.notified() => None,
                    _ = tick.tick() => None,
                };
                if self.clone().blocking(move |disk| disk.advance(message)).await? == State::Complete {
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

    /// One step of the mirror's machine.
    fn advance(&self, message: Option<Vec<u8>>) -> Result<State, MirrorError> {
        let mut order = lock(&self.order);
        let Some(outgoing) = &mut *order else { return Ok(State::Complete) };
        if let Some(message) = message {
            outgoing.machine.handle(&message, &self.replica)?;
        }
        if outgoing.machine.tick(self.began.elapsed()) {
            tracing::warn!(volume = self.name, "the other side does not answer; copying behind the guest's back");
        }
        let ready = outgoing.machine.poll(&self.replica)?;
        let more = !ready.is_empty();
        for message in ready {
            // The task that sends ends only with the mirror.
            let _ = outgoing.out.send(message);
        }
        let state = outgoing.machine.state();
        drop(order);
        self.changed.send_modify(|n| *n += 1);
        if more {
            self.work.notify_one();
        }
        Ok(state)
    }

    /// Waits until both sides have the same but for what is on its way.
    ///
    /// # Errors
    /// When the mirror has ended.
    pub async fn synchronous(&self) -> Result<()> {
        self.until(|m| m.is_none_or(Source::is_synchronous)).await;
        if lock(&self.order).is_none() { bail!("the mirror has ended") } else { Ok(()) }
    }

    async fn until(&self, done: impl Fn(Option<&Source>) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if done(lock(&self.order).as_ref().map(|o| &o.machine)) {
                return;
            }
            // The sender lives as long as this disk.
            let _ = changed.changed().await;
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
            disk.replica.become_secondary()?;
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

    /// Takes the blocks of an attempt, until all are here.
    ///
    /// # Errors
    /// When the stream or the replica fails.
    pub async fn apply(self: &Arc<Self>, stream: Stream, ticket: Ticket) -> Result<()> {
        let (mut send, mut receive) = stream.split();
        let (mut target, first) = self.clone().blocking(|disk| Target::new(&disk.replica)).await?;
        let mut packer = Packer::new()?;
        let mut wire = vec![];
        for message in first {
            packer.push(&message, &mut wire)?;
        }
        packer.flush(&mut wire)?;
        send.write(wire.into()).await?;
        let mut unpacker = Unpacker::new()?;
        while let Some(message) = next(&mut unpacker, &mut receive).await? {
            // Several at once, where several have come: a jump to another thread costs more than a block.
            let mut batch = vec![message];
            while batch.len() < MOST_AT_ONCE
                && let Some(message) = unpacker.poll()?
            {
                batch.push(message);
            }
            let (back, answers) = self
                .clone()
                .blocking(move |disk| {
                    let receiving = lock(&disk.receiving);
                    if *receiving != Some(ticket) {
                        return (target, Err(anyhow!("a later attempt receives this disk now")));
                    }
                    let answers: Result<Vec<_>, _> =
                        batch.iter().map(|message| target.handle(message, &disk.replica)).collect();
                    (target, answers.map_err(anyhow::Error::from))
                })
                .await;
            target = back;
            let mut wire = vec![];
            for answer in answers? {
                packer.push(&answer, &mut wire)?;
            }
            packer.flush(&mut wire)?;
            send.write(wire.into()).await?;
            if target.is_complete() {
                *lock(&self.complete) = Some(ticket);
                // Not waited for: the guest stands still.
                tokio::spawn(tokio::time::timeout(CLOSING, finish(send, receive)));
                return Ok(());
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
        match command {
            Command::Read { offset, length } => Some(self.read(offset, length)),
            Command::Write { offset, data, fua } => {
                let change = Change { offset, what: What::Data(data), fua };
                self.write(cookie, change, later, over)
            }
            Command::Trim { offset, length, fua } | Command::WriteZeroes { offset, length, fua, .. } => {
                let change = Change { offset, what: What::Zeroes(u64::from(length)), fua };
                self.write(cookie, change, later, over)
            }
            Command::Flush => {
                self.flush_later(cookie, later);
                None
            }
            Command::Cache { .. } => Some(Reply::Done),
            Command::BlockStatus { offset, length, .. } => {
                Some(match self.replica.extents(offset, u64::from(length)) {
                    Ok(extents) => {
                        Reply::Status(extents.into_iter().map(|(n, hole)| Extent { length: to_u32(n), hole }).collect())
                    }
                    Err(error) => self.failed(&error),
                })
            }
        }
    }

    fn read(&self, offset: u64, length: u32) -> Reply {
        let mut bytes = BytesMut::zeroed((length as usize).min(READ_PIECE));
        match self.replica.read(offset, &mut bytes) {
            Ok(()) => Reply::Data(vec![Piece::Data(bytes.freeze())]),
            Err(error) => self.failed(&error),
        }
    }

    /// Makes a write, tells the mirror, and answers when it may be answered.
    fn write(
        self: &Arc<Self>,
        cookie: Cookie,
        change: Change,
        later: &mpsc::UnboundedSender<(Cookie, Reply)>,
        over: &CancellationToken,
    ) -> Option<Reply> {
        let fua = change.fua;
        let wait = match self.make(&change, over) {
            Ok(wait) => wait,
            Err(VolumeError::Frozen) => {
                let (disk, later, over) = (self.clone(), later.clone(), over.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        biased;
                        () = over.cancelled() => return,
                        () = disk.thawed() => {}
                    }
                    let again = tokio::task::spawn_blocking({
                        let later = later.clone();
                        move || disk.write(cookie, change, &later, &over)
                    });
                    if let Ok(Some(reply)) = again.await {
                        let _ = later.send((cookie, reply));
                    }
                });
                return None;
            }
            Err(error) => return Some(self.failed(&error)),
        };
        match (wait, fua) {
            (None, false) => Some(Reply::Done),
            (None, true) => {
                self.flush_later(cookie, later);
                None
            }
            (Some(seq), _) => {
                let (disk, later) = (self.clone(), later.clone());
                tokio::spawn(async move {
                    disk.until(|m| m.is_none_or(|m| m.is_answered(seq))).await;
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

    /// Makes a change; until which answer of the mirror it has to wait, if it has to. Nothing is done for a client that is
    /// gone.
    fn make(&self, change: &Change, over: &CancellationToken) -> Result<Option<Seq>, VolumeError> {
        let mut order = lock(&self.order);
        if over.is_cancelled() {
            return Ok(None);
        }
        let recorded = self.recorder.is_used();
        if recorded {
            let length = match &change.what {
                What::Data(data) => data.len() as u64,
                What::Zeroes(length) => *length,
            };
            if let Err(error) = self.recorder.before_write(godwit_volume::touched(change.offset, length), &self.replica)
            {
                tracing::error!(volume = self.name, %error, "what pre-caches need cannot be read; they begin anew");
                self.recorder.clear();
            }
        }
        let written = match &change.what {
            What::Data(data) => self.replica.write(change.offset, data),
            What::Zeroes(length) => self.replica.zero(change.offset, *length),
        }?;
        if recorded {
            self.recorder.wrote(written.blocks.clone());
        }
        let Some(outgoing) = &mut *order else { return Ok(None) };
        match outgoing.machine.guest_wrote(written.blocks, self.began.elapsed(), &self.replica) {
            Ok(None) => {
                self.work.notify_one();
                Ok(None)
            }
            Ok(Some(mirrored)) => {
                for message in mirrored.messages {
                    let _ = outgoing.out.send(message);
                }
                Ok(Some(mirrored.until))
            }
            Err(error) => {
                // The write is done; it is the mirror that cannot go on.
                tracing::error!(volume = self.name, %error, "the mirror cannot read its replica");
                *order = None;
                Ok(None)
            }
        }
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
            VolumeError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => Errno::NoSpace,
            _ => Errno::Io,
        })
    }
}

/// What a client wants written.
#[derive(Debug)]
struct Change {
    offset: u64,
    what: What,
    fua: bool,
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
        self.disk.replica.read_now(offset, into)
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

/// The next message of a mirror; `None`: the other side has closed it.
pub(crate) async fn next(unpacker: &mut Unpacker, from: &mut RecvHalf) -> Result<Option<Vec<u8>>> {
    loop {
        if let Some(message) = unpacker.poll()? {
            return Ok(Some(message));
        }
        match from.read().await? {
            Some(piece) => unpacker.push(&piece),
            None => return Ok(None),
        }
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;

/// Ends a stream from this side, and waits for the other.
async fn finish(mut send: SendHalf, mut receive: RecvHalf) -> Result<()> {
    send.finish()?;
    while receive.read().await.is_ok_and(|piece| piece.is_some()) {}
    Ok(())
}
