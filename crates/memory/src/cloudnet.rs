//! CloudNet's own scheme (its sections 3.2.2 and 3.2.3), to measure against: what the paper describes, on QEMU's stream.
//!
//! Each page is cut into four. A quarter whose contents lie in a first-in-first-out cache, the same at both ends, is sent as a 32-bit
//! index; contents are compared, not only hashed. One that does not, but whose address was sent before, goes as the difference from the
//! cached version of that address: XOR, run lengths. All else goes as it is. What was not in the cache is added to it, at both ends.
//!
//! Not the paper's: the hash that leads to the cache is another one (it is compared anyway); a page's address takes two or three
//! bytes and a zero page one more, as [`format`](crate::format) has them; and zstd may be put behind all of it.
//!
//! Both ends hold the whole cache in memory. It is for files on a bench ([`codec`](crate::codec)); moves have something better.
//!
//! The format: [`MAGIC`], number of quarters in the cache (4 bytes, little-endian), 1 if zstd follows or 0; then operations, each with a
//! byte in front: `0` bytes as they are (length, bytes), `1` the table of blocks, `2` a page of zeroes, `3` a page, both with
//! block, distance and, as a byte, whether the block is named; `4` the end, a BLAKE3 digest. Behind `3` four quarters: `0` contents,
//! `1` index, `2` length of a delta, delta.

use crate::codec::{CodecError, Decode, Encode};
use crate::cursor::{Cursor, Stop};
use crate::format;
use crate::record::{self, Block, PAGE_SIZE, PageBytes, Place};
use crate::stream::{Parser, StreamError, Token};
use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64;

/// First bytes of a stream in CloudNet's scheme.
pub const MAGIC: [u8; 4] = *b"GWC1";
/// Bytes of a quarter.
const QUARTER: usize = PAGE_SIZE / 4;
/// Quarters in the cache, at most: 4 GiB.
pub const MOST_SLOTS: u32 = 4 << 20;

const VERBATIM: u8 = 0;
const BLOCKS: u8 = 1;
const ZERO: u8 = 2;
const PAGE: u8 = 3;
const END: u8 = 4;
const RAW: u8 = 0;
const INDEX: u8 = 1;
const DELTA: u8 = 2;

/// Pages whose versions are kept in one piece.
const PIECE: u64 = 4096;
/// No slot.
const NOWHERE: u32 = u32::MAX;

/// What both ends know alike.
struct Cache {
    contents: Vec<u8>,
    slots: u32,
    next: u32,
    /// By block, page and quarter: where its last version was put, or found. It may be overwritten since; then the delta is a poor one.
    /// In pieces that exist once a page of them came: a table of blocks may claim any length.
    versions: Vec<Vec<Option<Box<[u32]>>>>,
}

impl Cache {
    fn new(slots: u32) -> Self {
        Self { contents: vec![], slots, next: 0, versions: vec![] }
    }

    fn blocks(&mut self, blocks: &[Block]) {
        self.versions = blocks.iter().map(|block| vec![None; block.pages.div_ceil(PIECE) as usize]).collect();
    }

    fn get(&self, slot: u32) -> Option<&[u8]> {
        let from = slot as usize * QUARTER;
        self.contents.get(from..from + QUARTER)
    }

    fn version(&mut self, place: Place, quarter: usize) -> &mut u32 {
        let piece = &mut self.versions[place.block][(place.page / PIECE) as usize];
        let piece = piece.get_or_insert_with(|| vec![NOWHERE; PIECE as usize * 4].into());
        &mut piece[(place.page % PIECE) as usize * 4 + quarter]
    }

    /// Where it is put; what lay there is gone.
    fn add(&mut self, content: &[u8]) -> u32 {
        let slot = self.next;
        let from = slot as usize * QUARTER;
        if from == self.contents.len() {
            self.contents.extend_from_slice(content);
        } else {
            self.contents[from..from + QUARTER].copy_from_slice(content);
        }
        self.next = (slot + 1) % self.slots;
        slot
    }
}

/// XOR with the older version, and run lengths: how many bytes are equal, how many are not, those; until nothing differs any more.
fn delta(old: &[u8], new: &[u8], out: &mut Vec<u8>) {
    let mut at = 0;
    while let Some(equal) = (at..QUARTER).position(|i| old[i] != new[i]) {
        let begin = at + equal;
        // A single equal byte between two that differ is cheaper as a part of the run.
        let ends = |i: &usize| *i == QUARTER || old[*i..].iter().zip(&new[*i..]).take(3).all(|(old, new)| old == new);
        let end = (begin + 1..=QUARTER).find(ends).unwrap_or(QUARTER);
        format::put(out, equal as u64);
        format::put(out, (end - begin) as u64);
        out.extend((begin..end).map(|i| old[i] ^ new[i]));
        at = end;
    }
}

