//! `godwit-lab replay`: moves tried on recorded guests, each codec and each rule against the same guest: CloudNet's table 1 and 2 and its figures 9 and 11 to 13, and
//! Godwit beside them.
//!
//! A recording ([`capture`](crate::capture), `--memory-s`) has a guest's memory with its contents over minutes. [`godwit_predict::replay`] sends it through a real encoder over a
//! reckoned link, in a closed loop: what takes longer is written again meanwhile. CloudNet's mechanisms are tried on Xen's rounds, as the paper has them, and Godwit's on QEMU's.
//!
//! Xen 3 sent pages of zeroes in full, so that half of what CloudNet saved in some guests was zeroes. Here they cost nine bytes each in every way, as with QEMU: what is saved is saved
//! of pages with contents.

use crate::papers::{Document, Drawing, Table};
use crate::table::{figure, in_mib};
use anyhow::{Context, Result};
use godwit_memory::codec::{self, Codec, Encode, Mechanisms};
use godwit_memory::levels::Now;
use godwit_memory::{Clock, Config, Levels, PAGE_SIZE, Resends};
use godwit_predict::recorded::Recorded;
use godwit_predict::replay::{Mover, PROCESSORS, Passed, ReplayError, Road, Stop, Tried, replay};
use godwit_predict::{Condition, Rules};
use godwit_units::{BitRate, Policy};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The link of tables 1 and 2 and figures 9 and 11.
pub(crate) const MBIT: u32 = 100;
pub(crate) const RTT_MS: u32 = 20;
/// Figures 12 and 13.
pub(crate) const RATES: [u32; 5] = [50, 100, 200, 500, 1000];
pub(crate) const ROUND_TRIPS: [u32; 5] = [10, 20, 60, 120, 180];
/// CloudNet's cache of memory, section 4.4.
const CACHE: usize = 100 << 20;
/// What QEMU's `downtime-limit` is where nobody sets it, and after how many rounds a move by QEMU is made to stop.
const LIMIT: Duration = Duration::from_millis(300);
const ROUNDS: u32 = 30;

/// How a guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Xen,
    SmartStop,
    Redundancy,
    Deltas,
    CloudNet,
    Qemu,
    Zstd,
    Codec,
    Rule,
    Godwit,
    Least,
}

impl Way {
    const ALL: [Self; 11] = [
        Self::Xen,
        Self::SmartStop,
        Self::Redundancy,
        Self::Deltas,
        Self::CloudNet,
        Self::Qemu,
        Self::Zstd,
        Self::Codec,
        Self::Rule,
        Self::Godwit,
        Self::Least,
    ];
    /// Those of figures 12 and 13.
    const WHOLE: [Self; 4] = [Self::Xen, Self::CloudNet, Self::Qemu, Self::Godwit];

