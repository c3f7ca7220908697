//! Whole moves, as intervals: what must hold of them whatever the guest, the link and the past.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_predict::whole::{
    AS_SEEN, Calibration, Disks, Doubt, Foretold, Going, Made, Ratios, Road, UNSEEN, Way, foretell, queue, recommend,
    share,
};
use godwit_predict::{
    Cost, Evenly, Faster, Link, NeverEnds, Overheads, PageRate, Pages, Prediction, Rules, Wire, simulate, simulate_on,
};
use godwit_units::{BitRate, Bytes, Policy, Span};
use proptest::prelude::*;
use std::time::Duration;

const WIRE: Wire = Wire::plain(Cost { bytes: 1200.0, seconds: 8e-6 }, Cost { bytes: 800.0, seconds: 8e-6 });

fn road(goodput: f64) -> Road {
    let rtt = Duration::from_millis(20);
    let (before, pause) = Road::assumed(rtt);
    let goodput = Span { lower: goodput * 0.8, likely: goodput, upper: goodput * 1.1 };
    Road { goodput, rtt, before, pause }
}

fn memory(pages: u64, rate: f64) -> impl Fn(BitRate, f64, Duration) -> Result<Prediction, NeverEnds> {
    memory_to(Policy::default(), pages, rate)
}

fn memory_to(
    policy: Policy,
    pages: u64,
    rate: f64,
) -> impl Fn(BitRate, f64, Duration) -> Result<Prediction, NeverEnds> {
    move |link, faster, besides| {
        let guest = Evenly::new(Pages(pages), Pages((pages / 8).max(1)), PageRate::new(rate));
        let link = Link { rate: link, overheads: Overheads::default() };
        simulate_on(&mut Faster::new(guest, faster), link, &WIRE, &Rules::godwit_to(policy.sooner(besides)))
    }
}

fn told(way: Way, goodput: f64, pages: u64, rate: f64, disks: &Disks, past: &Calibration) -> Foretold {
    foretell(way, &road(goodput), disks, AS_SEEN, &memory(pages, rate), past)
}

