//! Brings to this host what its disks lack: those of VMs that came here before their blocks (post-copy).
//!
//! A task for each such disk asks the hosts that have its blocks, for as long as something is absent: on demand what the guest waits
//! for, the rest behind its back. It goes on after cuts, and after restarts of either side, and ends where the disk does:
//! when all is here for good, or the VM is not. The machine that decides is [`Requester`]; [`crate::lend`] is the other side.
//!
//! # What can go wrong
//!
//! *A holder cannot be reached.* What is here is served; what is not is waited for. Where the guest has waited for
//! [`PAUSE_AFTER`] it is made to stand still ([`stand_still`]), so that no timeout of its own runs out, and goes on afterwards. QEMU
//! answers its monitor only when the guest's last requests are answered, so nothing else is done with the VM meanwhile. Of a VM that is to run
//! on ([`OnCut::Wait`]) that is said, and no more is done: only what waits in it waits.
//!
//! *The VM moves on.* When its disk is frozen nothing comes any more ([`Disk::freeze`] takes the requester away); when the move comes to
//! nothing, the fill goes on.
//!
//! *The guest powers off.* The fill goes on ([`while_off`]).
//!
//! *This node dies.* The words beside the replica say what is absent. The guest's requests come again from its QEMU.
//!
//! *A holder lets go too early, or never.* It keeps what it has until this node says that all of it is here durably, and that is said
//! until it is answered ([`release`]); who is to be told is written down with the VM.

use crate::actor::Input;
use crate::disk::{Disk, hear};
use crate::failpoint::{Point, reach_async};
use crate::lend::Fetch;
use crate::node::Node;
use crate::parts::{Moving, Parts, lock};
use crate::peers::carried;
use crate::proto::{self, Hello, Request};
use crate::registry::Power;
use anyhow::{Context, Result, anyhow};
use godwit_api::Problem;
use godwit_api::host::{MoveRole, PeerHost};
use godwit_api::progress::{NoteKind, Outcome, PhaseName};
use godwit_api::vm::OnCut;
use godwit_handoff::Record;
use godwit_link::{Lane, Priority};
use godwit_units::{Bytes as Amount, Generation, Lineage};
use godwit_vmm::Qemu;
use godwit_volume::fetch::{PAUSE_AFTER, Question, Requester, Step};
use godwit_volume::{BLOCK, Holder, Packer, give_way};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// The pauses between two tries to reach a holder.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest: what a cut costs when it is over.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// Between two looks at what has become durable, and at whether the guest starves.
const LOOK: Duration = Duration::from_secs(1);
/// After such a time what holders could not read is asked for again: somebody may repair it there.
const AGAIN: Duration = Duration::from_secs(10);
/// Between two looks at whether a guest that stands still may go on.
const STILL: Duration = Duration::from_millis(100);
/// How long a holder may take to hear that it is not needed any more.
const RELEASING: Duration = Duration::from_secs(20);
/// The longest pause between two tries to tell it.
const LONGEST_RELEASE_PAUSE: Duration = Duration::from_secs(30);
/// Messages of a holder that wait to be worked off: each at most 256 KiB.
const AHEAD: usize = 16;

/// Sessions that this process began.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// When this process began its first.
fn started_ns() -> u64 {
    static STARTED: OnceLock<u64> = OnceLock::new();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    *STARTED.get_or_init(|| u64::try_from(now() & u128::from(u64::MAX >> 1)).unwrap_or_default())
}

/// Why a fill stopped.
enum Ended {
    /// All is here, for good.
    Whole,
    /// The disk is frozen, or another's.
    Closed,
}

