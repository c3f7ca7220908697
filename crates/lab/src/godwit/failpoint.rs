//! Holding a node at a point of a move.
//!
//! A node that has `GODWIT_FAILPOINTS` set to a folder looks, at each [`Point`], for a file of that name there. With the
//! contents `hold` it makes `NAME.reached` and goes on when the file is gone. A point belongs to a node, not to a VM: while
//! two VMs move by way of one node, nobody can tell whose point was reached.

use crate::scenario::Point;
use anyhow::{Context, Result};
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

    /// From now on the node waits at `point`.
    ///
    /// # Errors
    /// When the order cannot be written.
    pub fn arm(&self, point: Point) -> Result<()> {
        let _ = std::fs::remove_file(self.reached_file(point));
        // Renamed into place: the node must not see an order that is still empty.
        let (fresh, order) = (self.folder.join(format!("{}.new", point.name())), self.folder.join(point.name()));
        std::fs::write(&fresh, "hold\n")
            .and_then(|()| std::fs::rename(&fresh, &order))
            .with_context(|| format!("cannot write {}", order.display()))
    }

    /// Whether the node has got to `point` since it was armed.
    #[must_use]
    pub fn reached(&self, point: Point) -> bool {
        self.reached_file(point).exists()
    }

    /// Whether the node would wait at `point`.
    #[must_use]
    pub fn is_armed(&self, point: Point) -> bool {
        self.folder.join(point.name()).exists()
    }

    /// The node goes on, or does not wait at `point` any more.
    pub fn release(&self, point: Point) {
        let _ = std::fs::remove_file(self.folder.join(point.name()));
    }

    fn reached_file(&self, point: Point) -> PathBuf {
        self.folder.join(format!("{}.reached", point.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_armed_point_is_a_file_with_its_order_and_what_was_reached_before_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let points = Failpoints::create(folder.path().join("points")).unwrap();
        std::fs::write(points.folder().join("copy-disk.reached"), "").unwrap();
        points.arm(Point::CopyDisk).unwrap();
        assert!(!points.reached(Point::CopyDisk), "that was in an earlier move");
        assert_eq!(std::fs::read_to_string(points.folder().join("copy-disk")).unwrap().trim(), "hold");
        assert!(points.is_armed(Point::CopyDisk) && !points.is_armed(Point::Memory));
        std::fs::write(points.folder().join("copy-disk.reached"), "").unwrap();
        assert!(points.reached(Point::CopyDisk));
        points.release(Point::CopyDisk);
        assert!(!points.is_armed(Point::CopyDisk));
        assert_eq!(std::fs::read_dir(points.folder()).unwrap().count(), 1, "only what the node wrote is left");
    }
}
