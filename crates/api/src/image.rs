//! Images of volumes: a volume filled from a file of its host, or written into one.
//!
//! The file is a path at the volume's host. The other way, bytes that come from or go to where the command is typed, would lead through the
//! controller, which is on no path of data; and hosts are reached from there by nobody but the controller. An image is large, and
//! whoever has one can bring it to a host as they bring any file. It costs the right to name files of a host, which is the deployment's.
//!
//! It takes minutes, so it is begun, looked at and ended by requests of their own. What is under way is in the host's memory: who
//! asks a host that was restarted meanwhile hears that it knows of none.

use crate::ApiError;
use crate::name::Name;
use godwit_units::{Bytes, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the image into the volume, whose VM is off.
    Import,
    /// From the volume into the image: the volume as it is when this begins, whether its VM runs or not. Of a running one that is what a loss
    /// of power at that moment would have left.
    Export,
}

/// Wants an image copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyImage {
    /// Which way.
    pub what: Direction,
    /// The file at the volume's host; one that does not begin with `/` is in the host's image folder.
    pub path: String,
    /// The image's format, as qemu-img calls it. An image to be imported says it itself if nobody does; an export is qcow2.
    #[serde(default)]
    #[schemars(regex(pattern = r"^[a-z0-9-]{1,20}$"))]
    pub format: Option<String>,
    /// Import: what the volume holds may be lost. Export: a file that is there may be replaced.
    #[serde(default)]
    pub overwrite: bool,
    /// Made at random by whoever asks: with the same key it is the same request, sent again.
    pub key: u64,
}

/// An image that is being copied, or was the last to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ImageCopy {
    /// The request.
    pub copy: CopyImage,
    /// The host.
    pub host: Name,
    /// The image's format.
    pub format: String,
    /// How much of the virtual disk is done, of 1.
    pub done: f64,
    /// How large the virtual disk is.
    pub size: Bytes,
    /// When it began, by its host's clock, in milliseconds since 1970.
    #[serde(default)]
    pub began_unix_ms: u64,
    /// How it stands.
    pub state: ImageState,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<ApiError>,
}

/// How a copy stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImageState {
    /// It is under way.
    Copying,
    /// All is there, durably.
    Done,
    /// It came to nothing. An export has left no file; an import has left a volume whose VM does not start before it is imported again.
    Failed,
}

/// What a node is to copy, of a volume that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOrder {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// What.
    pub copy: CopyImage,
}
