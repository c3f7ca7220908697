//! NBD, both ends: QEMU asks our server; our client asks a server that is somebody else's.

use crate::mutate::Dice;
use crate::{MIB, Target};
use bytes::Bytes;
use godwit_nbd::{
    Client, Command, Event, Export, Extent, MAX_EXTENTS, MAX_HELD, MAX_PIECES, MAX_REQUEST, Piece, Reply, Server,
};

fn server() -> Server {
    Server::new(vec![Export { name: "disk".into(), size: 1 << 40, preferred_block: 4096, read_only: false }])
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let head = [&0x4948_4156_454f_5054_u64.to_be_bytes()[..], &option.to_be_bytes()];
    [&head.concat()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn request(kind: u16, offset: u64, length: u32) -> Vec<u8> {
    let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &[9; 8]].concat();
    [&head[..], &offset.to_be_bytes(), &length.to_be_bytes()].concat()
}

/// Answers as a disk would whose every read is a hole.
fn answer(command: &Command) -> Reply {
    match command {
        Command::Read { length, .. } => {
            Reply::Data(vec![Piece::Hole(length - 1), Piece::Data(Bytes::from_static(b"x"))])
        }
        Command::BlockStatus { length, .. } => Reply::Status(vec![Extent { length: *length, hole: true }]),
        _ => Reply::Done,
    }
}

/// A client that asks.
pub const SERVER: Target = Target {
    name: "nbd-server",
    corpus: || {
        let go = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
        let meta = [&4u32.to_be_bytes()[..], b"disk", &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"];
        let asks = [
            request(0, 4096, 4096),
            [request(1, 0, 512), vec![3; 512]].concat(),
            request(3, 0, 0),
            request(4, 8192, 4096),
            request(6, 0, 1 << 20),
            request(7, 0, 1 << 20),
            request(5, 0, 4096),
            request(2, 0, 0),
        ]
        .concat();
        vec![
            [vec![0, 0, 0, 3], option(8, b""), option(10, &meta.concat()), option(7, &go), asks.clone()].concat(),
            [vec![0, 0, 0, 3], option(3, b""), option(6, &go), option(5, b""), option(1, b"disk"), asks].concat(),
            [vec![0, 0, 0, 3], option(1, b"disk"), request(0, 0, 32 << 20).repeat(4)].concat(),
        ]
    },
    run: |input| {
        let mut server = server();
        for piece in input.chunks(1 + input.len() % 333) {
            if !server.wants_input() {
                server.transmit().clear();
            }
            server.receive(piece);
            // Nothing is asked twice of a connection that is over.
            for _ in 0..256 {
                match server.poll_request() {
                    Ok(Some(asked)) => server.reply(asked.cookie, answer(&asked.command)),
                    Ok(None) => break,
                    Err(_) => {
                        assert!(server.is_closed() && !server.wants_input());
                        return;
                    }
                }
            }
        }
    },
    // The answers that may be held and the one that is being written, in a vector that doubles as it grows.
    bound: |length| 2 * (MAX_HELD + MAX_REQUEST as usize) + 8 * length,
};

/// Asks this of any server.
const ASKS: [Command; 4] = [
    Command::Read { offset: 4096, length: 8192 },
    Command::BlockStatus { offset: 0, length: 1 << 20, one: false },
    Command::Read { offset: 0, length: 1 << 20 },
    Command::Flush,
];

/// Asks what the server takes; the server's words are the input, or, where that is empty, a good server's, which are returned.
fn talk(client: &mut Client, input: Option<&[u8]>) -> Vec<u8> {
    let (mut server, mut said, mut asks) = (server(), vec![], ASKS.iter());
    let mut pieces = input.unwrap_or_default().chunks(1 + input.unwrap_or_default().len() % 77);
    loop {
        let words = match input {
            Some(_) => pieces.next().map(<[u8]>::to_vec),
            None => {
                server.receive(&client.transmit().split());
                while let Ok(Some(asked)) = server.poll_request() {
                    server.reply(asked.cookie, answer(&asked.command));
                }
                Some(server.transmit().split().to_vec()).filter(|words| !words.is_empty())
            }
        };
        let Some(words) = words else { return said };
        client.receive(&words);
        said.extend(words);
        loop {
            match client.poll_event() {
                Ok(Some(Event::Ready(_))) => {
                    for ask in asks.by_ref() {
                        // What this server does not offer is not sent.
                        let _ = client.request(ask.clone());
                    }
                }
                Ok(Some(Event::Answered(_, Reply::Data(pieces)))) => assert!(pieces.len() <= MAX_PIECES),
                Ok(Some(Event::Answered(_, Reply::Status(extents)))) => assert!(extents.len() <= MAX_EXTENTS),
                Ok(Some(Event::Answered(..))) => {}
                Ok(None) => break,
                Err(_) => return said,
            }
        }
        if input.is_some() {
            client.transmit().clear();
        }
    }
}

/// A server that answers.
pub const CLIENT: Target = Target {
    name: "nbd-client",
    corpus: || vec![talk(&mut Client::new("disk"), None), talk(&mut Client::simple("disk"), None)],
    run: |input| {
        let mut dice = Dice::new(input.len() as u64, 0);
        let mut client = if dice.below(4) == 0 { Client::simple("disk") } else { Client::new("disk") };
        talk(&mut client, Some(input));
    },
    // What was asked for in reads, twice over; never what the server says.
    bound: |length| 8 * MIB + 16 * length,
};
