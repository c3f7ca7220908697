//! Logs of dirtied pages: what was written is read again, and nothing is believed that is not in order.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_predict::log::{Header, LogError};
use godwit_predict::{Log, LogWriter, Observed, Pages, Taken};
use proptest::prelude::*;
use std::time::Duration;

fn header(pages: u64) -> Header {
    Header {
        observed: Observed::Both,
        pages: Pages(pages),
        interval: Duration::from_millis(500),
        start: Duration::from_secs(1_790_000_000),
    }
}

/// A log of frames of (written, changed); none: nobody watched.
fn log_of(header: Header, intervals: &[Option<(Vec<u64>, Vec<u64>)>]) -> Vec<u8> {
    let (mut writer, mut bytes) = LogWriter::new(header).unwrap();
    for interval in intervals {
        match interval {
            Some((written, changed)) => bytes.extend(writer.frame(written, changed)),
            None => writer.miss(),
        }
    }
    bytes
}

fn words(log: &Log, interval: u64, taken: Taken) -> Vec<u64> {
    let mut words = vec![0; log.header().pages.0.div_ceil(64) as usize];
    log.for_each_word(interval, taken, |word, bits| {
        assert_eq!(words[word], 0, "each word comes once");
        words[word] = bits;
    });
    words
}

fn bitmap() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), (0_u32..64).prop_map(|i| 1 << i)];
    prop::collection::vec(word, 5)
}

proptest! {
    #[test]
    fn what_was_written_into_a_log_is_read_from_it(
        pages in 257_u64..=320,
        intervals in prop::collection::vec(prop::option::weighted(0.8, (bitmap(), bitmap())), 1..12),
    ) {
        let bytes = log_of(header(pages), &intervals);
        let log = Log::read(bytes).unwrap();
        prop_assert_eq!((log.header(), log.torn()), (&header(pages), 0));
        let last = if pages % 64 == 0 { u64::MAX } else { (1 << (pages % 64)) - 1 };
        let cut = |mut words: Vec<u64>| { words[4] &= last; words };
        for (i, interval) in intervals.iter().enumerate() {
            let Some((written, changed)) = interval else { continue };
            let both = written.iter().zip(changed).map(|(w, c)| w | c).collect();
            prop_assert_eq!(words(&log, i as u64, Taken::Written), cut(both));
            prop_assert_eq!(words(&log, i as u64, Taken::Changed), cut(changed.clone()));
        }
    }

    #[test]
    fn a_log_that_was_cut_off_anywhere_keeps_its_whole_frames(
        intervals in prop::collection::vec((bitmap(), bitmap()), 1..6),
        share in 0.0..1.0,
    ) {
        let intervals: Vec<_> = intervals.into_iter().map(Some).collect();
        let bytes = log_of(header(320), &intervals);
        let ends: Vec<usize> = (0..=intervals.len()).map(|n| log_of(header(320), &intervals[..n]).len()).collect();
        let end = ends[0] + ((bytes.len() - ends[0]) as f64 * share) as usize;
        let log = Log::read(bytes[..end].to_vec()).unwrap();
        let whole = ends.iter().filter(|e| **e <= end).count() - 1;
        prop_assert_eq!((log.watched(), log.torn()), (whole, end - ends[whole]));
    }

    #[test]
    fn no_bytes_behind_a_header_make_a_log_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = log_of(header(300), &[]);
        bytes.extend(tail);
        if let Ok(log) = Log::read(bytes) {
            for i in 0..log.intervals().min(100) {
                words(&log, i, Taken::Written);
                words(&log, i, Taken::Changed);
            }
        }
    }
}

#[test]
fn an_interval_that_nobody_watched_is_like_the_one_before_and_past_the_end_the_log_begins_again() {
    let (a, b) = (vec![1, 0, 0, 0, 0], vec![0, 2, 0, 0, 0]);
    let frame = |words: &Vec<u64>| Some((words.clone(), words.clone()));
    let log = Log::read(log_of(header(320), &[None, frame(&a), None, None, frame(&b)])).unwrap();
    assert_eq!((log.watched(), log.intervals(), log.length()), (2, 5, Duration::from_millis(2500)));
    for (interval, expected) in [(0, &a), (1, &a), (2, &a), (3, &a), (4, &b), (5, &a), (9, &b)] {
        assert_eq!(&words(&log, interval, Taken::Written), expected, "{interval}");
    }
}

#[test]
fn writes_and_changes_are_kept_apart_as_far_as_they_were_watched() {
    let one = [Some((vec![0b1111, 0, 0, 0, 0], vec![0b0101, 0, 0, 0, 0]))];
    for (observed, changed) in [(Observed::Both, 2.0), (Observed::Writes, 4.0), (Observed::Contents, 2.0)] {
        let log = Log::read(log_of(Header { observed, ..header(320) }, &one)).unwrap();
        assert_eq!((log.mean(Taken::Written), log.mean(Taken::Changed)), (4.0, changed), "{observed:?}");
    }
}

#[test]
fn an_empty_log_has_no_pages_and_no_end() {
    let log = Log::read(log_of(header(320), &[])).unwrap();
    assert_eq!((log.intervals(), log.mean(Taken::Written)), (0, 0.0));
    log.for_each_word(7, Taken::Written, |_, _| panic!("there is none"));
}

/// The error of a log with these bytes changed.
fn broken(at: usize, bytes: &[u8]) -> LogError {
    let mut log = log_of(header(320), &[Some((vec![0b1011, 0, 0, 0, 0], vec![0b0001, 0, 0, 0, 0]))]);
    log[at..at + bytes.len()].copy_from_slice(bytes);
    Log::read(log).unwrap_err()
}

#[test]
fn what_is_not_in_order_is_named_and_not_believed() {
    assert_eq!(Log::read(vec![]).unwrap_err(), LogError::NoLog);
    assert_eq!(Log::read(b"QEVM....".to_vec()).unwrap_err(), LogError::NoLog);
    assert_eq!(broken(4, &[2]), LogError::Version(2));
    let says = |error: LogError, what: &str| assert!(error.to_string().contains(what), "{error}");
    says(Log::read(b"GWDL\x01\x03".to_vec()).unwrap_err(), "cut short");
    says(broken(5, &[0]), "what was watched");
    says(broken(6, &[16]), "4 KiB");
    says(broken(8, &[0; 8]), "no pages");
    says(broken(8, &[0xff; 8]), "more pages than any guest");
    says(broken(16, &[0; 4]), "interval has no length");
    says(broken(16, &[0xff; 4]), "longer than an hour");
    // The frame: length, missed, form, count, two runs, bits.
    says(broken(30, &[0b11 << 2]), "no known form");
    says(broken(31, &[100]), "not in order");
    says(broken(31, &[1]), "other pages than it says");
    says(broken(31, &[2]), "too long");
    let endless = [log_of(header(320), &[]), vec![0xff; 12]].concat();
    says(Log::read(endless).unwrap_err(), "no number");
}
