//! How long predictions take: HIST of 1 GiB and of 64 GiB over several links, the worst of some runs. Prints, asserts nothing.
//!
//! `cargo run --release -p godwit-predict --example predict_speed`

#![allow(clippy::unwrap_used, reason = "an example that cannot go on has failed")]

use godwit_predict::log::Header;
use godwit_predict::{
    Evenly, Guest, Link, Log, LogWriter, Observed, Overheads, PageRate, Pages, Prediction, Replayed, Rules, Taken,
    Timeline, simulate,
};
use godwit_units::{BitRate, Bytes};
use std::time::Duration;

const RUNS: usize = 5;

/// Ten minutes, an interval a second, of pages thrown at random into a working set.
fn log(memory: Bytes, working_set: u64, rate: usize) -> Log {
    let pages = Pages::of(memory);
    let header = Header { observed: Observed::Writes, pages, interval: Duration::from_secs(1), start: Duration::ZERO };
    let (mut writer, mut bytes) = LogWriter::new(header).unwrap();
    let mut seed = 1_u64;
    for _ in 0..600 {
        let mut words = vec![0_u64; pages.0.div_ceil(64) as usize];
        for _ in 0..rate {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (seed >> 20) % working_set;
            words[(page / 64) as usize] |= 1 << (page % 64);
        }
        bytes.extend(writer.frame(&words, &words));
    }
    Log::read(bytes).unwrap()
}

/// Milliseconds that this thread has had a processor for: on a busy machine others' turns would count otherwise.
fn processor_ms() -> f64 {
    // The kernel counts a thread's time at its ticks, which are longer than most runs, and whenever it yields.
    std::thread::yield_now();
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e6
}

/// Milliseconds of the first run, of the worst of the others, and what was predicted.
fn worst(mut run: impl FnMut() -> Prediction) -> (f64, f64, Prediction) {
    let begin = processor_ms();
    run();
    let first = processor_ms() - begin;
    let mut worst = 0.0_f64;
    let mut last = None;
    for _ in 0..RUNS {
        let begin = processor_ms();
        last = Some(run());
        worst = worst.max(processor_ms() - begin);
    }
    (first, worst, last.unwrap())
}

fn row(model: &str, memory: Bytes, rate: usize, mbit: f64, run: impl FnMut() -> Prediction) {
    let (first, ms, moved) = worst(run);
    let (total, rounds) = (moved.total_s, moved.rounds.len());
    println!(
        "{model:<5} {memory:>9} {rate:>7}/s {mbit:>6} Mbit/s  {ms:>8.2} ms (first {first:.2})  a move of {total:.1} s, {rounds} rounds"
    );
}

fn main() {
    println!("processor time, the worst of {RUNS} runs each; and the first one, which unpacks the log");
    for (memory, working_set, rate) in [
        (Bytes::gib(1), 262_144, 5_000),
        (Bytes::gib(1), 262_144, 20_000),
        (Bytes::gib(1), 262_144, 100_000),
        (Bytes::gib(64), 1 << 20, 20_000),
        (Bytes::gib(64), 16 << 20, 20_000),
    ] {
        let log = log(memory, working_set, rate);
        // A link of 100 Mbit/s takes ten times as long as the log for 64 GiB: nothing that anybody would ask.
        for mbit in [100.0, 935.0, 7130.0].into_iter().filter(|mbit| *mbit > 100.0 || memory < Bytes::gib(64)) {
            let link = Link { rate: BitRate::from_mbit(mbit), overheads: Overheads::default() };
            let timeline = Timeline::new(&log, Taken::Written);
            row("HIST", memory, rate, mbit, || {
                let mut guest = Replayed::new(&timeline, Duration::ZERO);
                simulate(&mut guest, link, &Rules::xen()).unwrap()
            });
            row("AVG", memory, rate, mbit, || {
                let mut guest = Evenly::new(Pages::of(memory), Pages(working_set), PageRate::new(rate as f64));
                assert!(guest.pages() > 0);
                simulate(&mut guest, link, &Rules::xen()).unwrap()
            });
        }
    }
}
