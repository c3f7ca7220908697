//! What is served.

use godwit_nbd::{Command, Cookie, Export, Reply};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// A disk.
pub trait Backend: Send + Sync + 'static {
    /// How clients see it.
    fn export(&self) -> Export;

    /// Reads what needs no waiting, without waiting: how many bytes of `into` were filled, from its beginning. 0: [`Backend::perform`]
    /// is asked.
    fn read_now(&self, offset: u64, into: &mut [u8]) -> usize;

    /// The file in which these bytes lie, at the same offset: they are sent from its pages then, without a copy. What overwrites
    /// them before the client has taken them may reach it in their stead.
    fn file_of(&self, _offset: u64, _length: u64) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Writes what need not come through this process: `put` brings all of it to a file, from a place in it on. Where that cannot be done
    /// now, [`Untaken`], `put` was not called and [`Backend::perform`] is asked. `None`: the answer comes through `answers`.
    ///
    /// # Errors
    /// [`Untaken`], and nothing else: what fails is the answer.
    fn write_by(
        &self,
        _: Cookie,
        _offset: u64,
        _length: u32,
        _: &Answers,
        _put: Put<'_>,
    ) -> Result<Option<Reply>, Untaken> {
        Err(Untaken)
    }

    /// Waits until [`Backend::read_now`] has a chance. If it has none then, [`Backend::perform`] is asked.
    fn warm(&self, offset: u64, length: u64);

    /// Does what a client wants, and waits for the disk if need be. `None`: the answer comes through `answers`.
    fn perform(&self, cookie: Cookie, command: Command, answers: &Answers) -> Option<Reply>;
}

/// Brings the contents of a write to a file: all of them, to the place that it is given.
pub type Put<'a> = &'a mut dyn FnMut(BorrowedFd<'_>, u64) -> io::Result<()>;

/// A write that has to be asked for with its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untaken;

/// Where answers go that come from another thread than the client's.
#[derive(Clone, Debug)]
pub struct Answers(Arc<Inbox>);

/// What has come of a request.
#[derive(Debug)]
pub(crate) enum Answer {
    Reply(Reply),
    /// What it reads is in memory.
    Warm,
}

#[derive(Debug)]
struct Inbox {
    /// Bounded by the requests that a client may have under way.
    come: Mutex<Vec<(Cookie, Answer)>>,
    event: OwnedFd,
}

impl Answers {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Inbox { come: Mutex::default(), event })))
    }

    /// Sends one.
    pub fn send(&self, cookie: Cookie, reply: Reply) {
        self.put(cookie, Answer::Reply(reply));
    }

    pub(crate) fn put(&self, cookie: Cookie, answer: Answer) {
        let mut come = self.0.come.lock().unwrap_or_else(PoisonError::into_inner);
        come.push((cookie, answer));
        // Whoever put in the first has woken the thread, and it takes all.
        if come.len() == 1 {
            // Fails only at the end of a 64-bit count.
            let _ = rustix::io::write(&self.0.event, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn take(&self) -> Vec<(Cookie, Answer)> {
        let mut come = self.0.come.lock().unwrap_or_else(PoisonError::into_inner);
        if come.is_empty() {
            // Nor has the event anything to read: it is written under this lock.
            return vec![];
        }
        let _ = rustix::io::read(&self.0.event, &mut [0; 8]);
        std::mem::take(&mut *come)
    }

    /// Readable when there are some.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}
