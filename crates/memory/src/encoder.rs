//! The source's end: QEMU's stream in, Godwit's out.

use crate::checkpoint::{CheckpointKey, Holding};
use crate::config::{Config, PageKey, Reach, Resends};
use crate::delta::{self, Differing};
use crate::disks::{self, Feedback, Finder, Referring, Unknown};
use crate::format;
use crate::meter::{Meter, Stages};
use crate::packing::{After, Beside, Packing};
use crate::record::{self, Layout, PAGE_SIZE, PageBytes, Place};
use crate::shuffle::{Shuffler, Word};
use crate::stream::{Discard, Parser, StreamError, Token};
use crate::versions::Versions;
use crate::witness::{Sum, Witness};
use std::ops::Range;
use std::time::Duration;

/// Operations are given to zstd, and rebuilt bytes to the digest, in pieces of about this size: small enough for the
/// processor's cache, large enough for BLAKE3 to hash many chunks at once.
const PIECE: usize = 128 << 10;
/// While RAM goes, a digest is sent with a flush after so much of it: enough to find damage early, too rare to cost.
/// Behind RAM every flush has one, because the destination must know that it has everything before QEMU closes.
const CHECK_EVERY: u64 = 16 << 20;
/// What a push brings at the most, as a rule: what QEMU writes at once, and some.
const ROOM_FOR_A_PUSH: usize = 1 << 20;
/// What is added to a token that was cut, before it is tried again.
const STEP: usize = 8 << 10;

/// Words of a page that may differ for the difference to be sent rather than a reference to a disk, which costs some bytes and a look at it.
const FEW: usize = 16;
/// Words of a page that may differ for the difference to be sent rather than all of it. zstd finds more in a page that is mostly new.
const MOST: usize = delta::WORDS / 2;

/// A page's keyed hash, or one of the three below, which no hash is, but for a chance of 2^-126.
type Mark = [u8; 16];
const NEVER_SENT: Mark = [0; 16];
const SENT_AS_ZERO: Mark = [0xff; 16];
/// What was sent is kept: it is compared itself, and hashed when it goes.
const KEPT: Mark = [0xfe; 16];

/// Counters of an [`Encoder`]. All only grow: a round is the difference of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of QEMU's stream that were pushed.
    pub raw_bytes: u64,
    /// Bytes that were given out for the wire. What zstd still holds is not in it: see [`Encoder::flush`].
    pub wire_bytes: u64,
    /// Bytes that zstd was given: what is left of those, where pages are named, left out or differences.
    pub given_bytes: u64,
    /// Bytes of the stream that the decoder rebuilds.
    pub rebuilt_bytes: u64,
    /// RAM that QEMU announced, in pages; 0 before it did.
    pub ram_pages: u64,
    /// Zero pages sent.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub data_pages: u64,
    /// Of `data_pages`, those whose words' bytes were laid apart.
    pub shuffled_pages: u64,
    /// Pages sent as the difference from what was last sent of them.
    pub delta_pages: u64,
    /// Bytes of those differences, before zstd.
    pub delta_bytes: u64,
    /// Pages that the destination has kept of an earlier try: they were named, not sent.
    pub held_pages: u64,
    /// Pages that lie on disks that the destination has: they were referred to, not sent.
    pub disk_pages: u64,
    /// Of `disk_pages`, those that are in another guest's memory ([`NEIGHBOURS`](crate::NEIGHBOURS)).
    pub neighbour_pages: u64,
    /// Bytes that say where those lie, before zstd.
    pub disk_bytes: u64,
    /// Of `disk_pages`, those that the destination did not find as they were, and asked for.
    pub missing_pages: u64,
    /// Bytes of wire with what it asked for.
    pub missing_bytes: u64,
    /// Pages that went in full although they may lie on disks, because too many references were under way.
    pub crowded_pages: u64,
    /// Of `zero_pages`, `data_pages`, `delta_pages`, `held_pages` and `disk_pages`, those sent before with something else. Only counted with [`Resends::Elide`].
    pub changed_pages: u64,
    /// Pages that were left out because they came as they were last sent.
    pub unchanged_pages: u64,
    /// Of `unchanged_pages`, zero ones.
    pub unchanged_zero_pages: u64,
    /// Of `zero_pages` and `data_pages`, those that QEMU did not send as they are, and a [`Witness`] did.
    pub overlooked_pages: u64,
    /// Bytes of QEMU's stream that belong to no page: headers, sections, and devices' state.
    pub other_bytes: u64,
    /// Whether RAM's END section was read to its end, or as much of RAM as goes before the guest: it stands still, and devices' state follows.
    pub ram_ended: bool,
    /// Whether the rest of RAM follows the guest (post-copy). From there on QEMU's bytes pass as they are, through zstd.
    pub follows: bool,
    /// In a post-copy: whether all of the devices' state was read, and QEMU will not go on with the guest by itself.
    pub handed: bool,
    /// Pages that follow the guest, as QEMU announced them.
    pub following_pages: u64,
}

