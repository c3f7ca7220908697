//! QEMU's migration stream, taken apart into the fewest kinds of pieces that matter here: page records, the table of
//! RAM blocks, and everything else.
//!
//! Sections carry no length, so what cannot be parsed cannot be skipped either: it is refused, with the name of what
//! is in the way. Only behind RAM's END section, where nothing is of interest any more, bytes pass unread.
//!
//! ```text
//!   Magic -> Section <-> Ram -> Footer        (START, PART)
//!               |         '-> Footer          (END; RAM is over)
//!               |-- FULL or EOF behind RAM's END --> Rest
//!               '-- PACKAGED: post-copy ----------> Rest
//! ```
//!
//! *Post-copy.* Where memory follows the guest, the guest is stopped while RAM is not over: commands say which pages the destination is to
//! throw away, one carries the devices' state, and then the rest of RAM comes as before. From that one on bytes pass unread.

use crate::cursor::{Cursor, Stop};
use crate::record::{self, Block, MAX_BLOCKS, PAGE_BITS, PAGE_SIZE, PageBytes, Place};

const FILE_MAGIC: [u8; 4] = *b"QEVM";
const FILE_VERSION: u32 = 3;
const EOF: u8 = 0x00;
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const FULL: u8 = 0x04;
const SUBSECTION: u8 = 0x05;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;
/// The command behind a package, with which QEMU is through with it: type, number, length, and 4 bytes.
const PING: u64 = 1 + 2 + 2 + 4;
const RAM_VERSION: u32 = 4;

/// Longest machine type believed, in bytes; `pc-i440fx-rhel7.6.0` is a long one.
const MAX_MACHINE: u32 = 255;
/// Most capabilities listed in the configuration; QEMU 10.0 knows 25.
const MAX_CAPABILITIES: u32 = 64;
/// Longest payload of a command that may pass. All that do have 0 or 4 bytes.
const MAX_COMMAND: u16 = 512;

