//! Ways to make a recorded migration stream small, side by side: what moves use, and what they are measured against. For files, where
//! nobody waits and nobody asks back.
//!
//! | codec | what it is |
//! |---|---|
//! | [`Codec::Plain`] | QEMU's stream as it is |
//! | [`Codec::Zstd`] | zero pages counted, re-sends elided or as differences, zstd with a window of 256 MiB |
//! | [`Codec::Full`] | the same, and references to the disks that are given |
//! | [`Codec::CloudNet`] | CloudNet's quarter pages, caches and deltas ([`cloudnet`](self)), alone |
//! | [`Codec::CloudNetZstd`] | the same, zstd behind it |
//!
//! Whatever was encoded says by its first four bytes what it is, so that [`decoder`] need not be told. All of them give back what went in,
//! byte for byte, but those for which re-sends were elided ([`Resends::Elide`](crate::Resends)): they give back the same RAM.

pub use crate::cloudnet::Mechanisms;

use crate::cloudnet;
use crate::config::{Config, Limits, Reach};
use crate::decoder::{ENOUGH, WireError};
use crate::disks::{self, Blocks, Feedback, Finder};
use crate::format;
use crate::meter::{Clock, Stages};
use crate::packing::Beside;
use crate::stream::StreamError;
use std::fmt;
use std::io;
use std::str::FromStr;
use zstd::zstd_safe::{CParameter, DParameter};

/// What a decoder that cannot stop by itself is given at once. Of zstd's blocks none has less than 4 bytes, or means more than 128 KiB: it is 2 MiB
/// of operations at the most, and those are 140 MiB if each is a zero page that names its block by 255 letters.
const BITE: usize = 64;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// As it is.
    Plain,
    /// What moves do without disks.
    Zstd,
    /// What moves do.
    Full,
    /// CloudNet's.
    CloudNet,
    /// CloudNet's, and zstd.
    CloudNetZstd,
}

impl Codec {
    /// All, in the order of the table.
    pub const ALL: [Self; 5] = [Self::Plain, Self::Zstd, Self::Full, Self::CloudNet, Self::CloudNetZstd];

    /// As the command line has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Zstd => "zstd",
            Self::Full => "full",
            Self::CloudNet => "cloudnet",
            Self::CloudNetZstd => "cloudnet-zstd",
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Codec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|codec| codec.name() == name)
            .ok_or_else(|| format!("there is no codec `{name}`; there are {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// What a decoder of files says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Of Godwit's own stream.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Neither one nor the other.
    #[error(
        "a file that begins with {found:02x?} is no migration stream of QEMU's, nor one that `godwit stream encode` made"
    )]
    Unknown {
        /// Its first four bytes.
        found: [u8; 4],
    },
    /// Not as it was written.
    #[error("the file is damaged: {what}; encode it again")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
    /// It has no end.
    #[error("the file ends before the stream does: it was not written to its end")]
    Truncated,
    /// zstd refused.
    #[error("the file is damaged: zstd says {0}")]
    Unpack(#[source] io::Error),
    /// A block is not what it was.
    #[error(
        "group {group} of the references to disks leads to other contents than it did: give the disks as they were when it was encoded, in \
         the same order"
    )]
    Disks {
        /// The group's number.
        group: u64,
    },
}

/// Makes a stream small.
pub trait Encode {
    /// Takes bytes of QEMU's, cut anywhere; appends what is ready.
    ///
    /// # Errors
    /// When they are no stream, or one that cannot be carried.
    fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError>;

