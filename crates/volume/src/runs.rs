//! Runs of blocks in messages; and what a target has, told to the source and compared there: how a mirror, a pre-cache and a
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

type Runs = [(Range<u64>, Stamp)];

/// Runs as messages that say of themselves that others follow. None, where there are no runs.
pub(crate) fn messages(runs: &Runs) -> Vec<Vec<u8>> {
    let message = |piece: &Runs| {
        let mut message = vec![HAVE, MORE];
        for (run, stamp) in piece {
            message.extend(&run_message(HAVE, run, *stamp, &[])[1..]);
        }
        message
    };
    runs.chunks(MOST_RUNS).map(message).collect()
}

/// The same, of which the last says that it is; at least one.
pub(crate) fn all_messages(runs: &Runs) -> Vec<Vec<u8>> {
    let mut all = messages(runs);
    match all.last_mut() {
        Some(last) => last[1] = LAST,
        None => all.push(vec![HAVE, LAST]),
    }
    all
}

/// What the target says it has, until all of it is known and was compared.
#[derive(Debug, Default)]
pub(crate) struct Theirs(VecDeque<(Range<u64>, Stamp)>);

impl Theirs {
    /// Takes the runs of a message, about a volume of so many blocks; `None`: they make no sense.
    pub(crate) fn take(&mut self, mut runs: &[u8], blocks: u64) -> Option<()> {
        while !runs.is_empty() {
            let (run, stamp, rest) = parse_run(runs)?;
            let after = self.0.back().map_or(0, |(r, _)| r.end);
            if run.start < after || run.is_empty() || run.end > blocks {
                return None;
            }
            self.0.push_back((run, stamp));
            runs = rest;
        }
        Some(())
    }

    /// What it has before a block; it is forgotten.
    fn before(&mut self, end: u64) -> Vec<(Range<u64>, Stamp)> {
        let mut found = vec![];
        while self.0.front().is_some_and(|(run, _)| run.start < end) {
            let Some((run, stamp)) = self.0.pop_front() else { break };
            found.push((run.start..run.end.min(end), stamp));
            if run.end > end {
                self.0.push_front((end..run.end, stamp));
            }
        }
        found
    }

    /// Compares what it has before a block (`None`: all that is left) with what is here there: by stamps, not by contents. It is forgotten.
    pub(crate) fn compare(&mut self, ours: &Runs, end: Option<u64>, found: &mut Compared) {
        let theirs = self.before(end.unwrap_or(u64::MAX));
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
            let of = |list: &Runs, n: usize| list.get(n).filter(|(r, _)| r.contains(&at)).map(|(_, s)| *s);
            let have = of(ours, i);
            if have != of(&theirs, j) {
                found.differing.insert(pair[0]..pair[1]);
            } else if have.is_some() {
                found.alike += pair[1] - pair[0];
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
    fn runs(rng: &mut SmallRng) -> Vec<(Range<u64>, Stamp)> {
        let (mut at, mut runs) = (rng.random_range(0..8_u64), vec![]);
        while at < BLOCKS {
            let end = (at + rng.random_range(1..12_u64)).min(BLOCKS);
            runs.push((at..end, stamp(rng.random_range(1..4))));
            at = end + rng.random_range(0..6_u64);
        }
        runs
    }

    /// The parts of runs that lie there.
    fn part(runs: &Runs, of: &Range<u64>) -> Vec<(Range<u64>, Stamp)> {
        let cut = runs.iter().map(|(run, stamp)| (run.start.max(of.start)..run.end.min(of.end), *stamp));
        cut.filter(|(run, _)| !run.is_empty()).collect()
    }

    #[test]
    fn a_comparison_in_pieces_finds_what_one_of_each_block_does_wherever_they_end() {
        for seed in 0..500 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let (ours, theirs) = (runs(&mut rng), runs(&mut rng));
            let mut ends: Vec<u64> = (0..rng.random_range(0..5)).map(|_| rng.random_range(0..=BLOCKS)).collect();
            ends.sort_unstable();
            let [mut pieces, mut at_once] = [(); 2].map(|()| (Theirs(theirs.clone().into()), Compared::default()));
            let mut from = 0;
            for end in ends {
                pieces.0.compare(&part(&ours, &(from..end)), Some(end), &mut pieces.1);
                from = end;
            }
            pieces.0.compare(&part(&ours, &(from..BLOCKS)), None, &mut pieces.1);
            at_once.0.compare(&ours, None, &mut at_once.1);
            let of =
                |runs: &Runs, block: u64| runs.iter().find(|(run, _)| run.contains(&block)).map(|(_, stamp)| *stamp);
            let all = || (0..BLOCKS).map(|block| (block, of(&ours, block), of(&theirs, block)));
            let differing: Vec<u64> = all().filter(|(_, a, b)| a != b).map(|(block, ..)| block).collect();
            let alike = all().filter(|(_, a, b)| a.is_some() && a == b).count() as u64;
            for (_, found) in [pieces, at_once] {
                let blocks: Vec<u64> = found.differing.runs().flatten().collect();
                assert_eq!((&blocks, found.alike), (&differing, alike), "seed {seed}");
            }
        }
    }
}
