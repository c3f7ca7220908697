//! The client's side of the talk before the first request.
//!
//! One option at a time, as the protocol asks: structured replies, then `base:allocation` for the export, then GO. A server that
//! declines the first two is used without them; one that does not know GO is older than QEMU 2.11, and refused.

use crate::client::{Blocks, ClientError, Remote};
use crate::proto::*;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Longest reply to an option that is believed: strings have 4096 bytes at the most.
const MAX_OPTION_REPLY: u32 = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Greeting,
    Structured,
    Context,
    Go,
}

#[derive(Debug)]
pub(crate) struct Handshake {
    stage: Stage,
    export: String,
    structured: bool,
    context: Option<u32>,
    size_and_flags: Option<(u64, u16)>,
    blocks: Blocks,
}

impl Handshake {
    pub fn new(export: &str) -> Self {
        Self {
            stage: Stage::Greeting,
            export: export.to_owned(),
            structured: false,
            context: None,
            size_and_flags: None,
            // What the protocol says of a server that says nothing.
            blocks: Blocks { minimum: 1, preferred: 4096, maximum: MAX_REQUEST },
        }
    }

    /// Takes what there is; gives the export once requests may follow.
    pub fn advance(
        &mut self,
        input: &mut BytesMut,
        out: &mut BytesMut,
        want_structured: bool,
    ) -> Result<Option<Remote>, ClientError> {
        loop {
            if self.stage == Stage::Greeting {
                if input.len() < 18 {
                    return Ok(None);
                }
                self.greeting(input, out)?;
                if want_structured {
                    self.ask(OPT_STRUCTURED_REPLY, &[], out);
                    self.stage = Stage::Structured;
                } else {
                    self.go(out);
                }
                continue;
            }
            let Some(mut header) = input.get(..20) else { return Ok(None) };
            if header.get_u64() != OPTION_REPLY || header.get_u32() != self.asked() {
                return Err(ClientError::OutOfStep);
            }
            let (kind, length) = (header.get_u32(), header.get_u32());
            if length > MAX_OPTION_REPLY {
                return Err(ClientError::Handshake("the reply to an option is too long"));
            }
            if input.len() < 20 + length as usize {
                return Ok(None);
            }
            input.advance(20);
            let data = input.split_to(length as usize).freeze();
            if let Some(remote) = self.reply(kind, data, out)? {
                return Ok(Some(remote));
            }
        }
    }

    fn greeting(&self, input: &mut BytesMut, out: &mut BytesMut) -> Result<(), ClientError> {
        if input.get_u64() != NBDMAGIC || input.get_u64() != IHAVEOPT {
            return Err(ClientError::NotNbd);
        }
        let flags = input.get_u16();
        if flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(ClientError::Handshake("it does not speak the fixed newstyle handshake"));
        }
        out.put_u32(u32::from(flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES)));
        Ok(())
    }

    fn asked(&self) -> u32 {
        match self.stage {
            Stage::Greeting | Stage::Structured => OPT_STRUCTURED_REPLY,
            Stage::Context => OPT_SET_META_CONTEXT,
            Stage::Go => OPT_GO,
        }
    }

    fn ask(&self, option: u32, data: &[u8], out: &mut BytesMut) {
        out.put_u64(IHAVEOPT);
        out.put_u32(option);
        put_string_length(out, data);
        out.put_slice(data);
    }

    fn context(&mut self, out: &mut BytesMut) {
        let mut data = BytesMut::new();
        put_string(&mut data, self.export.as_bytes());
        data.put_u32(1);
        put_string(&mut data, ALLOCATION);
        self.ask(OPT_SET_META_CONTEXT, &data, out);
        self.stage = Stage::Context;
    }

    fn go(&mut self, out: &mut BytesMut) {
        let mut data = BytesMut::new();
        put_string(&mut data, self.export.as_bytes());
        data.put_u16(1);
        data.put_u16(INFO_BLOCK_SIZE);
        self.ask(OPT_GO, &data, out);
        self.stage = Stage::Go;
    }

    fn reply(&mut self, kind: u32, data: Bytes, out: &mut BytesMut) -> Result<Option<Remote>, ClientError> {
        let refused = kind >> 31 == 1;
        match (self.stage, kind) {
            (Stage::Structured, REP_ACK) => {
                self.structured = true;
                self.context(out);
            }
            (Stage::Structured | Stage::Context, _) if refused => {
                self.context = None;
                self.go(out);
            }
            (Stage::Context, REP_META_CONTEXT) => {
                if data.get(4..) == Some(ALLOCATION) {
                    self.context = data.first_chunk().map(|id| u32::from_be_bytes(*id));
                }
            }
            (Stage::Context, REP_ACK) => self.go(out),
            (Stage::Go, REP_INFO) => self.info(data)?,
            (Stage::Go, REP_ACK) => {
                let (size, flags) =
                    self.size_and_flags.ok_or(ClientError::Handshake("it names no size for the export"))?;
                return Ok(Some(Remote {
                    size,
                    flags,
                    blocks: self.blocks,
                    structured: self.structured,
                    context: self.context,
                }));
            }
            (Stage::Go, _) if refused => {
                let said = data.get(..data.len().min(MAX_NAME)).unwrap_or_default();
                return Err(ClientError::Refused {
                    export: self.export.clone(),
                    code: kind & !(1 << 31),
                    said: String::from_utf8_lossy(said).into_owned(),
                });
            }
            _ => return Err(ClientError::Handshake("it answers an option with what is no answer to it")),
        }
        Ok(None)
    }

    fn info(&mut self, mut data: Bytes) -> Result<(), ClientError> {
        match (data.try_get_u16(), data.len()) {
            (Ok(INFO_EXPORT), 10) => {
                let size = data.get_u64();
                if i64::try_from(size).is_err() {
                    return Err(ClientError::Handshake("the export is larger than 2^63 bytes"));
                }
                self.size_and_flags = Some((size, data.get_u16()));
            }
            (Ok(INFO_BLOCK_SIZE), 12) => {
                let (minimum, preferred, maximum) = (data.get_u32(), data.get_u32(), data.get_u32());
                // Multiples of the minimum, so that the largest request is aligned as well.
                let most = maximum.min(MAX_REQUEST);
                if !minimum.is_power_of_two() || minimum > 65_536 || most < minimum {
                    return Err(ClientError::Handshake("its block sizes make no sense"));
                }
                self.blocks = Blocks { minimum, preferred: preferred.max(minimum), maximum: most / minimum * minimum };
            }
            (Ok(INFO_EXPORT | INFO_BLOCK_SIZE) | Err(_), _) => {
                return Err(ClientError::Handshake("it describes the export in the wrong length"));
            }
            // Names and what later versions of the protocol add.
            _ => {}
        }
        Ok(())
    }
}

fn put_string_length(out: &mut BytesMut, data: &[u8]) {
    out.put_u32(u32::try_from(data.len()).expect("an option of ours is a name and a few numbers"));
}

fn put_string(out: &mut BytesMut, data: &[u8]) {
    put_string_length(out, data);
    out.put_slice(data);
}
