//! QEMU's migration stream: the encoder reads the source's QEMU, the decoder another node, the return path the destination's QEMU.

use crate::{MIB, Target};
use godwit_memory::format::{self, Segment};
use godwit_memory::{
    Blocks, Checkpoint, CheckpointKey, Config, Decoder, Encoder, Feedback, Finder, Hints, Holding, Limits, Message,
    NEIGHBOURS, PageBytes, PageKey, Resends, ReturnPath, Spot, Witness,
};
use std::io::Write as _;
use std::path::Path;
use std::sync::LazyLock;

/// A small window, so that a run is quick; it is zstd's memory, not counted here.
const WINDOW: u32 = 17;
/// The largest RAM that either end believes here. Per page the encoder keeps 16 bytes, once the page was sent.
const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: WINDOW, versions: 1 << 20 };

/// A page of words rather than of one byte.
const WORDS: u8 = 255;

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
                // A little different from a page of ones.
                Some(fill) if (200..WORDS).contains(fill) => {
                    bytes.extend_from_slice(&[*fill; 16]);
                    bytes.extend_from_slice(&[1; 4080]);
                }
                // Words of which only some bytes are like those before.
                Some(WORDS) => bytes.extend((0..512u64).flat_map(|n| (n << 54 | (n * n) << 12 | 0x867).to_le_bytes())),
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
        raw(&[("a", 9)], &[(0, 3, Some(1)), (0, 3, Some(200)), (0, 4, Some(1)), (0, 3, Some(201)), (0, 4, Some(202))]),
        raw(&[("a", 1)], &[]),
        raw(&[("a", 9)], &[(0, 0, Some(WORDS)), (0, 1, Some(WORDS)), (0, 5, Some(1))]),
    ]
}

fn encoder() -> Encoder {
    encoder_at(1)
}

fn encoder_at(level: i32) -> Encoder {
    let config = Config {
        level,
        window_log: WINDOW,
        resends: Resends::Elide,
        key: PageKey([7; 32]),
        max_ram: LIMITS.max_ram,
        versions: LIMITS.versions,
        ..Config::default()
    };
    Encoder::new(config).expect("the window is within zstd's bounds")
}

/// What the source's node reads from its QEMU. And what it makes of it, the other end understands.
pub const ENCODER: Target = Target {
    name: "memory-encoder",
    corpus: raws,
    run: |input| {
        let mut encoder = encoder_at(if input.len().is_multiple_of(2) { 1 } else { 9 });
        let mut decoder = Decoder::new(LIMITS).expect("the window is within zstd's bounds");
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
    // At the highest level words' bytes are laid apart.
    raws().iter().flat_map(|raw| [1, 9].map(|level| plain(encoder_at(level), raw))).collect()
}

/// What an encoder makes of a stream, before zstd.
fn plain(encoder: Encoder, raw: &[u8]) -> Vec<u8> {
    zstd::decode_all(&*frame(&encoded(encoder, raw))).expect("the encoder's frame is whole")
}

/// And behind it.
fn encoded(mut encoder: Encoder, raw: &[u8]) -> Vec<u8> {
    let mut wire = vec![];
    encoder.push(raw, &mut wire).expect("the corpus is in order");
    encoder.finish(&mut wire).expect("the corpus is in order");
    wire
}

/// The one zstd frame of a stream that was encoded: its segments together.
fn frame(wire: &[u8]) -> Vec<u8> {
    let (mut rest, mut frame) = (&wire[format::MAGIC.len()..], vec![]);
    while let Some((head, behind)) = rest.split_first_chunk() {
        let (piece, behind) = behind.split_at(u32::from_le_bytes(*head) as usize);
        frame.extend_from_slice(piece);
        rest = behind;
    }
    frame
}

/// Compressed as the encoder does it, with a window that the decoder takes.
fn pack(plain: &[u8]) -> Vec<u8> {
    let mut frame = vec![];
    let mut zstd = zstd::Encoder::new(&mut frame, 1).expect("zstd begins");
    zstd.window_log(WINDOW).expect("the window is within zstd's bounds");
    zstd.write_all(plain).and_then(|()| zstd.finish().map(drop)).expect("memory takes all");
    [&format::MAGIC[..], &format::segment(Segment::Packed, frame.len()), &frame].concat()
}

fn decoder() -> Decoder {
    Decoder::new(LIMITS).expect("the window is within zstd's bounds")
}

/// Whether it came to a good end.
fn decode(mut decoder: Decoder, mut wire: &[u8]) -> bool {
    let mut out = vec![];
    while decoder.push_some(&mut wire, &mut out).is_ok_and(|more| more || !wire.is_empty()) {
        // As the node does: what was made goes to QEMU before more is made.
        out.clear();
    }
    decoder.decoded().complete
}

/// What is made at once, twice over as a vector grows, what waits decompressed, what is kept for differences (1 MiB) and where that is (1 MiB for
/// the largest RAM). It does not grow with the input.
const DECODES: fn(usize) -> usize = |length| 6 * MIB + 2 * length;

/// What the destination's node reads from another: operations, compressed after they were broken.
pub const DECODER: Target = Target {
    name: "memory-decoder",
    corpus: operations,
    run: |input| {
        decode(decoder(), &pack(input));
    },
    bound: DECODES,
};

/// The same, broken after it was compressed.
pub const DECODER_PACKED: Target = Target {
    name: "memory-decoder-packed",
    corpus: || {
        let mut corpus: Vec<_> = operations().iter().map(|plain| pack(plain)).collect();
        // Little that expands to much.
        corpus.push(pack(&vec![format::VERBATIM; 4 << 20]));
        corpus
    },
    run: |input| {
        decode(decoder(), input);
    },
    bound: DECODES,
};

/// A disk of a thousand blocks, each filled with one byte of its number. It has nothing where the number's last bit but seven is set.
struct Filled;

impl Blocks for Filled {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        (u64::from(first.block)..).zip(into.chunks_exact_mut(4096)).all(|(block, into)| {
            into.fill(block as u8);
            first.disk == 0 && block < 1000 && block & 0x80 == 0
        })
    }
}

