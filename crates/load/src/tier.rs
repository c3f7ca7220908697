//! An application of several tiers: web asks application, application asks database, each at a hard-coded address.
//!
//! A tier answers requests on its port. The last one, which asks nobody, looks a key up in a table in its memory; any other asks the
//! next tier some times over a TCP session of its own, and makes one value of what it hears. So an answer is right only if every tier
//! and every session between them is: [`Answer`] says what was made of the key, how many tiers made it, and carries a body with a
//! checksum. The same key must always give the same.
//!
//! [`Clients`] hold sessions from outside, each with one request under way at a time, and write down when each was answered and how
//! ([`Verdict`]): while a tier stands still nothing is, and what is lost of a session shows as a failure.
//!
//! A tier may write each request to a disk before it answers (`commits_to`), as a database commits: what a move does to the guest's writes,
//! its clients see. Or each request is a transaction of the guest's own database (`transacts`).
//!
//! What can go wrong: the next tier does not answer within [`ANSWER`], or its session breaks. Then this tier says that it failed,
//! and asks over a new session the next time. Whoever sends what is no request is hung up on.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    content::Prf,
    disk::{self, DiskPlace},
    page::{PAGE_BYTES, Page},
    protocol::TierStatus,
    sql::Sql,
    worker::ErrorLog,
};

/// Most sessions that a tier serves at a time; each is a thread.
pub const MAX_SESSIONS: u32 = 64;

/// Largest body of an answer.
pub const MAX_ANSWER_BYTES: u32 = 64 * 1024;

/// How long a tier waits for the next one: longer than any pause of a move that anybody would accept.
pub const ANSWER: Duration = Duration::from_secs(20);

/// How long a client waits for an answer: TCP waits at most 120 s between two tries.
pub const PATIENCE: Duration = Duration::from_secs(130);

/// An answer that takes longer is late: what SPECweb2009 calls a bad request.
pub const LATE: Duration = Duration::from_secs(2);

/// Most requests that a log keeps: an hour and more at 200 a second. Later ones are counted only.
pub const MAX_SAMPLES: usize = 1 << 20;

/// Keys that clients ask for: few, so that each is asked for again and again.
const KEYS: u64 = 256;

/// What a tier that commits takes of its disk.
pub const COMMIT_BYTES: u64 = KEYS * PAGE_BYTES as u64;

/// Entries of the last tier's table, half a MiB.
const ENTRIES: usize = 1 << 16;

/// Bytes of a request: magic, key, xxh3 of both; little-endian.
const REQUEST_BYTES: usize = 24;

/// Bytes before an answer's body: magic, key, value, tiers, length of the body, checksum of all of it.
const HEAD_BYTES: usize = 40;

const ASK: u64 = u64::from_le_bytes(*b"gdwtASK1");
const ANSWERS: u64 = u64::from_le_bytes(*b"gdwtANS1");

/// Longest wait until a stop is noticed.
const LOOK: Duration = Duration::from_millis(100);

/// Pause before a client tries again to connect.
const AGAIN: Duration = Duration::from_millis(200);

/// What a tier does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierSpec {
    /// Its port; 0 takes a free one.
    pub port: u16,
    /// The next tier; none: it is the last one.
    pub asks: Option<SocketAddrV4>,
    /// How often it asks for each request.
    pub times: u32,
    /// Bytes of its answers' bodies.
    pub answer_bytes: u32,
    /// What a request is written to before it is answered.
    pub commits_to: Option<DiskPlace>,
    /// Each request is a transaction of the guest's PostgreSQL before it is answered.
    pub transacts: bool,
}

/// What requests are written to, a page for each key: [`COMMIT_BYTES`] from the place's beginning.
struct Commits {
    file: File,
    offset: u64,
}

impl Commits {
    fn open(place: &DiskPlace) -> io::Result<Self> {
        Ok(Self { file: disk::open(&place.path)?.0, offset: place.offset })
    }

