//! Pre-caches: replicas at other sites that are kept nearly equal to a volume, for ever, in spare bandwidth.
//!
//! The controller keeps who wants which; the node that has the VM is told all of its own at once (`PUT /v1/precaches`), again and
//! again, and goes on by itself in between.

use crate::host::PeerHost;
use crate::name::Name;
use godwit_units::{BitRate, Bytes, Generation, Lineage, MoveId, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How often an epoch ends, unless somebody says otherwise: what the secondary lags behind at least. Milliseconds.
pub const INTERVAL_MS: u64 = 10_000;

/// The shortest: each end of an epoch costs the volume two syncs. Milliseconds.
pub const LEAST_INTERVAL_MS: u64 = 500;

/// What is kept here for a secondary's image, unless somebody says otherwise: what 10 s at 50 Mbit/s carry.
pub const IMAGE_ROOM: Bytes = Bytes(64 << 20);

/// The least of it, which a message of blocks fits into many times.
pub const LEAST_IMAGE_ROOM: Bytes = Bytes(1 << 20);

/// The most of it: it is memory.
pub const MOST_IMAGE_ROOM: Bytes = Bytes(64 << 30);

/// [`IMAGE_ROOM`], for what was written before there was a choice.
#[must_use]
pub const fn image_room() -> Bytes {
    IMAGE_ROOM
}

/// Wants a volume pre-cached at another site, or that pre-cache changed: what is not said of one that is there stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartPrecache {
    /// The volume.
    pub volume: Name,
    /// A host, or a site: its first host that answers and does not have the volume's VM.
    pub to: Name,
    /// At most so much, besides what spare bandwidth there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
    /// No limit any more, where there was one. Not together with one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unlimited: bool,
    /// How often an epoch of writes ends, milliseconds; 10 s in a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 500, max = 3_600_000))]
    pub interval_ms: Option<u64>,
    /// Whether the secondary keeps the last complete epoch as an image that a crash at that moment would have left; not, in a new one. Where that was
    /// so and is to be no more, the image is gone with the next block that comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistent: Option<bool>,
    /// For an image: how much memory blocks that the guest overwrites before they were sent may take at the volume's host. Past it the epoch is given
    /// up, and the image stays at the one before. 1 MiB to 64 GiB; 64 MiB in a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_room: Option<Bytes>,
    /// Whether the pre-cache is turned around when the VM has moved to where it is, rather than ended; not, in a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<bool>,
}

/// A pre-cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Precache {
    /// The volume.
    pub volume: Name,
    /// Its VM.
    pub vm: Name,
    /// The host that has the volume.
    pub from: Name,
    /// The host that is to hold it, too.
    pub to: Name,
    /// That host's site.
    pub site: Name,
    /// The limit, if there is one.
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
    /// How often an epoch of writes ends, milliseconds.
    pub interval_ms: u64,
    /// Whether the secondary keeps an image.
    pub consistent: bool,
    /// For an image: how much memory overwritten blocks may take at the volume's host.
    #[serde(default = "image_room")]
    pub image_room: Bytes,
    /// Whether it is turned around after a move to its host.
    pub follow: bool,
    /// How it stands, as the volume's host says; none while that cannot be reached, or has not heard of it yet.
    pub figures: Option<PrecacheFigures>,
}

/// What a pre-cache does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PrecacheState {
    /// The VM is being moved, is not up yet, or is not here.
    #[default]
    Waiting,
    /// The secondary cannot be had; it is tried again and again.
    Connecting,
    /// The two replicas' stamps are being compared.
    Comparing,
    /// The secondary does not hold a complete epoch yet.
    Copying,
    /// The secondary holds an epoch, and gets the next ones.
    Following,
}

impl PrecacheState {
    /// For people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connecting => "connecting",
            Self::Comparing => "comparing",
            Self::Copying => "copying",
            Self::Following => "following",
        }
    }
}

/// How a pre-cache stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrecacheFigures {
    /// What it does.
    pub state: PrecacheState,
    /// How old what the secondary holds is, seconds: 0 where the guest has not written since; none where it holds nothing complete, or
    /// nobody knows.
    pub lag_s: Option<f64>,
    /// What it has not been sent.
    pub backlog: Bytes,
    /// The epoch that it holds: generation and number, such as `1.17`.
    pub epoch: Option<String>,
    /// When that epoch ended, milliseconds since 1970.
    pub epoch_unix_ms: Option<u64>,
    /// Whether what it holds is a whole image, from which a VM could be started.
    pub image: bool,
    /// How fast blocks leave now.
    pub rate: BitRate,
    /// Blocks that were sent since the node was started.
    pub sent: Bytes,
    /// Of these, what the secondary's site had on other volumes of the trust domain, so that it did not travel.
    #[serde(default)]
    pub named: Bytes,
    /// How often it was begun anew since the node was started.
    pub sessions: u64,
    /// Epochs of an image that were given up since the one that the secondary holds, because the guest overwrote more of them than
    /// [`image_room`](Precache::image_room) before they were sent.
    #[serde(default)]
    pub given_up: u64,
    /// What is in the way.
    pub error: Option<String>,
}

/// What a node is told of one of its pre-caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrecacheOrder {
    /// The VM.
    pub vm: VmId,
    /// Its lineage, as the controller knows it.
    pub lineage: Lineage,
    /// Its generation.
    pub generation: Generation,
    /// The volume.
    pub volume: VolumeId,
    /// Where to.
    pub to: PeerHost,
    /// At most so much.
    pub limit: Option<BitRate>,
    /// How often an epoch ends.
    pub interval_ms: u64,
    /// Whether the secondary keeps an image.
    pub consistent: bool,
    /// For an image: what overwritten blocks may take here.
    #[serde(default = "image_room")]
    pub image_room: Bytes,
    /// The VM's trust domain, if it is in one: what the volume may share with others at the secondary's site.
    #[serde(default)]
    pub domain: Option<Name>,
    /// What shows the secondary's node that this was ordered.
    pub capability: godwit_trust::SignedCapability,
}

/// What a capability of a pre-cache has in place of a definition: so that a volume's size and its trust domain are the controller's word,
/// too.
#[must_use]
pub fn digest(volume: VolumeId, size: Bytes, domain: Option<&Name>) -> [u8; 32] {
    let whose = domain.map_or_else(String::new, |domain| format!(" in domain {domain}"));
    let what = format!("godwit pre-cache of volume {} with {} bytes{whose}", volume.0, size.0);
    *blake3::hash(what.as_bytes()).as_bytes()
}

/// The number of a move that none has: capabilities of pre-caches bear it.
pub const NO_MOVE: MoveId = MoveId(0);

/// What a node says of one of its pre-caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalPrecache {
    /// The volume.
    pub volume: VolumeId,
    /// Where to.
    pub to: Name,
    /// How it stands.
    pub figures: PrecacheFigures,
}
