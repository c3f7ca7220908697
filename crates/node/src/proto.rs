//! What nodes say to each other over the link, besides streams of blocks and pages. JSON, because it is little and read by people who
//! look for faults; bounded by the link.

use godwit_api::ApiError;
use godwit_api::host::PeerHost;
use godwit_api::name::Name;
use godwit_api::vm::VmDefinition;
use godwit_api::wire::WireOrder;
use godwit_handoff::{Message, Ticket};
use godwit_trust::SignedCapability;
use godwit_units::{BitRate, Generation, Lineage, VmId, VolumeId};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A question that is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Source: make a place for this VM.
    Stage(Box<Stage>),
    /// A volume's host: keep a pre-cache of it.
    StandBy(Box<crate::precache::Standby>),
    /// The VM's owner, to a host that lent blocks of a volume: they are all here now.
    Released(Box<crate::lend::Fetch>),
    /// A holder of a volume that leads its scrub: digests of yours; or a block, to be given or mended. Answered by [`crate::scrub::Said`].
    Scrub(Box<crate::scrub::ScrubAsk>),
    /// About a component that moves.
    Component(Box<crate::components::ComponentAsk>),
    /// The VM's owner, to a gateway's node: point this wire at me.
    Repoint(Repoint),
    /// The VM's owner, to a gateway's node: does this wire lead to my guest?
    ProbeWire(ProbeWire),
    /// The host of an end of a wire between ports, to that of the other one: answer who greets over it. Answered by
    /// `Result<Greeted, ApiError>`.
    GreetWire(GreetWire),
    /// A host that has, or had, an end of a wire between ports: this is where its ends are. Answered by the same, as the other host knows
    /// it then: `Result<[EndView; 2], ApiError>`.
    Wire(Box<WireOrder>),
}

/// Which wire, where to, and in whose name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Repoint {
    /// The wire.
    pub wire: u32,
    /// The address of the owner's tunnels.
    pub remote: IpAddr,
    /// Orders of an older owner are refused.
    pub lineage: Lineage,
    /// As the lineage.
    pub generation: Generation,
    /// What shows that this host is that owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<SignedCapability>,
}

/// Whom to ask for behind a wire.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProbeWire {
    /// The wire.
    pub wire: u32,
    /// The guest's.
    pub mac: String,
    /// The guest's, if they are known.
    pub ips: Vec<IpAddr>,
    /// How long to ask, milliseconds.
    pub within_ms: u64,
}

/// Over which wire frames are to be answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GreetWire {
    /// The wire.
    pub wire: u32,
    /// What they say.
    pub nonce: [u8; 16],
    /// For how long they come, milliseconds.
    pub within_ms: u64,
}

/// What the host of a wire's other end says to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Greeted {
    /// It answers them from now on.
    Listens,
    /// Its end is not open: whoever has it does not run.
    NobodyThere,
}

/// What the destination has to know to make a place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stage {
    /// The attempt.
    pub ticket: Ticket,
    /// The VM.
    pub definition: VmDefinition,
    /// Where the source is.
    pub source: PeerHost,
    /// CPUs to have when it runs there, if more than now.
    #[serde(default)]
    pub vcpus: Option<u32>,
    /// What shows that the controller has ordered this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<SignedCapability>,
    /// Whether pages of its memory may follow it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub postcopy: bool,
    /// Where blocks of its disks are that are not sent before it. Empty: all are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<PeerHost>,
    /// The number of the marks that the source has left with its disks on shared storage: whoever sees the same storage finds them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<u64>,
    /// Whether the source wants to hear what is there: answered by `Result<Staged, ApiError>` then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tells: bool,
}

/// What a destination says of a place that it has made, to a source that asks for it. One of an earlier version says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staged {
    /// Whether it may keep pages of the guest's memory, of an earlier try or of its last stay.
    pub keeps_pages: bool,
    /// How fast it reads the VM's disks on shared storage, of several the slowest. None: there are none, or it does not read what is not its own yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_shared: Option<BitRate>,
}

