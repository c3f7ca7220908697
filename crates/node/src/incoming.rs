//! A move as its destination's node serves it: a place is made, streams come in, and when everything is here and verified
//! the machine is told [`Event::Loaded`].
//!
//! Everything means: every byte that the incoming QEMU was given is what the source meant; that QEMU says that it has loaded
//! it; and every volume's last block is durable.

use crate::actor::Input;
use crate::disk_index::Replicas;
use crate::failpoint::{Point, reach_async};
use crate::memory_in::{self, Delivered};
use crate::neighbours::Here;
use crate::neighbours::resident::Shown;
use crate::node::Node;
use crate::parts::{Moving, Parts};
use crate::proto::{self, Note, Secret, Stage, Staged};
use anyhow::{Context, Result, anyhow};
use godwit_api::host::MoveRole;
use godwit_api::progress::Outcome;
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Event, Record, Ticket};
use godwit_link::{RecvHalf, SendHalf, Stream};
use godwit_memory::{CheckpointKey, Decoder, Feedback, Limits, Message, ReturnPath, Witness};
use godwit_units::{BitRate, VmId, VolumeId};
use godwit_vmm::{MigrationStatus, Qemu, QemuEvent};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;

/// How long QEMU may take to connect to a socket beside it.
const CONNECT: Duration = Duration::from_secs(20);
/// How long a place waits for the end of the sealing of what its VM left here when it went, which ends at the next page.
const SEALING_ENDS: Duration = Duration::from_secs(1);
/// What the socket to the incoming QEMU is asked to hold; Linux makes it twice as much.
const UNREAD: usize = godwit_memory::MOST_UNREAD / 4;
/// What QEMU counts as RAM besides the guest's: firmware, ROMs, tables. Bytes.
pub(crate) const FIRMWARE: u64 = 256 << 20;
/// Between two looks whether QEMU has read the devices' state: this is part of the pause.
const LISTENS: Duration = Duration::from_millis(4);
/// How long after `cont` QEMU may say that it runs.
const RESUMED: Duration = Duration::from_secs(1);
/// How long the network is given to lead to the guest's new place.
pub(crate) const PROOF: Duration = Duration::from_secs(10);

/// How long a new attempt waits for the end of an earlier one.
const EARLIER: Duration = Duration::from_secs(8);

