//! What a volume costs in memory. In a process of its own, because it is measured from outside.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::Replica;

/// 16 TiB less a block: the largest file that ext4 has.
const SIZE: u64 = (1 << 44) - 4096;
const GIB: u64 = 1 << 30;
const REGION: u64 = 4 << 20;
/// What ARCHITECTURE.md says: MiB of memory for a GiB of the volume in which anything was written, in up to 256 epochs for each region.
const FIGURE: f64 = 0.30;
/// And for a GiB all of whose regions were written in more.
const MOST: f64 = 2.3;

/// MiB of this process that are in memory.
fn resident() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

#[test]
fn memory_grows_with_what_was_written_and_not_with_the_volume_and_by_no_more_than_is_said() {
    const WHOLE: u64 = 16;
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("v");
    let empty = resident();
    let replica = Replica::create(&place, VolumeId(1), Bytes(SIZE)).unwrap();
    replica.become_primary(Lineage::FIRST, Generation(1)).unwrap();
    let made = resident() - empty;
    assert!(made < 2.0, "a volume of 16 TiB in which nothing was written takes {made:.1} MiB");
    // Whole GiBs here and there, in pieces as a guest's. Zeroes take no room on this disk, and as much memory as anything.
    for n in 0..WHOLE {
        let start = n * (SIZE / WHOLE / REGION * REGION);
        for piece in 0..GIB >> 20 {
            replica.zero(start + (piece << 20), 1 << 20).unwrap();
        }
        replica.settle().unwrap();
    }
    let whole = (resident() - empty - made) / WHOLE as f64;
    // A block in each region of as many GiBs: what is touched counts, not how much of it.
    let before = resident();
    let start = (SIZE / WHOLE / REGION * REGION) * 3 + 2 * GIB;
    for n in 0..WHOLE * GIB / REGION {
        replica.zero(start + n * REGION, 4096).unwrap();
        if n % 1024 == 0 {
            replica.settle().unwrap();
        }
    }
    let touched = (resident() - before) / WHOLE as f64;
    // A block of each region of a GiB in each of 300 epochs, while whole GiBs lie beside it.
    let before = resident();
    let start = (SIZE / WHOLE / REGION * REGION) * 5 + 2 * GIB;
    for epoch in 0..300 {
        for region in 0..GIB / REGION {
            replica.zero(start + region * REGION + epoch * 4096, 4096).unwrap();
        }
        replica.end_epoch().unwrap();
    }
    let epochs = resident() - before;
    println!("MiB for a GiB: {whole:.2} written whole, {touched:.2} touched here and there, {epochs:.2} in 300 epochs");
    for (what, got, said) in [("written whole", whole, FIGURE), ("touched", touched, FIGURE), ("epochs", epochs, MOST)]
    {
        assert!(got < 1.5 * said, "{what}: {got:.2} MiB for a GiB, and {said} is said");
        assert!(got > 0.5 * said, "{what}: {got:.2} MiB for a GiB: say less");
    }
    replica.close().unwrap();
}
