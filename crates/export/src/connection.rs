//! One client.

use crate::backend::{Answer, Answers, Backend, Untaken};
use crate::cached::is_cached;
use crate::eager::Eager;
use crate::helpers::{Helpers, Job};
use crate::pipe::{MOST_BEFORE, Pipe};
use crate::wire::{Expected, Wire};
use godwit_nbd::{Command, Cookie, Filled, ProtocolError, Request, Server};
use rustix::event::{PollFd, PollFlags, poll};
use rustls::ServerConfig;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is read or written at once: little enough that it goes on while the core has it in its cache.
const PIECE: u32 = 128 << 10;
/// Reads from this length on are sent from the page cache's own pages. For shorter ones a copy costs less than a pipe.
const LARGE: u32 = 64 << 10;
/// Writes from this length on take longer to copy than it costs to wake somebody who does it. At 128 KiB that is not so.
const LARGE_WRITE: usize = 512 << 10;
/// A write that is longer than what a pipe is sure to hold is stored in parts of this length, each once it has come: its client's socket
/// holds one and a half, so that the client sends while the server stores.
const PART: u32 = 128 << 10;
/// What has to be seen of a large write, or of a part of it, before the rest goes to its file unseen: zeroes become holes, for whoever sees them.
const SAMPLE: usize = 512;
/// A request's header, and the sample.
const BEGINNING: usize = 28 + SAMPLE;
/// No answer's header is longer.
const MOST_HEADER: usize = 64;
/// Answers are sent when they are so many bytes, even if there are more requests to take.
const ENOUGH: usize = 64 << 10;

/// Why a client was cut off.
#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error("its connection: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// Serves a client until it leaves, or is hung up on. With `tls`, it is told nothing before it has begun that.
pub fn serve(wire: Wire, backend: Arc<dyn Backend>, tls: Option<Arc<ServerConfig>>) {
    let export = backend.export();
    let name = export.name.clone();
    let server = if tls.is_some() { Server::with_tls(vec![export]) } else { Server::new(vec![export]) };
    match Connection::new(wire, server, backend, tls).and_then(|mut c| c.run()) {
        Ok(()) => {}
        Err(Cut::Io(error)) => tracing::debug!(export = name, %error, "a client's connection broke"),
        Err(Cut::Protocol(error)) => tracing::warn!(export = name, %error, "a client of the export was cut off"),
    }
}

/// Whether reading this waits for no disk, or hardly.
fn in_memory(backend: &dyn Backend, file: BorrowedFd<'_>, offset: u64, length: u32) -> bool {
    // An older kernel does not say. What is read ahead comes in order, so that the ends speak for the rest.
    is_cached(file, offset, u64::from(length)).unwrap_or_else(|| {
        let last = offset + u64::from(length) - 1;
        backend.read_now(last, &mut [0]) == 1 && backend.read_now(offset, &mut [0]) == 1
    })
}

/// How much of a write goes through a pipe at once. No block of the disk is in two parts, unless the client itself begins in the middle of
/// one.
fn part_of(offset: u64, length: u32, most: u32) -> Option<u32> {
    if length <= most {
        return Some(length);
    }
    let past = (offset % godwit_volume::BLOCK) as u32;
    (most >= PART).then_some(PART - past)
}

fn is_large_write(command: &Command) -> bool {
    matches!(command, Command::Write { data, .. } if data.len() >= LARGE_WRITE)
}

/// How long a client may take until it has chosen an export, TLS included: whoever has shown nothing of himself holds no place for ever.
const NEGOTIATION: Duration = Duration::from_secs(30);

/// Its parts end in this order.
struct Connection {
    /// Ends before the socket: a write that has come is made before the client sees the end of its connection, and not over what the client
    /// has written by another one since.
    helpers: Helpers,
    wire: Wire,
    server: Server,
    backend: Arc<dyn Backend>,
    tls: Option<Arc<ServerConfig>>,
    answers: Answers,
    /// For large reads; made for the first one.
    pipe: Option<Pipe>,
    /// For large writes, and holds what has come of one; made for the first one.
    inbound: Option<Pipe>,
    /// A large write, or a part of one, that has come whole and is still to be stored.
    held: Option<Held>,
    /// The pipe of the one before: empty.
    spare: Option<Pipe>,
    /// The last request was a large write: so may the next be.
    large: bool,
    /// Reads that have to wait for the disk.
    missed: Vec<(Cookie, u64, u32)>,
    /// None where there is one processor: whoever looks keeps the client from it.
    eager: Option<Eager>,
}