fn is_ordered(span: Span) -> bool {
    span.lower <= span.likely && span.likely <= span.upper && span.lower >= 0.0 && span.upper.is_finite()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_interval_holds_what_is_likely(
        way in prop::sample::select(Way::ALL.to_vec()),
        mbit in 1.0..2000.0_f64, pages in 64..200_000_u64, rate in 0.0..100_000.0_f64,
        missing in 0.0..1e10_f64, written in 0.0..1e7_f64,
        ratios in prop::collection::vec((0.1..10.0_f64, 0.1..10.0_f64, 0.1..10.0_f64), 0..30),
    ) {
        let disks = Disks {
            missing: Span { lower: 0.0, likely: missing, upper: missing * 2.0 },
            written: Span { lower: 0.0, likely: written, upper: written * 2.0 },
            shared: false, speed: None,
        };
        let mut past = Calibration::default();
        for (total, downtime, bytes) in ratios {
            past.total.add(1.0, total);
            past.downtime.add(1.0, downtime);
            past.bytes.add(1.0, bytes);
        }
        let told = told(way, mbit * 1e6, pages, rate, &disks, &past);
        if told.never.is_none() {
            for span in [told.total_s, told.downtime_ms, told.bytes, told.slowed_s] {
                prop_assert!(is_ordered(span), "{told:?}");
            }
            prop_assert!(told.total_s.likely * 1e3 >= told.downtime_ms.likely || past.total.count() > 0);
        }
    }

    #[test]
    fn a_quiet_guest_is_moved_no_later_over_a_faster_link(mbit in 1.0..1000.0_f64, more in 1.0..10.0_f64, pages in 64..100_000_u64) {
        let of = |rate| told(Way::Mirror, rate * 1e6, pages, 0.0, &Disks::default(), &Calibration::default());
        let (slow, fast) = (of(mbit), of(mbit * more));
        prop_assert!(fast.total_s.likely <= slow.total_s.likely * 1.000_001);
        prop_assert!(fast.downtime_ms.likely <= slow.downtime_ms.likely * 1.000_001);
    }

    #[test]
    fn a_shared_link_carries_no_more_than_it_can_and_nobody_waits_for_more_than_all(
        mine in 1.0..1e9_f64, others in prop::collection::vec(0.0..1e9_f64, 0..8),
    ) {
        let rate = BitRate(8_000_000);
        let (alone, all) = (mine / 1e6, (mine + others.iter().sum::<f64>()) / 1e6);
        let taken = share(rate, mine, &others);
        prop_assert!(taken >= alone * 0.999_999 && taken <= all * 1.000_001, "{alone} {taken} {all}");
        // Whoever has the most left ends when all do.
        if others.iter().all(|other| *other <= mine) {
            prop_assert!((taken - all).abs() <= all * 1e-6, "{taken} {all}");
        }
    }

    #[test]
    fn pages_as_they_are_cost_what_the_plain_simulation_says(mbit in 1.0..1000.0_f64, pages in 64..50_000_u64, rate in 0.0..20_000.0_f64) {
        let guest = || Evenly::new(Pages(pages), Pages(pages), PageRate::new(rate));
        let link = Link { rate: BitRate::from_mbit(mbit), overheads: Overheads::default() };
        let plain = simulate(&mut guest(), link, &Rules::xen()).unwrap();
        let wired = simulate_on(&mut guest(), link, &Wire::PAGES, &Rules::xen()).unwrap();
        prop_assert_eq!(&plain, &wired);
        let pages: u64 = plain.rounds.iter().map(|r| r.sent.0).sum();
        prop_assert!((plain.bytes as f64 - (pages * 4096) as f64).abs() <= 4096.0 * plain.rounds.len() as f64);
    }
}

#[test]
fn two_moves_that_share_a_link_take_turns_until_the_smaller_is_through() {
    // 1 MB/s: 10 MB beside 4 MB: 8 s at half the rate, then 6 s at all of it.
    assert!((share(BitRate(8_000_000), 10e6, &[4e6]) - 14.0).abs() < 1e-9);
    assert!((share(BitRate(8_000_000), 4e6, &[10e6]) - 8.0).abs() < 1e-9);
    assert!((share(BitRate(8_000_000), 4e6, &[]) - 4.0).abs() < 1e-9);
}

#[test]
fn past_moves_take_the_bias_away_and_make_the_interval_narrower() {
    let mut past = Ratios::new(Doubt { bias: 0.2, noise: 0.05 });
    let ten = Span::exactly(10.0);
    let unproved = past.apply(ten);
    // Nine of ten within 1.645 standard deviations: a fifth, and a twentieth.
    assert!((unproved.upper / 10.0 - (1.645 * 0.2_f64.hypot(0.05)).exp()).abs() < 1e-9, "{unproved:?}");
    for measured in [11.9, 12.0, 12.0, 12.1, 12.0, 12.1, 11.9, 12.0, 12.0] {
        past.add(10.0, measured);
    }
    let now = past.apply(ten);
    assert!((now.likely - 12.0).abs() < 1e-9 && now.width() < 0.25 && now.has(12.0), "{now:?}");
    // What makes no sense says nothing.
    past.add(0.0, 5.0);
    past.add(5.0, f64::NAN);
    assert_eq!(past.count(), 9);
}

#[test]
fn of_what_differs_from_move_to_move_a_single_one_says_little() {
    let after_one = |noise: f64| {
        let mut past = Ratios::new(Doubt { bias: 0.1, noise });
        past.add(100.0, 200.0);
        past.apply(Span::exactly(100.0))
    };
    let (alike, unlike) = (after_one(0.02), after_one(0.3));
    assert!(alike.likely > 190.0 && unlike.likely < 115.0, "{alike:?} {unlike:?}");
    assert!(unlike.width() > alike.width(), "{alike:?} {unlike:?}");
}

