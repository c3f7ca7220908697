//! Reports as a page: one HTML file with everything in it, to be opened, mailed, printed and kept.
//!
//! The page needs no script and loads nothing: drawings are inline SVG. They are written by hand and not with a plotting
//! crate, for three reasons: colours come from the style sheet, so one drawing serves a light page, a dark one and
//! paper; the charts of a move share one time axis to the pixel; ten thousand round trips are one path of some tens of
//! kilobytes and not ten thousand circles. The page is well-formed XML as well as HTML, which the tests hold it to, and
//! every text of the report is escaped: names and error messages come from elsewhere.

mod application;
mod axis;
mod charts;
pub(crate) mod lines;
mod overview;
pub(crate) mod page;
pub(crate) mod response;
mod series;
mod style;
mod svg;

use crate::report::{Application, Mark, MoveReport, Outcome, Report, Round};
use crate::table::{Subject, figure, in_mib, integrity, outcome_word, subjects};
use charts::{Chart, Span, duration, grouped};
use godwit_units::Bytes;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use svg::{Anchor, Svg, escape};

/// Most rounds that the table of rounds lists; of more it shows the first and the last half of these.
const MAX_ROUND_ROWS: usize = 40;

/// A report as a self-contained HTML page.
#[must_use]
pub fn render_html(report: &Report) -> String {
    let subjects = subjects(report);
    let labels = labels(&subjects);
    let mut page = Page::default();
    page.put(format_args!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>{}</title>\n<style>{}</style>\n</head>\n<body>\n",
        escape(&format!("{}: godwit-lab", report.name)),
        style::CSS
    ));
    page.header(report);
    if subjects.is_empty() {
        page.put(format_args!("<p>No move was made.</p>\n"));
    } else {
        page.comparison(&subjects, &labels);
        page.chart(overview::bars(&subjects, &labels));
    }
    for seen in &report.applications {
        for chart in application::charts(seen, &marks_beside(seen, report)) {
            page.chart(Some(chart));
        }
    }
    for (i, (subject, label)) in subjects.iter().zip(&labels).enumerate() {
        page.entry(i, subject, label, report.wan.rate_mbit);
    }
    page.put(format_args!("</body>\n</html>\n"));
    page.out
}

/// The charts of a report's applications, each as a drawing of its own.
pub(crate) fn application_drawings(name: &str, report: &Report) -> Vec<crate::papers::Drawing> {
    drawings(name, report.applications.iter().flat_map(|seen| application::charts(seen, &marks_beside(seen, report))))
}

/// What the guests' own disks and work did through a report's moves, as drawings: NAME-1 and so on. None where no guest told.
#[must_use]
pub fn guest_io_drawings(name: &str, report: &Report) -> Vec<crate::papers::Drawing> {
    let all = subjects(report);
    drawings(name, all.iter().flat_map(|subject| charts::guest_io(subject.figures, &Span::of(subject.figures))))
}

fn drawings(name: &str, charts: impl IntoIterator<Item = Chart>) -> Vec<crate::papers::Drawing> {
    let sheet = style::of_a_drawing();
    let drawing = |(number, chart): (usize, Chart)| crate::papers::Drawing {
        name: format!("{name}-{}", number + 1),
        title: format!("{name}: {}", chart.title),
        drawn: Some(lines::alone(&with_legend(&chart), &sheet)),
        ..crate::papers::Drawing::default()
    };
    charts.into_iter().enumerate().map(drawing).collect()
}

/// A chart's drawing with its legend in it, above what it shows: a page has it beside the title.
fn with_legend(chart: &Chart) -> String {
    let mut keys = Svg::more();
    let mut at = charts::WIDTH / 2.0;
    for (class, name) in &chart.legend {
        keys.rect(class, (at, 2.0), (10.0, 10.0), "");
        keys.text("label", (at + 15.0, 12.0), Anchor::Start, name);
        at += 40.0 + 7.0 * name.len() as f64;
    }
    chart.svg.replacen("</svg>\n", &keys.finish(), 1)
}