/// Holders that a destination is told of: a hand-off adds one while fills go on.
pub const MOST_HOLDERS: usize = 255;

/// The answer to a [`Request`].
pub type Answer = Result<(), ApiError>;

/// Something said once, that may be lost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Note {
    /// The hand-off's own messages; its machines repeat them.
    HandOff(Message),
    /// The same, of a component.
    Component(Message),
    /// A host that carries extenders, to others of its site: by their numbers, whether a tunnel is up there. Said again and again.
    Extenders {
        /// Each.
        up: Vec<(u32, bool)>,
    },
    /// Destination: the guest runs. For the figures.
    Resumed {
        /// The attempt.
        ticket: Ticket,
        /// When: QEMU's own time of its RESUME event, microseconds since 1970.
        unix_us: u64,
        /// How long ago, as the destination's clock measured it.
        ago_us: u64,
    },
    /// Destination: the network leads to the guest's new place.
    Proved {
        /// The attempt.
        ticket: Ticket,
        /// How long after it was started, milliseconds.
        after_ms: f64,
    },
}

/// What a stream is for; its first bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Hello {
    /// A QEMU's migration stream, and its return path.
    Memory {
        /// The attempt.
        ticket: Ticket,
        /// The key of what the destination keeps of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Secret>,
        /// The key under which the source will keep the guest's memory when the guest is here, for its way back.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<Secret>,
        /// What its former hosts but these two keep of it. A destination of an earlier version does not hear of that.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        elsewhere: Vec<KeptAt>,
        /// Guests of the same trust domain that went there before, whose memory it names.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        neighbours: Vec<VmId>,
    },
    /// The rest of a post-copy whose first stream broke off: QEMU's own bytes, as they are, and its return path.
    Drain {
        /// The attempt.
        ticket: Ticket,
    },
    /// Which of the memory's pages the destination has kept of an earlier try.
    Kept {
        /// The attempt.
        ticket: Ticket,
        /// Their key.
        key: Secret,
    },
    /// What guests of the same trust domain that run at the destination have in memory, in [`godwit_memory::hints`], once a byte says that
    /// memory is about to go. A destination of an earlier version hangs up.
    Neighbours {
        /// The attempt.
        ticket: Ticket,
        /// What pages are to be hashed under.
        seed: u64,
        /// How many pages are worth hearing of.
        most: u64,
    },
    /// A volume's pre-cache, after [`Request::StandBy`].
    Precache {
        /// Which volume.
        volume: VolumeId,
    },
    /// What a volume has to hold, which is fetched when the VM runs.
    Tell {
        /// The attempt.
        ticket: Ticket,
        /// Which volume.
        volume: VolumeId,
    },
    /// One of the two streams of a session that fetches blocks.
    Fetch {
        /// What, and by what right.
        right: Box<crate::lend::Fetch>,
        /// The same for both streams, and no other of this host.
        pair: u64,
        /// Whether it is the one for what nobody waits for. The other bears the questions.
        fill: bool,
    },
    /// A volume's mirror.
    Mirror {
        /// The attempt.
        ticket: Ticket,
        /// Which volume.
        volume: VolumeId,
    },
    /// Nothing: it is sent to see how long it takes.
    Filler,
}

/// A key on its way between two nodes.
#[derive(Clone, Serialize, Deserialize)]
pub struct Secret(pub [u8; 32]);

/// It is not for logs.
impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What a host keeps of the memory of a guest that has left it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeptAt {
    /// Its name, as in its certificate.
    pub host: Name,
    /// What opens it.
    pub key: Secret,
    /// When the host drops it, in seconds since 1970.
    pub until_unix_s: u64,
}

/// As bytes.
#[must_use]
pub fn encode<T: Serialize>(value: &T) -> bytes::Bytes {
    serde_json::to_vec(value).expect("plain data has a JSON form").into()
}

/// From bytes that a peer sent.
///
/// # Errors
/// When they make no sense; the peer has another version, or is not what it says.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(bytes)
}
