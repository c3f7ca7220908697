//! A namespace's tracked connections: taken out at one host, put in at another, so that a firewall that moves still knows
//! which connections it has let through.
//!
//! By netlink rather than by the `conntrack` program: it is two messages, a firewall's pause does not wait for a process and
//! its parser, and the program's list loses the TCP window scales, without which a connection with large windows breaks.
//!
//! What is kept of an entry: both tuples, the state and its timeout, TCP's state, window scales and flags, the mark and the
//! zone. Address translation is taken apart (the reply as it would be without it, and what is put in its place), because the
//! kernel takes a translation only as an order. What is not: counters, helpers and the connections that they expect, and the
//! exact TCP windows, which the kernel tells nobody; it takes them up again from the first packet of each side.

use crate::NetError;
use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use serde::{Deserialize, Deserializer, Serialize};
use std::io;

/// One connection, as the kernel's attributes; made by [`dump`], for [`load`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// The address family.
    family: u8,
    /// The attributes of the message that makes it anew; at most [`LONGEST_FLOW`] bytes.
    #[serde(deserialize_with = "short")]
    attributes: Vec<u8>,
}

impl Flow {
    /// How much is known of it, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.attributes.len()
    }
}

/// What somebody else says of one, refused where it is too long.
fn short<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let bytes = Vec::<u8>::deserialize(from)?;
    if bytes.len() > LONGEST_FLOW {
        let message = format!("a tracked connection of {} bytes: {LONGEST_FLOW} do", bytes.len());
        return Err(serde::de::Error::custom(message));
    }
    Ok(bytes)
}

/// A buffer for one read of a dump: the kernel fills at most 32 KiB at once.
const BUFFER: usize = 64 << 10;
/// The longest entry that is taken from the kernel or from somebody else: two tuples, translation and a dozen numbers need some 300 bytes.
const LONGEST_FLOW: usize = 1024;

const HEADER: usize = 16 + 4;
const CTNETLINK: u16 = 1 << 8;
const NEW: u16 = CTNETLINK;
const GET: u16 = CTNETLINK | 1;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NESTED: u16 = 0x8000;

// Attributes of a connection.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOCOL: u16 = 4;
const NAT_SOURCE: u16 = 6;
const TIMEOUT: u16 = 7;
const MARK: u16 = 8;
const NAT_DESTINATION: u16 = 13;
const ZONE: u16 = 18;

// Bits of its status: an answer was seen; it stays although tables are full; it is in the table; what is translated.
const CONFIRMED: u32 = 8;
const CARRIED: u32 = 2 | 4 | CONFIRMED;
const SOURCE_NAT: u32 = 16;
const DESTINATION_NAT: u32 = 32;

/// TCP's flags that say something without the windows: scaling, selective acknowledgements, who closes.
const TCP_FLAGS: u8 = 0x07;

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> NetError {
    move |source| NetError::Kernel { operation, object: "connection tracking".into(), source }
}

fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = vec![];
    while let [a, b, c, d, ..] = *bytes {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let Some(value) = bytes.get(4..length) else { break };
        found.push((u16::from_ne_bytes([c, d]) & !NESTED & !0x4000, value));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn put(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    // What is nested here is some hundred bytes.
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    out.extend(length.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

fn nested(kind: u16, parts: &[(u16, Vec<u8>)]) -> (u16, Vec<u8>) {
    let mut inner = vec![];
    for (kind, value) in parts {
        put(&mut inner, *kind, value);
    }
    (kind | NESTED, inner)
}

fn of<'a>(all: &[(u16, &'a [u8])], kind: u16) -> Option<&'a [u8]> {
    all.iter().find(|(k, _)| *k == kind).map(|(_, value)| *value)
}

/// Addresses and ports of one direction.
struct Tuple<'a> {
    v6: bool,
    source: &'a [u8],
    destination: &'a [u8],
    protocol: Vec<(u16, &'a [u8])>,
}

impl<'a> Tuple<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let parts = attributes(bytes);
        let ip = attributes(of(&parts, 1)?);
        let v6 = of(&ip, 3).is_some();
        let (source, destination) = if v6 { (of(&ip, 3)?, of(&ip, 4)?) } else { (of(&ip, 1)?, of(&ip, 2)?) };
        Some(Self { v6, source, destination, protocol: attributes(of(&parts, 2)?) })
    }

    /// The same connection as the other side would speak on it, were nothing translated.
    fn reversed(&self) -> Vec<u8> {
        let kinds = if self.v6 { (3, 4) } else { (1, 2) };
        let ip = nested(1, &[(kinds.0, self.destination.to_vec()), (kinds.1, self.source.to_vec())]);
        let mut protocol: Vec<(u16, Vec<u8>)> = self
            .protocol
            .iter()
            .map(|(kind, value)| match kind {
                2 => (3, value.to_vec()),
                3 => (2, value.to_vec()),
                // An echo's answer; in ICMPv6 (8, 9: type and code) as well.
                5 | 8 => (
                    *kind,
                    value
                        .iter()
                        .map(|t| match t {
                            8 => 0,
                            0 => 8,
                            128 => 129,
                            129 => 128,
                            t => *t,
                        })
                        .collect(),
                ),
                _ => (*kind, value.to_vec()),
            })
            .collect();
        protocol.sort_unstable_by_key(|(kind, _)| *kind);
        let mut out = vec![];
        for (kind, value) in [ip, nested(2, &protocol)] {
            put(&mut out, kind, &value);
        }
        out
    }

    fn port(&self, kind: u16) -> Option<&'a [u8]> {
        of(&self.protocol, kind)
    }
}

