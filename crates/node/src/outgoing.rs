//! A move as its source's node drives it: reserve, copy disks, memory rounds, stop. From the stop on the hand-off
//! machine leads; what is here serves it.
//!
//! Anything that fails here before the seal ends in one event, [`Event::MigrationFailed`], and the machine undoes the
//! move. After the seal nothing here matters any more but the return path, which may end as it likes: QEMU is in
//! `postmigrate` then.

use crate::actor::Input;
use crate::disk::Disk;
use crate::disk_index::{At, DiskIndex};
use crate::failpoint::{Point, is_armed, reach_async};
use crate::forecast::{Flowing, Goodput};
use crate::keys::Keys;
use crate::memory_out::{self, Returning, Seen};
use crate::neighbours::Known;
use crate::neighbours::resident::{self, Asked};
use crate::node::Node;
use crate::parts::{Moving, Parts};
use crate::peers::carried;
use crate::processors;
use crate::proto::{self, Hello, Request, Stage, Staged};
use crate::settle::{self, Settling};
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::host::{DiskStrategy, MoveOrder, MoveRole};
use godwit_api::progress::{NoteKind, PhaseName, Round};
use godwit_api::vm::Accel;
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Event, Ticket};
use godwit_link::{Lane, Priority, RecvHalf, SendHalf};
use godwit_memory::levels::Level;
use godwit_memory::smart_stop::{
    BETWEEN_LOOKS, Ended, Instead, LEAST_FOLLOWING, Look, Reason, Rest, SmartStop, Verdict, beside, instead,
};
use godwit_memory::watcher::Glances;
use godwit_memory::{CheckpointKey, Config, DEFAULT_WINDOW_LOG, Encoder, Holding, Levels, Witness, levels};
use godwit_units::{BitRate, Bytes as Amount, Lineage, Policy};
use godwit_vmm::{MigrationInfo, MigrationStatus, Qemu, QemuEvent};
use godwit_volume::Holder;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::io::AsyncWriteExt;
use tokio::sync::broadcast;

/// How long a destination may take to make a place: it may have to start a QEMU on a busy machine.
const STAGING: Duration = Duration::from_secs(60);
/// Bytes of the memory stream that may be on their way and not read, until it is known what the link carries: a bandwidth-delay product
/// of 200 Mbit/s and 40 ms. What is in there when the guest stops is part of its pause.
const MEMORY_WINDOW: Amount = Amount(1 << 20);
/// A disk's: what a path of 1 Gbit/s and 180 ms holds. How much of it is used its machine decides.
const DISK_WINDOW: Amount = Amount(24 << 20);
/// Rounds in which memory waited for the disks and that decide nothing, at most: a path may come and go for ever.
const SPOILT: u32 = 8;
/// How long memory waits for the disks to have been read: what is not known yet travels.
const INDEXING: Duration = Duration::from_secs(1);
/// What a link is taken for while nobody has seen it.
const UNKNOWN_LINK: BitRate = BitRate(100_000_000);
/// What zstd's level 1 packs on one processor.
const PACKED: BitRate = BitRate(1_000_000_000);
/// A stopped guest stands for what is left of its memory so many times as long as was foreseen, and this: then the link is another than it
/// was, and the guest goes on at the source.
const LONGER_THAN_FORESEEN: u32 = 3;
const SHORT: Duration = Duration::from_secs(5);
/// And what the disks lack over there may take so long, where nothing is known of the link.
const NOBODY_KNOWS: Duration = Duration::from_secs(600);
/// How much of what the link carries goes behind the back of a guest whose memory follows it: what it waits for finds the rest free.
const BEHIND: f64 = 0.75;
/// Pages of a round that tell what the rest of them are on the wire.
const TELLING: u64 = 1024;
/// How fast a guest writes is of interest when no more than this part of its memory is left of a round: a quarter.
const NEARLY_OVER: u64 = 4;

/// How much goes behind the back of such a guest in a second, over a link that carries so many bytes in one.
pub(crate) fn behind(rate: f64) -> Amount {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate of a link")]
    Amount((rate * BEHIND) as u64)
}

/// Whether the guest may still be writing because QEMU's stream has not ended.
#[must_use]
pub fn is_under_way(moving: &Moving) -> bool {
    moving.role == MoveRole::Source && !moving.ram_ended.is_cancelled()
}

/// Has the destination make a place.
///
/// # Errors
/// What it says, or that it cannot be reached.
pub async fn reserve(node: &Arc<Node>, parts: &Arc<Parts>, order: &MoveOrder, ticket: Ticket) -> Result<(), ApiError> {
    // Asked again by whoever does it: the controller's answer may be old.
    if let Some(first) = crate::check::departure(node, parts).await.blockers.into_iter().next() {
        return Err(ApiError::new(Problem::Blocked, first.message).remedy(first.remedy));
    }
    if order.disk == DiskStrategy::Shared
        && let Some(disk) = parts.disks().iter().find(|disk| !disk.is_shared())
    {
        let message = format!("`{}` does not lie on shared storage", disk.name);
        return Err(ApiError::new(Problem::Blocked, message).remedy("copy it: `--disk mirror` or `--disk postcopy`"));
    }
    reach_async(Point::Reserve, parts.id).await;
    let marks = crate::seen::Marks::leave(node, parts).await?;
    node.peers().session(&order.to).await?;
    node.peers().limit(order.to.name.as_str(), node.limit_to(order.to.name.as_str()));
    let me = node.as_peer();
    let mut holders = parts.file().holders;
    if parts.disks().iter().any(|disk| follows(order, disk)) {
        holders.retain(|peer| peer.name != me.name);
        holders.push(me);
    }
    // It fetches what it has itself from itself.
    holders.retain(|peer| peer.name != order.to.name);
    let request = Request::Stage(Box::new(Stage {
        ticket,
        holders,
        mark: marks.number(),
        definition: parts.definition(),
        source: node.as_peer(),
        vcpus: order.vcpus,
        capability: order.capability.clone(),
        postcopy: order.memory_postcopy.is_some(),
        tells: true,
    }));
    let answer = node.peers().request(&order.to, proto::encode(&request), STAGING).await?;
    let answer = proto::decode::<Result<Option<Staged>, ApiError>>(&answer).unwrap_or_else(|e| {
        Err(ApiError::new(Problem::Failed, format!("{} answers what we do not know: {e}", order.to.name)))
    });
    let staged = answer?;
    if let Some(moving) = parts.moving().filter(|moving| moving.ticket == ticket) {
        let keeps_nothing = staged.is_some_and(|staged| !staged.keeps_pages);
        moving.keeps_nothing.store(keeps_nothing, Ordering::Release);
        let reads = staged.and_then(|staged| staged.reads_shared).unwrap_or_default();
        moving.reads_shared.store(reads.0, Ordering::Release);
    }
    crate::wired::staged(node, parts, &order.to, order.capability.as_ref()).await?;
    marks.are_answered(&order.to.name).await
}

