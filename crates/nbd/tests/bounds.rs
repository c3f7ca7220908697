//! What a client cannot make the server do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use godwit_nbd::{Command, Errno, Export, Piece, Reply, Request, Server};

fn request(kind: u16, flags: u16, handle: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(handle.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(length.to_be_bytes());
    out
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = 0x4948_4156_454f_5054_u64.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut out = (name.len() as u32).to_be_bytes().to_vec();
    out.extend(name.as_bytes());
    out.extend(rest);
    out
}

fn exports() -> Vec<Export> {
    ["disk", "other"].map(|n| Export { name: n.into(), size: 64 << 20, preferred_block: 4096, read_only: false }).into()
}

fn connected() -> Server {
    let mut server = Server::new(exports());
    server.receive(&[0, 0, 0, 3]);
    server.receive(&option(1, b"disk"));
    server
}

#[test]
fn reads_that_are_answered_at_once_do_not_pile_up_their_answers() {
    let mut server = connected();
    for handle in 0..16 {
        server.receive(&request(0, 0, handle, 0, 32 << 20));
    }
    let mut answered = 0;
    while let Some(r) = server.poll_request().unwrap() {
        server.reply(r.cookie, Reply::Data(vec![Piece::Hole(32 << 20)]));
        answered += 1;
        assert!(server.transmit().len() < 100 << 20, "{} MiB wait for the socket", server.transmit().len() >> 20);
    }
    assert!(!server.wants_input());
    while answered < 16 {
        server.transmit().clear();
        let r = server.poll_request().unwrap().expect("what was read before is given once there is room");
        server.reply(r.cookie, Reply::Data(vec![Piece::Hole(32 << 20)]));
        answered += 1;
    }
    server.transmit().clear();
    assert!(server.wants_input());
}

#[test]
fn block_status_that_was_agreed_for_one_export_is_not_given_for_another() {
    let mut server = Server::new(exports());
    server.receive(&[0, 0, 0, 3]);
    server.receive(&option(8, b""));
    server.receive(&option(10, &named("disk", &[&[0, 0, 0, 1][..], &named("base:allocation", b"")].concat())));
    server.receive(&option(7, &named("other", &[0, 0])));
    server.receive(&request(7, 0, 1, 0, 4096));
    assert_eq!(server.poll_request().unwrap(), None, "it is answered with an error, by the server itself");
    assert_eq!(server.chosen().unwrap().name, "other");
}

#[test]
fn flags_that_a_command_does_not_have_are_refused_and_the_next_request_is_understood() {
    let mut server = connected();
    server.receive(&request(0, 1 << 9, 1, 0, 4096));
    server.receive(&request(99, 0, 2, 0, 4096));
    server.receive(&request(3, 0, 3, 0, 0));
    let asked = server.poll_request().unwrap().unwrap();
    assert_eq!(asked.command, Command::Flush);
    let said = server.transmit();
    let errors = &said[said.len() - 32..];
    assert_eq!(errors[..16], told(1, 22));
    assert_eq!(errors[16..], told(2, 22));
}

#[test]
fn after_an_error_the_connection_is_closed_for_good() {
    let mut server = connected();
    server.receive(&[7; 28]);
    assert!(server.poll_request().is_err());
    assert!(server.is_closed() && !server.wants_input());
    assert_eq!(server.poll_request(), Ok(None));
}

#[test]
fn a_write_that_has_begun_can_be_taken_by_the_shell_and_the_next_request_is_found_behind_it() {
    let mut server = connected();
    assert!(server.poll_request().unwrap().is_none());
    server.receive(&request(1, 0, 5, 4096, 100_000)[..27]);
    assert_eq!(server.begun_write(), None, "its header has not come");
    server.receive(&request(1, 0, 5, 4096, 100_000)[27..]);
    server.receive(b"beginning");
    assert!(server.poll_request().unwrap().is_none());
    let begun = server.begun_write().unwrap();
    assert_eq!((begun.offset, begun.length, begun.fua, begun.come), (4096, 100_000, false, &b"beginning"[..]));
    assert_eq!(
        (server.take_begun(8), server.take_begun(100_001)),
        (None, None),
        "more has come, and no more is written"
    );
    let cookie = server.take_begun(100_000).unwrap();
    assert_eq!((server.take_begun(1), server.begun_write(), server.in_flight()), (None, None, 1));
    server.transmit().clear();
    server.receive(&request(3, 0, 6, 0, 0));
    assert_eq!(server.poll_request().unwrap().unwrap().command, Command::Flush);
    server.reply(cookie, Reply::Done);
    assert_eq!(server.transmit()[..], told(5, 0));
}

/// What a client is told of a request: its error.
fn told(handle: u64, error: u32) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &handle.to_be_bytes()].concat()
}