    /// Comes back when the disk says that the page is durable.
    fn commit(&self, key: u64) -> io::Result<()> {
        let mut page = Box::new(Page::ZERO);
        Prf::new(key, 0, 0).fill(&mut page.0);
        self.file.write_all_at(&page.0, self.offset + key % KEYS * PAGE_BYTES as u64)?;
        self.file.sync_data()
    }
}

/// What a tier says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What was asked for.
    pub key: u64,
    /// What was made of it.
    pub value: u64,
    /// How many tiers made it; 0: one of them failed.
    pub tiers: u32,
    /// What a page or a row would be.
    pub body: Vec<u8>,
}

impl Answer {
    fn failed(key: u64) -> Self {
        Self { key, value: 0, tiers: 0, body: vec![] }
    }

    fn new(key: u64, value: u64, tiers: u32, bytes: u32) -> Self {
        let mut body = vec![0; bytes as usize];
        Prf::new(value, key, 0).fill(&mut body);
        Self { key, value, tiers, body }
    }

    /// As it travels.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.body.len());
        for word in [ANSWERS, self.key, self.value] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.tiers.to_le_bytes());
        bytes.extend((self.body.len() as u32).to_le_bytes());
        let sum = checksum(&bytes, &self.body);
        bytes.extend(sum.to_le_bytes());
        bytes.extend(&self.body);
        bytes
    }

    /// Reads one; `read` fills a buffer.
    fn read(mut read: impl FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        let mut head = [0; HEAD_BYTES];
        read(&mut head)?;
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let (tiers, length) = (half(24), half(28));
        if word(0) != ANSWERS || length > MAX_ANSWER_BYTES {
            return Err(altered("an answer's head"));
        }
        let mut body = vec![0; length as usize];
        read(&mut body)?;
        if checksum(&head[..32], &body) != word(32) {
            return Err(altered("an answer"));
        }
        Ok(Self { key: word(8), value: word(16), tiers, body })
    }
}

fn checksum(head: &[u8], body: &[u8]) -> u64 {
    xxh3_64(head) ^ xxh3_64(body).rotate_left(1)
}

fn altered(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} was altered on its way"))
}

