//! The talk before the first request: which export, and how replies look.

use crate::proto::*;
use crate::server::{Export, ProtocolError};
use bytes::{Buf, BufMut, BytesMut};

/// What the handshake has come to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agreed {
    /// Replies come in chunks.
    pub structured: bool,
    /// The export that the client may ask for block status: contexts are chosen for one by name.
    pub allocation: Option<usize>,
}

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The client's flags are expected.
    Flags,
    /// An option's header is expected.
    Option,
    /// So many bytes of an option that is too long are read past, and then it is declined.
    Skip { option: u32, left: u32 },
}

/// Whether what is said is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    /// No, and it will not be.
    Never,
    /// Not yet; until it is, nothing is served, and nothing told.
    Required,
    /// It is.
    On,
}

/// The handshake's machine.
#[derive(Debug)]
pub(crate) struct Handshake {
    stage: Stage,
    no_zeroes: bool,
    tls: Tls,
    pub agreed: Agreed,
}

/// What a step of the handshake led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// More input is needed.
    More,
    /// Requests for this export follow.
    Go(usize),
    /// The client is done.
    Abort,
    /// The client begins TLS, now.
    StartTls,
}

impl Handshake {
    /// Begins it: the greeting goes to `out`.
    pub fn new(out: &mut BytesMut) -> Self {
        out.put_u64(NBDMAGIC);
        out.put_u64(IHAVEOPT);
        out.put_u16(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        Self { stage: Stage::Flags, no_zeroes: false, tls: Tls::Never, agreed: Agreed::default() }
    }

    /// Serves nothing before the client has begun TLS.
    pub fn require_tls(&mut self) {
        self.tls = Tls::Required;
    }

    /// What is said from now on is encrypted. What was agreed before it was is void.
    pub fn tls_started(&mut self) {
        self.tls = Tls::On;
        self.agreed = Agreed::default();
    }

    /// Takes what there is of `input`.
    pub fn advance(
        &mut self,
        input: &mut BytesMut,
        exports: &[Export],
        out: &mut BytesMut,
    ) -> Result<Step, ProtocolError> {
        loop {
            if out.len() >= MAX_HELD {
                return Ok(Step::More);
            }
            match self.stage {
                Stage::Flags => {
                    if input.len() < 4 {
                        return Ok(Step::More);
                    }
                    let flags = input.get_u32();
                    if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
                        return Err(ProtocolError::Handshake("the client's flags are unknown"));
                    }
                    self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
                    self.stage = Stage::Option;
                }
                Stage::Skip { option, left } => {
                    let now = left.min(u32::try_from(input.len()).unwrap_or(u32::MAX));
                    input.advance(now as usize);
                    if now < left {
                        self.stage = Stage::Skip { option, left: left - now };
                        return Ok(Step::More);
                    }
                    reply(out, option, REP_ERR_TOO_BIG, b"the option is too long");
                    self.stage = Stage::Option;
                }
                Stage::Option => {
                    if input.len() < 16 {
                        return Ok(Step::More);
                    }
                    let mut header = &input[..16];
                    if header.get_u64() != IHAVEOPT {
                        return Err(ProtocolError::Handshake("an option does not begin with its mark"));
                    }
                    let (option, length) = (header.get_u32(), header.get_u32());
                    if length > MAX_OPTION {
                        input.advance(16);
                        self.stage = Stage::Skip { option, left: length };
                        continue;
                    }
                    if input.len() < 16 + length as usize {
                        return Ok(Step::More);
                    }
                    input.advance(16);
                    let data = input.split_to(length as usize);
                    match self.option(option, &data, exports, out)? {
                        Step::More => {}
                        step => return Ok(step),
                    }
                }
            }
        }
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &[Export],
        out: &mut BytesMut,
    ) -> Result<Step, ProtocolError> {
        match option {
            OPT_STARTTLS if self.tls == Tls::Required && data.is_empty() => {
                reply(out, option, REP_ACK, b"");
                return Ok(Step::StartTls);
            }
            OPT_STARTTLS if self.tls != Tls::Never => {
                reply(out, option, REP_ERR_INVALID, b"TLS is begun once, without data");
            }
            OPT_EXPORT_NAME if self.tls == Tls::Required => {
                return Err(ProtocolError::Handshake("the client wants to go on without TLS"));
            }
            OPT_ABORT => {
                reply(out, option, REP_ACK, b"");
                return Ok(Step::Abort);
            }
            _ if self.tls == Tls::Required => reply(out, option, REP_ERR_TLS_REQD, b"begin TLS first"),
            OPT_EXPORT_NAME => {
                // The old way in: there is no reply to say no with.
                let index =
                    find(exports, data).ok_or(ProtocolError::Handshake("the client wants an unknown export"))?;
                out.put_u64(exports[index].size);
                out.put_u16(flags(&exports[index], &self.agreed));
                if !self.no_zeroes {
                    out.put_bytes(0, 124);
                }
                return Ok(Step::Go(index));
            }
            OPT_LIST if data.is_empty() => {
                for export in exports {
                    let mut body = BytesMut::new();
                    body.put_u32(u32::try_from(export.name.len()).unwrap_or(u32::MAX));
                    body.put_slice(export.name.as_bytes());
                    reply(out, option, REP_SERVER, &body);
                }
                reply(out, option, REP_ACK, b"");
            }
            OPT_STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                reply(out, option, REP_ACK, b"");
            }
            OPT_INFO | OPT_GO => return Ok(self.info(option, data, exports, out)),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.contexts(option, data, exports, out),
            OPT_LIST | OPT_STRUCTURED_REPLY => reply(out, option, REP_ERR_INVALID, b"the option takes no data"),
            _ => reply(out, option, REP_ERR_UNSUP, b"not supported"),
        }
        Ok(Step::More)
    }

    fn info(&mut self, option: u32, mut data: &[u8], exports: &[Export], out: &mut BytesMut) -> Step {
        let Some((name, wanted)) = named(&mut data).and_then(|name| Some((name, numbers(&mut data)?))) else {
            reply(out, option, REP_ERR_INVALID, b"the option is not well formed");
            return Step::More;
        };
        let Some(index) = find(exports, name) else {
            reply(out, option, REP_ERR_UNKNOWN, b"there is no such export");
            return Step::More;
        };
        let export = &exports[index];
        let mut body = BytesMut::new();
        body.put_u16(INFO_EXPORT);
        body.put_u64(export.size);
        body.put_u16(flags(export, &self.agreed));
        reply(out, option, REP_INFO, &body);
        // Each once, however often it is asked for: an answer is longer than the question.
        for number in [INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE].into_iter().filter(|n| wanted.contains(n)) {
            let mut body = BytesMut::new();
            body.put_u16(number);
            match number {
                INFO_NAME | INFO_DESCRIPTION => body.put_slice(export.name.as_bytes()),
                _ => {
                    body.put_u32(1);
                    body.put_u32(export.preferred_block);
                    body.put_u32(MAX_REQUEST);
                }
            }
            reply(out, option, REP_INFO, &body);
        }
        reply(out, option, REP_ACK, b"");
        if option == OPT_GO { Step::Go(index) } else { Step::More }
    }

    fn contexts(&mut self, option: u32, mut data: &[u8], exports: &[Export], out: &mut BytesMut) {
        if option == OPT_SET_META_CONTEXT {
            // What was chosen before is void, whatever becomes of this.
            self.agreed.allocation = None;
        }
        if !self.agreed.structured {
            return reply(out, option, REP_ERR_INVALID, b"structured replies come first");
        }
        let Some((name, queries)) = named(&mut data).and_then(|name| Some((name, queries(&mut data)?))) else {
            return reply(out, option, REP_ERR_INVALID, b"the option is not well formed");
        };
        let Some(index) = find(exports, name) else {
            return reply(out, option, REP_ERR_UNKNOWN, b"there is no such export");
        };
        let all = option == OPT_LIST_META_CONTEXT && (queries.is_empty() || queries.contains(&&b"base:"[..]));
        let chosen = all || queries.contains(&ALLOCATION);
        if option == OPT_SET_META_CONTEXT {
            self.agreed.allocation = chosen.then_some(index);
        }
        if chosen {
            let mut body = BytesMut::new();
            body.put_u32(ALLOCATION_ID);
            body.put_slice(ALLOCATION);
            reply(out, option, REP_META_CONTEXT, &body);
        }
        reply(out, option, REP_ACK, b"");
    }
}