/// Why QEMU's stream cannot be carried. `at` counts bytes from its beginning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Not a migration stream.
    #[error("the stream begins with {found:02x?}, not with QEMU's QEVM: is this socket the target of `migrate`?")]
    NotMigration {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A stream of another age.
    #[error("QEMU's stream has version {0}, and only version 3 is known: use QEMU 7.2 or newer")]
    Version(u32),
    /// Pages of another size.
    #[error("the guest's pages have 2^{0} bytes, and only 2^12 are carried: use a machine type with pages of 4 KiB")]
    PageBits(u32),
    /// A part of the configuration without a known length.
    #[error(
        "QEMU's configuration has a part `{name}` of unknown length: this version of QEMU is newer than what is \
         known here"
    )]
    Subsection {
        /// Its name.
        name: String,
    },
    /// A capability that changes the stream.
    #[error(
        "QEMU's stream was made with the capability `{name}`: turn it off with migrate-set-capabilities and migrate \
         again"
    )]
    Capability {
        /// As QMP spells it.
        name: String,
    },
    /// A device whose state stands in front of RAM.
    #[error("the device `{idstr}` sends its state before RAM (a virtio-mem, as a rule): remove the device")]
    EarlySection {
        /// The section's.
        idstr: String,
    },
    /// A device that sends state while the guest runs.
    #[error(
        "`{idstr}` sends its state in rounds, as vfio devices, block migration and dirty bitmaps do: remove the device, or \
         turn off the capability `block` or `dirty-bitmaps`"
    )]
    Iterable {
        /// The section's.
        idstr: String,
    },
    /// RAM of another age.
    #[error("QEMU's RAM section has version {0}, and only 4 is known: use another version of QEMU")]
    RamVersion(u32),
    /// Neither a section nor a command.
    #[error(
        "byte {at} of QEMU's stream is {byte:#04x}, where a section or a command had to begin: either the stream is \
             damaged, or a device sent what was not foreseen"
    )]
    SectionType {
        /// What stands there.
        byte: u8,
        /// Where.
        at: u64,
    },
    /// A section that was never started, or a footer of another section.
    #[error("section {found} where {expected:?} was open, at byte {at} of QEMU's stream: the stream is damaged")]
    SectionId {
        /// Its id.
        found: u32,
        /// RAM's id, if it was seen.
        expected: Option<u32>,
        /// Where.
        at: u64,
    },
    /// A section that does not end where it should.
    #[error("no footer ends the RAM section at byte {at} of QEMU's stream: use a machine type of QEMU 2.4 or newer")]
    NoFooter {
        /// Where.
        at: u64,
    },
    /// A command that cannot be carried.
    #[error("QEMU sent the command {command} ({what}): turn off {capability} and migrate again")]
    Command {
        /// Its number.
        command: u16,
        /// Its meaning.
        what: &'static str,
        /// What makes QEMU send it.
        capability: &'static str,
    },
    /// A command of post-copy's that makes no sense.
    #[error("the command at byte {at} of QEMU's stream has pages thrown away that do not exist: the stream is damaged")]
    Discard {
        /// Where.
        at: u64,
    },
    /// A record that is not known.
    #[error(
        "a RAM record with flags {flags:#x} at byte {at} of QEMU's stream: the stream is damaged, or QEMU newer \
         than what is known here"
    )]
    Record {
        /// Its low 12 bits.
        flags: u64,
        /// Where.
        at: u64,
    },
    /// A page outside its block, or without one.
    #[error(
        "a RAM record at byte {at} of QEMU's stream is about page {page} of {block}, which does not exist: the \
         stream is damaged"
    )]
    NoSuchPage {
        /// The block's idstr, or why there is none.
        block: String,
        /// Index of the page.
        page: u64,
        /// Where.
        at: u64,
    },
    /// RAM blocks beyond what is believed.
    #[error(
        "QEMU announces RAM of {bytes} bytes in {blocks} blocks or more; allowed are {limit} bytes in {MAX_BLOCKS} \
         blocks: raise the limit if the guest is so large"
    )]
    TooLarge {
        /// Sum of what was announced until the limit broke.
        bytes: u64,
        /// Blocks until then.
        blocks: usize,
        /// The limit in bytes.
        limit: u64,
    },
    /// The lengths of RAM's blocks do not add up.
    #[error("the lengths of QEMU's RAM blocks do not add up to {total}: turn off postcopy-ram and x-ignore-shared")]
    BlockLengths {
        /// The sum that was announced.
        total: u64,
    },
    /// RAM that was to be watched is not in the stream.
    #[error(
        "QEMU announces no RAM block `{block}`, which was to be compared with what is sent: start it with that memory backend"
    )]
    NoSuchBlock {
        /// Its name.
        block: String,
    },
    /// The guest's RAM cannot be read.
    #[error("the guest's RAM cannot be compared with what QEMU sent of it: {source}")]
    Witness {
        /// Why.
        source: std::io::Error,
    },
    /// The decoder says what cannot be.
    #[error(
        "the destination speaks of group {group} of references to disks, which was never sent or is done: it is damaged, or another \
         version of godwit; move again"
    )]
    Feedback {
        /// The group's number.
        group: u64,
    },
    /// It ended too soon.
    #[error(
        "QEMU ended its stream after {at} bytes, before the devices' state: the migration failed; ask query-migrate \
         and QEMU's log why"
    )]
    Truncated {
        /// Bytes that came.
        at: u64,
    },
    /// It was used after an error or after its end.
    #[error("the encoder was used after its end or after an error: begin a new stream")]
    Spent,
    /// A compressor could not be had.
    #[error("zstd failed to {doing}: {source}; lower the window or the level if memory is short")]
    Zstd {
        /// What it was to do.
        doing: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

/// What post-copy has the destination throw away of one block: pages, from and length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Discard {
    pub block: usize,
    pub runs: Vec<(u64, u64)>,
}

