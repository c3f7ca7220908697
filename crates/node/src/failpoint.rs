//! Points at which a test may hold a node, or end it: between any two steps of a hand-off.
//!
//! `GODWIT_FAILPOINTS` names a folder. At a point of a VM's move the node looks there for a file `POINT.VM`, such as
//! `granted.3`, and then for one that is called as the point alone, for every VM: with the contents `hold` it makes
//! `NAME.reached` and waits until the file is gone; with `kill` it makes `NAME.reached` and kills itself, as a crash
//! would. Without the variable a point costs nothing.
//!
//! One is no step but a question ([`is_armed`]): whether a guest's writes outrun its link is decided by a machine's load, and a test that
//! needs it cannot wait for that.

use godwit_units::VmId;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

/// The points, in the order of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Source: the order was taken, the destination was not asked yet.
    Reserve,
    /// Destination: STAGED is written, the source has no answer yet.
    Staged,
    /// Source: the disks are being copied.
    CopyDisk,
    /// Source: memory goes in rounds.
    Memory,
    /// Source: a round of memory has ended. Where the file is there, whatever is in it, it counts as one in which as much was dirtied as was
    /// sent; and where memory may follow its guest, as one that does not converge and leaves enough for that.
    Diverge,
    /// Source: the vCPUs are stopped.
    Stopped,
    /// Source: everything is verified, SEALED is not written.
    Sealing,
    /// Source: SEALED is written, COMMIT was not sent.
    Sealed,
    /// Destination: PREPARED is written, and was not told.
    Prepared,
    /// Destination: the guest runs while its memory follows. Held, it follows all the same.
    Drain,
    /// Destination: COMMIT was heard, GRANTED is not written.
    Commit,
    /// Destination: GRANTED is written; nothing is open.
    Granted,
    /// Destination: STARTED is written, `cont` was not given.
    Started,
    /// Destination: the guest runs; nothing was proved yet.
    Proving,
    /// Source: STARTED was heard, RELEASED is not written.
    Releasing,
    /// Destination: the source has let go, OWNED is not written.
    Settling,
    /// Destination: the guest runs, and blocks of its disks are still elsewhere. Held, it fetches them all the same.
    Fill,
    /// No move: an image is to be copied into a volume, which holds nothing any more.
    Import,
    /// No move: a volume is to be exported as it was a moment ago.
    Export,
    /// No move: epochs of all of a VM's disks are here that ended in one moment, and one of them is not in its place.
    Moment,
}

impl Point {
    /// As the file is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Staged => "staged",
            Self::CopyDisk => "copy-disk",
            Self::Memory => "memory",
            Self::Diverge => "diverge",
            Self::Stopped => "stopped",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
            Self::Prepared => "prepared",
            Self::Drain => "drain",
            Self::Commit => "commit",
            Self::Granted => "granted",
            Self::Started => "started",
            Self::Proving => "proving",
            Self::Releasing => "releasing",
            Self::Settling => "settling",
            Self::Fill => "fill",
            Self::Import => "import",
            Self::Export => "export",
            Self::Moment => "moment",
        }
    }
}

static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("GODWIT_FAILPOINTS").map(PathBuf::from));

/// How often a held node looks whether it may go on: this is part of what a test measures.
const LOOK: Duration = Duration::from_millis(2);

/// The node is at `point` of a VM's move. Blocks while it is held there.
pub fn reach(point: Point, vm: VmId) {
    if let Some(folder) = &*FOLDER {
        obey(folder, point, vm);
    }
}

/// Whether there is a file for `point`, of this VM or of all.
#[must_use]
pub fn is_armed(point: Point, vm: VmId) -> bool {
    FOLDER.as_deref().is_some_and(|folder| names(point, vm).iter().any(|name| folder.join(name).exists()))
}

fn names(point: Point, vm: VmId) -> [String; 2] {
    [format!("{}.{}", point.name(), vm.0), point.name().to_owned()]
}

/// As [`reach`], for tasks.
pub async fn reach_async(point: Point, vm: VmId) {
    if FOLDER.is_some() {
        let _ = tokio::task::spawn_blocking(move || reach(point, vm)).await;
    }
}

fn obey(folder: &Path, point: Point, vm: VmId) {
    for name in names(point, vm) {
        let order = folder.join(&name);
        let Ok(what) = std::fs::read_to_string(&order) else { continue };
        tracing::warn!(point = name, order = what.trim(), "failpoint");
        let _ = std::fs::write(folder.join(format!("{name}.reached")), "");
        match what.trim() {
            "kill" => {
                // Once: a node that is started again must get past it.
                let _ = std::fs::remove_file(&order);
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
            "hold" => {
                while order.exists() {
                    std::thread::sleep(LOOK);
                }
            }
            other => tracing::error!(other, "a failpoint is told to do something that it cannot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_point_says_that_it_was_reached_and_goes_on_when_it_is_released() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        for order in ["sealed", "sealed.3"] {
            obey(folder.path(), Point::Sealed, VmId(3));
            assert!(!file(&format!("{order}.reached")).exists(), "nobody armed it");
            std::fs::write(file(order), "hold\n").expect("writes");
            if order == "sealed.3" {
                obey(folder.path(), Point::Sealed, VmId(33));
                assert!(!file("sealed.3.reached").exists(), "that was another VM");
            }
            std::thread::scope(|scope| {
                let held = scope.spawn(|| obey(folder.path(), Point::Sealed, VmId(3)));
                while !file(&format!("{order}.reached")).exists() {
                    std::thread::yield_now();
                }
                assert!(!held.is_finished());
                std::fs::remove_file(file(order)).expect("removes");
                held.join().expect("goes on");
            });
        }
    }
}