impl Finder for Filled {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        Some(Spot { disk: 0, block: content[0].into() })
    }
}

/// Streams with references to a disk, in plain operations.
fn references() -> Vec<Vec<u8>> {
    let fills = |fills: &[u8]| fills.iter().zip(0..).map(|(fill, page)| (0, page, Some(*fill))).collect::<Vec<_>>();
    let plain = |pages: &[u8]| plain(encoder().with_disks(Box::new(Filled)), &raw(&[("pc.ram", 64)], &fills(pages)));
    vec![plain(&[1, 2, 3, 4, 5]), plain(&[7, 6, 5, 9, 10, 11]), plain(&(1..60).collect::<Vec<_>>())]
}

/// Operations with references, read by a destination that has the disk.
pub const REFERENCES: Target = Target {
    name: "memory-references",
    corpus: references,
    run: |input| {
        let mut decoder =
            Decoder::new(LIMITS).expect("the window is within zstd's bounds").with_disks(Box::new(Filled));
        let (wire, mut out) = (pack(input), vec![]);
        for piece in wire.chunks(1 + input.len() % 1777) {
            if decoder.push(piece, &mut out).is_err() {
                return;
            }
            out.clear();
            while decoder.feedback().is_some() {}
        }
    },
    // References mean as much as zero pages do: sixteen pages for some bytes, all of which come out at once here.
    bound: |length| 3 * MIB + 16 * 4200 * length,
};

/// Segments and answers, to a destination that has asked for a group: the wire behind that question, answer included.
pub const ANSWERS: Target = Target {
    name: "memory-answers",
    corpus: || vec![asking().1],
    run: |input| {
        let (mut decoder, _) = asking();
        let mut out = vec![];
        for piece in input.chunks(1 + input.len() % 77) {
            if decoder.push(piece, &mut out).is_err() {
                return;
            }
            out.clear();
            while decoder.feedback().is_some() {}
        }
    },
    bound: |length| 4 * MIB + 64 * length,
};

/// A destination that lacks a block, and what comes then.
fn asking() -> (Decoder, Vec<u8>) {
    /// The source has blocks that the destination lacks.
    struct All;
    impl Blocks for All {
        fn read(&self, first: Spot, into: &mut [u8]) -> bool {
            (u64::from(first.block)..).zip(into.chunks_exact_mut(4096)).all(|(block, into)| {
                into.fill(block as u8);
                true
            })
        }
    }
    impl Finder for All {
        fn find(&self, content: &PageBytes) -> Option<Spot> {
            Some(Spot { disk: 0, block: content[0].into() })
        }
    }
    let pages: Vec<_> = (0..40).map(|page| (0, page, Some(120 + page as u8))).collect();
    let mut encoder = encoder().with_disks(Box::new(All));
    let mut decoder = Decoder::new(LIMITS).expect("the window is within zstd's bounds").with_disks(Box::new(Filled));
    let (mut wire, mut out) = (vec![], vec![]);
    encoder.push(&raw(&[("pc.ram", 64)], &pages), &mut wire).expect("the stream is in order");
    encoder.flush(&mut wire).expect("the stream is in order");
    decoder.push(&wire, &mut out).expect("the decoder takes what the encoder makes");
    let asked = decoder.feedback().expect("the destination lacks what lies behind block 127");
    wire.clear();
    encoder.finish(&mut wire).expect("the stream is in order");
    encoder.feedback(asked, &mut wire).expect("it was asked for what was sent");
    (decoder, wire)
}

const KEY: CheckpointKey = CheckpointKey([3; 32]);
const KEPT: &[(&str, u64)] = &[("pc.ram", 64), ("pc.bios", 3)];

