//! Memory that follows its guest (post-copy), from the guest's start at the destination to the last page.
//!
//! As a rule there is nothing to do here: the stream that brought the rounds brings the rest, page by page as QEMU says them, and its way
//! back carries what the guest waits for. A cut of the link stalls both, and the link goes on where it was.
//!
//! # What can go wrong
//!
//! *A node dies.* Its stream is gone, and with it the socket of its QEMU. That pauses the post-copy there, while the guest goes on with what it has.
//! The source's node breaks its own QEMU off as well, opens another stream ([`Hello::Drain`]), and both QEMUs agree over it what has come
//! (`migrate-recover` and `migrate resume`). On such a stream nothing is packed: QEMU's bytes pass as they are.
//!
//! Only once the guest runs at the destination: until then it needs no page, and the source may have to go back ([`Qemu::go_back`]), which
//! it could not while both QEMUs agree.
//!
//! *A stream breaks off when QEMU has sent its last page, or while both QEMUs agree.* QEMU 7.2 can go on with neither. What was under way is
//! lost, and the QEMU ends, so that this is said.
//!
//! *The source's QEMU dies.* Nobody has the pages then. Its machine says so, and the destination's stands still ([`godwit_handoff::Body::Lost`]).
//!
//! *The destination's node dies before it has written that the last page is here.* It asks its QEMU again when it is back.

use crate::actor::Input;
use crate::effects::on_qemu;
use crate::failpoint::{Point, reach_async};
use crate::node::Node;
use crate::parts::{Moving, Parts};
use crate::proto::{self, Hello};
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::host::{MoveRole, Ownership};
use godwit_api::progress::NoteKind;
use godwit_handoff::{Event, Record};
use godwit_link::{Lane, Priority, RecvHalf, SendHalf, Stream};
use godwit_memory::ReturnPath;
use godwit_units::Bytes as Amount;
use godwit_vmm::{MigrationStatus, Qemu, VmmError};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// The pauses between two tries to go on.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// How long QEMU may take to connect, or to be connected to, and to see that its stream has broken off.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks whether the last page is here.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes that are under way, at most: a guest waits behind them.
const WINDOW: Amount = Amount(512 << 10);
/// What is read from QEMU at once.
const READ: usize = 64 << 10;

/// Why a QEMU ends that has what a guest elsewhere needs.
const STUCK: &str = "the stream of a post-copy broke off where QEMU cannot go on with it: what was under way is lost, and its QEMU ends";

/// Whether this host's QEMU has pages that a guest elsewhere needs, or may.
#[must_use]
pub fn is_needed(parts: &Parts, moving: &Moving) -> bool {
    moving.role == MoveRole::Source && moving.follows() && parts.view().ownership == Ownership::WaitsForPeer
}

/// A node that was restarted goes on giving pages.
pub fn go_on(node: &Arc<Node>, parts: &Arc<Parts>, record: Option<Record>) {
    let (Some(Record::Sealed(ticket)), Some(moving), Some(qemu)) = (record, parts.moving(), parts.qemu()) else {
        return;
    };
    if moving.ticket != ticket {
        return;
    }
    let (node, parts) = (node.clone(), parts.clone());
    crate::trace::spawn(async move {
        // One that does not answer now may have them all the same, and the guest over there stands until somebody gives them.
        let status = loop {
            match on_qemu(&qemu, Qemu::migration).await {
                Ok(info) => break info.status,
                Err(error) => {
                    tracing::warn!(vm = parts.name, %error, "does its QEMU have pages of a guest that went? It is asked again")
                }
            }
            tokio::select! {
                () = moving.over.cancelled() => return,
                () = tokio::time::sleep(LONGEST_PAUSE) => {}
            }
            if parts.qemu().is_none() {
                return;
            }
        };
        if matches!(status, MigrationStatus::Postcopy | MigrationStatus::Paused) {
            moving.follows.store(true, Ordering::Release);
            moving.handed.cancel();
            serve(&node, &parts, &moving).await;
        }
    });
}