fn request(key: u64) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..8].copy_from_slice(&ASK.to_le_bytes());
    bytes[8..16].copy_from_slice(&key.to_le_bytes());
    let sum = xxh3_64(&bytes[..16]);
    bytes[16..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The key of a request that is whole.
fn key_of(bytes: &[u8; REQUEST_BYTES]) -> Option<u64> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (word(0) == ASK && word(16) == xxh3_64(&bytes[..16])).then(|| word(8))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Counters {
    answered: AtomicU64,
    failures: ErrorLog,
}

/// The sessions that are open, so that they can be ended from outside.
#[derive(Debug, Default)]
struct Sessions(Mutex<HashMap<u64, TcpStream>>);

impl Sessions {
    fn keep(&self, number: u64, stream: &TcpStream) -> io::Result<()> {
        lock(&self.0).insert(number, stream.try_clone()?);
        Ok(())
    }

    fn end_all(&self) {
        // One that has ended by itself needs no more.
        lock(&self.0).values().for_each(|stream| drop(stream.shutdown(std::net::Shutdown::Both)));
    }
}

/// A tier at work. Dropping it ends it, with its sessions.
#[derive(Debug)]
pub struct Tier {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    sessions: Arc<Sessions>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

/// What a tier's threads share.
struct Shared {
    spec: TierSpec,
    commits: Option<Commits>,
    table: Vec<u64>,
    counters: Arc<Counters>,
    sessions: Arc<Sessions>,
}

impl Tier {
    /// Begins to answer on every address; `seed` determines the last tier's table.
    ///
    /// # Errors
    /// When the port is taken, the disk cannot be opened, or there is no thread to be had.
    pub fn start(spec: TierSpec, seed: u64) -> io::Result<Self> {
        let commits = spec.commits_to.as_ref().map(Commits::open).transpose()?;
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, spec.port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let mut prf = Prf::new(seed, 0, 0);
        let entries = if spec.asks.is_some() { 0 } else { ENTRIES };
        let table = (0..entries).map(|_| prf.next_u64()).collect();
        let (stop, sessions) = (Arc::new(AtomicBool::new(false)), Arc::<Sessions>::default());
        let counters = Arc::<Counters>::default();
        let shared = Arc::new(Shared { spec, commits, table, counters: counters.clone(), sessions: sessions.clone() });
        let told = stop.clone();
        let thread =
            std::thread::Builder::new().name("tier-accept".into()).spawn(move || accept(&listener, &shared, &told))?;
        Ok(Self { address, stop, sessions, counters, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its counters.
    #[must_use]
    pub fn status(&self) -> TierStatus {
        TierStatus {
            answered: self.counters.answered.load(Relaxed),
            sessions: lock(&self.sessions.0).len() as u64,
            errors: self.counters.failures.count(),
            first_error: self.counters.failures.first(),
        }
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.sessions.end_all();
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, stop: &AtomicBool) {
    let mut number = 0;
    while !stop.load(Relaxed) {
        let wait = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as _ };
        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&wait));
        let Ok((stream, _)) = listener.accept() else { continue };
        number += 1;
        if lock(&shared.sessions.0).len() >= MAX_SESSIONS as usize
            || stream.set_nonblocking(false).is_err()
            || shared.sessions.keep(2 * number, &stream).is_err()
        {
            continue;
        }
        let serving = shared.clone();
        let begun = std::thread::Builder::new().name("tier".into()).spawn(move || {
            // Whoever is at the other end sees how it ended.
            let _ = Session { stream, below: None, sql: None, number, shared: &serving }.serve();
            let mut open = lock(&serving.sessions.0);
            open.remove(&(2 * number));
            open.remove(&(2 * number + 1));
        });
        if begun.is_err() {
            lock(&shared.sessions.0).remove(&(2 * number));
        }
    }
}

struct Session<'a> {
    stream: TcpStream,
    /// To the next tier; made when it is first needed.
    below: Option<TcpStream>,
    /// With the database, where requests are transactions; made when it is first needed.
    sql: Option<Sql>,
    number: u64,
    shared: &'a Shared,
}

impl Session<'_> {
    fn serve(mut self) -> io::Result<()> {
        self.stream.set_nodelay(true)?;
        loop {
            let mut bytes = [0; REQUEST_BYTES];
            self.stream.read_exact(&mut bytes)?;
            let key = key_of(&bytes).ok_or_else(|| altered("a request"))?;
            let answer = match self.answer(key) {
                Ok(answer) => answer,
                Err(error) => {
                    (self.below, self.sql) = (None, None);
                    self.shared
                        .counters
                        .failures
                        .note(format_args!("the next tier, the database or the disk: {error}"));
                    Answer::failed(key)
                }
            };
            self.stream.write_all(&answer.encode())?;
            self.shared.counters.answered.fetch_add(1, Relaxed);
        }
    }

    fn answer(&mut self, key: u64) -> io::Result<Answer> {
        let TierSpec { asks, times, answer_bytes, transacts, .. } = self.shared.spec;
        if let Some(commits) = &self.shared.commits {
            commits.commit(key)?;
        }
        if transacts {
            let sql = match &mut self.sql {
                Some(sql) => sql,
                empty => empty.insert(Sql::open()?),
            };
            let (account, branch) = sql.transact(key)?;
            if asks.is_none() {
                return Ok(Answer::new(key, account.rotate_left(16) ^ branch, 1, answer_bytes));
            }
        }
        let Some(next) = asks else {
            let value = self.shared.table[key as usize % ENTRIES];
            return Ok(Answer::new(key, value, 1, answer_bytes));
        };
        let (mut value, mut tiers) = (0_u64, 0);
        for turn in 0..u64::from(times) {
            let heard = self.ask(next, key.wrapping_mul(31).wrapping_add(turn))?;
            value = value.rotate_left(7) ^ heard.value;
            tiers = heard.tiers;
        }
        Ok(Answer::new(key, value, tiers + 1, answer_bytes))
    }

    fn ask(&mut self, next: SocketAddrV4, key: u64) -> io::Result<Answer> {
        let below = match &mut self.below {
            Some(below) => below,
            empty => {
                let stream = TcpStream::connect_timeout(&next.into(), ANSWER)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(ANSWER))?;
                self.shared.sessions.keep(2 * self.number + 1, &stream)?;
                empty.insert(stream)
            }
        };
        below.write_all(&request(key))?;
        let answer = Answer::read(|buffer| below.read_exact(buffer))?;
        if answer.key != key || answer.tiers == 0 {
            return Err(io::Error::other("it failed, or answered another question"));
        }
        Ok(answer)
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Answered right, within [`LATE`].
    Good,
    /// Answered right, after that.
    Late,
    /// Not answered: a session broke, or a tier said that it failed.
    Failed,
    /// Answered, and not right: altered, or not what the same key gave before.
    Wrong,
}

/// A request, as a client saw it; times count from the clients' start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// When it ended.
    pub at_s: f64,
    /// How long it took.
    pub took_s: f64,
    /// How it ended.
    pub verdict: Verdict,
}

