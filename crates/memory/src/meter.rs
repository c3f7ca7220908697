//! Where a codec's time goes. Without a clock, which only a bench gives, nothing is measured and nothing is spent.

use std::time::Duration;

/// A clock: time since any moment.
pub type Clock = fn() -> Duration;

/// Time spent, by what on. What is in none of them (taking records apart, copying) is the rest of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Hashes by which pages are known again.
    pub marks: Duration,
    /// Comparing with what was last sent, keeping it, writing and applying differences.
    pub deltas: Duration,
    /// Finding, reading and verifying blocks of disks.
    pub disks: Duration,
    /// Trying how pages' bytes are to lie.
    pub shuffle: Duration,
    /// The digest of the rebuilt stream.
    pub digest: Duration,
    /// zstd.
    pub zstd: Duration,
}

impl Stages {
    /// By name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Duration); 6] {
        [
            ("marks", self.marks),
            ("deltas", self.deltas),
            ("disks", self.disks),
            ("shuffle", self.shuffle),
            ("digest", self.digest),
            ("zstd", self.zstd),
        ]
    }
}

/// A clock, and what it showed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    pub(crate) clock: Option<Clock>,
    pub(crate) stages: Stages,
}

impl Meter {
    /// A moment, for [`Meter::since`].
    pub(crate) fn now(&self) -> Duration {
        self.clock.map_or(Duration::ZERO, |clock| clock())
    }

    /// What has passed since.
    pub(crate) fn since(&self, then: Duration) -> Duration {
        self.now().saturating_sub(then)
    }
}
