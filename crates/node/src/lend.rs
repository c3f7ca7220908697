//! Gives blocks of disks that were handed on before they had left: the other side of [`crate::fill`].
//!
//! # What can go wrong
//!
//! *Somebody asks who may not.* Two may: the host that this one handed the VM to, as its own record says; and one that shows the
//! controller's word that it is to be a later owner of the VM, or that it took back what it was about to hand on ([`owner`]). An order
//! may come to nothing; then its destination has read what it would have brought it anyway.
//!
//! *The copy is removed while it is needed.* What was handed on is written down before it is ([`crate::registry::VmFile::lent`]),
//! and the VM cannot be removed here until its owner has said that it has all.
//!
//! *Memory goes over the same link.* A guest's last rounds want all of it, and what follows another guest behind its back would have half, on a connection
//! of its own: it goes beside memory of this host's guests only as [`Beside`] allows. What a guest waits for goes at once.
//!
//! *The copy changes.* Nobody writes to a copy that was given up but a move that brings the VM back, and such a move says only
//! what the disk has to hold, while anything is lent. A block is given only with the stamp that was asked for.

use crate::aside::Aside;
use crate::covered::owner;
use crate::disk::{Disk, hear};
use crate::node::Node;
use crate::pace::Paced;
use crate::parts::{Moving, Parts, lock};
use anyhow::Result;
use godwit_api::host::MoveRole;
use godwit_api::progress::PhaseName;
use godwit_api::{ApiError, Problem};
use godwit_handoff::Record;
use godwit_link::resume::ACK_EVERY;
use godwit_link::{SendHalf, Stream};
use godwit_trust::{Capability, CapabilityError, SignedCapability};
use godwit_units::{Generation, Lineage, VmId, VolumeId};
use godwit_volume::Packer;
use godwit_volume::fetch::{Answer, Lane, Server};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long the first of two streams waits for the second.
const PAIRING: Duration = Duration::from_secs(30);
/// Streams that wait: two of each disk of each VM that is filled from here, at one moment.
const MOST_WAITING: usize = 256;
/// Questions that are taken from the link ahead of their being worked off, in batches.
const AHEAD: usize = 16;
/// Answers that wait for the link: what a demand may have to wait behind on its own lane.
const ANSWERS: usize = 4;
/// How much lower than a demand's the priority is of what packs what nobody waits for.
const NICE: i32 = 10;

/// For each byte that goes behind a guest's back so many of a guest's memory go, while any goes from here.
const MEMORYS_SHARE: u64 = 16;
/// Where memory does not go on: so long after the last one the next answer goes all the same.
const LONGEST_TURN: Duration = Duration::from_secs(1);
/// And after such a time, because its link is down or its move waits for somebody, as many as there are.
const STANDS: Duration = Duration::from_secs(5);
/// Between two looks at how much memory has gone.
const TURN: Duration = Duration::from_millis(20);

/// By what right somebody asks for a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// As whose owner.
    pub lineage: Lineage,
    /// As the lineage.
    pub generation: Generation,
    /// What shows it, where the VM did not go from here to there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<SignedCapability>,
}

/// Streams whose other one has not come yet.
#[derive(Debug, Default)]
pub struct Lending {
    waiting: Mutex<BTreeMap<(String, u64), Half>>,
}

#[derive(Debug)]
struct Half {
    fill: bool,
    stream: Stream,
    since: Instant,
}

