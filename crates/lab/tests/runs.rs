//! Real runs of the real binary: sites, WAN, guests, moves. They need root and the tiny image (`scripts/setup.sh tiny`).
//!
//! Several at once, as many as the test harness has threads: mostly they wait for links, timers and guests that boot.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_lab::images;
use godwit_lab::recording::{Frame, read_pcap};
use godwit_lab::report::{Integrity, MoveReport, Outcome, Report};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sites that are up by themselves are found by whoever asks for the ones that are up.
static UP: Mutex<()> = Mutex::new(());

/// No wait for what takes moments on an idle machine is longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether a lab can run; says so, where not.
fn machine() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: the lab needs root");
    }
    root
}

/// Nobody else's sites are up by themselves.
fn only_mine_are_up() -> MutexGuard<'static, ()> {
    UP.lock().unwrap_or_else(PoisonError::into_inner)
}

const LAB: &str = env!("CARGO_BIN_EXE_godwit-lab");

/// The smoke scenario with other steps.
fn scenario(steps: &str) -> String {
    let text = include_str!("../../../scenarios/smoke.toml");
    let head = text.split_once("[[step]]").expect("the smoke scenario has steps").0;
    format!("{head}{steps}")
}

/// The smoke scenario with other steps, moved by Godwit.
fn by_godwit(steps: &str) -> String {
    let text = scenario(steps).replace("baseline = [\"qemu\"]", "").replace("godwit = false", "godwit = true");
    assert!(text.contains("godwit = true"), "the smoke scenario says whether Godwit moves");
    text
}

struct Run {
    folder: tempfile::TempDir,
}

impl Run {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("scenario.toml"), text).unwrap();
        Self { folder }
    }

    /// To bring its sites up.
    fn up(&self) -> Command {
        let mut command = self.lab();
        command.arg("up").arg(self.folder.path().join("scenario.toml")).arg("--work").arg(self.work());
        command
    }

    /// All that it starts can be told from what other tests do: by its work folder, which is in their environment.
    fn lab(&self) -> Command {
        let mut command = Command::new(LAB);
        command.env("GODWIT_LAB_TEST", self.work());
        command
    }

    fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    fn report_file(&self) -> PathBuf {
        self.folder.path().join("report.json")
    }

    fn command(&self) -> Command {
        let mut command = self.lab();
        command.arg("run").arg(self.folder.path().join("scenario.toml"));
        command.arg("--report").arg(self.report_file()).arg("--work").arg(self.work());
        command.stdin(Stdio::null());
        command
    }

    /// Runs to the end; the exit code and the report.
    fn finish(&self) -> (Option<i32>, Report) {
        let output = self.command().output().unwrap();
        (output.status.code(), self.report(&String::from_utf8_lossy(&output.stderr)))
    }

    /// Of a run that has ended and said this.
    fn report(&self, said: &str) -> Report {
        let report = std::fs::read(self.report_file()).unwrap_or_else(|e| panic!("no report ({e}): {said}"));
        assert!(!self.work().exists(), "the work folder is still there");
        serde_json::from_slice(&report).unwrap()
    }

    fn one_move(&self) -> (Option<i32>, MoveReport) {
        let (code, mut report) = self.finish();
        assert_eq!(report.baselines.len(), 1, "{:?}", report.warnings);
        (code, report.baselines.remove(0).figures)
    }
}

const MOVE_AND_VERIFY: &str = r#"
[[step]]
after_s = 1
move = { vm = "vm", to = "b" }
[[step]]
verify = { vm = "vm" }
"#;

#[test]
fn two_vms_move_in_one_order_and_the_second_names_what_the_first_brought() {
    if !machine() {
        return;
    }
    let steps = "[[step]]\nmove = { vms = [\"vm\", \"other\"], to = \"b\" }\n\
                 [[step]]\nverify = { vm = \"vm\" }\n[[step]]\nverify = { vm = \"other\" }\n";
    let text = by_godwit(steps).replace("site = \"a\"", "site = \"a\"\ndomain = \"company\"");
    let vm = text.find("[[vm]]").unwrap()..text.find("[[step]]").unwrap();
    let other = text[vm.clone()].replace("name = \"vm\"", "name = \"other\"");
    let (code, report) = Run::new(&format!("{}{other}{}", &text[..vm.end], &text[vm.end..])).finish();
    assert_eq!(code, Some(0), "{:?}", report.warnings);
    let [first, second] = ["vm", "other"].map(|vm| report.moves.iter().find(|m| m.vm == vm).unwrap());
    for moved in [first, second] {
        assert_eq!((moved.outcome, moved.integrity.ram_equal), (Outcome::Completed, Some(true)), "{moved:?}");
    }
    assert!(second.total_s > first.total_s, "one after the other");
    assert!(first.kept.of_others == 0 && second.kept.of_others > 1 << 20, "{:?}", second.kept);
    // The path's bytes are both moves': with what frames add to them, and without what a queue before the path has dropped.
    let counted = [first, second].map(|m| m.counted.unwrap());
    let own: u64 = counted.iter().map(|bytes| bytes.memory + bytes.disk).sum();
    let [together] = &report.together[..] else { panic!("{:?}", report.together) };
    let share = (together.bytes.memory + together.bytes.disk) as f64 / own as f64;
    assert!((0.9..1.1).contains(&share), "{share}: {together:?} {counted:?}");
    assert_eq!((together.by.as_str(), together.vms.len()), ("godwit", 2));
}

/// What goes wrong in a move, what has to be true afterwards, and that a second try succeeds.
fn incident(incident: &str, to: &str) -> String {
    format!(
        r#"
[[step]]
{incident}
[[step]]
after_s = 1
move = {{ vm = "vm", to = "{to}" }}
[[step]]
expect = {{ vm = "vm" }}
[[step]]
verify = {{ vm = "vm" }}
[[step]]
move = {{ vm = "vm", to = "{to}", retry = true }}
[[step]]
expect = {{ vm = "vm", site = "{to}" }}
[[step]]
verify = {{ vm = "vm" }}
"#
    )
}

/// The guest has two more disks, one of 4 TiB, and writes to that one as well.
fn with_three_disks(text: &str) -> String {
    let load = "{ kind = \"disk\", kib_per_s = 64, working_set_mib = 8, disk = 2 },";
    let found = text
        .replace("disk_gib = 0.25", "disks_gib = [0.25, 100, 4096]")
        .replace("load = [", &format!("load = [{load}"));
    assert!(found.contains("4096]") && found.contains(load), "the smoke scenario has a disk and loads");
    found
}

/// Runs incidents there and back, and looks at everything that the lab found.
fn survives(incidents: &[&str]) {
    survives_with(incidents, str::to_owned);
}

