//! Client against server, byte by byte as a network might cut it, compared with a model of the disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use godwit_nbd::{
    Client, Command, Cookie, Errno, Event, Export, Extent, Filled, MAX_IN_FLIGHT, NotSent, Piece, Reply, Request,
    Server,
};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

const SIZE: u64 = 1 << 16;
const BLOCK: u64 = 512;

fn server() -> Server {
    Server::new(vec![Export { name: "disk".into(), size: SIZE, preferred_block: 4096, read_only: false }])
}

/// The disk, and by blocks what is a hole.
struct Disk(Vec<u8>);

impl Disk {
    fn pieces(&self, offset: u64, length: u32) -> Vec<Piece> {
        let (mut at, end) = (offset as usize, (offset + u64::from(length)) as usize);
        let mut out = vec![];
        while at < end {
            let next = ((at as u64 / BLOCK + 1) * BLOCK).min(end as u64) as usize;
            let part = &self.0[at..next];
            out.push(if part.iter().all(|b| *b == 0) {
                Piece::Hole((next - at) as u32)
            } else {
                Piece::Data(Bytes::copy_from_slice(part))
            });
            at = next;
        }
        out
    }

    fn perform(&mut self, command: &Command) -> Reply {
        match command {
            Command::Read { offset, length } => Reply::Data(self.pieces(*offset, *length)),
            Command::Write { offset, data, .. } => {
                self.0[*offset as usize..][..data.len()].copy_from_slice(data);
                Reply::Done
            }
            Command::WriteZeroes { fast: true, .. } => Reply::Error(Errno::NotSupported),
            Command::Trim { offset, length, .. } | Command::WriteZeroes { offset, length, .. } => {
                self.0[*offset as usize..][..*length as usize].fill(0);
                Reply::Done
            }
            Command::BlockStatus { offset, length, .. } => {
                let extents = self.pieces(*offset, *length).into_iter().map(|p| match p {
                    Piece::Data(data) => Extent { length: data.len() as u32, hole: false },
                    Piece::Hole(length) => Extent { length, hole: true },
                });
                Reply::Status(extents.collect())
            }
            Command::Flush => Reply::Done,
            Command::Cache { .. } => Reply::Error(Errno::Shutdown),
        }
    }
}

/// The same whatever the cuts between pieces.
#[derive(Debug, PartialEq)]
enum Plain {
    Other(Reply),
    Data(Vec<u8>),
    Status(Vec<bool>),
}

fn plain(reply: Reply, one: bool) -> Plain {
    match reply {
        Reply::Data(pieces) => Plain::Data(
            pieces
                .into_iter()
                .flat_map(|p| match p {
                    Piece::Data(data) => data.to_vec(),
                    Piece::Hole(length) => vec![0; length as usize],
                })
                .collect(),
        ),
        Reply::Status(extents) => {
            let mut all: Vec<bool> =
                extents.iter().flat_map(|e| std::iter::repeat_n(e.hole, e.length as usize)).collect();
            let first = all[0];
            if one {
                all.truncate(all.iter().position(|hole| *hole != first).unwrap_or(all.len()));
            }
            Plain::Status(all)
        }
        other => Plain::Other(other),
    }
}

fn commands() -> impl Strategy<Value = Command> {
    let range = || (0..SIZE).prop_flat_map(|o| (Just(o), 1..=(SIZE - o).min(9000) as u32));
    prop_oneof![
        range().prop_map(|(offset, length)| Command::Read { offset, length }),
        (range(), any::<u8>(), any::<bool>()).prop_map(|((offset, length), byte, fua)| Command::Write {
            offset,
            data: vec![byte; length as usize].into(),
            fua
        }),
        Just(Command::Flush),
        (range(), any::<bool>()).prop_map(|((offset, length), fua)| Command::Trim { offset, length, fua }),
        (range(), any::<[bool; 3]>()).prop_map(|((offset, length), [fua, no_hole, fast])| Command::WriteZeroes {
            offset,
            length,
            fua,
            no_hole,
            fast
        }),
        range().prop_map(|(offset, length)| Command::Cache { offset, length }),
        (range(), any::<bool>()).prop_map(|((offset, length), one)| Command::BlockStatus { offset, length, one }),
    ]
}