impl Disk {
    /// Whether the disk is this host's, and something may be absent.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.replica.is_shadow()
    }

    /// See [`Replica::is_whole`].
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.replica.is_whole()
    }

    /// How much is absent.
    #[must_use]
    pub fn absent(&self) -> Amount {
        self.replica.absent()
    }

    /// Who has what is not here for good.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        self.replica.holders().into_iter().map(|h| h.0).collect()
    }

    /// What came on demand, and behind the guest's back, since this node began to fill.
    #[must_use]
    pub fn fetched(&self) -> (Amount, Amount) {
        lock(&self.fetch).as_ref().map_or((Amount(0), Amount(0)), Requester::fetched)
    }

    /// Waits until these blocks are here; has them asked for.
    pub(crate) async fn here(self: &Arc<Self>, blocks: &[Range<u64>]) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let wanted = blocks.to_vec();
            if !self.clone().blocking(move |disk| disk.want(&wanted)).await {
                return;
            }
            // The sender lives as long as this disk.
            let _ = changed.changed().await;
        }
    }

    /// Asks for what of these blocks is absent. Whether any is. Blocks for a moment.
    fn want(&self, blocks: &[Range<u64>]) -> bool {
        let absent = |run: &Range<u64>| self.replica.wanted(run.clone()).is_ok_and(|found| !found.is_empty());
        if !blocks.iter().any(absent) {
            return false;
        }
        if let Some(requester) = &mut *lock(&self.fetch) {
            for run in blocks {
                if let Err(error) = requester.demand(run.clone(), self.began.elapsed(), &self.replica) {
                    tracing::error!(volume = self.name, %error, "what is absent cannot be asked for");
                }
            }
            self.hungry.notify_one();
        }
        // Without a requester somebody tells when there is one.
        true
    }

    /// For how long the guest has waited in vain; none: it does not.
    #[must_use]
    pub fn starving(&self) -> Option<Duration> {
        lock(&self.fetch).as_ref()?.starving(self.began.elapsed())
    }

    /// A fill begins. False: the disk is frozen, or all is here.
    fn begin_fetch(&self) -> bool {
        let _order = lock(&self.order);
        if self.replica.is_frozen() || !self.replica.is_shadow() {
            return false;
        }
        let order = self.first_accesses();
        *lock(&self.fetch) = Some(match self.library() {
            Some(library) => Requester::with_library(order, &self.replica, library),
            None => Requester::new(order),
        });
        true
    }

    /// Does something with the requester, as long as there is one.
    fn with_fetch<T>(&self, what: impl FnOnce(&mut Requester) -> T) -> Option<T> {
        lock(&self.fetch).as_mut().map(what)
    }

    /// Questions that can be asked now; none: the fill is over. Where it takes long to find out which they are, [`Disk::hungry`] says that there may be more.
    fn questions(&self) -> Option<Result<Vec<Question>>> {
        let mut all = vec![];
        loop {
            let began = Instant::now();
            match self.with_fetch(|requester| requester.step(self.began.elapsed(), &self.replica))? {
                Ok(Step::Ask(question)) => all.push(question),
                Ok(Step::Nothing) => return Some(Ok(all)),
                // Whoever demands something has a turn.
                Ok(Step::Looked) if all.is_empty() => give_way(began),
                Ok(Step::Looked) => {
                    self.hungry.notify_one();
                    return Some(Ok(all));
                }
                Err(error) => return Some(Err(error.into())),
            }
        }
    }

    /// How many blocks no holder brings; they are asked for again.
    fn nowhere(&self) -> Result<u64> {
        let nowhere = self.with_fetch(|requester| {
            let nowhere = requester.nowhere(&self.replica);
            requester.ask_lacking_again();
            nowhere
        });
        self.hungry.notify_one();
        Ok(nowhere.transpose()?.unwrap_or_default())
    }

    /// Answers of a holder. False: the fill is over.
    fn answered(&self, from: &Holder, messages: &[Vec<u8>]) -> Result<bool> {
        let Some(opener) = self.with_fetch(|requester| requester.opener()) else { return Ok(false) };
        for message in messages {
            // Reads of disks, and digests: no write of the guest waits for them.
            let arrival = opener.open(message, &self.replica)?;
            {
                // As a guest's write: whoever says what is here must not say it in between.
                let mut order = lock(&self.order);
                let mut fetch = lock(&self.fetch);
                let Some(requester) = &mut *fetch else { return Ok(false) };
                let taken = requester.take(from, &arrival, self.began.elapsed(), &self.replica)?;
                if let Some(outgoing) = &mut *order
                    && !taken.is_empty()
                {
                    outgoing.machine.arrived(&taken, &self.replica);
                }
            }
            arrival.learn();
        }
        lock(&self.trouble).take();
        self.tell();
        Ok(true)
    }

    /// Makes durable what has come, where it is time to: what to tell the holders, and whether all is here for good.
    fn look(&self, all: bool) -> Result<(Vec<Question>, bool)> {
        let _order = lock(&self.order);
        let mut fetch = lock(&self.fetch);
        let Some(requester) = &mut *fetch else { return Ok((vec![], false)) };
        let whole = all && self.replica.end_wants()?;
        Ok((requester.report(&self.replica)?, whole))
    }
}

