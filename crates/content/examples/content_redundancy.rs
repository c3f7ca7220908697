//! How much of a disk image would travel: `cargo run --release -p godwit-content --example content_redundancy IMAGE...`
//!
//! CloudNet, section 4.5, for images of one's own. An image is sent block by block to a receiver that begins with nothing and
//! keeps what it was sent; of several images each finds what those before it have brought, as if in one session. *contents* is how much the dictionary
//! can name, *memory* what the sender takes for that.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be had is none")]

use godwit_content::{BLOCK, Dictionary, Key, MOST_BLOCKS, Packer, Sender, is_zero};
use godwit_units::Bytes;
use std::fs::File;
use std::io::Read;

/// What went of one image.
#[derive(Default)]
struct Sent {
    size: u64,
    not_zero: u64,
    by_name: u64,
    packed: u64,
}

/// Sends an image; a sender that has no key names nothing.
fn send(path: &str, sender: &mut Sender) -> Sent {
    let mut file = File::open(path).unwrap();
    let (mut packer, mut wire) = (Packer::new().unwrap(), vec![]);
    let mut sent = Sent::default();
    let mut run = vec![0; MOST_BLOCKS * BLOCK];
    loop {
        let mut length = 0;
        while length < run.len() {
            match file.read(&mut run[length..]).unwrap() {
                0 => break,
                more => length += more,
            }
        }
        if length == 0 {
            break;
        }
        sent.size += length as u64;
        run[length..].fill(0);
        // As a mirror does: parts that are not zero.
        for part in run.as_chunks::<BLOCK>().0.chunk_by(|a, b| is_zero(a) == is_zero(b)).filter(|p| !is_zero(&p[0])) {
            let part = part.as_flattened();
            sent.not_zero += part.len() as u64;
            let frame = sender.name(0, part);
            if frame.is_some() {
                // The receiver has everything that it was sent.
                sender.handle(&[]).unwrap();
            }
            let message = frame.as_deref().unwrap_or(part);
            sent.by_name += message.len() as u64;
            packer.push(message, &mut wire).unwrap();
            sent.packed += wire.len() as u64;
            wire.clear();
        }
    }
    packer.flush(&mut wire).unwrap();
    sent.packed += wire.len() as u64;
    sent
}

fn main() {
    let images: Vec<String> = std::env::args().skip(1).collect();
    let greeting = Dictionary::new(Key::new([7; 32]), Bytes(1)).greetings(0);
    println!(
        "{:>12} {:>12}  {:>10} {:>10} {:>10} {:>10}  image",
        "contents", "memory", "size", "not zero", "names", "and zstd"
    );
    for contents in [Bytes(0), Bytes(100_000_000), Bytes(1_000_000_000), Bytes::gib(4)] {
        let memory = Bytes(contents.0 / BLOCK as u64 * Sender::COST as u64);
        let mut sender = Sender::new(memory);
        if contents.0 > 0 {
            greeting.iter().for_each(|message| sender.greet(message).unwrap());
        }
        for image in &images {
            let sent = send(image, &mut sender);
            let [size, not_zero, names, packed] =
                [sent.size, sent.not_zero, sent.by_name, sent.packed].map(|n| Bytes(n).to_string());
            let (contents, memory) = (contents.to_string(), memory.to_string());
            println!("{contents:>12} {memory:>12}  {size:>10} {not_zero:>10} {names:>10} {packed:>10}  {image}");
        }
    }
}