fn apply(content: &mut [u8], delta: &[u8]) -> Option<()> {
    let mut c = Cursor::new(delta);
    let mut at = 0usize;
    while c.at() < delta.len() {
        let equal = format::get(&mut c).ok()??;
        let other = format::get(&mut c).ok()??;
        let begin = at.checked_add(usize::try_from(equal).ok()?)?;
        at = begin.checked_add(usize::try_from(other).ok()?)?;
        let bytes = c.take(at - begin).ok()?;
        for (byte, xor) in content.get_mut(begin..at)?.iter_mut().zip(bytes) {
            *byte ^= xor;
        }
    }
    Some(())
}

/// Writes CloudNet's scheme.
pub(crate) struct Encoder {
    parser: Parser,
    partial: Vec<u8>,
    cache: Cache,
    /// Where contents with this hash were put.
    hashes: HashMap<u64, u32>,
    expected: Option<Place>,
    hasher: blake3::Hasher,
    begun: bool,
    ops: Vec<u8>,
    zstd: Option<zstd::stream::write::Encoder<'static, Vec<u8>>>,
    mechanisms: Mechanisms,
    counted: Vec<(&'static str, u64)>,
}

/// Which parts of CloudNet's scheme are used: whoever decodes need not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mechanisms {
    /// Contents that the other end has go as an index (section 3.2.2).
    pub redundancy: bool,
    /// What was sent before goes as a difference (section 3.2.3).
    pub deltas: bool,
}

impl Mechanisms {
    /// Both.
    pub const ALL: Self = Self { redundancy: true, deltas: true };
}

impl Encoder {
    pub(crate) fn new(
        slots: u32,
        max_ram: u64,
        level: Option<i32>,
        mechanisms: Mechanisms,
    ) -> Result<Self, StreamError> {
        let zstd = level.map(crate::codec::long).transpose()?;
        Ok(Self {
            parser: Parser::new(max_ram),
            partial: vec![],
            cache: Cache::new(slots.clamp(1, MOST_SLOTS)),
            hashes: HashMap::new(),
            expected: None,
            hasher: blake3::Hasher::new(),
            begun: false,
            ops: vec![],
            zstd,
            mechanisms,
            counted: ["zero_pages", "data_pages", "quarters_by_index", "quarters_by_delta", "quarters_in_full"]
                .map(|name| (name, 0))
                .into(),
        })
    }

    fn token(&mut self, token: Token<'_>) {
        match token {
            Token::Verbatim(bytes) | Token::LastEos(bytes) | Token::Discard(bytes, _) | Token::Packaged(bytes) => {
                for piece in bytes.chunks(format::MAX_VERBATIM) {
                    self.ops.push(VERBATIM);
                    format::put(&mut self.ops, piece.len() as u64);
                    self.ops.extend_from_slice(piece);
                }
            }
            Token::Blocks(bytes) => {
                self.ops.push(BLOCKS);
                record::put_table(&mut self.ops, self.parser.blocks());
                self.cache.blocks(self.parser.blocks());
                self.expected = None;
                self.token(Token::Verbatim(bytes));
            }
            Token::Page { place, named, content } => {
                self.ops.push(if content.is_some() { PAGE } else { ZERO });
                format::put(&mut self.ops, place.block as u64);
                let from = self.expected.filter(|e| e.block == place.block).map_or(0, |e| e.page);
                format::put(&mut self.ops, format::distance(from, place.page));
                self.ops.push(named.into());
                self.expected = Some(Place { page: place.page + 1, ..place });
                self.counted[usize::from(content.is_some())].1 += 1;
                if let Some(content) = content {
                    for (n, quarter) in content.chunks_exact(QUARTER).enumerate() {
                        self.quarter(place, n, quarter);
                    }
                }
            }
        }
    }