/// Looks after the disks of a VM that was opened here: those that lack something are filled, and whoever lent to those that do not is
/// told so.
pub fn begin(node: &Arc<Node>, parts: &Arc<Parts>) {
    let shadows: Vec<_> = parts.disks().into_iter().filter(|disk| disk.is_shadow()).collect();
    if shadows.is_empty() {
        return release(node, parts);
    }
    go_on_telling(node, parts);
    for disk in shadows {
        if std::mem::replace(&mut *lock(&disk.filling), true) {
            // It looks at the disk again: whoever opened it has told.
            continue;
        }
        let (node, parts, weak) = (Arc::downgrade(node), Arc::downgrade(parts), Arc::downgrade(&disk));
        crate::trace::spawn(async move { keep_filling(&node, &parts, &weak).await });
    }
}

/// A VM that is off, and whose disks are not all here: they are filled all the same, since whoever lends waits for that. Nobody writes to
/// them meanwhile. To be called in the turn of the VM's keeper, so that nothing else opens or gives them up.
pub async fn while_off(node: &Arc<Node>, parts: &Arc<Parts>) {
    let Some(Record::Owned(owner)) = node.record(parts.id) else { return };
    if parts.file().power != Power::Off || parts.file().holders.is_empty() {
        return;
    }
    for disk in parts.disks() {
        if let Err(error) = disk.open(owner.lineage, owner.generation).await {
            tracing::error!(vm = parts.name, %error, "a disk that is not whole cannot be opened; it is filled when the VM is started");
            return;
        }
    }
    begin(node, parts);
}

async fn keep_filling(node: &Weak<Node>, parts: &Weak<Parts>, disk: &Weak<Disk>) {
    loop {
        let (Some(node), Some(parts), Some(disk)) = (node.upgrade(), parts.upgrade(), disk.upgrade()) else { return };
        let mut changed = disk.changed.subscribe();
        changed.borrow_and_update();
        {
            let mut filling = lock(&disk.filling);
            if !disk.is_shadow() {
                *filling = false;
                break;
            }
        }
        if !disk.clone().blocking(Disk::begin_fetch).await {
            // Frozen: a move's end tells; and so does the end of the disk, which this must not keep.
            drop((node, parts, disk));
            let _ = changed.changed().await;
            continue;
        }
        // Whoever waits asks this requester now.
        disk.tell();
        tracing::info!(volume = disk.name, absent = %disk.absent(), holders = ?disk.holders(), "filling");
        let ended = fill(&node, &parts, &disk).await;
        let (demand, behind) = disk.fetched();
        let named = disk.with_fetch(|requester| requester.named()).unwrap_or_default();
        lock(&disk.fetch).take();
        disk.tell();
        match ended {
            Ok(Ended::Whole) => tracing::info!(volume = disk.name, %demand, %behind, %named, "all blocks are here"),
            Ok(Ended::Closed) => {}
            Err(error) => {
                tracing::error!(
                    volume = disk.name,
                    error = format!("{error:#}"),
                    "the fill cannot go on; it begins again"
                );
                tokio::time::sleep(LONGEST_PAUSE).await;
            }
        }
    }
    let (Some(node), Some(parts)) = (node.upgrade(), parts.upgrade()) else { return };
    if parts.disks().iter().all(|disk| !disk.is_shadow()) {
        release(&node, &parts);
    }
}