impl Progress {
    /// Page records that QEMU sent.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.zero_pages + self.data_pages + self.delta_pages + self.held_pages + self.disk_pages + self.unchanged_pages
    }
}

/// What an [`Encoder`] did, at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The counters.
    pub progress: Progress,
    /// BLAKE3 of the rebuilt stream.
    pub digest: [u8; format::DIGEST],
}

/// Makes QEMU's migration stream small. The crate's opening tells how and why that is sound.
///
/// After an error it is spent: every call answers [`StreamError::Spent`].
pub struct Encoder {
    parser: Parser,
    /// The beginning of a token that goes on in the next push. At most a token and [`STEP`].
    partial: Vec<u8>,
    pages: Pages,
    wire: Wire,
    /// Whether the magic number was given out.
    begun: bool,
    finished: bool,
    spent: bool,
}

impl Encoder {
    /// # Errors
    /// [`StreamError::Zstd`] when a parameter is out of bounds.
    pub fn new(config: Config) -> Result<Self, StreamError> {
        Ok(Self {
            parser: Parser::new(config.max_ram),
            partial: vec![],
            pages: Pages {
                config: config.clone(),
                marks: vec![],
                versions: Versions::new(0, &[]),
                meter: Meter { clock: config.clock, ..Meter::default() },
                witness: None,
                watched: None,
                holding: None,
                held: vec![],
                referring: None,
                shuffler: Shuffler::of(config.level, config.reach),
                discarded: vec![],
                emitted: None,
                expected: None,
                run: None,
            },
            wire: Wire::new(&config)?,
            begun: false,
            finished: false,
            spent: false,
        })
    }

    /// Looks at the guest's RAM itself at the end of RAM's last section, and sends what QEMU overlooked. To be called before
    /// the first push. The rebuilt stream then has those pages in addition; it is QEMU's but for them.
    #[must_use]
    pub fn with_witness(mut self, witness: Witness) -> Self {
        self.pages.witness = Some(witness);
        self
    }

    /// Names pages that the destination has kept instead of sending them. To be called before the first push, with the key under
    /// which they are kept there.
    #[must_use]
    pub fn with_holding(mut self, holding: Holding, key: &CheckpointKey) -> Self {
        self.pages.config.key = key.marks();
        self.pages.holding = Some(holding);
        self
    }

    /// Refers to blocks of the VM's disks that the destination has, instead of sending pages. To be called before the first push.
    /// From then on what the decoder says ([`Decoder::feedback`](crate::Decoder::feedback)) has to come back to
    /// [`Encoder::feedback`].
    #[must_use]
    pub fn with_disks(self, finder: Box<dyn Finder>) -> Self {
        self.with_disks_and_room(finder, disks::RING)
    }

    /// As [`Encoder::with_disks`], with another size of the ring.
    #[must_use]
    pub fn with_disks_and_room(mut self, finder: Box<dyn Finder>, room: usize) -> Self {
        // The key is for one stream and one purpose only, so that what it is told to the other end for tells nothing else.
        let key = PageKey::random().0;
        self.pages.referring = Some(Referring::new(finder, key, room));
        self
    }

    /// The guest is about to stand still. From now on pages go in full, because nobody is to wait for a round trip for one that is not as it was, and
    /// as they lie, because nobody is to wait until it is known how they would be smallest.
    pub fn hurry(&mut self) {
        self.pages.shuffler = None;
        if let Some(referring) = &mut self.pages.referring {
            referring.stop();
        }
    }

    /// Nobody will ask for anything that was referred to so far.
    pub(crate) fn forget_references(&mut self) {
        if let Some(referring) = &mut self.pages.referring {
            referring.forget();
        }
    }

    /// A reference that is wrong makes the decoder stand still for so long, a round trip; and the stream has gone on for so long. Where they
    /// cost too much of that no more are made.
    pub fn stalls_take(&mut self, stall: Duration, elapsed: Duration) {
        if let Some(referring) = &mut self.pages.referring {
            referring.stalls_take(stall, elapsed);
        }
    }