fn survives_with(incidents: &[&str], guest: impl Fn(&str) -> String) {
    let steps: String = incidents.iter().zip(["b", "a"].iter().cycle()).map(|(i, to)| incident(i, to)).collect();
    let (code, report) = Run::new(&guest(&by_godwit(&steps))).finish();
    assert!(report.moves.len() >= incidents.len(), "{:?}", report.warnings);
    for (i, figures) in report.moves.iter().enumerate() {
        let found = &figures.integrity;
        for check in [found.memory_ok, found.disk_ok, found.tcp_ok, found.ram_equal] {
            assert_ne!(check, Some(false), "move {i}, {:?} ({:?}): {found:?}", figures.outcome, figures.why);
        }
        assert_eq!(found.one_place, Some(true), "move {i}: {found:?}");
    }
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

fn all_checked(integrity: &Integrity) -> bool {
    let i = integrity;
    [i.memory_ok, i.disk_ok, i.tcp_ok, i.ram_equal, i.wan_carried_disk].iter().all(|check| *check == Some(true))
}

#[test]
fn a_guest_moved_by_qemu_keeps_its_memory_its_disk_and_its_clients() {
    if !machine() {
        return;
    }
    let (code, figures) = Run::new(&scenario(MOVE_AND_VERIFY)).one_move();
    assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
    assert!(all_checked(&figures.integrity), "{:?}", figures.integrity);
    assert_eq!(code, Some(0));

    // The figures hang together.
    let downtime = figures.downtime_ms.unwrap();
    let outage = figures.outage_ms.unwrap();
    assert!(downtime > 0.0 && outage >= downtime, "the client cannot see less than the pause: {downtime} {outage}");
    let whole: f64 = figures.phases.iter().map(|p| p.end_s - p.start_s).sum();
    let ended = figures.ended_s.unwrap();
    assert!((whole - ended).abs() < ended / 10.0, "phases {whole} and the end {ended}");
    assert!(figures.total_s <= ended, "the guest runs before the source is cleared away: {} {ended}", figures.total_s);
    assert!(figures.rounds.len() >= 2);
    let pages: u64 = figures.rounds.iter().map(|r| r.sent).sum();
    assert!(pages >= 128 * 256, "every page is sent once at least: {pages}");
    // The data set and the fresh random bytes have to have crossed, and not much more than disk and RAM can explain.
    assert!(figures.bytes.disk > 64 << 20 && figures.bytes.disk < 256 << 20, "{:?}", figures.bytes);
    assert!(figures.bytes.memory > 64 << 20, "{:?}", figures.bytes);
    let last = figures.series.wan.last().unwrap();
    assert!(last.memory >= figures.bytes.memory, "the curve ends where the total is");
}

#[test]
fn a_guest_moved_by_godwit_keeps_its_memory_its_disk_and_its_clients() {
    if !machine() {
        return;
    }
    let steps = r#"
[[step]]
after_s = 1
move = { vm = "vm", to = "b" }
[[step]]
verify = { vm = "vm" }
[[step]]
move = { vm = "vm", to = "a" }
[[step]]
verify = { vm = "vm" }
"#;
    // Little, so that what it writes meanwhile is little on a slow machine too.
    let text = by_godwit(steps).replace("kib_per_s = 256", "kib_per_s = 32");
    assert!(text.contains("kib_per_s = 32"), "the smoke scenario writes to its disk");
    let (code, report) = Run::new(&text).finish();
    assert_eq!(report.moves.len(), 2, "{:?}", report.warnings);
    for figures in &report.moves {
        assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
        let i = &figures.integrity;
        for check in [i.memory_ok, i.disk_ok, i.tcp_ok, i.ram_equal] {
            assert_eq!(check, Some(true), "{i:?}");
        }
        assert!(figures.downtime_ms.unwrap() > 0.0);
    }
    // The disk holds more than 64 MiB that are no zeroes, which go compressed; what a site has of it does not travel again.
    let (there, back) = (report.moves[0].bytes.disk, report.moves[1].bytes.disk);
    assert!(there > 16 << 20 && there < 64 << 20 && back < there / 4, "{there} there, {back} back");
    assert_eq!(code, Some(0));
}

#[test]
#[ignore = "part of `make soak`: on a machine with much more work than processors round trips tremble, and a pre-cache that gives way takes minutes"]
fn a_pre_cached_guest_takes_to_its_next_site_only_what_it_wrote_since_and_so_on_the_way_back() {
    if !machine() {
        return;
    }
    let steps = r#"
[[step]]
precache = { vm = "vm", to = "b", lag_s = 3, follow = true }
[[step]]
cut = { between = ["a", "b"], for_s = 5 }
[[step]]
kill = { what = "node", site = "b" }
[[step]]
after_s = 8
precache = { vm = "vm", to = "b", lag_s = 3, follow = true }
# A move that is given up does not end it.
[[step]]
move = { vm = "vm", to = "b", disk = "postcopy" }
[[step]]
after_s = 2
cancel = { vm = "vm" }
[[step]]
verify = { vm = "vm" }
[[step]]
precache = { vm = "vm", to = "b", lag_s = 3, follow = true }
[[step]]
move = { vm = "vm", to = "b" }
[[step]]
verify = { vm = "vm" }
[[step]]
precache = { vm = "vm", to = "a", lag_s = 3, consistent = true }
[[step]]
move = { vm = "vm", to = "a" }
[[step]]
verify = { vm = "vm" }
"#;
    let (code, report) = Run::new(&by_godwit(steps)).finish();
    let [cancelled, moved @ ..] = report.moves.as_slice() else { panic!("{:?}", report.warnings) };
    assert_eq!((cancelled.outcome, moved.len()), (Outcome::Cancelled, 2), "{:?}", report.warnings);
    for figures in moved {
        assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
        let i = &figures.integrity;
        for check in [i.memory_ok, i.disk_ok, i.tcp_ok, i.ram_equal] {
            assert_eq!(check, Some(true), "{i:?}");
        }
        println!("{}: {} bytes before, {} in the move", figures.to, figures.precached_bytes, figures.bytes.disk);
        // The disk holds more than 64 MiB that are no zeroes. The guest writes 256 KiB a second, into records of 4 KiB; a node that
        // was killed restamps what was hot.
        assert!(figures.precached_bytes > 60 << 20, "{} bytes before", figures.precached_bytes);
        assert!(figures.bytes.disk < 8 << 20, "{} bytes in the move", figures.bytes.disk);
    }
    assert_eq!(code, Some(0));
}

/// The same share of a smaller volume than the figure's (`godwit-lab figures way-back`), which takes minutes.
#[test]
fn a_disk_that_both_sites_reach_stays_where_it_is_and_the_processes_that_worked_are_known() {
    if !machine() {
        return;
    }
    let steps = MOVE_AND_VERIFY.replace("to = \"b\"", "to = \"b\", disk = \"shared\"");
    let (code, report) = Run::new(&by_godwit(&steps)).finish();
    let figures = &report.moves[0];
    assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
    let i = &figures.integrity;
    assert_eq!([i.memory_ok, i.tcp_ok, i.ram_equal], [Some(true); 3], "{i:?}");
    assert!(figures.bytes.disk < 1 << 20, "no block travels: {:?}", figures.bytes);
    for site in ["a", "b"] {
        for program in ["qemu-system-x86", "godwit"] {
            let time = figures.processes.iter().find(|time| time.site == site && time.program == program);
            assert!(time.is_some_and(|time| time.s > 0.0), "{program} in {site}: {:?}", figures.processes);
        }
    }
    assert_eq!(code, Some(0));
}

#[test]
fn a_guest_brings_home_no_more_than_it_wrote_away() {
    const WRITTEN_MIB: u64 = 32;
    if !machine() {
        return;
    }
    let text = include_str!("../../../scenarios/way-back.toml").replace("disk_gib = 20", "disk_gib = 2");
    let text = text.replace("307", &WRITTEN_MIB.to_string());
    let (code, report) = Run::new(&text).finish();
    let [away, home] = &report.moves[..] else { panic!("{:?}", report.warnings) };
    for figures in [away, home] {
        assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
        assert_eq!(figures.integrity.disk_ok, Some(true), "{:?}", figures.integrity);
    }
    assert!(home.raw_bytes > WRITTEN_MIB << 20, "the guest wrote {WRITTEN_MIB} MiB, and {} went", home.raw_bytes);
    assert!(home.bytes.disk <= WRITTEN_MIB << 20, "{} bytes crossed the WAN for {WRITTEN_MIB} MiB", home.bytes.disk);
    assert_eq!(code, Some(0));
}

/// What the guest says of its own disk stands on the host's clock: it works until the stop, not at all while it stands still, and again
/// right after.
#[test]
fn a_guests_own_disk_io_is_told_from_before_the_stop_to_after_the_last_block() {
    if !machine() {
        return;
    }
    let text = include_str!("../../../scenarios/hand-off.toml").replace("after_s = 15", "after_s = 6");
    let (code, report) = Run::new(&text).finish();
    let [figures] = &report.moves[..] else { panic!("{:?}", report.warnings) };
    let io = &figures.series.io;
    let phase = |name: &str| figures.phases.iter().find(|p| p.name == name).unwrap_or_else(|| panic!("no {name}"));
    let (stop, fill) = (phase("stop"), phase("fill"));
    let wrote =
        |from: f64, to: f64| -> u64 { io.iter().filter(|p| p.t_s > from && p.t_s <= to).map(|p| p.write_kib).sum() };
    assert!(io.iter().any(|p| p.t_s < -3.0), "the curve begins seconds before the move");
    assert!(wrote(-3.0, stop.start_s) > 0 && wrote(fill.start_s, fill.end_s) > 0 && wrote(fill.end_s, f64::MAX) > 0);
    // No interval ends while the guest stands still. The two clocks agree to a tenth of a second, as a rule.
    let still = (stop.start_s + 0.15, stop.end_s - 0.05);
    assert!(!io.iter().any(|p| p.t_s > still.0 && p.t_s < still.1), "{still:?}");
    let read = io.iter().filter(|p| p.t_s > fill.start_s && p.t_s < fill.end_s);
    assert!(read.map(|p| p.read_kib).sum::<u64>() > 0, "it read while its blocks were on the way");
    assert!(io.iter().any(|p| p.p50_ms.is_some_and(|ms| ms > 0.0)), "the load's own times are there");
    assert_eq!(code, Some(0));
}

#[test]
fn the_papers_figures_say_which_runs_are_open_and_write_their_scenarios() {
    let folder = tempfile::tempdir().unwrap();
    let figures = |arguments: &[&str]| {
        let mut command = Command::new(LAB);
        command.args(["figures", "xnbd", "--commit", "x", "--ledger"]).arg(folder.path().join("ledger"));
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let list = figures(&["--quick", "--list"]);
    assert_eq!(list, "open kernel-100mbit-100ms-precache\nopen kernel-100mbit-100ms-qemu\n");
    assert!(figures(&["--table"]).contains("No runs yet"));
    figures(&["--only", "pgbench-200mbit", "--scenarios", folder.path().to_str().unwrap()]);
    let written = std::fs::read_to_string(folder.path().join("pgbench-200mbit-100ms-mirror.toml")).unwrap();
    assert!(written.contains("kind = \"database\""), "{written}");
}

/// `godwit stream`, which needs no lab; what it says.
fn stream(arguments: &[&str], folder: &Path) -> String {
    let godwit = std::env::var_os("GODWIT_BIN").map_or_else(|| Path::new(LAB).with_file_name("godwit"), PathBuf::from);
    let output = Command::new(godwit).arg("stream").args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_recorded_guest_is_what_its_json_tells_and_its_stream_comes_out_of_the_codec_as_it_was() {
    if !machine() {
        return;
    }
    let run = Run::new(&scenario("").replace("rate_mbit = 200", "rate_mbit = 1000"));
    let out = run.folder.path().join("out");
    let capture = || {
        let mut command = Command::new(LAB);
        command.arg("capture").arg(run.folder.path().join("scenario.toml")).arg("--out").arg(&out);
        command.args(["--after-s", "1", "--work"]).arg(run.work()).stdin(Stdio::null());
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (well, said) = capture();
    assert!(well, "{said}");
    assert!(!run.work().exists(), "the work folder is still there");
    let read = |name: &str| std::fs::read(out.join(name)).unwrap();
    let told: serde_json::Value = serde_json::from_slice(&read("vm.json")).unwrap();
    let recorded = read("vm.stream");
    assert_eq!((told["vm"].as_str(), told["qemu"]["status"].as_str()), (Some("vm"), Some("completed")), "{told}");
    assert_eq!(told["stream_bytes"].as_u64(), Some(recorded.len() as u64), "{told}");
    assert!(told["memory_bytes"].as_u64() >= Some(128 << 20), "{told}");

    // Passes follow each other, in the stream as in time.
    let passes = told["passes"].as_array().unwrap();
    let of = |name: &str| -> Vec<f64> { passes.iter().map(|pass| pass[name].as_f64().unwrap()).collect() };
    assert!(of("pass").iter().enumerate().all(|(n, pass)| *pass == n as f64 + 1.0), "{told}");
    assert!(passes.len() > 1 && of("offset").is_sorted() && of("seconds").is_sorted(), "{told}");
    assert!(of("offset").iter().all(|offset| *offset <= recorded.len() as f64), "{told}");

    // The guest reads its file system; behind that are the bytes that the lab drew, and the records that the guest wrote.
    assert_eq!(told["disks"], serde_json::json!(["vm.disk0.raw"]));
    let disk = read("vm.disk0.raw");
    let template = std::fs::read(images::folder().join("tiny/data-64.raw")).unwrap();
    let records = template.len().next_multiple_of(1 << 20) + images::FRESH_RANDOM.0 as usize;
    assert_eq!(disk.len(), 256 << 20);
    assert!(disk.starts_with(&template), "it is another disk");
    assert!(disk[records..].iter().any(|byte| *byte != 0), "it is not the disk of the stop");

    // What QEMU counted of pages is what the codec finds in the stream.
    let counted = |of: &serde_json::Value, names: &[&str]| -> u64 {
        names.iter().map(|name| of[name].as_u64().unwrap_or_else(|| panic!("no {name}: {of}"))).sum()
    };
    let pages = counted(&told["qemu"]["ram"], &["normal", "duplicate"]);
    let without_and_with_disk: [&[&str]; 2] = [&[], &["--disk", "vm.disk0.raw"]];
    for disk in without_and_with_disk {
        let keep = ["encode", "--resends", "keep", "--stats", "json", "vm.stream", "wire"];
        let stats: serde_json::Value = serde_json::from_str(&stream(&[&keep[..], disk].concat(), &out)).unwrap();
        let found = ["zero_pages", "data_pages", "delta_pages", "disk_pages", "unchanged_pages"];
        assert_eq!(counted(&stats, &found), pages, "{stats} {told}");
        assert_eq!(counted(&stats, &["disk_pages"]) > 0, !disk.is_empty(), "{stats}");
        assert!(read("wire").len() < recorded.len() / 2, "{stats}");
        stream(&[&["decode", "wire", "again"][..], disk].concat(), &out);
        assert!(read("again") == recorded, "a byte of the stream is another, with {disk:?}");
    }

    let (well, said) = capture();
    assert!(!well && said.contains("is not empty"), "what was recorded is left alone: {said}");
}

#[test]
fn clients_at_a_gateway_keep_a_guest_that_is_moved_there_and_back() {
    if !machine() {
        return;
    }
    let text = include_str!("../../../scenarios/gateway.toml");
    let back = "[[step]]\nmove = { vm = \"vm\", to = \"a\" }\n[[step]]\nverify = { vm = \"vm\" }\n";
    let (code, report) = Run::new(&format!("{text}\n{back}")).finish();
    assert_eq!(report.moves.len(), 2, "{:?}", report.warnings);
    for figures in &report.moves {
        assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
        // The gateway has seen the guest answer: a move that could not show that says so.
        assert_eq!(figures.why, None);
        let i = &figures.integrity;
        for check in [i.memory_ok, i.disk_ok, i.tcp_ok, i.ram_equal] {
            assert_eq!(check, Some(true), "{i:?}");
        }
        let (pause, outage) = (figures.downtime_ms.unwrap(), figures.outage_ms.unwrap());
        assert!(pause > 0.0 && outage >= pause, "{pause} {outage}");
    }
    assert_eq!(code, Some(0));
}

#[test]
fn a_gateway_follows_a_guest_without_the_controller() {
    if !machine() {
        return;
    }
    let text = include_str!("../../../scenarios/gateway.toml");
    let head = text.split_once("[[step]]").expect("the scenario has steps").0;
    let steps = r#"
[[step]]
after_s = 1
kill = { what = "controller", vm = "vm", at = "stopped", restart_after_s = 30 }
[[step]]
move = { vm = "vm", to = "b" }
[[step]]
expect = { vm = "vm", site = "b" }
[[step]]
verify = { vm = "vm" }
"#;
    let (code, report) = Run::new(&format!("{head}{steps}")).finish();
    let figures = &report.moves[0];
    assert_eq!((figures.outcome, &figures.why), (Outcome::Completed, &None));
    // It comes back after 30 s.
    assert!(figures.outage_ms.unwrap() < 25_000.0, "the gateway waited for the controller: {:?}", figures.outage_ms);
    assert_eq!(figures.integrity.tcp_ok, Some(true), "{:?}", figures.integrity);
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

#[test]
fn a_guest_runs_while_its_gateways_node_is_down_and_is_reached_when_that_is_back() {
    if !machine() {
        return;
    }
    let text = include_str!("../../../scenarios/gateway.toml");
    let head = text.split_once("[[step]]").expect("the scenario has steps").0;
    let steps = r#"
[[step]]
after_s = 1
kill = { what = "node", site = "c", vm = "vm", at = "stopped", restart_after_s = 5 }
[[step]]
move = { vm = "vm", to = "b" }
[[step]]
expect = { vm = "vm", site = "b" }
[[step]]
wait = { s = 8 }
[[step]]
verify = { vm = "vm" }
"#;
    let (code, report) = Run::new(&format!("{head}{steps}")).finish();
    let figures = &report.moves[0];
    assert_eq!((figures.outcome, &figures.why), (Outcome::Completed, &None));
    // It was not the gateway that the guest waited for: that was away for 5 s, and its clients saw it.
    assert!(figures.downtime_ms.unwrap() < 5_000.0, "{:?}", figures.downtime_ms);
    let echoes = figures.series.echo.windows(2).filter(|pair| pair[1].t_s - pair[0].t_s > 0.2);
    let silent: Vec<_> = echoes.map(|pair| (pair[0].t_s, pair[1].t_s, pair[1].rtt_ms)).collect();
    assert!(figures.outage_ms.unwrap() > 5_000.0, "the gateway led to the new place without its node: {silent:?}");
    assert_eq!(figures.integrity.tcp_ok, Some(true), "{:?}", figures.integrity);
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

#[test]
fn a_loaded_guest_goes_to_qemu_10_and_back() {
    if !machine() {
        return;
    }
    let root = std::env::var("GODWIT_QEMU10").unwrap_or_else(|_| "/var/cache/godwit-lab/qemu10".into());
    if !Path::new(&root).join("bin/qemu-system-x86_64").exists() {
        eprintln!("SKIPPED: no QEMU 10 in {root}: run scripts/setup.sh qemu10");
        return;
    }
    let back = "[[step]]\nmove = { vm = \"vm\", to = \"a\" }\n[[step]]\nverify = { vm = \"vm\" }\n";
    let there = "[[step]]\nmove = { vm = \"vm\", to = \"b\" }\n[[step]]\nverify = { vm = \"vm\" }\n";
    let text = by_godwit(&format!("{there}{back}"));
    let text = text.replace("name = \"b\"\n", &format!("name = \"b\"\nqemu = \"{root}/bin\"\n"));
    let (code, report) = Run::new(&text).finish();
    assert_eq!(report.moves.len(), 2, "{:?}", report.warnings);
    for figures in &report.moves {
        assert_eq!((figures.outcome, &figures.why), (Outcome::Completed, &None));
        let i = &figures.integrity;
        for check in [i.memory_ok, i.disk_ok, i.tcp_ok, i.ram_equal] {
            assert_eq!(check, Some(true), "{i:?}");
        }
    }
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

#[test]
fn a_move_whose_nodes_are_killed_around_the_seal_leaves_one_guest_and_can_be_tried_again() {
    if !machine() {
        return;
    }
    survives(&[
        // The guest is stopped, and goes on where it is: nobody may have told it that its disk had failed.
        r#"kill = { what = "node", site = "b", vm = "vm", at = "stopped" }"#,
        r#"kill = { what = "node", vm = "vm", at = "sealing" }"#,
        r#"kill = { what = "node", vm = "vm", at = "sealed" }"#,
        r#"kill = { what = "node", vm = "vm", at = "commit" }"#,
    ]);
}

#[test]
fn a_move_whose_node_is_killed_after_the_grant_leaves_one_guest() {
    if !machine() {
        return;
    }
    survives(&[
        r#"kill = { what = "node", vm = "vm", at = "granted" }"#,
        r#"kill = { what = "node", vm = "vm", at = "started" }"#,
        r#"kill = { what = "controller", vm = "vm", at = "memory" }"#,
    ]);
}

#[test]
fn three_disks_change_hands_together_or_not_at_all() {
    if !machine() {
        return;
    }
    let incidents = [
        r#"kill = { what = "node", vm = "vm", at = "commit" }"#,
        r#"kill = { what = "node", vm = "vm", at = "granted" }"#,
        r#"kill = { what = "qemu", vm = "vm", at = "granted" }"#,
    ];
    survives_with(&incidents, with_three_disks);
}

#[test]
fn a_move_cut_after_the_seal_goes_on_when_the_path_is_back() {
    if !machine() {
        return;
    }
    survives(&[
        r#"cut = { between = ["a", "b"], vm = "vm", at = "memory", for_s = 5 }"#,
        r#"cut = { between = ["a", "b"], vm = "vm", at = "sealed", for_s = 5 }"#,
    ]);
}

#[test]
fn a_page_and_a_block_altered_on_the_way_are_found() {
    if !machine() {
        return;
    }
    let alter =
        "[[step]]\nalter = { vm = \"vm\", what = \"page\" }\n[[step]]\nalter = { vm = \"vm\", what = \"block\" }\n";
    let (code, figures) = Run::new(&scenario(&format!("{alter}{MOVE_AND_VERIFY}"))).one_move();
    let found = &figures.integrity;
    assert_eq!((found.ram_equal, found.disk_ok), (Some(false), Some(false)), "{found:?}");
    // What was not altered is still right: one check does not stand for another.
    assert_eq!((found.memory_ok, found.tcp_ok), (Some(true), Some(true)), "{found:?}");
    assert!(found.notes.iter().any(|n| n.contains("RAM differs in pages 1 of")), "{found:?}");
    assert!(found.notes.iter().any(|n| n.contains("disk 0 differs in 64 KiB granules 1 of")), "{found:?}");
    assert_eq!(code, Some(2), "a hurt guest must not look like success");
}

#[test]
fn a_page_and_a_block_altered_on_godwits_way_are_found_and_only_in_the_vm_that_they_belong_to() {
    if !machine() {
        return;
    }
    // Two at once: what is done to one must not be taken for the other's.
    let head = by_godwit("");
    let (top, vm) = head.split_once("[[vm]]").expect("the smoke scenario has a VM");
    let other = vm.replace("name = \"vm\"", "name = \"other\"");
    let steps = r#"
[[step]]
alter = { vm = "vm", what = "page" }
[[step]]
alter = { vm = "vm", what = "block" }
[[step]]
after_s = 1
move = { vm = "vm", to = "b" }
[[step]]
move = { vm = "other", to = "b" }
[[step]]
verify = { vm = "vm" }
[[step]]
verify = { vm = "other" }
"#;
    let (code, report) = Run::new(&format!("{top}[[vm]]{vm}[[vm]]{other}{steps}")).finish();
    assert_eq!(report.moves.len(), 2, "{:?}", report.warnings);
    for figures in &report.moves {
        let (found, hurt) = (&figures.integrity, figures.vm == "vm");
        assert_eq!(figures.outcome, Outcome::Completed, "{:?}", figures.why);
        assert_eq!((found.ram_equal, found.disk_ok), (Some(!hurt), Some(!hurt)), "{}: {found:?}", figures.vm);
        assert_eq!((found.memory_ok, found.tcp_ok), (Some(true), Some(true)), "{}: {found:?}", figures.vm);
    }
    assert_eq!(code, Some(2), "a hurt guest must not look like success");
}

#[test]
fn a_page_a_record_and_a_segment_altered_in_the_guests_own_world_are_found() {
    if !machine() {
        return;
    }
    let alter = |what| format!("[[step]]\nalter = {{ vm = \"vm\", what = \"{what}\" }}\n");
    let verify = "[[step]]\nverify = { vm = \"vm\" }\n";
    let move_first =
        "[[step]]\nafter_s = 1\nmove = { vm = \"vm\", to = \"b\" }\n[[step]]\nwait = { moves = true, s = 1 }\n";
    let steps = [move_first, &alter("guest-page"), &alter("guest-record"), &alter("segment"), verify].concat();
    let (code, figures) = Run::new(&scenario(&steps)).one_move();
    let found = &figures.integrity;
    assert_eq!((found.memory_ok, found.tcp_ok), (Some(false), Some(false)), "{found:?}");
    assert_eq!(found.disk_ok, Some(false), "{found:?}");
    assert_eq!(found.ram_equal, Some(true), "{found:?}");
    assert_eq!(code, Some(2));
}

#[test]
fn a_step_that_cannot_be_made_leaves_what_was_measured_before_it() {
    if !machine() {
        return;
    }
    let steps = format!("{MOVE_AND_VERIFY}[[step]]\nmove = {{ vm = \"vm\", to = \"b\" }}\n");
    let (code, report) = Run::new(&scenario(&steps)).finish();
    assert_eq!(report.broken.as_deref(), Some("qemu: VM `vm` is in b already"));
    let [moved] = &report.baselines[..] else { panic!("{:?}", report.warnings) };
    assert_eq!((moved.figures.outcome, moved.figures.integrity.memory_ok), (Outcome::Completed, Some(true)));
    assert_eq!(code, Some(1));
}

#[test]
fn a_cancelled_move_leaves_the_guest_running_at_its_source() {
    if !machine() {
        return;
    }
    let steps = r#"
[[step]]
move = { vm = "vm", to = "b" }
[[step]]
after_s = 2
cancel = { vm = "vm" }
[[step]]
verify = { vm = "vm" }
"#;
    let (code, figures) = Run::new(&scenario(steps)).one_move();
    assert_eq!(figures.outcome, Outcome::Cancelled, "{:?}", figures.why);
    let found = &figures.integrity;
    assert_eq!((found.memory_ok, found.disk_ok, found.tcp_ok), (Some(true), Some(true), Some(true)), "{found:?}");
    assert_eq!(figures.downtime_ms, None);
    assert_eq!(code, Some(0));
}

#[test]
fn there_and_back_over_a_lossy_path_that_is_cut_for_a_moment() {
    if !machine() {
        return;
    }
    let steps = r#"
[[step]]
rate = { between = ["a", "b"], loss = 0.0005 }
[[step]]
move = { vm = "vm", to = "b" }
[[step]]
after_s = 1
cut = { between = ["b", "a"] }
[[step]]
after_s = 1
restore = { between = ["a", "b"] }
[[step]]
rate = { between = ["a", "b"], loss = 0.0 }
[[step]]
move = { vm = "vm", to = "a" }
[[step]]
verify = { vm = "vm" }
"#;
    let (code, report) = Run::new(&scenario(steps)).finish();
    let outcomes: Vec<_> = report.baselines.iter().map(|b| b.figures.outcome).collect();
    assert_eq!(outcomes, [Outcome::Completed, Outcome::Completed], "{:?}", report.baselines);
    assert!(report.baselines.iter().all(|b| b.figures.integrity.intact()), "{:?}", report.baselines);
    let ways: Vec<_> = report.baselines.iter().map(|b| (b.figures.from.as_str(), b.figures.to.as_str())).collect();
    assert_eq!(ways, [("a", "b"), ("b", "a")]);
    assert!(!report.warnings.iter().any(|w| w.contains("super-frames")), "{:?}", report.warnings);
    assert_eq!(code, Some(0));
}

fn processes() -> impl Iterator<Item = u32> {
    let all = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Processes whose command line or environment names `word`, by their ids.
fn processes_naming(word: &str) -> Vec<u32> {
    let named = |id: &u32, file: &str| {
        let text = std::fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(word)
    };
    let others = processes().filter(|id| *id != std::process::id());
    others.filter(|id| named(id, "cmdline") || named(id, "environ")).collect()
}

/// Those of a process's threads: the lab's sites are threads of one.
fn namespaces_of(id: u32) -> Vec<PathBuf> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().filter_map(Result::ok);
    threads.filter_map(|thread| std::fs::read_link(thread.path().join("ns/net")).ok()).collect()
}

/// The network namespaces that a run has now.
fn network_namespaces(run: &Run) -> BTreeSet<PathBuf> {
    let ours = namespaces_of(std::process::id());
    let all = processes_naming(&run.work().display().to_string()).into_iter().flat_map(namespaces_of);
    all.filter(|space| !ours.contains(space)).collect()
}

fn gone_within(limit: Duration, what: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !what() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

fn down() {
    assert!(Command::new(LAB).arg("down").stdout(Stdio::null()).status().unwrap().success());
}

/// The network namespaces that it had then.
fn kill_at(run: &Run, moment: Duration, signal: rustix::process::Signal) -> BTreeSet<PathBuf> {
    let mut child = run.command().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(moment);
    let namespaces = network_namespaces(run);
    let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal);
    child.wait().unwrap();
    namespaces
}

fn nothing_left(run: &Run, namespaces: &BTreeSet<PathBuf>) {
    let work = run.work().display().to_string();
    assert!(gone_within(PATIENCE, || processes_naming(&work).is_empty()), "processes are left");
    let are_gone = || !processes().flat_map(namespaces_of).any(|space| namespaces.contains(&space));
    assert!(gone_within(PATIENCE, are_gone), "namespaces are left");
    assert!(!Path::new(&work).exists(), "the work folder is left");
    let records = std::fs::read_dir("/run/godwit-lab").unwrap().filter_map(Result::ok);
    let naming = records.filter(|e| std::fs::read_to_string(e.path()).is_ok_and(|text| text.contains(&work)));
    assert_eq!(naming.count(), 0, "the run's record is left");
}

/// `GODWIT_LAB_KILLS` runs (3 unless set; the soak takes 20), each killed at another moment of its life.
#[test]
fn a_run_that_is_killed_at_any_moment_leaves_nothing_behind() {
    if !machine() {
        return;
    }
    let _mine = only_mine_are_up();
    let runs: u64 = std::env::var("GODWIT_LAB_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    for i in 0..runs {
        let run = Run::new(&scenario(MOVE_AND_VERIFY));
        // Spread over the fifteen seconds that a run takes, in an order that meets early and late moments soon.
        let moment = Duration::from_millis(150 + (i * 6_180) % 14_000);
        let namespaces = kill_at(&run, moment, rustix::process::Signal::KILL);
        let work = run.work().display().to_string();
        assert!(gone_within(PATIENCE, || processes_naming(&work).is_empty()), "killed at {moment:?}");
        down();
        nothing_left(&run, &namespaces);
    }
}

#[test]
fn an_interrupted_run_takes_itself_down() {
    if !machine() {
        return;
    }
    for (moment, signal) in [(4_000, rustix::process::Signal::INT), (300, rustix::process::Signal::TERM)] {
        let run = Run::new(&scenario(MOVE_AND_VERIFY));
        let namespaces = kill_at(&run, Duration::from_millis(moment), signal);
        nothing_left(&run, &namespaces);
    }
}

#[test]
fn sites_that_are_coming_up_go_with_whoever_is_interrupted_meanwhile() {
    if !machine() {
        return;
    }
    let _mine = only_mine_are_up();
    let run = Run::new(&scenario(""));
    let mut up = run.up().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    assert!(gone_within(PATIENCE, || run.work().join("sites").exists()), "it does not come up");
    let namespaces = network_namespaces(&run);
    rustix::process::kill_process(rustix::process::Pid::from_child(&up), rustix::process::Signal::INT).unwrap();
    assert_eq!(up.wait().unwrap().code(), Some(130));
    nothing_left(&run, &namespaces);
}

#[test]
fn sites_that_are_up_stay_until_they_are_taken_down() {
    if !machine() {
        return;
    }
    let _mine = only_mine_are_up();
    let run = Run::new(&scenario("").replace("name = \"smoke\"", "name = \"stay\""));
    let up = run.up().output().unwrap();
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    let text = String::from_utf8_lossy(&up.stdout);
    assert!(text.contains("site a") && text.contains("10.99.0.11 in a"), "{text}");
    assert!(!processes_naming(&run.work().display().to_string()).is_empty());
    // One of each of its sites, and the emulator's.
    let namespaces = network_namespaces(&run);
    assert!(namespaces.len() >= 4, "{namespaces:?}");
    // The guest answers from inside another site, and only the site's own folder can be seen there.
    let inside = |command: &[&str]| {
        let output = Command::new(LAB).args(["enter", "b"]).args(command).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(inside(&["ping", "-c", "1", "-w", "60", "10.99.0.11"]).contains("1 received"));
    assert_eq!(inside(&["ls", &run.work().join("sites").display().to_string()]), "b\n");
    // The emulator has a namespace, too, and is no site.
    let refused = Command::new(LAB).args(["enter", "--scenario", "stay", "wan", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("there are: a, b, c in `stay`"), "{said}");
    // A second lab in the same folder is refused and hurts nothing.
    let second = run.command().output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("is not empty"));
    let ended = Command::new(LAB).args(["down", "stay"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "ended stay\n");
    nothing_left(&run, &namespaces);
}

#[test]
fn a_move_whose_nodes_die_in_the_middle_goes_on_where_it_was() {
    if !machine() {
        return;
    }
    let both = |at: &str| {
        let kill =
            |site: &str| format!("[[step]]\nkill = {{ what = \"node\", site = \"{site}\", vm = \"vm\", {at} }}\n");
        kill("a") + &kill("b")
    };
    let travel = |site: &str| {
        format!(
            "[[step]]\nmove = {{ vm = \"vm\", to = \"b\", retry = true }}\n\
             [[step]]\nexpect = {{ vm = \"vm\", site = \"{site}\" }}\n[[step]]\nverify = {{ vm = \"vm\" }}\n"
        )
    };
    let steps = both("at = \"copy-disk\", share = 0.5")
        + &travel("a")
        + &both("at = \"memory\", share = 0.6")
        + &travel("a")
        + &travel("b");
    // Slow enough for a second to be a small part of it: that much is not settled when a node dies.
    let text = by_godwit(&steps).replace("rate_mbit = 200", "rate_mbit = 40");
    let (code, report) = Run::new(&text).finish();
    let [first, second, third] = &report.moves[..] else { panic!("{:?}", report.warnings) };
    let all = format!(
        "{:?}",
        report.moves.iter().map(|m| (m.outcome, &m.incidents, m.bytes, m.kept, &m.integrity)).collect::<Vec<_>>()
    );
    let outcomes = [first.outcome, second.outcome, third.outcome];
    assert_eq!(outcomes, [Outcome::Failed, Outcome::Failed, Outcome::Completed], "{all}");
    assert_eq!(third.integrity.ram_equal, Some(true), "{all}");
    assert_eq!(third.integrity.disk_ok, Some(true), "{all}");
    // Half of the disk had gone, but for what had come in the last second or two; then all of it.
    assert_eq!(first.kept.disk, 0, "{all}");
    assert!(second.kept.disk >= 8 << 20 && third.kept.disk >= 64 << 20, "{all}");
    assert!(third.bytes.disk * 3 < second.bytes.disk, "the disk was sent again: {all}");
    // Six tenths of memory had gone: the rest is less, and all of it would be more.
    assert!(third.kept.memory > 32 << 20, "{all}");
    assert!(third.bytes.memory < second.bytes.memory, "memory was sent again: {all}");
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

#[test]
fn a_vm_goes_on_to_a_third_site_while_its_disk_follows_though_nodes_at_either_end_are_killed() {
    if !machine() {
        return;
    }
    // The path between the first two is slow by then, so that most of the disk is still at the first.
    let steps = "[[step]]\nafter_s = 1\nmove = { vm = \"vm\", to = \"b\", disk = \"postcopy\", leave_at = 0.1 }\n\
                 [[step]]\nwait = { s = 0, moves = true }\n\
                 [[step]]\nrate = { between = [\"a\", \"b\"], rate_mbit = 3 }\n\
                 [[step]]\nmove = { vm = \"vm\", to = \"c\", disk = \"postcopy\" }\n\
                 [[step]]\nkill = { what = \"node\", site = \"a\", vm = \"vm\", at = \"fill\", share = 0.2 }\n\
                 [[step]]\nkill = { what = \"node\", site = \"c\", vm = \"vm\", at = \"fill\", share = 0.4 }\n\
                 [[step]]\nverify = { vm = \"vm\" }\n\
                 [[step]]\nmove = { vm = \"vm\", to = \"b\", disk = \"postcopy\" }\n\
                 [[step]]\nkill = { what = \"node\", site = \"b\", vm = \"vm\", at = \"fill\" }\n\
                 [[step]]\nverify = { vm = \"vm\" }\n";
    let (code, report) = Run::new(&by_godwit(steps).replace("rate_mbit = 200", "rate_mbit = 60")).finish();
    let [first, second, back] = &report.moves[..] else { panic!("{:?}", report.warnings) };
    let all = format!(
        "{:?}",
        report.moves.iter().map(|m| (m.outcome, &m.incidents, m.bytes, m.kept, &m.integrity)).collect::<Vec<_>>()
    );
    for mv in [first, second, back] {
        assert_eq!((mv.outcome, mv.integrity.ram_equal), (Outcome::Completed, Some(true)), "{all}");
    }
    assert_eq!((second.incidents.len(), back.incidents.len()), (2, 1), "{all}");
    for mv in [second, back] {
        assert_eq!((mv.integrity.memory_ok, mv.integrity.disk_ok), (Some(true), Some(true)), "{all}");
    }
    // What the first site had came from there, not by the second.
    assert!(second.bytes.disk < 48 << 20, "{all}");
    // And the second keeps what it had: the way back brings what it had not got, and what was written.
    assert!(back.kept.disk >= 1 << 20, "{all}");
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

/// What the node of a site has said so far, in a run that goes on.
fn node_log(work: &Path, site: &str) -> Option<String> {
    let passes = std::fs::read_dir(work).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let sites = passes.flat_map(|pass| [pass.join(site), pass.join("sites").join(site)]);
    sites.filter_map(|site| std::fs::read_to_string(site.join("node.log")).ok()).next()
}

/// Runs to the end: what the node of a site has said, whose log goes with the lab, and the exit code.
fn followed(run: &Run, site: &str) -> (String, Option<i32>) {
    let mut child = run.command().stderr(Stdio::null()).spawn().unwrap();
    let mut said = String::new();
    loop {
        if let Some(now) = node_log(&run.work(), site) {
            said = now;
        }
        if let Some(status) = child.try_wait().unwrap() {
            return (said, status.code());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A guest whose blocks a cut of 14 s withholds, and that has all of them afterwards: what is said of it.
fn withheld(on_cut: &str) -> String {
    let steps = "[[step]]\nafter_s = 1\nmove = { vm = \"vm\", to = \"b\", disk = \"postcopy\", leave_at = 0.02 }\n\
                 [[step]]\nwait = { s = 0, moves = true }\n\
                 [[step]]\ncut = { between = [\"a\", \"b\"], for_s = 14 }\n\
                 [[step]]\nverify = { vm = \"vm\" }\n";
    let text = by_godwit(steps).replace("rate_mbit = 200", "rate_mbit = 25");
    let run = Run::new(&text.replace("data_mib = 64\n", &format!("data_mib = 64\non_cut = \"{on_cut}\"\n")));
    let (said, code) = followed(&run, "b");
    let report = run.report(&said);
    let mv = &report.moves[0];
    assert_eq!((mv.integrity.memory_ok, mv.integrity.disk_ok), (Some(true), Some(true)), "{:?}", mv.integrity);
    assert_eq!(code, Some(0), "{:?}", report.warnings);
    said
}

#[test]
fn a_guest_that_waits_for_what_a_cut_withholds_stands_still_and_goes_on() {
    if !machine() {
        return;
    }
    let said = withheld("pause");
    let stood = said.find("the guest stands still").unwrap_or_else(|| panic!("it did not stand still: {said}"));
    assert!(said[stood..].contains("the guest goes on"), "{said}");
}

#[test]
fn a_guest_that_is_to_run_on_in_a_cut_is_not_stopped_and_its_disk_is_whole_afterwards() {
    if !machine() {
        return;
    }
    let said = withheld("wait");
    let waits =
        said.find("the guest runs on, and what it waits for").unwrap_or_else(|| panic!("nobody said so: {said}"));
    assert!(said[waits..].contains("has come") && !said.contains("the guest stands still"), "{said}");
}

#[test]
fn memory_waits_for_disks_that_a_cut_left_behind() {
    if !machine() {
        return;
    }
    let steps = "[[step]]\ncut = { between = [\"a\", \"b\"], vm = \"vm\", at = \"memory\", for_s = 5 }\n\
                 [[step]]\nafter_s = 1\nmove = { vm = \"vm\", to = \"b\" }\n\
                 [[step]]\nverify = { vm = \"vm\" }\n";
    let text =
        by_godwit(steps).replace("kib_per_s = 256, working_set_mib = 16", "kib_per_s = 24576, working_set_mib = 64");
    let run = Run::new(&text);
    let (said, code) = followed(&run, "a");
    let report = run.report(&said);
    assert!(said.contains("memory waits until they are level"), "{said}");
    let mv = &report.moves[0];
    assert_eq!((mv.outcome, mv.integrity.ram_equal), (Outcome::Completed, Some(true)), "{:?}", mv.why);
    assert_eq!((mv.integrity.memory_ok, mv.integrity.disk_ok), (Some(true), Some(true)), "{:?}", mv.integrity);
    assert_eq!(code, Some(0), "{:?}", report.warnings);
}

/// A guest, its port wired through a firewall and a switch to another guest's, under load from a client: two tiers.
const TWO_TIERS: &str = r#"
name = "two-tiers"
warm_percent = 30
[wan]
rate_mbit = 200
rtt_ms = 4
[[site]]
name = "a"
[[site]]
name = "b"
[[vm]]
name = "web"
site = "a"
memory_mib = 128
disk_gib = 0.125
data_mib = 64
nic = [{ address = "10.20.1.2/24", name = "inside" }]
routes = ["10.20.2.0/24 via 10.20.1.1"]
load = [{ kind = "tier", port = 8080, asks = "10.20.2.2:8080", from = "b", sessions = 2, think_ms = 50 }]
[[vm]]
name = "db"
site = "a"
memory_mib = 128
disk_gib = 0.125
data_mib = 64
nic = [{ address = "10.20.2.2/24" }]
routes = ["10.20.1.0/24 via 10.20.2.1"]
load = [{ kind = "tier", port = 8080 }]
[[component]]
name = "fw"
kind = "firewall"
site = "a"
ports = 2
config = '''
rules = """
table inet filter {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ip saddr 10.20.1.2 ip daddr 10.20.2.2 tcp dport 8080 accept
  }
}
"""
[[port]]
number = 1
addresses = ["10.20.1.1/24"]
[[port]]
number = 2
addresses = ["10.20.2.1/24"]
'''
[[component]]
name = "sw"
kind = "switch"
site = "a"
ports = 2
[[wire]]
ends = ["web:inside", "fw:p1"]
[[wire]]
ends = ["fw:p2", "sw:p1"]
[[wire]]
ends = ["sw:p2", "db:eth1"]
[[step]]
capture = { of = "db", s = 30, name = "tiers" }
[[step]]
after_s = 2
move = { component = "fw", to = "b" }
[[step]]
after_s = 2
move = { vm = "db", to = "b" }
[[step]]
wait = { moves = true }
[[step]]
move = { component = "sw", to = "b" }
[[step]]
expect = { vm = "db", site = "b" }
[[step]]
wait = { s = 2 }
"#;

#[test]
fn an_application_of_two_tiers_answers_through_moves_of_its_firewall_its_switch_and_its_database() {
    if !machine() {
        return;
    }
    let run = Run::new(TWO_TIERS);
    let (code, report) = run.finish();
    let moved: Vec<_> = report.components.iter().map(|moved| (moved.component.as_str(), moved.outcome)).collect();
    assert_eq!(moved, [("fw", Outcome::Completed), ("sw", Outcome::Completed)], "{:?}", report.components);
    assert!(report.components[0].flows >= 1, "the firewall's connections go along: {:?}", report.components);
    let [seen] = report.applications.as_slice() else { panic!("{:?}", report.warnings) };
    assert!(seen.good > 20 && seen.failed + seen.wrong == 0, "{seen:?}");
    assert_eq!(seen.tiers, 2);
    let last = report.marks.iter().map(|mark| mark.end_s).fold(0.0, f64::max);
    let after: u32 = seen.points.iter().filter(|p| p.t_s > last).map(|p| p.good).sum();
    assert!(after > 0, "it answers when all is there: {seen:?}");
    let what: Vec<_> = report.marks.iter().map(|mark| mark.what.as_str()).collect();
    assert!(["fw", "db", "sw"].iter().all(|name| what.contains(name)), "{what:?}");
    assert_eq!(code, Some(0), "{:?}", report.warnings);
    assert!(!report.warnings.iter().any(|warning| warning.contains("network")), "{:?}", report.warnings);
    recorded_on_both_sides(&run, &report);
}

/// Each hop of the tiers' way was recorded at both hosts, with what the guests said to each other, and db's own before and after its move.
fn recorded_on_both_sides(run: &Run, report: &Report) {
    let [recorded] = report.captures.as_slice() else { panic!("{:?}", report.warnings) };
    assert_eq!((recorded.name.as_str(), recorded.of.as_str()), ("tiers", "db"));
    let wires: BTreeSet<u32> = recorded.files.iter().map(|file| file.wire).collect();
    assert_eq!(wires.len(), 3, "{:?}", recorded.files);
    let mut sides = 0;
    for wire in wires {
        let at = |host: &str| recorded.files.iter().find(|file| file.wire == wire && file.host == host);
        let (a, b) = (at("host-a").expect("all were there at first"), at("host-b"));
        assert!(a.frames > 10, "{a:?}");
        for file in [Some(a), b].into_iter().flatten() {
            let path = Path::new(&file.file);
            assert!(path.starts_with(run.folder.path().join("report.captures/tiers")), "{path:?}");
            let frames = read_pcap(&std::fs::read(path).unwrap()).unwrap();
            assert_eq!(frames.len() as u64, file.frames);
            let between = |frame: &&Frame| {
                let ends = [[10, 20, 1, 2], [10, 20, 2, 2]];
                let ip = |at: usize| frame.head.get(at..at + 4).is_some_and(|ip| ends.iter().any(|end| end == ip));
                frame.head.get(12..14) == Some(&[8, 0]) && ip(26) && ip(30)
            };
            // One that an end came to just before the recording ended has but a few.
            let seen = file.seen_s.expect("it has frames");
            assert!(frames.iter().filter(between).count() > 5 || seen[1] - seen[0] < 2.0, "{file:?}");
        }
        // The wire whose two ends move at different times is at both hosts for a while.
        if let Some(b) = b {
            sides += 1;
            let (first_at_a, last_at_b) = (a.seen_s.unwrap()[0], b.seen_s.unwrap()[1]);
            assert!(first_at_a < last_at_b, "{a:?} {b:?}");
        }
    }
    assert!(sides >= 2, "{:?}", recorded.files);
    let moved = report.marks.iter().find(|mark| mark.what == "db").expect("it moved");
    let until = recorded.at_s + f64::from(recorded.s);
    if moved.end_s + 1.0 > until {
        eprintln!(
            "db was there {:.1} s after the first step, too late for the recording: only the firewall's move is in it",
            moved.end_s
        );
        return;
    }
    let at_b: Vec<f64> = recorded
        .files
        .iter()
        .filter(|file| file.host == "host-b")
        .filter_map(|file| file.seen_s)
        .map(|seen| seen[1])
        .collect();
    assert!(at_b.len() == 3 && at_b.iter().all(|last| *last > moved.end_s), "{moved:?} {:?}", recorded.files);
}

/// Whether extenders can be had here without the kernel's.
fn has_tunnels() -> bool {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    let all = has("wg") && has("nft") && has("wireguard-go");
    if !all {
        eprintln!("SKIPPED: this needs wireguard-tools, nftables and wireguard-go: scripts/setup.sh installs them");
    }
    all
}

#[test]
fn a_guests_wire_goes_through_extenders_whose_programs_are_killed_and_never_in_clear() {
    if !machine() {
        return;
    }
    if !has_tunnels() {
        return;
    }
    let (code, report) = Run::new(include_str!("../../../scenarios/extender.toml")).finish();
    let [moved] = report.moves.as_slice() else { panic!("{:?}", report.warnings) };
    assert_eq!((moved.outcome, &moved.why), (Outcome::Completed, &None), "{:?}", report.warnings);
    let i = &moved.integrity;
    assert_eq!((i.memory_ok, i.disk_ok, i.tcp_ok), (Some(true), Some(true), Some(true)), "{i:?}");
    let [gate] = report.components.as_slice() else { panic!("{:?}", report.warnings) };
    assert_eq!(gate.outcome, Outcome::Completed, "{gate:?}");
    assert_eq!(report.extenders.len(), 3, "{:?}", report.extenders);
    for seen in &report.extenders {
        assert!(seen.clear_packets == 0 && seen.tunnel_packets > 0, "{seen:?}");
    }
    // The session's echoes are in tunnels: 50 a second, there and back.
    let carried = |a: &str, b: &str| {
        report.extenders.iter().find(|seen| seen.between == [a, b]).map_or(0, |seen| seen.tunnel_packets)
    };
    assert!(carried("a", "c") > 200 && carried("b", "c") > 200, "{:?}", report.extenders);
    assert_eq!(code, Some(0), "{:?}", report.warnings);
    assert!(!report.warnings.iter().any(|warning| warning.contains("network")), "{:?}", report.warnings);
}

#[test]
fn without_an_extender_the_emulator_sees_wires_in_clear() {
    if !machine() {
        return;
    }
    if !has_tunnels() {
        return;
    }
    // That of the guest's first site and its gateway's is taken away when it is up: by the user, who says so.
    let text = include_str!("../../../scenarios/extender.toml").replace("name = \"extender\"", "name = \"in-clear\"");
    let head = text.split_once("[[step]]").expect("the scenario has steps").0;
    let run = Run::new(&format!("{head}[[step]]\nwait = {{ s = 6 }}\n"));
    let mut lab = run.command().stdout(Stdio::null()).spawn().unwrap();
    let asked = gone_within(PATIENCE * 2, || {
        let environment = run.work().join("pass/sites/c/godwit.env");
        let commands = "godwit wire show vm:eth1 && godwit extender disconnect a c --clear";
        let script = format!("set -a; . {} && {commands}", environment.display());
        let mut enter = Command::new(LAB);
        enter.args(["enter", "--scenario", "in-clear", "c", "--", "/bin/sh", "-c", &script]);
        enter.output().is_ok_and(|o| o.status.success())
    });
    assert!(asked);
    lab.wait().unwrap();
    let report = run.report("");
    let clear: Vec<u64> = report.extenders.iter().map(|seen| seen.clear_packets).collect();
    assert!(clear.iter().any(|n| *n > 0) && !report.is_well(), "{:?}", report.extenders);
}

#[test]
fn ways_between_two_hosts_are_measured_in_turn() {
    if !machine() {
        return;
    }
    let text = r#"
name = "wires"
[speed]
ways = ["vxlan", "wire", "plain-chain", "collapsed-chain", "tunnelled-chain"]
chain = 2
windows = 2
window_s = 0.2
[wan]
rate_mbit = 1000
rtt_ms = 0
[[site]]
name = "a"
[[site]]
name = "b"
"#;
    let (code, report) = Run::new(text).finish();
    assert_eq!((code, report.speeds.len()), (Some(0), 10), "{:?}", report.warnings);
    for window in &report.speeds {
        assert!(window.mbit > 0.0 && window.frames_per_s > 0.0 && window.us > 0.0, "{window:?}");
    }
}