/// Whether `from` may have blocks of a VM that is not this host's any more.
fn covered(node: &Node, from: &str, asked: &Fetch) -> Result<Arc<Parts>, ApiError> {
    let refuse = |why: &dyn std::fmt::Display| {
        tracing::warn!(peer = from, %why, "a node asks for blocks that it was not given");
        ApiError::new(Problem::Forbidden, format!("{from} may not have blocks of VM {}: {why}", asked.vm.0))
            .remedy("only a move that the controller has ordered allows this; if nobody did, look after that host")
    };
    let parts = node.vm(asked.vm).ok_or_else(|| refuse(&"it is not known here"))?;
    if !parts.definition().volumes.contains(&asked.volume) {
        return Err(refuse(&"the volume is not that VM's"));
    }
    let file = parts.file();
    // The owner that the VM went to from here, and what it owns it by.
    let (went_to, lineage, generation) = match node.record(asked.vm).ok_or_else(|| refuse(&"it was never here"))? {
        Record::Released(ticket) | Record::Sealed(ticket) => {
            let order = file.order.filter(|order| order.id == ticket.mv);
            (order, ticket.lineage, ticket.generation)
        }
        // It was to come back, and its owner is its owner still, or again: what that was lent it may have.
        Record::Staged(ticket) | Record::Prepared(ticket) | Record::Refused(ticket) | Record::Returned(ticket)
            if file.lent.contains(&asked.volume) =>
        {
            (file.order, ticket.lineage, Generation(ticket.generation.0.saturating_sub(1)))
        }
        _ => return Err(refuse(&"it was not handed on from here")),
    };
    if went_to.is_some_and(|order| order.to.name.as_str() == from)
        && (asked.lineage, asked.generation) >= (lineage, generation)
    {
        return Ok(parts);
    }
    let check = || -> Result<(), CapabilityError> {
        let signed =
            asked.capability.as_ref().ok_or(CapabilityError::Form("it shows no capability of the controller"))?;
        let allowed = node.credentials().open(signed)?;
        owner(&allowed, from, asked.lineage, asked.generation)?;
        Capability::same("the VM", &allowed.vm, &asked.vm)?;
        if !allowed.volumes.contains(&asked.volume) {
            return Capability::same("the volumes", &allowed.volumes, &vec![asked.volume]);
        }
        if (asked.lineage, asked.generation) <= (lineage, generation) {
            let later = format!("one later than {}", generation.0);
            let asked = asked.generation.0.to_string();
            return Err(CapabilityError::Other { what: "a generation, and it has to be", allowed: later, asked });
        }
        Ok(())
    };
    check().map_err(|why| refuse(&why))?;
    Ok(parts)
}

/// The owner has all that it needs of a volume: what is here may go.
///
/// # Errors
/// When it is not the owner, or that cannot be written down.
pub fn released(node: &Node, from: &str, asked: &Fetch) -> Result<(), ApiError> {
    let parts = covered(node, from, asked)?;
    parts
        .change(|file| file.lent.retain(|volume| *volume != asked.volume))
        .map_err(|e| ApiError::new(Problem::Failed, format!("cannot write {}: {e}", parts.folder.display())))
}

/// One of the two streams of a session came.
pub fn streamed(node: &Arc<Node>, from: &str, right: &Fetch, pair: u64, fill: bool, stream: Stream) {
    let parts = match covered(node, from, right) {
        Ok(parts) => parts,
        Err(_) => return,
    };
    let Some(disk) = parts.disks().into_iter().find(|disk| disk.id == right.volume) else { return };
    let other = {
        let mut waiting = lock(&node.lending().waiting);
        waiting.retain(|_, half| half.since.elapsed() < PAIRING);
        match waiting.remove(&(from.to_owned(), pair)) {
            Some(half) if half.fill != fill => half.stream,
            // The same lane twice is nobody's protocol.
            Some(_) => return,
            None => {
                if waiting.len() < MOST_WAITING {
                    waiting.insert((from.to_owned(), pair), Half { fill, stream, since: Instant::now() });
                }
                return;
            }
        }
    };
    let (demand, behind) = if fill { (other, stream) } else { (stream, other) };
    let (from, node) = (from.to_owned(), Arc::downgrade(node));
    crate::trace::spawn(async move {
        tracing::info!(volume = disk.name, to = from, "lending blocks");
        if let Err(error) = serve(&disk, demand, behind, &node).await {
            // As it does when the owner has all, or is not that any more.
            tracing::debug!(
                volume = disk.name,
                to = from,
                error = format!("{error:#}"),
                "a session that lends blocks ended"
            );
        }
    });
}

