//! `godwit-lab capture`: records what QEMU sends of each guest of a scenario, and the guest's disks as they are at its stop, for
//! figures of codecs (`godwit stream`): one guest, every codec, the same bytes.
//!
//! The guests are booted, loaded and warmed as for a run. Then each is migrated once into a file, at the rate of the scenario's link, while its
//! loads go on: so the stream has the re-sends that a plain move over that link has. QEMU decides by itself when to stop, after
//! [`PATIENCE`] passes at the latest. The guest then stands still, and its disks are copied: they are what a destination has whose disks were
//! mirrored.
//!
//! Of each guest there are `NAME.stream`, `NAME.disk0.raw`, ..., and `NAME.json`: where in the stream each pass begins and when it did (a trace of which pages
//! were dirtied in which pass, together with the stream), and QEMU's own figures.
//!
//! With `--memory-s N` its memory is recorded before that for N seconds, with its contents, as `NAME.ram.zst`: `godwit-lab replay` tries moves on it.
//!
//! What can go wrong: under TCG, QEMU loses writes once in a while (see `guest`): the stream is QEMU's, whatever it missed.

use crate::guest::{Accel, Guest};
use crate::machine::Machine;
use crate::pass::{Means, Pass, lock};
use crate::progress::Progress;
use crate::ram_watch;
use crate::scenario::{Baseline, Scenario};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Passes after which the guest is stopped, however much it dirties: as the baselines have it.
const PATIENCE: usize = 30;
/// How long QEMU may take from one pass, or one word about its state, to the next.
const STEP: Duration = Duration::from_secs(1800);
/// Between two looks at a guest's memory.
const LOOK: Duration = Duration::from_millis(250);
/// Between two looks.
const POLL: Duration = Duration::from_millis(200);

/// Where a pass begins.
#[derive(Debug, Serialize)]
struct Began {
    /// Its number, from 1.
    pass: u64,
    /// Bytes of the stream before it, as far as they had been read when QEMU said so: at most a few hundred KiB too few.
    offset: u64,
    /// Seconds since the first one.
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Capture {
    vm: String,
    rate_mbit: f64,
    memory_bytes: u64,
    stream_bytes: u64,
    disks: Vec<String>,
    passes: Vec<Began>,
    /// `query-migrate`, at the end.
    qemu: Value,
}

/// What is to be recorded.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Wanted {
    /// How long the loads go on before, seconds.
    pub after_s: u64,
    /// How long memory is recorded with its contents, seconds; 0: it is not.
    pub memory_s: u64,
}

/// Records all guests of `scenario` into `target`.
///
/// # Errors
/// When a guest cannot be booted or migrated.
pub fn run(
    scenario: &Scenario,
    work: &Path,
    target: &Path,
    wanted: Wanted,
    accel: Accel,
    progress: &Arc<Progress>,
) -> Result<()> {
    let folder = work.join("pass");
    std::fs::create_dir_all(&folder)?;
    std::fs::create_dir_all(target)?;
    progress.title("capture:");
    let pass = Pass::build(scenario, Means::Baseline(Baseline::Qemu), &folder, accel, progress)?;
    std::thread::sleep(Duration::from_secs(wanted.after_s));
    let mut result = Ok(());
    for vm in pass.vms() {
        progress.note(&format!("recording {}", vm.name()));
        let Some(Machine::Qemu(guest)) = &*lock(&vm.guest) else { bail!("`{}` is not there", vm.name()) };
        result = record_memory(guest, target, Duration::from_secs(wanted.memory_s), progress)
            .and_then(|()| record(scenario, &pass, guest, target))
            .with_context(|| format!("recording `{}`", vm.name()));
        if result.is_err() {
            break;
        }
    }
    pass.finish();
    result
}

fn record_memory(guest: &Guest, target: &Path, lasting: Duration, progress: &Progress) -> Result<()> {
    if lasting.is_zero() {
        return Ok(());
    }
    let name = &guest.spec.name;
    let file = target.join(format!("{name}.ram.zst"));
    let file = File::create(&file).with_context(|| format!("cannot make {}", file.display()))?;
    let packed = zstd::Encoder::new(file, 1)?.auto_finish();
    let taken = ram_watch::record(&guest.ram, guest.spec.memory, lasting, LOOK, packed)?;
    let pages_per_s = taken.pages as f64 / taken.lasting.as_secs_f64();
    progress.note(&format!("{name}: {} looks in {:.0?}, {pages_per_s:.0} pages a second", taken.looks, taken.lasting));
    Ok(())
}