impl Connection {
    fn new(wire: Wire, server: Server, backend: Arc<dyn Backend>, tls: Option<Arc<ServerConfig>>) -> Result<Self, Cut> {
        let answers = Answers::new()?;
        let helpers = Helpers::new(backend.clone(), answers.clone());
        let several = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        let eager = several.then(Eager::default);
        Ok(Self {
            helpers,
            wire,
            server,
            backend,
            tls,
            answers,
            pipe: None,
            inbound: None,
            held: None,
            spare: None,
            large: false,
            missed: vec![],
            eager,
        })
    }

    fn run(&mut self) -> Result<(), Cut> {
        let ended = self.serve();
        // It came whole, whatever became of the client.
        let stored = self.store_held();
        ended.and(stored.map_err(Cut::from))
    }

    fn serve(&mut self) -> Result<(), Cut> {
        self.wire.has_until(Some(Instant::now() + NEGOTIATION));
        loop {
            self.take_requests()?;
            // Behind either of these there may be room again for requests that have come already.
            if !self.missed.is_empty() {
                self.give_missed()?;
                continue;
            }
            if !self.server.transmit().is_empty() {
                self.wire.send(self.server.transmit())?;
                if self.server.wants_tls() {
                    self.start_tls()?;
                }
                continue;
            }
            // What it asked for before it took its leave is done, and answered.
            if self.server.is_closed() && self.server.in_flight() == 0 {
                self.wire.say_goodbye();
                return Ok(());
            }
            if !self.wait()? {
                // It may be there still, for its answers.
                self.server.input_ended();
            }
        }
    }

    fn start_tls(&mut self) -> io::Result<()> {
        if let Some(config) = &self.tls {
            self.wire.start_tls(config.clone())?;
            self.server.tls_started();
        }
        Ok(())
    }

    /// The next one that has come. Who has chosen an export has all the time that it likes from then on, also for its first answers.
    fn next_request(&mut self) -> Result<Option<Request>, Cut> {
        let request = self.server.poll_request()?;
        if self.server.chosen().is_some() {
            self.wire.has_until(None);
        }
        Ok(request)
    }

    fn take_requests(&mut self) -> Result<(), Cut> {
        while let Some(request) = self.next_request()? {
            // It came first.
            self.store_held()?;
            let cookie = request.cookie;
            self.large = matches!(&request.command, Command::Write { data, .. } if data.len() >= LARGE as usize);
            match request.command {
                Command::Read { .. } => {
                    if let Some((offset, length)) = self.read(cookie)? {
                        self.missed.push((cookie, offset, length));
                    }
                }
                // What is there already is taken meanwhile.
                command @ Command::Write { .. } if is_large_write(&command) && self.more_waits() => {
                    self.helpers.give(cookie, Job::Do(command));
                }
                // They wait for nothing that takes long: the page cache, a file system's map.
                command @ (Command::Write { fua: false, .. } | Command::Cache { .. } | Command::BlockStatus { .. }) => {
                    if let Some(reply) = self.backend.perform(cookie, command, &self.answers) {
                        self.server.reply(cookie, reply);
                    }
                }
                command => self.helpers.give(cookie, Job::Do(command)),
            }
            if self.server.transmit().len() >= ENOUGH {
                self.wire.send(self.server.transmit())?;
            }
        }
        Ok(())
    }

    /// Whether the client has sent more than was taken.
    fn more_waits(&self) -> bool {
        rustix::io::ioctl_fionread(self.wire.socket()).is_ok_and(|bytes| bytes > 0)
    }

    /// Answers what is in memory of a read; says what is not.
    fn read(&mut self, cookie: Cookie) -> io::Result<Option<(u64, u32)>> {
        loop {
            match self.pass(cookie)? {
                Filled::Done => return Ok(None),
                Filled::Part => continue,
                Filled::Not { .. } => {}
            }
            let backend = &*self.backend;
            match self.server.fill(cookie, PIECE, |offset, into| backend.read_now(offset, into)) {
                Filled::Done => return Ok(None),
                // More would push it out of the cache.
                Filled::Part => self.wire.send(self.server.transmit())?,
                Filled::Not { offset, length } => return Ok(Some((offset, length))),
            }
        }
    }