/// Whether a disk follows its VM rather than going before it: because that was ordered, or because it is not all here itself.
fn follows(order: &MoveOrder, disk: &Disk) -> bool {
    !disk.is_shared() && (order.disk == DiskStrategy::Postcopy || disk.is_shadow())
}

/// Whether memory's pages are named by where they lie on shared storage, which the destination reads as fast as this, rather than sent over the link. Packed they
/// are a third as long: storage that is three times as fast as the link, or as fast as they are packed, brings them as soon. One that is not
/// may lie behind the same link.
fn is_worth_reading(reads: BitRate, link: Option<BitRate>) -> bool {
    reads.0 > 0 && reads >= PACKED.min(BitRate(link.unwrap_or(UNKNOWN_LINK).0.saturating_mul(3)))
}

/// Starts what the machine calls `Migrate`.
pub fn start(node: &Arc<Node>, parts: &Arc<Parts>, ticket: Ticket) {
    let (node, parts) = (node.clone(), parts.clone());
    crate::trace::spawn(async move {
        let Some(moving) = parts.moving().filter(|m| m.ticket == ticket) else { return };
        let result = tokio::select! {
            result = run(&node, &parts, &moving) => result,
            () = moving.over.cancelled() => Ok(()),
        };
        if let Err(error) = result
            && parts.takes_part_in(&moving)
        {
            if crate::drain::is_needed(&parts, &moving) {
                tracing::warn!(vm = parts.name, %ticket, error = format!("{error:#}"), "the stream of a post-copy broke off");
                return crate::drain::serve(&node, &parts, &moving).await;
            }
            tracing::warn!(vm = parts.name, %ticket, error = format!("{error:#}"), "the move failed at the source");
            moving.note(NoteKind::Decision, format!("given up: {error:#}"));
            moving.failed(format!("{error:#}"));
            parts.keeper().tell(Input::Event(Event::MigrationFailed)).await;
            if moving.follows() {
                // The seal may have been under way: then that meant nothing.
                crate::drain::serve(&node, &parts, &moving).await;
            }
        }
    });
}