async fn serve(disk: &Arc<Disk>, demand: Stream, fill: Stream, node: &Weak<Node>) -> Result<()> {
    let ((out_demand, from_demand), (out_fill, _from_fill)) = (demand.split(), fill.split());
    let (asked, mut questions) = mpsc::channel::<Vec<Vec<u8>>>(AHEAD);
    let (demands, to_demand) = mpsc::channel::<Vec<u8>>(ANSWERS);
    let (fills, to_fill) = mpsc::channel::<Vec<u8>>(ANSWERS);
    let working = async {
        let (mut server, mut beside) = (Server::new(), Beside::default());
        let memory = || node.upgrade().and_then(|node| memory_sent(&node));
        loop {
            let (mut batches, mut room, mut place) = (vec![], [Lane::Demand], None);
            tokio::select! {
                biased;
                batch = questions.recv() => match batch {
                    Some(batch) => batches = batch,
                    None => return anyhow::Ok(()),
                },
                free = demands.reserve(), if server.wants(Lane::Demand) => place = Some(free?),
                free = beside.turn(memory, fills.reserve()), if server.wants(Lane::Fill) && !server.wants(Lane::Demand) => {
                    room = [Lane::Fill];
                    place = Some(free?);
                }
            }
            let free = place.is_some();
            let (back, answer) = disk
                .clone()
                .blocking(move |disk| {
                    let mut work = || -> Result<Option<Answer>> {
                        for question in &batches {
                            server.handle(question)?;
                        }
                        Ok(if free { server.poll(disk.replica(), &room)? } else { None })
                    };
                    let answer = work();
                    if let Some((block, error)) = server.take_unreadable() {
                        tracing::error!(volume = disk.name, block, %error, "a block that is lent cannot be read; its owner is told that it lacks here");
                    }
                    (server, answer)
                })
                .await;
            server = back;
            if let (Some(place), Some(answer)) = (place, answer?) {
                beside.went(answer.by, answer.message.len() as u64, Instant::now());
                place.send(answer.message);
            }
        }
    };
    tokio::select! {
        result = working => result,
        result = hear(from_demand, asked) => result,
        result = say(out_demand, to_demand) => result,
        result = say_behind(out_fill, to_fill) => result,
    }
}

/// Bytes of guests' memory that this host has sent, where any goes now.
fn memory_sent(node: &Node) -> Option<u64> {
    let goes = |moving: &Moving| {
        let phase = moving.tracker.phase();
        moving.role == MoveRole::Source
            && !moving.tracker.ended()
            && matches!(phase, PhaseName::Memory | PhaseName::Stop | PhaseName::Drain)
    };
    // To whichever host: sites have one link as a rule, and several hosts.
    node.vms().iter().filter_map(|parts| parts.moving()).any(|moving| goes(&moving)).then(|| {
        let sessions = node.peers().sessions();
        sessions.iter().map(|(_, session)| session.counters().lane(godwit_link::Lane::Memory)).sum()
    })
}

/// What goes behind a guest's back, beside memory that goes as well.
#[derive(Debug, Default)]
struct Beside {
    /// What had gone of memory when the last answer went, and when that was; none: no memory goes.
    last: Option<(u64, Instant)>,
    /// What has gone of memory, and when it became so much.
    memory: (u64, Option<Instant>),
    /// Bytes of that answer.
    answer: u64,
}

impl Beside {
    /// Whether the next answer may go. `memory`: bytes of it that have gone, where some goes.
    fn may_go(&mut self, memory: Option<u64>, now: Instant) -> bool {
        let Some(memory) = memory else {
            self.last = None;
            return true;
        };
        if self.memory.0 != memory || self.last.is_none() {
            self.memory = (memory, Some(now));
        }
        let (before, since) = *self.last.get_or_insert((memory, now));
        let stands = self.memory.1.is_some_and(|since| now.saturating_duration_since(since) >= STANDS);
        memory.saturating_sub(before) > self.answer.saturating_mul(MEMORYS_SHARE)
            || now.saturating_duration_since(since) >= LONGEST_TURN
            || stands
    }

