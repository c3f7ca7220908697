//! A VM that is started from the images of its pre-caches, because the site that had it is gone.

use crate::name::Name;
use crate::vm::VmDefinition;
use godwit_units::{Lineage, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Wants a volume's VM started from what its pre-caches left at another site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteVolume {
    /// The site, or the host, that has the images.
    pub site: Name,
    /// How the VM's host is kept from running it: powered off, cut from storage and network. Kept in the record and the log. Not needed
    /// with `dry_run`.
    #[serde(default)]
    pub fenced: String,
    /// Hosts besides the VM's that are kept from running it, too, as `fenced` says: those that an earlier promotion was ordered to, or that the VM
    /// was being moved to, and that nobody has heard of since.
    #[serde(default)]
    pub also_fenced: Vec<Name>,
    /// Only says from what it would be started, and what is in the way.
    #[serde(default)]
    pub dry_run: bool,
}

/// The image of one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RecoveryPoint {
    /// The volume.
    pub volume: Name,
    /// The epoch whose end it is: generation and number, such as `1.17`.
    pub epoch: String,
    /// When that epoch ended, milliseconds since 1970, by the clock of the host that is lost. What was written later is lost.
    pub epoch_unix_ms: u64,
    /// How long ago that is, seconds.
    pub age_s: f64,
}

/// A VM that was promoted, or would be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Promoted {
    /// The VM.
    pub vm: Name,
    /// The host that takes it.
    pub host: Name,
    /// The host that had it.
    pub lost: Name,
    /// The lineage that begins.
    pub lineage: Lineage,
    /// Its disks. Where they are of different moments, they are as disks whose power went at different times.
    pub disks: Vec<RecoveryPoint>,
    /// Whether they are of one moment, as one loss of power would have left them.
    #[serde(default)]
    pub one_moment: bool,
    /// Whether nothing was done.
    pub dry_run: bool,
}

/// What a node is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromoteVm {
    /// The VM, as its host has resolved it.
    pub definition: VmDefinition,
    /// The host that is lost.
    pub lost: Name,
    /// How it is kept from running the VM, and who vouches for it.
    pub fenced: String,
    /// The newest lineage that is known of: the claim begins one after it.
    pub newest: Lineage,
    /// Only looks.
    pub dry_run: bool,
}

/// An image at a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalImage {
    /// The volume.
    pub volume: VolumeId,
    /// Its epoch: generation and number.
    pub epoch: String,
    /// When that ended, milliseconds since 1970.
    pub epoch_unix_ms: u64,
    /// The moment that it has in common with images of other disks.
    #[serde(default)]
    pub moment: Option<u64>,
}

/// What a node says of a VM's images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPromotion {
    /// The VM.
    pub vm: VmId,
    /// One for each of its disks, in their order.
    pub images: Vec<LocalImage>,
}
