//! What is counted here and nowhere else.

use godwit_units::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The size of a page, which is the same on all machines that are moved.
pub const PAGE: Bytes = Bytes(4096);

/// A count of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pages(pub u64);

impl Pages {
    /// The pages that memory of this size has; one that is begun counts.
    #[must_use]
    pub const fn of(memory: Bytes) -> Self {
        Self(memory.0.div_ceil(PAGE.0))
    }

    /// Their size, saturating.
    #[must_use]
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0.saturating_mul(PAGE.0))
    }

    /// The nearest whole number of pages; models of averages count in fractions.
    #[must_use]
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`as` saturates, which is what is wanted"
    )]
    pub fn nearest(pages: f64) -> Self {
        Self(pages.round() as u64)
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{} {}", self.0, if self.0 == 1 { "page" } else { "pages" }))
    }
}

/// How many pages a guest dirties in a second: each page counts once until it has been seen dirty.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageRate(f64);

impl PageRate {
    /// So many pages a second; what is negative or no number is none.
    #[must_use]
    pub fn new(per_second: f64) -> Self {
        Self(if per_second.is_finite() { per_second.max(0.0) } else { 0.0 })
    }

    /// Pages a second.
    #[must_use]
    pub const fn per_second(self) -> f64 {
        self.0
    }
}

/// What a move takes besides its pages: measured on moves of idle guests (section IV-A of the paper).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overheads {
    /// Before the first page: choosing the destination, reserving room there. The guest runs.
    pub pre: Duration,
    /// After the last page: committing, activating. The guest stands.
    pub post: Duration,
}
