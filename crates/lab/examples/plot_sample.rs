//! Writes `report.html` of an invented report, for looking at the page without a run: two moves of 130 seconds.
//!
//! `cargo run -p godwit-lab --example plot_sample -- OUT.html`; the table of a terminal goes to the standard output.

use godwit_lab::report::{
    BaselineReport, EchoPoint, Host, Integrity, MemorySample, MoveReport, Outcome, Phase, Report, Round, Series,
    WanBytes, WanFigures, WanSample,
};
use godwit_lab::scenario::Baseline;
use godwit_lab::{plot, table};
use std::collections::BTreeMap;

const LINK_MBIT: f64 = 100.0;

fn main() -> std::io::Result<()> {
    let out = std::env::args().nth(1).unwrap_or_else(|| "report.html".into());
    let report = report();
    std::fs::write(&out, plot::render_html(&report))?;
    print!("{}", table::comparison(&report));
    Ok(())
}

fn report() -> Report {
    let baseline = |name, stop_rule: &str, figures| BaselineReport { name, stop_rule: stop_rule.into(), figures };
    Report {
        name: "burst".into(),
        started_unix_s: 1_795_233_600,
        host: Host {
            kernel: "6.1.0-18-amd64".into(),
            qemu: "QEMU emulator version 7.2.9 (Debian 1:7.2+dfsg-7+deb12u5)".into(),
            accel: "tcg".into(),
            cpus: 2,
        },
        wan: WanFigures { rate_mbit: LINK_MBIT, rtt_ms: 27.0, jitter_ms: 0.0, loss: 0.0, queue_ms: 50.0 },
        moves: vec![],
        baselines: vec![
            baseline(Baseline::Qemu, "QEMU's own: expected downtime at most 300 ms", sample_move(1, 1.0)),
            baseline(
                Baseline::QemuXbzrle,
                "QEMU's own: expected downtime at most 300 ms; XBZRLE cache 64 MiB",
                sample_move(2, 0.8),
            ),
        ],
        warnings: vec!["no KVM: the guest is emulated, and slow".into()],
        windows: vec![],
        components: vec![],
        applications: vec![],
        marks: vec![],
        together: vec![],
        speeds: vec![],
        extenders: vec![],
        captures: vec![],
        profiles: vec![],
        incidents: vec![],
        broken: None,
    }
}

/// Random enough for a picture.
struct Rng(u64);

impl Rng {
    /// 0 to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A move with its disk first and five rounds; `scale` stretches its memory phase and pause.
fn sample_move(seed: u64, scale: f64) -> MoveReport {
    let mut rng = Rng(seed);
    let seconds = [38.0, 9.6, 4.4, 2.2, 1.1].map(|s| s * scale);
    let memory_from = 74.0;
    let stop = memory_from + seconds.iter().sum::<f64>();
    let run = stop + 0.412 * scale;
    let total = run + 0.6;
    let rounds: Vec<Round> = seconds
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let sent = (s * LINK_MBIT * 0.94e6 / 8.0 / 4150.0) as u64;
            let zero = if i == 0 { 19_200 } else { 37 };
            let bytes = BTreeMap::from([("normal".to_owned(), sent * 4104), ("zero".to_owned(), zero * 9)]);
            let dirtied = seconds.get(i + 1).map_or(900.0, |next| next * LINK_MBIT * 0.94e6 / 8.0 / 4150.0) as u64;
            Round { sent: sent + zero, dirtied, bytes_by_encoding: bytes, seconds: *s, level: None, window: None }
        })
        .collect();
    let phases = [
        ("reserve", 0.0, 0.8),
        ("disk", 0.8, memory_from),
        ("mirror", memory_from, stop),
        ("memory", memory_from, stop),
        ("stop", stop, run),
        ("announce", run, run + 0.15),
        ("release", run + 0.15, total),
    ];
    let series = series(&mut rng, memory_from, stop, run, total, &seconds);
    let last = series.wan.last().copied().unwrap_or_default();
    MoveReport {
        vm: "web".into(),
        from: "illinois".into(),
        to: "texas".into(),
        strategy: "mirror".into(),
        outcome: Outcome::Completed,
        why: None,
        timed_out: false,
        total_s: total,
        ended_s: Some(total),
        downtime_ms: Some((run - stop) * 1e3),
        held_ms: 0.0,
        outage_ms: Some((run - stop) * 1e3 + 241.0),
        bytes: WanBytes { memory: last.memory, disk: last.disk, other: last.other, split_by_hypervisor: false },
        counted: None,
        precached_bytes: 0,
        raw_bytes: last.memory + last.disk + (19_200 << 12),
        zero_pages: 19_348,
        kept: Default::default(),
        nonzero_share: Some(0.862),
        rounds,
        phases: phases.map(|(name, start_s, end_s)| Phase { name: name.into(), start_s, end_s }).into(),
        incidents: vec![],
        requests: vec![],
        processes: vec![],
        predicted: None,
        integrity: Integrity {
            memory_ok: Some(true),
            disk_ok: Some(true),
            tcp_ok: Some(true),
            ram_equal: if seed == 1 { Some(true) } else { None },
            wan_carried_disk: Some(true),
            one_place: None,
            work_ok: None,
            notes: if seed == 1 { vec![] } else { vec!["RAM was not compared: the scenario asked for no hold".into()] },
        },
        series,
    }
}