    /// Answers a large read, or its next part, without a copy, if it is in memory.
    fn pass(&mut self, cookie: Cookie) -> io::Result<Filled> {
        let not = Filled::Not { offset: 0, length: 0 };
        let Some((offset, _)) = self.server.rest_of(cookie).filter(|(_, length)| *length >= LARGE) else {
            return Ok(not);
        };
        if !self.wire.is_plain() {
            return Ok(not);
        }
        if self.pipe.is_none() && self.backend.file_of(offset, 1).is_some() {
            // Whoever has no pipes left is served by copies.
            self.pipe = Pipe::new().ok();
        }
        let Some(pipe) = &mut self.pipe else { return Ok(not) };
        if self.server.transmit().len() + MOST_HEADER > MOST_BEFORE {
            self.wire.send(self.server.transmit())?;
        }
        let (backend, mut broken) = (&*self.backend, false);
        let filled = self.server.pass(cookie, pipe.most(), |offset, length, before| {
            let Some(file) = backend.file_of(offset, u64::from(length)) else { return false };
            if !in_memory(backend, file, offset, length) {
                return false;
            }
            broken = pipe.load(before, file, offset, length).is_err();
            !broken
        });
        if broken {
            self.pipe = None;
        } else {
            pipe.send(self.wire.socket())?;
        }
        Ok(filled)
    }

    /// Sees to the reads that were not in memory.
    fn give_missed(&mut self) -> io::Result<()> {
        // Where all that is asked for is one read, or one stream of them whose first tries have started all of their I/O, nothing
        // else would be kept from anything: no need for another thread.
        let follows = |two: &[(Cookie, u64, u32)]| {
            two[0].1 + u64::from(two[0].2) == two[1].1 && two.iter().all(|(.., length)| *length <= PIECE)
        };
        if self.missed.windows(2).all(follows) && self.server.in_flight() == self.missed.len() {
            for (cookie, ..) in std::mem::take(&mut self.missed) {
                // What was waited for before may have brought it, or a part.
                let Some((offset, length)) = self.read(cookie)? else { continue };
                self.wire.send(self.server.transmit())?;
                self.backend.warm(offset, u64::from(length));
                self.warmed(cookie)?;
            }
            return Ok(());
        }
        for (cookie, offset, length) in self.missed.drain(..) {
            self.helpers.give(cookie, Job::Warm { offset, length: u64::from(length) });
        }
        Ok(())
    }

    /// A read that missed may be luckier now. Else it is waited for as long as it takes.
    fn warmed(&mut self, cookie: Cookie) -> io::Result<()> {
        if let Some((offset, length)) = self.read(cookie)? {
            self.helpers.give(cookie, Job::Do(Command::Read { offset, length }));
        }
        Ok(())
    }