    /// Whether so few references may be added that pages of the next push may have to go in full, or the decoder stands still and is not to be given
    /// much more; after a flush its word makes room.
    #[must_use]
    pub fn lacks_room(&self) -> bool {
        let referring = self.pages.referring.as_ref();
        referring.is_some_and(|referring| referring.is_on() && referring.lacks(ROOM_FOR_A_PUSH)) || self.holds_up()
    }

    /// Whether the decoder stands still and is not to be given much more: also when no references are made any more.
    #[must_use]
    pub fn holds_up(&self) -> bool {
        let referring = self.pages.referring.as_ref();
        referring.is_some_and(|referring| referring.holds_up(self.wire.progress.wire_bytes))
    }

    /// Takes what the decoder says of references; appends to `out` what it asks for, which is to go at once.
    ///
    /// # Errors
    /// [`StreamError::Feedback`] when it speaks of what it was never sent.
    pub fn feedback(&mut self, feedback: Feedback, out: &mut Vec<u8>) -> Result<(), StreamError> {
        if self.spent {
            return Err(StreamError::Spent);
        }
        let result = self.heed(feedback, out);
        self.spent = result.is_err();
        result
    }

    fn heed(&mut self, feedback: Feedback, out: &mut Vec<u8>) -> Result<(), StreamError> {
        let unknown = |Unknown(group)| StreamError::Feedback { group };
        let Some(referring) = &mut self.pages.referring else { return Err(unknown(Unknown(0))) };
        match feedback {
            Feedback::Past(groups) => referring.goes_on(groups).map_err(unknown),
            Feedback::Missing(group) => {
                let contents = referring.missing(group).map_err(unknown)?;
                let packed = zstd::bulk::compress(&contents, self.pages.config.level)
                    .map_err(|source| StreamError::Zstd { doing: "compress what was asked for", source })?;
                let mut answer = vec![];
                format::put(&mut answer, group);
                answer.extend_from_slice(&packed);
                let before = out.len();
                out.extend_from_slice(&format::segment(format::Segment::Answer, answer.len()));
                out.extend_from_slice(&answer);
                let progress = &mut self.wire.progress;
                progress.missing_pages += (contents.len() / PAGE_SIZE) as u64;
                progress.missing_bytes += (out.len() - before) as u64;
                progress.wire_bytes += (out.len() - before) as u64;
                Ok(())
            }
        }
    }

