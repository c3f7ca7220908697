//! QEMU's migration stream: the encoder reads the source's QEMU, the decoder another node, the return path the destination's QEMU.

use crate::{MIB, Target};
use godwit_memory::{Config, Decoder, Encoder, Limits, PageKey, Resends, ReturnPath};
use std::io::Write as _;

/// A small window, so that a run is quick; it is zstd's memory, not counted here.
const WINDOW: u32 = 17;
/// The largest RAM that either end believes here. Per page the encoder keeps 16 bytes, once the page was sent.
const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: WINDOW };

/// A stream as QEMU writes it: RAM's START with these blocks, a part, the END, a device's state.
fn raw(blocks: &[(&str, u64)], pages: &[(usize, u64, Option<u8>)]) -> Vec<u8> {
    let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x0apc-q35-7.2".to_vec();
    bytes.extend_from_slice(b"\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0dvalidate-uuid");
    bytes.extend_from_slice(b"\x08\0\x01\0\0\x08\0\x02\0\x04\0\0\0\x01");
    bytes.extend_from_slice(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
    let total: u64 = blocks.iter().map(|b| b.1 * 4096).sum();
    bytes.extend_from_slice(&(total | 4).to_be_bytes());
    for (name, pages) in blocks {
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&(pages * 4096).to_be_bytes());
    }
    let close = |bytes: &mut Vec<u8>| {
        bytes.extend_from_slice(&0x10u64.to_be_bytes());
        bytes.extend_from_slice(b"\x7e\0\0\0\x02");
    };
    close(&mut bytes);
    let mut last = None;
    for kind in [2, 3] {
        bytes.extend_from_slice(&[kind, 0, 0, 0, 2]);
        for (block, page, fill) in pages {
            let flags = if fill.is_some() { 8 } else { 2 } | if last == Some(*block) { 0x20 } else { 0 };
            bytes.extend_from_slice(&(page << 12 | flags).to_be_bytes());
            if last != Some(*block) {
                bytes.push(blocks[*block].0.len() as u8);
                bytes.extend_from_slice(blocks[*block].0.as_bytes());
                last = Some(*block);
            }
            match fill {
                Some(fill) => bytes.extend_from_slice(&[*fill; 4096]),
                None => bytes.push(0),
            }
        }
        close(&mut bytes);
    }
    bytes.extend_from_slice(b"\x04\0\0\0\x05\x05timer\0\0\0\0\0\0\0\x02whatever this is\x00\x06\0\0\0\x02{}");
    bytes
}

fn raws() -> Vec<Vec<u8>> {
    vec![
        raw(&[("pc.ram", 64), ("pc.bios", 3)], &[(0, 0, None), (0, 1, None), (1, 2, Some(7)), (0, 63, Some(1))]),
        raw(&[("pc.ram", 200_000)], &[(0, 199_999, None), (0, 5, None), (0, 6, Some(2))]),
        raw(&[("a", 1)], &[]),
    ]
}

fn encoder() -> Encoder {
    let config = Config {
        window_log: WINDOW,
        resends: Resends::Elide,
        key: PageKey([7; 32]),
        max_ram: LIMITS.max_ram,
        ..Config::default()
    };
    Encoder::new(config).expect("the window is within zstd's bounds")
}

/// What the source's node reads from its QEMU. And what it makes of it, the other end understands.
pub const ENCODER: Target = Target {
    name: "memory-encoder",
    corpus: raws,
    run: |input| {
        let (mut encoder, mut decoder) = (encoder(), Decoder::new(LIMITS).expect("the window is within zstd's bounds"));
        let (mut wire, mut out) = (vec![], vec![]);
        let piece = 1 + input.len() % 1999;
        for piece in input.chunks(piece) {
            let taken = encoder.push(piece, &mut wire).and_then(|()| encoder.flush(&mut wire));
            decoder.push(&wire, &mut out).expect("the decoder takes what the encoder makes");
            wire.clear();
            out.clear();
            if taken.is_err() {
                return;
            }
        }
        if encoder.finish(&mut wire).is_ok() {
            decoder.push(&wire, &mut out).expect("the decoder takes what the encoder makes");
            assert!(decoder.decoded().complete);
        }
    },
    // Hashes of 2^18 pages, a bit for each twice over, and what waits.
    bound: |length| 16 * MIB + 16 * length,
};