/// An order to translate to this address and port.
fn translation(v6: bool, address: &[u8], port: Option<&[u8]>) -> Vec<u8> {
    let kinds: (u16, u16) = if v6 { (4, 5) } else { (1, 2) };
    let mut parts = vec![(kinds.0, address.to_vec()), (kinds.1, address.to_vec())];
    if let Some(port) = port {
        parts.push(nested(3, &[(1, port.to_vec()), (2, port.to_vec())]));
    }
    nested(0, &parts).1
}

/// TCP's part, with its flags as an order: the kernel says them without saying which of them it means.
fn protocol(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![];
    for (kind, value) in attributes(bytes) {
        if kind != 1 {
            put(&mut out, kind | NESTED, value);
            continue;
        }
        let tcp: Vec<(u16, Vec<u8>)> = attributes(value)
            .into_iter()
            .map(|(kind, value)| match (kind, value) {
                (4 | 5, [flags, _]) => (kind, vec![flags & TCP_FLAGS, TCP_FLAGS]),
                _ => (kind, value.to_vec()),
            })
            .collect();
        let (kind, value) = nested(1, &tcp);
        put(&mut out, kind, &value);
    }
    out
}

/// What makes an entry anew. None for one that is not understood, is too long, or is not in the table yet.
fn portable(family: u8, entry: &[u8]) -> Option<Flow> {
    let all = attributes(entry);
    let status = u32::from_be_bytes(of(&all, STATUS)?.try_into().ok()?);
    let (original, reply) = (of(&all, ORIGINAL)?, of(&all, REPLY)?);
    let timeout = of(&all, TIMEOUT)?;
    let mut out = vec![];
    put(&mut out, ORIGINAL | NESTED, original);
    let translated = status & (SOURCE_NAT | DESTINATION_NAT);
    if translated == 0 {
        put(&mut out, REPLY | NESTED, reply);
    } else {
        put(&mut out, REPLY | NESTED, &Tuple::read(original)?.reversed());
        let reply = Tuple::read(reply)?;
        if translated & SOURCE_NAT != 0 {
            put(&mut out, NAT_SOURCE | NESTED, &translation(reply.v6, reply.destination, reply.port(3)));
        }
        if translated & DESTINATION_NAT != 0 {
            put(&mut out, NAT_DESTINATION | NESTED, &translation(reply.v6, reply.source, reply.port(2)));
        }
    }
    put(&mut out, STATUS, &((status & CARRIED) | CONFIRMED).to_be_bytes());
    put(&mut out, TIMEOUT, timeout);
    if let Some(info) = of(&all, PROTOCOL) {
        put(&mut out, PROTOCOL | NESTED, &protocol(info));
    }
    for kind in [MARK, ZONE] {
        if let Some(value) = of(&all, kind) {
            put(&mut out, kind, value);
        }
    }
    (out.len() <= LONGEST_FLOW).then_some(Flow { family, attributes: out })
}

fn message(kind: u16, flags: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + attributes.len()).unwrap_or(u32::MAX);
    let mut out = Vec::with_capacity(HEADER + attributes.len());
    out.extend(length.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend((flags | REQUEST).to_ne_bytes());
    // Sequence and port: one question at a time on a socket of its own.
    out.extend([0; 8]);
    // Family, version 0, no resource.
    out.extend([family, 0, 0, 0]);
    out.extend(attributes);
    out
}