/// Source: sees to it that a stream leads from its QEMU to the destination's, from when the guest runs there for as long as the move lasts.
pub async fn serve(node: &Arc<Node>, parts: &Arc<Parts>, moving: &Arc<Moving>) {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::select! {
            () = moving.over.cancelled() => return,
            () = async {
                moving.gone.cancelled().await;
                tokio::time::sleep(pause).await;
            } => {}
        }
        let began = Instant::now();
        let served = tokio::select! {
            served = give(node, parts, moving) => served,
            () = moving.over.cancelled() => return,
        };
        if let Err(error) = served {
            tracing::info!(
                vm = parts.name,
                error = format!("{error:#}"),
                "post-copy does not go on yet; it is tried again"
            );
        }
        pause = if began.elapsed() > LONGEST_PAUSE { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
    }
}

async fn give(node: &Arc<Node>, parts: &Arc<Parts>, moving: &Arc<Moving>) -> Result<()> {
    let qemu = parts.qemu().context("the QEMU that has the pages is gone")?;
    let session = node.peers().session(&moving.peer).await.map_err(|e| anyhow!("{e}"))?;
    if !on_qemu(&qemu, pauses).await? {
        tracing::error!(vm = parts.name, "{STUCK}");
        on_qemu(&qemu, |q| {
            q.kill();
            Ok(())
        })
        .await?;
        bail!("{STUCK}");
    }
    crate::parts::lock(&moving.socket).take();
    let behind = behind(parts, moving);
    on_qemu(&qemu, move |q| q.follow(behind)).await?;
    let hello = Hello::Drain { ticket: moving.ticket };
    let stream = session.open_stream_with(Lane::Memory, Priority::Bulk, proto::encode(&hello), WINDOW).await?;
    let socket = parts.run.join("drain.sock");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
    let path = socket.clone();
    on_qemu(&qemu, move |q| q.resume_postcopy(&path)).await?;
    let accepted = tokio::time::timeout(PATIENCE, listener.accept()).await.context("QEMU does not go on")?;
    let _ = std::fs::remove_file(&socket);
    moving.note(NoteKind::Retry, "the stream broke off: memory follows the guest through another one");
    let (from, to) = accepted.context("QEMU does not connect")?.0.into_split();
    let (out, back) = stream.split();
    let resumed = tokio::sync::Notify::new();
    let holding = async {
        resumed.notified().await;
        let held = from.as_ref().as_fd().try_clone_to_owned()?;
        on_qemu(&qemu, move |q| {
            q.let_go();
            q.hold(held.as_fd())
        })
        .await?;
        std::future::pending::<Result<()>>().await
    };
    let there = async {
        let mut from = &from;
        pass(&mut from, out).await
    };
    tokio::try_join!(there, answers(back, to, &resumed), holding).map(drop)
}

/// Whether QEMU can go on through another stream.
fn pauses(qemu: &Qemu) -> Result<bool, VmmError> {
    match qemu.pause_postcopy() {
        Err(VmmError::Stuck) => Ok(false),
        paused => paused.map(|()| true),
    }
}

/// How much goes behind the guest's back in a second: as was decided when it went, or, in a node that was not there then, the same part of
/// what the move may take.
fn behind(parts: &Parts, moving: &Moving) -> Option<Amount> {
    let decided = Some(Amount(moving.behind.load(Ordering::Acquire))).filter(|behind| behind.0 > 0);
    decided.or_else(|| {
        let limit = parts.file().order.filter(|order| order.id == moving.ticket.mv)?.limit?;
        Some(crate::outgoing::behind(limit.bytes_in(Duration::from_secs(1)).0 as f64))
    })
}

/// QEMU's bytes, as they are.
async fn pass(from: &mut &tokio::net::unix::OwnedReadHalf, mut out: SendHalf) -> Result<()> {
    loop {
        from.readable().await?;
        let mut piece = vec![0; READ];
        match from.try_read(&mut piece) {
            Ok(0) => bail!("QEMU has closed its stream"),
            Ok(n) => {
                piece.truncate(n);
                out.write(piece.into()).await?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e).context("QEMU's migration socket broke"),
        }
    }
}

