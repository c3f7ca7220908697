//! Whether a guest works by turns, and where in its turn a log of it ends.
//!
//! A guest that works and rests, or does one thing after another and begins again, is as predictable as one that always does the same, if it is
//! known where in its turn it is. That is found as the pitch of a voice is: the log's counts of pages are laid beside themselves, later by a
//! lag, and where they differ least they come again (the average magnitude difference function; Ross, Shaffer, Cohen, Freudberg and Manley,
//! 1974).
//!
//! What can go wrong: *a guest whose turns are longer than half of its log* shows none. *A guest that only slows down* is most like itself a
//! moment ago, which is no turn: counts have to become unlike before they are alike again.

/// How far back it is worth looking, in intervals: what it takes grows with the square.
pub const MOST: u64 = 512;
/// Counts are alike if they differ by no more than this part of what they differ by on average.
const ALIKE: f64 = 1.0 / 3.0;

/// After how many intervals a guest comes again to where it is at the end, by the pages of each interval: the longest such time that was seen
/// twice, so that as much as possible of what it does is in it. None: it shows no turns.
pub fn turns(counts: &[u64]) -> Option<usize> {
    let differs = |lag: usize| {
        let pairs = counts.iter().zip(&counts[lag..]);
        pairs.map(|(a, b)| a.abs_diff(*b) as f64).sum::<f64>() / (counts.len() - lag) as f64
    };
    let by_lag: Vec<f64> = (1..=counts.len() / 2).map(differs).collect();
    let usual = by_lag.iter().sum::<f64>() / by_lag.len().max(1) as f64;
    let unlike = by_lag.iter().position(|d| *d > usual)?;
    let alike = |(lag, d): (usize, &f64)| (lag > unlike && *d <= usual * ALIKE).then_some(lag + 1);
    let last = by_lag.iter().enumerate().filter_map(alike).next_back()?;
    // Its neighbours are alike, too, and one of them more so.
    (last.saturating_sub(2).max(unlike + 2)..=last).min_by(|a, b| by_lag[a - 1].total_cmp(&by_lag[b - 1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works and rests for so many intervals each, not quite evenly.
    fn by_turns(busy: usize, rest: usize, length: usize, noise: u64) -> Vec<u64> {
        let mut x = 7_u64;
        let mut noise = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) % (noise + 1)
        };
        (0..length).map(|i| if i % (busy + rest) < busy { 3000 - noise() } else { noise() }).collect()
    }

    #[test]
    fn a_guest_that_works_and_rests_comes_again_to_where_it_is() {
        for noise in [0, 100, 600] {
            assert_eq!(turns(&by_turns(4, 4, 24, noise)), Some(8), "{noise}");
            assert_eq!(turns(&by_turns(2, 10, 60, noise)), Some(24), "the longest that was seen twice; {noise}");
            assert_eq!(turns(&by_turns(5, 2, 17, noise)), Some(7), "{noise}");
        }
    }

    #[test]
    fn a_guest_that_does_not_shows_no_turns() {
        assert_eq!(turns(&[]), None);
        assert_eq!(turns(&[5]), None);
        assert_eq!(turns(&[800; 30]), None);
        assert_eq!(turns(&by_turns(4, 4, 12, 0)), None, "not seen twice");
        assert_eq!(turns(&(0..40).map(|i| i * 50).collect::<Vec<_>>()), None, "it becomes busier and busier");
        assert_eq!(turns(&by_turns(20, 20, 40, 9)), None, "it rests, and who knows for how long");
    }
}
