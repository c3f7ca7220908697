//! The host's side of the control protocol.

use std::{
    io::{self, BufReader},
    net::{TcpStream, ToSocketAddrs},
    time::Duration,
};

use crate::{
    activity::ActivityReport,
    protocol::{
        Answer, CheckReport, CorruptReport, CorruptTarget, HelloReport, LoadSpec, Refusal, Reply, Request,
        StatusReport, WarmReport,
    },
    wire::{self, WireError},
};

/// How long `warm`, `start` and `check` may take unless [`Control::with_patience`] says otherwise: beyond the limit of
/// warming, and enough for an emulated guest to read back all of its disk.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Why a request yielded nothing.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No connection.
    #[error(
        "cannot connect to the load program at {address}: {source}; \
         is the guest up, and does it run `godwit-load serve`?"
    )]
    Connect {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The reply did not come in time.
    #[error(
        "the load program did not answer `{request}` within {} s; the guest is stopped, cut off or overloaded. \
         Open a new connection to go on",
        after.as_secs_f64()
    )]
    TimedOut {
        /// What was asked.
        request: &'static str,
        /// For how long it was waited.
        after: Duration,
    },
    /// The connection failed, or carried something else than this protocol.
    #[error("`{request}` to the load program failed: {source}. Open a new connection to go on")]
    Wire {
        /// What was asked.
        request: &'static str,
        /// Why.
        source: WireError,
    },
    /// The load program closed the connection instead of answering.
    #[error("the load program closed the connection instead of answering `{request}`; see the guest's console")]
    Closed {
        /// What was asked.
        request: &'static str,
    },
    /// The load program answered that it could not or would not.
    #[error("the load program refused `{request}`: {refusal}")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// Its words.
        refusal: Refusal,
    },
    /// An answer to some other question.
    #[error("the load program answered `{request}` with something else: {answer:?}; host and guest differ in version")]
    Unexpected {
        /// What was asked.
        request: &'static str,
        /// What came.
        answer: Box<Answer>,
    },
    /// An earlier request on this connection failed half-way, so a late reply could be taken for the next one's.
    #[error("`{request}` was not sent: an earlier request on this connection failed; open a new connection")]
    OutOfStep {
        /// What was to be asked.
        request: &'static str,
    },
}

/// Whether replies still belong to requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    In,
    Out,
}

/// A control connection. One request at a time; after a timeout or a broken connection, open a new one.
#[derive(Debug)]
pub struct Control {
    reader: BufReader<TcpStream>,
    timeout: Duration,
    patience: Duration,
    step: Step,
    line: Vec<u8>,
}

impl Control {
    /// Connects; `timeout` bounds the connecting and every quick request.
    ///
    /// # Errors
    /// [`ControlError::Connect`].
    pub fn connect(address: impl ToSocketAddrs + std::fmt::Debug, timeout: Duration) -> Result<Self, ControlError> {
        let failed = |source| ControlError::Connect { address: format!("{address:?}"), source };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for candidate in address.to_socket_addrs().map_err(failed)? {
            match TcpStream::connect_timeout(&candidate, timeout) {
                Ok(stream) => return Ok(Self::new(stream, timeout)),
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Over a connection that the caller opened, say in another network namespace. `timeout` must not be zero.
    pub fn new(stream: TcpStream, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "a request needs time to be answered");
        // Without it requests are merely slower.
        let _ = stream.set_nodelay(true);
        Self {
            reader: BufReader::new(stream),
            timeout,
            patience: PATIENCE.max(timeout),
            step: Step::In,
            line: Vec::new(),
        }
    }

    /// Changes how long `warm`, `start`, `check`, `stop` and `corrupt` may take; not zero.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        assert!(!patience.is_zero(), "a request needs time to be answered");
        self.patience = patience;
        self
    }

    /// Who is there.
    ///
    /// # Errors
    /// See [`ControlError`]; so for all requests.
    pub fn hello(&mut self) -> Result<HelloReport, ControlError> {
        self.ask("hello", &Request::Hello {}, self.timeout, |answer| match answer {
            Answer::Hello(report) => Ok(report),
            other => Err(other),
        })
    }

    /// Counters of the loads.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn status(&mut self) -> Result<StatusReport, ControlError> {
        self.ask("status", &Request::Status {}, self.timeout, |answer| match answer {
            Answer::Status(report) => Ok(report),
            other => Err(other),
        })
    }

