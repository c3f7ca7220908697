//! The node's small files, each replaced whole, in folders that are made when they are needed.

pub use godwit_durable::remove;
use serde::Serialize;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Replaces a file; durable when it returns. For its owner's eyes only, and so is the folder where that has to be made.
///
/// # Errors
/// When the medium fails; nobody knows then which of the two is there.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    godwit_durable::replace(path, bytes)
}

/// As [`replace`], with JSON that people can read.
///
/// # Errors
/// As [`replace`].
pub fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    replace(path, &serde_json::to_vec_pretty(value).map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_folder_that_is_needed_is_made_for_its_owner_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("made/here/1.json");
        replace_json(&path, &[1, 2]).expect("writes");
        let mode = std::fs::metadata(folder.path().join("made")).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        remove(&path).expect("removes");
    }
}