fn series(rng: &mut Rng, memory_from: f64, stop: f64, run: f64, total: f64, rounds: &[f64]) -> Series {
    let mut series = Series::default();
    let mut count = WanSample { t_s: -4.0, ..WanSample::default() };
    let full = LINK_MBIT * 1e6 / 8.0;
    while count.t_s < total + 3.0 {
        let t = count.t_s;
        let (memory, disk) = match t {
            t if t < 0.8 => (0.0, 0.0),
            // Slow start, then a full link with the wobble of a drop-tail queue.
            t if t < memory_from => (0.0, (0.95 - 0.9 * (-(t - 0.8) / 1.2).exp()) * (0.94 + 0.06 * rng.unit())),
            t if t < stop => (0.86 + 0.05 * rng.unit(), 0.05 + 0.02 * rng.unit()),
            t if t < run => (0.9, 0.0),
            _ => (0.0, 0.0),
        };
        count.t_s += 0.1;
        count.memory += (memory * full * 0.1) as u64;
        count.disk += (disk * full * 0.1) as u64;
        count.other += (0.004 * full * 0.1 + (memory + disk) * full * 0.1 * 0.018) as u64;
        series.wan.push(count);
    }
    let mut round_from = memory_from;
    for (i, length) in rounds.iter().enumerate() {
        let size = length * full * 0.94;
        let mut t = 0.0;
        while t < *length {
            let wobble = if i == 0 && t < 6.0 { 0.0 } else { 2000.0 + 300.0 * (rng.unit() - 0.5) };
            let remaining = (size * (1.0 - t / length)) as u64;
            series.memory.push(MemorySample { t_s: round_from + t, remaining, dirty_pages_per_s: wobble });
            t += 0.25;
        }
        round_from += length;
    }
    let mut t = -4.0;
    while t < total + 3.0 {
        t += 0.01;
        let back = t + 0.027;
        if (stop - 0.02..run + 0.221).contains(&back) {
            continue;
        }
        // A full queue adds up to 50 ms; what was under way during the pause comes back late.
        let queue = if (0.8..stop).contains(&t) { 42.0 * rng.unit().sqrt() } else { 0.4 * rng.unit() };
        let late = if (run..run + 0.3).contains(&t) { 640.0 * (1.0 - (t - run) / 0.3) } else { 0.0 };
        series.echo.push(EchoPoint { t_s: back, rtt_ms: 27.1 + queue + late.max(0.0) });
    }
    series
}