#[test]
fn what_a_guest_that_is_nearly_done_waits_for_is_little_and_what_one_that_is_not_waits_for_is_a_window() {
    let (rtt, rate) = (Duration::from_millis(100), 1.25e6);
    let (little, much) = (Duration::from_millis(20), Duration::from_secs(1));
    let (settled, full) = (queue(rate, rtt, little), queue(rate, rtt, much));
    assert!(settled < rtt / 5 && full > rtt, "{settled:?} {full:?}");
}

#[test]
fn a_guest_that_writes_faster_than_the_link_is_not_mirrored_and_its_disks_follow_it() {
    let disks = Disks { missing: Span::exactly(1e9), written: Span::exactly(2e6), shared: false, speed: None };
    let choices: Vec<Foretold> =
        [Way::Mirror, Way::Postcopy].map(|way| told(way, 10e6, 30_000, 100.0, &disks, &Calibration::default())).into();
    assert!(choices[0].never.as_ref().unwrap().contains("no mirror") && !choices[0].given_up, "{choices:?}");
    let (best, why) = recommend(&choices, |_| true, Policy::LeastDowntime).unwrap();
    assert_eq!(choices[best].way, Way::Postcopy, "{why}");
    assert!(recommend(&choices, |way| way == Way::Mirror, Policy::LeastDowntime).is_none());
}

#[test]
fn a_move_that_is_given_up_does_not_take_for_ever() {
    let memory = memory_to(Policy::MaxDowntime(Duration::from_millis(1)), 60_000, 50_000.0);
    let told = foretell(Way::Shared, &road(10e6), &Disks::default(), AS_SEEN, &memory, &Calibration::default());
    assert!(told.never.as_ref().unwrap().contains("given up") && told.given_up, "{told:?}");
}

#[test]
fn each_policy_has_its_own_best_way() {
    let disks = Disks { missing: Span::exactly(4e9), written: Span::exactly(1e4), shared: false, speed: None };
    let choices: Vec<Foretold> = [Way::Precache, Way::Mirror, Way::Postcopy]
        .map(|way| told(way, 100e6, 60_000, 500.0, &disks, &Calibration::default()))
        .into();
    let best = |policy| choices[recommend(&choices, |way| way != Way::Precache, policy).unwrap().0].way;
    assert_eq!(best(Policy::LeastTotal), Way::Postcopy);
    assert_eq!(best(Policy::LeastDowntime), Way::Mirror);
    assert_eq!(best(Policy::Deadline(Duration::from_secs(60))), Way::Postcopy);
    assert!(choices[1].total_s.likely > 320.0 && choices[2].slowed_s.likely > 300.0, "{choices:?}");
    let (_, why) = recommend(&choices, |_| true, Policy::MaxDowntime(Duration::from_millis(1))).unwrap();
    assert!(why.contains("none surely"), "{why}");
}

#[test]
fn a_deadline_is_the_whole_moves_and_not_its_memorys_alone() {
    // 125 MB of disk take 10 s, all of the memory another 6, and its rounds one more.
    let disks = Disks { missing: Span::exactly(125e6), written: Span::default(), shared: false, speed: None };
    let to = |policy| {
        let memory = memory_to(policy, 60_000, 12_000.0);
        foretell(Way::Mirror, &road(100e6), &disks, Span::exactly(1.0), &memory, &Calibration::default())
    };
    let free = to(Policy::LeastDowntime);
    let rounds = |told: &Foretold| told.memory.as_ref().unwrap().rounds.len();
    // Long enough for its memory alone, and too short with the disk.
    let most = free.total_s.likely - 3.0;
    let bound = to(Policy::Deadline(Duration::from_secs_f64(most)));
    assert!(rounds(&bound) < rounds(&free) && bound.total_s.likely < free.total_s.likely, "{bound:?} {free:?}");
    assert!(bound.downtime_ms.likely > free.downtime_ms.likely, "{bound:?} {free:?}");
    assert!(most > free.memory.as_ref().unwrap().total_s + 5.0, "its memory alone would have had the time");
}