/// Waits for the end of an earlier attempt. Who begins another one has given that up, and this host hears so when it asks the next time: a
/// user who tries again at once need not be told to try again later.
async fn await_end_of_earlier(node: &Node, vm: VmId, ticket: Ticket) {
    let is_open = || matches!(node.record(vm), Some(Record::Staged(earlier)) if earlier < ticket);
    let deadline = Instant::now() + EARLIER;
    while is_open() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A source asks for a place.
///
/// # Errors
/// What keeps the VM from coming here.
pub async fn stage(node: &Arc<Node>, from: &str, stage: Stage) -> Result<Staged, ApiError> {
    if stage.source.name.as_str() != from {
        return Err(ApiError::new(Problem::Forbidden, format!("{from} asks in the name of {}", stage.source.name)));
    }
    crate::covered::stage(node.credentials(), from, &stage)?;
    await_end_of_earlier(node, stage.definition.id, stage.ticket).await;
    if let Some(parts) = node.vm(stage.definition.id) {
        // What is still being sealed of its memory since it left takes up the room that it needs now.
        parts.stop_looking();
        let _ = tokio::time::timeout(SEALING_ENDS, parts.keeping.lock()).await;
    }
    let check = godwit_api::host::CheckVm {
        definition: stage.definition.clone(),
        disk: godwit_units::Bytes(0),
        vcpus: stage.vcpus,
        place: vec![],
    };
    let report = crate::check::check(node, &check, crate::check::Purpose::Arrive).await;
    if let Some(first) = report.blockers.first() {
        return Err(ApiError::new(Problem::Blocked, first.message.clone()).remedy(first.remedy.clone()));
    }
    crate::seen::answer(node, from, &stage).await?;
    // What a pre-cache has brought here is the mirror's to go on with.
    node.precaches().release(&stage.definition.volumes).await;
    if stage.holders.len() > proto::MOST_HOLDERS {
        let many = format!("its disks' blocks are at {} hosts", stage.holders.len());
        return Err(ApiError::new(Problem::Blocked, many).remedy("let a fill end before the next move"));
    }
    let volumes = stage.definition.volumes.clone();
    let parts = node.adopt_definition(stage.definition, stage.vcpus).await?;
    node.precaches().unmark(&volumes);
    let failed = |e: std::io::Error| ApiError::new(Problem::Failed, e.to_string());
    parts.may_follow.store(stage.postcopy, std::sync::atomic::Ordering::Release);
    let holders = stage.holders;
    parts.change(|file| file.holders = holders).map_err(failed)?;
    if let Some(signed) = &stage.capability {
        crate::covered::keep(&parts, signed).map_err(failed)?;
    }
    parts.keeper().ask(|reply| Input::Stage { ticket: stage.ticket, source: Box::new(stage.source), reply }).await?;
    let reads_shared = if stage.tells { reads_shared(&parts).await } else { None };
    Ok(Staged { keeps_pages: crate::kept::may_be(&parts), reads_shared })
}

/// How fast this host reads those of the VM's disks that lie on shared storage, of several the slowest.
async fn reads_shared(parts: &Parts) -> Option<BitRate> {
    let shared: Vec<_> = parts.disks().into_iter().filter(|disk| disk.is_shared()).collect();
    let tried = tokio::task::spawn_blocking(move || {
        shared.iter().map(|disk| disk.replica().glance_rate()).collect::<Result<Vec<u64>, _>>()
    });
    match tried.await.ok()? {
        Ok(rates) => rates.into_iter().min().map(|bytes| BitRate(bytes.saturating_mul(8))),
        Err(error) => {
            tracing::info!(vm = parts.name, %error, "memory is not named from its disks");
            None
        }
    }
}

/// Makes the place: replicas, endpoints, an incoming QEMU that waits for its stream.
///
/// # Errors
/// What is in the way.
pub async fn prepare(node: &Arc<Node>, parts: &Arc<Parts>, ticket: Ticket) -> Result<(), ApiError> {
    crate::effects::end_qemu(parts).await;
    node.prepare_host(parts).await?;
    for disk in parts.disks() {
        disk.receive(ticket).await?;
    }
    if let Some(moving) = parts.moving() {
        crate::fill::meter(node, &moving);
    }
    let qemu = node.start_qemu(parts, godwit_vmm::Start::Incoming).await?;
    if parts.may_follow.load(std::sync::atomic::Ordering::Acquire) {
        crate::effects::on_qemu(&qemu, Qemu::allow_postcopy).await.map_err(|error| {
            let message = format!("memory cannot follow the guest to `{}`: {}", node.name(), error.message);
            ApiError::new(Problem::Blocked, message).remedy(
                "move it without --memory-postcopy; or let QEMU use userfaultfd there (/usr/share/godwit/memory-postcopy.conf as a drop-in of \
                 its node's unit, a kernel with CONFIG_USERFAULTFD, memory of pages of 4 KiB)",
            )
        })?;
    }
    Ok(())
}

/// When a disk's blocks come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comes {
    /// Before its VM: the stream is a mirror's.
    Before,
    /// After it: the stream says what they have to be.
    After,
}

/// A disk's stream came.
pub fn disk(parts: &Arc<Parts>, ticket: Ticket, volume: VolumeId, stream: Stream, comes: Comes) {
    let Some(moving) = arriving(parts, ticket) else { return };
    let _in = crate::trace::span(parts).entered();
    let Some(disk) = parts.disks().into_iter().find(|d| d.id == volume) else {
        tracing::warn!(vm = parts.name, volume = volume.0, "a stream of a volume that the VM does not have");
        return;
    };
    let parts = parts.clone();
    crate::trace::spawn(async move {
        let taking = async {
            match comes {
                Comes::Before => disk.apply(stream, ticket).await,
                Comes::After => disk.learn(stream, ticket).await,
            }
        };
        let result = tokio::select! {
            result = taking => result,
            () = moving.over.cancelled() => Ok(()),
        };
        match result {
            Ok(()) => loaded(&parts, &moving).await,
            Err(error) => lost(&parts, &moving, &error.context(format!("disk `{}`", disk.name))).await,
        }
    });
}