#[derive(Debug, Default)]
struct Log {
    asked: Vec<Asked>,
    not_kept: u64,
    tiers: u32,
    first_error: Option<String>,
}

/// Sessions from outside, each a thread. Dropping it ends them.
#[derive(Debug)]
pub struct Clients {
    /// The zero of their times.
    pub began: Instant,
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What clients have seen so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    /// The first [`MAX_SAMPLES`] requests, in the order in which they ended.
    pub asked: Vec<Asked>,
    /// Requests beyond these.
    pub not_kept: u64,
    /// How many tiers made the last answer.
    pub tiers: u32,
    /// The first thing that went wrong, in words.
    pub first_error: Option<String>,
}

impl Clients {
    /// Begins `sessions` of them, which `connect` makes connections for; each thinks for `think` between an answer and its next
    /// request.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(
        sessions: u32,
        think: Duration,
        connect: impl Fn() -> io::Result<TcpStream> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let (began, stop) = (Instant::now(), Arc::new(AtomicBool::new(false)));
        let (log, connect) = (Arc::<Mutex<Log>>::default(), Arc::new(connect));
        let values = Arc::<Mutex<HashMap<u64, u64>>>::default();
        let mut clients = Self { began, log: log.clone(), stop: stop.clone(), threads: vec![] };
        for number in 0..sessions {
            let (log, stop, values, connect) = (log.clone(), stop.clone(), values.clone(), connect.clone());
            let keys = Prf::new(u64::from(number), 0, 0);
            let client = Client { began, think, log, stop, values, keys };
            let run = move || client.run(&*connect);
            clients.threads.push(std::thread::Builder::new().name("tier-client".into()).spawn(run)?);
        }
        Ok(clients)
    }

    /// Everything so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        let log = lock(&self.log);
        Seen {
            asked: log.asked.clone(),
            not_kept: log.not_kept,
            tiers: log.tiers,
            first_error: log.first_error.clone(),
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

struct Client {
    began: Instant,
    think: Duration,
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    /// What each key gave first, to any session.
    values: Arc<Mutex<HashMap<u64, u64>>>,
    keys: Prf,
}

impl Client {
    fn run(mut self, connect: &(dyn Fn() -> io::Result<TcpStream> + Send + Sync)) {
        let mut stream: Option<TcpStream> = None;
        while !self.stop.load(Relaxed) {
            let key = self.keys.next_u64() % KEYS;
            let asked = Instant::now();
            let answer = self.ask(&mut stream, connect, key);
            if self.stop.load(Relaxed) {
                return;
            }
            let took = asked.elapsed();
            let (verdict, why) = match answer {
                Ok(answer) => self.judge(&answer, key, took),
                Err(error) => {
                    stream = None;
                    let wrong = error.kind() == io::ErrorKind::InvalidData;
                    (if wrong { Verdict::Wrong } else { Verdict::Failed }, Some(error.to_string()))
                }
            };
            self.note(verdict, took, why);
            self.rest(if stream.is_none() { AGAIN } else { self.think });
        }
    }

    fn ask(
        &self,
        stream: &mut Option<TcpStream>,
        connect: &(dyn Fn() -> io::Result<TcpStream> + Send + Sync),
        key: u64,
    ) -> io::Result<Answer> {
        let stream = match stream {
            Some(stream) => stream,
            empty => {
                let made = connect()?;
                made.set_nodelay(true)?;
                made.set_read_timeout(Some(LOOK))?;
                empty.insert(made)
            }
        };
        stream.write_all(&request(key))?;
        let deadline = Instant::now() + PATIENCE;
        Answer::read(|buffer| self.fill(stream, buffer, deadline))
    }

    /// Reads until `buffer` is full, but no longer than it is wanted.
    fn fill(&self, stream: &mut TcpStream, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !buffer.is_empty() {
            match stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => buffer = &mut buffer[read..],
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if self.stop.load(Relaxed) || Instant::now() > deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn judge(&self, answer: &Answer, key: u64, took: Duration) -> (Verdict, Option<String>) {
        if answer.tiers == 0 {
            return (Verdict::Failed, Some("a tier failed".into()));
        }
        let first = *lock(&self.values).entry(key).or_insert(answer.value);
        if answer.key != key || first != answer.value {
            let why = format!("key {key} gave {first:#x} first, then {:#x} for key {}", answer.value, answer.key);
            return (Verdict::Wrong, Some(why));
        }
        lock(&self.log).tiers = answer.tiers;
        (if took > LATE { Verdict::Late } else { Verdict::Good }, None)
    }

    fn note(&self, verdict: Verdict, took: Duration, why: Option<String>) {
        let asked = Asked { at_s: self.began.elapsed().as_secs_f64(), took_s: took.as_secs_f64(), verdict };
        let mut log = lock(&self.log);
        if log.asked.len() < MAX_SAMPLES {
            log.asked.push(asked);
        } else {
            log.not_kept += 1;
        }
        if log.first_error.is_none() {
            log.first_error = why;
        }
    }

    fn rest(&self, time: Duration) {
        let end = Instant::now() + time;
        while !self.stop.load(Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(asks: Option<SocketAddr>, times: u32) -> TierSpec {
        let asks = asks.map(|at| SocketAddrV4::new(Ipv4Addr::LOCALHOST, at.port()));
        TierSpec { port: 0, asks, times, answer_bytes: 100, commits_to: None, transacts: false }
    }

    fn clients_of(tier: &Tier) -> Clients {
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, tier.address().port()));
        Clients::start(3, Duration::ZERO, move || TcpStream::connect(at)).unwrap()
    }

    fn until(what: &str, is: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < deadline, "not within a minute: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn count(clients: &Clients, verdict: Verdict) -> usize {
        clients.seen().asked.iter().filter(|asked| asked.verdict == verdict).count()
    }

    #[test]
    fn three_tiers_answer_together_and_the_last_one_is_asked_as_often_as_they_say() {
        let database = Tier::start(spec(None, 1), 1).unwrap();
        let application = Tier::start(spec(Some(database.address()), 2), 1).unwrap();
        let web = Tier::start(spec(Some(application.address()), 1), 1).unwrap();
        let clients = clients_of(&web);
        until("there are answers", || count(&clients, Verdict::Good) > 50);
        let seen = clients.seen();
        drop(clients);
        assert_eq!(seen.tiers, 3);
        assert!(seen.asked.iter().all(|asked| asked.verdict == Verdict::Good), "{:?}", seen.first_error);
        until("nothing is under way", || database.status().answered == 2 * application.status().answered);
        assert!(database.status().answered >= 100);
    }

    #[test]
    fn a_tier_that_is_gone_is_a_failure_and_one_that_is_back_with_another_table_is_wrong() {
        let database = Tier::start(spec(None, 1), 1).unwrap();
        let port = database.address().port();
        let web = Tier::start(spec(Some(database.address()), 1), 1).unwrap();
        let clients = clients_of(&web);
        until("there are answers", || count(&clients, Verdict::Good) > KEYS as usize * 8);
        assert_eq!(count(&clients, Verdict::Failed) + count(&clients, Verdict::Wrong), 0);
        drop(database);
        until("it is missed", || count(&clients, Verdict::Failed) > 0);
        let other = TierSpec { port, ..spec(None, 1) };
        until("its port is free", || Tier::start(other.clone(), 2).map(drop).is_ok());
        let _back = Tier::start(other, 2).unwrap();
        until("what it says is not what it said", || count(&clients, Verdict::Wrong) > 0);
        assert!(web.status().errors > 0 && web.status().first_error.is_some());
    }

    #[test]
    fn a_tier_that_commits_has_written_each_key_before_it_answers_and_fails_where_it_cannot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let offset = 8192;
        std::fs::write(&path, vec![0; (offset + COMMIT_BYTES) as usize]).unwrap();
        let commits_to = Some(DiskPlace { path: path.clone(), offset });
        let tier = Tier::start(TierSpec { commits_to, ..spec(None, 1) }, 1).unwrap();
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, tier.address().port())).unwrap();
        for key in [0, 7, 255] {
            stream.write_all(&request(key)).unwrap();
            let answer = Answer::read(|buffer| stream.read_exact(buffer)).unwrap();
            assert_eq!((answer.key, answer.tiers), (key, 1));
            let disk = std::fs::read(&path).unwrap();
            let at = (offset + key * PAGE_BYTES as u64) as usize;
            assert!(disk[at..at + PAGE_BYTES].iter().any(|byte| *byte != 0), "key {key}");
        }
        assert!(std::fs::read(&path).unwrap()[..offset as usize].iter().all(|byte| *byte == 0));

        let commits_to = Some(DiskPlace { path: "/dev/full".into(), offset: 0 });
        let full = Tier::start(TierSpec { commits_to, ..spec(None, 1) }, 1).unwrap();
        let clients = clients_of(&full);
        until("it says that it failed", || count(&clients, Verdict::Failed) > 0);
        assert_eq!(count(&clients, Verdict::Good), 0);
    }

    #[test]
    fn who_sends_no_request_is_hung_up_on() {
        let tier = Tier::start(spec(None, 1), 1).unwrap();
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, tier.address().port())).unwrap();
        stream.write_all(&[7; REQUEST_BYTES]).unwrap();
        assert!(!matches!(stream.read(&mut [0]), Ok(1)));
        until("its session is gone", || tier.status().sessions == 0);
    }

    proptest! {
        #[test]
        fn an_answer_reads_back_and_any_altered_byte_is_found(key: u64, value: u64, at in 0..140usize, change in 1..=255u8) {
            let answer = Answer::new(key, value, 3, 100);
            let read = |bytes: &[u8]| {
                let mut rest = bytes;
                Answer::read(|buffer| rest.read_exact(buffer))
            };
            let mut bytes = answer.encode();
            prop_assert_eq!(read(&bytes).unwrap(), answer);
            bytes[at] ^= change;
            prop_assert!(read(&bytes).is_err());
            let mut asked = request(key);
            prop_assert_eq!(key_of(&asked), Some(key));
            asked[at % REQUEST_BYTES] ^= change;
            prop_assert_eq!(key_of(&asked), None);
        }
    }
}
