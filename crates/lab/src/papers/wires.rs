//! VirtualWire, figures 11 to 14: a wire beside what the kernel does without it and beside tunnels in user space; 1, 4, 16 and 64 of
//! them; chains of 1 to 5 switches on one host and on two.

use super::guest_io::upper_bound;
use super::{Document, Drawing, Extent, PlanCell, Table, remarks};
use crate::ledger::Entry;
use crate::report::SpeedWindow;
use crate::speed::Way;
use crate::table::{figure, median};

const LINKS: [u8; 4] = [1, 4, 16, 64];
const LONGEST_CHAIN: u8 = 5;
/// A wire has so much of the throughput of a bridge and a VXLAN device.
const THROUGHPUT: f64 = 0.95;
/// A collapsed hop takes at most so much of the time of one made by hand.
const HOP: f64 = 1.1;

const ALONE: [Way; 7] = [Way::Veth, Way::Vxlan, Way::Wire, Way::Openvpn, Way::UserSpace, Way::Bridge, Way::Collapsed];
/// Programs' tunnels are measured alone: many are many programs.
const MANY: [Way; 5] = [Way::Veth, Way::Vxlan, Way::Wire, Way::Bridge, Way::Collapsed];
const CHAINS: [Way; 3] = [Way::PlainChain, Way::CollapsedChain, Way::TunnelledChain];
/// What a chain is compared with to tell its hops from its ends: the same without a switch.
const NO_CHAINS: [Way; 2] = [Way::Bridge, Way::Collapsed];

/// What one sees of a window.
type Figure = fn(&SpeedWindow) -> Option<f64>;

fn mbit(window: &SpeedWindow) -> Option<f64> {
    Some(window.mbit)
}

fn frames(window: &SpeedWindow) -> Option<f64> {
    Some(window.frames_per_s)
}

fn cpu(window: &SpeedWindow) -> Option<f64> {
    window.cpu_us_per_frame
}

fn us(window: &SpeedWindow) -> Option<f64> {
    Some(window.us)
}

fn cell(name: String, ways: &[Way], links: u8, chain: u8, windows: u8, window_s: f64) -> PlanCell {
    let ways: Vec<String> = ways.iter().map(|way| format!("\"{way}\"")).collect();
    let scenario = format!(
        "name = \"figures-{name}\"\n\n[speed]\nways = [{}]\nlinks = {links}\nchain = {chain}\nwindows = {windows}\nwindow_s = {window_s}\n\n\
         # Two sites of such a run are joined by a veth.\n[wan]\nrate_mbit = 1000\nrtt_ms = 0\n\n[[site]]\nname = \"a\"\n[[site]]\nname = \"b\"\n",
        ways.join(", ")
    );
    PlanCell { name, scenario }
}

fn of_links(links: u8, windows: u8, window_s: f64) -> PlanCell {
    let ways: &[Way] = if links == 1 { &ALONE } else { &MANY };
    cell(format!("links-{links}-{windows}"), ways, links, 0, windows, window_s)
}

fn of_chain(chain: u8, windows: u8, window_s: f64) -> PlanCell {
    let ways: Vec<Way> = CHAINS.into_iter().chain(NO_CHAINS).collect();
    cell(format!("chain-{chain}-{windows}"), &ways, 1, chain, windows, window_s)
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let quick = [of_links(1, 5, 0.5), of_chain(1, 5, 0.5), of_chain(3, 5, 0.5)];
    let full = LINKS.into_iter().map(|links| of_links(links, 15, 1.0));
    let chains = (1..=LONGEST_CHAIN).map(|chain| of_chain(chain, 15, 1.0));
    match extent {
        Extent::Quick => quick.into(),
        Extent::Full => quick.into_iter().chain(full).chain(chains).collect(),
    }
}

/// The windows of all runs: of one question the run with most rounds counts.
fn windows(entries: &[Entry]) -> Vec<SpeedWindow> {
    let mut runs: Vec<&[SpeedWindow]> = entries.iter().map(|entry| entry.report.speeds.as_slice()).collect();
    runs.retain(|run| !run.is_empty());
    let asks = |run: &[SpeedWindow]| (run[0].links, run[0].chain);
    runs.sort_by_key(|run| std::cmp::Reverse(run.len()));
    let mut seen = std::collections::HashSet::new();
    runs.into_iter().filter(|run| seen.insert(asks(run))).flatten().cloned().collect()
}

/// Figures of one way, round by round.
fn of(windows: &[SpeedWindow], way: Way, links: u8, chain: u8, what: Figure) -> Vec<(u32, f64)> {
    let way = way.to_string();
    let mine = windows.iter().filter(|w| w.way == way && w.links == links && w.chain == chain);
    mine.filter_map(|w| Some((w.round, what(w)?))).collect()
}