/// Wire as the encoder makes it, behind the magic number and before zstd.
fn operations() -> Vec<Vec<u8>> {
    let plain = |raw: &Vec<u8>| {
        let (mut encoder, mut wire) = (encoder(), vec![]);
        encoder.push(raw, &mut wire).expect("the corpus is in order");
        encoder.finish(&mut wire).expect("the corpus is in order");
        zstd::decode_all(&wire[godwit_memory::format::MAGIC.len()..]).expect("the encoder's frame is whole")
    };
    raws().iter().map(plain).collect()
}

/// Compressed as the encoder does it, with a window that the decoder takes.
fn pack(plain: &[u8]) -> Vec<u8> {
    let mut wire = godwit_memory::format::MAGIC.to_vec();
    let mut zstd = zstd::Encoder::new(&mut wire, 1).expect("zstd begins");
    zstd.window_log(WINDOW).expect("the window is within zstd's bounds");
    zstd.write_all(plain).and_then(|()| zstd.finish().map(drop)).expect("memory takes all");
    wire
}

/// Whether it came to a good end.
fn decode(mut wire: &[u8]) -> bool {
    let mut decoder = Decoder::new(LIMITS).expect("the window is within zstd's bounds");
    let mut out = vec![];
    while decoder.push_some(&mut wire, &mut out).is_ok_and(|more| more || !wire.is_empty()) {
        // As the node does: what was made goes to QEMU before more is made.
        out.clear();
    }
    decoder.decoded().complete
}

/// What is made at once, twice over as a vector grows, and what waits decompressed. It does not grow with the input.
const DECODES: fn(usize) -> usize = |length| 3 * MIB + 2 * length;

/// What the destination's node reads from another: operations, compressed after they were broken.
pub const DECODER: Target = Target {
    name: "memory-decoder",
    corpus: operations,
    run: |input| {
        decode(&pack(input));
    },
    bound: DECODES,
};

/// The same, broken after it was compressed.
pub const DECODER_PACKED: Target = Target {
    name: "memory-decoder-packed",
    corpus: || {
        let mut corpus: Vec<_> = operations().iter().map(|plain| pack(plain)).collect();
        // Little that expands to much.
        corpus.push(pack(&vec![godwit_memory::format::VERBATIM; 4 << 20]));
        corpus
    },
    run: |input| {
        decode(input);
    },
    bound: DECODES,
};

/// What the source's node reads from the destination's QEMU, by way of another node.
pub const RETURN_PATH: Target = Target {
    name: "memory-return-path",
    corpus: || {
        let frame = |kind: u16, payload: &[u8]| {
            let mut out = kind.to_be_bytes().to_vec();
            out.extend((payload.len() as u16).to_be_bytes());
            out.extend(payload);
            out
        };
        let bitmap =
            [&b"\x06pc.ram"[..], &8u64.to_be_bytes(), &[1; 8], &0x0123_4567_89ab_cdefu64.to_be_bytes()].concat();
        vec![
            [frame(2, &[0, 0, 0, 1]), frame(7, &[0, 0, 0, 0]), ReturnPath::shut_frame().to_vec()].concat(),
            [frame(3, &[0; 12]), frame(4, &[1; 40]), frame(6, &[0, 0, 0, 1])].concat(),
            [frame(5, b"\x06pc.ram"), bitmap].concat(),
        ]
    },
    run: |input| {
        let mut path = ReturnPath::new();
        for piece in input.chunks(1 + input.len() % 13) {
            if path.push(piece).is_err() {
                return;
            }
            while let Ok(Some(message)) = path.poll() {
                message.encode(&mut vec![]);
            }
        }
    },
    bound: |length| MIB + 8 * length,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_order_is_decoded_to_its_end() {
        for plain in operations() {
            assert!(decode(&pack(&plain)));
        }
        for wire in (DECODER_PACKED.corpus)().iter().take(raws().len()) {
            assert!(decode(wire));
        }
    }
}