/// Where questions to each holder go.
type Outboxes = Mutex<BTreeMap<Holder, mpsc::UnboundedSender<Vec<u8>>>>;

/// Fills until all is here, or the disk is closed.
async fn fill(node: &Arc<Node>, parts: &Arc<Parts>, disk: &Arc<Disk>) -> Result<Ended> {
    let outboxes = Arc::new(Outboxes::default());
    let mut sessions = tokio::task::JoinSet::new();
    for holder in disk.replica.holders() {
        let (node, parts, disk, outboxes) = (node.clone(), parts.clone(), disk.clone(), outboxes.clone());
        sessions.spawn(async move { keep_asking(&node, &parts, &disk, &holder, &outboxes).await });
    }
    let mut looking = tokio::time::interval(LOOK);
    let (mut looked, mut asked_again, mut said) = (Instant::now(), Instant::now(), 0);
    let (on_cut, mut waits) = (parts.definition().spec.on_cut, false);
    loop {
        let look = tokio::select! {
            () = disk.hungry.notified() => false,
            _ = looking.tick() => true,
        };
        let Some(questions) = disk.clone().blocking(Disk::questions).await else { return Ok(Ended::Closed) };
        send(&outboxes, questions?);
        let absent = disk.absent();
        if !look && absent.0 > 0 {
            continue;
        }
        let starves = disk.starving().is_some_and(|hungry| hungry >= PAUSE_AFTER);
        match on_cut {
            // Again and again: its keeper may have something else to do.
            OnCut::Pause if starves => parts.keeper().try_tell(Input::Starves),
            OnCut::Wait if starves && !waits => {
                let why = why_not(std::slice::from_ref(disk));
                note(
                    parts,
                    &format!("the guest runs on, and what it waits for of disk `{}` does not come{why}", disk.name),
                );
            }
            OnCut::Wait if waits && !starves => {
                note(parts, &format!("what the guest waited for of disk `{}` has come", disk.name));
            }
            _ => {}
        }
        waits = starves;
        // At the end at once; before, as often as the disk is settled.
        if absent.0 == 0 || looked.elapsed() >= LOOK {
            looked = Instant::now();
            let (questions, whole) = disk.clone().blocking(move |disk| disk.look(absent.0 == 0)).await?;
            send(&outboxes, questions);
            if whole {
                return Ok(Ended::Whole);
            }
        }
        if asked_again.elapsed() >= AGAIN {
            asked_again = Instant::now();
            // That there are none now may be because nobody answers.
            let nowhere = disk.clone().blocking(|disk| disk.nowhere()).await?;
            if nowhere > 0 && std::mem::replace(&mut said, nowhere) != nowhere {
                note(parts, &unobtainable(&disk.name, nowhere, &disk.holders()));
            }
        }
    }
}

/// Why what a guest waits for of these disks does not come, in brackets, where that is known.
fn why_not(disks: &[Arc<Disk>]) -> String {
    let why = disks.iter().filter(|disk| disk.starving().is_some()).find_map(|disk| lock(&disk.trouble).clone());
    why.map_or_else(String::new, |why| format!(" ({why})"))
}

/// What is said of blocks that no holder brings.
fn unobtainable(disk: &str, blocks: u64, holders: &[String]) -> String {
    format!(
        "{} of disk `{disk}` are not to be had from {}, whose log says why; they are asked for again every {} s",
        Amount(blocks * BLOCK),
        holders.join(", "),
        AGAIN.as_secs()
    )
}

fn send(outboxes: &Outboxes, questions: Vec<Question>) {
    let outboxes = lock(outboxes);
    for question in questions {
        if let Some(out) = outboxes.get(&question.to) {
            // One whose session has just ended is asked again in the next.
            let _ = out.send(question.message);
        }
    }
}

