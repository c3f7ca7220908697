//! Godwit's own format of a memory stream: what crosses the WAN between [`Encoder`](crate::Encoder) and
//! [`Decoder`](crate::Decoder).
//!
//! Four bytes [`MAGIC`], then segments: four bytes, little-endian, of which the highest bit is 0 for a piece of the zstd stream and 1 for
//! an answer, the others the length of what follows. Answers overtake what the decoder cannot read before it has them
//! ([`disks`](crate::disks)): the number of a group, and its pages as a zstd frame of their own.
//! The zstd stream is one frame, or one for each level that the encoder went on with. In it, operations, each beginning with one byte:
//!
//! | first byte | followed by | means |
//! |---|---|---|
//! | `0..=31`, bits below | seek, then content or count | page records |
//! | [`VERBATIM`] | length, bytes | bytes of QEMU's that are no page record |
//! | [`BLOCKS`] | count, then per block: length of name (1 byte), name, pages | the RAM blocks, before the first page |
//! | [`DISKS`] | 32 bytes | the key of references' digests; before the first of them |
//! | [`DELTAS`] | number of bytes | what the source keeps of what it sent, for differences; before [`BLOCKS`] |
//! | [`FIRSTS`] | 0 or 1 | whether the source keeps what it sends of a page for the first time, from here on; it does until it says so. Behind [`BLOCKS`] |
//! | [`CHECK`] | 32 bytes | BLAKE3 of all that was rebuilt so far |
//! | [`END`] | length of the rebuilt stream, 32 bytes | the same, and nothing follows |
//!
//! Page records: [`ZERO`] tells a run of zero pages (a count follows) from one page of content (4096 bytes follow);
//! [`HELD`] a run of pages that are as the destination's checkpoint has them (a count follows); [`DISK`] pages that lie on the VM's disks
//! (number of runs of blocks; for each its first block, as a distance from the one behind the last, and its length; digest, 8 bytes).
//! [`DELTA`]: one page, as the difference from what the last record about it said (runs of words of 8 bytes that are other, in XOR).
//! [`SHUFFLED_4`] and [`SHUFFLED_8`]: one page of content, the first bytes of all its words of so many bytes before all second ones, and so on.
//! [`NAMED`]: the first record carries its block's name instead of CONTINUE. [`SEEK`]: block and page follow, the page
//! as a signed distance from the one after the last; without it the record is about exactly that one. Numbers are
//! LEB128.
//!
//! A page costs one byte besides its content as long as pages come in order: nothing is buffered to
//! count them, and equal pages in equal order stay equal bytes for zstd's long matches.

use crate::cursor::{Cursor, More};

/// First bytes of a stream: Godwit's memory format, version 7: as 6, with a window twice as large.
pub const MAGIC: [u8; 4] = *b"GWM7";

/// Bit of a page operation: zero pages.
pub const ZERO: u8 = 1;
/// Bit of a page operation: the first record names its block.
pub const NAMED: u8 = 2;
/// Bit of a page operation: it does not go on behind the last one.
pub const SEEK: u8 = 4;
/// Bit of a page operation: pages that the destination has kept. With [`ZERO`] it is [`DISK`].
pub const HELD: u8 = 8;
/// Both bits: pages that lie on the VM's disks.
pub const DISK: u8 = ZERO | HELD;
/// Bit of a page operation: the difference from what was last said of the page. With [`ZERO`] it is [`SHUFFLED_4`], with [`HELD`] [`SHUFFLED_8`].
pub const DELTA: u8 = 16;
/// Both bits: one page of content, the bytes of whose words of four bytes lie apart.
pub const SHUFFLED_4: u8 = DELTA | ZERO;
/// Both bits: the same, of words of eight bytes.
pub const SHUFFLED_8: u8 = DELTA | HELD;
/// Largest page operation.
pub(crate) const LAST_PAGE_OP: u8 = ZERO | NAMED | SEEK | HELD | DELTA;
/// Bytes as they are.
pub const VERBATIM: u8 = 0x20;
/// The table of RAM blocks.
pub const BLOCKS: u8 = 0x21;
/// A digest on the way.
pub const CHECK: u8 = 0x22;
/// The trailer.
pub const END: u8 = 0x23;
/// The key of references.
pub const DISKS: u8 = 0x24;
/// How much is kept for differences.
pub const DELTAS: u8 = 0x25;
/// Whether first versions are kept for differences.
pub const FIRSTS: u8 = 0x26;

