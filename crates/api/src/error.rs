//! What an answer says when something could not be done.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The kinds of failure, each with its HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Problem {
    /// The request makes no sense (400).
    Invalid,
    /// Whoever asks may not (403).
    Forbidden,
    /// There is no such thing (404).
    NotFound,
    /// It exists already, or its state does not allow this now (409).
    Conflict,
    /// A check before a move found what would make it fail (422).
    Blocked,
    /// Something failed that should work (500).
    Failed,
    /// Another part of Godwit could not be reached (502).
    Unreachable,
}

impl Problem {
    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Blocked => 422,
            Self::Failed => 500,
            Self::Unreachable => 502,
        }
    }
}

/// The body of every answer that is not a success: what, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{message}{}", remedy.as_ref().map_or(String::new(), |r| format!("; {r}")))]
pub struct ApiError {
    /// The kind.
    pub problem: Problem,
    /// What went wrong, and with what.
    pub message: String,
    /// Where: the request, and where it is known the place in its body. Filled in by the server that answers.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// What can be done about it, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl ApiError {
    /// An error without advice.
    pub fn new(problem: Problem, message: impl Into<String>) -> Self {
        Self { problem, message: message.into(), place: None, remedy: None }
    }

    /// The same with advice.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}