/// What moved in the pass that an application was seen in: each pass has a zero of its own.
fn marks_beside(seen: &Application, report: &Report) -> Vec<Mark> {
    let same = |mark: &&Mark| (&mark.by, mark.repeat) == (&seen.by, seen.repeat);
    report.marks.iter().filter(same).cloned().collect()
}

/// Names for the entries, as short as they can be without two being the same.
fn labels(subjects: &[Subject<'_>]) -> Vec<String> {
    let several =
        |of: fn(&MoveReport) -> &str| subjects.iter().map(|s| of(s.figures)).collect::<BTreeSet<_>>().len() > 1;
    let (vms, ways) = (several(|m| &m.vm), several(|m| &m.from) || several(|m| &m.to));
    let base = |s: &Subject<'_>| {
        let MoveReport { vm, from, to, .. } = s.figures;
        let vm = if vms { format!(" {vm}") } else { String::new() };
        let way = if ways { format!(" {from} \u{2192} {to}") } else { String::new() };
        format!("{}{vm}{way}", s.who)
    };
    let bases: Vec<String> = subjects.iter().map(base).collect();
    let number = |i: usize| match bases.iter().filter(|b| **b == bases[i]).count() {
        1 => bases[i].clone(),
        _ => format!("{} #{}", bases[i], 1 + bases[..i].iter().filter(|b| **b == bases[i]).count()),
    };
    (0..bases.len()).map(number).collect()
}

/// The page under way.
#[derive(Default)]
struct Page {
    out: String,
}

impl Page {
    /// Adds a piece; writing to a String cannot fail. Texts must have been escaped.
    fn put(&mut self, piece: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(piece);
    }

    fn header(&mut self, report: &Report) {
        let (host, wan) = (&report.host, &report.wan);
        self.put(format_args!("<h1>{}</h1>\n", escape(&report.name)));
        self.put(format_args!("<p class=\"soft\">{} UTC", utc(report.started_unix_s)));
        let kernel = if host.kernel.is_empty() { String::new() } else { format!("Linux {}", host.kernel) };
        let cpus = if host.cpus == 0 { String::new() } else { format!("{} CPUs", host.cpus) };
        for part in [&host.qemu, &host.accel, &kernel, &cpus] {
            if !part.is_empty() {
                self.put(format_args!(" \u{b7} {}", escape(part)));
            }
        }
        self.put(format_args!(
            "</p>\n<p>WAN: {} Mbit/s each direction, {} ms round trip, {} ms jitter, {} % loss, {} ms queue</p>\n",
            wan.rate_mbit,
            wan.rtt_ms,
            wan.jitter_ms,
            tidy(wan.loss * 100.0),
            wan.queue_ms
        ));
        if let Some(broken) = &report.broken {
            self.put(format_args!("<p class=\"why\">broken off: {}</p>\n", escape(broken)));
        }
        if !report.warnings.is_empty() {
            self.put(format_args!("<div class=\"warnings\"><b>Warnings</b>"));
            self.list(&report.warnings);
            self.put(format_args!("</div>\n"));
        }
    }

    fn list(&mut self, lines: &[String]) {
        self.put(format_args!("<ul>"));
        for line in lines {
            self.put(format_args!("<li>{}</li>", escape(line)));
        }
        self.put(format_args!("</ul>\n"));
    }

    /// A table; cells are escaped here, and those of `words` (the first so many columns) lean left.
    fn table(&mut self, titles: &[&str], words: usize, rows: &[Vec<Cell>]) {
        let class = |i: usize| if i < words { "" } else { " class=\"n\"" };
        self.put(format_args!("<div class=\"scroll\"><table>\n<thead><tr>"));
        for (i, title) in titles.iter().enumerate() {
            self.put(format_args!("<th{}>{}</th>", class(i), escape(title)));
        }
        self.put(format_args!("</tr></thead>\n<tbody>\n"));
        for row in rows {
            self.put(format_args!("<tr>"));
            for (i, cell) in row.iter().enumerate() {
                let text = escape(&cell.text);
                match &cell.kind {
                    Kind::Plain => self.put(format_args!("<td{}>{text}</td>", class(i))),
                    Kind::Good => self.put(format_args!("<td class=\"ok\">{text}</td>")),
                    Kind::Bad => self.put(format_args!("<td class=\"no\">{text}</td>")),
                    Kind::Link(id) => self.put(format_args!("<td><a href=\"#{id}\">{text}</a></td>")),
                }
            }
            self.put(format_args!("</tr>\n"));
        }
        self.put(format_args!("</tbody></table></div>\n"));
    }

