//! `godwit predict`: what a move will take, and who of a site's VMs is away in time. Nobody is asked: files and options in, figures out.

use crate::args::Global;
use crate::failure::{Code, Failure};
use crate::follow::{print_text, write_json};
use crate::quantity::{rate, size};
use crate::table::{Table, printable};
use clap::{Args, ValueEnum};
use godwit_api::Name;
use godwit_predict::fleet::{Fleet, Plan};
use godwit_predict::{
    Between, Bounds, Evenly, Link, Log, Observed, Overheads, PageRate, Pages, Prediction, Replayed, Rules, Sequential,
    Taken, Timeline, bounds, simulate,
};
use godwit_units::{BitRate, Bytes, Policy};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The largest log that is read: a month of a busy guest.
const LARGEST_LOG: u64 = 4 << 30;
/// The largest description of a fleet: some hundred bytes for each VM that may be planned.
const LARGEST_FLEET: u64 = 64 << 20;
/// Starts of a move that are tried; the log's own intervals are too many, and neighbours are alike.
const STARTS: u32 = 100;

#[derive(Debug, Args)]
#[command(
    after_help = "A move of 1 GiB whose guest dirties 20000 pages a second, over a link that carries 935 Mbit/s:\n\n  godwit predict --memory 1024MiB --rate 935Mbit --dirty-rate 20000 --pre 3.8s --post 314ms\n\nThe rate is the goodput that a move gets, measured; --pre and --post are what a move of an idle guest takes\nbesides its memory. Bytes are those of pages, before any codec.\n\nA fleet's file, TOML or JSON:\n\n  [[link]]\n  to = \"texas\"\n  rate_mbit = 1000          # and rtt_ms, per_move_mbit, room_gib, rate_lower_mbit, rate_upper_mbit, busy_s,\n                            # pre_s, pause_ms, host = [{ name = \"h1\", memory_gib = 64, disk_gib = 500 }]\n  [[vm]]\n  name = \"web\"\n  memory_mib = 4096         # and disk_gib, held_gib, held = [{ host = \"h1\", gib = 20 }], machine, off, room_mib,\n                            # disk_bytes_a_byte, first_bytes_a_page, again_bytes_a_page, dirty_pages_per_s, working_set_mib, disk_kib_per_s,\n                            # strategies = [\"mirror\", \"postcopy\", \"cold\"], to = [\"texas\"]"
)]
pub struct PredictArgs {
    /// A VM, to be asked of the controller: with --to, what its move would take by each way
    #[arg(requires = "to", group = "asked", conflicts_with_all = ["memory", "rate", "log", "fleet", "bounds"])]
    pub vm: Option<Name>,
    /// Where it would go: a site, or a host; of a whole site's VMs, several [default: any other site]
    #[arg(long, value_name = "SITE|HOST", requires = "asked", value_delimiter = ',')]
    pub to: Vec<Name>,
    /// Plan how this site's VMs leave it before --deadline, as the controller knows them; --json is the plan as a file
    #[arg(long, requires = "deadline", requires = "whom", groups = ["asked", "planned"], conflicts_with_all = ["vm", "accuracy", "memory", "rate", "log", "fleet", "bounds", "when"])]
    pub site: Option<Name>,
    /// All VMs of the site
    #[arg(long, requires = "site", group = "whom")]
    pub all: bool,
    /// Only those that the file names, one in a line; `-` reads it from standard input
    #[arg(long, value_name = "FILE", requires = "site", group = "whom")]
    pub vms: Option<PathBuf>,
    /// VMs of the site may be shut down where they would be late otherwise
    #[arg(long, requires = "site")]
    pub cold: bool,
    /// What the VM's move is to spare, as for `godwit move`
    #[arg(long, value_name = "POLICY", default_value = "least-downtime", requires = "vm")]
    pub policy: Policy,
    /// What the VM's move, or all of the site's, may use of the link
    #[arg(long, value_name = "RATE", value_parser = rate, requires = "asked")]
    pub limit: Option<BitRate>,
    /// How far past predictions were off
    #[arg(long, conflicts_with_all = ["vm", "memory", "rate", "log", "fleet", "bounds"])]
    pub accuracy: bool,
    /// The guest's memory; a log knows it
    #[arg(long, value_name = "SIZE", value_parser = size, required_unless_present_any = ["log", "fleet", "vm", "site", "accuracy"])]
    pub memory: Option<Bytes>,
    /// What a move gets of the link, such as 935Mbit
    #[arg(long, value_name = "RATE", value_parser = rate, required_unless_present_any = ["fleet", "vm", "site", "accuracy"])]
    pub rate: Option<BitRate>,
    /// Pages that the guest dirties in a second
    #[arg(long, value_name = "PAGES", value_parser = dirty_rate, conflicts_with = "log")]
    pub dirty_rate: Option<f64>,
    /// The part of its memory that it writes to [default: all]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "log")]
    pub working_set: Option<Bytes>,
    /// Which pages it writes to, and when
    #[arg(long, default_value = "sequential", conflicts_with = "log")]
    pub pattern: Pattern,
    /// What ends pre-copy [default: godwit; with --bounds xen]
    #[arg(long)]
    pub rules: Option<RulesArg>,
    /// The pause that the rules `qemu` allow
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = span)]
    pub downtime_limit: Duration,
    /// How the guest is modelled [default: hist with --log, else avg]
    #[arg(long)]
    pub model: Option<Model>,
    /// A log of the pages that the guest dirtied
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// When the move begins: after the log's beginning; of a VM or a site, from now
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = span)]
    pub at: Duration,
    /// Take the log's pages whose content changed, not all that were written
    #[arg(long, requires = "log")]
    pub changed: bool,
    /// Try beginnings all over the log, or of a VM in the coming 24 hours, and tell the best
    #[arg(long, conflicts_with = "at")]
    pub when: bool,
    /// What a move takes before its first page
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = span)]
    pub pre: Duration,
    /// What it takes after its last page, while the guest stands
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = span)]
    pub post: Duration,
    /// Only between which times a move must lie, whatever its guest does
    #[arg(long, conflicts_with = "log")]
    pub bounds: bool,
    /// Plan the evacuation of a site: the file describes its links and VMs; `-` reads it from standard input
    #[arg(long, value_name = "FILE", requires = "deadline", group = "planned", conflicts_with_all = ["memory", "rate", "dirty_rate", "working_set", "rules", "model", "log", "bounds"])]
    pub fleet: Option<PathBuf>,
    /// When the site must be empty, from now
    #[arg(long, value_name = "TIME", value_parser = span, requires = "planned")]
    pub deadline: Option<Duration>,
}

