//! Runs of blocks in messages; and what a target has ([`crate::has`]), compared at the source: how a mirror, a pre-cache and a
//! hand-off begin.

use crate::blocks::BlockSet;
use crate::stamp::{STAMP_BYTES, Stamp};
use std::collections::VecDeque;
use std::ops::Range;

/// Runs of one message.
pub(crate) const MOST_RUNS: usize = 4096;
/// First byte of a message with runs.
pub(crate) const HAVE: u8 = 1;
/// Second byte of it: more follow, or none do.
pub(crate) const MORE: u8 = 0;
pub(crate) const LAST: u8 = 1;
/// The same where more follow: no runs, but the epoch that the target holds.
pub(crate) const EPOCH: u8 = 2;

pub(crate) fn run_message(kind: u8, blocks: &Range<u64>, stamp: Stamp, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(1 + 16 + STAMP_BYTES + data.len());
    out.push(kind);
    out.extend(blocks.start.to_le_bytes());
    out.extend((blocks.end - blocks.start).to_le_bytes());
    stamp.encode(&mut out);
    out.extend(data);
    out
}

pub(crate) fn words<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut rest = bytes;
    let mut found = [0; N];
    for word in &mut found {
        let (head, tail) = rest.split_first_chunk::<8>()?;
        *word = u64::from_le_bytes(*head);
        rest = tail;
    }
    Some((found, rest))
}

/// A run in a message: blocks, stamp, and what follows.
pub(crate) fn parse_run(bytes: &[u8]) -> Option<(Range<u64>, Stamp, &[u8])> {
    let ([first, count], rest) = words::<2>(bytes)?;
    let (stamp, rest) = rest.split_first_chunk::<STAMP_BYTES>()?;
    Some((first..first.checked_add(count)?, Stamp::decode(stamp), rest))
}

/// A run of blocks with one stamp.
pub(crate) type Run = (Range<u64>, Stamp);

/// What a side has, up to a block, and has not been compared.
#[derive(Debug, Default)]
pub(crate) struct Side {
    runs: VecDeque<Run>,
    to: u64,
}

impl Side {
    /// All before this block is known of it.
    pub(crate) const fn to(&self) -> u64 {
        self.to
    }

    /// More of it, in order: all before this block is known then; none: all that there is.
    pub(crate) fn extend(&mut self, runs: impl IntoIterator<Item = Run>, to: Option<u64>) {
        self.runs.extend(runs);
        self.to = to.unwrap_or(u64::MAX);
    }

    /// Takes the runs of a message about a volume of so many blocks, after which others come, or none; `None`: they make no sense, or nothing
    /// was to come.
    pub(crate) fn take(&mut self, mut runs: &[u8], blocks: u64, last: bool) -> Option<()> {
        while !runs.is_empty() {
            let (run, stamp, rest) = parse_run(runs)?;
            if run.start < self.to || run.is_empty() || run.end > blocks {
                return None;
            }
            self.to = run.end;
            self.runs.push_back((run, stamp));
            runs = rest;
        }
        if self.to == u64::MAX {
            return None;
        }
        if last {
            self.to = u64::MAX;
        }
        Some(())
    }

    /// What it has before a block; it is forgotten.
    fn before(&mut self, end: u64) -> Vec<Run> {
        let mut found = vec![];
        while self.runs.front().is_some_and(|(run, _)| run.start < end) {
            let Some((run, stamp)) = self.runs.pop_front() else { break };
            found.push((run.start..run.end.min(end), stamp));
            if run.end > end {
                self.runs.push_front((end..run.end, stamp));
            }
        }
        found
    }

    /// How many runs it holds.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.runs.len()
    }
}

impl Compared {
    /// Compares what two sides have before a block: by stamps, not by contents. They forget it.
    pub(crate) fn before(&mut self, end: u64, ours: &mut Side, theirs: &mut Side) {
        let (ours, theirs) = (ours.before(end), theirs.before(end));
        // Both lists are in order; what only one of them has differs as well.
        let mut edges: Vec<u64> = ours.iter().chain(&theirs).flat_map(|(r, _)| [r.start, r.end]).collect();
        edges.sort_unstable();
        edges.dedup();
        let (mut i, mut j) = (0, 0);
        for pair in edges.windows(2) {
            let at = pair[0];
            while ours.get(i).is_some_and(|(r, _)| r.end <= at) {
                i += 1;
            }
            while theirs.get(j).is_some_and(|(r, _)| r.end <= at) {
                j += 1;
            }
            let of = |list: &[Run], n: usize| list.get(n).filter(|(r, _)| r.contains(&at)).map(|(_, s)| *s);
            let have = of(&ours, i);
            if have != of(&theirs, j) {
                self.differing.insert(pair[0]..pair[1]);
            } else if have.is_some() {
                self.alike += pair[1] - pair[0];
            }
        }
    }
}

