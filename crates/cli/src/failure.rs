//! How a command fails, and with which exit code.

use godwit_api::{ApiError, Problem};
use std::fmt;

/// The exit codes; part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// It failed.
    Failed = 1,
    /// The command line makes no sense (clap's own code, too).
    Usage = 2,
    /// What would make a move fail was found before it.
    Blocked = 3,
    /// The controller, or a node that it has to ask, cannot be reached.
    Unreachable = 4,
    /// The move was cancelled.
    Cancelled = 5,
    /// ^C ended the following of a move; the move goes on. The code is the shells' own for this.
    Interrupted = 130,
}

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: Code,
    /// What, where, and what to do; empty when all has been said.
    pub message: String,
}

impl Failure {
    /// With a code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The command line makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Code::Usage, message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let code = match error.problem {
            Problem::Blocked => Code::Blocked,
            Problem::Unreachable => Code::Unreachable,
            _ => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::new(Code::Failed, format!("{error:#}"))
    }
}

impl From<godwit_trust::TrustError> for Failure {
    fn from(error: godwit_trust::TrustError) -> Self {
        Self::new(Code::Failed, error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(Code::Failed, error.to_string())
    }
}