    const fn shown(self) -> &'static str {
        match self {
            Self::Xen => "Xen",
            Self::SmartStop => "Xen, Smart Stop",
            Self::Redundancy => "Xen, redundancy elimination",
            Self::Deltas => "Xen, page deltas",
            Self::CloudNet => "CloudNet: all three",
            Self::Qemu => "QEMU",
            Self::Zstd => "QEMU, zstd with a long window",
            Self::Codec => "QEMU, Godwit's codec",
            Self::Rule => "QEMU, Godwit's rule",
            Self::Godwit => "Godwit: both",
            Self::Least => "Godwit, `least-bytes`",
        }
    }

    /// What it is held against.
    const fn base(self) -> Self {
        match self {
            Self::Xen | Self::SmartStop | Self::Redundancy | Self::Deltas | Self::CloudNet => Self::Xen,
            _ => Self::Qemu,
        }
    }

    fn rules(self) -> Rules {
        match self {
            Self::Xen | Self::Redundancy | Self::Deltas => Rules::xen(),
            Self::SmartStop | Self::CloudNet => Rules::smart_stop(),
            Self::Qemu | Self::Zstd | Self::Codec => {
                let mut rules = Rules::qemu(LIMIT);
                rules.conditions.push(Condition::Rounds(ROUNDS));
                rules
            }
            Self::Rule | Self::Godwit | Self::Least => Rules::godwit_to(self.policy()),
        }
    }

    /// What Godwit is to spare.
    fn policy(self) -> Policy {
        if self == Self::Least { Policy::LeastBytes } else { Policy::default() }
    }

    /// Where zstd's level is what the policy wants, or link and processors allow, and zstd has a thread of its own; else it is always 1, on the encoder's.
    fn levels(self) -> Option<Levels> {
        matches!(self, Self::Codec | Self::Godwit | Self::Least).then(|| Levels::new(self.policy(), Now::default()))
    }

    fn encoder(self) -> Result<Box<dyn Encode>> {
        let slots = (CACHE / (PAGE_SIZE / 4)) as u32;
        let levels = self.levels();
        let beside = levels.as_ref().map(|_| clock as Clock);
        let level = levels.map_or(Config::default().level, |levels| levels.level().number());
        let config = Config { level, beside, ..Config::default() };
        let cloudnet =
            |redundancy, deltas| codec::cloudnet(Mechanisms { redundancy, deltas }, slots, Config::default().max_ram);
        Ok(match self {
            Self::Xen | Self::SmartStop | Self::Qemu | Self::Rule => codec::encoder(Codec::Plain, config, None, 1)?,
            Self::Redundancy => cloudnet(true, false)?,
            Self::Deltas => cloudnet(false, true)?,
            Self::CloudNet => cloudnet(true, true)?,
            Self::Zstd => {
                codec::encoder(Codec::Zstd, Config { resends: Resends::Keep, versions: 0, ..config }, None, 1)?
            }
            Self::Codec | Self::Godwit | Self::Least => codec::encoder(Codec::Zstd, config, None, 1)?,
        })
    }
}

/// What this thread has had of a processor.
fn clock() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// One move; none where the recording is too short for it.
struct Cell {
    guest: usize,
    way: Way,
    mbit: u32,
    rtt_ms: u32,
    tried: Option<Tried>,
}

/// Tries all of it on each recording, and makes tables and drawings of that; `say` is told how far it is.
///
/// # Errors
/// A recording that cannot be read.
pub fn run(recordings: &[PathBuf], mut say: impl FnMut(&str)) -> Result<Document> {
    let names: Vec<String> = recordings.iter().map(|path| name(path)).collect();
    let mut cells: Vec<Cell> = vec![];
    for (guest, path) in recordings.iter().enumerate() {
        for (way, mbit, rtt_ms) in plan() {
            say(&format!("{}: {} at {mbit} Mbit/s and {rtt_ms} ms", names[guest], way.shown()));
            let tried = one(path, way, mbit, rtt_ms).with_context(|| format!("{}", path.display()))?;
            cells.push(Cell { guest, way, mbit, rtt_ms, tried });
        }
    }
    Ok(document(&names, &cells))
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.trim_end_matches(".zst").trim_end_matches(".ram").to_owned()
}

fn plan() -> Vec<(Way, u32, u32)> {
    let mut plan: Vec<_> = Way::ALL.into_iter().map(|way| (way, MBIT, RTT_MS)).collect();
    for way in Way::WHOLE {
        plan.extend(RATES.into_iter().filter(|mbit| *mbit != MBIT).map(|mbit| (way, mbit, RTT_MS)));
        plan.extend(ROUND_TRIPS.into_iter().filter(|ms| *ms != RTT_MS).map(|ms| (way, MBIT, ms)));
    }
    plan
}