/// A piece of QEMU's stream.
#[derive(Debug)]
pub(crate) enum Token<'a> {
    /// Bytes that are no page.
    Verbatim(&'a [u8]),
    /// The record that ends RAM's last section.
    LastEos(&'a [u8]),
    /// Pages that the destination is to throw away: they follow the guest.
    Discard(&'a [u8], Discard),
    /// The head of the devices' state, in a post-copy: from here on nothing is read.
    Packaged(&'a [u8]),
    /// The record that lists RAM's blocks; they replace the parser's.
    Blocks(&'a [u8]),
    /// A page.
    Page {
        place: Place,
        /// Whether the record says its block's name, instead of CONTINUE.
        named: bool,
        /// `None`: zeroes.
        content: Option<&'a PageBytes>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Magic,
    /// Between sections; `configuring`: subsections of the configuration may follow.
    Section {
        configuring: bool,
    },
    Ram {
        last: bool,
    },
    Footer {
        last: bool,
    },
    Rest,
}

/// Whether these bytes, a token that is no page, are how it goes on once the guest stands: the head of RAM's last section, or, in a post-copy,
/// what it throws away or the devices' state.
pub(crate) fn stands_from(verbatim: &[u8]) -> bool {
    matches!(verbatim, [END, _, _, _, _] | [COMMAND, 0, 6 | 7, ..])
}

/// The parser. It keeps no bytes: whoever calls gives it a slice that begins at a token.
#[derive(Debug)]
pub(crate) struct Parser {
    state: State,
    max_ram: u64,
    ram_id: Option<u32>,
    ram_ended: bool,
    blocks: Vec<Block>,
    current: Option<usize>,
    /// Behind PACKAGED: bytes until the guest's new host has all that it needs to run it.
    package: Option<u64>,
    /// Bytes of tokens so far.
    at: u64,
}

type Parsed<'a> = Result<(Token<'a>, usize), Stop<StreamError>>;

fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

impl Parser {
    pub(crate) fn new(max_ram: u64) -> Self {
        Self {
            state: State::Magic,
            max_ram,
            ram_id: None,
            ram_ended: false,
            blocks: vec![],
            current: None,
            package: None,
            at: 0,
        }
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Whether RAM's END section was read to its footer.
    pub(crate) fn ram_ended(&self) -> bool {
        self.ram_ended
    }

    /// Whether the guest was stopped before RAM's end: the rest follows it.
    pub(crate) fn follows(&self) -> bool {
        self.package.is_some()
    }

    /// In a post-copy, whether the devices' state is through, and with it QEMU's last chance to think better of it.
    pub(crate) fn package_is_through(&self) -> bool {
        self.package == Some(0)
    }

    /// RAM's section.
    pub(crate) fn ram_id(&self) -> Option<u32> {
        self.ram_id
    }

    /// Whether the stream may end here, for all that can be known.
    pub(crate) fn may_end(&self) -> bool {
        self.state == State::Rest
    }

    /// The token at the front of `bytes`, and its length; `None` while it is incomplete.
    pub(crate) fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<(Token<'a>, usize)>, StreamError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let parsed = match self.state {
            State::Magic => self.magic(bytes),
            State::Section { configuring } => self.section(bytes, configuring),
            State::Ram { last } => self.record(bytes, last),
            State::Footer { last } => self.footer(bytes, last),
            State::Rest => {
                self.package = self.package.map(|left| left.saturating_sub(bytes.len() as u64));
                Ok((Token::Verbatim(bytes), bytes.len()))
            }
        };
        match parsed {
            Ok((token, n)) => {
                self.at += n as u64;
                Ok(Some((token, n)))
            }
            Err(Stop::More) => Ok(None),
            Err(Stop::Bad(e)) => Err(e),
        }
    }

    fn magic<'a>(&mut self, bytes: &'a [u8]) -> Parsed<'a> {
        let mut c = Cursor::new(bytes);
        let found = *c.array()?;
        if found != FILE_MAGIC {
            return Err(Stop::Bad(StreamError::NotMigration { found }));
        }
        match c.u32()? {
            FILE_VERSION => {}
            other => return Err(Stop::Bad(StreamError::Version(other))),
        }
        self.state = State::Section { configuring: false };
        Ok((Token::Verbatim(c.seen()), c.at()))
    }

    fn section<'a>(&mut self, bytes: &'a [u8], configuring: bool) -> Parsed<'a> {
        let mut c = Cursor::new(bytes);
        let next = match c.u8()? {
            EOF | FULL if self.ram_ended => State::Rest,
            FULL => {
                c.u32()?;
                return Err(Stop::Bad(StreamError::EarlySection { idstr: text(c.counted()?) }));
            }
            CONFIGURATION if self.at == 8 => {
                let len = c.u32()?;
                if len > MAX_MACHINE {
                    return Err(Stop::Bad(StreamError::SectionType { byte: CONFIGURATION, at: self.at }));
                }
                c.take(len as usize)?;
                State::Section { configuring: true }
            }
            SUBSECTION if configuring => {
                subsection(&mut c)?;
                State::Section { configuring: true }
            }
            COMMAND => return self.command(c),
            START => {
                let id = c.u32()?;
                let idstr = c.counted()?;
                if idstr != b"ram" || self.ram_id.is_some() {
                    return Err(Stop::Bad(StreamError::Iterable { idstr: text(idstr) }));
                }
                c.u32()?;
                match c.u32()? {
                    RAM_VERSION => {}
                    other => return Err(Stop::Bad(StreamError::RamVersion(other))),
                }
                self.ram_id = Some(id);
                State::Ram { last: false }
            }
            kind @ (PART | END) => {
                let found = c.u32()?;
                if self.ram_id != Some(found) || self.ram_ended {
                    return Err(Stop::Bad(StreamError::SectionId { found, expected: self.ram_id, at: self.at }));
                }
                State::Ram { last: kind == END }
            }
            byte => return Err(Stop::Bad(StreamError::SectionType { byte, at: self.at })),
        };
        self.state = next;
        Ok((Token::Verbatim(c.seen()), c.at()))
    }

    fn command<'a>(&mut self, mut c: Cursor<'a>) -> Parsed<'a> {
        let (command, len) = (c.u16()?, c.u16()?);
        let refuse = |what, capability| Err(Stop::Bad(StreamError::Command { command, what, capability }));
        match command {
            // OPEN_RETURN_PATH, PING, POSTCOPY_ADVISE, SWITCHOVER_START
            1 | 2 | 3 | 11 if len <= MAX_COMMAND => {
                c.take(usize::from(len))?;
                self.state = State::Section { configuring: false };
                Ok((Token::Verbatim(c.seen()), c.at()))
            }
            // POSTCOPY_RAM_DISCARD
            6 if len <= MAX_COMMAND => {
                let discard = self.discard(c.take(usize::from(len))?)?;
                self.state = State::Section { configuring: false };
                Ok((Token::Discard(c.seen(), discard), c.at()))
            }
            // CMD_PACKAGED
            7 if usize::from(len) == size_of::<u32>() => {
                self.package = Some(u64::from(c.u32()?) + PING);
                self.state = State::Rest;
                Ok((Token::Packaged(c.seen()), c.at()))
            }
            4..=7 | 9 | 10 => refuse("a part of post-copy where none can be", "postcopy-ram"),
            8 => refuse("COLO", "x-colo"),
            _ => refuse("unknown here", "the capabilities that this QEMU has beyond 10.0's"),
        }
    }

    fn discard(&self, payload: &[u8]) -> Result<Discard, Stop<StreamError>> {
        let bad = || Stop::Bad(StreamError::Discard { at: self.at });
        let mut c = Cursor::new(payload);
        let mut read = || -> Result<_, Stop<StreamError>> {
            let version = c.u8()?;
            let name = c.counted()?;
            let end = c.u8()?;
            let block = self.blocks.iter().position(|b| b.name == name);
            let mut runs = vec![];
            while c.at() < payload.len() {
                runs.push((c.u64()?, c.u64()?));
            }
            Ok((version, end, block, runs))
        };
        // It is all there, so that nothing is to come.
        let Ok((0, 0, Some(block), runs)) = read() else { return Err(bad()) };
        let pages = self.blocks[block].pages;
        let runs = runs.into_iter().map(|(start, length)| (start >> PAGE_BITS, length.div_ceil(PAGE_SIZE as u64)));
        let runs: Vec<_> = runs.collect();
        if runs.iter().any(|(first, count)| first.checked_add(*count).is_none_or(|end| end > pages)) {
            return Err(bad());
        }
        Ok(Discard { block, runs })
    }

    fn footer<'a>(&mut self, bytes: &'a [u8], last: bool) -> Parsed<'a> {
        let mut c = Cursor::new(bytes);
        if c.u8()? != FOOTER {
            return Err(Stop::Bad(StreamError::NoFooter { at: self.at }));
        }
        let found = c.u32()?;
        if self.ram_id != Some(found) {
            return Err(Stop::Bad(StreamError::SectionId { found, expected: self.ram_id, at: self.at }));
        }
        self.ram_ended = last;
        self.state = State::Section { configuring: false };
        Ok((Token::Verbatim(c.seen()), c.at()))
    }

    fn record<'a>(&mut self, bytes: &'a [u8], last: bool) -> Parsed<'a> {
        let mut c = Cursor::new(bytes);
        let word = c.u64()?;
        let (high, flags) = (word & !record::FLAGS, word & record::FLAGS);
        let zero = match flags & !record::FLAG_CONTINUE {
            record::FLAG_PAGE => false,
            record::FLAG_ZERO => true,
            _ => return self.rare_record(c, high, flags, last),
        };
        let named = flags & record::FLAG_CONTINUE == 0;
        let block = if named {
            let name = c.counted()?;
            self.blocks.iter().position(|b| b.name == name).ok_or_else(|| self.no_page(text(name), high))?
        } else {
            self.current.ok_or_else(|| self.no_page("a block that was never named".into(), high))?
        };
        let page = high >> PAGE_BITS;
        if page >= self.blocks[block].pages {
            return Err(self.no_page(text(&self.blocks[block].name), high));
        }
        let content = if zero {
            // QEMU has not filled pages with anything else for ages.
            match c.u8()? {
                0 => None,
                _ => return Err(Stop::Bad(StreamError::Record { flags, at: self.at })),
            }
        } else {
            Some(c.array::<PAGE_SIZE>()?)
        };
        self.current = Some(block);
        Ok((Token::Page { place: Place { block, page }, named, content }, c.at()))
    }

    fn no_page(&self, block: String, offset: u64) -> Stop<StreamError> {
        Stop::Bad(StreamError::NoSuchPage { block, page: offset >> PAGE_BITS, at: self.at })
    }

    fn rare_record<'a>(&mut self, c: Cursor<'a>, high: u64, flags: u64, last: bool) -> Parsed<'a> {
        let off = |name: &str| Err(Stop::Bad(StreamError::Capability { name: name.into() }));
        match flags {
            record::FLAG_EOS if high == 0 => {
                self.state = State::Footer { last };
                let token = if last { Token::LastEos(c.seen()) } else { Token::Verbatim(c.seen()) };
                Ok((token, c.at()))
            }
            record::FLAG_MEM_SIZE => self.mem_size(c, high),
            f if f & record::FLAG_XBZRLE != 0 => off("xbzrle"),
            f if f & record::FLAG_COMPRESSED != 0 => off("compress"),
            f if f & record::FLAG_MULTIFD_FLUSH != 0 => off("multifd"),
            f if f & record::FLAG_HOOK != 0 => off("rdma-pin-all"),
            flags => Err(Stop::Bad(StreamError::Record { flags, at: self.at })),
        }
    }

    fn mem_size<'a>(&mut self, mut c: Cursor<'a>, total: u64) -> Parsed<'a> {
        let mut blocks = vec![];
        let mut sum = 0u64;
        let too_large = |bytes, blocks| Stop::Bad(StreamError::TooLarge { bytes, blocks, limit: self.max_ram });
        if total > self.max_ram {
            return Err(too_large(total, 0));
        }
        while sum < total {
            let name = c.counted()?.to_vec();
            let length = c.u64()?;
            sum = sum.saturating_add(length);
            if sum > total {
                return Err(Stop::Bad(StreamError::BlockLengths { total }));
            }
            if blocks.len() == MAX_BLOCKS {
                return Err(too_large(sum, blocks.len()));
            }
            blocks.push(Block { name, pages: length.div_ceil(PAGE_SIZE as u64) });
        }
        self.blocks = blocks;
        self.current = None;
        Ok((Token::Blocks(c.seen()), c.at()))
    }
}

fn subsection(c: &mut Cursor<'_>) -> Result<(), Stop<StreamError>> {
    let name = c.counted()?;
    c.u32()?;
    match name {
        b"configuration/capabilities" => {
            let n = c.u32()?;
            if n > MAX_CAPABILITIES {
                return Err(Stop::Bad(StreamError::Subsection { name: text(name) }));
            }
            for _ in 0..n {
                let capability = c.counted()?;
                if [b"x-ignore-shared".as_slice(), b"mapped-ram", b"multifd"].contains(&capability) {
                    return Err(Stop::Bad(StreamError::Capability { name: text(capability) }));
                }
            }
        }
        b"configuration/target-page-bits" => match c.u32()? {
            PAGE_BITS => {}
            other => return Err(Stop::Bad(StreamError::PageBits(other))),
        },
        b"configuration/uuid" => {
            c.take(16)?;
        }
        _ => return Err(Stop::Bad(StreamError::Subsection { name: text(name) })),
    }
    Ok(())
}
