//! What a log takes: the figures of `log.rs`, computed. A guest of 1 GiB, a minute, an interval a second.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_predict::log::Header;
use godwit_predict::{LogWriter, Observed, Pages};
use std::time::Duration;

const PAGES: usize = 262_144;

/// Numbers that are always the same (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// KiB of a minute of frames.
fn minute(mut frame: impl FnMut(&mut Vec<u64>, &mut Vec<u64>, usize)) -> usize {
    let header = Header {
        observed: Observed::Both,
        pages: Pages(PAGES as u64),
        interval: Duration::from_secs(1),
        start: Duration::ZERO,
    };
    let (mut writer, mut bytes) = LogWriter::new(header).unwrap();
    for second in 0..60 {
        let (mut written, mut changed) = (vec![0; PAGES / 64], vec![0; PAGES / 64]);
        frame(&mut written, &mut changed, second);
        bytes.extend(writer.frame(&written, &changed));
    }
    bytes.len().div_ceil(1024)
}

fn evenly(working_set: usize, rate: usize) -> usize {
    let mut dice = Dice(1);
    minute(|written, changed, _| {
        for i in 0..rate {
            let page = dice.below(working_set);
            written[page / 64] |= 1 << (page % 64);
            changed[page / 64] |= u64::from(i % 2 == 0) << (page % 64);
        }
    })
}

#[test]
fn a_minute_of_a_gib_takes_what_the_module_says() {
    let small = evenly(4096, 1000);
    let large = evenly(PAGES, 5000);
    let sequential = minute(|written, changed, second| {
        for page in (0..20_000).map(|i| (second * 20_000 + i) % PAGES) {
            written[page / 64] |= 1 << (page % 64);
            changed[page / 64] |= 1 << (page % 64);
        }
    });
    let mut dice = Dice(2);
    let worst = minute(|written, changed, _| {
        for word in written.iter_mut().chain(changed) {
            *word = dice.below(usize::MAX) as u64;
        }
        // Every second page, so that no two are a run.
        written.iter_mut().for_each(|word| *word |= 0x5555_5555_5555_5555);
    });
    println!("KiB a GiB and minute: 16 MiB evenly {small}, all evenly {large}, sequential {sequential}, worst {worst}");
    assert_eq!((small, large, sequential, worst), (57, 413, 1, 3601));
}
