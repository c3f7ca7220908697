//! RAM records of QEMU's stream: eight bytes, big-endian, with a page's offset in the high bits and flags in the low.

use crate::cursor::{Cursor, Stop};
use crate::format;
use std::fmt;

/// Size of a target page in bytes, on x86 and arm64 with QEMU's default.
pub const PAGE_SIZE: usize = 4096;
pub(crate) const PAGE_BITS: u32 = 12;

/// One page's content.
pub type PageBytes = [u8; PAGE_SIZE];

pub(crate) const FLAG_ZERO: u64 = 0x02;
pub(crate) const FLAG_MEM_SIZE: u64 = 0x04;
pub(crate) const FLAG_PAGE: u64 = 0x08;
pub(crate) const FLAG_EOS: u64 = 0x10;
pub(crate) const FLAG_CONTINUE: u64 = 0x20;
pub(crate) const FLAG_XBZRLE: u64 = 0x40;
pub(crate) const FLAG_HOOK: u64 = 0x80;
pub(crate) const FLAG_COMPRESSED: u64 = 0x100;
pub(crate) const FLAG_MULTIFD_FLUSH: u64 = 0x200;
pub(crate) const FLAGS: u64 = PAGE_SIZE as u64 - 1;

/// RAM blocks in one stream, at most. A guest with 64 memory devices and as many option ROMs has half of it.
pub const MAX_BLOCKS: usize = 256;

/// A RAM block: `pc.ram`, `/rom@etc/acpi/tables`, ...
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// Its idstr, of at most 255 bytes, as QEMU spells it.
    pub(crate) name: Vec<u8>,
    /// Its length in pages, a last partial one included.
    pub(crate) pages: u64,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} pages)", self.name.escape_ascii(), self.pages)
    }
}

/// A guest's RAM blocks, in the order of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(pub(crate) Vec<Block>);

/// The table of blocks, as it travels and as it is kept: count, then names and lengths.
pub(crate) fn put_table(out: &mut Vec<u8>, blocks: &[Block]) {
    format::put(out, blocks.len() as u64);
    for block in blocks {
        out.push(block.name.len() as u8);
        out.extend_from_slice(&block.name);
        format::put(out, block.pages);
    }
}

/// Reads such a table; what is wrong with it, if it cannot be one.
pub(crate) fn read_table(c: &mut Cursor<'_>, max_ram: u64) -> Result<Vec<Block>, Stop<&'static str>> {
    let count = format::get(c)?.filter(|count| *count <= MAX_BLOCKS as u64).ok_or(Stop::Bad("too many RAM blocks"))?;
    let most = max_ram.div_ceil(PAGE_SIZE as u64).saturating_add(count);
    let (mut blocks, mut sum) = (vec![], 0u64);
    for _ in 0..count {
        let name = c.counted()?.to_vec();
        let pages = format::get(c)?.ok_or(Stop::Bad("a RAM block without length"))?;
        sum = sum.saturating_add(pages);
        if sum > most {
            return Err(Stop::Bad("more RAM than is allowed"));
        }
        blocks.push(Block { name, pages });
    }
    Ok(blocks)
}

/// How a section of RAM begins that is neither its first nor its last.
pub(crate) fn part_head(id: u32) -> [u8; 5] {
    let [a, b, c, d] = id.to_be_bytes();
    [2, a, b, c, d]
}

/// How such a section ends: its last record, and the footer.
pub(crate) fn part_end(id: u32) -> [u8; 13] {
    let mut end = [0; 13];
    end[..8].copy_from_slice(&FLAG_EOS.to_be_bytes());
    end[8] = 0x7e;
    end[9..].copy_from_slice(&id.to_be_bytes());
    end
}

/// Which page a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index into the table of blocks.
    pub(crate) block: usize,
    /// Index of the page in the block.
    pub(crate) page: u64,
}

/// Writes a page record as QEMU would. `None` for a zero page; `name` if the block is named instead of continued.
///
/// Both ends write the rebuilt stream with this: the decoder into QEMU, the encoder into its digest.
pub(crate) fn write(out: &mut Vec<u8>, page: u64, name: Option<&[u8]>, content: Option<&PageBytes>) {
    let kind = if content.is_some() { FLAG_PAGE } else { FLAG_ZERO };
    let chain = if name.is_some() { 0 } else { FLAG_CONTINUE };
    out.extend_from_slice(&(page << PAGE_BITS | kind | chain).to_be_bytes());
    if let Some(name) = name {
        out.push(u8::try_from(name.len()).expect("a name was read behind one byte of length"));
        out.extend_from_slice(name);
    }
    match content {
        Some(content) => out.extend_from_slice(content),
        None => out.push(0),
    }
}