    fn quarter(&mut self, place: Place, n: usize, content: &[u8]) {
        let hash = xxh3_64(content);
        let found = self.hashes.get(&hash).copied().filter(|slot| self.cache.get(*slot) == Some(content));
        let found = found.filter(|_| self.mechanisms.redundancy);
        if let Some(slot) = found {
            *self.cache.version(place, n) = slot;
            self.ops.push(INDEX);
            self.ops.extend_from_slice(&slot.to_le_bytes());
            self.counted[2].1 += 1;
            return;
        }
        let before = *self.cache.version(place, n);
        let mut differs = vec![];
        let old = self.cache.get(before).filter(|_| self.mechanisms.deltas);
        if let Some(old) = old {
            delta(old, content, &mut differs);
        }
        if old.is_some() && differs.len() < QUARTER {
            self.ops.push(DELTA);
            format::put(&mut self.ops, differs.len() as u64);
            self.ops.extend_from_slice(&differs);
            self.counted[3].1 += 1;
        } else {
            self.ops.push(RAW);
            self.ops.extend_from_slice(content);
            self.counted[4].1 += 1;
        }
        if let Some(gone) = self.cache.get(self.cache.next).map(xxh3_64)
            && self.hashes.get(&gone) == Some(&self.cache.next)
        {
            self.hashes.remove(&gone);
        }
        let slot = self.cache.add(content);
        self.hashes.insert(hash, slot);
        *self.cache.version(place, n) = slot;
    }

    fn drain(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        if !self.begun {
            self.begun = true;
            out.extend_from_slice(&MAGIC);
            out.extend_from_slice(&self.cache.slots.to_le_bytes());
            out.push(self.zstd.is_some().into());
        }
        match &mut self.zstd {
            None => out.append(&mut self.ops),
            Some(zstd) => {
                std::io::Write::write_all(zstd, &self.ops)
                    .map_err(|source| StreamError::Zstd { doing: "compress", source })?;
                self.ops.clear();
                out.append(zstd.get_mut());
            }
        }
        Ok(())
    }
}

impl Encode for Encoder {
    fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.hasher.update(input);
        let mut joined = std::mem::take(&mut self.partial);
        joined.extend_from_slice(input);
        let mut at = 0;
        while let Some((token, n)) = self.parser.next(&joined[at..])? {
            self.token(token);
            at += n;
        }
        joined.drain(..at);
        self.partial = joined;
        self.drain(out)
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Result<Vec<(&'static str, u64)>, StreamError> {
        if !self.parser.may_end() || !self.partial.is_empty() {
            return Err(StreamError::Truncated { at: self.hasher.count() });
        }
        self.ops.push(END);
        self.ops.extend_from_slice(self.hasher.finalize().as_bytes());
        self.drain(out)?;
        if let Some(zstd) = self.zstd.take() {
            let rest = zstd.finish().map_err(|source| StreamError::Zstd { doing: "end", source })?;
            out.extend_from_slice(&rest);
        }
        Ok(std::mem::take(&mut self.counted))
    }
}

/// Reads CloudNet's scheme, from behind its magic number.
pub(crate) struct Decoder {
    head: Vec<u8>,
    max_ram: u64,
    zstd: Option<zstd::stream::write::Decoder<'static, Vec<u8>>>,
    plain: Vec<u8>,
    cache: Cache,
    blocks: Vec<Block>,
    expected: Option<Place>,
    hasher: blake3::Hasher,
    complete: bool,
}

/// Slots and whether zstd follows.
const HEAD: usize = 5;

impl Decoder {
    pub(crate) fn new(max_ram: u64) -> Self {
        Self {
            head: vec![],
            max_ram,
            zstd: None,
            plain: vec![],
            cache: Cache::new(1),
            blocks: vec![],
            expected: None,
            hasher: blake3::Hasher::new(),
            complete: false,
        }
    }

    fn operation(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<usize, Stop<CodecError>> {
        let bad = |what| Stop::Bad(CodecError::Damaged { what });
        let mut c = Cursor::new(plain);
        let number = |c: &mut Cursor<'_>, most: u64, what| match format::get(c) {
            Ok(Some(n)) if n <= most => Ok(n),
            Ok(_) => Err(bad(what)),
            Err(more) => Err(more.into()),
        };
        match c.u8()? {
            _ if self.complete => return Err(bad("something follows its end")),
            VERBATIM => {
                let length = number(&mut c, format::MAX_VERBATIM as u64, "an overlong piece")?;
                out.extend_from_slice(c.take(length as usize)?);
            }
            BLOCKS => {
                let blocks = record::read_table(&mut c, self.max_ram).map_err(|stop| match stop {
                    Stop::More => Stop::More,
                    Stop::Bad(what) => bad(what),
                })?;
                self.cache.blocks(&blocks);
                (self.blocks, self.expected) = (blocks, None);
            }
            kind @ (ZERO | PAGE) => {
                let block = number(&mut c, self.blocks.len() as u64, "an unknown RAM block")? as usize;
                let from = self.expected.filter(|e| e.block == block).map_or(0, |e| e.page);
                let page = format::travel(from, number(&mut c, u64::MAX, "a page that is no number")?);
                let named = c.u8()? != 0;
                let place = Place { block, page };
                if self.blocks.get(block).is_none_or(|block| page >= block.pages) {
                    return Err(bad("a page outside its RAM block"));
                }
                let mut content = [0; PAGE_SIZE];
                if kind == PAGE {
                    // Looked at whole before anything is remembered: it may be cut.
                    let begin = c.at();
                    for _ in 0..4 {
                        match c.u8()? {
                            RAW => c.take(QUARTER)?,
                            INDEX => c.take(4)?,
                            DELTA => {
                                let length = number(&mut c, QUARTER as u64, "an overlong delta")?;
                                c.take(length as usize)?
                            }
                            _ => return Err(bad("an unknown quarter")),
                        };
                    }
                    self.quarters(place, &plain[begin..c.at()], &mut content)
                        .ok_or_else(|| bad("a quarter of nothing"))?;
                }
                self.expected = Some(Place { block, page: page + 1 });
                let name = named.then_some(&*self.blocks[block].name);
                let content: Option<&PageBytes> = (kind == PAGE).then_some(&content);
                record::write(out, page, name, content);
            }
            END => {
                let digest = c.array::<{ format::DIGEST }>()?;
                self.complete = self.hasher.finalize() == *digest;
                if !self.complete {
                    return Err(bad("what was rebuilt is not what was meant"));
                }
            }
            _ => return Err(bad("an unknown operation")),
        }
        Ok(c.at())
    }