/// The rounds' ratios of two ways.
fn ratios(windows: &[SpeedWindow], [one, other]: [Way; 2], links: u8, chain: u8, what: Figure) -> Vec<f64> {
    let others = of(windows, other, links, chain, what);
    let pair = |(round, value): (u32, f64)| {
        let (_, other) = others.iter().find(|(r, _)| *r == round)?;
        (value > 0.0 && *other > 0.0).then(|| value / other)
    };
    of(windows, one, links, chain, what).into_iter().filter_map(pair).collect()
}

/// Their geometric mean, with the end of its 95 % interval that is nearer to zero.
fn at_least(ratios: &[f64]) -> Option<(f64, f64)> {
    let inverse: Vec<f64> = ratios.iter().map(|ratio| 1.0 / ratio).collect();
    upper_bound(&inverse).map(|(mean, most)| (1.0 / mean, 1.0 / most))
}

/// A table of medians: a row for each of `rows`, a column for each way.
fn table(
    title: &str,
    head: &str,
    windows: &[SpeedWindow],
    (rows, ways): (&[(u8, u8)], &[Way]),
    (what, digits): (Figure, usize),
) -> Table {
    let row = |(links, chain): &(u8, u8)| -> Option<Vec<String>> {
        let cells: Vec<Option<f64>> = ways
            .iter()
            .map(|way| median(of(windows, *way, *links, *chain, what).into_iter().map(|(_, value)| value)))
            .collect();
        cells.iter().any(Option::is_some).then(|| {
            let number = if head == "links" { links } else { chain };
            let cells = cells.into_iter().map(|cell| cell.map_or(String::new(), |value| figure(Some(value), digits)));
            std::iter::once(number.to_string()).chain(cells).collect()
        })
    };
    Table {
        title: title.into(),
        columns: std::iter::once(head.to_owned()).chain(ways.iter().map(ToString::to_string)).collect(),
        words: 0,
        rows: rows.iter().filter_map(row).collect(),
    }
}

fn drawing(
    (name, title, x, y): (&str, &str, &str, &str),
    windows: &[SpeedWindow],
    (rows, ways): (&[(u8, u8)], &[Way]),
    what: Figure,
) -> Drawing {
    let line = |way: &Way| {
        let points = rows.iter().filter_map(|(links, chain)| {
            let number = if x == "links" { links } else { chain };
            let value = median(of(windows, *way, *links, *chain, what).into_iter().map(|(_, value)| value))?;
            Some((f64::from(*number), value))
        });
        (way.to_string(), points.collect())
    };
    Drawing {
        name: name.into(),
        title: title.into(),
        x: x.into(),
        y: y.into(),
        lines: ways.iter().map(line).collect(),
        drawn: None,
    }
}

/// Each round's time of a hop of the longest chain: what a packet takes longer through that than without a switch, there and back, us.
fn hops(windows: &[SpeedWindow], [chained, without]: [Way; 2]) -> Vec<(u32, f64)> {
    let long = (1..=LONGEST_CHAIN).rev().find(|chain| !of(windows, chained, 1, *chain, us).is_empty());
    let Some(long) = long else { return vec![] };
    let base = of(windows, without, 1, long, us);
    let hop = |(round, took): (u32, f64)| {
        let (_, least) = base.iter().find(|(r, _)| *r == round)?;
        Some((round, (took - least) / f64::from(long)))
    };
    of(windows, chained, 1, long, us).into_iter().filter_map(hop).collect()
}

