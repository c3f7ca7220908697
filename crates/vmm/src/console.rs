//! What a guest writes to its serial port. A guest can write without end, and its host's disk is not its own: the file is cut to what
//! came last whenever it has become too long ([`bound`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file becomes no longer than this, and what comes between two looks. Bytes.
pub const MOST: u64 = 16 << 20;
/// What is left of it then. Bytes.
pub const KEPT: u64 = 1 << 20;

/// The file, in the folder of a VM's logs. QEMU appends to it.
#[must_use]
pub fn path(logs: &Path) -> PathBuf {
    logs.join("console.log")
}

/// Cuts it to its last [`KEPT`] bytes where it is longer than [`MOST`]. What the guest says in this moment may be lost. Whether it did.
///
/// # Errors
/// When the file can be read and not cut.
pub fn bound(logs: &Path) -> io::Result<bool> {
    let path = path(logs);
    let Ok(there) = path.metadata() else { return Ok(false) };
    let length = there.len();
    // A QEMU that an earlier version started writes on at its own place, behind a hole.
    if there.blocks() * 512 <= MOST || length <= MOST {
        return Ok(false);
    }
    let mut file = File::options().read(true).append(true).open(path)?;
    let mut last = vec![];
    file.seek(SeekFrom::Start(length - KEPT))?;
    (&file).take(KEPT).read_to_end(&mut last)?;
    file.set_len(0)?;
    file.write_all(b"[godwit: what came before was cut off]\n")?;
    file.write_all(&last)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_talks_without_end_keeps_its_last_words_only() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(!bound(folder.path()).expect("there is none"));
        let mut qemu = File::options().create(true).append(true).open(path(folder.path())).expect("opens");
        // No file system packs it.
        let mut state = 1_u64;
        for _ in 0..MOST / 1024 {
            let words = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 32) as u32
            });
            let line: Vec<u8> = words.take(256).flat_map(u32::to_le_bytes).collect();
            qemu.write_all(&line).expect("writes");
        }
        assert!(!bound(folder.path()).expect("is looked at"));
        qemu.write_all(b"too much\n").expect("writes");
        assert!(bound(folder.path()).expect("is cut"));
        qemu.write_all(b"and on\n").expect("writes");
        let left = std::fs::read(path(folder.path())).expect("is there");
        assert!(left.len() < 2 * KEPT as usize && left.ends_with(b"too much\nand on\n"), "{}", left.len());
    }
}