impl PredictArgs {
    /// Whether the controller is asked.
    #[must_use]
    pub const fn asks(&self) -> bool {
        self.vm.is_some() || self.site.is_some() || self.accuracy
    }
}

/// Which pages a guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// One after the other, round and round
    Sequential,
    /// Any, at any time
    Evenly,
}

/// What ends pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RulesArg {
    /// Godwit's own
    Godwit,
    /// Fewer than 50 pages, 29 rounds, or more than 3 times the memory
    Xen,
    /// What is left takes no longer than --downtime-limit
    Qemu,
    /// CloudNet's: the least that is left, once as much is dirtied as sent
    SmartStop,
}

/// How a guest is modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// By an average rate
    Avg,
    /// By what it did before
    Hist,
}

/// A time: `3.8s`, `314ms`, `10m`, `0`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no time: write a number with ms, s, m, h or d, such as 3.8s or 314ms");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().map_err(|_| bad())?;
    let unit = match text[end..].trim_start() {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "" if number == 0.0 => 1.0,
        _ => return Err(bad()),
    };
    // No move takes a year.
    let seconds = number * unit;
    if seconds > 31_536_000.0 { Err(bad()) } else { Duration::try_from_secs_f64(seconds).map_err(|_| bad()) }
}

/// Pages a second.
fn dirty_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| (0.0..=1e9).contains(rate));
    rate.ok_or_else(|| format!("`{text}` is no number of pages a second: write one such as 20000"))
}