    /// Takes bytes of QEMU's, cut anywhere; appends to `out` what is ready for the wire.
    ///
    /// # Errors
    /// When the stream holds something that cannot be carried; the message says what to turn off or remove.
    pub fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.guarded(out, |this, out| {
            this.wire.progress.raw_bytes += input.len() as u64;
            this.take(input, out)
        })
    }

    /// Makes all that was pushed readable at the other end, but for a token that was cut (at most a page record).
    /// To be called when QEMU has nothing more to say for the moment; costs a few bytes, and none if nothing was
    /// pushed.
    ///
    /// Behind RAM's END it also lets the decoder verify all bytes up to here
    /// ([`Decoded::verified_bytes`](crate::Decoded::verified_bytes)): a source QEMU with a return path does not
    /// end its stream before it is told SHUT, so nobody could wait for the trailer.
    ///
    /// # Errors
    /// [`StreamError::Zstd`], when memory is short.
    pub fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.guarded(out, |this, out| {
            this.pages.close_run(&mut this.wire);
            this.wire.flush(out)
        })
    }

    /// Appends to `out` what zstd's own thread has under way ([`Config::beside`]), and waits until that is packed; nothing where it has none. To be called before
    /// the caller does nothing for a while.
    ///
    /// # Errors
    /// [`StreamError::Zstd`], when memory is short.
    pub fn collect(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.guarded(out, |this, out| this.wire.packing.collect(out))
    }

    /// Goes on with another of zstd's levels, or another reach, in a frame of its own: from here on no match reaches back behind it.
    ///
    /// # Errors
    /// [`StreamError::Zstd`], when memory is short.
    pub fn set_level(&mut self, level: i32, reach: Reach, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.guarded(out, |this, out| {
            this.pages.close_run(&mut this.wire);
            this.pages.shuffler = Shuffler::of(level, reach);
            this.pages.config.reach = reach;
            this.pages.keep_firsts(&mut this.wire);
            this.wire.packing.pack_last(&mut this.wire.ops, (level, reach), out)
        })
    }

    /// QEMU ended its stream: what is left, and the trailer. Nothing can be pushed afterwards; the decoder may still ask for something.
    ///
    /// # Errors
    /// [`StreamError::Truncated`] when the stream did not come to the devices' state.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<Summary, StreamError> {
        let summary = self.guarded(out, |this, out| {
            if !this.parser.may_end() || !this.partial.is_empty() {
                return Err(StreamError::Truncated { at: this.wire.progress.raw_bytes });
            }
            this.pages.close_run(&mut this.wire);
            this.wire.finish(out)
        });
        self.finished = true;
        summary.map(|digest| Summary { progress: self.wire.progress.clone(), digest })
    }

    /// The guest's RAM blocks, once they are known.
    #[must_use]
    pub fn layout(&self) -> Option<Layout> {
        Some(self.parser.blocks()).filter(|blocks| !blocks.is_empty()).map(|blocks| Layout(blocks.to_vec()))
    }

    /// The counters.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.wire.progress
    }

    /// Where its time went, if it was given a clock.
    #[must_use]
    pub fn stages(&self) -> Stages {
        let Stages { digest, zstd, .. } = self.wire.meter.stages;
        // What the caller takes for it where it has a thread is a wait.
        let zstd = self.beside().map_or(zstd, |beside| beside.spent);
        Stages { digest, zstd, ..self.pages.meter.stages }
    }

    /// What zstd has taken on a thread of its own ([`Config::beside`]); none where it has none, also because there could be none.
    #[must_use]
    pub fn beside(&self) -> Option<Beside> {
        self.wire.packing.beside()
    }

    fn guarded<T>(
        &mut self,
        out: &mut Vec<u8>,
        f: impl FnOnce(&mut Self, &mut Vec<u8>) -> Result<T, StreamError>,
    ) -> Result<T, StreamError> {
        if self.spent || self.finished {
            return Err(StreamError::Spent);
        }
        let before = out.len();
        if !self.begun {
            out.extend_from_slice(&format::MAGIC);
        }
        let head = out.len();
        out.extend_from_slice(&format::segment(format::Segment::Packed, 0));
        let begin = out.len();
        let result = f(self, out);
        if out.len() == begin {
            out.truncate(before);
        } else {
            self.begun = true;
            format::close_segment(out, head);
        }
        self.wire.progress.wire_bytes += (out.len() - before) as u64;
        self.wire.progress.given_bytes = self.wire.packing.given();
        self.spent = result.is_err();
        result
    }

    /// Tokens are read where they lie, in `input`; only one that was cut is put together in `partial`.
    fn take(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        while !self.partial.is_empty() && !input.is_empty() {
            let had = self.partial.len();
            let step = input.len().min(STEP);
            let mut joined = std::mem::take(&mut self.partial);
            joined.extend_from_slice(&input[..step]);
            let mut at = 0;
            while at < had {
                let Some((token, n)) = self.parser.next(&joined[at..])? else { break };
                self.pages.token(token, &self.parser, &mut self.wire, out)?;
                at += n;
            }
            if at >= had {
                input = &input[at - had..];
                joined.clear();
            } else {
                input = &input[step..];
                joined.drain(..at);
            }
            self.partial = joined;
        }
        while let Some((token, n)) = self.parser.next(input)? {
            self.pages.token(token, &self.parser, &mut self.wire, out)?;
            input = &input[n..];
        }
        self.partial.extend_from_slice(input);
        self.wire.progress.follows = self.parser.follows();
        self.wire.progress.ram_ended = self.parser.ram_ended() || self.parser.follows();
        self.wire.progress.handed = self.parser.package_is_through();
        Ok(())
    }
}

/// Which pages the destination has, and where in RAM the rebuilt stream is.
struct Pages {
    config: Config,
    /// By block and page. Flat: 16 bytes for 4096 of RAM.
    marks: Vec<Vec<Mark>>,
    /// What was last sent, of as many pages as there is room for.
    versions: Versions,
    meter: Meter,
    witness: Option<Witness>,
    /// Which block the witness is of, and what was last sent of its pages.
    watched: Option<(usize, Vec<Sum>)>,
    /// What the destination says it has kept, until the table of blocks is known.
    holding: Option<Holding>,
    /// By block and page, the mark of what the destination keeps there; 0: nothing, or not this any more. Empty without [`Holding`].
    held: Vec<Vec<u64>>,
    /// What lies on disks that the destination has.
    referring: Option<Referring>,
    /// Where bytes are worth more than time.
    shuffler: Option<Shuffler>,
    /// Pages that the destination is to throw away, of the block that is watched.
    discarded: Vec<Range<u64>>,
    /// Block of the last record that was not left out: what CONTINUE means to the destination.
    emitted: Option<usize>,
    /// The page after that one.
    expected: Option<Place>,
    /// The open run, of zero or of held pages: its operation, and its length, which is not written yet.
    run: Option<(u8, u64)>,
}

