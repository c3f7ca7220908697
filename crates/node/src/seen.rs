//! Whether two hosts see the same storage, asked before a VM moves between them whose disks lie on it.
//!
//! The source leaves a mark with each shared disk, and says its number with the request for a place; the destination finds it, with the source's name in it,
//! and leaves one of its own, which the source finds. So each of them can write where the other reads. A path of the same name on another
//! storage, one that is mounted read-only, or a mount that is missing, ends here, and nothing was touched.

use crate::node::Node;
use crate::parts::Parts;
use crate::proto::Stage;
use godwit_api::name::Name;
use godwit_api::vm::VmDefinition;
use godwit_api::{ApiError, Problem};
use godwit_units::{Bytes, VolumeId};
use godwit_volume::{VolumeError, shared};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The marks that a source has left. They go with it.
#[derive(Debug)]
pub struct Marks {
    number: Option<u64>,
    places: Vec<PathBuf>,
}

/// What to do where two hosts do not see the same.
pub const REMEDY: &str =
    "mount the same storage at that path on both hosts, writable for both; or copy the disk by an export and import";

fn blocked(message: String) -> ApiError {
    ApiError::new(Problem::Blocked, message).remedy(REMEDY)
}

/// The shared disks of a VM that do not lie where they should as this host sees it, each with why. That it is the same storage is known only
/// when there are marks.
pub fn missing(definition: &VmDefinition) -> Vec<String> {
    let disks = definition.spec.disks.iter().zip(&definition.volumes);
    let wrong = disks.filter_map(|(disk, volume)| {
        let place = disk.shared()?;
        let why = match shared::what_is_in(place) {
            Ok(there) if there == (*volume, disk.size) => return None,
            Ok(there) => format!("there is volume {} with {}", there.0.0, there.1),
            Err(error) => error.to_string(),
        };
        Some(format!("does not see `{}` on shared storage at {}: {why}", disk.volume, place.display()))
    });
    wrong.collect()
}

async fn blocking<T: Send + 'static>(
    what: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(what).await {
        Ok(done) => done.map_err(|e| blocked(e.to_string())),
        Err(_) => Err(ApiError::new(Problem::Failed, "looking at shared storage ended in a bug of the node")),
    }
}

impl Marks {
    /// Leaves one with each shared disk of a VM.
    ///
    /// # Errors
    /// When this host cannot write there.
    pub async fn leave(node: &Node, parts: &Parts) -> Result<Self, ApiError> {
        let disks = parts.definition().spec.disks;
        let places: Vec<PathBuf> = disks.iter().filter_map(|disk| disk.shared().map(Path::to_owned)).collect();
        if places.is_empty() {
            return Ok(Self { number: None, places });
        }
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| ApiError::new(Problem::Failed, format!("no random numbers: {e}")))?;
        // JSON's numbers are exact below 2^53, and the answer's is the next one.
        let number = (u64::from_le_bytes(bytes) >> 12) << 1;
        let marks = Self { number: Some(number), places: places.clone() };
        let me = node.name().to_owned();
        blocking(move || places.iter().try_for_each(|place| shared::leave_mark(place, number, &me))).await?;
        Ok(marks)
    }

    /// Their number; none: no disk is shared.
    pub const fn number(&self) -> Option<u64> {
        self.number
    }

    /// Looks for the destination's.
    ///
    /// # Errors
    /// There is none: what it found is not what is here.
    pub async fn are_answered(&self, by: &Name) -> Result<(), ApiError> {
        let Some(number) = self.number else { return Ok(()) };
        let (places, by) = (self.places.clone(), by.to_string());
        let seen = blocking(move || {
            let others =
                |place: &PathBuf| shared::see_mark(place, number + 1).map(|text| (text != by).then(|| place.clone()));
            places.iter().map(others).collect::<Result<Vec<_>, _>>()
        });
        match seen.await?.into_iter().flatten().next() {
            None => Ok(()),
            Some(place) => Err(blocked(format!("at {} there is another host's mark", place.display()))),
        }
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        let (Some(number), places) = (self.number, std::mem::take(&mut self.places)) else { return };
        // Storage of others may take its time.
        crate::keeping::aside(move || {
            for place in &places {
                shared::remove_mark(place, number);
                shared::remove_mark(place, number + 1);
            }
        });
    }
}

/// Finds the marks of a source that asks for a place, and leaves this host's.
///
/// # Errors
/// This host does not see what the source does.
pub async fn answer(node: &Arc<Node>, from: &str, stage: &Stage) -> Result<(), ApiError> {
    let definition = &stage.definition;
    let disks = definition.spec.disks.iter().zip(&definition.volumes);
    let places: Vec<(PathBuf, String, VolumeId, Bytes)> = disks
        .filter_map(|(disk, volume)| Some((disk.shared()?.to_owned(), disk.volume.to_string(), *volume, disk.size)))
        .collect();
    if places.is_empty() {
        return Ok(());
    }
    let me = node.name().to_owned();
    let Some(number) = stage.mark else {
        return Err(blocked(format!(
            "{from} has left no mark by which {me} could tell that both see the same storage"
        )));
    };
    let from = from.to_owned();
    let seen = tokio::task::spawn_blocking(move || {
        for (place, name, volume, size) in places {
            let at = place.display();
            let refuse = |why: String| blocked(format!("{me} does not see `{name}` at {at} as {from} does: {why}"));
            let there = shared::what_is_in(&place).map_err(|e| refuse(e.to_string()))?;
            if there != (volume, size) {
                return Err(refuse(format!("there is volume {} with {}", there.0.0, there.1)));
            }
            if shared::see_mark(&place, number).map_err(|e| refuse(e.to_string()))? != from {
                return Err(refuse("the mark is another host's".into()));
            }
            shared::leave_mark(&place, number + 1, &me).map_err(|e| refuse(e.to_string()))?;
        }
        Ok(())
    });
    seen.await
        .unwrap_or_else(|_| Err(ApiError::new(Problem::Failed, "looking at shared storage ended in a bug of the node")))
}