/// Predicts.
///
/// # Errors
/// What does not fit together, files that make no sense, and moves that never end.
pub fn run(global: &Global, args: &PredictArgs) -> Result<(), Failure> {
    if let (Some(file), Some(deadline)) = (&args.fleet, args.deadline) {
        let plan = read_fleet(file)?.plan(deadline).map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
        return if global.json { write_json(&plan) } else { print_text(&show_plan(&plan)) };
    }
    if args.log.is_none() && (args.when || !args.at.is_zero()) {
        return Err(Failure::usage("--at and --when take a log, or a VM"));
    }
    let rate = args.rate.ok_or_else(|| Failure::usage("say what a move gets of the link with --rate"))?;
    let link = Link { rate, overheads: Overheads { pre: args.pre, post: args.post } };
    let rules = rules(args);
    if args.bounds {
        let memory = args.memory.ok_or_else(|| Failure::usage("say how large the guest is with --memory"))?;
        let found = bounds(memory, rate, link.overheads, &rules).ok_or_else(|| {
            let what =
                format!("the rules `{}` end no move whose guest is too fast, so there is no upper bound", rules.name);
            Failure::usage(format!("{what}; ask for those of xen, smart-stop or godwit"))
        })?;
        return if global.json { write_json(&bounds_json(&found)) } else { print_text(&show_bounds(&found)) };
    }
    let Some(file) = &args.log else {
        let moved = avg(args, link, &rules)?;
        return if global.json { write_json(&moved) } else { print_text(&show(&moved)) };
    };
    if args.model == Some(Model::Avg) {
        return Err(Failure::usage("--log is what hist takes; for avg give --memory and --dirty-rate instead"));
    }
    let log = read_log(file, args.memory)?;
    let timeline = Timeline::new(&log, if args.changed { Taken::Changed } else { Taken::Written });
    if args.when {
        let moments = moments(&log, &timeline, link, &rules);
        return if global.json { write_json(&moments.json()) } else { print_text(&moments.show()) };
    }
    let (moved, repeats) = hist(&timeline, link, &rules, args.at).map_err(|e| failed(&e))?;
    if repeats {
        let length = log.length().as_secs_f64();
        eprintln!("godwit: the move outlasts the log of {length:.0} s, which was begun again: profile for longer");
    }
    if global.json { write_json(&moved) } else { print_text(&show(&moved)) }
}

fn failed(error: &godwit_predict::NeverEnds) -> Failure {
    Failure::new(Code::Failed, error.to_string())
}

fn rules(args: &PredictArgs) -> Rules {
    let wanted = args.rules.unwrap_or(if args.bounds { RulesArg::Xen } else { RulesArg::Godwit });
    match wanted {
        RulesArg::Godwit => Rules::godwit(),
        RulesArg::Xen => Rules::xen(),
        RulesArg::Qemu => Rules::qemu(args.downtime_limit),
        RulesArg::SmartStop => Rules::smart_stop(),
    }
}

fn avg(args: &PredictArgs, link: Link, rules: &Rules) -> Result<Prediction, Failure> {
    if args.model == Some(Model::Hist) {
        return Err(Failure::usage("hist needs what the guest did before: name its log with --log"));
    }
    let needed = |what: &str| Failure::usage(format!("avg needs {what}"));
    let memory = args.memory.ok_or_else(|| needed("the size of the guest: --memory"))?;
    let rate = args.dirty_rate.ok_or_else(|| needed("the guest's rate: --dirty-rate, in pages a second"))?;
    let pages = Pages::of(memory);
    // Bitmaps are kept for it.
    if pages == Pages(0) || pages.0 > godwit_predict::log::MAX_PAGES {
        return Err(Failure::usage(format!("a guest has more than no memory and at most 16 TiB, not {memory}")));
    }
    let working_set = Pages::of(args.working_set.unwrap_or(memory));
    let rate = PageRate::new(rate);
    let moved = match args.pattern {
        Pattern::Sequential => simulate(&mut Sequential::new(pages, working_set, rate), link, rules),
        Pattern::Evenly => simulate(&mut Evenly::new(pages, working_set, rate), link, rules),
    };
    moved.map_err(|e| failed(&e))
}

fn hist(
    log: &Timeline<'_>,
    link: Link,
    rules: &Rules,
    at: Duration,
) -> Result<(Prediction, bool), godwit_predict::NeverEnds> {
    let mut guest = Replayed::new(log, at);
    let moved = simulate(&mut guest, link, rules)?;
    Ok((moved, guest.repeats()))
}

/// Moves that begin at several times.
struct Moments {
    /// When, after the log's beginning; and the move, if it ends.
    tried: Vec<(Duration, Option<Prediction>)>,
    /// When the log began, since 1970.
    start: Duration,
}

fn moments(log: &Log, timeline: &Timeline<'_>, link: Link, rules: &Rules) -> Moments {
    let step = (log.length() / STARTS).max(log.header().interval);
    let starts = (0..STARTS).map(|i| step * i).take_while(|at| *at < log.length() || at.is_zero());
    let tried = starts.map(|at| (at, hist(timeline, link, rules, at).ok().map(|(moved, _)| moved)));
    Moments { tried: tried.collect(), start: log.header().start }
}

