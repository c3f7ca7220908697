//! Holding a node at a point of a move.
//!
//! A node that has `GODWIT_FAILPOINTS` set to a folder looks, at each [`Point`] of a VM's move, for a file `POINT.VM`
//! there, such as `granted.3`. With the contents `hold` it makes `POINT.VM.reached` and goes on when the file is gone.

use crate::scenario::Point;
use anyhow::{Context, Result};
use godwit_units::VmId;
use std::path::{Path, PathBuf};

/// The points of one node.
#[derive(Clone, Debug)]
pub struct Failpoints {
    folder: PathBuf,
}

impl Failpoints {
    /// Makes the folder.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(folder: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { folder })
    }

    /// Where they are.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// From now on the node waits at `point` of this VM's move.
    ///
    /// # Errors
    /// When the order cannot be written.
    pub fn arm(&self, point: Point, vm: VmId) -> Result<()> {
        let (order, reached) = self.files(point, vm);
        let _ = std::fs::remove_file(reached);
        // Renamed into place: the node must not see an order that is still empty.
        let fresh = self.folder.join(format!("{}.{}.new", point.name(), vm.0));
        std::fs::write(&fresh, "hold\n")
            .and_then(|()| std::fs::rename(&fresh, &order))
            .with_context(|| format!("cannot write {}", order.display()))
    }

    /// Whether the node has got to `point` since it was armed.
    #[must_use]
    pub fn reached(&self, point: Point, vm: VmId) -> bool {
        self.files(point, vm).1.exists()
    }

    /// Whether the node would wait at `point`.
    #[must_use]
    pub fn is_armed(&self, point: Point, vm: VmId) -> bool {
        self.files(point, vm).0.exists()
    }

    /// The node goes on, or does not wait at `point` any more.
    pub fn release(&self, point: Point, vm: VmId) {
        let _ = std::fs::remove_file(self.files(point, vm).0);
    }

    /// The order, and that it was come to.
    fn files(&self, point: Point, vm: VmId) -> (PathBuf, PathBuf) {
        let name = format!("{}.{}", point.name(), vm.0);
        (self.folder.join(&name), self.folder.join(format!("{name}.reached")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_armed_point_is_a_file_with_its_order_and_what_was_reached_before_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let points = Failpoints::create(folder.path().join("points")).unwrap();
        let (vm, other) = (VmId(3), VmId(33));
        std::fs::write(points.folder().join("copy-disk.3.reached"), "").unwrap();
        points.arm(Point::CopyDisk, vm).unwrap();
        assert!(!points.reached(Point::CopyDisk, vm), "that was in an earlier move");
        assert_eq!(std::fs::read_to_string(points.folder().join("copy-disk.3")).unwrap().trim(), "hold");
        assert!(points.is_armed(Point::CopyDisk, vm) && !points.is_armed(Point::Memory, vm));
        assert!(!points.is_armed(Point::CopyDisk, other));
        std::fs::write(points.folder().join("copy-disk.3.reached"), "").unwrap();
        assert!(points.reached(Point::CopyDisk, vm) && !points.reached(Point::CopyDisk, other));
        points.release(Point::CopyDisk, vm);
        assert!(!points.is_armed(Point::CopyDisk, vm));
        assert_eq!(std::fs::read_dir(points.folder()).unwrap().count(), 1, "only what the node wrote is left");
    }
}
