//! Small files that are replaced whole: a crash leaves the old contents or the new ones, never a mixture.

use serde::Serialize;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// Replaces a file; durable when it returns. For its owner's eyes only, and so is the folder where that has to be made.
///
/// # Errors
/// When the medium fails; nobody knows then which of the two is there.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    // What a crash left has somebody else's length, and could have anybody's rights.
    remove(Path::new(&fresh))?;
    let mut out = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&fresh)?;
    out.write_all(bytes)?;
    out.sync_data()?;
    std::fs::rename(&fresh, path)?;
    File::open(folder)?.sync_all()
}

/// As [`replace`], with JSON that people can read.
///
/// # Errors
/// As [`replace`].
pub fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    replace(path, &serde_json::to_vec_pretty(value).map_err(io::Error::other)?)
}

/// Removes a file, if there is one.
///
/// # Errors
/// When it cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_replaced_whole_for_its_owner_alone_whatever_a_crash_left_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("made/here/1.json");
        replace_json(&path, &[1, 2]).expect("writes");
        std::fs::write(folder.path().join("made/here/1.json.new"), "half of a longer one than ever was")
            .expect("writes");
        replace(&path, b"3").expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), b"3");
        assert_eq!(std::fs::read_dir(path.parent().expect("it has one")).expect("lists").count(), 1);
        for (path, mode) in [(path.as_path(), 0o600), (path.parent().expect("it has one"), 0o700)] {
            assert_eq!(std::fs::metadata(path).expect("is there").permissions().mode() & 0o777, mode);
        }
        remove(&path).expect("removes");
        remove(&path).expect("is gone already");
    }
}