impl Moments {
    /// The moves that end, the best first: the shortest pause, and among those within a millisecond the shortest move.
    fn by_merit(&self) -> Vec<(Duration, &Prediction)> {
        let mut moves: Vec<_> = self.tried.iter().filter_map(|(at, moved)| Some((*at, moved.as_ref()?))).collect();
        let merit = |moved: &Prediction| (moved.downtime_ms.round(), moved.total_s);
        moves.sort_by(|a, b| merit(a.1).partial_cmp(&merit(b.1)).unwrap_or(std::cmp::Ordering::Equal));
        moves
    }

    fn mean(moves: &[(Duration, &Prediction)], of: fn(&Prediction) -> f64) -> f64 {
        moves.iter().map(|(_, moved)| of(moved)).sum::<f64>() / moves.len().max(1) as f64
    }

    fn json(&self) -> Value {
        let moves = self.by_merit();
        let one = |found: Option<&(Duration, &Prediction)>| {
            found.map(|(at, moved)| {
                json!({
                    "at_s": at.as_secs_f64(), "at_unix_s": (self.start + *at).as_secs_f64(),
                    "total_s": moved.total_s, "downtime_ms": moved.downtime_ms, "bytes": moved.bytes,
                })
            })
        };
        let mean = (!moves.is_empty()).then(|| {
            json!({
                "total_s": Self::mean(&moves, |m| m.total_s), "downtime_ms": Self::mean(&moves, |m| m.downtime_ms),
                "bytes": Self::mean(&moves, |m| m.bytes as f64),
            })
        });
        json!({
            "tried": self.tried.len(), "never_end": self.tried.len() - moves.len(),
            "best": one(moves.first()), "mean": mean, "worst": one(moves.last()),
        })
    }

    fn show(&self) -> String {
        let moves = self.by_merit();
        let mut table = Table::new(&["START", ">AFTER", ">TOTAL", ">DOWNTIME", ">SENT"]);
        let mut row = |name: &str, at: String, total: f64, downtime: f64, bytes: f64| {
            table.row([name.into(), at, seconds(total), ms(downtime), Bytes(bytes as u64).to_string()]);
        };
        if let (Some((best, first)), Some((worst, last))) = (moves.first(), moves.last()) {
            row("best", seconds(best.as_secs_f64()), first.total_s, first.downtime_ms, first.bytes as f64);
            let mean = |of| Self::mean(&moves, of);
            row("mean", String::new(), mean(|m| m.total_s), mean(|m| m.downtime_ms), mean(|m| m.bytes as f64));
            row("worst", seconds(worst.as_secs_f64()), last.total_s, last.downtime_ms, last.bytes as f64);
        }
        let never = self.tried.len() - moves.len();
        let note =
            if never > 0 { format!("{never} of {} moves would never end.\n", self.tried.len()) } else { String::new() };
        format!("{}{note}", table.lines())
    }
}

/// All of a file, unless it is longer than `most`.
pub(crate) fn read(file: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    let cannot = |why: &dyn std::fmt::Display| Failure::usage(format!("cannot read {}: {why}", file.display()));
    let mut bytes = vec![];
    let mut take = |from: &mut dyn Read| from.take(most + 1).read_to_end(&mut bytes);
    let got = if file == Path::new("-") {
        take(&mut std::io::stdin().lock())
    } else {
        take(&mut std::fs::File::open(file).map_err(|e| cannot(&e))?)
    };
    got.map_err(|e| cannot(&e))?;
    if bytes.len() as u64 > most { Err(cannot(&format!("it is larger than {}", Bytes(most)))) } else { Ok(bytes) }
}

fn read_log(file: &Path, memory: Option<Bytes>) -> Result<Log, Failure> {
    let wrong = |why: &dyn std::fmt::Display| Failure::usage(format!("{}: {why}", file.display()));
    let log = Log::read(read(file, LARGEST_LOG)?).map_err(|e| wrong(&e))?;
    let (pages, watched) = (log.header().pages, log.watched());
    if let Some(memory) = memory.filter(|memory| Pages::of(*memory) != pages) {
        return Err(wrong(&format!("the log is of a guest of {}, not of {memory}: leave --memory out", pages.bytes())));
    }
    if watched == 0 {
        return Err(wrong(&"the log has no interval yet: profile the VM for longer"));
    }
    if log.torn() > 0 {
        eprintln!("godwit: {}: the last {} bytes are no whole interval and are left out", file.display(), log.torn());
    }
    if log.header().observed == Observed::Contents {
        eprintln!(
            "godwit: {}: the log knows changed pages only; those written and left as they were are missing",
            file.display()
        );
    }
    Ok(log)
}