/// Zero pages in one operation, at most: it bounds what one operation makes the decoder write (36 KiB).
pub const MAX_RUN: u64 = 4096;
/// Held pages in one operation, at most, for the same reason (64 KiB).
pub const MAX_HELD_RUN: u64 = 16;
/// Pages on disks in one operation, at most: as many as are verified at once, and have to be asked for together.
pub const MAX_DISK_RUN: u64 = 16;
/// Bytes in one [`VERBATIM`], at most; longer ones are several.
pub const MAX_VERBATIM: usize = 64 << 10;
/// Length of a BLAKE3 digest.
pub const DIGEST: usize = 32;

/// What a segment of the wire holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A piece of the one zstd frame.
    Packed,
    /// What the decoder asked for.
    Answer,
}

/// Bytes of a segment's head.
pub const SEGMENT_HEAD: usize = 4;
const ANSWER_BIT: u32 = 1 << 31;
/// Bytes in one segment, at most; longer ones are several.
const MAX_SEGMENT: usize = 1 << 30;

/// A segment's head.
///
/// # Panics
/// With a length of more than 1 GiB.
#[must_use]
pub fn segment(kind: Segment, length: usize) -> [u8; SEGMENT_HEAD] {
    assert!(length <= MAX_SEGMENT, "a segment of {length} bytes");
    (length as u32 | if kind == Segment::Answer { ANSWER_BIT } else { 0 }).to_le_bytes()
}

/// What a segment's head says.
pub(crate) fn parse_segment(head: [u8; SEGMENT_HEAD]) -> (Segment, usize) {
    let word = u32::from_le_bytes(head);
    let kind = if word & ANSWER_BIT == 0 { Segment::Packed } else { Segment::Answer };
    (kind, (word & !ANSWER_BIT) as usize)
}

/// Says in the head at `head` how much follows it; makes several segments of it where one would be too long.
pub(crate) fn close_segment(out: &mut Vec<u8>, mut head: usize) {
    while out.len() - head - SEGMENT_HEAD > MAX_SEGMENT {
        out[head..head + SEGMENT_HEAD].copy_from_slice(&segment(Segment::Packed, MAX_SEGMENT));
        head += SEGMENT_HEAD + MAX_SEGMENT;
        out.splice(head..head, [0; SEGMENT_HEAD]);
    }
    let length = out.len() - head - SEGMENT_HEAD;
    out[head..head + SEGMENT_HEAD].copy_from_slice(&segment(Segment::Packed, length));
}

pub(crate) fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A number; `None` if it is no 64-bit one.
pub(crate) fn get(from: &mut Cursor<'_>) -> Result<Option<u64>, More> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = from.u8()?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return Ok(None);
        }
        n |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(Some(n));
        }
    }
    Ok(None)
}

/// Distance from `from` to `to`, small if they are near in either direction.
pub(crate) fn distance(from: u64, to: u64) -> u64 {
    let d = to.wrapping_sub(from) as i64;
    ((d << 1) ^ (d >> 63)) as u64
}

/// The opposite of [`distance`].
pub(crate) fn travel(from: u64, distance: u64) -> u64 {
    from.wrapping_add((distance >> 1) ^ (distance & 1).wrapping_neg())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_and_distances_come_back(a: u64, b: u64) {
            let mut out = vec![];
            put(&mut out, a);
            prop_assert_eq!(get(&mut Cursor::new(&out)).unwrap(), Some(a));
            prop_assert_eq!(travel(a, distance(a, b)), b);
        }
    }

    #[test]
    fn a_number_of_more_than_64_bits_is_none() {
        assert_eq!(get(&mut Cursor::new(&[0xff; 11])).unwrap(), None);
        assert_eq!(get(&mut Cursor::new(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2])).unwrap(), None);
    }
}