async fn run(node: &Arc<Node>, parts: &Arc<Parts>, moving: &Arc<Moving>) -> Result<()> {
    let session = node.peers().session(&moving.peer).await.map_err(|e| anyhow!("{e}"))?;
    let (counter, counted, copied) = (session.clone(), session.counters(), parts.clone());
    moving.tracker.metered(move |p| {
        p.bytes = carried(&counter, &counted);
        p.link_down_s = counter.down_for().map(|d| d.as_secs_f64());
        p.disk = crate::disk::sum(&copied.disks());
    });
    let watch = async {
        loop {
            tokio::time::sleep(BETWEEN_LOOKS).await;
            moving.tracker.sample();
        }
    };
    let (fail, mut failed) = tokio::sync::mpsc::channel::<anyhow::Error>(1);
    let work = async {
        moving.tracker.enter(PhaseName::CopyDisk);
        let order =
            parts.file().order.filter(|order| order.id == moving.ticket.mv).context("the order is not known")?;
        let following: Vec<_> = parts.disks().iter().filter(|disk| follows(&order, disk)).map(|disk| disk.id).collect();
        if !following.is_empty() {
            // Before anybody is told that it may be fetched from here.
            let volumes = following.clone();
            parts.change(|file| file.lent = volumes).context("cannot write down what is needed here")?;
        }
        let ends = [moving.over.clone(), moving.ram_ended.clone()];
        let reads = BitRate(moving.reads_shared.load(Ordering::Acquire));
        let now = processors::now();
        let is_read = is_worth_reading(reads, node.peers().found().of(moving.peer.name.as_str(), now.at).link);
        let at = |disk: &Disk| match following.contains(&disk.id) {
            _ if disk.is_shared() && is_read => At::Shared,
            _ if disk.is_shared() => At::Nowhere,
            true if node.precaches().nearly_has(disk, &order.to.name) => At::Cached,
            true => At::Nowhere,
            false => At::Mirrored,
        };
        let index = DiskIndex::start(parts.disks(), at, ends);
        let shared = parts.disks().iter().filter(|disk| disk.is_shared()).count();
        for disk in parts.disks().into_iter().filter(|disk| !disk.is_shared()) {
            let (ticket, volume) = (moving.ticket, disk.id);
            let follows = following.contains(&volume);
            let hello = if follows { Hello::Tell { ticket, volume } } else { Hello::Mirror { ticket, volume } };
            let stream =
                session.open_stream_with(Lane::Disk, Priority::Bulk, proto::encode(&hello), DISK_WINDOW).await?;
            let over = moving.over.child_token();
            let task = if follows {
                let lineage = Lineage(parts.view().owner.0);
                disk.start_telling(Holder(node.name().to_owned()), lineage, stream, over)
            } else {
                disk.start_mirror(stream, over)
            };
            let fail = fail.clone();
            crate::trace::spawn(async move {
                if let Ok(Err(error)) = task.await {
                    let _ = fail.send(error).await;
                }
            });
        }
        reach_async(Point::CopyDisk, parts.id).await;
        // Asked while the disks go, so that nothing waits for the answer; but where no disk goes, memory would.
        let keys = Keys::read(&parts.folder, SystemTime::now());
        let key = crate::kept::key(&parts.folder, &keys, &moving.peer.name).inspect_err(|error| {
            tracing::warn!(vm = parts.name, %error, "no key for what the destination keeps of memory; it keeps nothing");
        });
        let key = key.ok();
        let is_of_use = !moving.keeps_nothing.load(Ordering::Acquire);
        let asking = key.clone().filter(|_| is_of_use).map(|key| {
            let (parts, moving, session) = (parts.clone(), moving.clone(), session.clone());
            let ram = parts.definition().spec.memory.0.saturating_add(crate::incoming::FIRMWARE);
            crate::trace::spawn(async move {
                tokio::select! {
                    kept = crate::kept::ask(&parts, &moving, &session, key, ram) => kept,
                    () = moving.over.cancelled() => None,
                }
            })
        });
        let guests = resident::ask(parts, moving, &session);
        for disk in parts.disks().into_iter().filter(|disk| !disk.is_shared()) {
            disk.synchronous().await.with_context(|| format!("disk `{}`", disk.name))?;
        }
        // What it looks at now is what it has when memory goes.
        let hints = guests.map(Asked::begin);
        moving.note(
            NoteKind::Decision,
            match following.is_empty() {
                _ if shared > 0 && shared == parts.disks().len() && is_read => {
                    "the disks lie on storage that both hosts reach: nothing is copied, and what memory has of them is read there"
                }
                _ if shared > 0 && shared == parts.disks().len() => {
                    "the disks lie on storage that both hosts reach: nothing is copied"
                }
                true => "the disks are nearly equal: from here on the guest's writes go to both sides",
                false => "the destination knows what the disks have to hold, and fetches it when the guest runs there",
            },
        );
        index.ready(INDEXING).await;
        moving.tracker.enter(PhaseName::Memory);
        reach_async(Point::Memory, parts.id).await;
        let kept = match asking {
            Some(asking) => asking.await.unwrap_or_default(),
            None => None,
        };
        let keep = order.keep_checkpoint.then(|| moving.recycling.begin());
        let left = node.neighbours().of(parts.id, parts.definition().domain.as_ref(), &moving.peer.name);
        let known = Known::new(index, left, hints);
        let hello = Hello::Memory {
            ticket: moving.ticket,
            key: key.clone().map(|key| proto::Secret(key.0)),
            keep,
            elsewhere: keys.without(&moving.peer.name).into_told(),
            neighbours: known.vms(),
        };
        let stream =
            session.open_stream_with(Lane::Memory, Priority::Bulk, proto::encode(&hello), MEMORY_WINDOW).await?;
        let bounds = Bounds {
            policy: order.policy,
            throttle: order.throttle,
            postcopy: order.memory_postcopy.map(|most| most.0),
        };
        memory(node, parts, moving, kept.zip(key), known, bounds, stream.split()).await
    };
    tokio::select! {
        result = work => result,
        Some(error) = failed.recv() => Err(error),
        () = watch => Ok(()),
    }
}

/// When memory rounds end, and what may be done so that they do.
#[derive(Clone, Copy)]
struct Bounds {
    policy: Policy,
    /// By how much the guest's CPUs may be slowed, in percent.
    throttle: Option<u8>,
    /// For how long memory may follow the guest.
    postcopy: Option<Duration>,
}