    /// QEMU's stream has ended. What was counted, by name.
    ///
    /// # Errors
    /// When it is no whole stream.
    fn finish(&mut self, out: &mut Vec<u8>) -> Result<Vec<(&'static str, u64)>, StreamError>;

    /// Where its time went, if it measures that.
    fn stages(&self) -> Option<Stages> {
        None
    }

    /// What zstd took on a thread of its own, if it has one ([`Config::beside`]).
    fn beside(&self) -> Option<Beside> {
        None
    }

    /// Bytes that zstd was given so far, if that is not all that was pushed.
    fn given(&self) -> Option<u64> {
        None
    }

    /// Goes on with another of zstd's levels ([`Levels`](crate::Levels)). Those that have none go on as they are.
    ///
    /// # Errors
    /// When memory is short.
    fn set_level(&mut self, _: i32, _: Reach, _: &mut Vec<u8>) -> Result<(), StreamError> {
        Ok(())
    }

    /// The guest is about to stand still ([`Encoder::hurry`](crate::Encoder::hurry)).
    fn hurry(&mut self) {}
}

/// Makes it QEMU's again.
pub trait Decode {
    /// Takes what an encoder gave, cut anywhere; appends QEMU's bytes: all of them, and a few bytes can mean terabytes.
    ///
    /// # Errors
    /// When it is damaged.
    fn push(&mut self, wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError>;

    /// As [`Decode::push`], but takes only as much off the front of `wire` as makes about [`ENOUGH`](crate::ENOUGH), or as its smallest piece does.
    /// Returns whether to call again (take `out` away before), even if `wire` is empty by now.
    ///
    /// # Errors
    /// When it is damaged.
    fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, CodecError> {
        let begin = out.len();
        while !wire.is_empty() && out.len() - begin < ENOUGH {
            let (bite, rest) = wire.split_at(BITE.min(wire.len()));
            *wire = rest;
            self.push(bite, out)?;
        }
        Ok(!wire.is_empty())
    }

    /// There is no more.
    ///
    /// # Errors
    /// When there should be.
    fn finish(&mut self) -> Result<(), CodecError>;

    /// Where its time went, if it measures that.
    fn stages(&self) -> Option<Stages> {
        None
    }
}

/// An encoder. `disks` are for [`Codec::Full`], which is [`Codec::Zstd`] without; `cache`: quarters of a page in CloudNet's cache.
///
/// # Errors
/// When zstd cannot begin.
pub fn encoder(
    codec: Codec,
    config: Config,
    disks: Option<Box<dyn Finder>>,
    cache: u32,
) -> Result<Box<dyn Encode>, StreamError> {
    Ok(match codec {
        Codec::Plain => Box::new(Plain { bytes: 0 }),
        Codec::CloudNet => Box::new(cloudnet::Encoder::new(cache, config.max_ram, None, Mechanisms::ALL)?),
        Codec::CloudNetZstd => {
            Box::new(cloudnet::Encoder::new(cache, config.max_ram, Some(config.level), Mechanisms::ALL)?)
        }
        Codec::Zstd | Codec::Full => {
            let encoder = crate::Encoder::new(config)?;
            Box::new(Ours(match disks.filter(|_| codec == Codec::Full) {
                Some(disks) => encoder.with_disks(disks),
                None => encoder,
            }))
        }
    })
}

/// An encoder that does a part of what CloudNet does, without zstd; `cache` as for [`encoder`].
///
/// # Errors
/// None that is known of.
pub fn cloudnet(mechanisms: Mechanisms, cache: u32, max_ram: u64) -> Result<Box<dyn Encode>, StreamError> {
    Ok(Box::new(cloudnet::Encoder::new(cache, max_ram, None, mechanisms)?))
}

/// A decoder of whatever the file says that it is; `clock`: to measure with.
#[must_use]
pub fn decoder(limits: Limits, disks: Option<Box<dyn Blocks>>, clock: Option<Clock>) -> Box<dyn Decode> {
    Box::new(Any { limits, disks, clock, magic: vec![], inner: None })
}

/// Window of 128 MiB: what `zstd --long` uses, of which others' codecs are compositions here.
const LONG_WINDOW_LOG: u32 = 27;

/// A frame with a long window.
pub(crate) fn long(level: i32) -> Result<zstd::stream::write::Encoder<'static, Vec<u8>>, StreamError> {
    let doing = |doing| move |source| StreamError::Zstd { doing, source };
    let mut zstd = zstd::stream::write::Encoder::new(vec![], level).map_err(doing("begin"))?;
    zstd.set_parameter(CParameter::WindowLog(LONG_WINDOW_LOG)).map_err(doing("take the window's size"))?;
    zstd.set_parameter(CParameter::EnableLongDistanceMatching(true)).map_err(doing("match over long distances"))?;
    Ok(zstd)
}

pub(crate) fn unpacker() -> io::Result<zstd::stream::write::Decoder<'static, Vec<u8>>> {
    let mut zstd = zstd::stream::write::Decoder::new(vec![])?;
    zstd.set_parameter(DParameter::WindowLogMax(LONG_WINDOW_LOG))?;
    Ok(zstd)
}