#[test]
fn a_round_that_a_deadline_ends_leaves_to_the_stop_what_it_has_not_sent() {
    // All of the memory takes 4.8 s, what is written to 6, and it is written to twice as fast as that.
    let wire = Wire::plain(Cost { bytes: 100.0, seconds: 0.0 }, Cost { bytes: 1000.0, seconds: 0.0 });
    let moved = |policy| {
        let mut guest = Evenly::new(Pages(60_000), Pages(7500), PageRate::new(12_000.0));
        let link = Link { rate: BitRate(10_000_000), overheads: Overheads::default() };
        simulate_on(&mut guest, link, &wire, &Rules::godwit_to(policy)).unwrap()
    };
    // What is left takes 6 s at any moment of the second round, though what has been dirtied and what has not been sent take up to 7.2 together: after 3072
    // pages it is time, and not a batch of 0.8 s sooner.
    let bound = moved(Policy::Deadline(Duration::from_millis(13_300)));
    let [first, cut, stop] = &bound.rounds[..] else { panic!("{bound:?}") };
    assert!(cut.sent.0 < first.dirtied.0 && cut.sent.0 + stop.sent.0 > first.dirtied.0, "{bound:?}");
    assert!(bound.total_s < 13.3 && bound.total_s > 13.3 - 0.9, "{bound:?}");
    assert!(moved(Policy::LeastDowntime).total_s > 16.0);
}

#[test]
fn a_guest_does_not_depend_on_two_sites_for_some_hundredths_of_a_second() {
    let disks = Disks { missing: Span::exactly(16e6), written: Span::exactly(1e4), shared: false, speed: None };
    let choices: Vec<Foretold> =
        [Way::Mirror, Way::Postcopy].map(|way| told(way, 3e9, 30_000, 100.0, &disks, &Calibration::default())).into();
    let [mirror, postcopy] = [0, 1].map(|i: usize| choices[i].total_s.likely);
    assert!(postcopy < mirror && mirror < postcopy * 1.05, "{choices:?}");
    assert_eq!(recommend(&choices, |_| true, Policy::LeastDowntime).unwrap().0, 0, "{choices:?}");
}

#[test]
fn nobody_who_was_not_watched_is_foretold_as_surely_as_one_who_was() {
    let past = Calibration::default();
    let of = |faster| foretell(Way::Mirror, &road(50e6), &Disks::default(), faster, &memory(60_000, 2000.0), &past);
    assert!(of(UNSEEN).downtime_ms.width() > of(AS_SEEN).downtime_ms.width());
}

#[test]
fn a_move_under_way_believes_its_rounds_more_than_what_was_thought() {
    let rules = Rules::godwit();
    let going = |rounds: Vec<Made>, left| Going {
        memory: Pages(60_000),
        working_set: Pages(8000),
        before: PageRate::new(100.0),
        left: Pages(left),
        rounds,
        wire: WIRE,
        goodput: BitRate(20_000_000),
    };
    let whole = going(vec![], 60_000).rest(&rules).unwrap();
    let half = going(vec![], 30_000).rest(&rules).unwrap();
    assert!(half.total_s < whole.total_s * 0.7, "{} {}", half.total_s, whole.total_s);
    // In four seconds half of what it writes to was dirtied: 8000 / 4 * ln 2 pages a second.
    let made = Made { sent: 9000, dirtied: 4000, wire: Bytes(9_000_000), seconds: 4.0 };
    let busy = going(vec![made, made], 4000);
    assert!((busy.rate().per_second() - 1386.3).abs() < 1.0, "{:?}", busy.rate());
    assert!(busy.rest(&rules).unwrap().total_s > going(vec![], 4000).rest(&rules).unwrap().total_s);
}
