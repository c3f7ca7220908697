//! Godwit's own format of a memory stream: what crosses the WAN between [`Encoder`](crate::Encoder) and
//! [`Decoder`](crate::Decoder).
//!
//! Four bytes [`MAGIC`], then one zstd frame to the end. Inside the frame, operations, each beginning with one byte:
//!
//! | first byte | followed by | means |
//! |---|---|---|
//! | `0..=15`, bits below | seek, then content or count | page records |
//! | [`VERBATIM`] | length, bytes | bytes of QEMU's that are no page record |
//! | [`BLOCKS`] | count, then per block: length of name (1 byte), name, pages | the RAM blocks, before the first page |
//! | [`CHECK`] | 32 bytes | BLAKE3 of all that was rebuilt so far |
//! | [`END`] | length of the rebuilt stream, 32 bytes | the same, and nothing follows |
//!
//! Page records: [`ZERO`] tells a run of zero pages (a count follows) from one page of content (4096 bytes follow);
//! [`HELD`] a run of pages that are as the destination's checkpoint has them (a count follows).
//! [`NAMED`]: the first record carries its block's name instead of CONTINUE. [`SEEK`]: block and page follow, the page
//! as a signed distance from the one after the last; without it the record is about exactly that one. Numbers are
//! LEB128.
//!
//! A page costs one byte besides its content as long as pages come in order: nothing is buffered to
//! count them, and equal pages in equal order stay equal bytes for zstd's long matches.

use crate::cursor::{Cursor, More};

/// First bytes of a stream: Godwit's memory format, version 2.
pub const MAGIC: [u8; 4] = *b"GWM2";

/// Bit of a page operation: zero pages.
pub const ZERO: u8 = 1;
/// Bit of a page operation: the first record names its block.
pub const NAMED: u8 = 2;
/// Bit of a page operation: it does not go on behind the last one.
pub const SEEK: u8 = 4;
/// Bit of a page operation: pages that the destination has kept. Not together with [`ZERO`].
pub const HELD: u8 = 8;
/// Largest page operation.
pub(crate) const LAST_PAGE_OP: u8 = ZERO | NAMED | SEEK | HELD;
/// Bytes as they are.
pub const VERBATIM: u8 = 0x10;
/// The table of RAM blocks.
pub const BLOCKS: u8 = 0x11;
/// A digest on the way.
pub const CHECK: u8 = 0x12;
/// The trailer.
pub const END: u8 = 0x13;

/// Zero pages in one operation, at most: it bounds what one operation makes the decoder write (36 KiB).
pub const MAX_RUN: u64 = 4096;
/// Held pages in one operation, at most, for the same reason (64 KiB).
pub const MAX_HELD_RUN: u64 = 16;
/// Bytes in one [`VERBATIM`], at most; longer ones are several.
pub const MAX_VERBATIM: usize = 64 << 10;
/// Length of a BLAKE3 digest.
pub const DIGEST: usize = 32;

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