#[test]
fn a_write_that_is_taken_in_parts_is_answered_once_and_by_the_first_that_failed() {
    // What becomes of two parts and of the rest, in the order of the answers, and what the client is told.
    let (done, full, bad) = (Reply::Done, Reply::Error(Errno::NoSpace), Reply::Error(Errno::Io));
    for (answers, error) in [
        ([done.clone(), done.clone(), done.clone()], 0),
        ([done.clone(), bad.clone(), full.clone()], 5),
        ([full.clone(), done.clone(), done.clone()], 28),
        ([done.clone(), done, bad], 5),
    ] {
        // The rest comes to the shell, or as a request.
        for past in [true, false] {
            let mut server = connected();
            assert!(server.poll_request().unwrap().is_none());
            server.transmit().clear();
            server.receive(&request(1, 0, 5, 4096, 100_000));
            server.receive(b"first");
            let cookie = server.take_begun(40_000).unwrap();
            let rest = server.begun_write().unwrap();
            assert_eq!(
                (rest.offset, rest.length, rest.come, server.rest_of_request()),
                (44_096, 60_000, &b""[..], 60_000)
            );
            server.receive(b"second");
            assert_eq!(server.begun_write().unwrap().come, b"second");
            // One part is answered before the others have come.
            server.reply(cookie, answers[0].clone());
            assert_eq!(server.take_begun(50_000), Some(cookie));
            server.reply(cookie, answers[1].clone());
            assert!(server.poll_request().unwrap().is_none() && server.transmit().is_empty());
            if past {
                assert_eq!(server.take_begun(10_000), Some(cookie));
            } else {
                server.receive(&[7; 9_999]);
                assert_eq!((server.rest_of_request(), server.begun_write().unwrap().offset), (1, 94_096));
                // And the next request behind it.
                server.receive(&[7]);
                assert_eq!(server.begun_write(), None, "it is here");
            }
            server.receive(&request(3, 0, 6, 0, 0));
            let next = server.poll_request().unwrap().unwrap();
            let flush = if past {
                next
            } else {
                let data = vec![7; 10_000].into();
                assert_eq!(next, Request { cookie, command: Command::Write { offset: 94_096, data, fua: false } });
                server.poll_request().unwrap().unwrap()
            };
            assert_eq!((&flush.command, server.in_flight()), (&Command::Flush, 2));
            server.reply(flush.cookie, Reply::Done);
            server.reply(cookie, answers[2].clone());
            assert_eq!(server.transmit()[..], [told(6, 0), told(5, error)].concat(), "{answers:?}");
            assert_eq!(server.in_flight(), 0);
            // Nothing is left to be answered.
            server.reply(cookie, Reply::Done);
            assert_eq!(server.transmit().len(), 32);
        }
    }
}

#[test]
fn a_write_that_will_be_refused_or_is_here_or_has_no_room_is_nobody_elses_to_take() {
    // Behind the end; with a flag that no write has; longer than any.
    for (flags, offset, length) in [(0, 64 << 20, 4096), (0x8000, 0, 4096), (0, 0, (32 << 20) + 1)] {
        let mut server = connected();
        assert!(server.poll_request().unwrap().is_none());
        server.receive(&request(1, flags, 1, offset, length));
        assert_eq!((server.take_begun(length), server.begun_write()), (None, None), "{flags} {offset} {length}");
    }
    let mut server = connected();
    assert!(server.poll_request().unwrap().is_none());
    server.receive(&request(1, 0, 1, 0, 3));
    server.receive(b"all");
    assert_eq!(server.begun_write(), None);
    assert!(
        matches!(server.poll_request().unwrap().unwrap().command, Command::Write { data, .. } if &data[..] == b"all")
    );
    for handle in 2..=godwit_nbd::MAX_IN_FLIGHT as u64 {
        server.receive(&request(3, 0, handle, 0, 0));
        assert!(server.poll_request().unwrap().is_some());
    }
    server.receive(&request(1, 0, 200, 0, 4096));
    assert_eq!((server.take_begun(4096), server.begun_write()), (None, None));
}

#[test]
fn past_the_end_reads_and_trims_are_invalid_and_what_is_written_finds_no_room_unless_nothing_may_be_written() {
    // Read, trim, cache; write, write zeroes.
    for (kind, error) in [(0, 22), (4, 22), (5, 22), (1, 28), (6, 28)] {
        for read_only in [false, true] {
            let export = Export { name: "disk".into(), size: 4096, preferred_block: 4096, read_only };
            let mut server = Server::new(vec![export]);
            server.receive(&[0, 0, 0, 3]);
            server.receive(&option(1, b"disk"));
            assert!(server.poll_request().unwrap().is_none());
            server.transmit().clear();
            server.receive(&request(kind, 0, 5, 4000, 100));
            if kind == 1 {
                server.receive(&[7; 100]);
            }
            assert_eq!(server.poll_request().unwrap(), None, "it is answered with an error, by the server itself");
            let error = if read_only && matches!(kind, 1 | 4 | 6) { 1 } else { error };
            assert_eq!(server.transmit()[..], told(5, error), "{kind}, read only: {read_only}");
        }
    }
}

#[test]
fn when_nothing_more_comes_what_came_whole_is_answered_and_a_write_that_did_not_has_failed() {
    let mut server = connected();
    assert!(server.poll_request().unwrap().is_none());
    server.transmit().clear();
    server.receive(&request(3, 0, 5, 0, 0));
    let flush = server.poll_request().unwrap().unwrap();
    server.receive(&request(1, 0, 6, 4096, 100_000));
    let write = server.take_begun(40_000).unwrap();
    server.receive(b"and no more");
    server.input_ended();
    assert!(server.is_closed() && !server.wants_input());
    assert_eq!((server.poll_request().unwrap(), server.in_flight()), (None, 2));
    server.reply(write, Reply::Done);
    server.reply(flush.cookie, Reply::Done);
    assert_eq!(server.transmit()[..], [told(6, 108), told(5, 0)].concat());
    assert_eq!(server.in_flight(), 0);
}

#[test]
fn no_more_requests_are_taken_than_may_be_in_flight() {
    let mut server = connected();
    for handle in 0..200 {
        server.receive(&request(3, 0, handle, 0, 0));
    }
    let taken: Vec<_> = std::iter::from_fn(|| server.poll_request().unwrap()).collect();
    assert_eq!(taken.len(), godwit_nbd::MAX_IN_FLIGHT);
    assert!(!server.wants_input());
    server.reply(taken[0].cookie, Reply::Done);
    assert!(server.poll_request().unwrap().is_some());
    assert!(server.poll_request().unwrap().is_none());
}