struct Plain {
    bytes: u64,
}

impl Encode for Plain {
    fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.bytes += input.len() as u64;
        out.extend_from_slice(input);
        Ok(())
    }

    fn finish(&mut self, _: &mut Vec<u8>) -> Result<Vec<(&'static str, u64)>, StreamError> {
        Ok(vec![])
    }
}

impl Decode for Plain {
    fn push(&mut self, wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
        out.extend_from_slice(wire);
        Ok(())
    }

    fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, CodecError> {
        Decode::push(self, std::mem::take(wire), out)?;
        Ok(false)
    }

    fn finish(&mut self) -> Result<(), CodecError> {
        Ok(())
    }
}

struct Ours(crate::Encoder);

impl Encode for Ours {
    fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
        // Nothing has to be kept for a decoder that asks: there is none.
        for piece in input.chunks(disks::RING / 2) {
            self.0.push(piece, out)?;
            self.0.forget_references();
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Result<Vec<(&'static str, u64)>, StreamError> {
        let p = self.0.finish(out)?.progress;
        Ok(vec![
            ("zero_pages", p.zero_pages),
            ("data_pages", p.data_pages),
            ("shuffled_pages", p.shuffled_pages),
            ("delta_pages", p.delta_pages),
            ("delta_bytes", p.delta_bytes),
            ("disk_pages", p.disk_pages),
            ("unchanged_pages", p.unchanged_pages),
            ("reference_bytes", p.disk_bytes),
            ("other_bytes", p.other_bytes),
            ("given_bytes", p.given_bytes),
        ])
    }

    fn stages(&self) -> Option<Stages> {
        Some(self.0.stages())
    }

    fn beside(&self) -> Option<Beside> {
        self.0.beside()
    }

    fn given(&self) -> Option<u64> {
        Some(self.0.progress().given_bytes)
    }

    fn set_level(&mut self, level: i32, reach: Reach, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.0.set_level(level, reach, out)
    }

    fn hurry(&mut self) {
        self.0.hurry();
    }
}

struct Theirs(crate::Decoder);

impl Decode for Theirs {
    fn push(&mut self, mut wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
        while self.push_some(&mut wire, out)? || !wire.is_empty() {}
        Ok(())
    }

    fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, CodecError> {
        let more = self.0.push_some(wire, out)?;
        while let Some(feedback) = self.0.feedback() {
            if let Feedback::Missing(group) = feedback {
                return Err(CodecError::Disks { group });
            }
        }
        Ok(more)
    }

    fn finish(&mut self) -> Result<(), CodecError> {
        if self.0.decoded().complete { Ok(()) } else { Err(CodecError::Truncated) }
    }

    fn stages(&self) -> Option<Stages> {
        Some(self.0.stages())
    }
}

/// Until four bytes have told what it is.
struct Any {
    limits: Limits,
    disks: Option<Box<dyn Blocks>>,
    clock: Option<Clock>,
    magic: Vec<u8>,
    inner: Option<Box<dyn Decode>>,
}

impl Decode for Any {
    fn push(&mut self, mut wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
        while self.push_some(&mut wire, out)? || !wire.is_empty() {}
        Ok(())
    }

    fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, CodecError> {
        if let Some(inner) = &mut self.inner {
            return inner.push_some(wire, out);
        }
        let (front, rest) = wire.split_at((4 - self.magic.len()).min(wire.len()));
        self.magic.extend_from_slice(front);
        *wire = rest;
        let Some(magic) = self.magic.first_chunk::<4>() else { return Ok(false) };
        let mut inner: Box<dyn Decode> = match magic {
            &cloudnet::MAGIC => Box::new(cloudnet::Decoder::new(self.limits.max_ram)),
            &format::MAGIC => {
                let decoder = crate::Decoder::new(self.limits)?;
                let decoder = match self.clock {
                    Some(clock) => decoder.with_clock(clock),
                    None => decoder,
                };
                let mut decoder = Theirs(match self.disks.take() {
                    Some(disks) => decoder.with_disks(disks),
                    None => decoder,
                });
                decoder.push(&format::MAGIC, out)?;
                Box::new(decoder)
            }
            b"QEVM" => {
                out.extend_from_slice(magic);
                Box::new(Plain { bytes: 0 })
            }
            found => return Err(CodecError::Unknown { found: *found }),
        };
        let pushed = inner.push_some(wire, out);
        self.inner = Some(inner);
        pushed
    }

    fn finish(&mut self) -> Result<(), CodecError> {
        self.inner.as_mut().ok_or(CodecError::Truncated)?.finish()
    }

    fn stages(&self) -> Option<Stages> {
        self.inner.as_ref()?.stages()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes much of anything.
    struct Glutton;

    impl Decode for Glutton {
        fn push(&mut self, wire: &[u8], out: &mut Vec<u8>) -> Result<(), CodecError> {
            assert!(wire.len() <= BITE, "{} bytes at once", wire.len());
            out.resize(out.len() + ENOUGH / 2, 0);
            Ok(())
        }

        fn finish(&mut self) -> Result<(), CodecError> {
            Ok(())
        }
    }

    #[test]
    fn what_a_decoder_makes_is_taken_away_before_it_makes_more() {
        let (wire, mut out) = (vec![0; 10 * BITE + 1], vec![]);
        let (mut rest, mut calls) = (&wire[..], 0);
        while Glutton.push_some(&mut rest, &mut out).unwrap() {
            assert_eq!(std::mem::take(&mut out).len(), ENOUGH);
            calls += 1;
        }
        assert_eq!((calls, rest.len(), out.len()), (5, 0, ENOUGH / 2));
    }

    #[test]
    fn a_stream_of_which_a_few_bytes_mean_much_comes_out_whole_and_by_pieces() {
        let head = b"QEVM\0\0\0\x03\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04";
        let end = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02";
        let pages = 3 * ENOUGH as u64 / 9;
        let size = pages * crate::PAGE_SIZE as u64;
        let mut raw = [&head[..], &(size | 4).to_be_bytes(), b"\x03ram", &size.to_be_bytes(), end].concat();
        raw.extend_from_slice(b"\x02\0\0\0\x02\0\0\0\0\0\0\0\x02\x03ram\0");
        for page in 1..pages {
            raw.extend_from_slice(&(page << 12 | 0x22).to_be_bytes());
            raw.push(0);
        }
        raw.extend_from_slice(end);
        raw.extend_from_slice(b"\x03\0\0\0\x02");
        raw.extend_from_slice(end);
        raw.push(0);
        let config = Config { resends: crate::Resends::Keep, ..Config::default() };
        let (mut encoder, mut wire) = (encoder(Codec::Zstd, config, None, 1).unwrap(), vec![]);
        encoder.push(&raw, &mut wire).unwrap();
        encoder.finish(&mut wire).unwrap();
        assert!(wire.len() < 4096, "{} bytes", wire.len());
        let (mut decoder, mut back) = (decoder(Limits::default(), None, None), vec![]);
        let (mut rest, mut more) = (&wire[..], true);
        while more || !rest.is_empty() {
            let mut out = vec![];
            more = decoder.push_some(&mut rest, &mut out).unwrap();
            assert!(out.len() <= ENOUGH + (68 << 10), "{} bytes at once", out.len());
            back.append(&mut out);
        }
        decoder.finish().unwrap();
        assert!(back == raw);
    }
}
