//! By how much a VM's disks pack, before any of it has travelled: a few pieces of them, spread over what they hold, through the same stream as
//! a mirror's.
//!
//! An estimate: blocks that are equal and far apart, and those that the other host has already, are not seen.

use crate::disk::Disk;
use crate::parts::Parts;
use anyhow::Result;
use godwit_api::host::Packs;
use godwit_api::{ApiError, Problem};
use godwit_content::Packer;
use godwit_units::Bytes;

/// Pieces of each disk, and how long they are: 8 MiB, some tens of milliseconds.
const PIECES: u64 = 32;
const PIECE: u64 = 256 << 10;

/// Of all disks that would travel.
///
/// # Errors
/// A disk cannot be read.
pub async fn ask(parts: &Parts) -> Result<Packs, ApiError> {
    let mut all = Packs::default();
    for disk in parts.disks().into_iter().filter(|disk| !disk.is_shared()) {
        let (held, wire) = disk.blocking(sample).await.map_err(|error| {
            ApiError::new(Problem::Failed, format!("how VM `{}`'s disks pack cannot be told: {error:#}", parts.name))
        })?;
        // A larger disk counts for more.
        all.held += held;
        all.wire += wire;
    }
    Ok(all)
}

/// What a disk holds, and what of that a link would carry.
fn sample(disk: &Disk) -> Result<(Bytes, Bytes)> {
    let replica = disk.replica();
    let mut at = 0;
    let mut data = vec![];
    for (length, hole) in replica.extents(0, disk.size().0)? {
        if !hole {
            data.push((at, length));
        }
        at += length;
    }
    let held: u64 = data.iter().map(|(_, length)| length).sum();
    let (mut packer, mut packed, mut read) = (Packer::new()?, vec![], 0);
    let mut piece = vec![0; PIECE as usize];
    for (at, length) in spread(&data, held) {
        let piece = &mut piece[..length as usize];
        replica.read(at, piece)?;
        packer.push(piece, &mut packed)?;
        read += length;
    }
    packer.flush(&mut packed)?;
    let share = packed.len() as f64 / read.max(1) as f64;
    Ok((Bytes(held), Bytes((held as f64 * share) as u64)))
}

/// Up to [`PIECES`] pieces at equal distances in what is held: (where, how long), within one run of it each.
fn spread(data: &[(u64, u64)], held: u64) -> Vec<(u64, u64)> {
    let count = held.div_ceil(PIECE).min(PIECES);
    let (mut runs, mut before) = (data.iter().copied().peekable(), 0);
    let mut pieces = vec![];
    let place = |i: u64| u64::try_from(u128::from(held) * u128::from(i) / u128::from(count)).unwrap_or(u64::MAX);
    for i in 0..count {
        let (wanted, next) = (place(i), place(i + 1));
        while let Some((_, length)) = runs.peek().copied().filter(|(_, length)| before + length <= wanted) {
            before += length;
            runs.next();
        }
        let Some((at, length)) = runs.peek().copied() else { break };
        let within = wanted - before;
        pieces.push((at + within, (length - within).min(PIECE).min(next - wanted)));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pieces_lie_at_equal_distances_in_what_is_held() {
        const MIB: u64 = 1 << 20;
        let data = [(0, 4 * MIB), (100 * MIB, 60 * MIB)];
        let pieces = spread(&data, 64 * MIB);
        assert_eq!(pieces.len() as u64, PIECES);
        // Two MiB apart: two in the first run.
        assert_eq!(pieces[..4], [(0, PIECE), (2 * MIB, PIECE), (100 * MIB, PIECE), (102 * MIB, PIECE)]);
        assert_eq!(spread(&[(7, 5)], 5), [(7, 5)]);
        assert_eq!(spread(&[], 0), []);
    }

    proptest! {
        #[test]
        fn pieces_lie_in_what_is_held_and_not_upon_each_other(runs in prop::collection::vec((0..9_000_000_u64, 1..9_000_000_u64), 0..40)) {
            let mut at = 0;
            let data: Vec<(u64, u64)> = runs.iter().map(|(hole, length)| {
                let run = (at + hole, *length);
                at += hole + length;
                run
            }).collect();
            let held = data.iter().map(|(_, length)| length).sum();
            let mut last = 0;
            for (at, length) in spread(&data, held) {
                prop_assert!(at >= last && length > 0);
                prop_assert!(data.iter().any(|(run, size)| at >= *run && at + length <= run + size), "{at} {length}");
                last = at + length;
            }
        }
    }
}