impl Pages {
    fn token(
        &mut self,
        token: Token<'_>,
        parser: &Parser,
        wire: &mut Wire,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamError> {
        match token {
            Token::Page { place, named, content } => self.page(place, named, content, parser, wire),
            Token::Verbatim(bytes) => {
                self.close_run(wire);
                wire.verbatim(bytes, out)?;
            }
            Token::LastEos(bytes) => {
                // QEMU stopped the guest by itself, and nobody may have said so yet.
                self.shuffler = None;
                self.catch_up(parser, wire, out)?;
                self.close_run(wire);
                wire.verbatim(bytes, out)?;
            }
            Token::Discard(bytes, discard) => {
                self.close_run(wire);
                self.discard(&discard, wire);
                wire.verbatim(bytes, out)?;
            }
            Token::Packaged(bytes) => {
                self.shuffler = None;
                self.catch_up_ahead(parser, wire, out)?;
                self.close_run(wire);
                wire.verbatim(bytes, out)?;
            }
            Token::Blocks(bytes) => {
                self.close_run(wire);
                self.blocks(parser, wire)?;
                wire.verbatim(bytes, out)?;
            }
        }
        if wire.unsent >= disks::SEND_EVERY {
            self.close_run(wire);
            wire.flush(out)?;
        }
        wire.drain(out)
    }

    fn blocks(&mut self, parser: &Parser, wire: &mut Wire) -> Result<(), StreamError> {
        let blocks = parser.blocks();
        (self.emitted, self.expected) = (None, None);
        wire.progress.ram_pages = blocks.iter().map(|b| b.pages).sum();
        if self.config.resends == Resends::Elide {
            self.marks = blocks.iter().map(|b| vec![NEVER_SENT; b.pages as usize]).collect();
        }
        self.versions = Versions::new(self.config.versions, blocks);
        self.held = self.holding.take().and_then(|holding| holding.of(blocks)).unwrap_or_default();
        if let Some(witness) = &self.witness {
            let block = blocks.iter().position(|b| witness.is_of(&b.name));
            let block = block.ok_or_else(|| StreamError::NoSuchBlock { block: witness.block().into() })?;
            self.watched = Some((block, vec![Sum::default(); blocks[block].pages as usize]));
        }
        if let Some(referring) = &self.referring {
            wire.ops.push(format::DISKS);
            wire.ops.extend_from_slice(referring.key());
        }
        if self.config.versions > 0 {
            wire.ops.push(format::DELTAS);
            format::put(&mut wire.ops, self.config.versions);
        }
        wire.ops.push(format::BLOCKS);
        record::put_table(&mut wire.ops, blocks);
        self.keep_firsts(wire);
        Ok(())
    }

    /// Whether what is sent of a page for the first time is kept, from here on. Where the encoder is what the stream waits for it is not: to clear and fill
    /// memory that nobody has touched yet takes longer than the differences of the few pages spare that come again.
    fn keep_firsts(&mut self, wire: &mut Wire) {
        let firsts = self.config.reach != Reach::Near;
        if self.versions.keep_firsts(firsts) {
            wire.ops.extend_from_slice(&[format::FIRSTS, u8::from(firsts)]);
        }
    }

    fn discard(&mut self, discard: &Discard, wire: &mut Wire) {
        let watched = self.watched.as_ref().is_some_and(|(block, _)| *block == discard.block);
        for (first, count) in &discard.runs {
            wire.progress.following_pages += count;
            if watched {
                self.discarded.push(*first..first + count);
            }
        }
    }

    /// As [`Pages::catch_up`], where the rest of RAM follows the guest: in a section of its own, in front of the devices' state, and without
    /// what follows anyway.
    fn catch_up_ahead(&mut self, parser: &Parser, wire: &mut Wire, out: &mut Vec<u8>) -> Result<(), StreamError> {
        let Some(id) = parser.ram_id().filter(|_| self.watched.is_some()) else { return Ok(()) };
        self.close_run(wire);
        wire.verbatim(&record::part_head(id), out)?;
        self.catch_up(parser, wire, out)?;
        self.close_run(wire);
        wire.verbatim(&record::part_end(id), out)
    }

    /// Sends the pages that QEMU has not sent as they are. The guest stands still.
    fn catch_up(&mut self, parser: &Parser, wire: &mut Wire, out: &mut Vec<u8>) -> Result<(), StreamError> {
        let (Some(witness), Some((block, sums))) = (self.witness.take(), self.watched.take()) else { return Ok(()) };
        let failed = |source| StreamError::Witness { source };
        self.discarded.sort_unstable_by_key(|run| run.start);
        let follows = |page: u64| {
            let behind = self.discarded.partition_point(|run| run.end <= page);
            self.discarded.get(behind).is_some_and(|run| run.contains(&page))
        };
        let differing: Vec<u64> =
            witness.differing(&sums).map_err(failed)?.into_iter().filter(|page| !follows(*page)).collect();
        let mut content = [0; PAGE_SIZE];
        for page in differing {
            witness.read(page, &mut content).map_err(failed)?;
            let content = Some(&content).filter(|content| content.iter().any(|byte| *byte != 0));
            self.page(Place { block, page }, false, content, parser, wire);
            wire.progress.overlooked_pages += 1;
            wire.drain(out)?;
        }
        Ok(())
    }

    fn page(&mut self, place: Place, named: bool, content: Option<&PageBytes>, parser: &Parser, wire: &mut Wire) {
        if let Some((block, sums)) = &mut self.watched
            && *block == place.block
        {
            sums[place.page as usize] = Sum::of(content);
        }
        let elide = self.config.resends == Resends::Elide;
        if let Some(content) = content {
            self.recall(place, content);
        }
        let then = self.meter.now();
        let differing = content.and_then(|content| Some(Differing::between(self.versions.get(place)?, content)));
        self.meter.stages.deltas += self.meter.since(then);
        // What is kept needs no hash: it is compared. Nor does what was never sent, or as zeroes: it is no hash's equal.
        let last = if elide { self.marks[place.block][place.page as usize] } else { NEVER_SENT };
        let hashed = ![NEVER_SENT, SENT_AS_ZERO, KEPT].contains(&last);
        let mark = match (content, differing) {
            (None, _) => SENT_AS_ZERO,
            (Some(_), Some(differing)) if differing.words() == 0 && elide => KEPT,
            (Some(content), _) if hashed || !self.held.is_empty() => self.mark(content),
            (Some(_), _) => NEVER_SENT,
        };
        if elide {
            if last == mark && mark != NEVER_SENT {
                wire.progress.unchanged_pages += 1;
                wire.progress.unchanged_zero_pages += u64::from(content.is_none());
                return;
            }
            wire.progress.changed_pages += u64::from(last != NEVER_SENT);
        }
        // A name that QEMU wrote stays. CONTINUE stays only if what it continues was not left out.
        let named = named || self.emitted != Some(place.block);
        let seek = self.expected != Some(place);
        let kept = content.is_some() && self.is_held(place, &mark);
        let within = |most: usize| differing.is_some_and(|differing| differing.words() <= most);
        let spot = content.filter(|_| !kept && !within(FEW)).and_then(|content| self.refer(content, wire));
        let full = content.filter(|_| !kept && spot.is_none() && !within(MOST));
        let shuffled = full.and_then(|content| self.shuffle(content));
        let kind = match content {
            None => format::ZERO,
            Some(_) if kept => format::HELD,
            Some(_) if spot.is_some() => format::DISK,
            Some(_) if within(MOST) => format::DELTA,
            Some(_) => shuffled.as_ref().map_or(0, |(word, _)| word.kind()),
        };
        let head = kind | if named { format::NAMED } else { 0 } | if seek { format::SEEK } else { 0 };
        let most = match kind {
            format::HELD => format::MAX_HELD_RUN,
            format::DISK => format::MAX_DISK_RUN,
            _ => format::MAX_RUN,
        };
        // An operation that names or seeks begins a run, and none of those that follow does.
        let joins = head == kind && self.run.is_some_and(|(open, n)| open == kind && n < most);
        if !joins {
            self.close_run(wire);
            wire.ops.push(head);
            if seek {
                let from = self.expected.filter(|e| e.block == place.block).map_or(0, |e| e.page);
                format::put(&mut wire.ops, place.block as u64);
                format::put(&mut wire.ops, format::distance(from, place.page));
            }
        }
        match (content, spot, &mut self.referring) {
            (Some(content), Some(spot), Some(referring)) => referring.add(spot, content),
            (Some(content), None, _) if kind == format::DELTA => self.write_delta(place, differing, content, wire),
            (Some(content), None, _) if !kept => {
                wire.ops.extend_from_slice(shuffled.as_ref().map_or(content, |(_, laid)| laid));
            }
            _ => {}
        }
        self.remember(place, content, mark, spot);
        let (counter, is_run) = match kind {
            format::ZERO => (&mut wire.progress.zero_pages, true),
            format::HELD => (&mut wire.progress.held_pages, true),
            format::DISK => (&mut wire.progress.disk_pages, true),
            format::DELTA => (&mut wire.progress.delta_pages, false),
            _ => (&mut wire.progress.data_pages, false),
        };
        *counter += 1;
        wire.progress.shuffled_pages += u64::from(shuffled.is_some());
        wire.progress.neighbour_pages += u64::from(spot.is_some_and(|spot| spot.disk >= disks::NEIGHBOURS));
        if is_run {
            self.run = Some((kind, self.run.map_or(0, |(_, n)| n) + 1));
        }
        record::write(&mut wire.rebuilt, place.page, named.then(|| &*parser.blocks()[place.block].name), content);
        self.emitted = Some(place.block);
        self.expected = Some(Place { page: place.page + 1, ..place });
    }

    fn write_delta(&mut self, place: Place, differing: Option<Differing>, content: &PageBytes, wire: &mut Wire) {
        let then = self.meter.now();
        let before = wire.ops.len();
        let old = self.versions.get(place);
        let (Some(differing), Some(old)) = (differing, old) else { unreachable!("it was compared with what is kept") };
        differing.write(old, content, &mut wire.ops);
        wire.progress.delta_bytes += (wire.ops.len() - before) as u64;
        self.meter.stages.deltas += self.meter.since(then);
    }

    /// What was sent of a page that comes again now, if it was left where it lay on a disk, and lies there still. Most of these never come again.
    fn recall(&mut self, place: Place, content: &PageBytes) {
        let (Some(spot), Some(referring)) = (self.versions.on_disk(place), &self.referring) else { return };
        let last = self.marks[place.block][place.page as usize];
        let mut was = [0; PAGE_SIZE];
        if hash(&self.config.key, content) != last
            && referring.read(spot, &mut was)
            && hash(&self.config.key, &was) == last
        {
            self.versions.recall(place, &was);
            self.marks[place.block][place.page as usize] = KEPT;
        }
    }

    /// This is what the destination will have. `mark`: [`NEVER_SENT`] if it was not computed; `spot`: where it was told to find it.
    fn remember(&mut self, place: Place, content: Option<&PageBytes>, mark: Mark, spot: Option<disks::Spot>) {
        let elide = self.config.resends == Resends::Elide;
        let then = self.meter.now();
        let mut gone = None;
        // What is not kept here is known again by its mark. Of neighbours nothing can be read on this side.
        let spot = spot.filter(|spot| elide && spot.disk < disks::NEIGHBOURS);
        let kept = match content {
            None => {
                self.versions.clear(place);
                false
            }
            Some(content) => {
                let key = &self.config.key;
                let is_gone = |page, content: &PageBytes| {
                    gone = elide.then(|| (page, hash(key, content)));
                };
                match spot {
                    Some(spot) => {
                        self.versions.put_on_disk(place, spot, is_gone);
                        false
                    }
                    None => self.versions.put(place, content, is_gone),
                }
            }
        };
        self.meter.stages.deltas += self.meter.since(then);
        if !elide {
            return;
        }
        let mark = match content {
            Some(_) if kept => KEPT,
            Some(content) if mark == NEVER_SENT => self.mark(content),
            _ => mark,
        };
        let marks = &mut self.marks[place.block];
        if let Some((page, mark)) = gone {
            marks[page as usize] = mark;
        }
        marks[place.page as usize] = mark;
    }

    fn mark(&mut self, content: &PageBytes) -> Mark {
        let then = self.meter.now();
        let mark = hash(&self.config.key, content);
        self.meter.stages.marks += self.meter.since(then);
        mark
    }

    /// Whether the destination keeps just this. What is sent in full may not have been kept: it is not asked for again.
    fn is_held(&mut self, place: Place, mark: &Mark) -> bool {
        let Some(held) = self.held.get_mut(place.block) else { return false };
        let held = &mut held[place.page as usize];
        let ours = u64::from_le_bytes(*mark.first_chunk().expect("a mark has 16 bytes"));
        let same = ours != 0 && *held == ours;
        if !same {
            *held = 0;
        }
        same
    }

    /// Where this page lies on the destination's disks, if one more may be referred to.
    fn refer(&mut self, content: &PageBytes, wire: &mut Wire) -> Option<disks::Spot> {
        let referring = self.referring.as_mut().filter(|referring| referring.is_on())?;
        if referring.lacks(PAGE_SIZE) {
            wire.progress.crowded_pages += 1;
            return None;
        }
        let then = self.meter.now();
        let found = referring.find(content);
        self.meter.stages.disks += self.meter.since(then);
        found
    }

    /// How its bytes are to lie, if not as they do.
    fn shuffle(&mut self, content: &PageBytes) -> Option<(Word, PageBytes)> {
        let shuffler = self.shuffler.as_ref()?;
        let then = self.meter.now();
        let best = shuffler.best(content);
        self.meter.stages.shuffle += self.meter.since(then);
        best
    }

    fn close_run(&mut self, wire: &mut Wire) {
        match (self.run.take(), &mut self.referring) {
            (Some((format::DISK, length)), Some(referring)) => {
                let before = wire.ops.len();
                referring.close(wire.progress.wire_bytes, &mut wire.ops);
                wire.progress.disk_bytes += 1 + (wire.ops.len() - before) as u64;
                wire.unsent += length;
            }
            (Some((_, length)), _) => format::put(&mut wire.ops, length),
            (None, _) => {}
        }
    }
}

fn hash(key: &PageKey, content: &PageBytes) -> Mark {
    let hash = blake3::keyed_hash(&key.0, content);
    *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
}

/// What lies between operations and the wire: zstd, and the digest of what the other end will make of them.
struct Wire {
    packing: Packing,
    /// Operations on their way into zstd. At most [`PIECE`] and one operation.
    ops: Vec<u8>,
    /// The rebuilt stream on its way into the digest. At most [`PIECE`] and one record.
    rebuilt: Vec<u8>,
    hasher: blake3::Hasher,
    /// Length of the rebuilt stream at the last digest.
    checked: u64,
    /// Pages that were referred to since the last flush.
    unsent: u64,
    meter: Meter,
    progress: Progress,
}

impl Wire {
    fn new(config: &Config) -> Result<Self, StreamError> {
        Ok(Self {
            packing: Packing::new(config)?,
            ops: Vec::with_capacity(PIECE + format::MAX_VERBATIM),
            rebuilt: Vec::with_capacity(PIECE + format::MAX_VERBATIM),
            hasher: blake3::Hasher::new(),
            checked: 0,
            unsent: 0,
            meter: Meter { clock: config.clock, ..Meter::default() },
            progress: Progress::default(),
        })
    }

