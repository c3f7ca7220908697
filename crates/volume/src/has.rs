//! What a target says first: which blocks its replica has, and with what stamps (Have), a message at a time. Of a large volume that was written here and
//! there that is much: each run takes 36 bytes, and a GiB may have a quarter of a million of them. So it is read a window at a
//! time (`walk.rs`) when the last of it has gone, and a source compares each message with a window of its own table before it takes
//! the next: neither side ever holds more than a window of runs and some messages, whatever the volume's size.
//!
//! The replica may be written to in between by nobody but the session that this begins, which waits for the end of it. So what is said is what it has at
//! the end, too.

use crate::error::VolumeError;
use crate::replica::Replica;
use crate::runs::{EPOCH, HAVE, LAST, MORE, MOST_RUNS, Run, run_message};
use crate::walk::Walk;
use std::collections::VecDeque;

/// How a source finds out that it has been told everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The last message about stamps says that it is.
    Last,
    /// A message with the epoch that the replica holds follows.
    Epoch,
}

/// What a target's replica has, as messages to its source.
#[derive(Debug)]
pub struct Has {
    before: VecDeque<Vec<u8>>,
    /// The table that is being read, to its end.
    walk: Option<Walk>,
    /// Read, and not said.
    runs: VecDeque<Run>,
    ends: Option<Ends>,
    behind: VecDeque<Vec<u8>>,
    /// Runs of a message.
    most: usize,
}

impl Has {
    pub(crate) fn new(replica: &Replica, ends: Ends) -> Result<Self, VolumeError> {
        Ok(Self {
            before: VecDeque::new(),
            walk: Some(replica.begin_telling()?),
            runs: VecDeque::new(),
            ends: Some(ends),
            behind: VecDeque::new(),
            most: MOST_RUNS,
        })
    }

    /// Messages that go before all others, in this order.
    pub(crate) fn first(mut self, messages: impl IntoIterator<Item = Vec<u8>>) -> Self {
        self.before = messages.into_iter().chain(self.before).collect();
        self
    }

    /// Messages that go behind all others.
    pub(crate) fn then(mut self, messages: impl IntoIterator<Item = Vec<u8>>) -> Self {
        self.behind.extend(messages);
        self
    }

    /// The same with so few runs in a message.
    #[cfg(test)]
    pub(crate) fn in_messages_of(mut self, runs: usize) -> Self {
        self.most = runs;
        self
    }

    /// Runs that it holds.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.runs.len()
    }

    /// The next message; `None`: all was said. Whoever writes to the replica is let through now and then, and may wait for a window.
    ///
    /// # Errors
    /// When the medium fails, or a pre-cache's replica was told what it will have to fetch.
    pub fn next(&mut self, replica: &Replica) -> Result<Option<Vec<u8>>, VolumeError> {
        if self.ends == Some(Ends::Epoch) {
            // A hand-off may have begun since.
            replica.refuse_strange()?;
        }
        if let Some(message) = self.before.pop_front() {
            return Ok(Some(message));
        }
        while let Some(walk) = &mut self.walk {
            // The last one read may go on.
            if self.runs.len() > self.most {
                return Ok(Some(self.message(MORE)));
            }
            if !replica.read_on(walk, &mut self.runs)? {
                self.walk = None;
            }
        }
        match self.ends {
            Some(Ends::Last) if self.runs.len() <= self.most => {
                self.ends = None;
                Ok(Some(self.message(LAST)))
            }
            Some(_) if !self.runs.is_empty() => Ok(Some(self.message(MORE))),
            Some(_) => {
                self.ends = None;
                let held = serde_json::to_vec(&replica.complete());
                let held = held.map_err(|error| replica.io("say the epoch of")(error.into()))?;
                Ok(Some([&[HAVE, EPOCH][..], &held].concat()))
            }
            None => Ok(self.behind.pop_front()),
        }
    }

    /// The first of the runs that were read.
    fn message(&mut self, more: u8) -> Vec<u8> {
        let mut message = vec![HAVE, more];
        for (run, stamp) in self.runs.drain(..self.runs.len().min(self.most)) {
            message.extend(&run_message(HAVE, &run, stamp, &[])[1..]);
        }
        message
    }

    /// All of it at once, for whoever has the room.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn all(mut self, replica: &Replica) -> Result<Vec<Vec<u8>>, VolumeError> {
        std::iter::from_fn(|| self.next(replica).transpose()).collect()
    }
}
