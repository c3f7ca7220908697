//! Logs of dirtied pages: files that come from somebody's folder.

use crate::{MIB, Target};
use godwit_predict::log::Header;
use godwit_predict::{Link, Log, LogWriter, Observed, Overheads, Pages, Replayed, Rules, Taken, Timeline, simulate};
use godwit_units::BitRate;
use std::time::Duration;

/// Guests larger than this are not simulated: a run of a few bytes is unpacked to words for all its pages, and those are kept.
const SIMULATED: u64 = 1 << 12;
/// Times a second that a guest is sent: so a move, five copies at the most, is over within 250 of the shortest intervals.
const COPIES_A_SECOND: u64 = 20;

/// A log of a guest of so many pages, with runs, bitmaps, changes, and an interval that nobody watched.
fn log(pages: u64, observed: Observed) -> Vec<u8> {
    let header =
        Header { observed, pages: Pages(pages), interval: Duration::from_millis(250), start: Duration::from_secs(1) };
    let (mut writer, mut bytes) = LogWriter::new(header).expect("the header is in order");
    let words = |word: u64| vec![word; pages.div_ceil(64) as usize];
    bytes.extend(writer.frame(&words(1 << 9 | 0b11), &words(1 << 9)));
    bytes.extend(writer.frame(&words(0), &words(0)));
    writer.miss();
    bytes.extend(writer.frame(&words(0x5555_5555_5555_5555), &words(0x5)));
    bytes.extend(writer.frame(&words(u64::MAX), &words(u64::MAX)));
    bytes
}

/// A log is read, and if it is believed, replayed: each interval's pages are as many as it says, none past the guest's memory.
pub const DIRTY_LOG: Target = Target {
    name: "dirty-log",
    corpus: || vec![log(320, Observed::Both), log(1000, Observed::Writes), log(64, Observed::Contents)],
    run: |input| {
        let Ok(log) = Log::read(input.to_vec()) else { return };
        let pages = log.header().pages.0;
        for interval in 0..log.intervals().min(20) {
            let count = |taken| {
                let mut count = 0;
                log.for_each_word(interval, taken, |word, bits| {
                    let past = (word as u64 * 64).checked_add(64 - u64::from(bits.leading_zeros()));
                    assert!(bits != 0 && past.is_some_and(|past| past <= pages), "a page past the memory");
                    count += u64::from(bits.count_ones());
                });
                count
            };
            assert!(count(Taken::Changed) <= count(Taken::Written), "more changed than were written");
        }
        if pages <= SIMULATED && log.watched() > 0 {
            let timeline = Timeline::new(&log, Taken::Written);
            let mut guest = Replayed::new(&timeline, Duration::ZERO);
            let rate = BitRate(pages * 4096 * 8 * COPIES_A_SECOND);
            let link = Link { rate, overheads: Overheads::default() };
            let moved = simulate(&mut guest, link, &Rules::xen()).expect("Xen ends each move");
            assert!(moved.bytes >= pages * 4096, "a page was not sent");
        }
    },
    bound: |length| 2 * MIB + 40 * length,
};
