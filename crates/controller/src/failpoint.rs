//! Points at which a test may hold the controller, or end it: before, between and after the steps of everything that it does in
//! more than one.
//!
//! `GODWIT_FAILPOINTS` names a folder, as for a node. At a point the controller looks there for a file `POINT.VM`, such as
//! `saga-stored.3`, and for one that is called as the point alone: with the contents `hold` it makes `NAME.reached` and
//! waits until the file is gone; with `kill` it makes `NAME.reached`, takes the order away and ends at once, without any of
//! the things that an orderly end does. Without the variable a point costs nothing.

use godwit_units::VmId;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

/// The points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A move's record is stored; nobody has heard of it.
    SagaStored,
    /// The order is about to be sent to the source's node.
    SagaOrdering,
    /// The source's node has taken the order; that is not stored.
    SagaOrdered,
    /// It is stored that the nodes are watched.
    SagaWatching,
    /// The destination has the VM; neither record nor gateways know.
    SagaSettling,
    /// The VM's record names its new host; the gateways do not know.
    SagaSettled,
    /// The gateways know; the saga's step is not stored.
    SagaGateways,
    /// All is done; that it has ended is not stored.
    SagaEnding,
    /// That it has ended is stored.
    SagaEnded,
    /// A VM's record is stored; its node has not heard of it.
    VmReserved,
    /// Its node has it; the gateways have not.
    VmDefined,
    /// The gateways lead to it; that it is ready is not stored.
    VmWired,
    /// That it is ready is stored; it is not started.
    VmReady,
    /// Somebody wants it started; its node has not heard of it.
    VmStarting,
    /// Its node has started it; whoever wanted that has no answer.
    VmStarted,
    /// That it is to go is stored.
    VmDeleting,
    /// Its wires are gone; its hosts have it still.
    VmUnwired,
    /// All of it is gone, but for its record.
    VmGone,
}

impl Point {
    /// As the file is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SagaStored => "saga-stored",
            Self::SagaOrdering => "saga-ordering",
            Self::SagaOrdered => "saga-ordered",
            Self::SagaWatching => "saga-watching",
            Self::SagaSettling => "saga-settling",
            Self::SagaSettled => "saga-settled",
            Self::SagaGateways => "saga-gateways",
            Self::SagaEnding => "saga-ending",
            Self::SagaEnded => "saga-ended",
            Self::VmReserved => "vm-reserved",
            Self::VmDefined => "vm-defined",
            Self::VmWired => "vm-wired",
            Self::VmReady => "vm-ready",
            Self::VmStarting => "vm-starting",
            Self::VmStarted => "vm-started",
            Self::VmDeleting => "vm-deleting",
            Self::VmUnwired => "vm-unwired",
            Self::VmGone => "vm-gone",
        }
    }
}

static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("GODWIT_FAILPOINTS").map(PathBuf::from));

/// How often a held controller looks whether it may go on.
const LOOK: Duration = Duration::from_millis(5);

/// The controller is at `point` of something that it does with a VM. Goes no further while it is held there.
pub async fn reach(point: Point, vm: VmId) {
    if let Some(folder) = &*FOLDER {
        obey(folder, point, vm).await;
    }
}

async fn obey(folder: &Path, point: Point, vm: VmId) {
    for name in [format!("{}.{}", point.name(), vm.0), point.name().to_owned()] {
        let order = folder.join(&name);
        let Ok(what) = std::fs::read_to_string(&order) else { continue };
        tracing::warn!(point = name, order = what.trim(), "failpoint");
        let _ = std::fs::write(folder.join(format!("{name}.reached")), "");
        match what.trim() {
            "kill" => {
                // Once: a controller that is started again must get past it.
                let _ = std::fs::remove_file(&order);
                std::process::abort();
            }
            "hold" => {
                while order.exists() {
                    tokio::time::sleep(LOOK).await;
                }
            }
            other => tracing::error!(other, "a failpoint is told to do something that it cannot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_held_point_says_that_it_was_reached_and_goes_on_when_it_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("saga-stored.3"), "hold\n").unwrap();
        obey(folder.path(), Point::SagaStored, VmId(33)).await;
        obey(folder.path(), Point::SagaOrdered, VmId(3)).await;
        assert!(!file("saga-stored.3.reached").exists(), "that was another VM, and another point");
        let path = folder.path().to_owned();
        let held = tokio::spawn(async move { obey(&path, Point::SagaStored, VmId(3)).await });
        while !file("saga-stored.3.reached").exists() {
            tokio::time::sleep(LOOK).await;
        }
        assert!(!held.is_finished());
        std::fs::remove_file(file("saga-stored.3")).unwrap();
        held.await.unwrap();
    }
}