    fn verbatim(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.progress.other_bytes += bytes.len() as u64;
        for piece in bytes.chunks(format::MAX_VERBATIM) {
            self.ops.push(format::VERBATIM);
            format::put(&mut self.ops, piece.len() as u64);
            self.ops.extend_from_slice(piece);
            self.rebuilt.extend_from_slice(piece);
            self.drain(out)?;
        }
        Ok(())
    }

    /// Passes on what has gathered, if it is enough.
    fn drain(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        if self.rebuilt.len() >= PIECE {
            self.hash();
        }
        if self.ops.len() >= PIECE { self.pack(After::Some, out) } else { Ok(()) }
    }

    fn hash(&mut self) {
        let then = self.meter.now();
        self.hasher.update(&self.rebuilt);
        self.meter.stages.digest += self.meter.since(then);
        self.progress.rebuilt_bytes += self.rebuilt.len() as u64;
        self.rebuilt.clear();
    }

    fn pack(&mut self, after: After, out: &mut Vec<u8>) -> Result<(), StreamError> {
        let then = self.meter.now();
        let result = self.packing.pack(&mut self.ops, after, out);
        self.meter.stages.zstd += self.meter.since(then);
        result
    }

    fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.unsent = 0;
        self.hash();
        let unchecked = self.progress.rebuilt_bytes - self.checked;
        if unchecked >= CHECK_EVERY || (self.progress.ram_ended && unchecked > 0) {
            self.checked = self.progress.rebuilt_bytes;
            self.ops.push(format::CHECK);
            self.ops.extend_from_slice(self.hasher.finalize().as_bytes());
        }
        self.pack(After::All, out)
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Result<[u8; format::DIGEST], StreamError> {
        self.hash();
        let digest = *self.hasher.finalize().as_bytes();
        self.ops.push(format::END);
        format::put(&mut self.ops, self.progress.rebuilt_bytes);
        self.ops.extend_from_slice(&digest);
        self.pack(After::Frame, out)?;
        Ok(digest)
    }
}
