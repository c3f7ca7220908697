//! The files that VMs boot from, by content.
//!
//! A destination is asked twice before each move whether it has the same ones, and whoever ordered the move waits for the answers. So what was
//! hashed is remembered for as long as the file is what it was, by what its file system says of it.

use crate::parts::lock;
use godwit_api::vm::{Boot, BootFile};
use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// Files that are remembered: those of some dozens of images. Beyond that all are forgotten.
const MOST: usize = 256;
/// A file that was changed so shortly before it was read may have been changed once more within what its file system tells apart, seconds.
const SETTLED: i64 = 2;

/// What a file system says of a file that was not changed in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(file: &Metadata) -> Self {
        Self {
            file: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    /// Whether a change from now on would show.
    fn is_settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
        now.saturating_sub(self.changed.0) > SETTLED
    }
}

/// What is known of an image folder's files.
#[derive(Debug, Default)]
pub struct BootFiles {
    hashed: Mutex<BTreeMap<String, (Stamp, String)>>,
}

impl BootFiles {
    /// The files that a VM boots from. Reads them; blocks.
    ///
    /// # Errors
    /// When one is not there.
    pub fn of(&self, images: &Path, boot: &Boot) -> Result<Vec<BootFile>, String> {
        let Boot::Kernel { kernel, initrd, .. } = boot else { return Ok(vec![]) };
        let names = std::iter::once(kernel).chain(initrd);
        names.map(|name| Ok(BootFile { name: name.clone(), blake3: self.hash(images, name)? })).collect()
    }

    /// Whether a file is here as it is on the VM's host. Reads it, where it is not known; blocks.
    ///
    /// # Errors
    /// It is not, or is another one.
    pub fn is_same(&self, images: &Path, file: &BootFile) -> Result<(), String> {
        if self.hash(images, &file.name)? == file.blake3 {
            Ok(())
        } else {
            Err(format!("the boot file `{}` is another one than on the VM's host", file.name))
        }
    }

    fn hash(&self, images: &Path, name: &str) -> Result<String, String> {
        // The name comes from the network: it must not lead out of the folder.
        if name.contains('/') || name.starts_with('.') || name.is_empty() {
            return Err(format!("`{name}` is no file name"));
        }
        let path = images.join(name);
        let failed = |e: io::Error| format!("{}: {e}", path.display());
        let file = File::open(&path).map_err(|e| format!("there is no boot file {}: {e}", path.display()))?;
        let stamp = Stamp::of(&file.metadata().map_err(failed)?);
        if let Some((_, hash)) = lock(&self.hashed).get(name).filter(|(known, _)| *known == stamp) {
            return Ok(hash.clone());
        }
        let began = SystemTime::now();
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(&file).map_err(failed)?;
        let hash = hasher.finalize().to_hex().to_string();
        if stamp.is_settled(began) && Stamp::of(&file.metadata().map_err(failed)?) == stamp {
            let mut hashed = lock(&self.hashed);
            if hashed.len() >= MOST {
                hashed.clear();
            }
            hashed.insert(name.to_owned(), (stamp, hash.clone()));
        }
        Ok(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn kernel() -> Boot {
        Boot::Kernel { kernel: "vmlinuz".into(), initrd: None, cmdline: String::new() }
    }

    #[test]
    fn a_boot_file_is_named_by_its_content_and_only_inside_the_folder() {
        let (folder, known) = (tempfile::tempdir().expect("a folder"), BootFiles::default());
        std::fs::write(folder.path().join("vmlinuz"), "one").expect("writes");
        let files = known.of(folder.path(), &kernel()).expect("is there");
        assert_eq!(known.is_same(folder.path(), &files[0]), Ok(()));
        std::fs::write(folder.path().join("vmlinuz"), "two").expect("writes");
        assert!(known.is_same(folder.path(), &files[0]).is_err());
        for bad in ["../vmlinuz", "/etc/passwd", "", ".hidden", "missing"] {
            assert!(known.hash(folder.path(), bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_remembered_of_a_boot_file_is_that_of_the_file_that_is_there() {
        let (folder, known) = (tempfile::tempdir().expect("a folder"), BootFiles::default());
        let path = folder.path().join("vmlinuz");
        let is_remembered = || lock(&known.hashed).contains_key("vmlinuz");
        std::fs::write(&path, "one").expect("writes");
        let one = known.of(folder.path(), &kernel()).expect("is there").remove(0);
        assert!(!is_remembered(), "what has just been written may be written again within its time stamps");
        // As if it had lain there.
        let stamp = Stamp::of(&std::fs::metadata(&path).expect("is there"));
        assert!(!stamp.is_settled(UNIX_EPOCH + Duration::from_secs(stamp.changed.0.unsigned_abs())));
        assert!(stamp.is_settled(UNIX_EPOCH + Duration::from_secs(stamp.changed.0.unsigned_abs() + 3)));
        lock(&known.hashed).insert("vmlinuz".into(), (stamp, one.blake3.clone()));
        assert_eq!(known.is_same(folder.path(), &one), Ok(()));
        // Of the same length, with the time at which the other was modified; and another file under that name.
        let modified = std::fs::metadata(&path).and_then(|m| m.modified()).expect("is there");
        let is_found_out = |what: &str| {
            let file = File::options().write(true).open(&path).expect("is there");
            file.set_modified(modified).expect("can be set");
            assert!(known.is_same(folder.path(), &one).is_err(), "{what}");
        };
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&path, "two").expect("writes");
        is_found_out("written in place");
        let other = folder.path().join("other");
        std::fs::write(&other, "six").expect("writes");
        std::fs::rename(&other, &path).expect("takes its place");
        is_found_out("replaced");
    }
}