fn bounds(windows: &[SpeedWindow]) -> Vec<(String, Option<bool>)> {
    let mut bounds = vec![];
    for links in LINKS {
        let found = at_least(&ratios(windows, [Way::Wire, Way::Vxlan], links, 0, mbit));
        let text = found.map_or(String::new(), |(mean, least)| format!(" ({mean:.3}, 95 % bound {least:.3})"));
        let title = format!("{links} wires: throughput at least {THROUGHPUT} of plain VXLAN{text}");
        bounds.push((title, found.map(|(_, least)| least >= THROUGHPUT)));
    }
    let plain = hops(windows, [Way::PlainChain, Way::Bridge]);
    let collapsed = hops(windows, [Way::CollapsedChain, Way::Collapsed]);
    let pairs = collapsed.iter().filter_map(|(round, one)| {
        let (_, other) = plain.iter().find(|(r, _)| r == round)?;
        // A hop that takes no time is noise: rounds without it would say more than was measured.
        Some((*one > 0.0 && *other > 0.0).then(|| one / other))
    });
    let found = pairs.collect::<Option<Vec<f64>>>().and_then(|pairs| upper_bound(&pairs));
    let text = found.map_or(String::new(), |(mean, most)| format!(" ({mean:.3}, 95 % bound {most:.3})"));
    let title = format!("a collapsed hop takes at most {HOP} of one of veths and bridges{text}");
    bounds.push((title, found.map(|(_, most)| most <= HOP)));
    bounds
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let windows = windows(entries);
    let links: Vec<(u8, u8)> = LINKS.iter().map(|links| (*links, 0)).collect();
    let chains: Vec<(u8, u8)> = (1..=LONGEST_CHAIN).map(|chain| (1, chain)).collect();
    let (many, chained): ((&[_], &[_]), (&[_], &[_])) = ((&links, &ALONE), (&chains, &CHAINS));
    let cost = "CPU of the whole machine for a frame of UDP, us";
    let there = "A packet there and back over an idle link, us";
    Document {
        title: "Wires beside other ways (VirtualWire, figures 11 to 14)".into(),
        tables: vec![
            table("TCP over all links at once, Mbit/s", "links", &windows, many, (mbit, 0)),
            table("Frames of UDP with 1400 bytes over one link, a second", "links", &windows, many, (frames, 0)),
            table(there, "links", &windows, many, (us, 1)),
            table(cost, "links", &windows, many, (cpu, 2)),
            table("Chains: TCP, Mbit/s", "switches", &windows, chained, (mbit, 0)),
            table("Chains: a packet there and back, us", "switches", &windows, chained, (us, 1)),
            table("Chains: CPU of the whole machine for a frame of UDP, us", "switches", &windows, chained, (cpu, 2)),
        ],
        drawings: vec![
            drawing(("wires-throughput", "TCP over all links at once", "links", "Mbit/s"), &windows, many, mbit),
            drawing(
                ("wires-chain-throughput", "TCP through a chain of switches", "switches", "Mbit/s"),
                &windows,
                chained,
                mbit,
            ),
            drawing(
                ("wires-chain-latency", "There and back through a chain of switches", "switches", "us"),
                &windows,
                chained,
                us,
            ),
            drawing(("wires-chain-cpu", "CPU for a frame through a chain", "switches", "us"), &windows, chained, cpu),
        ],
        bounds: bounds(&windows),
        remarks: remarks(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::entry;
    use super::*;

    fn window(way: Way, links: u8, chain: u8, round: u32, mbit: f64, us: f64) -> SpeedWindow {
        let (frames_per_s, cpu_us_per_frame) = (1e5, Some(5.0));
        SpeedWindow { way: way.to_string(), links, chain, round, mbit, frames_per_s, cpu_us_per_frame, us }
    }

    fn run(name: &str, speeds: Vec<SpeedWindow>) -> Entry {
        let mut found = entry(name, vec![]);
        found.report.speeds = speeds;
        found
    }

    #[test]
    fn a_wire_is_compared_with_vxlan_of_the_same_round() {
        let speeds = |wire: f64| {
            let round = |n: u32| {
                let machine = f64::from(n + 1) * 1000.0;
                [window(Way::Vxlan, 1, 0, n, machine, 20.0), window(Way::Wire, 1, 0, n, machine * wire, 20.0)]
            };
            (0..6).flat_map(round).collect()
        };
        let judged = |wire| document(&[run("links-1-5", speeds(wire))]).bounds[0].1;
        assert_eq!((judged(0.96), judged(0.94)), (Some(true), Some(false)));
        assert_eq!(document(&[]).bounds[0].1, None);
    }

    #[test]
    fn a_hop_is_what_a_longer_chain_takes_longer() {
        let round = |n: u32, hop: f64| {
            let took =
                |way, switches: f64, hop: f64| window(way, 1, 5, n, 1000.0, 30.0 + f64::from(n) + hop * switches);
            [
                took(Way::Bridge, 0.0, 0.0),
                took(Way::Collapsed, 0.0, 0.0),
                took(Way::PlainChain, 5.0, 10.0),
                took(Way::CollapsedChain, 5.0, hop),
            ]
        };
        let entries = |first: f64, hop: f64| {
            let hops = (0..6).flat_map(|n| round(n, if n == 0 { first } else { hop }));
            vec![run("chain-5-5", hops.collect())]
        };
        let judged = |first, hop| document(&entries(first, hop)).bounds[LINKS.len()].1;
        assert_eq!((judged(10.9, 10.9), judged(11.2, 11.2)), (Some(true), Some(false)));
        assert_eq!(judged(-0.5, 10.9), None, "a hop of less than no time says nothing");
    }

    #[test]
    fn of_two_runs_of_one_question_the_longer_one_counts() {
        let short = run("links-1-5", vec![window(Way::Wire, 1, 0, 0, 1.0, 1.0)]);
        let long = run("links-1-15", vec![window(Way::Wire, 1, 0, 0, 2.0, 1.0), window(Way::Wire, 1, 0, 1, 2.0, 1.0)]);
        assert_eq!(windows(&[short, long]).iter().map(|w| w.mbit).collect::<Vec<_>>(), [2.0, 2.0]);
    }
}
