//! Files that are replaced by a rename.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces a file in a folder that is there; durable when it returns. For its owner's eyes only.
///
/// # Errors
/// When the folder is gone, or the medium fails; nobody knows then which of the two is there.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_as(path, 0o600, bytes)
}

/// As [`replace`], with these rights.
///
/// # Errors
/// As [`replace`].
pub fn replace_as(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, mode, |file| file.write_all(bytes)).map(drop)
}

/// The same with whatever `write` makes of the new file, which is given back.
pub(crate) fn replace_with(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    // What a crash left has somebody else's length, and could have anybody's rights.
    remove(Path::new(&fresh))?;
    let mut file = OpenOptions::new().create_new(true).read(true).write(true).mode(mode).open(&fresh)?;
    write(&mut file)?;
    file.sync_data()?;
    std::fs::rename(&fresh, path)?;
    File::open(folder)?.sync_all()?;
    Ok(file)
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
        let path = folder.path().join("1.json");
        replace(&path, b"[1, 2]").expect("writes");
        std::fs::write(folder.path().join("1.json.new"), "half of a longer one than ever was").expect("writes");
        replace(&path, b"3").expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), b"3");
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
        let mode = |path: &Path| std::fs::metadata(path).expect("is there").permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        replace_as(&path, 0o644, b"4").expect("writes");
        assert_eq!(mode(&path), 0o644);
        remove(&path).expect("removes");
        remove(&path).expect("is gone already");
    }

    #[test]
    fn a_folder_that_was_removed_does_not_come_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gone/1.json");
        assert_eq!(replace(&path, b"1").expect_err("has no folder").kind(), io::ErrorKind::NotFound);
        assert!(!folder.path().join("gone").exists());
    }
}
