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
}

impl Rules {
    /// All of them.
    pub const ALL: Self = Self { handoff: godwit_handoff::Guards::ALL, volume: godwit_volume::Guards::ALL };
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
