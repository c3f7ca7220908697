//! Names of blocks.

use std::fmt;

/// Bytes of a block. Disks and RAM are compared in pages of this size, and 17 bytes for 4096 are little enough.
pub const BLOCK: usize = 4096;

/// A block's contents.
pub type Block = [u8; BLOCK];

/// Under what a trust domain's blocks are named. Random, and known to nodes alone: who does not have it can neither compute the
/// name of a block that they guess, nor make two blocks of one name.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(pub(crate) [u8; 32]);

impl Key {
    /// A key of these bytes, which are to come from the system's generator.
    #[must_use]
    pub const fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// The name of a block.
    #[must_use]
    pub fn digest(&self, block: &[u8]) -> Digest {
        let hash = blake3::keyed_hash(&self.0, block);
        let (head, _) = hash.as_bytes().split_first_chunk::<16>().expect("BLAKE3 gives 32 bytes");
        Digest(*head)
    }
}

/// Does not tell the key.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// 128 bits of the BLAKE3 of a block under a domain's key. Two of 2^40 blocks (4 PiB) have the same by chance with a
/// probability of 2^-49.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

impl Digest {
    /// What tables keep of it.
    #[must_use]
    pub fn mark(&self) -> Mark {
        let (head, _) = self.0.split_first_chunk::<8>().expect("a digest has 16 bytes");
        Mark::new(u64::from_le_bytes(*head))
    }
}

/// 64 bits of a digest: enough to look up by, since what is found is verified by all of the digest. Never 0, which in a
/// table is "nothing".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark(u64);

impl Mark {
    /// Of these bits.
    #[must_use]
    pub const fn new(bits: u64) -> Self {
        Self(if bits == 0 { 1 } else { bits })
    }

    /// Its bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

/// Whether all bytes are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // In pieces that are compared as vectors, leaving at the first that is not zero.
    const ZEROES: [u8; 256] = [0; 256];
    let mut pieces = bytes.chunks_exact(ZEROES.len());
    pieces.all(|piece| piece == ZEROES) && pieces.remainder().iter().all(|b| *b == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_another_name_under_another_key() {
        let (a, b) = (Key::new([1; 32]), Key::new([2; 32]));
        let block = [7; BLOCK];
        assert_eq!(a.digest(&block), a.digest(&block));
        assert_ne!(a.digest(&block), b.digest(&block));
        assert_ne!(a.digest(&block).mark(), b.digest(&block).mark());
        assert!(!format!("{a:?}").contains('1'), "a key is not printed");
    }

    #[test]
    fn one_bit_anywhere_makes_a_block_no_zero_block() {
        let mut block = [0; BLOCK];
        assert!(is_zero(&block) && is_zero(&[]) && is_zero(&block[..100]));
        for at in [0, 255, 256, 4000, BLOCK - 1] {
            block[at] = 1;
            assert!(!is_zero(&block), "{at}");
            block[at] = 0;
        }
    }
}