    /// What the guest saw of its disks and its work, from interval number `from` on.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn activity(&mut self, from: u64) -> Result<ActivityReport, ControlError> {
        self.ask("activity", &Request::Activity { from }, self.timeout, |answer| match answer {
            Answer::Activity(report) => Ok(report),
            other => Err(other),
        })
    }

    /// Fills the guest's memory until at most `free_percent_max` (0 to 100) of it is free.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn warm(&mut self, free_percent_max: u8) -> Result<WarmReport, ControlError> {
        self.ask("warm", &Request::Warm { free_percent_max }, self.patience, |answer| match answer {
            Answer::Warm(report) => Ok(report),
            other => Err(other),
        })
    }

    /// Replaces the loads; returns when all of them run.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn start(&mut self, loads: &[LoadSpec], seed: u64) -> Result<(), ControlError> {
        self.ask("start", &Request::Start { loads: loads.to_vec(), seed }, self.patience, |answer| match answer {
            Answer::Started => Ok(()),
            other => Err(other),
        })
    }

    /// Verifies everything; the loads are paused meanwhile.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn check(&mut self) -> Result<CheckReport, ControlError> {
        self.ask("check", &Request::Check {}, self.patience, |answer| match answer {
            Answer::Check(report) => Ok(*report),
            other => Err(other),
        })
    }

    /// Stops the loads; they can still be checked.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn stop(&mut self) -> Result<(), ControlError> {
        self.ask("stop", &Request::Stop {}, self.patience, |answer| match answer {
            Answer::Stopped => Ok(()),
            other => Err(other),
        })
    }

    /// Damages something on purpose, so that the next check must fail.
    #[allow(clippy::missing_errors_doc, reason = "see hello")]
    pub fn corrupt(&mut self, what: CorruptTarget) -> Result<CorruptReport, ControlError> {
        self.ask("corrupt", &Request::Corrupt { what }, self.patience, |answer| match answer {
            Answer::Corrupted(report) => Ok(report),
            other => Err(other),
        })
    }

    fn ask<T>(
        &mut self,
        request: &'static str,
        message: &Request,
        limit: Duration,
        expect: impl FnOnce(Answer) -> Result<T, Answer>,
    ) -> Result<T, ControlError> {
        if self.step == Step::Out {
            return Err(ControlError::OutOfStep { request });
        }
        // Until the reply is here in full.
        self.step = Step::Out;
        let reply = self.exchange(message, limit).map_err(|source| match source {
            WireError::Io(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                ControlError::TimedOut { request, after: limit }
            }
            source => ControlError::Wire { request, source },
        })?;
        let reply = reply.ok_or(ControlError::Closed { request })?;
        self.step = Step::In;
        match reply {
            Reply::Ok(answer) => {
                expect(answer).map_err(|answer| ControlError::Unexpected { request, answer: Box::new(answer) })
            }
            Reply::Error(refusal) => Err(ControlError::Refused { request, refusal }),
        }
    }

    fn exchange(&mut self, message: &Request, limit: Duration) -> Result<Option<Reply>, WireError> {
        let stream = self.reader.get_mut();
        stream.set_write_timeout(Some(limit))?;
        stream.set_read_timeout(Some(limit))?;
        wire::write_line(stream, message)?;
        if !wire::read_line(&mut self.reader, &mut self.line)? {
            return Ok(None);
        }
        wire::decode(&self.line).map(Some)
    }
}