/// Memory rounds, until the machine has what it needs, or the end.
///
/// `kept`: what the destination has of an earlier try, and its key; `known`: what it has on its disks, and in other guests' memory.
async fn memory(
    node: &Arc<Node>,
    parts: &Arc<Parts>,
    moving: &Arc<Moving>,
    kept: Option<(Holding, CheckpointKey)>,
    known: Known,
    Bounds { policy, throttle, postcopy }: Bounds,
    (out, back): (SendHalf, RecvHalf),
) -> Result<()> {
    let qemu = parts.qemu().context("the VM has no QEMU")?;
    let mut events = qemu_events(parts)?;
    let reader = crate::effects::on_qemu(&qemu, move |q| q.migrate(throttle, postcopy.is_some())).await?;
    // Both ends of one socket do not wait, or neither.
    reader.set_nonblocking(true)?;
    let writer = tokio::net::UnixStream::from_std(reader.try_clone()?)?;
    let end = reader.try_clone()?;

    let (flow, session) = (out.flow(), out.session());
    let now = processors::now();
    let before = node.peers().found().of(moving.peer.name.as_str(), now.at);
    let levels = Levels::new(policy, now).knowing(before);
    let (level, reach) = (levels.level().number(), levels::reach(levels.level()));
    let seen = Arc::new(Seen::new(flow.clone(), session.clone(), levels.level()));
    let counted = seen.clone();
    moving.tracker.metered(move |p| {
        let now = counted.progress();
        (p.raw, p.zero_pages) = (Amount(now.raw_bytes), now.zero_pages);
        p.held_memory = Amount(now.held_pages * 4096);
        p.neighbour_memory = Amount(now.neighbour_pages * 4096);
    });
    let (sender, mut pieces) = memory_out::channel();
    let (read_seen, read_moving) = (seen.clone(), moving.clone());
    // QEMU loses track of a write by its emulated CPUs once in a while; hardware does not.
    let spec = parts.definition().spec;
    let ram = (spec.accel == Accel::Tcg).then(|| qemu.ram(spec.memory)).transpose();
    let witness = ram.context("cannot see the guest's RAM")?.map(|ram| Witness::new(Qemu::RAM, ram));
    // Whether another round would cost many bytes depends on how fast the guest writes. Who cannot see that has one round.
    let glances = || qemu.ram(spec.memory).and_then(|ram| Glances::new(ram, spec.memory));
    let glances = (policy == Policy::LeastBytes).then(glances);
    let mut glances = glances.and_then(|glances| glances.inspect_err(cannot_see).ok());
    if policy == Policy::LeastBytes {
        moving.note(NoteKind::Decision, format!("{}: the fewest bytes are wanted", levels::told(levels.level())));
    } else if levels.level() < Level::One {
        moving.note(
            NoteKind::Decision,
            format!("{}: the last guest's that went there ended below level 1", levels::told(levels.level())),
        );
    }
    let mut encoder = Encoder::new(Config { level, reach, beside: Some(processors::clock), ..Config::default() })?;
    if let Some(witness) = witness {
        encoder = encoder.with_witness(witness);
    }
    if let Some((holding, key)) = kept {
        encoder = encoder.with_holding(holding, &key);
    }
    let encoder = encoder.with_disks(Box::new(known));
    let (heard, hears) = tokio::net::UnixStream::pair()?;
    let heard = heard.into_std()?;
    let reading = crate::trace::spawn_blocking(move || {
        memory_out::read(reader, heard, &read_seen, &read_moving, (encoder, levels), &sender)
    });
    let sending = async {
        let mut out = out;
        while let Some(piece) = pieces.recv().await {
            out.write(piece).await?;
        }
        // A half that is dropped unfinished is a stream that was given up.
        out.finish()?;
        moving.over.cancelled().await;
        anyhow::Ok(())
    };
    let returning = give_back(back, writer, hears, moving);
    let rounds = async {
        let (mut rule, began) = (SmartStop::new(policy), Instant::now());
        let rtt = || session.rtt().unwrap_or_default();
        // QUIC's is an average, and has what lies before the link in it.
        let least = || session.path(Lane::Memory).and_then(|path| path.least).unwrap_or_else(rtt).min(rtt());
        let on_its_way = || seen.on_its_way();
        let (mut goodput, mut slowed) = (Goodput::default(), 0);
        // What the pause is thought to take; and since when it lasts, how long it may, what had been acknowledged when last looked.
        let (mut foreseen, mut stopped) = (Duration::ZERO, None::<(Instant, Duration, u64)>);
        let mut last = (Instant::now(), seen.progress());
        let (mut stopping, mut handed, mut gone) = (false, false, false);
        // Pages that the guest changes in a second, as of the last glance.
        let mut changes = None;
        let (mut settling, mut looked, mut pages) = (Settling::default(), Instant::now(), settle::Pages::default());
        let open_to = |settling: &Settling, goodput: &Goodput| {
            let now = began.elapsed();
            if let Some(window) = settling.window(now, goodput, rtt(), least()) {
                flow.set_window(window);
                seen.bound(window, settling.is_on(now));
            }
        };
        let foresee = |pause: Duration| {
            moving.tracker.update(|p| p.predicted_downtime_ms = Some(pause.as_secs_f64() * 1000.0));
        };
        // A guest that stands waits for what its disks lack over there as well: after a cut, or a burst of writes, that may be much.
        let ours: Vec<_> = parts.disks().into_iter().filter(|disk| !disk.is_shared()).collect();
        // A deadline that is over is worth a long pause; but where it was over before memory began, one would have minutes of a disk in it for nothing.
        let is_over = || matches!(policy, Policy::Deadline(most) if moving.since_order() > most);
        let was_over = is_over();
        let late = || !was_over && is_over();
        // What the link carries of disks and memory; for how long the guest would stand for what its disks lack, where that is known.
        let link = Mutex::new(Goodput::default());
        let sent =
            || [Lane::Disk, Lane::Memory].iter().map(|lane| session.counters().detail(*lane).sent.0).sum::<u64>();
        let lacking = || {
            let owed: u64 = ours.iter().map(|disk| disk.owes()).sum();
            let rate = crate::parts::lock(&link).rate();
            if owed == 0 { Some(Duration::ZERO) } else { rate.map(|rate| taking(owed, rate)) }
        };
        let level = || ours.iter().all(|disk| disk.may_stop()) || (late() && lacking().is_some());
        let arrived = || flow.counters().acknowledged.0 + ours.iter().map(|disk| disk.acknowledged()).sum::<u64>();
        // Somebody has asked for the stop; memory waits for the disks; it did in the round that goes on, and in so many, which say little of the
        // guest; and it was said that it does.
        let (mut asked, mut held, mut was_held, mut spoilt, mut said) = (false, false, false, 0, false);
        const WAITS: &str = "the disks are behind over there: memory waits until they are level";
        const LEVEL_FIRST: &str = "the disks are behind over there: the guest stops when they are level again";
        // Bytes that the last round left; and what QEMU said while something else was waited for.
        let (mut rest, mut early) = (0.0, None);
        let mut due = settle::Due::default();
        // When QEMU looked last at what is dirty, and the most pages that it has found so; and whether the link carries anything.
        let (mut counted_at, mut most_left, mut flowing) = (last.0, 0, Flowing::default());
        // When the next look is due; and whether QEMU has gone round since the last one. A guest that writes the same few pages has it go round
        // every few milliseconds: what is looked for must not wait for a moment in which it does not.
        let (mut look_at, mut went_round) = (Instant::now() + BETWEEN_LOOKS, false);
        loop {
            look_at = look_at
                .min(Instant::now() + if settling.is_on(began.elapsed()) { settle::LOOK } else { BETWEEN_LOOKS });
            let ends = matches!(early, Some(QemuEvent::Stop { .. } | QemuEvent::Migration(_)));
            let overdue = went_round && !ends && Instant::now() >= look_at;
            let event = tokio::select! {
                biased;
                event = next(&mut early, &mut events), if !overdue => event?,
                () = moving.handed.cancelled(), if !handed => {
                    handed = true;
                    let held = end.try_clone()?;
                    // From here on it does not break off when this node dies.
                    crate::effects::on_qemu(&qemu, move |q| q.hold(held.as_fd())).await?;
                    parts.keeper().tell(Input::Event(Event::Postmigrate)).await;
                    continue;
                }
                () = moving.gone.cancelled(), if !gone => {
                    gone = true;
                    let behind = Amount(moving.behind.load(Ordering::Acquire));
                    crate::effects::on_qemu(&qemu, move |q| q.follow(Some(behind))).await?;
                    continue;
                }
                () = moving.stop_now.notified(), if !stopping => {
                    moving.note(NoteKind::Decision, "stop: somebody asked for it");
                    // Who asks again does not want to wait for the disks either.
                    let again = std::mem::replace(&mut asked, true);
                    if !level() && !again {
                        moving.note(NoteKind::Decision, LEVEL_FIRST);
                        continue;
                    }
                    stopping = true;
                    seen.stopping();
                    crate::effects::on_qemu(&qemu, Qemu::stop_now).await?;
                    continue;
                }
                () = tokio::time::sleep_until(look_at.into()) => {
                    (look_at, went_round) = (Instant::now() + BETWEEN_LOOKS, false);
                    // The link is the disks' until they are level. A QEMU that has nothing left to send would stop the guest by itself.
                    let hold = !stopping && stopped.is_none() && !level();
                    if hold && !held {
                        if !std::mem::replace(&mut said, true) {
                            tracing::info!(vm = parts.name, "{WAITS}");
                            moving.note(NoteKind::Decision, WAITS);
                        }
                        was_held = true;
                        // The guest has written since that was decided: another round decides.
                        settling.over();
                    }
                    held = hold;
                    seen.hold(held);
                    let acknowledged = flow.counters().acknowledged.0;
                    if let Some((since, most, before)) = &mut stopped
                        && arrived() != *before
                        && since.elapsed() < *most
                    {
                        *before = arrived();
                        parts.keeper().tell(Input::Event(Event::Flowing)).await;
                    }
                    goodput.seen(began.elapsed(), acknowledged);
                    crate::parts::lock(&link).seen(began.elapsed(), sent());
                    open_to(&settling, &goodput);
                    let mut may_stop = asked || settling.may_stop(began.elapsed(), on_its_way(), &goodput, least());
                    // While memory waits nothing is known of the link.
                    let pause = goodput.rate().filter(|_| may_stop).map(|_| goodput.forecast(on_its_way(), rest, rtt(), Duration::ZERO).total());
                    if let (Policy::MaxDowntime(most), Some(pause)) = (policy, pause)
                        && !asked
                        && pause > most
                    {
                        // The guest has written since that was decided: another round decides.
                        settling.over();
                        may_stop = false;
                    }
                    if !stopping && stopped.is_none() && may_stop && level() {
                        stopping = true;
                        foreseen = pause.unwrap_or(foreseen);
                        foresee(foreseen);
                        seen.stopping();
                        crate::effects::on_qemu(&qemu, Qemu::stop_now).await?;
                    }
                    // The monitor does not answer while QEMU stops.
                    let runs = !stopping && stopped.is_none();
                    if looked.elapsed() >= BETWEEN_LOOKS && (runs || handed) {
                        looked = Instant::now();
                        let gets_on = flowing.look(acknowledged, session.down_for().is_some());
                        // A look that comes to nothing is no harm.
                        let Ok(Some(info)) = ask(&qemu, &mut events, &mut early).await else { continue };
                        moving.tracker.update(|p| {
                            p.memory_remaining = info.remaining;
                            p.dirty_rate = Amount(info.dirty_pages_per_s * 4096);
                        });
                        if runs && info.remaining.0 < spec.memory.0 / NEARLY_OVER {
                            changes = glance(&mut glances, began.elapsed()).await;
                        }
                        if let Some(left) = pages.left(began.elapsed(), info.remaining.0).filter(|_| runs) {
                            let ahead = goodput.forecast(on_its_way(), 0.0, rtt(), Duration::ZERO).on_its_way;
                            settling.nearly(began.elapsed(), last.0.elapsed(), left, ahead);
                        }
                        // A round may last for longer than a deadline allows. What is decided already is not decided anew, nor anything while
                        // another round has begun of which nobody has been told yet, or the guest would be stopped into a link that stands.
                        let is_open = runs && !held && !asked && gets_on && !settling.is_waiting();
                        let is_same = early.is_none() && events.is_empty() && goodput.rate().is_some();
                        if is_open && is_same && let Some((pages, bytes)) = unsent(&seen, &last, (counted_at, most_left), &info) {
                            let pause = goodput.forecast(on_its_way(), bytes, rtt(), Duration::ZERO);
                            let rate = goodput.rate().map(|rate| behind(rate).0);
                            let gives_up = Verdict::GiveUp(pause.total());
                            let way = postcopy.map(|most| (instead(&gives_up, most, Rest { pages, rate }), most));
                            let follows = matches!(way, Some((Instead::Postcopy(_), _)));
                            // A guest that its memory follows does not wait for it.
                            let left = if follows { pause.without_rest() } else { pause.total() };
                            let look = Look { left, elapsed: moving.since_order() };
                            let Some(reason) = rule.look(&look) else { continue };
                            let (round, _) = close_round(moving, &seen, &mut last, Amount(pages * 4096));
                            moving.tracker.round(round);
                            moving.note(NoteKind::Decision, reason.to_string());
                            if let Some(text) = way.and_then(|(way, most)| told(way, pages, most)) {
                                moving.note(NoteKind::Decision, text);
                            }
                            stopping = true;
                            seen.stopping();
                            foreseen = left;
                            foresee(foreseen);
                            if follows {
                                let_follow(moving, &qemu, &end, rate).await?;
                            } else {
                                crate::effects::on_qemu(&qemu, Qemu::stop_now).await?;
                            }
                        }
                    }
                    continue;
                }
            };
            went_round |= matches!(event, QemuEvent::Pass(_));
            match event {
                QemuEvent::Pass(n) if n > 1 && !stopping && stopped.is_none() => {
                    let Some(info) = ask(&qemu, &mut events, &mut early).await? else {
                        if matches!(early, Some(QemuEvent::Stop { .. })) {
                            // By itself, since nothing is left.
                            moving.tracker.round(close_round(moving, &seen, &mut last, Amount(0)).0);
                        }
                        continue;
                    };
                    let so_far = seen.progress().pages() - last.1.pages();
                    (counted_at, most_left) = (Instant::now(), most_left.max(info.remaining.0 / 4096));
                    if throttle.is_some() && due.is_in_the_middle(so_far, info.remaining.0 / 4096) {
                        moving.tracker.update(|p| p.memory_remaining = info.remaining);
                        continue;
                    }
                    let (round, left) = close_round(moving, &seen, &mut last, info.remaining);
                    due.begins(round.dirtied);
                    let throttled = info.throttled;
                    tracing::info!(vm = parts.name, pass = n, ?left, wire = %round.wire, dirtied = round.dirtied, "round");
                    let (sent, dirtied, round_took) = (round.pages, round.dirtied, round.seconds);
                    goodput.seen(began.elapsed(), flow.counters().acknowledged.0);
                    #[allow(clippy::cast_precision_loss)]
                    let left_over = round.wire.0 as f64 / sent.max(1) as f64 * dirtied as f64;
                    rest = left_over;
                    let pause = goodput.forecast(on_its_way(), rest, rtt(), left);
                    tracing::info!(vm = parts.name, ?pause, "if it stopped now");
                    foreseen = pause.total();
                    // QEMU goes round and round while a stop waits.
                    if sent > 0 || !settling.is_waiting() {
                        moving.tracker.round(round);
                    }
                    foresee(pause.total());
                    let took = Duration::from_secs_f64(round_took);
                    if std::mem::replace(&mut was_held, held) && spoilt < SPOILT {
                        spoilt += 1;
                        continue;
                    }
                    settling.round(began.elapsed(), took, pause.rest, rtt());
                    open_to(&settling, &goodput);
                    if settling.is_waiting() || asked {
                        continue;
                    }
                    let left = if matches!(policy, Policy::MaxDowntime(_)) { pause.total() } else { pause.rest };
                    let crossed = rule.has_crossed();
                    let diverges = is_armed(Point::Diverge, parts.id);
                    let rate = goodput.rate().map(|rate| behind(rate).0);
                    let dirtied_or = |least: u64| if diverges { dirtied.max(least) } else { dirtied };
                    let what = Rest { pages: dirtied_or(LEAST_FOLLOWING), rate };
                    let gives_up = Verdict::GiveUp(pause.total());
                    let may_follow = postcopy.map(|most| instead(&gives_up, most, what));
                    let again = changes.map(|changes| (changes * pause.rest.as_secs_f64()) as u64);
                    let verdict = rule.round(&Ended {
                        sent,
                        dirtied: dirtied_or(sent),
                        left,
                        elapsed: moving.since_order() + pause.without_rest(),
                        can_slow: throttle.is_some_and(|most| throttled < most),
                        follows: matches!(may_follow, Some(Instead::Postcopy(_))),
                        again,
                    });
                    if let (Policy::LeastBytes, Some(again)) = (policy, again) {
                        let what = if verdict == Verdict::GoOn { "there is another round" } else { "no other round" };
                        let text = format!("{what}: {again} pages would have to go again by how fast the guest writes");
                        moving.note(NoteKind::Decision, text);
                    }
                    if throttled > slowed {
                        slowed = throttled;
                        moving.note(
                            NoteKind::Decision,
                            format!(
                                "it writes faster than the link carries: the guest's CPUs are slowed by {throttled} %"
                            ),
                        );
                    }
                    if rule.has_crossed() && !crossed {
                        moving.note(
                            NoteKind::Decision,
                            "as much is dirtied as is sent: further rounds make the pause shorter only by chance",
                        );
                    }
                    if let Some(most) = postcopy {
                        let verdict = if diverges { &gives_up } else { &verdict };
                        let way = instead(verdict, most, what);
                        let follows = matches!(way, Instead::Postcopy(_));
                        if follows && !level() {
                            continue;
                        }
                        if follows && let Verdict::Stop(reason @ Reason::Deadline(..)) = verdict {
                            moving.note(NoteKind::Decision, reason.to_string());
                        }
                        if let Some(text) = told(way, dirtied, most) {
                            moving.note(NoteKind::Decision, text);
                        }
                        if follows {
                            stopping = true;
                            seen.stopping();
                            foreseen = pause.without_rest();
                            foresee(foreseen);
                            let_follow(moving, &qemu, &end, rate).await?;
                            continue;
                        }
                    }
                    match verdict {
                        Verdict::GoOn => {}
                        Verdict::Stop(reason) => {
                            moving.note(NoteKind::Decision, reason.to_string());
                            if !level() {
                                // Another round decides. Memory waits from here on; the next look takes note of it.
                                seen.hold(true);
                                continue;
                            }
                            // What lies between QEMU and the other host has to be there first, or it is part of the pause.
                            if settling.waits(began.elapsed(), pause.on_its_way) {
                                continue;
                            }
                            stopping = true;
                            seen.stopping();
                            crate::effects::on_qemu(&qemu, Qemu::stop_now).await?;
                        }
                        Verdict::GiveUp(best) => return Err(too_long(policy, best)),
                    }
                }
                QemuEvent::Stop { at, unix_us } => {
                    // QEMU stops by itself where nothing is left. The hand-off takes its time all the same.
                    let pause = goodput.forecast(on_its_way(), 0.0, rtt(), Duration::ZERO).total();
                    let by_itself = !stopping && !asked;
                    if let Policy::MaxDowntime(most) = policy
                        && by_itself
                        && pause > most
                    {
                        return Err(too_long(policy, pause));
                    }
                    if matches!(policy, Policy::MaxDowntime(_)) && by_itself && !level() {
                        bail!(
                            "nothing of memory was left and the guest stopped by itself, but its disks are behind over there, and the move was ordered \
                             with {policy}: the VM stays; order it again"
                        );
                    }
                    if !stopping && !settling.is_waiting() {
                        moving.note(
                            NoteKind::Decision,
                            "stop: nothing is left to send, and QEMU stops the guest by itself",
                        );
                        foresee(pause);
                    }
                    seen.stopping();
                    settling.over();
                    open_to(&settling, &goodput);
                    let disks = lacking().unwrap_or(NOBODY_KNOWS);
                    if disks > SHORT {
                        let text = format!(
                            "the guest stands until its disks are level over there, some {:.0} s",
                            disks.as_secs_f64()
                        );
                        moving.note(NoteKind::Decision, text);
                        foresee(foreseen.max(pause) + disks);
                    }
                    let most = (foreseen.max(pause) + disks) * LONGER_THAN_FORESEEN + SHORT;
                    stopped = Some((Instant::now(), most, arrived()));
                    moving.tracker.stopped(at, unix_us);
                    moving.tracker.enter(PhaseName::Stop);
                    reach_async(Point::Stopped, parts.id).await;
                    parts.keeper().tell(Input::Event(Event::VcpusStopped)).await;
                    let (parts, moving) = (parts.clone(), moving.clone());
                    crate::trace::spawn_blocking(move || parts.note(&moving));
                }
                QemuEvent::Migration(MigrationStatus::Completed) => {
                    parts.keeper().tell(Input::Event(Event::Postmigrate)).await;
                }
                QemuEvent::Migration(MigrationStatus::Failed | MigrationStatus::Cancelled) => {
                    bail!("QEMU gave the migration up");
                }
                _ => {}
            }
        }
        #[allow(unreachable_code)]
        anyhow::Ok(())
    };
    let reading = async {
        let found = reading.await.map_err(|_| anyhow!("the reader of QEMU's stream panicked"))??;
        node.peers().found().keep(moving.peer.name.as_str(), found, processors::clock());
        anyhow::Ok(())
    };
    // The rounds end with the move; the pipes may end before them without harm once QEMU has finished.
    let pipes = async { tokio::try_join!(reading, sending, returning).map(drop) };
    tokio::select! {
        result = rounds => result,
        result = async { pipes.await?; std::future::pending::<Result<()>>().await } => result,
    }
}