    /// An answer went.
    fn went(&mut self, by: Lane, bytes: u64, now: Instant) {
        if by == Lane::Fill {
            self.answer = bytes;
            self.last = self.last.map(|_| (self.memory.0, now));
        }
    }

    /// Waits for its turn, and then for room.
    async fn turn<T>(&mut self, memory: impl Fn() -> Option<u64>, room: impl Future<Output = T>) -> T {
        while !self.may_go(memory(), Instant::now()) {
            tokio::time::sleep(TURN).await;
        }
        room.await
    }
}

/// Answers that a guest waits for: no level is worth a window that begins anew there.
async fn say(mut out: SendHalf, mut answers: mpsc::Receiver<Vec<u8>>) -> Result<()> {
    let mut packer = Packer::new()?;
    while let Some(answer) = answers.recv().await {
        let mut wire = vec![];
        packer.push(&answer, &mut wire)?;
        packer.flush(&mut wire)?;
        out.write(wire.into()).await?;
    }
    Ok(())
}

/// Answers that nobody waits for, packed as hard as pays. Whoever asks has only so much asked for that has not come, so an answer is late because the
/// link is, as long as more is on its way than may be there and not acknowledged; after that because nobody asks, or because a guest or the disk here comes first.
///
/// On a thread of its own: a higher level takes a millisecond for a piece, in which demands would not be looked at.
async fn say_behind(mut out: SendHalf, mut answers: mpsc::Receiver<Vec<u8>>) -> Result<()> {
    let (mut packer, aside) = (Paced::new()?, Aside::new("lend", NICE)?);
    loop {
        let waits = Instant::now();
        let Some(answer) = answers.recv().await else { return Ok(()) };
        let counters = out.counters();
        if counters.written.saturating_sub(counters.acknowledged).0 < ACK_EVERY {
            packer.idled(waits.elapsed());
        }
        let packed = aside.run(move || {
            let mut wire = vec![];
            packer.push(&answer, &mut wire)?;
            packer.flush(&mut wire)?;
            anyhow::Ok((packer, wire))
        });
        let wire;
        (packer, wire) = packed.await??;
        out.write(wire.into()).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_waits_for_has_a_small_share_of_what_memory_has_and_all_of_the_link_without_it() {
        const ANSWER: u64 = 64 << 10;
        let (mut beside, began) = (Beside::default(), Instant::now());
        let mut went = |memory: Option<u64>, ms: u64| {
            let now = began + Duration::from_millis(ms);
            let goes = beside.may_go(memory, now);
            if goes {
                beside.went(Lane::Fill, ANSWER, now);
            }
            goes
        };
        assert!((0..100).all(|_| went(None, 0)), "no memory goes");
        // 100 Mbit/s of memory for ten seconds: a seventeenth of all bytes at the most, and not much less.
        let (bytes, mut answers) = (|ms: u64| ms * 12_500, 0);
        for ms in (0..10_000).step_by(20) {
            answers += u64::from(went(Some(bytes(ms)), ms));
        }
        let share = answers * ANSWER * MEMORYS_SHARE * 100 / bytes(10_000);
        assert!((75..=100).contains(&share), "{share} % of what it may have");
        // Memory stands still: perhaps not for long, and then for as long as it likes.
        let stands = (10_000..14_900).step_by(20).filter(|ms| went(Some(bytes(10_000)), *ms)).count();
        assert!((4..=5).contains(&stands), "{stands} answers in five seconds");
        assert!((15_000..20_000).step_by(20).all(|ms| went(Some(bytes(10_000)), ms)), "nothing goes beside it");
        assert!(!went(Some(bytes(10_001)), 20_000), "it goes on");
        assert!((0..100).all(|_| went(None, 20_000)), "it has ended");
        assert!(!went(Some(bytes(10_001)), 20_000), "and another one begins");
    }
}
