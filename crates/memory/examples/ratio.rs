//! What a recorded migration stream becomes, by method, and how fast. Record one with QMP's
//! `migrate {"uri": "exec:cat > FILE"}`, the source running, then: `cargo run --release --example ratio FILE`.
#![allow(clippy::unwrap_used, reason = "a tool for the bench: a panic says enough")]

use godwit_memory::{Config, Decoder, Encoder, Limits, Resends};
use std::time::Instant;
use zstd::stream::raw::CParameter;

/// As a socket gives it.
const PIECE: usize = 256 << 10;

fn main() {
    let path = std::env::args().nth(1).expect("usage: ratio FILE");
    let raw = std::fs::read(&path).unwrap();
    println!(
        "{path}: {} bytes\n{:<28} {:>12} {:>7} {:>12} {:>12}",
        raw.len(),
        "method",
        "bytes",
        "share",
        "encode MB/s",
        "decode MB/s"
    );
    for (name, long) in [("zstd -1", false), ("zstd -1 --long=27", true)] {
        let begin = Instant::now();
        let mut encoder = zstd::stream::Encoder::new(vec![], 1).unwrap();
        if long {
            encoder.set_parameter(CParameter::WindowLog(27)).unwrap();
            encoder.set_parameter(CParameter::EnableLongDistanceMatching(true)).unwrap();
        }
        raw.chunks(PIECE).for_each(|piece| std::io::Write::write_all(&mut encoder, piece).unwrap());
        let wire = encoder.finish().unwrap();
        let encode = begin.elapsed();
        let begin = Instant::now();
        let mut decoder = zstd::stream::Decoder::new(&*wire).unwrap();
        std::io::copy(&mut decoder, &mut std::io::sink()).unwrap();
        line(name, &raw, wire.len(), encode, begin.elapsed());
    }
    for (name, resends) in [("godwit, re-sends kept", Resends::Keep), ("godwit", Resends::Elide)] {
        let begin = Instant::now();
        let mut encoder = Encoder::new(Config { resends, ..Config::default() }).unwrap();
        let mut wire = vec![];
        raw.chunks(PIECE).for_each(|piece| encoder.push(piece, &mut wire).unwrap());
        let progress = encoder.finish(&mut wire).unwrap().progress;
        let encode = begin.elapsed();
        let begin = Instant::now();
        let mut decoder = Decoder::new(Limits::default()).unwrap();
        let mut out = vec![];
        for piece in wire.chunks(PIECE) {
            decoder.push(piece, &mut out).unwrap();
            out.clear();
        }
        assert!(decoder.decoded().complete);
        line(name, &raw, wire.len(), encode, begin.elapsed());
        println!(
            "  pages: {} zero, {} with content ({} re-sent changed), {} unchanged left out; other: {} bytes",
            progress.zero_pages,
            progress.data_pages,
            progress.changed_pages,
            progress.unchanged_pages,
            progress.other_bytes
        );
    }
}

fn line(name: &str, raw: &[u8], wire: usize, encode: std::time::Duration, decode: std::time::Duration) {
    let rate = |t: std::time::Duration| raw.len() as f64 / 1e6 / t.as_secs_f64();
    let share = 100.0 * wire as f64 / raw.len() as f64;
    println!("{name:<28} {wire:>12} {share:>6.2}% {:>12.0} {:>12.0}", rate(encode), rate(decode));
}