fn qemu_events(parts: &Parts) -> Result<broadcast::Receiver<QemuEvent>> {
    parts.events().context("the VM has no QEMU")
}

/// The return path, and at its end our own SHUT.
async fn give_back(
    mut back: RecvHalf,
    mut qemu: tokio::net::UnixStream,
    mut encoder: tokio::net::UnixStream,
    moving: &Moving,
) -> Result<()> {
    let mut path = Returning::default();
    loop {
        tokio::select! {
            piece = back.read() => {
                let Some(piece) = piece? else { break };
                let (passed, feedback) = path.pass(&piece)?;
                // An encoder that is done does not listen any more, and need not.
                let _ = encoder.write_all(&feedback).await;
                qemu.write_all(&passed).await.context("QEMU's return path broke")?;
            }
            () = moving.shut.cancelled() => break,
        }
    }
    moving.shut.cancelled().await;
    qemu.write_all(&godwit_memory::ReturnPath::shut_frame()).await.context("QEMU's return path broke")?;
    // Kept open: a source that sees its socket close before it has read SHUT resumes by itself.
    moving.over.cancelled().await;
    Ok(())
}

/// What is said of what is done where rounds do not converge, so many pages are left, and memory may follow its guest for as long as `most`.
fn told(way: Instead, pages: u64, most: Duration) -> Option<String> {
    let (left, most) = (Amount(pages * 4096), most.as_secs_f64());
    match way {
        Instead::Nothing => None,
        Instead::Postcopy(drain) => Some(format!(
            "post-copy: rounds do not converge; the guest goes now, and {left} of its memory follow it, predicted to take {:.1} s of at most \
             {most:.1} s",
            drain.as_secs_f64()
        )),
        Instead::TooLittle => Some(format!("no post-copy: {left} are left, too little to follow a guest")),
        Instead::TooLong(drain) => Some(format!(
            "no post-copy: what is left would follow for {}, and {most:.1} s are allowed",
            drain.map_or("nobody knows how long".into(), |d| format!("{:.1} s", d.as_secs_f64()))
        )),
    }
}