    fn quarters(&mut self, place: Place, bytes: &[u8], content: &mut PageBytes) -> Option<()> {
        let mut c = Cursor::new(bytes);
        for (n, into) in content.chunks_exact_mut(QUARTER).enumerate() {
            let slot = match c.u8().ok()? {
                INDEX => {
                    let slot = u32::from_le_bytes(*c.array().ok()?);
                    into.copy_from_slice(self.cache.get(slot)?);
                    slot
                }
                kind => {
                    if kind == RAW {
                        into.copy_from_slice(c.take(QUARTER).ok()?);
                    } else {
                        let length = format::get(&mut c).ok()??;
                        let before = *self.cache.version(place, n);
                        into.copy_from_slice(self.cache.get(before)?);
                        apply(into, c.take(length as usize).ok()?)?;
                    }
                    self.cache.add(into)
                }
            };
            *self.cache.version(place, n) = slot;
        }
        Some(())
    }
}

impl Decode for Decoder {
    fn push(&mut self, mut wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
        if self.head.len() < HEAD {
            let (front, rest) = wire.split_at((HEAD - self.head.len()).min(wire.len()));
            self.head.extend_from_slice(front);
            wire = rest;
            let Some([a, b, c, d, packed]) = self.head.first_chunk::<HEAD>().copied() else { return Ok(()) };
            let slots = u32::from_le_bytes([a, b, c, d]);
            if !(1..=MOST_SLOTS).contains(&slots) {
                return Err(CodecError::Damaged { what: "a cache of an impossible size" });
            }
            self.cache = Cache::new(slots);
            if packed != 0 {
                self.zstd = Some(crate::codec::unpacker().map_err(CodecError::Unpack)?);
            }
        }
        match &mut self.zstd {
            None => self.plain.extend_from_slice(wire),
            Some(zstd) => {
                std::io::Write::write_all(zstd, wire)
                    .and_then(|()| std::io::Write::flush(zstd))
                    .map_err(CodecError::Unpack)?;
                self.plain.append(zstd.get_mut());
            }
        }
        let plain = std::mem::take(&mut self.plain);
        let mut at = 0;
        let ended = loop {
            let mut made = vec![];
            match self.operation(&plain[at..], &mut made) {
                Ok(n) => at += n,
                Err(Stop::More) => break Ok(()),
                Err(Stop::Bad(error)) => break Err(error),
            }
            self.hasher.update(&made);
            out.append(&mut made);
        };
        self.plain = plain[at..].to_vec();
        ended
    }

    fn finish(&mut self) -> Result<(), CodecError> {
        if self.complete { Ok(()) } else { Err(CodecError::Truncated) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_delta_leads_from_the_old_version_to_the_new_one(
            old in proptest::collection::vec(0..3u8, QUARTER),
            changes in proptest::collection::vec((0..QUARTER, any::<u8>()), 0..300),
        ) {
            let mut new = old.clone();
            for (at, byte) in changes {
                new[at] = byte;
            }
            let mut out = vec![];
            delta(&old, &new, &mut out);
            prop_assert_eq!(out.is_empty(), old == new);
            let mut made = old;
            apply(&mut made, &out).unwrap();
            prop_assert_eq!(made, new);
        }

        #[test]
        fn no_bytes_make_a_delta_panic(delta in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = apply(&mut [0; QUARTER], &delta);
        }
    }
}