/// Splits what was read into messages: kind, and what follows the netlink header.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = vec![];
    while bytes.len() >= 16 {
        let length = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let Some(body) = bytes.get(16..length) else { break };
        found.push((u16::from_ne_bytes([bytes[4], bytes[5]]), body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn refused(body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(body.get(..4)?.try_into().ok()?);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// All connections that the calling thread's namespace tracks. Blocks for as long as the kernel needs.
///
/// # Errors
/// [`NetError::Kernel`].
pub fn dump() -> Result<Vec<Flow>, NetError> {
    let work = || {
        let socket = open()?;
        socket.send(&message(GET, DUMP, 0, &[]), 0)?;
        let mut found = vec![];
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            socket.recv(&mut buffer, 0)?;
            for (kind, body) in messages(&buffer) {
                match kind {
                    NLMSG_DONE => return Ok(found),
                    NLMSG_ERROR => return Err(refused(body).unwrap_or_else(|| io::Error::other("an empty answer"))),
                    NEW if body.len() >= 4 => found.extend(portable(body[0], &body[4..])),
                    _ => {}
                }
            }
        }
    };
    work().map_err(failed("list"))
}

/// Puts connections into the calling thread's namespace; gives how many it took. One that is there already stays as it is, and
/// one that this kernel does not understand is left out: its peers have to connect anew, as all would have had to.
///
/// # Errors
/// [`NetError::Kernel`] when none can be put in at all: rights, or no connection tracking.
pub fn load(flows: &[Flow]) -> Result<usize, NetError> {
    let work = || {
        let socket = open()?;
        let mut taken = 0;
        let mut buffer = Vec::with_capacity(BUFFER);
        for flow in flows {
            socket.send(&message(NEW, CREATE | ACK, flow.family, &flow.attributes), 0)?;
            buffer.clear();
            socket.recv(&mut buffer, 0)?;
            let error = messages(&buffer).into_iter().find(|m| m.0 == NLMSG_ERROR).and_then(|m| refused(m.1));
            match error {
                None => taken += 1,
                Some(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => {
                    return Err(error);
                }
                Some(error) => tracing::debug!(%error, "a tracked connection is left out"),
            }
        }
        Ok(taken)
    };
    work().map_err(failed("put entries into"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(source: [u8; 4], destination: [u8; 4], ports: (u16, u16)) -> Vec<u8> {
        let ip = nested(1, &[(1, source.to_vec()), (2, destination.to_vec())]);
        let ports = [(1, vec![6]), (2, ports.0.to_be_bytes().to_vec()), (3, ports.1.to_be_bytes().to_vec())];
        let mut out = vec![];
        for (kind, value) in [ip, nested(2, &ports)] {
            put(&mut out, kind, &value);
        }
        out
    }

    #[test]
    fn a_translated_connection_is_said_as_an_order_to_translate() {
        let (inside, server, outside) = ([10, 0, 0, 1], [192, 0, 2, 9], [198, 51, 100, 1]);
        let mut entry = vec![];
        put(&mut entry, ORIGINAL | NESTED, &tuple(inside, server, (4000, 80)));
        put(&mut entry, REPLY | NESTED, &tuple(server, outside, (80, 61000)));
        put(&mut entry, STATUS, &(CARRIED | SOURCE_NAT | 0x100).to_be_bytes());
        put(&mut entry, TIMEOUT, &100_u32.to_be_bytes());
        // A number that the kernel does not take back.
        put(&mut entry, 12, &7_u32.to_be_bytes());
        let flow = portable(2, &entry).expect("it is understood");
        let all = attributes(&flow.attributes);
        let kinds: Vec<u16> = all.iter().map(|a| a.0).collect();
        assert_eq!(kinds, [ORIGINAL, REPLY, NAT_SOURCE, STATUS, TIMEOUT]);
        assert_eq!(of(&all, REPLY).expect("a reply"), tuple(server, inside, (80, 4000)));
        assert_eq!(of(&all, STATUS).expect("a status"), CARRIED.to_be_bytes());
        let order = attributes(of(&all, NAT_SOURCE).expect("an order"));
        assert_eq!((of(&order, 1), of(&order, 2)), (Some(&outside[..]), Some(&outside[..])));
        let ports = attributes(of(&order, 3).expect("ports"));
        assert_eq!(of(&ports, 1), Some(&61000_u16.to_be_bytes()[..]));
    }

    #[test]
    fn what_is_too_long_for_an_entry_is_not_taken_from_anybody() {
        use serde::de::value::{Error, SeqDeserializer};
        let said = |length: usize| short(SeqDeserializer::<_, Error>::new(vec![0_u8; length].into_iter()));
        assert_eq!(said(LONGEST_FLOW).map(|bytes| bytes.len()), Ok(LONGEST_FLOW));
        let refused = said(LONGEST_FLOW + 1).expect_err("it is too long").to_string();
        assert!(refused.contains("1025 bytes"), "{refused}");
        // The kernel's own, with a mark that is longer than any.
        let mut entry = vec![];
        for kind in [ORIGINAL, REPLY] {
            put(&mut entry, kind | NESTED, &tuple([10, 0, 0, 1], [10, 0, 0, 2], (4000, 80)));
        }
        put(&mut entry, STATUS, &CARRIED.to_be_bytes());
        put(&mut entry, TIMEOUT, &100_u32.to_be_bytes());
        assert!(portable(2, &entry).is_some());
        put(&mut entry, MARK, &[0; LONGEST_FLOW]);
        assert_eq!(portable(2, &entry), None);
    }

    #[test]
    fn bytes_that_are_no_entry_are_passed_over() {
        for bytes in [&[][..], &[0; 4], &[3, 0, 1, 0], &[255; 40], &[8, 0, 1, 0, 1, 2]] {
            assert_eq!(portable(2, bytes), None);
        }
    }
}