/// The guest goes now, and its memory follows it: of what it does not wait for so many bytes in a second, where that is known.
async fn let_follow(
    moving: &Moving,
    qemu: &Arc<Qemu>,
    end: &std::os::unix::net::UnixStream,
    behind: Option<u64>,
) -> Result<()> {
    moving.follows.store(true, Ordering::Release);
    *crate::parts::lock(&moving.socket) = Some(end.try_clone()?);
    moving.behind.store(behind.unwrap_or_default(), Ordering::Release);
    crate::effects::on_qemu(qemu, Qemu::start_postcopy).await?;
    Ok(())
}

/// How long so many bytes take, at so many a second: at most a day.
fn taking(bytes: u64, rate: f64) -> Duration {
    Duration::from_secs_f64((bytes as f64 / rate).min(86_400.0))
}

fn too_long(policy: Policy, best: Duration) -> anyhow::Error {
    anyhow!(
        "the pause would be {} ms at best, and the move was ordered with {policy}: the VM stays; order it with another policy, or when it \
         writes less",
        best.as_millis()
    )
}

/// What QEMU says next; first what it said while something else was waited for.
async fn next(early: &mut Option<QemuEvent>, events: &mut broadcast::Receiver<QemuEvent>) -> Result<QemuEvent> {
    match early.take() {
        Some(event) => Ok(event),
        None => heard(events).await,
    }
}

