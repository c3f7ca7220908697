//! The shapes of the paper's figure 1: what a 1,024 MiB guest that writes its pages one after the other costs, over its rate, on
//! three links. The paper prints curves, no figures, and says in words where they break (section III).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_predict::{Bounds, Link, Overheads, PAGE, PageRate, Pages, Prediction, Rules, Sequential, bounds, simulate};
use godwit_units::{BitRate, Bytes};
use std::time::Duration;

const MEMORY: Bytes = Bytes::mib(1024);
const OVERHEADS: Overheads = Overheads { pre: Duration::from_millis(3800), post: Duration::from_millis(314) };
/// Goodputs of 100 Mbit/s, 1 Gbit/s and 10 Gbit/s, from Table I.
const MBIT: [f64; 3] = [94.208, 935.335, 7130.354];
/// Where the paper's figures end, in pages a second.
const FASTEST: f64 = 300_000.0;

fn move_at(mbit: f64, pages_per_s: f64) -> Prediction {
    let pages = Pages::of(MEMORY);
    let mut guest = Sequential::new(pages, pages, PageRate::new(pages_per_s));
    simulate(&mut guest, Link { rate: BitRate::from_mbit(mbit), overheads: OVERHEADS }, &Rules::xen()).unwrap()
}

fn bounds_at(mbit: f64) -> Bounds {
    bounds(MEMORY, BitRate::from_mbit(mbit), OVERHEADS, &Rules::xen()).unwrap()
}

/// Pages a second that the link carries.
fn carries(mbit: f64) -> f64 {
    mbit * 1e6 / (PAGE.0 * 8) as f64
}

/// The least rate, in pages a second, at which the guest stands for more than twice as long as it must.
fn breaks_at(mbit: f64) -> f64 {
    let rates = (1..=80).map(|i| carries(mbit) * f64::from(i) / 20.0);
    rates.into_iter().find(|rate| move_at(mbit, *rate).downtime_ms > 2.0 * 314.0).unwrap()
}

#[test]
fn an_idle_guest_takes_the_lower_bounds() {
    for mbit in MBIT {
        let (idle, bounds) = (move_at(mbit, 0.0), bounds_at(mbit));
        assert!((idle.total_s - bounds.total.lower.as_secs_f64()).abs() < 1e-6, "{idle:?}");
        assert!((idle.downtime_ms - bounds.downtime.lower.as_secs_f64() * 1e3).abs() < 1e-6);
        assert_eq!((idle.bytes, idle.rounds.len()), (MEMORY.0, 3), "the first, one that finds nothing, and the stop");
    }
}

#[test]
fn every_move_lies_within_its_bounds() {
    for mbit in MBIT {
        let bounds = bounds_at(mbit);
        // A page more than equation 3 has: see `bounds.rs`.
        let page = 1.0 / carries(mbit) + 1e-9;
        for i in 0..=60 {
            let at = move_at(mbit, FASTEST * f64::from(i) / 60.0);
            let (total, downtime) = (at.total_s, at.downtime_ms / 1e3);
            assert!(total >= bounds.total.lower.as_secs_f64() - 1e-9, "{i}: {total}");
            assert!(total <= bounds.total.upper.as_secs_f64() + page, "{i}: {total}");
            assert!(downtime >= bounds.downtime.lower.as_secs_f64() - 1e-9, "{i}: {downtime}");
            assert!(downtime <= bounds.downtime.upper.as_secs_f64() + 1e-9, "{i}: {downtime}");
        }
    }
}

#[test]
fn downtime_is_flat_until_the_guest_comes_near_the_link_and_then_breaks() {
    for mbit in MBIT {
        let share = breaks_at(mbit) / carries(mbit);
        assert!((0.6..=1.0).contains(&share), "{mbit} Mbit/s breaks at {share} of what it carries");
        let flat = move_at(mbit, 0.5 * carries(mbit)).downtime_ms;
        assert!(flat < 1.1 * 314.0, "{flat} ms at half of what the link carries");
    }
}

#[test]
fn the_break_moves_to_the_right_as_the_link_gets_faster_in_about_the_same_ratio() {
    let breaks = MBIT.map(breaks_at);
    for i in 0..2 {
        let ratio = (breaks[i + 1] / breaks[i]) / (MBIT[i + 1] / MBIT[i]);
        assert!((0.8..1.25).contains(&ratio), "{ratio}");
    }
}

#[test]
fn near_the_links_own_rate_the_total_comes_near_its_upper_bound() {
    for mbit in MBIT {
        let upper = bounds_at(mbit).total.upper.as_secs_f64();
        let most = (25..75).map(|i| move_at(mbit, carries(mbit) * f64::from(i) / 50.0).total_s).fold(0.0, f64::max);
        assert!(most > 0.85 * upper, "{most} s of {upper} s");
    }
}

#[test]
fn at_extreme_rates_on_the_slow_link_time_falls_back_while_downtime_stays_at_its_upper_bound() {
    let (extreme, bounds) = (move_at(MBIT[0], FASTEST), bounds_at(MBIT[0]));
    let lower = bounds.total.lower.as_secs_f64();
    assert!(extreme.total_s < 1.4 * lower, "{} s, and {lower} s at the least", extreme.total_s);
    let upper = bounds.downtime.upper.as_secs_f64() * 1e3;
    assert!((extreme.downtime_ms - upper).abs() < 0.01 * upper, "{} ms of {upper} ms", extreme.downtime_ms);
    assert_eq!(extreme.rounds.len(), 30, "29 rounds in which next to nothing is sent, and the stop");
    let sent: u64 = extreme.rounds[..29].iter().map(|round| round.sent.0).sum();
    assert!(sent < Pages::of(MEMORY).0 / 2, "{sent} pages before the stop");
    // On the fast link this rate is nothing extreme.
    let (fast, bounds) = (move_at(MBIT[2], FASTEST).total_s, bounds_at(MBIT[2]).total);
    assert!(fast > 1.4 * bounds.lower.as_secs_f64(), "{fast} s");
}

#[test]
fn without_the_skipping_of_pages_dirtied_again_time_does_not_fall_back() {
    let sends = Rules { redirtied: godwit_predict::Redirtied::Sent, ..Rules::xen() };
    let pages = Pages::of(MEMORY);
    let mut guest = Sequential::new(pages, pages, PageRate::new(FASTEST));
    let link = Link { rate: BitRate::from_mbit(MBIT[0]), overheads: OVERHEADS };
    let total = simulate(&mut guest, link, &sends).unwrap().total_s;
    assert!(total > 4.0 * bounds_at(MBIT[0]).total.lower.as_secs_f64(), "{total}");
}
