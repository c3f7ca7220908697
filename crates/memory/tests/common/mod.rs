//! Migration streams made by hand, and a destination that loads them as QEMU would.

use std::collections::HashMap;

pub const PAGE: usize = 4096;

/// Writes a stream as QEMU does, CONTINUE bits included.
pub struct Stream {
    pub bytes: Vec<u8>,
    blocks: Vec<(&'static str, u64)>,
    last: Option<usize>,
}

impl Stream {
    /// Header, configuration, and RAM's START section with these blocks (name, pages).
    pub fn begin(blocks: &[(&'static str, u64)]) -> Self {
        let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x0apc-q35-7.2".to_vec();
        bytes.extend_from_slice(b"\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0dvalidate-uuid");
        bytes.extend_from_slice(b"\x08\0\x01\0\0\x08\0\x02\0\x04\0\0\0\x01");
        bytes.extend_from_slice(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
        let total: u64 = blocks.iter().map(|b| b.1).sum::<u64>() * PAGE as u64;
        bytes.extend_from_slice(&(total | 4).to_be_bytes());
        for (name, pages) in blocks {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&(pages * PAGE as u64).to_be_bytes());
        }
        let mut this = Self { bytes, blocks: blocks.to_vec(), last: None };
        this.close();
        this
    }

    fn close(&mut self) {
        self.bytes.extend_from_slice(&0x10u64.to_be_bytes());
        self.bytes.extend_from_slice(b"\x7e\0\0\0\x02");
    }

    /// A PART with these pages: block, page, and the byte that fills it; `None` for a ZERO record.
    #[allow(dead_code, reason = "not every test is content with pages of one byte")]
    pub fn part(&mut self, pages: &[(usize, u64, Option<u8>)]) {
        self.section(2, pages);
    }

    /// A PART with these contents, on pages in a row of the first block.
    #[allow(dead_code, reason = "not every test has contents of its own")]
    pub fn part_of(&mut self, first: u64, contents: &[u8]) {
        self.bytes.extend_from_slice(&[2, 0, 0, 0, 2]);
        for (page, content) in (first..).zip(contents.chunks_exact(PAGE)) {
            let named = self.last != Some(0);
            self.bytes.extend_from_slice(&(page << 12 | if named { 8 } else { 0x28 }).to_be_bytes());
            if named {
                let name = self.blocks[0].0;
                self.bytes.push(name.len() as u8);
                self.bytes.extend_from_slice(name.as_bytes());
                self.last = Some(0);
            }
            self.bytes.extend_from_slice(content);
        }
        self.close();
    }

    /// RAM's END with these pages, and devices' state.
    pub fn end(mut self, pages: &[(usize, u64, Option<u8>)]) -> Vec<u8> {
        self.section(3, pages);
        self.bytes.extend_from_slice(b"\x04\0\0\0\x05\x05timer\0\0\0\0\0\0\0\x02whatever this is\x00\x06\0\0\0\x02{}");
        self.bytes
    }

    /// Post-copy begins: these pages of the first block are to be thrown away (first, count).
    #[allow(dead_code, reason = "not every test's guest goes before its memory")]
    pub fn discard(&mut self, runs: &[(u64, u64)]) {
        let name = self.blocks[0].0;
        let mut payload = vec![0, name.len() as u8];
        payload.extend_from_slice(name.as_bytes());
        payload.push(0);
        for (first, count) in runs {
            payload.extend_from_slice(&(first * PAGE as u64).to_be_bytes());
            payload.extend_from_slice(&(count * PAGE as u64).to_be_bytes());
        }
        self.bytes.extend_from_slice(&[8, 0, 6]);
        self.bytes.extend_from_slice(&(payload.len() as u16).to_be_bytes());
        self.bytes.extend_from_slice(&payload);
    }

    /// The devices' state goes, and then these pages, and RAM's end. Where the package begins.
    #[allow(dead_code, reason = "not every test's guest goes before its memory")]
    pub fn hand_over(mut self, state: &[u8], behind: &[(usize, u64, Option<u8>)]) -> (Vec<u8>, usize) {
        self.bytes.extend_from_slice(b"\x08\0\x02\0\x04\0\0\0\x02");
        let package = self.bytes.len();
        self.bytes.extend_from_slice(&[8, 0, 7, 0, 4]);
        self.bytes.extend_from_slice(&(state.len() as u32).to_be_bytes());
        self.bytes.extend_from_slice(state);
        self.bytes.extend_from_slice(b"\x08\0\x02\0\x04\0\0\0\x04");
        self.last = None;
        self.section(2, behind);
        self.section(3, &[]);
        self.bytes.push(0);
        (self.bytes, package)
    }

    fn section(&mut self, kind: u8, pages: &[(usize, u64, Option<u8>)]) {
        self.bytes.extend_from_slice(&[kind, 0, 0, 0, 2]);
        for (block, page, fill) in pages {
            let flags = if fill.is_some() { 8 } else { 2 } | if self.last == Some(*block) { 0x20 } else { 0 };
            self.bytes.extend_from_slice(&(page << 12 | flags).to_be_bytes());
            if self.last != Some(*block) {
                let name = self.blocks[*block].0;
                self.bytes.push(name.len() as u8);
                self.bytes.extend_from_slice(name.as_bytes());
                self.last = Some(*block);
            }
            match fill {
                Some(fill) => self.bytes.extend_from_slice(&[*fill; PAGE]),
                None => self.bytes.push(0),
            }
        }
        self.close();
    }
}

/// What a destination QEMU's RAM holds after a stream of [`Stream`]'s, by block and page (absent: never written),
/// and how many records it read. Written apart from the crate's own parser, on purpose.
#[allow(dead_code, reason = "not every test loads")]
pub fn load(bytes: &[u8]) -> (HashMap<(String, u64), Vec<u8>>, usize) {
    let start = bytes.windows(4).position(|w| w == b"\x03ram").expect("a RAM section") + 12;
    let mut at = start;
    let mut take = |n: usize| {
        at += n;
        &bytes[at - n..at]
    };
    let (mut ram, mut records, mut block) = (HashMap::new(), 0, None::<String>);
    loop {
        let word = u64::from_be_bytes(take(8).try_into().unwrap());
        let (offset, flags) = (word & !0xfff, word & 0xfff);
        match flags {
            4 => {
                let mut sum = 0;
                while sum < offset {
                    let n = take(1)[0];
                    take(usize::from(n));
                    sum += u64::from_be_bytes(take(8).try_into().unwrap());
                }
            }
            0x10 => {
                assert_eq!(take(5), b"\x7e\0\0\0\x02", "a footer");
                match take(1)[0] {
                    2 | 3 => {
                        take(4);
                    }
                    4 => return (ram, records),
                    other => panic!("section {other}"),
                }
            }
            _ => {
                if flags & 0x20 == 0 {
                    let n = take(1)[0];
                    block = Some(String::from_utf8(take(usize::from(n)).to_vec()).unwrap());
                }
                let content = match flags & !0x20 {
                    2 => vec![take(1)[0]; PAGE],
                    8 => take(PAGE).to_vec(),
                    other => panic!("flags {other:#x}"),
                };
                ram.insert((block.clone().expect("CONTINUE continues a named block"), offset >> 12), content);
                records += 1;
            }
        }
    }
}