/// What QEMU says next. Whoever does not listen for long misses rounds, but not the last of what is said.
async fn heard(events: &mut broadcast::Receiver<QemuEvent>) -> Result<QemuEvent> {
    loop {
        match events.recv().await {
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            event => return event.context("QEMU is gone"),
        }
    }
}

/// How far QEMU is. None where it stops meanwhile, or ends: then it answers nobody for as long as its last bytes take, and `early` has what it
/// said.
async fn ask(
    qemu: &Arc<Qemu>,
    events: &mut broadcast::Receiver<QemuEvent>,
    early: &mut Option<QemuEvent>,
) -> Result<Option<MigrationInfo>> {
    let mut answer = pin!(crate::effects::on_qemu(qemu, Qemu::migration));
    loop {
        tokio::select! {
            biased;
            info = &mut answer => return Ok(Some(info?)),
            event = heard(events) => match event? {
                event @ (QemuEvent::Stop { .. } | QemuEvent::Migration(_)) => {
                    *early = Some(event);
                    return Ok(None);
                }
                // Rounds that end while it is asked are one.
                event @ QemuEvent::Pass(_) => *early = Some(event),
                _ => {}
            },
        }
    }
}

/// Looks how fast the guest changes its memory, where somebody wants to know: pages a second since the last time. A guest that cannot be looked at is not
/// looked at any more.
async fn glance(glances: &mut Option<Glances>, now: Duration) -> Option<f64> {
    let mut looks = glances.take()?;
    let looked = tokio::task::spawn_blocking(move || (looks.look(now), looks)).await;
    let (found, looks) = looked.ok()?;
    match found {
        Ok(rate) => {
            *glances = Some(looks);
            rate
        }
        Err(error) => {
            cannot_see(&error);
            None
        }
    }
}