/// The destination's return path without its SHUT: what that would end is ended by the hand-off.
async fn answers(
    mut back: RecvHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    resumed: &tokio::sync::Notify,
) -> Result<()> {
    let mut path = ReturnPath::new();
    while let Some(piece) = back.read().await? {
        path.push(&piece)?;
        while let Some(message) = path.poll()? {
            if message.is_shut() || message.is_feedback() {
                continue;
            }
            let mut bytes = vec![];
            message.encode(&mut bytes);
            to.write_all(&bytes).await.context("QEMU's return path broke")?;
            if message.kind == godwit_memory::return_path::RESUME_ACK {
                resumed.notify_one();
            }
        }
    }
    bail!("the destination has closed the stream")
}

/// Destination: the source goes on through another stream.
pub fn take(parts: &Arc<Parts>, moving: Arc<Moving>, stream: Stream) {
    if !moving.follows() {
        return;
    }
    let _in = crate::trace::span(parts).entered();
    let parts = parts.clone();
    crate::trace::spawn(async move {
        let result = tokio::select! {
            result = receive(&parts, stream.split()) => result,
            () = moving.over.cancelled() => Ok(()),
        };
        if let Err(error) = result {
            tracing::info!(vm = parts.name, error = format!("{error:#}"), "post-copy does not go on yet");
        }
    });
}

async fn receive(parts: &Arc<Parts>, (mut back, mut from): (SendHalf, RecvHalf)) -> Result<()> {
    let qemu = parts.qemu().context("the QEMU that needs the pages is gone")?;
    let deadline = Instant::now() + PATIENCE;
    // Its own stream may have broken off only now.
    while on_qemu(&qemu, Qemu::migration).await?.status != MigrationStatus::Paused {
        anyhow::ensure!(Instant::now() < deadline, "QEMU does not see that its stream has broken off");
        tokio::time::sleep(LOOK).await;
    }
    let socket = parts.run.join("recover.sock");
    let _ = std::fs::remove_file(&socket);
    let path = socket.clone();
    on_qemu(&qemu, move |q| q.recover_postcopy(&path)).await?;
    let (mut answers, mut to) = connect(&socket).await?.into_split();
    let _ = std::fs::remove_file(&socket);
    let there = async {
        while let Some(piece) = from.read().await? {
            to.write_all(&piece).await.context("QEMU does not read its stream any more")?;
        }
        bail!("the source has closed the stream")
    };
    let here = async {
        let (mut path, mut buffer) = (ReturnPath::new(), vec![0; 4096]);
        loop {
            match answers.read(&mut buffer).await? {
                // All is here, or it broke off: that QEMU is asked for.
                0 => return std::future::pending::<Result<()>>().await,
                n => path.push(&buffer[..n])?,
            }
            let out = path.for_source()?;
            if !out.is_empty() {
                back.write(out.into()).await?;
            }
        }
    };
    tokio::select! {
        result = there => result,
        result = here => result,
    }
}

async fn connect(socket: &Path) -> Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket).await {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() > deadline => return Err(e).context("QEMU does not listen"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Destination: waits for the last page, and has that written down. At once where no page follows. Ends also with the move.
pub async fn until_drained(node: &Arc<Node>, parts: &Arc<Parts>, moving: &Arc<Moving>) {
    if !moving.follows() {
        return;
    }
    let began = Instant::now();
    reach_async(Point::Drain, parts.id).await;
    let drained = async {
        loop {
            // It may be silent while it waits for a page itself.
            if let Some(qemu) = parts.qemu()
                && on_qemu(&qemu, Qemu::migration).await.is_ok_and(|info| info.status == MigrationStatus::Completed)
            {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        if !moving.drained.is_cancelled() {
            let text = format!(
                "the last page of memory is here, {:.1} s after the guest's start",
                began.elapsed().as_secs_f64()
            );
            moving.note(NoteKind::Decision, text);
            moving.drained.cancel();
        }
        // Its keeper may be about to write that the guest was started.
        while matches!(node.record(parts.id), Some(Record::Prepared(_) | Record::Draining(_))) {
            parts.keeper().tell(Input::Event(Event::Drained)).await;
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        () = drained => {}
        () = moving.over.cancelled() => {}
    }
}
