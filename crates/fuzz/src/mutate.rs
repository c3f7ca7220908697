//! Breaks inputs: the n-th input of a seed is always the same.

/// Numbers that lengths are tested with: around 0, signs, powers, and far more than anybody has.
const TELLING: [u64; 17] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x0fff,
    0x1000,
    0x7fff,
    0xffff,
    0x0010_0000,
    0x0200_0000,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 60,
    i64::MAX as u64,
    u64::MAX,
];
/// The longest input that is made.
const LONGEST: usize = 256 << 10;

/// Numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// For the n-th input of a seed.
    #[must_use]
    pub const fn new(seed: u64, n: u64) -> Self {
        Self(seed ^ n.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 where that is 0.
    pub const fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }
}

/// An input: one of the corpus, broken in up to eight places. Now and then it is left whole.
pub fn input(corpus: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = corpus.get(dice.below(corpus.len())).cloned().unwrap_or_default();
    // Mostly few: what is broken all over is refused at once.
    let times = [0, 1, 1, 1, 2, 2, 4, 8][dice.below(8)];
    for _ in 0..times {
        once(&mut bytes, corpus, dice);
        bytes.truncate(LONGEST);
    }
    bytes
}

fn once(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], dice: &mut Dice) {
    // Heads are short and say most: half of all blows fall on the first few bytes.
    let near = if dice.below(2) == 0 { bytes.len().min(96) } else { bytes.len() };
    let at = dice.below(near);
    match dice.below(12) {
        0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
        1 if at < bytes.len() => bytes[at] = dice.next() as u8,
        // A number of some width, in either order of bytes, or as text.
        2..=5 => {
            let number = TELLING[dice.below(TELLING.len())].wrapping_add(dice.below(3) as u64).wrapping_sub(1);
            let width = [1, 2, 4, 8][dice.below(4)];
            let (big, little) = (number.to_be_bytes(), number.to_le_bytes());
            let number = if dice.below(2) == 0 { &big[8 - width..] } else { &little[..width] };
            let end = (at + width).min(bytes.len());
            bytes[at.min(end)..end].copy_from_slice(&number[..end - at.min(end)]);
        }
        6 => replace_digits(bytes, dice),
        7 => bytes.truncate(at),
        8 => {
            let length = dice.below((bytes.len() - at).min(64) + 1);
            bytes.drain(at..at + length);
        }
        9 => {
            let length = dice.below((bytes.len() - at).min(512) + 1);
            let piece = bytes[at..at + length].to_vec();
            let times = 1 + dice.below(8);
            for _ in 0..times {
                bytes.splice(at..at, piece.iter().copied());
            }
        }
        10 => {
            let fresh: Vec<u8> = (0..dice.below(16)).map(|_| dice.next() as u8).collect();
            bytes.splice(at..at, fresh);
        }
        // The end of another one.
        _ => {
            let Some(other) = corpus.get(dice.below(corpus.len())) else { return };
            bytes.truncate(at);
            bytes.extend_from_slice(&other[dice.below(other.len())..]);
        }
    }
}

/// Puts another number where a text has one.
fn replace_digits(bytes: &mut Vec<u8>, dice: &mut Dice) {
    let begin = dice.below(bytes.len());
    let Some(at) = bytes[begin..].iter().position(u8::is_ascii_digit).map(|at| begin + at) else { return };
    let length = bytes[at..].iter().take_while(|b| b.is_ascii_digit()).count();
    let number = TELLING[dice.below(TELLING.len())];
    let text = [format!("{number}"), format!("-{number}"), format!("{number}e300"), format!("{number}.5")];
    bytes.splice(at..at + length, text[dice.below(4)].bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_and_number_make_the_same_input_and_others_make_others() {
        let corpus = vec![b"{\"memory\": 1234}".to_vec(), vec![7; 300]];
        let make = |seed, n| input(&corpus, &mut Dice::new(seed, n));
        let all: Vec<_> = (0..200).map(|n| make(1, n)).collect();
        assert_eq!(all, (0..200).map(|n| make(1, n)).collect::<Vec<_>>());
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert!(distinct.len() > 120, "{}", distinct.len());
        assert_ne!(all, (0..200).map(|n| make(2, n)).collect::<Vec<_>>());
    }
}