    /// Waits for something; false: the client sends no more, or nothing more is taken from it.
    fn wait(&mut self) -> io::Result<bool> {
        if self.held.is_some() {
            // With a client that always has more to send there may be no other look at them for long.
            self.take_answers()?;
            // First what has come behind it: then there is room for the client to send more while this is stored.
            if self.server.wants_input() && self.more_waits() {
                return self.receive();
            }
            self.store_held()?;
            return Ok(true);
        }
        if self.server.in_flight() == 0 {
            return self.receive_soon();
        }
        let wants = if self.server.wants_input() { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [
            PollFd::from_borrowed_fd(self.answers.event(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.wire.socket(), wants),
        ];
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        let come = fds[1].revents();
        self.take_answers()?;
        if come.contains(PollFlags::IN) {
            return self.receive();
        }
        if come.intersects(PollFlags::HUP | PollFlags::ERR) {
            // Nobody is left to answer.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(true)
    }

    /// What has come of requests that other threads have done.
    fn take_answers(&mut self) -> io::Result<()> {
        for (cookie, answer) in self.answers.take() {
            match answer {
                Answer::Reply(reply) => self.server.reply(cookie, reply),
                Answer::Warm => self.warmed(cookie)?,
            }
        }
        Ok(())
    }

    /// Receives the next request where none is under way: perhaps it is about to come.
    fn receive_soon(&mut self) -> io::Result<bool> {
        let Some(eager) = &self.eager else { return self.receive() };
        let (look, began) = (eager.look(), Instant::now());
        let mut found = false;
        let looks = || began.elapsed() < look;
        while !look.is_zero() && !found && looks() {
            found = self.more_waits();
            std::hint::spin_loop();
        }
        let received = self.receive();
        if let Some(eager) = &mut self.eager {
            eager.waited(began.elapsed(), look, found);
        }
        received
    }

    fn receive(&mut self) -> io::Result<bool> {
        let rest = self.server.rest_of_request();
        let expects = match self.large && self.wire.is_local() {
            true if rest == 0 => Expected::AtMost(BEGINNING),
            true => match self.receive_past()? {
                Past::Came(more) => return Ok(more),
                Past::Unsampled(missing) => Expected::AtMost(missing),
                Past::Not => Expected::AtMost(self.server.rest_of_request()),
            },
            false if rest == 0 => Expected::All,
            false => Expected::AtMost(rest),
        };
        self.wire.receive(self.server.input(), expects)
    }

    /// Takes the rest of a large write without a copy of its own, as far as it has come.
    fn receive_past(&mut self) -> io::Result<Past> {
        let Some(write) = self.server.begun_write() else {
            // With a part of it in the pipe, there is no room for its answer until others have been sent.
            let held = self.inbound.as_ref().is_some_and(|pipe| pipe.holds() > 0);
            return Ok(if held { Past::Came(true) } else { Past::Not });
        };
        let (offset, begun) = (write.offset, write.come.len());
        if write.length < LARGE || write.fua || begun > MOST_BEFORE {
            return Ok(Past::Not);
        }
        if begun < SAMPLE {
            return Ok(Past::Unsampled(SAMPLE - begun));
        }
        if self.inbound.is_none() && self.backend.file_of(offset, 1).is_some() {
            // Whoever has no pipes left is served by copies.
            self.inbound = self.spare.take().or_else(|| Pipe::new().ok());
        }
        let Some(pipe) = &mut self.inbound else { return Ok(Past::Not) };
        let Some(length) = part_of(offset, write.length, pipe.most()) else { return Ok(Past::Not) };
        if pipe.holds() == 0 {
            if godwit_volume::is_zero(write.come) {
                return Ok(Past::Not);
            }
            pipe.begin(write.come)?;
        }
        let (mut refused, mut came) = (false, false);
        while pipe.holds() < length as usize {
            let missing = length as usize - pipe.holds();
            match pipe.take(self.wire.socket(), missing)? {
                Some(0) => return Ok(Past::Came(false)),
                Some(_) => (refused, came) = (false, true),
                // That may have come just now. Refused again, it finds no room.
                None if !refused && rustix::io::ioctl_fionread(self.wire.socket())? > 0 => refused = true,
                None if refused => {
                    let all = pipe.spill()?;
                    self.server.input().extend_from_slice(&all[begun..]);
                    self.large = false;
                    return Ok(Past::Not);
                }
                // There is something to do meanwhile, or the rest is worth a look before sleeping.
                None if came || self.server.in_flight() > 0 => return Ok(Past::Came(true)),
                None => {
                    let mut fds = [PollFd::from_borrowed_fd(self.wire.socket(), PollFlags::IN)];
                    rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
                }
            }
        }
        // It is still what it was: nothing else has come into the machine.
        let Some(cookie) = self.server.take_begun(length) else { return Ok(Past::Not) };
        let Some(pipe) = self.inbound.take() else { unreachable!("it holds the write") };
        self.store_held()?;
        self.held = Some(Held { cookie, offset, length, pipe });
        Ok(Past::Came(true))
    }

    /// Brings the write that is held to its file.
    fn store_held(&mut self) -> io::Result<()> {
        let Some(Held { cookie, offset, length, mut pipe }) = self.held.take() else { return Ok(()) };
        let mut put = |file: BorrowedFd<'_>, at| pipe.store(file, at);
        let answer = match self.backend.write_by(cookie, offset, length, &self.answers, &mut put) {
            Ok(answer) => answer,
            Err(Untaken) => {
                let data = pipe.spill()?.into();
                self.backend.perform(cookie, Command::Write { offset, data, fua: false }, &self.answers)
            }
        };
        // If it failed, what is left goes nowhere.
        self.spare = Some(pipe).filter(|pipe| pipe.holds() == 0);
        if let Some(reply) = answer {
            self.server.reply(cookie, reply);
        }
        Ok(())
    }
}

/// A large write that has come whole, or a part of one.
struct Held {
    cookie: Cookie,
    offset: u64,
    length: u32,
    /// Its contents.
    pipe: Pipe,
}

/// What became of a large write's contents, past the protocol's machine.
enum Past {
    /// They are on their way, or done; or, false, no more of them come.
    Came(bool),
    /// So much of them has to be seen before.
    Unsampled(usize),
    /// They come as any others do.
    Not,
}