/// A memory stream came.
pub(crate) fn memory(parts: &Arc<Parts>, ticket: Ticket, key: Option<Secret>, others: Arc<Shown>, stream: Stream) {
    let Some(moving) = arriving(parts, ticket) else { return };
    let _in = crate::trace::span(parts).entered();
    let parts = parts.clone();
    crate::trace::spawn(async move {
        let result = tokio::select! {
            result = feed(&parts, &moving, key, others, stream.split()) => result,
            () = moving.over.cancelled() => Ok(()),
        };
        match result {
            // The source brings the rest through another stream: its QEMU and ours know what has come.
            Err(error) if moving.follows() => {
                tracing::warn!(vm = parts.name, error = format!("{error:#}"), "the stream of a post-copy broke off");
            }
            // What QEMU has loaded needs its stream no more.
            Err(_) if moving.memory_loaded.load(std::sync::atomic::Ordering::Acquire) => {}
            Err(error) => lost(&parts, &moving, &error).await,
            Ok(()) => {}
        }
    });
}

fn arriving(parts: &Parts, ticket: Ticket) -> Option<Arc<Moving>> {
    let moving = parts.moving().filter(|m| m.role == MoveRole::Destination && m.ticket == ticket);
    if moving.is_none() {
        tracing::warn!(vm = parts.name, %ticket, "a stream of an attempt that is not under way");
    }
    moving
}

async fn lost(parts: &Parts, moving: &Moving, error: &anyhow::Error) {
    let error = format!("{error:#}");
    if !parts.takes_part_in(moving) {
        // An attempt that is over; the one under way has nothing to do with it.
        tracing::debug!(vm = parts.name, error, "a stream of an earlier attempt ended");
        return;
    }
    tracing::warn!(vm = parts.name, error, "the move failed at the destination");
    moving.failed(error);
    // What came so far is worth nothing without the rest. Means nothing any more once the VM is granted.
    parts.keeper().tell(Input::Event(Event::Cancel)).await;
}