    fn comparison(&mut self, subjects: &[Subject<'_>], labels: &[String]) {
        let titles = [
            "move",
            "outcome",
            "integrity",
            "time s",
            "downtime ms",
            "outage ms",
            "memory MiB",
            "disk MiB",
            "other MiB",
            "total MiB",
            "raw MiB",
            "zero pages",
            "rounds",
        ];
        let row = |(i, (s, label)): (usize, (&Subject<'_>, &String))| {
            let m = s.figures;
            let star = if m.bytes.split_by_hypervisor { "*" } else { "" };
            let mib = |bytes: u64| figure(Some(in_mib(bytes)), 1);
            let mut row =
                vec![Cell { text: label.clone(), kind: Kind::Link(format!("entry-{i}")) }, outcome(m), checked(m)];
            let figures = [
                figure(Some(m.total_s), 1),
                figure(m.downtime_ms, 0),
                figure(m.outage_ms, 0),
                mib(m.bytes.memory) + star,
                mib(m.bytes.disk) + star,
                mib(m.bytes.other),
                mib(m.bytes.total()),
                mib(m.raw_bytes),
                grouped(m.zero_pages),
                m.rounds.len().to_string(),
            ];
            row.extend(figures.map(Cell::plain));
            row
        };
        let rows: Vec<_> = subjects.iter().zip(labels).enumerate().map(row).collect();
        self.table(&titles, 3, &rows);
        if subjects.iter().any(|s| s.figures.bytes.split_by_hypervisor) {
            let what = "* Memory and disk shared a connection; the hypervisor's own count tells them apart.";
            self.put(format_args!("<p class=\"chart-note\">{what}</p>\n"));
        }
    }

    fn chart(&mut self, chart: Option<Chart>) {
        let Some(Chart { title, legend, note, svg }) = chart else {
            return;
        };
        self.put(format_args!("<figure>\n<figcaption><b>{}</b>", escape(&title)));
        for (class, name) in legend {
            self.put(format_args!("<span class=\"key\"><i class=\"{class}\"></i>{name}</span>"));
        }
        self.put(format_args!("<span class=\"chart-note\">{}</span></figcaption>\n{svg}</figure>\n", escape(&note)));
    }

    fn entry(&mut self, index: usize, subject: &Subject<'_>, label: &str, link_mbit: f64) {
        let m = subject.figures;
        let way = format!("{}: {} \u{2192} {}, disk: {}", m.vm, m.from, m.to, m.strategy);
        self.put(format_args!("<section class=\"entry\" id=\"entry-{index}\">\n"));
        self.put(format_args!("<h2>{} <small>{}</small></h2>\n", escape(label), escape(&way)));
        if m.outcome != Outcome::Completed {
            let why = m.why.as_deref().unwrap_or("no reason given");
            let why = format!("{}: {why}", outcome_word(m.outcome));
            self.put(format_args!("<p class=\"why\">{}</p>\n", escape(&why)));
        }
        self.facts(m);
        if let Some(rule) = subject.stop_rule {
            self.put(format_args!("<p><b>Stop rule:</b> {}</p>\n", escape(rule)));
        }
        let class = if m.integrity.intact() { "ok" } else { "no" };
        let verdict = escape(&integrity(&m.integrity));
        self.put(format_args!("<p><b>Integrity:</b> <span class=\"{class}\">{verdict}</span></p>\n"));
        if !m.integrity.notes.is_empty() {
            self.list(&m.integrity.notes);
        }
        let span = Span::of(m);
        self.chart(charts::phases(m, &span));
        self.chart(charts::throughput(m, &span, link_mbit));
        for chart in charts::guest_io(m, &span) {
            self.chart(Some(chart));
        }
        self.chart(charts::bytes(m, &span));
        self.chart(charts::dirty_rate(m, &span, link_mbit));
        self.chart(charts::remaining(m, &span));
        for chart in charts::round_trips(m, &span) {
            self.chart(Some(chart));
        }
        if !span.note().is_empty() {
            self.put(format_args!("<p class=\"chart-note\">{}</p>\n", span.note()));
        }
        self.chart(charts::rounds(&m.rounds));
        if !m.rounds.is_empty() {
            self.rounds(&m.rounds);
        }
        self.put(format_args!("</section>\n"));
    }

    /// The figures of a move as cards.
    fn facts(&mut self, m: &MoveReport) {
        let foretold = |what: &str| format!("foretold: {what}");
        let predicted = m.predicted.as_ref();
        let ms = |v: Option<f64>| v.map_or("not measured".to_owned(), |v| duration(v / 1e3));
        let share = |part: u64, of: u64| {
            if of == 0 { String::new() } else { format!("{:.1} % of raw", part as f64 / of as f64 * 100.0) }
        };
        let held = if m.held_ms > 0.0 {
            format!("with {} held to compare RAM", duration(m.held_ms / 1e3))
        } else {
            String::new()
        };
        let total = m.bytes.total();
        let bytes =
            [share(total, m.raw_bytes), predicted.map_or(String::new(), |p| foretold(&Bytes(p.bytes).to_string()))];
        let bytes: Vec<String> = bytes.into_iter().filter(|s| !s.is_empty()).collect();
        let mut facts = vec![
            ("time", duration(m.total_s), predicted.map_or(String::new(), |p| foretold(&duration(p.total_s)))),
            (
                "downtime",
                ms(m.downtime_ms),
                predicted.map_or(String::new(), |p| foretold(&duration(p.downtime_ms / 1e3))),
            ),
            ("client's outage", ms(m.outage_ms), held),
            ("on the WAN", Bytes(total).to_string(), bytes.join("; ")),
            ("without reduction", Bytes(m.raw_bytes).to_string(), String::new()),
            ("zero pages sent", grouped(m.zero_pages), String::new()),
        ];
        if m.kept.memory + m.kept.disk > 0 {
            let (memory, disk) = (Bytes(m.kept.memory), Bytes(m.kept.disk));
            facts.push(("was there already", (memory + disk).to_string(), format!("memory {memory}; disk {disk}")));
        }
        if m.precached_bytes > 0 {
            facts.push(("sent before the move", Bytes(m.precached_bytes).to_string(), String::new()));
        }
        if let Some(share) = m.nonzero_share {
            facts.push(("non-zero memory", format!("{:.0} %", share * 100.0), "before the move".into()));
        }
        self.put(format_args!("<dl>\n"));
        for (name, value, more) in facts {
            self.put(format_args!("<div><dt>{}</dt><dd>{}", escape(name), escape(&value)));
            if !more.is_empty() {
                self.put(format_args!("<small>{}</small>", escape(&more)));
            }
            self.put(format_args!("</dd></div>\n"));
        }
        self.put(format_args!("</dl>\n"));
    }

    fn rounds(&mut self, rounds: &[Round]) {
        let encodings: BTreeSet<&str> =
            rounds.iter().flat_map(|r| r.bytes_by_encoding.keys()).map(String::as_str).collect();
        let with_unit: Vec<String> = encodings.iter().map(|e| format!("{e} MiB")).collect();
        let mut titles = vec!["round", "seconds", "pages sent", "pages dirtied"];
        titles.extend(with_unit.iter().map(String::as_str));
        titles.extend(["all MiB", "Mbit/s"]);
        let row = |(i, round): (usize, &Round)| {
            let all: u64 = round.bytes_by_encoding.values().sum();
            let rate = (round.seconds > 0.0).then(|| all as f64 * 8.0 / 1e6 / round.seconds);
            let mut row =
                vec![(i + 1).to_string(), figure(Some(round.seconds), 2), grouped(round.sent), grouped(round.dirtied)];
            row.extend(encodings.iter().map(|e| figure(round.bytes_by_encoding.get(*e).map(|b| in_mib(*b)), 2)));
            row.extend([figure(Some(in_mib(all)), 2), figure(rate, 1)]);
            row.into_iter().map(Cell::plain).collect::<Vec<_>>()
        };
        let mut rows: Vec<_> = rounds.iter().enumerate().map(row).collect();
        let left_out = rows.len().saturating_sub(MAX_ROUND_ROWS);
        if left_out > 0 {
            rows.drain(MAX_ROUND_ROWS / 2..MAX_ROUND_ROWS / 2 + left_out);
        }
        self.table(&titles, 0, &rows);
        if left_out > 0 {
            let what = format!("{left_out} rounds in the middle are only in the report's JSON.");
            self.put(format_args!("<p class=\"chart-note\">{what}</p>\n"));
        }
    }
}

/// A cell of an HTML table, its text not yet escaped.
struct Cell {
    text: String,
    kind: Kind,
}

enum Kind {
    Plain,
    Good,
    Bad,
    /// To an element of this page.
    Link(String),
}

impl Cell {
    fn plain(text: String) -> Self {
        Self { text, kind: Kind::Plain }
    }
}

fn outcome(m: &MoveReport) -> Cell {
    let kind = if m.outcome == Outcome::Completed { Kind::Plain } else { Kind::Bad };
    Cell { text: outcome_word(m.outcome).into(), kind }
}

fn checked(m: &MoveReport) -> Cell {
    let text = integrity(&m.integrity);
    let kind = match text.as_str() {
        "intact" => Kind::Good,
        _ if m.integrity.intact() => Kind::Plain,
        _ => Kind::Bad,
    };
    Cell { text, kind }
}

/// A number without the digits that binary fractions add.
fn tidy(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Seconds since 1970 as `2026-11-21 04:04`.
fn utc(unix_s: u64) -> String {
    let (days, minutes) = (unix_s / 86_400, unix_s % 86_400 / 60);
    // Days from 1 March of year 0 in eras of 400 years: leap days then stand at the end of a year.
    let day = days.saturating_add(719_468);
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (month, of_month) =
        (if shifted < 10 { shifted + 3 } else { shifted - 9 }, of_year - (153 * shifted + 2) / 5 + 1);
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{of_month:02} {:02}:{:02}", minutes / 60, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{EchoPoint, Integrity, IoPoint, MemorySample, Phase, Predicted, Series, WanSample};
    use crate::scenario::Baseline;
    use crate::table::tests::{a_baseline, a_move, a_report};
    use quick_xml::Reader;
    use quick_xml::events::Event;

    /// Every element is closed in order, every attribute is quoted and its own, every entity is known.
    fn assert_well_formed(page: &str) {
        let mut reader = Reader::from_str(page);
        let mut open = 0;
        loop {
            let event = reader.read_event().unwrap_or_else(|e| panic!("{e} at byte {}", reader.error_position()));
            match &event {
                Event::Start(tag) | Event::Empty(tag) => {
                    for attribute in tag.attributes() {
                        attribute.unwrap().unescape_value().unwrap();
                    }
                    open += i32::from(matches!(event, Event::Start(_)));
                }
                Event::End(_) => open -= 1,
                Event::Text(text) => {
                    text.decode().unwrap();
                }
                Event::GeneralRef(name) => {
                    let name: &[u8] = name;
                    assert!([&b"amp"[..], b"lt", b"gt", b"quot", b"#39"].contains(&name), "{name:?}");
                }
                Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(open, 0);
    }

    /// Nothing runs and nothing is loaded.
    fn assert_self_contained(page: &str) {
        for bad in ["<script", "javascript:", "http:", "https:", "src=", "url(", "@import", "<link", "<iframe", "<img"]
        {
            assert!(!page.contains(bad), "{bad}");
        }
        assert!(page.split("href=\"").skip(1).all(|link| link.starts_with("#entry-")));
        assert!(!page.contains("NaN") && !page.contains("inf\""), "a coordinate is not a number");
    }

    fn checked_page(report: &Report) -> String {
        let page = render_html(report);
        assert_well_formed(&page);
        assert_self_contained(&page);
        page
    }

    fn with_curves() -> MoveReport {
        let second = |i: u64| i as f64 / 10.0;
        MoveReport {
            rounds: (0..5)
                .map(|i| Round {
                    sent: 100_000 >> i,
                    dirtied: 50_000 >> i,
                    bytes_by_encoding: [("normal".to_owned(), 1 << 20), ("zero".to_owned(), 9 << 10)].into(),
                    seconds: 2.5,
                    ..Round::default()
                })
                .collect(),
            phases: [("disk", 0.0, 80.0), ("memory", 80.0, 129.0), ("stop", 129.0, 129.4), ("run", 129.4, 130.25)]
                .map(|(name, start_s, end_s)| Phase { name: name.into(), start_s, end_s })
                .into(),
            predicted: Some(Predicted { total_s: 120.0, downtime_ms: 300.0, bytes: 1 << 30, ..Predicted::default() }),
            series: Series {
                wan: (0..1300)
                    .map(|i| WanSample { t_s: second(i), memory: i << 20, disk: i << 19, other: i })
                    .collect(),
                memory: (0..1300)
                    .map(|i| MemorySample { t_s: second(i), remaining: (1300 - i) << 18, dirty_pages_per_s: 2000.0 })
                    .collect(),
                echo: (0..13_000u32)
                    .filter(|i| !(12_890..12_940).contains(i))
                    .map(|i| EchoPoint { t_s: f64::from(i) / 100.0, rtt_ms: 27.0 + f64::from(i % 7) })
                    .collect(),
                io: (0..520).filter(|i| !(516..518).contains(i)).map(|i| io_point(f64::from(i) / 4.0)).collect(),
            },
            ..a_move()
        }
    }

    fn io_point(t_s: f64) -> IoPoint {
        let (read_ms, write_ms, longest_ms) = (Some(1.0 + t_s / 100.0), None, Some(8.0));
        IoPoint {
            t_s,
            seconds: 0.25,
            read_kib: 512,
            write_kib: 64,
            read_ms,
            write_ms,
            units: 3,
            p50_ms: Some(1.0),
            longest_ms,
        }
    }

    #[test]
    fn a_page_is_well_formed_and_loads_nothing() {
        let report = a_report(vec![with_curves()], vec![a_baseline(Baseline::Qemu, with_curves())]);
        let page = checked_page(&report);
        for expected in [
            "Side by side",
            "Phases",
            "On the WAN",
            "own disk I/O",
            "read or write takes",
            "The guest&#39;s work",
            "stops",
            "Pages dirtied",
            "round trips",
            "Rounds",
            "normal MiB",
        ] {
            assert!(page.contains(expected), "{expected}");
        }
        assert!(page.contains("no answer for 510 ms"), "the longest gap is named");
        assert!(page.contains("2026-11-21 04:00 UTC"), "{}", &page[page.find("<h1>").unwrap()..][..200]);
        assert!(page.len() < 600_000, "{} bytes", page.len());
    }

    #[test]
    fn what_each_guest_did_through_its_move_is_a_drawing_of_its_own() {
        let report = a_report(vec![with_curves()], vec![a_baseline(Baseline::Qemu, with_curves())]);
        let drawn = guest_io_drawings("run", &report);
        let names: Vec<_> = drawn.iter().map(|drawing| drawing.name.as_str()).collect();
        assert_eq!(names, ["run-1", "run-2", "run-3", "run-4", "run-5", "run-6"]);
        for drawing in &drawn {
            let svg = drawing.svg();
            assert!(svg.starts_with("<svg xmlns") && svg.contains("stops"), "{svg}");
            assert!(!svg.contains("var(") && svg.contains("stroke: #"), "programs that draw SVG know no variables");
        }
        assert!(drawn[0].svg().contains(">read</text>") && drawn[0].svg().contains(">written</text>"));
        assert!(guest_io_drawings("run", &a_report(vec![], vec![])).is_empty());
    }

    #[test]
    fn a_report_without_moves_has_a_page() {
        let page = checked_page(&a_report(vec![], vec![]));
        assert!(page.contains("No move was made") && !page.contains("<svg"));
        let broken = Report { broken: Some("godwit: <no> step".into()), ..a_report(vec![], vec![]) };
        assert!(checked_page(&broken).contains("broken off: godwit: &lt;no&gt; step"));
    }

    #[test]
    fn an_application_is_drawn_against_the_moves_of_its_own_pass() {
        let mut report = a_report(vec![], vec![]);
        let mark = |by: &str, repeat, what: &str| Mark { by: by.into(), repeat, what: what.into(), ..Mark::default() };
        report.marks = vec![mark("godwit", 0, "first"), mark("qemu", 0, "other"), mark("godwit", 1, "again")];
        let beside = |by: &str, repeat| -> Vec<String> {
            let seen = Application { by: by.into(), repeat, ..Application::default() };
            marks_beside(&seen, &report).into_iter().map(|mark| mark.what).collect()
        };
        assert_eq!([beside("godwit", 0), beside("qemu", 0), beside("godwit", 1)], [["first"], ["other"], ["again"]]);
    }

    #[test]
    fn what_was_not_measured_is_said_and_not_drawn() {
        let nothing = MoveReport {
            outcome: Outcome::Failed,
            downtime_ms: None,
            outage_ms: None,
            nonzero_share: None,
            integrity: Integrity::default(),
            total_s: 0.0,
            raw_bytes: 0,
            ..a_move()
        };
        let page = checked_page(&a_report(vec![nothing.clone()], vec![a_baseline(Baseline::QemuBlock, nothing)]));
        assert!(page.contains("not measured") && page.contains("nothing checked") && page.contains("no reason given"));
        assert!(!page.contains("Client&#39;s round trips"));
    }

    #[test]
    fn figures_out_of_their_wits_still_make_a_page() {
        let mut odd = with_curves();
        odd.total_s = f64::NAN;
        odd.downtime_ms = Some(f64::INFINITY);
        odd.phases[0].end_s = f64::NEG_INFINITY;
        odd.phases[1].start_s = f64::NAN;
        odd.series.echo[5] = EchoPoint { t_s: f64::NAN, rtt_ms: 0.0 };
        odd.series.echo[6] = EchoPoint { t_s: -1e9, rtt_ms: -3.0 };
        odd.series.memory[7].dirty_pages_per_s = f64::NAN;
        odd.series.wan[8].t_s = f64::INFINITY;
        odd.series.io[3] = IoPoint { t_s: f64::NAN, seconds: 0.0, read_ms: Some(f64::NAN), ..odd.series.io[3] };
        odd.series.io[4].seconds = -1.0;
        odd.series.io[5].longest_ms = Some(f64::INFINITY);
        odd.series.wan.swap(1, 900);
        odd.rounds = vec![Round { seconds: -1.0, ..Round::default() }; 3000];
        let page = checked_page(&a_report(vec![odd], vec![]));
        assert!(page.contains("2960 rounds in the middle") && page.contains("the largest of 50 rounds"));
    }

    #[test]
    fn hostile_names_stay_text() {
        let evil = "</td><script>alert(1)</script>\"'&\u{0}\u{1b}[2J".to_owned();
        let mut m = with_curves();
        for text in [&mut m.vm, &mut m.from, &mut m.to, &mut m.strategy, &mut m.phases[0].name] {
            text.clone_from(&evil);
        }
        m.why = Some(evil.clone());
        m.outcome = Outcome::Failed;
        m.integrity.notes = vec![evil.clone()];
        m.rounds[0].bytes_by_encoding.insert(evil.clone(), 1);
        let mut baseline = a_baseline(Baseline::Qemu, m.clone());
        baseline.stop_rule.clone_from(&evil);
        let mut report = a_report(vec![m], vec![baseline]);
        report.name.clone_from(&evil);
        report.warnings = vec![evil.clone()];
        report.host.qemu = evil;
        checked_page(&report);
    }

    #[test]
    fn repeats_get_numbers_and_several_vms_their_names() {
        let named = |vm: &str| MoveReport { vm: vm.into(), ..a_move() };
        let moves = [named("a"), named("b"), named("a")];
        let report = a_report(moves.into(), vec![]);
        assert_eq!(labels(&subjects(&report)), ["godwit a #1", "godwit b", "godwit a #2"]);
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(utc(0), "1970-01-01 00:00");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00");
        assert_eq!(utc(1_709_251_199), "2024-02-29 23:59");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00");
    }
}
