//! On a loop device, which is a block device as any other; skipped, aloud, where there is none to be had.

use super::*;
use crate::replica::Replica;
use crate::stamp::Stamp;
use crate::{BLOCK, Contents};
use godwit_units::{Epoch, Generation, Lineage};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

const SIZE: u64 = 16 << 20;

/// One after the other: what a test starts has, until it begins, the locks of all others.
static ALONE: Mutex<()> = Mutex::new(());

/// A loop device over a file that held something.
struct Loop(PathBuf, #[allow(dead_code, reason = "held for as long as the device")] MutexGuard<'static, ()>);

impl Loop {
    fn new(folder: &Path, bytes: u64) -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let file = folder.join("disk");
        std::fs::write(&file, vec![0xee; usize::try_from(bytes).unwrap()]).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match made {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8(output.stdout).unwrap().trim().into(), alone))
            }
            _ => {
                eprintln!("SKIPPED: this needs loop devices and the right to make one");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

fn placed(folder: &Path, device: &Loop, before: Before) -> Replica {
    let place = folder.join("v");
    Replica::create_on(&place, &device.0, VolumeId(1), Bytes(SIZE), before).unwrap();
    Replica::open(&place).unwrap().0
}

fn read(replica: &Replica) -> Vec<u8> {
    let mut bytes = vec![0xff; SIZE as usize];
    replica.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_volume_on_a_device_reads_as_zeroes_where_nothing_was_written_and_knows_its_holes() {
    let folder = tempfile::tempdir().unwrap();
    // Larger than the volume: what is behind it is not ours.
    let Some(device) = Loop::new(folder.path(), SIZE + BLOCK) else { return };
    let replica = placed(folder.path(), &device, Before::Anything);
    assert!(read(&replica) == vec![0; SIZE as usize], "what the device held is gone");
    let file = std::fs::read(folder.path().join("disk")).unwrap();
    assert_eq!(file[SIZE as usize..], vec![0xee; BLOCK as usize], "what is behind the volume is left alone");
    replica.become_primary(Lineage::FIRST, Generation(1)).unwrap();
    replica.write(BLOCK, &[7; 3 * BLOCK as usize]).unwrap();
    replica.write(8 << 20, &[8; 512]).unwrap();
    // Of parts of blocks, too.
    replica.zero(BLOCK + 512, 2 * BLOCK - 100).unwrap();
    replica.flush().unwrap();
    let mut now = vec![0; SIZE as usize];
    now[4096..4 * 4096].fill(7);
    now[4096 + 512..4096 + 512 + 2 * 4096 - 100].fill(0);
    now[8 << 20..(8 << 20) + 512].fill(8);
    assert!(read(&replica) == now);
    let mut past = vec![0; 2 * BLOCK as usize];
    replica.read(BLOCK, &mut past).unwrap();
    assert!(past == now[4096..3 * 4096]);
    let map = replica.extents(0, SIZE).unwrap();
    let (four, eight) = (BLOCK, 8 << 20);
    let rest = SIZE - eight - BLOCK;
    assert_eq!(map, [(four, true), (3 * four, false), (eight - 4 * four, true), (four, false), (rest, true)]);
    assert_eq!(replica.extents(BLOCK + 1, 10).unwrap(), [(10, false)]);
    assert_eq!(replica.allocated(), Bytes(4 * BLOCK));
    replica.close().unwrap();
    let (again, opened) = Replica::open(&folder.path().join("v")).unwrap();
    assert!(opened.clean && read(&again) == now);
}

#[test]
fn an_unclean_end_leaves_a_secondary_on_a_device_with_zeroes_for_what_it_forgets() {
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = Loop::new(folder.path(), SIZE) else { return };
    let replica = placed(folder.path(), &device, Before::Anything);
    let stamp = Stamp { lineage: Lineage::FIRST, generation: Generation(1), epoch: Epoch(1) };
    replica.apply(5, stamp, Contents::Data(&[9; BLOCK as usize])).unwrap();
    drop(replica);
    let (again, opened) = Replica::open(&folder.path().join("v")).unwrap();
    assert!(!opened.clean && opened.doubted > 0);
    assert_eq!(again.stamp(5).unwrap(), None);
    assert!(read(&again) == vec![0; SIZE as usize]);
}

#[test]
fn a_device_that_is_in_use_too_small_another_one_or_gone_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = Loop::new(folder.path(), SIZE) else { return };
    let create = |name: &str, path: &Path, size: u64| {
        let made = Replica::create_on(&folder.path().join(name), path, VolumeId(2), Bytes(size), Before::Zeroes);
        made.err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(create("a", &device.0, SIZE + BLOCK).contains("16777216 bytes"));
    assert!(create("a", &folder.path().join("disk"), SIZE).contains("no block device"));
    assert!(!folder.path().join("a").exists());
    let replica = placed(folder.path(), &device, Before::Zeroes);
    // Another volume's, which has it open; and one that knows of it.
    assert!(create("a", &device.0, SIZE).contains("in use"), "a device that is open exclusively");
    assert_eq!(is_taken(&device.0, folder.path()), Some(folder.path().join("v")));
    assert_eq!(is_taken(&folder.path().join("disk"), folder.path()), None);
    drop(replica);
    let mounted = folder.path().join("mnt");
    std::fs::create_dir(&mounted).unwrap();
    let made = Command::new("mkfs.ext4").arg("-q").arg(&device.0).status().is_ok_and(|s| s.success())
        && Command::new("mount").arg(&device.0).arg(&mounted).status().is_ok_and(|s| s.success());
    if made {
        let error = Replica::open(&folder.path().join("v")).unwrap_err().to_string();
        let _ = Command::new("umount").arg(&mounted).status();
        assert!(error.contains("is mounted"), "{error}");
    }
    // After a reboot the name is another disk's.
    std::fs::write(folder.path().join("v/device"), "wwid another").unwrap();
    let error = Replica::open(&folder.path().join("v")).unwrap_err().to_string();
    assert!(error.contains("another device now"), "{error}");
    // Or nobody's: no file is made in its place.
    let data = folder.path().join("v/data");
    std::fs::remove_file(&data).unwrap();
    std::os::unix::fs::symlink(folder.path().join("gone"), &data).unwrap();
    assert!(Replica::open(&folder.path().join("v")).is_err());
    assert!(!folder.path().join("gone").exists());
}