async fn feed(
    parts: &Arc<Parts>,
    moving: &Arc<Moving>,
    key: Option<Secret>,
    others: Arc<Shown>,
    (back, mut from): (SendHalf, RecvHalf),
) -> Result<()> {
    let qemu = parts.qemu().context("the incoming QEMU is gone")?;
    let mut events = parts.events().context("the incoming QEMU is gone")?;
    let socket = parts.run.join("incoming.sock");
    let _ = std::fs::remove_file(&socket);
    // QEMU listens; it makes the socket.
    let path = socket.clone();
    crate::effects::on_qemu(&qemu, move |q| q.migrate_incoming(&path)).await?;
    let stream = connect(&socket).await?;
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
    let std = stream.into_std()?;
    let writer = std.try_clone()?;
    // One description for both: the writer's thread polls for room.
    let returning = tokio::net::UnixStream::from_std(std)?;

    let delivered = Arc::new(Delivered::default());
    let (sender, pieces) = tokio::sync::mpsc::channel(memory_in::PIECES);
    let max_ram = parts.definition().spec.memory.0.saturating_add(FIRMWARE);
    let limits = Limits { max_ram, ..Limits::default() };
    let (counted, shown) = (delivered.clone(), moving.shown.clone());
    // What was said of a page lies in there: no copy is kept for differences.
    let ram = qemu.ram(parts.definition().spec.memory).and_then(|ram| {
        rustix::net::sockopt::set_socket_send_buffer_size(&writer, UNREAD)?;
        Ok((Witness::new(Qemu::RAM, ram.try_clone()?), Witness::new(Qemu::RAM, ram)))
    });
    let ram = ram.inspect_err(|error| tracing::info!(vm = parts.name, %error, "a copy of what comes last is kept"));
    // The source has been told what is kept here, or has given up asking.
    parts.stop_looking();
    let keeping = parts.keeping.clone().lock_owned().await;
    let into = parts.clone();
    let (feedback, fed_back) = tokio::sync::mpsc::channel(memory_in::FEEDBACKS);
    let writing = crate::trace::spawn_blocking(move || {
        let _keeping = keeping;
        let here = Here::new(Replicas::new(into.disks()), others, shown.clone());
        let mut decoder = Decoder::new(limits)?.with_disks(Box::new(here));
        let (ram, later) = ram.ok().unzip();
        if let Some(ram) = ram {
            decoder = decoder.with_ram(ram);
        }
        if let Some(mut checkpoint) = key.and_then(|key| crate::kept::open(&into, &CheckpointKey(key.0))) {
            if let Some(ram) = later {
                checkpoint = checkpoint.later(ram);
            }
            decoder = decoder.with_checkpoint(checkpoint);
        }
        let result = memory_in::write(&writer, decoder, &counted, pieces, &feedback);
        shown.forget();
        if result.as_ref().is_err_and(|error| error.is::<godwit_memory::WireError>()) {
            // What is kept may be what is wrong: the next try does without.
            crate::kept::drop_pages(&into);
        }
        result
    });
    let writing = async { writing.await.map_err(|_| anyhow!("the writer of QEMU's stream panicked"))? };
    let receiving = async move {
        loop {
            // Whoever waits for some page waits for this.
            let patience = if moving.follows() { Duration::ZERO } else { memory_in::GATHER };
            let Some(piece) = from.read_gathered(memory_in::PIECE, patience).await? else { break };
            if sender.send(piece).await.is_err() {
                break;
            }
        }
        anyhow::Ok(())
    };
    let returning = give_back(returning, fed_back, back);
    let loading = async {
        loop {
            match events.recv().await {
                Ok(QemuEvent::Migration(MigrationStatus::Postcopy)) if !moving.follows() => {
                    // It reads the devices' state now, and asks for the pages that this needs.
                    while !matches!(crate::effects::on_qemu(&qemu, Qemu::state).await, Ok(godwit_vmm::State::Stopped)) {
                        anyhow::ensure!(qemu.is_alive(), "the incoming QEMU is gone");
                        tokio::time::sleep(LISTENS).await;
                    }
                    let given = delivered.given();
                    while !delivered.is_verified_to(given) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    moving.follows.store(true, std::sync::atomic::Ordering::Release);
                    moving.memory_loaded.store(true, std::sync::atomic::Ordering::Release);
                    loaded(parts, moving).await;
                }
                Ok(QemuEvent::Migration(MigrationStatus::Completed)) if moving.follows() => {}
                Ok(QemuEvent::Migration(MigrationStatus::Completed)) => {
                    // The digest of what QEMU has loaded may come a moment after it.
                    while !delivered.is_verified() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    moving.memory_loaded.store(true, std::sync::atomic::Ordering::Release);
                    loaded(parts, moving).await;
                }
                Ok(QemuEvent::Migration(MigrationStatus::Failed)) => {
                    return Err(anyhow!("the incoming QEMU cannot load the state; its log says why"));
                }
                Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(_) => return Err(anyhow!("the incoming QEMU is gone")),
            }
        }
    };
    let pipes = async { tokio::try_join!(writing, receiving, returning).map(drop) };
    tokio::select! {
        result = loading => result,
        result = async { pipes.await?; std::future::pending::<Result<()>>().await } => result,
    }
}

