//! How a disk leaves this host with its VM: first (a mirror), or behind it (post-copy: the destination is told what it has to hold,
//! and fetches it).

use anyhow::Result;
use godwit_api::progress::DiskProgress;
use godwit_units::{BitRate, BlockIndex, Bytes};
use godwit_volume::mirror::Place;
use godwit_volume::{BlockSet, Replica, fet, mirror};
use std::ops::Range;
use std::time::Duration;

/// Blocks that may have to be said when the guest stands still: some 80 KiB of words.
const SHORT: Bytes = Bytes::mib(16);

/// A source's machine.
#[derive(Debug)]
pub enum Leaving {
    /// The blocks go before the VM.
    Mirror(Box<mirror::Source>),
    /// They follow it.
    PostCopy(Box<fet::Source>),
}

/// What a guest's write makes of it.
#[derive(Debug, Default)]
pub struct Mirrored {
    /// To be sent at once, in order.
    pub messages: Vec<Vec<u8>>,
    /// The write is not answered before this is, if anything.
    pub until: Option<Place>,
}

impl Leaving {
    /// A message came from the destination.
    ///
    /// # Errors
    /// When it makes no sense, or the replica cannot be read: the attempt is over.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<()> {
        match self {
            Self::Mirror(source) => source.handle(message, replica)?,
            Self::PostCopy(source) => source.handle(message, replica)?,
        }
        Ok(())
    }

    /// Looks at the clock: whether writes that waited for too long were let go.
    pub fn tick(&mut self, now: Duration) -> bool {
        match self {
            Self::Mirror(source) => source.tick(now),
            Self::PostCopy(_) => false,
        }
    }

    /// What the link carries, all of the move together, and its round trip without a queue.
    pub fn path_is(&mut self, rate: BitRate, round_trip: Duration) {
        if let Self::Mirror(source) = self {
            source.path_is(rate, round_trip);
        }
    }

    /// The next messages; none: nothing now.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn poll(&mut self, replica: &Replica) -> Result<Vec<Vec<u8>>> {
        Ok(match self {
            Self::Mirror(source) => source.poll(replica)?,
            Self::PostCopy(source) => source.poll(replica)?,
        })
    }

    /// Whether it compares what came, a window of the table with each [`Leaving::poll`], between which the guest's writes are let through.
    #[must_use]
    pub fn is_comparing(&self) -> bool {
        match self {
            Self::Mirror(source) => source.is_comparing(),
            Self::PostCopy(source) => source.is_comparing(),
        }
    }

    /// Whether the destination has, or knows, everything, durably.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match self {
            Self::Mirror(source) => source.state() == mirror::State::Complete,
            Self::PostCopy(source) => source.state() == fet::State::Complete,
        }
    }

    /// Whether nothing is left but what the guest is writing now: the guest may stop.
    #[must_use]
    pub fn is_level(&self) -> bool {
        match self {
            Self::Mirror(source) => source.is_synchronous(),
            Self::PostCopy(source) => source.is_level(),
        }
    }

    /// Whether little is left that a guest which stands would wait for: what is said of blocks is short, blocks are not.
    #[must_use]
    pub fn may_stop(&self) -> bool {
        match self {
            Self::Mirror(source) => source.is_synchronous(),
            Self::PostCopy(source) => source.state() == fet::State::Telling && source.unsaid() <= SHORT,
        }
    }

    /// How many bytes are to go before a guest that stands goes on, at the most: they may be packed.
    #[must_use]
    pub fn owes(&self) -> u64 {
        match self {
            Self::Mirror(source) => source.progress().remaining.0,
            // Words.
            Self::PostCopy(source) => source.unsaid().0 / 128,
        }
    }

    /// How much has arrived; another number says that something did.
    #[must_use]
    pub const fn acknowledged(&self) -> u64 {
        match self {
            Self::Mirror(source) => source.acknowledged(),
            Self::PostCopy(_) => 0,
        }
    }

    /// The guest has written these blocks.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn guest_wrote(&mut self, blocks: Range<u64>, now: Duration, replica: &Replica) -> Result<Mirrored> {
        match self {
            Self::Mirror(source) => Ok(match source.guest_wrote(blocks, now, replica)? {
                Some(mirror::Mirrored { until, messages }) => {
                    Mirrored { messages, until: Some(until).filter(|until| !source.is_answered(*until)) }
                }
                None => Mirrored::default(),
            }),
            Self::PostCopy(source) => {
                source.guest_wrote(blocks, replica);
                Ok(Mirrored::default())
            }
        }
    }

    /// These blocks have come here from another site: a volume that moves on before all of it is here.
    pub fn arrived(&mut self, blocks: &BlockSet, replica: &Replica) {
        if let Self::PostCopy(source) = self {
            source.arrived(blocks, replica);
        }
    }

    /// Whether a write need not wait any more.
    #[must_use]
    pub fn is_answered(&self, write: Place) -> bool {
        match self {
            Self::Mirror(source) => source.is_answered(write),
            Self::PostCopy(_) => true,
        }
    }

    /// Lets go of all writes that wait for the other side.
    pub fn let_go(&mut self) {
        if let Self::Mirror(source) = self {
            source.let_go();
        }
    }

    /// The guest stands still and the replica is frozen.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn stop(&mut self, replica: &Replica) -> Result<(), fet::FetError> {
        match self {
            Self::Mirror(source) => {
                source.stop();
                Ok(())
            }
            Self::PostCopy(source) => source.stop(replica),
        }
    }

    /// Blocks that the target found by name, and that did not travel.
    #[must_use]
    pub fn named(&self) -> Bytes {
        match self {
            Self::Mirror(source) => source.progress().named,
            Self::PostCopy(_) => Bytes::ZERO,
        }
    }

    /// Whether the destination may have what is in this block, as far as is known here: what goes first it has soon.
    #[must_use]
    pub fn is_there(&self, block: BlockIndex) -> bool {
        match self {
            Self::Mirror(_) => true,
            Self::PostCopy(source) => source.is_there(block),
        }
    }

    /// How it stands.
    #[must_use]
    pub fn progress(&self) -> DiskProgress {
        match self {
            Self::Mirror(source) => {
                let p = source.progress();
                DiskProgress {
                    total: p.total,
                    copied: p.copied,
                    remaining: p.remaining,
                    synchronous: source.is_synchronous(),
                    held: p.held,
                    ..DiskProgress::default()
                }
            }
            Self::PostCopy(source) => {
                let figures = source.figures();
                // Nothing of it has to go before the VM may.
                DiskProgress {
                    total: figures.differing,
                    remaining: source.unsaid(),
                    synchronous: source.is_level(),
                    held: figures.alike,
                    absent: figures.differing,
                    ..DiskProgress::default()
                }
            }
        }
    }
}
