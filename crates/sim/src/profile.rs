//! Which rules hold in a world, and what kind of misfortune it has.

use crate::net::Weather;
use rand::Rng;
use rand::rngs::SmallRng;

/// The rules in force, of each machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The hand-off's.
    pub handoff: godwit_handoff::Guards,
    /// The replica's.
    pub volume: godwit_volume::Guards,
    /// The node's around a QEMU in post-copy.
    pub shell: ShellGuards,
    /// What a node finds of a record when it starts is made durable before anything is built on it.
    pub records_made_sure: bool,
}

impl Rules {
    /// All of them.
    pub const ALL: Self = Self {
        handoff: godwit_handoff::Guards::ALL,
        volume: godwit_volume::Guards::ALL,
        shell: ShellGuards { removed: None },
        records_made_sure: true,
    };
}

impl From<godwit_handoff::Guards> for Rules {
    fn from(handoff: godwit_handoff::Guards) -> Self {
        Self { handoff, ..Self::ALL }
    }
}

impl From<godwit_volume::Guards> for Rules {
    fn from(volume: godwit_volume::Guards) -> Self {
        Self { volume, ..Self::ALL }
    }
}

/// What the node does, and the machines do not know of, so that a source's QEMU can go back from a post-copy that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShellGuard {
    /// It goes back by a stream of its own, which it is led to the end of; not by `migrate_cancel`, which spoils one whose stream broke off, and
    /// now and then one whose stream did not.
    EndsByItsOwnStream,
    /// It sends few pages until the guest runs at the destination. Who has sent the last one waits for its destination's word for ever, if
    /// the stream breaks off.
    TricklesUntilGone,
    /// A stream that broke off is followed by another only when the guest runs at the destination. Who is about to agree over what has come
    /// when that one breaks off, too, goes neither on nor back.
    ResumesOnlyGone,
}

impl ShellGuard {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::EndsByItsOwnStream, Self::TricklesUntilGone, Self::ResumesOnlyGone];
}

/// The shell's guards in force. All of them, but in the tests that show what each is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShellGuards {
    removed: Option<ShellGuard>,
}

impl ShellGuards {
    /// Every guard but one.
    #[must_use]
    pub const fn without(guard: ShellGuard) -> Self {
        Self { removed: Some(guard) }
    }

    /// Whether `guard` is in force.
    #[must_use]
    pub fn hold(self, guard: ShellGuard) -> bool {
        self.removed != Some(guard)
    }
}

impl From<ShellGuards> for Rules {
    fn from(shell: ShellGuards) -> Self {
        Self { shell, ..Self::ALL }
    }
}

/// What goes wrong most in a world. A rare accident is common in some of them, so that few seeds show what a missing guard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// A bit of everything, or nothing.
    Mixed,
    /// Nodes die while they write a record.
    AtRecords,
    /// Nodes and power fail in the middle of what a replica does.
    InTheMiddle,
    /// Users cancel about when the seal is written, while nodes die at records.
    Cancels,
    /// Operators claim.
    Claims,
    /// The QEMU that a VM was handed to dies.
    QemusDie,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Mixed, Self::AtRecords, Self::InTheMiddle, Self::Cancels, Self::Claims, Self::QemusDie];

    /// How the network treats messages.
    pub fn weather(self, rng: &mut SmallRng) -> Weather {
        match self {
            Self::Cancels | Self::Claims if rng.random_ratio(2, 3) => Weather::Stale,
            _ if rng.random_ratio(1, 4) => Weather::Fair,
            _ => Weather::Bad,
        }
    }

    /// One fault in about so many events.
    pub fn fault_every(self, rng: &mut SmallRng) -> u32 {
        match self {
            Self::Mixed => [u32::MAX, 400, 150, 50][rng.random_range(0..4)],
            Self::AtRecords => 400,
            Self::InTheMiddle => [200, 60][rng.random_range(0..2)],
            Self::Cancels | Self::QemusDie => [2000, 400, 150][rng.random_range(0..3)],
            Self::Claims => [400, 150][rng.random_range(0..2)],
        }
    }
}
