//! What passed and what did not, by direction and class; this is where a move's "bytes on the WAN" come from.
//!
//! # What is counted
//!
//! Bytes are **layer-2 bytes of each packet as on the wire**: from the destination address to the end of the payload,
//! padded to 60 bytes, headers repeated for every segment of a super-frame, *without* the 24 bytes of preamble,
//! checksum and gap (which the line is charged all the same). `packets` are segments, `frames` are what the kernel
//! handed over: equal when segmentation is off.
//!
//! A frame is counted once, when its fate is sealed: as `delivered` when it has been written to the far interface, or
//! under the reason for which it was dropped. So offered = delivered + all drops + what is in flight.
//!
//! # How it is read
//!
//! One thread writes a direction's cells, anyone reads them, with relaxed atomics: each cell is exact, but a snapshot
//! taken under load may show a frame's packets without its bytes yet. Differences over a second do not notice; compare
//! for equality only when the path is quiet.

use crate::class::{Class, PerClass};
use crate::frame::FrameInfo;
use godwit_units::Bytes;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// An amount of traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// As the kernel handed them over; a super-frame is one.
    pub frames: u64,
    /// As a wire would carry them; a super-frame is several.
    pub packets: u64,
    /// At layer 2, headers repeated for every packet, without framing.
    pub bytes: Bytes,
}

impl Tally {
    fn zip(self, other: Self, op: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            frames: op(self.frames, other.frames),
            packets: op(self.packets, other.packets),
            bytes: Bytes(op(self.bytes.0, other.bytes.0)),
        }
    }
}

/// One class of one direction (or a sum of such).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClassCounters {
    /// Written to the far interface.
    pub delivered: Tally,
    /// Dropped because the queue was full.
    pub dropped_queue: Tally,
    /// Lost by the dice of `loss`, after having occupied the line.
    pub dropped_loss: Tally,
    /// Arrived while the path was cut, or in flight when it was.
    pub dropped_cut: Tally,
    /// Dropped because the emulator's own memory bound was reached
    /// ([`MAX_IN_FLIGHT`](crate::flight::MAX_IN_FLIGHT)). Anything but zero means that the path was not emulated faithfully.
    pub dropped_overflow: Tally,
    /// Refused by the far interface: down, gone, or its MTU too small.
    pub dropped_unsent: Tally,
}

impl ClassCounters {
    /// All that was dropped, for any reason.
    #[must_use]
    pub fn dropped(&self) -> Tally {
        [self.dropped_queue, self.dropped_loss, self.dropped_cut, self.dropped_overflow, self.dropped_unsent]
            .into_iter()
            .fold(Tally::default(), |sum, tally| sum.zip(tally, u64::wrapping_add))
    }

    fn zip(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            delivered: self.delivered.zip(other.delivered, &op),
            dropped_queue: self.dropped_queue.zip(other.dropped_queue, &op),
            dropped_loss: self.dropped_loss.zip(other.dropped_loss, &op),
            dropped_cut: self.dropped_cut.zip(other.dropped_cut, &op),
            dropped_overflow: self.dropped_overflow.zip(other.dropped_overflow, &op),
            dropped_unsent: self.dropped_unsent.zip(other.dropped_unsent, &op),
        }
    }
}

/// One direction of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirectionCounters {
    /// Traffic by class.
    pub classes: PerClass<ClassCounters>,
    /// Super-frames that were offered while loss or jitter was on: each shared one fate, so the figures are not those of
    /// a real WAN. Anything but zero means that [`set_segmentation`](crate::set_segmentation) is missing in the sender's namespace.
    pub superframes_under_loss: u64,
    /// Frames that left more than [`LATE`](crate::path::LATE) after their moment: how far to trust delays on this machine.
    pub late: u64,
    /// Frames lost before the emulator saw them, because its threads did not get to read in time. No class and no bytes are
    /// known. Anything but zero means that the machine was too busy.
    pub missed: u64,
    /// Frames longer than the emulator takes (64 KiB and headers), dropped: "BIG TCP" is switched on in a sender.
    pub oversized: u64,
}

impl DirectionCounters {
    /// The sum over all classes.
    #[must_use]
    pub fn total(&self) -> ClassCounters {
        Class::ALL
            .into_iter()
            .fold(ClassCounters::default(), |sum, class| sum.zip(&self.classes[class], u64::wrapping_add))
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            classes: PerClass::from_fn(|class| self.classes[class].zip(&earlier.classes[class], u64::saturating_sub)),
            superframes_under_loss: self.superframes_under_loss.saturating_sub(earlier.superframes_under_loss),
            late: self.late.saturating_sub(earlier.late),
            missed: self.missed.saturating_sub(earlier.missed),
            oversized: self.oversized.saturating_sub(earlier.oversized),
        }
    }
}

/// A snapshot of a path's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// From the first interface to the second.
    pub a_to_b: DirectionCounters,
    /// From the second interface to the first.
    pub b_to_a: DirectionCounters,
}

