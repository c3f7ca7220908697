//! One 4 KiB record on a disk that can prove what it is.
//!
//! ```text
//! 0      8          16     24    32     40         48                          4096
//! | magic | checksum | boot | run | slot | sequence | structured filler ... |
//!                    |<------------------- checksum ------------------------->|
//! ```
//!
//! What a slot may hold is an interval: nothing older than the last record that was acknowledged (a flush after it
//! returned), nothing newer than the last one issued. Between the two the disk may choose, and before the first
//! acknowledgement the slot may hold whatever was there before the load.

use crate::{
    content::{Prf, fill_structured},
    fault::{Fault, put_u64, u64_at},
    page::{PAGE_BYTES, Page, RunId},
    protocol::{BootId, Problem},
};

/// Bytes of a record and of its slot; a multiple of every disk's sector.
pub const RECORD_BYTES: usize = PAGE_BYTES;

const MAGIC: u64 = u64::from_le_bytes(*b"gdwtDISK");
const AT_CHECKSUM: usize = 8;
const AT_BOOT: usize = 16;
const AT_RUN: usize = 24;
const AT_SLOT: usize = 32;
const AT_SEQUENCE: usize = 40;
const AT_FILLER: usize = 48;

/// Number of a slot in the region that a disk load writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Number of a record: they count up from 1 over all slots of a load; 0 is "none".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Sequence(pub u64);

/// What is known about a slot.
#[derive(Debug, Clone, Copy, Default)]
pub struct SlotState {
    /// The last record in it that was acknowledged.
    pub acknowledged: Sequence,
    /// The last record that was written to it.
    pub issued: Sequence,
    /// What its last write came to.
    pub last_write: LastWrite,
}

/// What the last write to a slot came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LastWrite {
    /// It returned without an error, or there was none.
    #[default]
    Whole,
    /// It failed: the slot may hold the old record, the new one, or parts of both.
    InDoubt,
}

/// What all records of a load have in common.
#[derive(Debug, Clone)]
pub struct RecordFormat {
    /// Determines the filler.
    pub seed: u64,
    /// The program's life that writes them.
    pub boot: BootId,
    /// The `Start` that they belong to.
    pub run: RunId,
}

impl RecordFormat {
    /// Makes `buffer` the record `sequence` for `slot`.
    pub fn write(&self, buffer: &mut Page, slot: Slot, sequence: Sequence) {
        fill_structured(&mut buffer.0[AT_FILLER..], &mut Prf::new(self.seed, slot.0.into(), sequence.0));
        put_u64(&mut buffer.0, 0, MAGIC);
        put_u64(&mut buffer.0, AT_BOOT, self.boot.0);
        put_u64(&mut buffer.0, AT_RUN, self.run.0);
        put_u64(&mut buffer.0, AT_SLOT, slot.0.into());
        put_u64(&mut buffer.0, AT_SEQUENCE, sequence.0);
        let checksum = checksum(buffer);
        put_u64(&mut buffer.0, AT_CHECKSUM, checksum);
    }

    /// Verifies what was read from `slot`. A slot in doubt is not to be asked about.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, read: &Page, slot: Slot, state: &SlotState) -> Result<(), Fault> {
        let at = |offset| u64_at(&read.0, offset);
        let whole = at(0) == MAGIC && at(AT_CHECKSUM) == checksum(read);
        let ours = whole && at(AT_BOOT) == self.boot.0 && at(AT_RUN) == self.run.0;
        let nothing_acknowledged = state.acknowledged == Sequence(0);
        if nothing_acknowledged && !ours {
            return Ok(());
        }
        let expected = match (nothing_acknowledged, state.acknowledged == state.issued) {
            (true, _) => format!("a record up to sequence {}", state.issued.0),
            (false, true) => format!("the record with sequence {}", state.issued.0),
            (false, false) => format!("a record with sequence {} to {}", state.acknowledged.0, state.issued.0),
        };
        if !whole {
            return Err(if at(0) == MAGIC {
                let found = format!("sequence {} with a checksum that does not match", at(AT_SEQUENCE));
                Fault::new(Problem::Torn, expected, found)
            } else {
                Fault::lost(expected, &read.0)
            });
        }
        if !ours {
            let found = format!("a record of boot {:016x}, run {:016x}", at(AT_BOOT), at(AT_RUN));
            return Err(Fault::new(Problem::Foreign, expected, found));
        }
        if at(AT_SLOT) != u64::from(slot.0) {
            let found = format!("a record of slot {}, sequence {}", at(AT_SLOT), at(AT_SEQUENCE));
            return Err(Fault::new(Problem::Foreign, expected, found));
        }
        let sequence = Sequence(at(AT_SEQUENCE));
        if sequence < state.acknowledged {
            Err(Fault::new(Problem::Stale, expected, format!("sequence {}", sequence.0)))
        } else if sequence > state.issued {
            let found = format!("sequence {}, which was never written there", sequence.0);
            Err(Fault::new(Problem::Foreign, expected, found))
        } else {
            Ok(())
        }
    }
}

