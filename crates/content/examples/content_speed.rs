//! What one core does in a second: `cargo run --release -p godwit-content --example content_speed` (part of `make bench`).
//!
//! Runs of 256 KiB of each kind of blocks. *names*: each block is looked up, and a run with a known one becomes a frame; at the other
//! end frames are read, names verified, and every block is learned. *stream*: the runs in full through the packer, at level 1 (raw: at its
//! lowest), and back. *zstd -1*: plain zstd over the same bytes with the same window.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be had is none")]

use godwit_content::choose::Level;
use godwit_content::{BLOCK, Dictionary, Key, MOST_BLOCKS, Packer, Place, Sender, Store, Unpacker, take};
use godwit_units::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use std::time::{Duration, Instant};

const RUN: usize = MOST_BLOCKS * BLOCK;
const RUNS: usize = 128;

/// The best of several, in bytes a second: what disturbs only makes it slower.
fn speed(mut work: impl FnMut()) -> f64 {
    let best = (0..5).map(|_| {
        let begin = Instant::now();
        work();
        begin.elapsed()
    });
    (RUN * RUNS) as f64 / best.min().unwrap_or(Duration::MAX).as_secs_f64()
}

fn text(rng: &mut SmallRng, into: &mut [u8]) {
    const WORDS: [&str; 24] = [
        "the",
        "guest",
        "moves",
        "block",
        "of",
        "a",
        "volume",
        "error",
        "kernel:",
        "systemd[1]:",
        "Started",
        "\n",
        "return",
        "static",
        "int",
        "struct",
        "if",
        "(",
        ")",
        "{",
        "}",
        ";",
        "0x",
        "page",
    ];
    let mut at = 0;
    while at < into.len() {
        let mut word = WORDS[rng.random_range(0..WORDS.len())].as_bytes().to_vec();
        if rng.random_bool(0.3) {
            word.extend(rng.random::<u32>().to_string().bytes());
        }
        word.push(b' ');
        let length = word.len().min(into.len() - at);
        into[at..at + length].copy_from_slice(&word[..length]);
        at += length;
    }
}

fn main() {
    let mut rng = SmallRng::seed_from_u64(1);
    let total = RUN * RUNS;
    let zeroes = vec![0; total];
    let mut random = vec![0; total];
    rng.fill_bytes(&mut random);
    let mut texts = vec![0; total];
    text(&mut rng, &mut texts);
    // Blocks of which each comes eight times, far apart.
    let mut duplicates = vec![0; total];
    let pool: Vec<u8> = random[..total / 8].to_vec();
    for block in duplicates.chunks_exact_mut(BLOCK) {
        let at = rng.random_range(0..pool.len() / BLOCK) * BLOCK;
        block.copy_from_slice(&pool[at..at + BLOCK]);
    }
    let mut copy = vec![0u8; total];
    let memcpy = speed(|| copy.copy_from_slice(std::hint::black_box(&random)));
    println!(
        "memcpy: {:.2} GB/s a core; below: MB/s of plain bytes a core, and bytes on the wire of 100",
        memcpy / 1e6 / 1e3
    );
    println!(
        "{:<11} {:>12} {:>12} {:>8} {:>12} {:>12} {:>8} {:>12} {:>12} {:>12} {:>8}",
        "blocks",
        "names enc.",
        "names dec.",
        "wire",
        "raw enc.",
        "stream enc.",
        "stream dec.",
        "wire",
        "zstd -1",
        "unzstd",
        "wire"
    );
    for (name, data) in [("zeroes", &zeroes), ("duplicates", &duplicates), ("text", &texts), ("random", &random)] {
        let key = Key::new([7; 32]);
        let mut store = Store::new(key.clone(), Bytes(2 * total as u64));
        for block in data.as_chunks::<BLOCK>().0 {
            store.keep(block);
        }
        let greeting = Dictionary::new(key.clone(), Bytes(1)).greetings(0);
        // Each block is known from its second time on, as in a move.
        let mut frames: Vec<Option<Vec<u8>>> = vec![];
        let encode = speed(|| {
            frames.clear();
            let mut sender = Sender::new(Bytes::mib(8));
            greeting.iter().for_each(|m| sender.greet(m).unwrap());
            for run in data.chunks_exact(RUN) {
                frames.push(sender.name(0, run));
                if frames.last().is_some_and(Option::is_some) {
                    sender.handle(&[]).unwrap();
                }
            }
        });
        // Runs of zeroes are said in a word before anything is named.
        let names: usize =
            if name == "zeroes" { 0 } else { frames.iter().map(|f| f.as_ref().map_or(RUN, Vec::len)).sum() };
        let decode = speed(|| {
            let mut dictionary = Dictionary::new(key.clone(), Bytes::mib(8));
            let mut learn = |run: &[u8]| run.chunks_exact(BLOCK).for_each(|block| dictionary.learn(block, Place(1)));
            for (frame, run) in frames.iter().zip(data.chunks_exact(RUN)) {
                match frame {
                    Some(frame) => {
                        let taken = take(frame, &key, &store).unwrap();
                        assert!(taken.missing.is_empty());
                        taken.present.iter().for_each(|(_, data)| learn(data));
                    }
                    None => learn(run),
                }
            }
        });
        let mut wire = vec![];
        let pack_at = |level, wire: &mut Vec<u8>| {
            speed(|| {
                wire.clear();
                let mut packer = Packer::new().unwrap();
                packer.set_level(level);
                for run in data.chunks_exact(RUN) {
                    packer.push(run, wire).unwrap();
                }
                packer.flush(wire).unwrap();
            })
        };
        let raw = pack_at(Level::Raw, &mut wire);
        let pack = pack_at(Level::One, &mut wire);
        let unpack = speed(|| {
            let mut unpacker = Unpacker::new().unwrap();
            for piece in wire.chunks(RUN) {
                unpacker.push(piece);
                while unpacker.poll().unwrap().is_some() {}
            }
        });
        let mut plain = vec![];
        let mut zstd = zstd::bulk::Compressor::new(1).unwrap();
        zstd.window_log(23).unwrap();
        let compress = speed(|| plain = zstd.compress(data).unwrap());
        let mut unzstd = zstd::bulk::Decompressor::new().unwrap();
        let expand = speed(|| copy = unzstd.decompress(&plain, total).unwrap());
        let of_100 = |bytes: usize| bytes as f64 * 100.0 / total as f64;
        println!(
            "{name:<11} {:>12.0} {:>12.0} {:>8.2} {:>12.0} {:>12.0} {:>12.0} {:>8.2} {:>12.0} {:>12.0} {:>8.2}",
            encode / 1e6,
            decode / 1e6,
            of_100(names),
            raw / 1e6,
            pack / 1e6,
            unpack / 1e6,
            of_100(wire.len()),
            compress / 1e6,
            expand / 1e6,
            of_100(plain.len()),
        );
    }
}