fn one(path: &Path, way: Way, mbit: u32, rtt_ms: u32) -> Result<Option<Tried>> {
    let mut guest = Recorded::open(zstd::Decoder::new(File::open(path)?)?)?;
    let road = Road { rate: BitRate::from_mbit(mbit.into()), round_trip: Duration::from_millis(rtt_ms.into()) };
    let stop = Stop { rules: way.rules(), settles: matches!(way, Way::Rule | Way::Godwit | Way::Least) };
    let mut encoder = way.encoder()?;
    match replay(&mut guest, Mover { encoder: &mut *encoder, levels: way.levels(), clock }, &stop, road) {
        Ok(tried) => Ok(Some(tried)),
        Err(ReplayError::TooShort { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn find(cells: &[Cell], guest: usize, way: Way, mbit: u32, rtt_ms: u32) -> Option<&Tried> {
    let is = |c: &&Cell| (c.guest, c.way, c.mbit, c.rtt_ms) == (guest, way, mbit, rtt_ms);
    cells.iter().find(is)?.tried.as_ref()
}

/// Of a move.
type Figure = fn(&Tried) -> f64;

fn mib(tried: &Tried) -> f64 {
    in_mib(tried.wire().0)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn words(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|title| (*title).to_owned()).collect()
}

fn document(names: &[String], cells: &[Cell]) -> Document {
    let at = |guest, way| find(cells, guest, way, MBIT, RTT_MS);
    let guests = || names.iter().enumerate();
    let mut bounds = vec![];
    for (guest, name) in guests() {
        let share = |of: Figure| Some(of(at(guest, Way::Godwit)?) / of(at(guest, Way::Qemu)?));
        let bytes = share(mib);
        let pause = share(|tried| tried.pause.as_secs_f64());
        bounds.push((
            format!("{name}: Godwit's bytes are at most 0.2 of QEMU's ({})", figure(bytes, 3)),
            bytes.map(|share| share <= 0.2),
        ));
        bounds.push((
            format!("{name}: Godwit's pause is at most 0.4 of QEMU's ({})", figure(pause, 3)),
            pause.map(|share| share <= 0.4),
        ));
        let longer = RATES.iter().map(|mbit| (*mbit, RTT_MS)).chain(ROUND_TRIPS.iter().map(|ms| (MBIT, *ms)));
        let shares = longer.map(|(mbit, rtt_ms)| {
            let total = |way| Some(find(cells, guest, way, mbit, rtt_ms)?.total.as_secs_f64());
            Some(total(Way::Godwit)? / total(Way::Qemu)?)
        });
        let most = shares.flatten().fold(None, |most: Option<f64>, share| Some(most.map_or(share, |m| m.max(share))));
        bounds.push((
            format!(
                "{name}: Godwit's time is at most 1.05 of QEMU's on every link that both ended on ({})",
                figure(most, 2)
            ),
            most.map(|most| most <= 1.05),
        ));
    }
    let mut tables =
        vec![absolute(names, cells), savings(names, cells), redundancy(names, cells), deltas(names, cells)];
    let mut drawings = vec![];
    let figures: [(&str, &str, Figure, usize); 3] = [
        ("time", "s", |tried| tried.total.as_secs_f64(), 1),
        ("pause", "ms", |tried| ms(tried.pause), 0),
        ("data", "MiB", mib, 1),
    ];
    for (x, unit, values, figures, on) in [
        ("bandwidth", "Mbit/s", RATES, &figures[..], "figures 12 and 13 (a, b)"),
        ("latency", "ms", ROUND_TRIPS, &figures[..2], "figure 13 (c)"),
    ] {
        let value = |guest, way, value, of: Figure| {
            let (mbit, rtt_ms) = if x == "latency" { (MBIT, value) } else { (value, RTT_MS) };
            find(cells, guest, way, mbit, rtt_ms).map(of)
        };
        for (what, in_unit, of, decimals) in figures {
            let mut columns = words(&["guest", "by"]);
            columns.extend(values.iter().map(|value| format!("{value} {unit}")));
            let rows = guests().flat_map(|(guest, name)| {
                Way::WHOLE.map(|way| {
                    let cells = values.iter().map(|v| figure(value(guest, way, *v, *of), *decimals));
                    [name.clone(), way.shown().to_owned()].into_iter().chain(cells).collect()
                })
            });
            tables.push(Table {
                title: format!("{what}, {in_unit}, by {x} (CloudNet's {on})"),
                columns,
                words: 2,
                rows: rows.collect(),
            });
            drawings.extend(guests().map(|(guest, name)| {
                Drawing {
                    name: format!("cloudnet-{what}-{x}-{name}"),
                    title: format!("{name}: {what} by {x}"),
                    x: format!("{x}, {unit}"),
                    y: format!("{what}, {in_unit}"),
                    lines: Way::WHOLE
                        .iter()
                        .map(|way| {
                            let point = |v: &u32| Some((f64::from(*v), value(guest, *way, *v, *of)?));
                            (way.shown().to_owned(), values.iter().filter_map(point).collect())
                        })
                        .collect(),
                    drawn: None,
                }
            }));
        }
    }
    let mut remarks = vec![
        format!("Xen ends pre-copy after 29 rounds, with a round of fewer than 50 pages, or past three times the memory; QEMU where the rest takes no more than {} ms, or after {ROUNDS} rounds; Smart Stop at the least of its window once as much is dirtied as sent; Godwit by its node's own rule.", LIMIT.as_millis()),
        "Pages of zeroes cost nine bytes in every way. Memory alone: no disks, devices or hand-off, which are the same for all.".into(),
        format!("Recorded guests in a closed loop, looked at every 250 ms; a cell that is empty did not end within the recording. CloudNet's cache: {} MiB, its index as wide as the paper's.", CACHE >> 20),
        format!("Godwit's codec finds zstd's level as a node does, on a host of {PROCESSORS} processors that nothing else uses, with a thread of zstd's; zstd with a long window stays at level 1, on one thread."),
    ];
    let open = cells.iter().filter(|cell| cell.tried.is_none()).count();
    if open > 0 {
        remarks.push(format!("{open} of {} moves did not end within their recordings.", cells.len()));
    }
    Document { title: "CloudNet's tables and figures, replayed".into(), tables, drawings, bounds, remarks }
}

fn absolute(names: &[String], cells: &[Cell]) -> Table {
    let mut rows = vec![];
    for (guest, name) in names.iter().enumerate() {
        for way in Way::ALL {
            let tried = find(cells, guest, way, MBIT, RTT_MS);
            let of = |of: &dyn Fn(&Tried) -> f64, decimals| figure(tried.map(of), decimals);
            rows.push(vec![
                name.clone(),
                way.shown().to_owned(),
                of(&mib, 1),
                of(&|t| t.total.as_secs_f64(), 1),
                of(&|t| ms(t.pause), 0),
                of(&|t| t.rounds.len() as f64 - 1.0, 0),
                of(&|t| t.rounds.iter().map(|round| round.zeroes.0).sum::<u64>() as f64, 0),
                of(&|t| t.encoding.as_secs_f64(), 2),
                tried.map_or_else(String::new, |tried| tried.ended_by.to_string()),
            ]);
        }
    }
    let columns = ["guest", "by", "MiB", "s", "pause ms", "rounds", "zero pages", "encoder s", "stopped, since"];
    Table {
        title: format!("At {MBIT} Mbit/s and {RTT_MS} ms (CloudNet's table 1)"),
        columns: words(&columns),
        words: 2,
        rows,
    }
}

fn savings(names: &[String], cells: &[Cell]) -> Table {
    let mut rows = vec![];
    for (guest, name) in names.iter().enumerate() {
        for way in Way::ALL.into_iter().filter(|way| way.base() != *way) {
            let of = |way| find(cells, guest, way, MBIT, RTT_MS);
            let less = |figure_of: &dyn Fn(&Tried) -> f64| {
                let saved = of(way).zip(of(way.base())).map(|(t, b)| 100.0 * (1.0 - figure_of(t) / figure_of(b)));
                figure(saved, 1)
            };
            rows.push(vec![
                name.clone(),
                way.shown().to_owned(),
                less(&mib),
                less(&|t| t.total.as_secs_f64()),
                less(&|t| t.pause.as_secs_f64()),
            ]);
        }
    }
    Table {
        title: "Less than by its hypervisor alone, per cent (CloudNet's figure 9)".into(),
        columns: words(&["guest", "by", "data", "time", "pause"]),
        words: 2,
        rows,
    }
}

fn redundancy(names: &[String], cells: &[Cell]) -> Table {
    let row = |(guest, name): (usize, &String)| {
        let counted = &find(cells, guest, Way::Redundancy, MBIT, RTT_MS)?.counted;
        let of = |name: &str| counted.iter().find(|(it, _)| *it == name).map_or(0.0, |(_, n)| *n as f64);
        let (zero, found, full) = (4.0 * of("zero_pages"), of("quarters_by_index"), of("quarters_in_full"));
        let share = |part: f64| figure(Some(100.0 * part / (zero + found + full)), 1);
        Some(vec![name.clone(), share(zero), share(found), share(full)])
    };
    Table {
        title: "Quarters of pages, per cent (CloudNet's figure 11)".into(),
        columns: words(&["guest", "of zero pages", "sent before", "neither"]),
        words: 1,
        rows: names.iter().enumerate().filter_map(row).collect(),
    }
}

fn deltas(names: &[String], cells: &[Cell]) -> Table {
    let row = |(guest, name): (usize, &String)| {
        let (first, later) = find(cells, guest, Way::Deltas, MBIT, RTT_MS)?.rounds.split_first()?;
        let sum = |of: fn(&Passed) -> u64| in_mib(later.iter().map(of).sum());
        let (wire, raw) = (sum(|round| round.wire.0), sum(|round| round.raw.0));
        let mib = |value| figure(Some(value), 1);
        Some(vec![name.clone(), mib(in_mib(first.wire.0)), mib(wire), mib(raw - wire)])
    };
    Table {
        title: "What page deltas save, MiB (CloudNet's table 2)".into(),
        columns: words(&["guest", "first round", "later rounds", "saved in those"]),
        words: 1,
        rows: names.iter().enumerate().filter_map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_predict::Pages;
    use godwit_predict::recorded::Recorder;

    /// A guest of 8 MiB, half of it not zero, that writes a part of 200 pages anew every 100 ms for 40 s.
    fn recorded(path: &Path) {
        let page = |n: u32, salt: u32| -> Vec<u8> {
            let mut x = n.wrapping_mul(2_654_435_761) ^ salt.wrapping_mul(40503) | 1;
            let byte = |i: usize| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if i < 3000 { b"contents that are alike"[i % 23] } else { (x >> 24) as u8 }
            };
            (0..PAGE_SIZE).map(byte).collect()
        };
        let file = zstd::Encoder::new(File::create(path).unwrap(), 1).unwrap().auto_finish();
        let mut recorder = Recorder::new(file, Pages(2048)).unwrap();
        for look in 0..400_u32 {
            let pages: Vec<_> = (0..if look == 0 { 1024 } else { 200 }).map(|n| (n, page(n, look))).collect();
            let pages = pages.iter().map(|(n, page)| (*n, &page[..]));
            recorder.look(Duration::from_millis(100 * u64::from(look)), pages).unwrap();
        }
        recorder.end().unwrap();
    }

    #[test]
    fn every_way_is_tried_on_the_same_guest_and_put_into_the_papers_tables() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web.ram.zst");
        recorded(&path);
        let mut said = 0;
        let document = run(&[path], |_| said += 1).unwrap();
        assert_eq!(said, 11 + 4 * 4 + 4 * 4);
        let text = document.text();
        let of = |table: usize, by: &str, column: usize| -> f64 {
            let row = document.tables[table].rows.iter().find(|row| row[1] == by).unwrap();
            row[column].parse().unwrap_or_else(|_| panic!("{by}: {row:?}\n{text}"))
        };
        // Pages of zeroes are never written, so each goes once.
        assert_eq!(of(0, "QEMU", 6) % 1024.0, 0.0, "{text}");
        assert!(of(0, "Godwit: both", 2) < of(0, "QEMU", 2) / 2.0, "{text}");
        assert!(of(0, "CloudNet: all three", 2) < of(0, "Xen", 2), "{text}");
        assert!(of(1, "Godwit: both", 2) > 50.0 && of(1, "Xen, page deltas", 2) >= 0.0, "{text}");
        // Shares of a whole; nearly three quarters of each page are alike.
        let quarters: Vec<f64> = document.tables[2].rows[0][1..].iter().map(|cell| cell.parse().unwrap()).collect();
        assert!(
            (quarters.iter().sum::<f64>() - 100.0).abs() < 0.3 && quarters.iter().all(|share| *share > 5.0),
            "{text}"
        );
        assert_eq!(document.drawings.len(), 5);
        assert!(document.drawings[0].lines.iter().all(|(_, points)| points.len() >= 3), "{text}");
        assert!(document.bounds.iter().all(|(_, kept)| kept.is_some()), "{text}");
    }

    #[test]
    fn what_is_no_recording_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db.ram.zst");
        std::fs::write(&path, b"something else").unwrap();
        let error = run(&[path], |_| ()).unwrap_err();
        assert!(format!("{error:#}").contains("db.ram.zst"), "{error:#}");
    }
}
