//! Content that looks like what guests hold: log lines, rows of text, heap objects.
//!
//! It must be neither zero nor random, or a codec under test would shine or fail for the wrong reason; and it must
//! follow from a few numbers, so that a check can say what should be there. Everything here is written with copies
//! into a fixed buffer rather than the formatting machinery: the guest runs under emulation, some twenty times
//! slower than its host.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A stream of numbers that follows from a seed and two positions in it (splitmix64 behind an xxh3 key).
#[derive(Debug, Clone)]
pub struct Prf(u64);

impl Prf {
    /// The stream for (`seed`, `a`, `b`): say a page's index and its version.
    pub fn new(seed: u64, a: u64, b: u64) -> Self {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&a.to_le_bytes());
        key[8..].copy_from_slice(&b.to_le_bytes());
        Self(xxh3_64_with_seed(&key, seed))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0; the bias (below bound / 2^64) does not matter to a load.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Fills `bytes` with the stream: incompressible.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }
}

const WORDS: [&str; 64] = [
    "account",
    "address",
    "archive",
    "balance",
    "batch",
    "buffer",
    "cache",
    "channel",
    "client",
    "cluster",
    "commit",
    "connection",
    "customer",
    "database",
    "delivery",
    "device",
    "document",
    "endpoint",
    "error",
    "event",
    "exchange",
    "filter",
    "frame",
    "gateway",
    "handler",
    "header",
    "index",
    "interface",
    "invoice",
    "kernel",
    "language",
    "ledger",
    "message",
    "migration",
    "module",
    "network",
    "object",
    "order",
    "packet",
    "partition",
    "payload",
    "policy",
    "process",
    "profile",
    "protocol",
    "queue",
    "record",
    "region",
    "request",
    "response",
    "schedule",
    "segment",
    "server",
    "session",
    "signal",
    "socket",
    "storage",
    "stream",
    "table",
    "thread",
    "transfer",
    "user",
    "vector",
    "window",
];

const LEVELS: [&str; 4] = ["INFO", "DEBUG", "WARN", "INFO"];

/// A cursor that drops what no longer fits.
struct Cursor<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Cursor<'_> {
    fn is_full(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn put(&mut self, piece: &[u8]) {
        let length = piece.len().min(self.bytes.len() - self.at);
        self.bytes[self.at..self.at + length].copy_from_slice(&piece[..length]);
        self.at += length;
    }

    fn word(&mut self, choice: u64) {
        self.put(WORDS[(choice % 64) as usize].as_bytes());
    }

    fn decimal(&mut self, value: u64, digits: u32) {
        for place in (0..digits).rev() {
            self.put(&[b'0' + (value / 10u64.pow(place) % 10) as u8]);
        }
    }

    fn hex(&mut self, value: u64, digits: u32) {
        for place in (0..digits).rev() {
            self.put(&[b"0123456789abcdef"[(value >> (4 * place) & 15) as usize]]);
        }
    }
}

/// Fills `bytes` with one of several kinds of structured content, drawn from `prf`.
pub fn fill_structured(bytes: &mut [u8], prf: &mut Prf) {
    let kind = prf.below(8);
    let mut clock = prf.below(86_400);
    let mut out = Cursor { bytes, at: 0 };
    while !out.is_full() {
        let draw = prf.next_u64();
        clock += draw >> 61;
        match kind {
            0..=3 => log_line(&mut out, draw, clock),
            4..=5 => row(&mut out, draw, clock),
            _ => heap_object(&mut out, draw, clock),
        }
    }
}

fn log_line(out: &mut Cursor<'_>, draw: u64, clock: u64) {
    out.put(b"2026-03-14T");
    out.decimal(clock / 3600 % 24, 2);
    out.put(b":");
    out.decimal(clock / 60 % 60, 2);
    out.put(b":");
    out.decimal(clock % 60, 2);
    out.put(b"Z ");
    out.put(LEVELS[(draw & 3) as usize].as_bytes());
    out.put(b" ");
    out.word(draw >> 2);
    out.put(b"::");
    out.word(draw >> 8);
    out.put(b": ");
    for shift in [14, 20, 26] {
        out.word(draw >> shift);
        out.put(b" ");
    }
    out.put(b"id=");
    out.hex(draw >> 32, 8);
    out.put(b"\n");
}

fn row(out: &mut Cursor<'_>, draw: u64, clock: u64) {
    out.put(b"{\"id\":");
    out.decimal(clock, 6);
    out.put(b",\"kind\":\"");
    out.word(draw);
    out.put(b"\",\"owner\":\"");
    out.word(draw >> 6);
    out.put(b"-");
    out.decimal(draw >> 12 & 0xfff, 4);
    out.put(b"\",\"amount\":");
    out.decimal(draw >> 24 & 0xffff, 5);
    out.put(b",\"open\":");
    out.put(if draw >> 63 == 0 { b"true}," } else { b"false}," });
}

/// Two pointers into a small heap, a length, flags: mostly zeros in the high bytes, as in real heaps.
fn heap_object(out: &mut Cursor<'_>, draw: u64, clock: u64) {
    const HEAP: u64 = 0x0000_7f3a_5c00_0000;
    out.put(&(HEAP + (draw & 0x3_fff0)).to_le_bytes());
    out.put(&(HEAP + (draw >> 20 & 0x3_fff0)).to_le_bytes());
    out.put(&((draw >> 40 & 0xff) as u32).to_le_bytes());
    out.put(&((draw >> 48 & 7) as u32).to_le_bytes());
    out.put(&clock.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_follows_from_its_numbers_and_differs_between_them() {
        let page = |index| {
            let mut page = [0; 4096];
            fill_structured(&mut page, &mut Prf::new(1, index, 0));
            page
        };
        assert_eq!(page(3), page(3));
        assert_ne!(page(3), page(4));
    }

    #[test]
    fn content_is_neither_zero_nor_random() {
        for index in 0..64 {
            let mut page = [0; 4096];
            fill_structured(&mut page, &mut Prf::new(1, index, 0));
            let mut counts = [0u32; 256];
            page.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
            let entropy: f64 =
                counts.iter().map(|&n| f64::from(n) / 4096.0).filter(|&p| p > 0.0).map(|p| -p * p.log2()).sum();
            assert!((1.5..6.0).contains(&entropy), "page {index}: {entropy} bits a byte");
        }
    }

    #[test]
    fn draws_stay_below_their_bound() {
        let mut prf = Prf::new(9, 0, 0);
        assert!((0..1000).all(|_| prf.below(7) < 7 && prf.unit() < 1.0));
    }
}
