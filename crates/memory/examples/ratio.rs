//! What a recorded migration stream becomes, by method, how fast, and where the time goes. Record one with `godwit-lab capture`, or with QMP's
//! `migrate {"uri": "exec:cat > FILE"}`, the source running, then: `cargo run --release --example ratio FILE`.
#![allow(clippy::unwrap_used, reason = "a tool for the bench: a panic says enough")]

use godwit_memory::{Config, Decoder, Encoder, Limits, Progress, Reach, Resends, Stages};
use std::time::Duration;
use zstd::stream::raw::CParameter;

/// As a socket gives it.
const PIECE: usize = 256 << 10;

/// Of this thread's processor: other work on the machine does not count.
fn clock() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let path = std::env::args().nth(1).expect("usage: ratio FILE");
    let raw = std::fs::read(&path).unwrap();
    println!(
        "{path}: {} bytes\n{:<32} {:>12} {:>7} {:>7} {:>12} {:>12}",
        raw.len(),
        "method",
        "bytes",
        "share",
        "to zstd",
        "encode MB/s",
        "decode MB/s"
    );
    let mut reference = 0;
    for (name, level, long) in [("zstd -1 --long=27", 1, true), ("zstd -3 --long=27", 3, true), ("zstd -1", 1, false)] {
        let begin = clock();
        let mut encoder = zstd::stream::Encoder::new(vec![], level).unwrap();
        if long {
            encoder.set_parameter(CParameter::WindowLog(27)).unwrap();
            encoder.set_parameter(CParameter::EnableLongDistanceMatching(true)).unwrap();
        }
        raw.chunks(PIECE).for_each(|piece| std::io::Write::write_all(&mut encoder, piece).unwrap());
        let wire = encoder.finish().unwrap();
        let encode = clock() - begin;
        let begin = clock();
        let mut decoder = zstd::stream::Decoder::new(&*wire).unwrap();
        std::io::copy(&mut decoder, &mut std::io::sink()).unwrap();
        if reference == 0 {
            reference = wire.len();
        }
        line(name, &raw, wire.len(), reference, encode, clock() - begin);
    }
    let default = || Config { clock: Some(clock), ..Config::default() };
    let named = [
        ("godwit, re-sends kept", Config { resends: Resends::Keep, ..default() }),
        ("godwit", default()),
        ("godwit, no differences", Config { versions: 0, ..default() }),
        ("godwit, 32 MiB kept", Config { versions: 32 << 20, ..default() }),
        ("godwit, middle", Config { reach: Reach::Middle, ..default() }),
        ("godwit, near", Config { reach: Reach::Near, ..default() }),
        ("godwit, level -5, far", Config { level: -5, ..default() }),
        ("godwit, level -5, near", Config { level: -5, reach: Reach::Near, ..default() }),
        ("godwit, level -20, near", Config { level: -20, reach: Reach::Near, ..default() }),
        ("godwit, raw, near", Config { level: -(1 << 17), reach: Reach::Near, ..default() }),
        ("godwit, level 9", Config { level: 9, ..default() }),
        ("godwit, level 6", Config { level: 6, ..default() }),
    ];
    for (name, config) in named {
        let begin = clock();
        let mut encoder = Encoder::new(config).unwrap();
        let mut wire = vec![];
        raw.chunks(PIECE).for_each(|piece| encoder.push(piece, &mut wire).unwrap());
        let progress = encoder.finish(&mut wire).unwrap().progress;
        let encode = clock() - begin;
        let stages = encoder.stages();
        let begin = clock();
        let mut decoder = Decoder::new(Limits::default()).unwrap().with_clock(clock);
        let mut out = vec![];
        for piece in wire.chunks(PIECE) {
            decoder.push(piece, &mut out).unwrap();
            out.clear();
        }
        assert!(decoder.decoded().complete);
        let decode = clock() - begin;
        line(name, &raw, wire.len(), reference, encode, decode);
        pages(&progress);
        spent("encode", &raw, encode, stages);
        spent("decode", &raw, decode, decoder.stages());
    }
}

fn pages(p: &Progress) {
    println!(
        "    pages: {} zero, {} in full, {} as differences ({} bytes), {} unchanged left out; other: {} bytes",
        p.zero_pages, p.data_pages, p.delta_pages, p.delta_bytes, p.unchanged_pages, p.other_bytes
    );
}

fn spent(what: &str, raw: &[u8], whole: Duration, stages: Stages) {
    let each: Vec<_> =
        stages.named().iter().map(|(name, time)| format!("{name} {:.3} s", time.as_secs_f64())).collect();
    let rest = whole - stages.zstd;
    let gbit = raw.len() as f64 * 8.0 / 1e9 / rest.as_secs_f64();
    println!("    {what}: {:.3} s: {}; without zstd {gbit:.1} Gbit/s", whole.as_secs_f64(), each.join(", "));
}

fn line(name: &str, raw: &[u8], wire: usize, reference: usize, encode: Duration, decode: Duration) {
    let rate = |t: Duration| raw.len() as f64 / 1e6 / t.as_secs_f64();
    let share = 100.0 * wire as f64 / raw.len() as f64;
    let to_zstd = wire as f64 / reference as f64;
    println!("{name:<32} {wire:>12} {share:>6.2}% {to_zstd:>7.3} {:>12.0} {:>12.0}", rate(encode), rate(decode));
}
