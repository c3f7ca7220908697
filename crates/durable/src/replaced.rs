//! Files that are replaced by a rename.
//!
//! Each replacement has a file of its own, named after its process, until it takes its place: of two at once one comes after the other, whole.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the name of a file ends with that has not taken its place.
const FRESH: &str = ".new";
/// And after how long nobody is about to put it there any more.
const LEFT: Duration = Duration::from_secs(3600);

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
    static REPLACED: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Some(name) = path.file_name() {
        sweep(folder, name)?;
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}-{}{FRESH}", std::process::id(), REPLACED.fetch_add(1, Ordering::Relaxed)));
    let fresh = Path::new(&fresh);
    // A process before may have had the same number, and have left one.
    remove(fresh)?;
    let placed = write_whole(fresh, mode, write).and_then(|file| std::fs::rename(fresh, path).map(|()| file));
    let file = placed.inspect_err(|_| _ = remove(fresh))?;
    File::open(folder)?.sync_all()?;
    Ok(file)
}

fn write_whole(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<File> {
    let mut file = OpenOptions::new().create_new(true).read(true).write(true).mode(mode).open(path)?;
    write(&mut file)?;
    file.sync_data()?;
    Ok(file)
}

/// Removes what crashes have left of a file that was about to be replaced. By its age alone: it may have been another host, where they share a folder.
fn sweep(folder: &Path, name: &OsStr) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let written = || entry.metadata().and_then(|file| file.modified());
        let is_left = || written().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT));
        if is_fresh(entry.file_name().as_bytes(), name.as_bytes()) && is_left() {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Whether `other` is what the file `name` may be replaced by. Earlier versions put no process into it.
fn is_fresh(other: &[u8], name: &[u8]) -> bool {
    let Some(by) = other.strip_prefix(name).and_then(|rest| rest.strip_suffix(FRESH.as_bytes())) else { return false };
    let is_number = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    let numbers = by.strip_prefix(b".").map(|by| by.split(|b| *b == b'-').collect::<Vec<_>>());
    by.is_empty() || numbers.is_some_and(|parts| parts.len() == 2 && parts.into_iter().all(is_number))
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
        let put = |name: &str, hours: u32| {
            let file = File::create(folder.path().join(name)).expect("makes");
            file.set_modified(std::time::SystemTime::now() - LEFT * hours).expect("has a time");
        };
        ["1.json.new", "1.json.17-0.new"].into_iter().for_each(|name| put(name, 2));
        replace(&path, b"3").expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), b"3");
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
        // What somebody may be writing, and what is another's.
        let others = [("1.json.17-0.new", 0), ("1.json.x-0.new", 2), ("1.json.1.new", 2), ("11.json.new", 2)];
        others.into_iter().for_each(|(name, hours)| put(name, hours));
        replace(&path, b"3").expect("writes");
        for (name, _) in others {
            std::fs::remove_file(folder.path().join(name)).expect("is left alone");
        }
        let mode = |path: &Path| std::fs::metadata(path).expect("is there").permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        replace_as(&path, 0o644, b"4").expect("writes");
        assert_eq!(mode(&path), 0o644);
        remove(&path).expect("removes");
        remove(&path).expect("is gone already");
    }

    #[test]
    fn of_many_at_once_each_is_done_and_the_last_one_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("1.json");
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..20 {
                        replace(path, &vec![writer; 10_000 + usize::from(writer)]).expect("replaces");
                    }
                });
            }
        });
        let bytes = std::fs::read(&path).expect("reads");
        assert!(bytes.len() == 10_000 + usize::from(bytes[0]) && bytes.iter().all(|b| *b == bytes[0]));
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
    }

    #[test]
    fn what_cannot_be_written_leaves_nothing_beside_what_is_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("1.json");
        replace(&path, b"1").expect("writes");
        let full = replace_with(&path, 0o600, |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(full.expect_err("is full").kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).expect("reads"), b"1");
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
    }

    #[test]
    fn a_folder_that_was_removed_does_not_come_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gone/1.json");
        assert_eq!(replace(&path, b"1").expect_err("has no folder").kind(), io::ErrorKind::NotFound);
        assert!(!folder.path().join("gone").exists());
    }
}
