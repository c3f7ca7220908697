//! Runs of blocks in messages; and what a target has, told to the source and compared there: how a mirror, a pre-cache and a
//! hand-off begin.

use crate::blocks::BlockSet;
use crate::stamp::{STAMP_BYTES, Stamp};
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

/// What the target says it has, until all of it is known.
#[derive(Debug, Default)]
pub(crate) struct Theirs(Vec<(Range<u64>, Stamp)>);

impl Theirs {
    /// Takes the runs of a message, about a volume of so many blocks; `None`: they make no sense.
    pub(crate) fn take(&mut self, mut runs: &[u8], blocks: u64) -> Option<()> {
        while !runs.is_empty() {
            let (run, stamp, rest) = parse_run(runs)?;
            let after = self.0.last().map_or(0, |(r, _)| r.end);
            if run.start < after || run.is_empty() || run.end > blocks {
                return None;
            }
            self.0.push((run, stamp));
            runs = rest;
        }
        Some(())
    }

    /// Compares it with what is here: by stamps, not by contents. It is forgotten.
    pub(crate) fn compare(&mut self, ours: &Runs) -> Compared {
        let theirs = std::mem::take(&mut self.0);
        // Both lists are in order; what only one of them has differs as well.
        let mut edges: Vec<u64> = ours.iter().chain(&theirs).flat_map(|(r, _)| [r.start, r.end]).collect();
        edges.sort_unstable();
        edges.dedup();
        let (mut i, mut j, mut found) = (0, 0, Compared::default());
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
        found
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