/// Two replicas compared.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    /// Blocks whose stamps differ, or which only one of them has.
    pub differing: BlockSet,
    /// How many were written at both and have the same stamp.
    pub alike: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::{Epoch, Generation, Lineage};
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    const BLOCKS: u64 = 60;

    fn stamp(epoch: u32) -> Stamp {
        Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(epoch) }
    }

    /// Runs in order, of few stamps, with gaps, some of which touch.
    fn runs(rng: &mut SmallRng) -> Vec<Run> {
        let (mut at, mut runs) = (rng.random_range(0..8_u64), vec![]);
        while at < BLOCKS {
            let end = (at + rng.random_range(1..12_u64)).min(BLOCKS);
            runs.push((at..end, stamp(rng.random_range(1..4))));
            at = end + rng.random_range(0..6_u64);
        }
        runs
    }

    /// The parts of runs that lie there.
    fn part(runs: &[Run], of: &Range<u64>) -> Vec<Run> {
        let cut = runs.iter().map(|(run, stamp)| (run.start.max(of.start)..run.end.min(of.end), *stamp));
        cut.filter(|(run, _)| !run.is_empty()).collect()
    }

    #[test]
    fn a_comparison_in_pieces_finds_what_one_of_each_block_does_wherever_they_end() {
        for seed in 0..500 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let all = [runs(&mut rng), runs(&mut rng)];
            let (mut sides, mut found) = ([Side::default(), Side::default()], Compared::default());
            loop {
                let end = sides[0].to().min(sides[1].to());
                let [ours, theirs] = &mut sides;
                found.before(end, ours, theirs);
                // Now more is known of the one, now of the other.
                let Some(n) = [rng.random_range(0..2), 0, 1].into_iter().find(|n| sides[*n].to() < BLOCKS) else {
                    break;
                };
                let (from, to) = (sides[n].to(), rng.random_range(sides[n].to()..=BLOCKS));
                sides[n].extend(part(&all[n], &(from..to)), Some(to));
            }
            let of =
                |n: usize, block: u64| all[n].iter().find(|(run, _)| run.contains(&block)).map(|(_, stamp)| *stamp);
            let blocks = || (0..BLOCKS).map(|block| (block, of(0, block), of(1, block)));
            let differing: Vec<u64> = blocks().filter(|(_, a, b)| a != b).map(|(block, ..)| block).collect();
            let alike = blocks().filter(|(_, a, b)| a.is_some() && a == b).count() as u64;
            assert_eq!(found.differing.runs().flatten().collect::<Vec<u64>>(), differing, "seed {seed}");
            assert_eq!((found.alike, sides[0].len() + sides[1].len()), (alike, 0), "seed {seed}");
        }
    }

    #[test]
    fn runs_that_overlap_go_beyond_the_volume_or_come_behind_the_last_are_refused() {
        let message = |runs: &[Range<u64>]| -> Vec<u8> {
            runs.iter().flat_map(|run| run_message(0, run, stamp(1), &[])[1..].to_vec()).collect()
        };
        let (good, mut side) = ([2..5, 5..9], Side::default());
        assert_eq!(side.take(&message(&good), 20, false), Some(()));
        for bad in [8..10, 9..9, 12..21, 19..u64::MAX] {
            let mut side = Side::default();
            assert_eq!(side.take(&message(&good), 20, false), Some(()));
            // Also where what was said before is compared, and forgotten.
            Compared::default().before(9, &mut Side::default(), &mut side);
            assert_eq!(side.take(&message(std::slice::from_ref(&bad)), 20, false), None, "{bad:?}");
        }
        assert_eq!(side.take(&message(&[9..15, 15..20]), 20, true), Some(()));
        assert_eq!(side.take(&[], 20, true), None, "nothing comes behind the last");
    }
}