/// Numbers that a seed gives, for cuts and orders.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) as usize % n
    }
}

/// Everything that a client and a server do to each other, with what each sent.
struct Talk {
    client: Client,
    server: Server,
    dice: Dice,
    disk: Disk,
    /// Taken by the server and performed, but not answered.
    performed: Vec<(Cookie, Reply)>,
    /// What the server performed, in its order.
    order: VecDeque<Command>,
    sent: [Vec<u8>; 2],
}

impl Talk {
    fn new(client: Client, seed: u64) -> Self {
        Self {
            client,
            server: server(),
            dice: Dice(seed | 1),
            disk: Disk(vec![0; SIZE as usize]),
            performed: vec![],
            order: VecDeque::new(),
            sent: [vec![], vec![]],
        }
    }

    /// One of: a piece travels, the server takes, the server answers one of those it has.
    fn step(&mut self) -> Option<Event> {
        match self.dice.below(4) {
            0 if !self.client.transmit().is_empty() => {
                let n = 1 + self.dice.below(self.client.transmit().len());
                let piece = self.client.transmit().split_to(n);
                self.sent[0].extend_from_slice(&piece);
                self.server.receive(&piece);
            }
            1 if !self.server.transmit().is_empty() => {
                let n = 1 + self.dice.below(self.server.transmit().len());
                let piece = self.server.transmit().split_to(n);
                self.sent[1].extend_from_slice(&piece);
                self.client.receive(&piece);
            }
            2 => {
                if let Some(Request { cookie, command }) = self.server.poll_request().unwrap() {
                    self.performed.push((cookie, self.disk.perform(&command)));
                    self.order.push_back(command);
                }
            }
            _ if !self.performed.is_empty() => {
                let n = self.dice.below(self.performed.len());
                let (cookie, reply) = self.performed.swap_remove(n);
                match plain(reply.clone(), false) {
                    Plain::Data(contents) if self.dice.below(2) == 0 => self.put(cookie, &contents),
                    _ => self.server.reply(cookie, reply),
                }
            }
            _ => {}
        }
        self.client.poll_event().unwrap()
    }

    /// Answers a read in parts, each by one of the ways that make no copy.
    fn put(&mut self, cookie: Cookie, contents: &[u8]) {
        let (mut done, mut first) = (0, None);
        loop {
            let most = 1 + self.dice.below(contents.len() * 2);
            let rest = |offset| &contents[(offset - *first.get_or_insert(offset)) as usize..];
            let filled = match self.dice.below(3) {
                0 => {
                    let before = self.server.transmit().clone();
                    let filled = self.server.pass(cookie, most as u32, |_, _, _| false);
                    assert_eq!(*self.server.transmit(), before, "it was not sent");
                    filled
                }
                1 => {
                    let (mut rest, mut passed) = (rest, vec![]);
                    let filled = self.server.pass(cookie, most as u32, |offset, length, before| {
                        passed.extend_from_slice(before);
                        passed.extend_from_slice(&rest(offset)[..length as usize]);
                        true
                    });
                    assert!(passed.is_empty() || self.server.transmit().is_empty(), "the shell has sent all of it");
                    self.sent[1].extend_from_slice(&passed);
                    self.client.receive(&passed);
                    filled
                }
                _ => {
                    let (mut rest, n) = (rest, 1 + self.dice.below(most));
                    self.server.fill(cookie, most as u32, |offset, room| {
                        let n = n.min(room.len());
                        room[..n].copy_from_slice(&rest(offset)[..n]);
                        n
                    })
                }
            };
            match filled {
                Filled::Done => return assert_eq!(self.server.rest_of(cookie), None),
                Filled::Part => {
                    let left = self.server.rest_of(cookie).expect("there is more").1 as usize;
                    assert!(0 < left && left < contents.len() - done, "some of it was answered");
                    done = contents.len() - left;
                }
                Filled::Not { length, .. } => assert_eq!(length as usize, contents.len() - done),
            }
        }
    }