/// A whole record, as one finds it on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The program's life that wrote it.
    pub boot: BootId,
    /// Its number.
    pub sequence: Sequence,
}

/// What was read from `slot`, by somebody who does not know what to expect. None: no record was ever written there.
///
/// # Errors
/// It is the wreck of a record, or another slot's.
pub fn look(read: &Page, slot: Slot) -> Result<Option<Found>, Problem> {
    let at = |offset| u64_at(&read.0, offset);
    if at(0) != MAGIC {
        return Ok(None);
    }
    if at(AT_CHECKSUM) != checksum(read) {
        return Err(Problem::Torn);
    }
    if at(AT_SLOT) != u64::from(slot.0) {
        return Err(Problem::Foreign);
    }
    Ok(Some(Found { boot: BootId(at(AT_BOOT)), sequence: Sequence(at(AT_SEQUENCE)) }))
}

fn checksum(record: &Page) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&record.0[AT_BOOT..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOT: Slot = Slot(5);

    fn format() -> RecordFormat {
        RecordFormat { seed: 1, boot: BootId(2), run: RunId(3) }
    }

    fn record(slot: Slot, sequence: u64) -> Page {
        let mut page = Page::ZERO;
        format().write(&mut page, slot, Sequence(sequence));
        page
    }

    fn verdict(read: &Page, acknowledged: u64, issued: u64) -> Option<Problem> {
        let state =
            SlotState { acknowledged: Sequence(acknowledged), issued: Sequence(issued), last_write: LastWrite::Whole };
        format().check(read, SLOT, &state).err().map(|fault| fault.kind)
    }

    #[test]
    fn a_lost_acknowledged_write_is_stale_or_lost() {
        assert_eq!(verdict(&record(SLOT, 10), 10, 10), None);
        assert_eq!(verdict(&record(SLOT, 7), 10, 10), Some(Problem::Stale));
        assert_eq!(verdict(&Page::ZERO, 10, 10), Some(Problem::Lost));
    }

    #[test]
    fn an_unacknowledged_write_may_be_there_or_not() {
        assert_eq!(verdict(&record(SLOT, 10), 10, 12), None);
        assert_eq!(verdict(&record(SLOT, 12), 10, 12), None);
        assert_eq!(verdict(&Page::ZERO, 0, 12), None);
        assert_eq!(verdict(&record(SLOT, 12), 0, 12), None);
    }

    #[test]
    fn records_of_another_slot_run_or_future_are_foreign() {
        assert_eq!(verdict(&record(Slot(6), 10), 10, 10), Some(Problem::Foreign));
        assert_eq!(verdict(&record(Slot(6), 10), 0, 10), Some(Problem::Foreign));
        assert_eq!(verdict(&record(SLOT, 11), 10, 10), Some(Problem::Foreign));
        let mut other = Page::ZERO;
        RecordFormat { run: RunId(4), ..format() }.write(&mut other, SLOT, Sequence(10));
        assert_eq!(verdict(&other, 10, 10), Some(Problem::Foreign));
        assert_eq!(verdict(&other, 0, 10), None, "it was there before the load");
    }

    #[test]
    fn whoever_looks_without_knowing_tells_records_wrecks_and_nothing_apart() {
        assert_eq!(look(&Page::ZERO, SLOT), Ok(None));
        let found = Found { boot: BootId(2), sequence: Sequence(10) };
        assert_eq!(look(&record(SLOT, 10), SLOT), Ok(Some(found)));
        assert_eq!(look(&record(SLOT, 10), Slot(6)), Err(Problem::Foreign));
        let mut torn = record(SLOT, 10);
        torn.0[3000] ^= 1;
        assert_eq!(look(&torn, SLOT), Err(Problem::Torn));
    }

    proptest! {
        #[test]
        fn a_record_torn_at_a_sector_is_found(sector in 1..8usize, old in 1..9u64) {
            let mut torn = record(SLOT, 10);
            torn.0[sector * 512..].copy_from_slice(&record(SLOT, old).0[sector * 512..]);
            prop_assert_eq!(verdict(&torn, 10, 10), Some(Problem::Torn));
        }

        #[test]
        fn any_flipped_bit_is_found(bit in 0..RECORD_BYTES * 8) {
            let mut page = record(SLOT, 10);
            page.0[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(verdict(&page, 10, 10).is_some());
        }
    }
}