fn read_fleet(file: &Path) -> Result<Fleet, Failure> {
    let wrong = |why: String| Failure::usage(format!("{}: {why}", file.display()));
    let text = String::from_utf8(read(file, LARGEST_FLEET)?).map_err(|_| wrong("it is no text".into()))?;
    if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))
    } else {
        toml::from_str(&text).map_err(|e| wrong(e.to_string()))
    }
}

fn bounds_json(found: &Bounds) -> Value {
    let both =
        |between: Between, of: fn(Duration) -> f64| json!({"lower": of(between.lower), "upper": of(between.upper)});
    let in_ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({"total_s": both(found.total, |t| t.as_secs_f64()), "downtime_ms": both(found.downtime, in_ms)})
}

fn seconds(value: f64) -> String {
    format!("{value:.1} s")
}

fn ms(value: f64) -> String {
    format!("{value:.1} ms")
}

fn show_bounds(found: &Bounds) -> String {
    let mut table = Table::new(&["", ">LEAST", ">MOST"]);
    let total = found.total;
    table.row(["total".into(), seconds(total.lower.as_secs_f64()), seconds(total.upper.as_secs_f64())]);
    let down = found.downtime;
    table.row(["downtime".into(), ms(down.lower.as_secs_f64() * 1e3), ms(down.upper.as_secs_f64() * 1e3)]);
    table.lines()
}

fn show(moved: &Prediction) -> String {
    let mut table = Table::new(&[">ROUND", ">SENT", ">SKIPPED", ">DIRTIED", ">SECONDS"]);
    for (i, round) in moved.rounds.iter().enumerate() {
        let name = if i + 1 == moved.rounds.len() { "stop".into() } else { (i + 1).to_string() };
        let pages = [round.sent, round.skipped, round.dirtied].map(|pages| pages.0.to_string());
        let [sent, skipped, dirtied] = pages;
        table.row([name, sent, skipped, dirtied, format!("{:.3}", round.seconds)]);
    }
    format!(
        "total     {}\ndowntime  {}\nsent      {} of pages\nthe guest is stopped since {}\n\n{}",
        seconds(moved.total_s),
        ms(moved.downtime_ms),
        Bytes(moved.bytes),
        moved.ended_by,
        table.lines()
    )
}

fn show_plan(plan: &Plan) -> String {
    let mut moves = Table::new(&["VM", "TO", "STRATEGY", ">START", ">END", ">DOWNTIME", ">SENT", "IN TIME"]);
    for m in &plan.moves {
        moves.row([
            m.vm.clone(),
            m.to.clone(),
            m.strategy.name().into(),
            seconds(m.start_s),
            seconds(m.end_s),
            ms(m.downtime_ms),
            Bytes(m.bytes).to_string(),
            if m.in_time { "yes" } else { "late" }.into(),
        ]);
    }
    let mut text = moves.lines();
    let mut links = Table::new(&["LINK", ">MOVES", ">AT ONCE", ">SENT", ">END"]);
    for link in &plan.links {
        let counts = [link.moves.to_string(), link.at_once.to_string()];
        let [count, at_once] = counts;
        links.row([link.to.clone(), count, at_once, Bytes(link.bytes).to_string(), seconds(link.end_s)]);
    }
    text = format!("{text}\n{}\n", links.lines());
    for stranded in &plan.stranded {
        text += &format!("{} cannot be moved: {}\n", printable(&stranded.vm), stranded.why);
    }
    text + &format!(
        "{} of {} VMs are away within {}; no plan has more than {} away by then. All are away after {}.\n",
        plan.in_time,
        plan.moves.len() + plan.stranded.len(),
        seconds(plan.deadline_s),
        plan.at_most,
        seconds(plan.end_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions_and_milliseconds() {
        for (text, ms) in [("3.8s", 3800), ("314ms", 314), ("10m", 600_000), ("0", 0), ("1.5h", 5_400_000), ("0s", 0)] {
            assert_eq!(span(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "-1s", "s", "1e9s", "9999d", "3,8s"] {
            assert!(span(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_dirty_rate_is_a_number_of_pages() {
        assert_eq!(dirty_rate("20000"), Ok(20_000.0));
        for text in ["", "-1", "nan", "inf", "20k"] {
            assert!(dirty_rate(text).is_err(), "{text}");
        }
    }
}