/// What a destination has of an earlier try: a checkpoint's file, and what it says of that.
static EARLIER: LazyLock<(Vec<u8>, Holding)> = LazyLock::new(|| {
    let place = tempfile::NamedTempFile::new().expect("there is room for it");
    let pages: Vec<_> = (0..40).map(|page| (0, page, Some(page as u8 + 1))).collect();
    let wire = encoded(encoder(), &raw(KEPT, &pages));
    assert!(decode(keeping(place.path()), &wire), "the decoder takes what the encoder makes");
    let mut checkpoint = Checkpoint::open(place.path(), &KEY).expect("it was made");
    let held = checkpoint.holding(&|| true).expect("it is read").expect("nobody calls it off");
    (std::fs::read(place.path()).expect("it was made"), held)
});

fn keeping(checkpoint: &Path) -> Decoder {
    let checkpoint = Checkpoint::open(checkpoint, &KEY).expect("there is room for it");
    decoder().with_checkpoint(checkpoint)
}

/// What the destination says that it has of an earlier try.
pub const HOLDING: Target = Target {
    name: "memory-holding",
    corpus: || vec![EARLIER.1.encode()],
    run: |input| {
        if let Ok(held) = Holding::decode(input, LIMITS.max_ram) {
            assert!(held.pages() <= LIMITS.max_ram / 4096 + 64);
            assert!(Holding::decode(&held.encode(), LIMITS.max_ram).is_ok_and(|again| again == held));
        }
    },
    // Eight bytes for each page of the largest RAM, for one that is read and one that is read again.
    bound: |length| 8 * MIB + 16 * length,
};

/// Operations that name what was kept, and differences against the guest's own RAM.
pub const AGAIN: Target = Target {
    name: "memory-again",
    corpus: || {
        let pages: Vec<_> = (0..50).map(|page| (0, page, Some(page as u8 + 1))).collect();
        let again = |pages: &[_]| plain(encoder().with_holding(EARLIER.1.clone(), &KEY), &raw(KEPT, pages));
        let changed =
            [(0, 5, Some(77)), (0, 6, None), (0, 7, Some(1)), (0, 7, Some(203)), (0, 7, Some(204)), (1, 2, Some(3))];
        [vec![again(&pages), again(&changed)], operations()].concat()
    },
    run: |input| {
        // What comes is kept as well.
        let place = tempfile::NamedTempFile::new().expect("there is room for it");
        std::fs::write(place.path(), &EARLIER.0).expect("there is room for it");
        let mut ram = tempfile::tempfile().expect("there is room for it");
        (0..64).try_for_each(|page| ram.write_all(&[page + 1; 4096])).expect("there is room for it");
        decode(keeping(place.path()).with_ram(Witness::new("pc.ram", ram)), &pack(input));
    },
    // As DECODES, with where each page of the largest RAM is kept.
    bound: |length| 16 * MIB + 2 * length,
};

/// What the destination says of other guests' memory.
pub const HINTS: Target = Target {
    name: "memory-hints",
    corpus: || {
        let run = |guest: u8, page: u32, length: u8| {
            let hashes: Vec<u8> = (0..5 * (usize::from(length) + 1)).map(|n| n as u8).collect();
            [&[guest][..], &page.to_le_bytes(), &[length], &hashes].concat()
        };
        vec![[run(0, 0, 255), run(1, 9, 0), run(7, 700, 12)].concat(), run(2, u32::MAX - 1, 1)]
    },
    run: |input| {
        let mut hints = Hints::new(7, NEIGHBOURS, 8, 1 << 12);
        for piece in input.chunks(1 + input.len() % 13) {
            if hints.take(piece).is_err() {
                return;
            }
            assert!(hints.pages() <= 1 << 12);
        }
    },
    bound: |length| MIB + 16 * length,
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
        let said = |feedback| {
            let mut out = vec![];
            Message::from_feedback(feedback).encode(&mut out);
            out
        };
        let bitmap =
            [&b"\x06pc.ram"[..], &8u64.to_be_bytes(), &[1; 8], &0x0123_4567_89ab_cdefu64.to_be_bytes()].concat();
        vec![
            [frame(2, &[0, 0, 0, 1]), frame(7, &[0, 0, 0, 0]), ReturnPath::shut_frame().to_vec()].concat(),
            [frame(3, &[0; 12]), frame(4, &[1; 40]), frame(6, &[0, 0, 0, 1])].concat(),
            [frame(5, b"\x06pc.ram"), bitmap].concat(),
            [Feedback::Past(3), Feedback::Missing(9)].map(said).concat(),
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
                assert!(message.is_feedback() || message.feedback().is_none());
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
            assert!(decode(decoder(), &pack(&plain)));
        }
        for wire in (DECODER_PACKED.corpus)().iter().take(raws().len()) {
            assert!(decode(decoder(), wire));
        }
    }
}