impl Counters {
    /// What was counted since `earlier`, a snapshot of the same path.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self { a_to_b: self.a_to_b.since(&earlier.a_to_b), b_to_a: self.b_to_a.since(&earlier.b_to_a) }
    }

    /// One class, both directions together.
    #[must_use]
    pub fn class(&self, class: Class) -> ClassCounters {
        self.a_to_b.classes[class].zip(&self.b_to_a.classes[class], u64::wrapping_add)
    }

    /// Everything, both directions together.
    #[must_use]
    pub fn total(&self) -> ClassCounters {
        self.a_to_b.total().zip(&self.b_to_a.total(), u64::wrapping_add)
    }

    /// Both directions' [`superframes_under_loss`](DirectionCounters::superframes_under_loss).
    #[must_use]
    pub fn superframes_under_loss(&self) -> u64 {
        self.a_to_b.superframes_under_loss + self.b_to_a.superframes_under_loss
    }
}

/// What became of a frame, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Delivered,
    Queue,
    Loss,
    Cut,
    Overflow,
    Unsent,
}

/// The living counters of one direction.
#[derive(Debug, Default)]
pub(crate) struct DirectionCells {
    classes: PerClass<ClassCells>,
    pub(crate) superframes_under_loss: Cell,
    pub(crate) late: Cell,
    pub(crate) missed: Cell,
    pub(crate) oversized: Cell,
}

#[derive(Debug, Default)]
struct ClassCells {
    delivered: TallyCells,
    queue: TallyCells,
    loss: TallyCells,
    cut: TallyCells,
    overflow: TallyCells,
    unsent: TallyCells,
}

#[derive(Debug, Default)]
struct TallyCells {
    frames: Cell,
    packets: Cell,
    bytes: Cell,
}

/// A number that one thread raises and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct Cell(AtomicU64);

impl Cell {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl TallyCells {
    fn snapshot(&self) -> Tally {
        Tally { frames: self.frames.get(), packets: self.packets.get(), bytes: Bytes(self.bytes.get()) }
    }
}

impl DirectionCells {
    pub(crate) fn count(&self, class: Class, fate: Fate, info: &FrameInfo) {
        let cells = &self.classes[class];
        let tally = match fate {
            Fate::Delivered => &cells.delivered,
            Fate::Queue => &cells.queue,
            Fate::Loss => &cells.loss,
            Fate::Cut => &cells.cut,
            Fate::Overflow => &cells.overflow,
            Fate::Unsent => &cells.unsent,
        };
        tally.frames.add(1);
        tally.packets.add(info.packets);
        tally.bytes.add(info.l2_bytes.0);
    }

    pub(crate) fn snapshot(&self) -> DirectionCounters {
        DirectionCounters {
            classes: PerClass::from_fn(|class| {
                let cells = &self.classes[class];
                ClassCounters {
                    delivered: cells.delivered.snapshot(),
                    dropped_queue: cells.queue.snapshot(),
                    dropped_loss: cells.loss.snapshot(),
                    dropped_cut: cells.cut.snapshot(),
                    dropped_overflow: cells.overflow.snapshot(),
                    dropped_unsent: cells.unsent.snapshot(),
                }
            }),
            superframes_under_loss: self.superframes_under_loss.get(),
            late: self.late.get(),
            missed: self.missed.get(),
            oversized: self.oversized.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(packets: u64, bytes: u64) -> FrameInfo {
        FrameInfo { packets, l2_bytes: Bytes(bytes), wire_bytes: Bytes(bytes + 24 * packets), ports: None }
    }

    #[test]
    fn each_fate_is_counted_under_its_own_name_and_all_add_up() {
        let cells = DirectionCells::default();
        let fates = [Fate::Delivered, Fate::Queue, Fate::Loss, Fate::Cut, Fate::Overflow, Fate::Unsent];
        for (n, fate) in (1u64..).zip(fates) {
            cells.count(Class::Disk, fate, &info(n, 100 * n));
        }
        let counters = Counters { a_to_b: cells.snapshot(), ..Counters::default() };
        let disk = counters.class(Class::Disk);
        assert_eq!(disk.delivered, Tally { frames: 1, packets: 1, bytes: Bytes(100) });
        assert_eq!(disk.dropped_loss, Tally { frames: 1, packets: 3, bytes: Bytes(300) });
        assert_eq!(disk.dropped(), Tally { frames: 5, packets: 20, bytes: Bytes(2000) });
        assert_eq!(counters.total(), disk);
        assert_eq!(counters.class(Class::Memory), ClassCounters::default());
    }

    #[test]
    fn since_is_what_happened_in_between() {
        let cells = DirectionCells::default();
        cells.count(Class::Memory, Fate::Delivered, &info(2, 3000));
        let before = Counters { b_to_a: cells.snapshot(), ..Counters::default() };
        cells.count(Class::Memory, Fate::Delivered, &info(1, 60));
        cells.late.add(4);
        let after = Counters { b_to_a: cells.snapshot(), ..Counters::default() };
        let between = after.since(&before);
        assert_eq!(between.b_to_a.classes.memory.delivered, Tally { frames: 1, packets: 1, bytes: Bytes(60) });
        assert_eq!(between.b_to_a.late, 4);
        assert_eq!(after.since(&after), Counters::default());
    }
}