async fn connect(socket: &std::path::Path) -> Result<tokio::net::UnixStream> {
    let deadline = Instant::now() + CONNECT;
    loop {
        match tokio::net::UnixStream::connect(socket).await {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() > deadline => {
                return Err(e).context("the incoming QEMU does not listen");
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// QEMU's return path, on its way to the source, and between its messages the decoder's. QEMU's SHUT stays here: the source's node says
/// that one.
async fn give_back(
    mut qemu: tokio::net::UnixStream,
    mut feedback: tokio::sync::mpsc::Receiver<Feedback>,
    mut back: SendHalf,
) -> Result<()> {
    let mut path = ReturnPath::new();
    let mut buffer = vec![0; 4096];
    loop {
        let n = tokio::select! {
            read = qemu.read(&mut buffer) => read.unwrap_or(0),
            Some(feedback) = feedback.recv() => {
                let mut out = vec![];
                Message::from_feedback(feedback).encode(&mut out);
                back.write(out.into()).await?;
                continue;
            }
        };
        if n == 0 {
            // It has loaded everything, or it is gone; its events tell which.
            back.finish()?;
            return Ok(());
        }
        path.push(&buffer[..n])?;
        let out = path.for_source()?;
        if !out.is_empty() {
            back.write(out.into()).await?;
        }
    }
}

/// One more thing is here. When all are, the machine is told.
async fn loaded(parts: &Arc<Parts>, moving: &Moving) {
    let memory = moving.memory_loaded.load(std::sync::atomic::Ordering::Acquire);
    if memory && parts.disks().iter().all(|d| d.has_everything(moving.ticket)) {
        let event = if moving.follows() { Event::Listens } else { Event::Loaded };
        parts.keeper().tell(Input::Event(event)).await;
    }
}

/// The guest was started here: tell the source for its figures, announce, and prove that the network leads here.
pub fn runs(node: &Arc<Node>, parts: &Arc<Parts>) {
    let Some(moving) = parts.moving().filter(|m| m.role == MoveRole::Destination) else { return };
    if moving.arrived.swap(true, std::sync::atomic::Ordering::Relaxed) {
        return;
    }
    let (node, parts) = (node.clone(), parts.clone());
    // It has moved: nobody comes back to what was kept for another try. After a restart the keys may be those of what its old hosts keep.
    if !moving.recovered {
        crate::kept::forget(&parts.folder);
    }
    moving.recycling.arrived(&parts, &moving.peer.name);
    crate::trace::spawn(async move {
        let started = Instant::now();
        reach_async(Point::Proving, parts.id).await;
        // The event may come a moment after the command's answer.
        while parts.resumed().is_none() && started.elapsed() < RESUMED {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if let Some((_, unix_us)) = parts.resumed() {
            moving.tracker.update(|p| p.resumed_unix_us = Some(unix_us));
            parts.note(&moving);
        }
        // Known from before, if the node was restarted since.
        if let Some(unix_us) = moving.tracker.get().resumed_unix_us {
            let ago_us = match parts.resumed() {
                Some((at, _)) => u64::try_from(at.elapsed().as_micros()).unwrap_or(u64::MAX),
                None => crate::tracker::unix_us(std::time::SystemTime::now()).saturating_sub(unix_us),
            };
            node.note(&moving.peer, &Note::Resumed { ticket: moving.ticket, unix_us, ago_us });
        }
        if let Some(qemu) = parts.qemu() {
            let _ = crate::effects::on_qemu(&qemu, Qemu::announce_self).await;
        }
        let proving = async {
            let proved = node.probe(&parts, PROOF).await;
            if proved.is_ok() {
                let after_ms = started.elapsed().as_secs_f64() * 1000.0;
                moving.tracker.update(|p| p.network_proved_ms = Some(after_ms));
                node.note(&moving.peer, &Note::Proved { ticket: moving.ticket, after_ms });
            }
            proved
        };
        let following = async {
            crate::drain::until_drained(&node, &parts, &moving).await;
            crate::effects::plug(&parts).await
        };
        let (proved, unplugged) = tokio::join!(proving, following);
        if moving.over.is_cancelled() {
            return;
        }
        if !crate::fill::until_whole(&parts, &moving).await {
            return;
        }
        match proved {
            Ok(()) => moving.end(Outcome::Completed, unplugged),
            Err(error) => moving.end(Outcome::NetworkUnproved, Some(error.to_string())),
        }
    });
}
