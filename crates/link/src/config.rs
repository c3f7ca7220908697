//! Lanes, priorities, addresses, and what an operator can set.

use godwit_trust::Identity;
use godwit_units::Bytes;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A connection of its own, on its own UDP port: what is lost or queued on one lane does not hold up another, and
/// operators can mark, shape and count each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Messages, requests, and small streams that must never wait. No limit applies.
    Control,
    /// Blocks.
    Disk,
    /// Pages and device state.
    Memory,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Control, Self::Disk, Self::Memory];

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// Which of two streams goes first. On one lane QUIC orders them; under a limit, the budget does across lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// What fills idle bandwidth: pre-caching.
    Background,
    /// Pages, the copy of a disk, and the fill after a hand-off.
    Bulk,
    /// A mirrored write: nobody waits for it before it is far behind.
    Mirrored,
    /// Somebody waits for it: a block on demand.
    Interactive,
    /// What ends waiting: never held back by a limit.
    Control,
}

impl Priority {
    pub(crate) const ALL: [Self; 5] = [Self::Background, Self::Bulk, Self::Mirrored, Self::Interactive, Self::Control];

    /// What stands for it where a stream is opened. A peer of an earlier version knows no 4: what is mirrored is opened as [`Self::Bulk`].
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Background => 0,
            Self::Bulk => 1,
            Self::Interactive => 2,
            Self::Control => 3,
            Self::Mirrored => 4,
        }
    }
}

/// A UDP address per lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Addresses {
    /// The control lane's; 4433 by custom.
    pub control: SocketAddr,
    /// The disk lane's; 10809 by custom.
    pub disk: SocketAddr,
    /// The memory lane's; 4444 by custom.
    pub memory: SocketAddr,
}

impl Addresses {
    /// The customary ports at `ip`.
    #[must_use]
    pub const fn customary(ip: IpAddr) -> Self {
        Self { control: SocketAddr::new(ip, 4433), disk: SocketAddr::new(ip, 10809), memory: SocketAddr::new(ip, 4444) }
    }

    /// The address of one lane.
    #[must_use]
    pub const fn of(&self, lane: Lane) -> SocketAddr {
        match lane {
            Lane::Control => self.control,
            Lane::Disk => self.disk,
            Lane::Memory => self.memory,
        }
    }
}

/// Whom to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Who must answer: checked against the certificate.
    pub identity: Identity,
    /// Where.
    pub addresses: Addresses,
}

/// What an operator can set. `Config::new` has the values to begin with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen, and from where to connect: the same ports, so that a firewall needs one rule a lane.
    pub listen: Addresses,
    /// How often an idle connection says that it lives.
    pub keep_alive: Duration,
    /// The silence after which a connection counts as lost. At least three keep-alives, or single losses will cut it.
    pub silence: Duration,
    /// The pause between two attempts to connect again.
    pub retry: Duration,
    /// How long one attempt may take. At least four round trips.
    pub attempt: Duration,
    /// How long [`Endpoint::connect`](crate::Endpoint::connect) tries before it gives up.
    pub connect: Duration,
    /// How long the accepting side keeps a session whose initiator is gone.
    pub orphan: Duration,
    /// What a stream may have sent that the peer's application has not read, unless
    /// [`SendHalf::set_window`](crate::SendHalf::set_window) says otherwise. At least the bandwidth-delay product.
    pub window: Bytes,
    /// What a peer may have sent on one stream that we have not read, before it is cut off. No less than the
    /// largest window that a peer uses.
    pub receive_limit: Bytes,
    /// The largest UDP payload that path MTU discovery tries.
    pub max_datagram: u16,
}

impl Config {
    /// Values for up to 1 Gbit/s and 180 ms.
    #[must_use]
    pub const fn new(listen: Addresses) -> Self {
        Self {
            listen,
            keep_alive: Duration::from_millis(500),
            silence: Duration::from_secs(2),
            retry: Duration::from_millis(500),
            attempt: Duration::from_millis(1500),
            connect: Duration::from_secs(10),
            orphan: Duration::from_secs(600),
            window: Bytes::mib(4),
            receive_limit: Bytes::mib(32),
            max_datagram: 1452,
        }
    }
}