fn find(exports: &[Export], name: &[u8]) -> Option<usize> {
    // The empty name is the default: the only one, where there is only one.
    if name.is_empty() && exports.len() == 1 {
        return Some(0);
    }
    exports.iter().position(|e| e.name.as_bytes() == name)
}

fn flags(export: &Export, agreed: &Agreed) -> u16 {
    let mut flags = TRANSMIT_HAS_FLAGS
        | TRANSMIT_FLUSH
        | TRANSMIT_FUA
        | TRANSMIT_TRIM
        | TRANSMIT_WRITE_ZEROES
        | TRANSMIT_MULTI_CONN
        | TRANSMIT_CACHE
        | TRANSMIT_FAST_ZERO;
    if agreed.structured {
        flags |= TRANSMIT_DF;
    }
    if export.read_only {
        flags |= TRANSMIT_READ_ONLY;
    }
    flags
}

fn reply(out: &mut BytesMut, option: u32, kind: u32, data: &[u8]) {
    out.put_u64(OPTION_REPLY);
    out.put_u32(option);
    out.put_u32(kind);
    out.put_u32(u32::try_from(data.len()).unwrap_or(u32::MAX));
    out.put_slice(data);
}

/// A length, and so many bytes.
fn named<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    *data = rest;
    Some(name)
}

fn numbers(data: &mut &[u8]) -> Option<Vec<u16>> {
    let (count, rest) = data.split_first_chunk::<2>()?;
    (rest.len() == 2 * usize::from(u16::from_be_bytes(*count)))
        .then(|| rest.chunks_exact(2).map(|n| u16::from_be_bytes([n[0], n[1]])).collect())
}

fn queries<'a>(data: &mut &'a [u8]) -> Option<Vec<&'a [u8]>> {
    let (count, rest) = data.split_first_chunk::<4>()?;
    *data = rest;
    let mut found = vec![];
    for _ in 0..u32::from_be_bytes(*count) {
        found.push(named(data)?);
    }
    data.is_empty().then_some(found)
}