fn cannot_see(error: &std::io::Error) {
    tracing::warn!(%error, "how fast the guest writes cannot be seen");
}

/// What a guest that stops in the middle of a round leaves to be sent: pages of the round, and what was dirtied since QEMU looked last as far as
/// it knows, which in the first round it does not; and what they are on the wire. None where the round has sent too little to tell.
///
/// When it looked, and the most pages that it has found dirty.
fn unsent(
    seen: &Seen,
    last: &(Instant, godwit_memory::Progress),
    (counted_at, most): (Instant, u64),
    info: &MigrationInfo,
) -> Option<(u64, f64)> {
    let now = seen.progress();
    let sent = now.pages().saturating_sub(last.1.pages());
    let wire = now.wire_bytes.saturating_sub(last.1.wire_bytes);
    let remaining = info.remaining.0 / 4096;
    let dirtied = info.dirty_pages_per_s as f64 * counted_at.elapsed().as_secs_f64();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "pages")]
    let more = beside(remaining as f64, dirtied, most as f64) as u64;
    let pages = remaining.saturating_add(more).min(now.ram_pages);
    (sent >= TELLING).then(|| (pages, wire as f64 / sent as f64 * pages as f64))
}

/// The round that has just ended, of which so much is left to be sent again; and how long that would take.
fn close_round(
    moving: &Moving,
    seen: &Seen,
    last: &mut (Instant, godwit_memory::Progress),
    remaining: Amount,
) -> (Round, Duration) {
    let now = seen.progress();
    let seconds = last.0.elapsed().as_secs_f64();
    let wire = now.wire_bytes - last.1.wire_bytes;
    let pages = now.pages() - last.1.pages();
    let dirtied = remaining.0 / 4096;
    let level = seen.level();
    moving.tracker.update(|p| p.memory_remaining = remaining);
    #[allow(clippy::cast_precision_loss)]
    let each = if pages == 0 { 0.0 } else { seconds / pages as f64 };
    #[allow(clippy::cast_precision_loss)]
    let left = Duration::from_secs_f64((each * dirtied as f64).min(1e6));
    let round = Round {
        pages,
        zero: now.zero_pages - last.1.zero_pages,
        unchanged: now.unchanged_pages - last.1.unchanged_pages,
        on_disk: now.disk_pages - last.1.disk_pages,
        references: Amount(now.disk_bytes - last.1.disk_bytes),
        resent: Amount(now.missing_bytes - last.1.missing_bytes),
        dirtied,
        wire: Amount(wire),
        seconds,
        level: Some(level.number()),
        window: Some(Amount(1 << levels::reach(level).window_log(DEFAULT_WINDOW_LOG))),
    };
    *last = (Instant::now(), now);
    (round, left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_storage_is_read_where_it_is_three_times_as_fast_as_the_link_or_as_packing() {
        let mbit = |mbit: u64| BitRate(mbit * 1_000_000);
        assert!(!is_worth_reading(mbit(0), None) && !is_worth_reading(mbit(0), Some(mbit(0))), "it is not read at all");
        assert!(is_worth_reading(mbit(300), None) && !is_worth_reading(mbit(290), None));
        assert!(is_worth_reading(mbit(150), Some(mbit(50))) && !is_worth_reading(mbit(150), Some(mbit(100))));
        // Behind the same link.
        assert!(!is_worth_reading(mbit(800), Some(mbit(800))));
        assert!(is_worth_reading(mbit(1000), Some(mbit(10_000))));
    }
}