    /// Until the handshake is done.
    fn ready(&mut self) {
        for _ in 0..100_000 {
            if let Some(Event::Ready(remote)) = self.step() {
                assert_eq!((remote.size, remote.blocks.minimum, remote.blocks.preferred), (SIZE, 1, 4096));
                return;
            }
        }
        panic!("the handshake does not end");
    }
}

/// Runs commands through both; each answer has to be what a model gives that sees them in the same order.
fn converse(client: Client, commands: &[Command], seed: u64) -> Talk {
    let mut talk = Talk::new(client, seed);
    talk.ready();
    let mut model = Disk(vec![0; SIZE as usize]);
    let mut expected = HashMap::new();
    let mut next = commands.iter().peekable();
    let mut answered = 0;
    let mut skipped = 0;
    for _ in 0..4_000_000 {
        if talk.dice.below(3) == 0
            && let Some(command) = next.next()
        {
            match talk.client.request(command.clone()) {
                // The server performs in the order of the requests.
                Ok(cookie) => {
                    let one = matches!(command, Command::BlockStatus { one: true, .. });
                    expected.insert(cookie, (plain(model.perform(command), one), one));
                }
                Err(NotSent::NotOffered("block status")) => skipped += 1,
                Err(error) => panic!("{error}"),
            }
        }
        match talk.step() {
            Some(Event::Answered(cookie, reply)) => {
                let (wanted, one) = expected.remove(&cookie).expect("an answer to what was asked, once");
                assert_eq!(plain(reply, one), wanted);
                answered += 1;
            }
            Some(Event::Ready(_)) => panic!("ready twice"),
            None => {}
        }
        if answered + skipped == commands.len() {
            assert_eq!(talk.server.in_flight() + talk.client.in_flight(), 0);
            assert!(talk.disk.0 == model.0);
            return talk;
        }
    }
    panic!("{answered} of {} answered", commands.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_answer_is_the_models_however_bytes_and_answers_are_ordered(
        commands in prop::collection::vec(commands(), 1..60), seed: u64
    ) {
        converse(Client::new("disk"), &commands, seed);
    }

    #[test]
    fn without_structured_replies_too(commands in prop::collection::vec(commands(), 1..60), seed: u64) {
        converse(Client::simple("disk"), &commands, seed);
    }

    #[test]
    fn a_conversation_with_some_bytes_changed_harms_neither_side(
        commands in prop::collection::vec(commands(), 1..12),
        seed: u64,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in 1_usize..2000
    ) {
        let talk = converse(Client::new("disk"), &commands, seed);
        for (side, mut bytes) in talk.sent.into_iter().enumerate() {
            for (place, byte) in &changes {
                let place = place.index(bytes.len());
                bytes[place] = *byte;
            }
            let (mut client, mut server) = (Client::new("disk"), server());
            let mut disk = Disk(vec![0; SIZE as usize]);
            let mut next = commands.iter();
            'talk: for piece in bytes.chunks(cut) {
                if side == 0 {
                    server.receive(piece);
                    loop {
                        match server.poll_request() {
                            // What is given lies within the disk, or this panics.
                            Ok(Some(r)) => server.reply(r.cookie, disk.perform(&r.command)),
                            Ok(None) => break,
                            Err(_) => break 'talk,
                        }
                    }
                    prop_assert!(server.input().capacity() < 40 << 20);
                } else {
                    client.receive(piece);
                    loop {
                        match client.poll_event() {
                            Ok(Some(Event::Ready(_))) => {
                                for command in next.by_ref() {
 let _ = client.request(command.clone());
}
                            }
                            Ok(Some(Event::Answered(..))) => {}
                            Ok(None) => break,
                            Err(_) => break 'talk,
                        }
                    }
                    prop_assert!(client.input().capacity() < 4 << 20, "no more than was asked for");
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_harm_no_client(bytes in prop::collection::vec(any::<u8>(), 0..600), cut in 1_usize..50) {
        let mut client = Client::new("disk");
        let mut all = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
        all.extend(bytes);
        for piece in all.chunks(cut) {
            client.receive(piece);
            while let Ok(Some(_)) = client.poll_event() {}
            prop_assert!(client.input().capacity() < 1 << 20);
        }
    }
}

fn settled() -> Talk {
    let mut talk = Talk::new(Client::new("disk"), 7);
    talk.ready();
    talk
}

/// A chunk of a reply, as a server that lies might make it.
fn chunk(flags: u16, kind: u16, cookie: u64, data: &[u8]) -> Vec<u8> {
    let mut out = 0x668e_33ef_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

fn hole(at: u64, length: u32) -> Vec<u8> {
    [&at.to_be_bytes()[..], &length.to_be_bytes()].concat()
}

/// A client that has asked for 4096 bytes at 4096, and the number of that.
fn reading() -> (Client, u64) {
    let mut client = settled().client;
    client.request(Command::Read { offset: 4096, length: 4096 }).unwrap();
    let sent = client.transmit().split();
    (client, u64::from_be_bytes(sent[8..16].try_into().unwrap()))
}

#[test]
fn a_read_that_is_answered_twice_in_part_or_elsewhere_is_not_believed() {
    let answers: [(&[(u64, u32)], bool); 7] = [
        (&[(4096, 100), (4196, 3996)], true),
        (&[(4196, 3996), (4096, 100)], true),
        (&[(4096, 2048), (4096, 2048)], false),
        (&[(4096, 4096), (4096, 1)], false),
        (&[(4096, 4095)], false),
        (&[(4096, 4097)], false),
        (&[(4095, 1), (4096, 4096)], false),
    ];
    for (pieces, believed) in answers {
        let (mut client, cookie) = reading();
        for (n, (at, length)) in pieces.iter().enumerate() {
            client.receive(&chunk(u16::from(n + 1 == pieces.len()), 2, cookie, &hole(*at, *length)));
        }
        let got = client.poll_event();
        assert_eq!(got.is_ok(), believed, "{pieces:?}: {got:?}");
        assert_eq!(client.wants_requests(), believed);
    }
}

#[test]
fn a_piece_outside_the_read_is_refused_before_the_rest_has_come() {
    for (at, length) in [(4095, 1), (8192, 1), (8191, 2), (u64::MAX, 1), (4096, 0)] {
        let (mut client, cookie) = reading();
        client.receive(&chunk(0, 2, cookie, &hole(at, length)));
        assert!(client.poll_event().is_err(), "{length} at {at}");
    }
}

#[test]
fn an_answer_to_nothing_ends_the_connection() {
    let mut client = settled().client;
    client.receive(&chunk(1, 0, 12345, b""));
    assert!(client.poll_event().is_err());
    assert_eq!(client.request(Command::Flush), Err(NotSent::NotReady));
}

#[test]
fn a_client_sends_nothing_that_its_server_would_refuse() {
    let mut client = settled().client;
    let range = |offset, length| Err(NotSent::Range { offset, length });
    assert_eq!(client.request(Command::Read { offset: SIZE - 1, length: 2 }), range(SIZE - 1, 2));
    assert_eq!(client.request(Command::Read { offset: u64::MAX, length: 2 }), range(u64::MAX, 2));
    assert_eq!(client.request(Command::Write { offset: 0, data: Bytes::new(), fua: false }), range(0, 0));
    assert!(client.transmit().is_empty());
    for _ in 0..MAX_IN_FLIGHT {
        client.request(Command::Flush).unwrap();
    }
    assert_eq!(client.request(Command::Flush), Err(NotSent::Full));
}

#[test]
fn an_export_that_does_not_exist_is_refused_with_the_servers_words() {
    let (mut client, mut server) = (Client::new("elsewhere"), server());
    for _ in 0..10 {
        client.receive(&server.transmit().split());
        if let Err(error) = client.poll_event() {
            let text = error.to_string();
            assert!(text.contains("`elsewhere`") && text.contains("no such export"), "{text}");
            return;
        }
        server.receive(&client.transmit().split());
        assert_eq!(server.poll_request(), Ok(None));
    }
    panic!("it was not refused");
}

#[test]
fn after_goodbye_the_server_is_closed() {
    let mut talk = settled();
    talk.client.disconnect();
    talk.server.receive(&talk.client.transmit().split());
    assert_eq!(talk.server.poll_request(), Ok(None));
    assert!(talk.server.is_closed());
}