fn record(scenario: &Scenario, pass: &Pass, guest: &Guest, target: &Path) -> Result<()> {
    let name = &guest.spec.name;
    let rate_mbit = *scenario.wan.rate_mbit.get_ref();
    let socket = pass.fabric().site(&guest.site).run_folder().join(format!("{name}.capture"));
    let at = socket.clone();
    let listener = pass.fabric().site(&guest.site).ns.run(move || UnixListener::bind(at));
    let listener = listener.context("cannot listen for the stream")?;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate that was checked")]
    let bytes_per_s = (rate_mbit * 1e6 / 8.0) as u64;
    guest.qmp(
        "migrate-set-capabilities",
        json!({"capabilities": [{"capability": "events", "state": true}, {"capability": "return-path", "state": false}]}),
    )?;
    guest.qmp("migrate-set-parameters", json!({"max-bandwidth": bytes_per_s}))?;
    let mark = guest.qmp.mark();
    guest.qmp("migrate", json!({"uri": format!("unix:{}", socket.display())}))?;

    let read = Arc::new(AtomicU64::new(0));
    let (counted, file) = (read.clone(), target.join(format!("{name}.stream")));
    let mut out = File::create(&file).with_context(|| format!("cannot make {}", file.display()))?;
    let reader = std::thread::Builder::new().name("capture".into()).spawn(move || -> std::io::Result<()> {
        let mut from = listener.accept()?.0;
        let mut piece = vec![0; 256 << 10];
        loop {
            let n = from.read(&mut piece)?;
            if n == 0 {
                return out.flush();
            }
            out.write_all(&piece[..n])?;
            counted.fetch_add(n as u64, Ordering::Relaxed);
        }
    })?;

    let mut passes: Vec<Began> = vec![];
    let (mut seen, mut first, mut mark) = (Instant::now(), None, mark);
    let qemu = loop {
        let (events, next) = guest.qmp.take_since(mark);
        mark = next;
        for event in events.iter().filter(|event| event.name == "MIGRATION_PASS") {
            let since: Instant = *first.get_or_insert(event.at);
            let pass = event.data["pass"].as_u64().unwrap_or_default();
            let seconds = event.at.saturating_duration_since(since).as_secs_f64();
            passes.push(Began { pass, offset: read.load(Ordering::Relaxed), seconds });
            seen = Instant::now();
            if passes.len() == PATIENCE {
                guest.qmp("migrate-set-parameters", json!({"downtime-limit": 2_000_000}))?;
            }
        }
        let told = guest.qmp("query-migrate", Value::Null)?;
        match told["status"].as_str() {
            Some("completed") => break told,
            Some("failed" | "cancelled") => bail!("QEMU gave it up: {told}"),
            _ if seen.elapsed() > STEP => bail!("it does not end: {told}"),
            _ => std::thread::sleep(POLL),
        }
    };
    reader
        .join()
        .map_err(|_| anyhow::anyhow!("the reader of the stream panicked"))?
        .context("cannot record the stream")?;
    let mut disks = vec![];
    for (n, from) in guest.disk_files.iter().enumerate() {
        let disk = format!("{name}.disk{n}.raw");
        let copied = Command::new("cp").arg("--sparse=always").arg(from).arg(target.join(&disk)).status();
        if !copied.is_ok_and(|status| status.success()) {
            bail!("cannot copy {}", from.display());
        }
        disks.push(disk);
    }
    let memory_bytes = guest.spec.memory.0;
    let stream_bytes = read.load(Ordering::Relaxed);
    let capture = Capture { vm: name.clone(), rate_mbit, memory_bytes, stream_bytes, disks, passes, qemu };
    std::fs::write(target.join(format!("{name}.json")), serde_json::to_vec_pretty(&capture)?)?;
    Ok(())
}