/// One session with a holder after the other, for as long as the fill lasts.
async fn keep_asking(node: &Arc<Node>, parts: &Arc<Parts>, disk: &Arc<Disk>, holder: &Holder, outboxes: &Outboxes) {
    let mut pause = FIRST_PAUSE;
    loop {
        let began = Instant::now();
        let result = ask(node, parts, disk, holder, outboxes).await;
        lock(outboxes).remove(holder);
        if disk.with_fetch(|requester| requester.disconnected(holder)).is_none() {
            return;
        }
        disk.hungry.notify_one();
        if let Err(error) = result {
            *lock(&disk.trouble) = Some(format!("{}: {error:#}", holder.0));
            tracing::info!(
                volume = disk.name,
                holder = holder.0,
                error = format!("{error:#}"),
                "the session with a holder has ended; it is tried again"
            );
        }
        pause = if began.elapsed() > LONGEST_PAUSE { FIRST_PAUSE } else { pause };
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// As whom this host asks for a volume of the VM.
fn by_right(node: &Node, parts: &Parts, disk: &Disk) -> Fetch {
    let (lineage, generation) = parts.view().owner;
    let (lineage, generation) = (Lineage(lineage), Generation(generation));
    let capability = crate::covered::held(node.credentials(), parts, lineage, generation);
    Fetch { vm: parts.id, volume: disk.id, lineage, generation, capability }
}

async fn ask(
    node: &Arc<Node>,
    parts: &Arc<Parts>,
    disk: &Arc<Disk>,
    holder: &Holder,
    outboxes: &Outboxes,
) -> Result<()> {
    let peer = peer_of(parts, holder).with_context(|| format!("nobody knows where {} is", holder.0))?;
    let link = node.peers().session(&peer).await.map_err(|e| anyhow!("{e}"))?;
    // Two sessions of one process differ, and so do two processes.
    let (right, pair) = (by_right(node, parts, disk), SESSIONS.fetch_add(1, Ordering::Relaxed) ^ started_ns());
    let open = async |lane: godwit_volume::fetch::Lane, priority| {
        let fill = lane == godwit_volume::fetch::Lane::Fill;
        let hello = Hello::Fetch { right: Box::new(right.clone()), pair, fill };
        link.open_stream(Lane::Disk, priority, proto::encode(&hello)).await
    };
    let (mut demand, from_demand) = open(godwit_volume::fetch::Lane::Demand, Priority::Interactive).await?.split();
    let (fill, from_fill) = open(godwit_volume::fetch::Lane::Fill, Priority::Bulk).await?.split();
    // Bounded by the requester's windows.
    let (out, mut questions) = mpsc::unbounded_channel();
    lock(outboxes).insert(holder.clone(), out);
    if disk.with_fetch(|requester| requester.connected(holder.clone())).is_none() {
        return Ok(());
    }
    disk.hungry.notify_one();
    let asking = async {
        let mut packer = Packer::new()?;
        while let Some(question) = questions.recv().await {
            let mut wire = vec![];
            packer.push(&question, &mut wire)?;
            while let Ok(question) = questions.try_recv() {
                packer.push(&question, &mut wire)?;
            }
            packer.flush(&mut wire)?;
            demand.write(wire.into()).await?;
        }
        anyhow::Ok(())
    };
    // What the guest waits for does not wait for the looking up of what nobody does.
    let (demands, demanded) = mpsc::channel(AHEAD);
    let (fills, filled) = mpsc::channel(AHEAD);
    let hearing = async { tokio::try_join!(hear(from_demand, demands), hear(from_fill, fills)) };
    let taking = async |mut answers: mpsc::Receiver<Vec<Vec<u8>>>| {
        while let Some(batch) = answers.recv().await {
            let from = holder.clone();
            if !disk.clone().blocking(move |disk| disk.answered(&from, &batch)).await? {
                return anyhow::Ok(());
            }
            disk.hungry.notify_one();
        }
        Ok(())
    };
    let result = tokio::select! {
        result = asking => result,
        result = hearing => result.map(drop),
        result = taking(demanded) => result,
        result = taking(filled) => result,
        never = node.peers().look_after(&peer, &link) => match never {},
    };
    drop(fill);
    result
}

fn peer_of(parts: &Parts, holder: &Holder) -> Option<PeerHost> {
    parts.file().holders.into_iter().find(|peer| peer.name.as_str() == holder.0)
}

/// Tells everybody who lent blocks of this VM that they are here for good; as often as it takes.
fn release(node: &Arc<Node>, parts: &Arc<Parts>) {
    if parts.file().holders.is_empty() || parts.releasing.swap(true, Ordering::AcqRel) {
        return;
    }
    let (node, weak) = (Arc::downgrade(node), Arc::downgrade(parts));
    crate::trace::spawn(async move {
        let mut pause = FIRST_PAUSE;
        loop {
            let (Some(node), Some(parts)) = (node.upgrade(), weak.upgrade()) else { return };
            let disks = parts.disks();
            let ours = disks.iter().all(|d| d.replica.is_primary() && !d.replica.is_frozen() && !d.is_shadow());
            let holders = parts.file().holders;
            if holders.is_empty() || !ours {
                parts.releasing.store(false, Ordering::Release);
                return;
            }
            for peer in holders {
                match tell_released(&node, &parts, &disks, &peer).await {
                    Ok(()) => {
                        let told = parts.change(|file| file.holders.retain(|known| known.name != peer.name));
                        if let Err(error) = told {
                            tracing::warn!(vm = parts.name, %error, "cannot remember that a holder was released");
                        }
                    }
                    Err(error) => {
                        tracing::debug!(vm = parts.name, holder = %peer.name, error = format!("{error:#}"), "not released yet")
                    }
                }
            }
            drop((node, parts, disks));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_RELEASE_PAUSE);
        }
    });
}

async fn tell_released(node: &Arc<Node>, parts: &Arc<Parts>, disks: &[Arc<Disk>], peer: &PeerHost) -> Result<()> {
    for disk in disks {
        let request = Request::Released(Box::new(by_right(node, parts, disk)));
        let answer =
            node.peers().request(peer, proto::encode(&request), RELEASING).await.map_err(|e| anyhow!("{e}"))?;
        match proto::decode::<proto::Answer>(&answer)? {
            Ok(()) => {}
            // It has lent nothing to this host: an attempt named it that came to nothing, or it has the VM itself.
            Err(error) if error.problem == Problem::Forbidden => {}
            Err(error) => return Err(anyhow!("{error}")),
        }
    }
    Ok(())
}

/// Makes a guest stand still until nothing that it waits for is absent. QEMU stops the processors at once, and answers when the
/// last request is answered.
pub async fn stand_still(node: &Arc<Node>, parts: &Arc<Parts>) {
    let Some(qemu) = parts.qemu() else { return };
    let hungry = || parts.disks().iter().any(|disk| disk.starving().is_some_and(|h| h >= PAUSE_AFTER));
    if !hungry() {
        return;
    }
    let why = why_not(&parts.disks());
    note(parts, &format!("the guest stands still: what it waits for does not come{why}"));
    let began = Instant::now();
    // It may take longer than a monitor's patience. What it did is asked below.
    let _ = crate::effects::on_qemu(&qemu, |q| q.monitor(serde_json::json!({"execute": "stop"})).map(drop)).await;
    loop {
        if crate::effects::is_outranked(node, parts) {
            return;
        }
        if parts.disks().iter().all(|disk| disk.starving().is_none_or(|h| h < STILL)) {
            match crate::effects::on_qemu(&qemu, Qemu::state).await {
                Ok(godwit_vmm::State::Stopped) => {
                    let _ = crate::effects::on_qemu(&qemu, Qemu::cont).await;
                    break;
                }
                Ok(_) => break,
                Err(_) if !qemu.is_alive() => break,
                Err(_) => {}
            }
        }
        let ours = parts.qemu().is_some_and(|now| Arc::ptr_eq(&now, &qemu));
        if !ours || parts.file().power == Power::Off {
            return;
        }
        tokio::time::sleep(STILL).await;
    }
    note(
        parts,
        &format!("the guest goes on after {:.1} s: what it waited for has come", began.elapsed().as_secs_f64()),
    );
}

fn note(parts: &Parts, text: &str) {
    tracing::warn!(vm = parts.name, "{text}");
    if let Some(moving) = parts.moving().filter(|m| m.role == MoveRole::Destination) {
        moving.note(NoteKind::Decision, text);
    }
}

/// A move whose disks were following when the node was restarted ends when they have come.
fn go_on_telling(node: &Arc<Node>, parts: &Arc<Parts>) {
    let Some(moving) = parts.moving().filter(|m| m.goes_on && !m.tracker.ended()) else { return };
    if parts.telling.swap(true, Ordering::AcqRel) {
        return;
    }
    let (node, parts) = (node.clone(), parts.clone());
    crate::trace::spawn(async move {
        let proved = match moving.tracker.get().network_proved_ms {
            Some(_) => Ok(()),
            None => node.probe(&parts, crate::incoming::PROOF).await,
        };
        if until_whole(&parts, &moving).await {
            match proved {
                Ok(()) => moving.end(Outcome::Completed, None),
                Err(error) => moving.end(Outcome::NetworkUnproved, Some(error.to_string())),
            }
        }
        parts.telling.store(false, Ordering::Release);
    });
}

/// Waits until all disks are here for good, while the move shows what is absent. False: the VM went on before.
pub async fn until_whole(parts: &Arc<Parts>, moving: &Arc<Moving>) -> bool {
    let disks = parts.disks();
    let absent = || Amount(disks.iter().map(|disk| disk.absent().0).sum());
    if disks.iter().all(|disk| !disk.is_shadow()) {
        return true;
    }
    // One that goes on over a restart knows.
    let again = moving.tracker.phase() == PhaseName::Fill;
    let total = if again { moving.tracker.get().disk.total } else { absent() };
    moving.tracker.enter(PhaseName::Fill);
    let holders: std::collections::BTreeSet<_> = disks.iter().flat_map(|disk| disk.holders()).collect();
    let names = holders.into_iter().collect::<Vec<_>>().join(", ");
    moving.note(NoteKind::Decision, format!("the guest runs here; {} of its disks follow from {names}", absent()));
    let shown = disks.clone();
    moving.tracker.metered(move |p| {
        let absent = Amount(shown.iter().map(|disk| disk.absent().0).sum());
        p.disk.total = total;
        p.disk.copied = Amount(total.0.saturating_sub(absent.0));
        (p.disk.remaining, p.disk.absent) = (absent, absent);
    });
    moving.tracker.update(|p| p.disk.total = total);
    let (noted, note) = (parts.clone(), moving.clone());
    crate::trace::spawn_blocking(move || noted.note(&note));
    reach_async(Point::Fill, parts.id).await;
    loop {
        if moving.over.is_cancelled() {
            return false;
        }
        moving.tracker.sample();
        if disks.iter().all(|disk| !disk.is_shadow()) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Has an arriving move count what its link to the source carries; the source stops counting when its part is done.
pub fn meter(node: &Node, moving: &Moving) {
    let name = moving.peer.name.to_string();
    let sessions = node.peers().sessions();
    let Some((_, session)) = sessions.into_iter().find(|(known, _)| *known == name) else { return };
    let before = session.counters();
    moving.tracker.metered(move |p| {
        p.bytes = carried(&session, &before);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::VolumeId;
    use godwit_volume::fetch::{Lane as Way, Server};
    use godwit_volume::{Replica, fet};

    /// A disk of 32 blocks of which none is here, and the replica that has them.
    fn lacking(folder: &std::path::Path) -> (Arc<Disk>, Replica) {
        let from = Replica::create(&folder.join("from"), VolumeId(1), Amount::mib(1)).expect("creates");
        from.become_primary(Lineage::FIRST, Generation(1)).expect("is ours");
        from.write(0, &vec![7; 32 * BLOCK as usize]).expect("writes");
        let socket = folder.join("disk.sock");
        let disk = Disk::open_or_create(&folder.join("to"), None, socket, VolumeId(1), "root", Amount::mib(1));
        let disk = disk.expect("opens");
        let mut telling = fet::Source::new(Holder("from".into()), Lineage::FIRST, &[]);
        let (mut told, have) = fet::Target::new(&disk.replica).expect("begins");
        let have = have.all(&disk.replica).expect("reads");
        have.iter().for_each(|message| telling.handle(message, &from).expect("takes"));
        while telling.is_comparing() {
            for message in telling.poll(&from).expect("reads") {
                told.handle(&message, &disk.replica).expect("takes");
            }
        }
        for stopped in [false, true, true] {
            if stopped {
                from.freeze();
                telling.stop(&from).expect("settles");
            }
            for message in telling.poll(&from).expect("reads") {
                told.handle(&message, &disk.replica).expect("takes");
            }
        }
        assert!(told.is_complete());
        from.become_secondary().expect("yields");
        disk.replica.become_primary(Lineage::FIRST, Generation(2)).expect("takes over");
        assert_eq!(disk.absent(), Amount(32 * BLOCK));
        (disk, from)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_that_a_fill_does_counts_as_the_guests_coming_to_a_block() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, from) = lacking(folder.path());
        let holder = Holder("from".into());
        assert!(disk.begin_fetch());
        disk.with_fetch(|requester| requester.connected(holder.clone())).expect("fills");
        // What the guest waits for comes first, and it has not got it yet.
        assert!(disk.want(std::slice::from_ref(&(20..21))));
        let mut server = Server::new();
        while disk.absent() > Amount(0) {
            for question in disk.questions().expect("fills").expect("asks") {
                server.handle(&question.message).expect("makes sense");
            }
            let mut answers = vec![];
            while let Some(answer) = server.poll(&from, &[Way::Demand, Way::Fill]).expect("reads") {
                answers.push(answer.message);
            }
            assert!(!answers.is_empty(), "{} does not come", disk.absent());
            assert!(disk.answered(&holder, &answers).expect("takes"));
        }
        assert!(disk.look(true).expect("settles").1, "all is here for good");
        assert!(disk.first_accesses().is_empty(), "{:?}", disk.first_accesses());
        // The guest does.
        disk.read(20 * BLOCK, BLOCK as u32).expect("reads");
        disk.read(3 * BLOCK, 2 * BLOCK as u32).expect("reads");
        assert_eq!(disk.first_accesses(), [20..21, 3..5]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_no_holder_brings_is_counted_said_and_asked_for_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, from) = lacking(folder.path());
        let holder = Holder("from".into());
        let empty = Replica::create(&folder.path().join("empty"), VolumeId(1), Amount::mib(1)).expect("creates");
        assert!(disk.begin_fetch());
        disk.with_fetch(|requester| requester.connected(holder.clone())).expect("fills");
        let mut server = Server::new();
        let mut round = |replica: &Replica| {
            for question in disk.questions().expect("fills").expect("asks") {
                server.handle(&question.message).expect("makes sense");
            }
            let mut answers = vec![];
            while let Some(answer) = server.poll(replica, &[Way::Demand, Way::Fill]).expect("reads") {
                answers.push(answer.message);
            }
            assert!(disk.answered(&holder, &answers).expect("takes"));
            answers.len()
        };
        assert!(round(&empty) > 0);
        assert_eq!(round(&empty), 0, "it has said that it has none of them");
        let nowhere = disk.nowhere().expect("reads");
        assert_eq!((nowhere, disk.absent()), (32, Amount(32 * BLOCK)));
        let said = unobtainable(&disk.name, nowhere, &disk.holders());
        assert!(said.starts_with("128.0 KiB of disk `root` are not to be had from from,"), "{said}");
        assert!(round(&from) > 0, "it is asked again");
        assert_eq!((disk.nowhere().expect("reads"), disk.absent()), (0, Amount(0)));
    }
}
