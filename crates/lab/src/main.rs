//! `godwit-lab`: runs scenarios of moves and measures them.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use godwit_lab::capture;
use godwit_lab::ledger::{self, Entry, Key, Ledger};
use godwit_lab::papers::{Document, Drawing, Extent, Paper};
use godwit_lab::pass::Pass;
use godwit_lab::progress::Progress;
use godwit_lab::recording;
use godwit_lab::report::Report;
use godwit_lab::sandbox::{self, Sandbox, WorkFolder};
use godwit_lab::scenario::{Action, Scenario};
use godwit_lab::sweep::{self, Cell, SweepFile};
use godwit_lab::{plot, replays, run, table};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Sites, a WAN and real guests on one machine: move VMs between them and measure it.
///
/// Needs root. Everything that a run makes lives in namespaces of its own and in its work folder, and goes with it.
#[derive(Parser)]
#[command(name = "godwit-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a scenario and write its report.
    Run(RunArgs),
    /// Bring a scenario's sites and guests up and leave them running, without making its steps.
    Up(UpArgs),
    /// End what `up` left running, and remove what killed runs left behind.
    Down {
        /// Only the run of this scenario (its `name`).
        scenario: Option<String>,
    },
    /// Run a command inside a site of a running lab: its network, its view of the files.
    Enter {
        /// The site.
        site: String,
        /// Which lab, by its scenario's `name`, where several that run have such a site.
        #[arg(long)]
        scenario: Option<String>,
        /// The command. Default: a shell.
        #[arg(trailing_var_arg = true, default_value = "bash")]
        command: Vec<std::ffi::OsString>,
    },
    /// Check a scenario file; says what is wrong, with line and key.
    Check {
        /// The scenario (TOML).
        scenario: PathBuf,
    },
    /// Draw a report as a self-contained HTML page.
    Plot {
        /// The report (JSON).
        report: PathBuf,
        /// Where to write the page. Default: beside the report, as `.html`.
        #[arg(long, short)]
        output: Option<PathBuf>,
        /// Also draw what the guests' own disks and work did through the moves, in this folder: REPORT-1.svg and so on.
        #[arg(long, value_name = "DIR")]
        drawings: Option<PathBuf>,
    },
    /// Record each guest's migration stream, and its disks at the stop, for `godwit stream`.
    Capture(CaptureArgs),
    /// Try moves on guests that were recorded with `capture --memory-s`: CloudNet's tables and figures.
    Replay(ReplayArgs),
    /// Measure a paper's tables and figures; goes on where an earlier run of it stopped.
    Figures(FiguresArgs),
    /// Run a scenario over a matrix of links and baselines; goes on where an earlier run of it stopped.
    Sweep(SweepArgs),
    #[command(name = "__init", hide = true)]
    Init { config: PathBuf },
    #[command(name = "__engine", hide = true)]
    Engine { config: PathBuf },
}

#[derive(Args)]
struct RunArgs {
    /// The scenario (TOML).
    scenario: PathBuf,
    /// Where to write the report (JSON); `-` is standard output.
    #[arg(long)]
    report: PathBuf,
    /// Draw the report too, as an HTML page.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Folder for disks and logs: empty or not yet there; removed at the end. Default: a fresh one below /var/tmp.
    #[arg(long)]
    work: Option<PathBuf>,
}

#[derive(Args)]
struct ReplayArgs {
    /// The recordings, NAME.ram.zst.
    #[arg(required = true)]
    recordings: Vec<PathBuf>,
    /// Folder for tables (text, Markdown, JSON, HTML) and drawings (SVG).
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Args)]
struct CaptureArgs {
    /// The scenario (TOML); its steps are not made.
    scenario: PathBuf,
    /// Folder to record into: empty or not yet there. For each guest NAME.stream, NAME.disk0.raw, NAME.json.
    #[arg(long)]
    out: PathBuf,
    /// How long the loads go on before the recording begins, in seconds.
    #[arg(long, default_value_t = 5)]
    after_s: u64,
    /// For how many seconds to record memory with its contents, too, for `replay`: NAME.ram.zst.
    #[arg(long, default_value_t = 0)]
    memory_s: u64,
    /// Folder for disks and logs: empty or not yet there; removed at the end. Default: a fresh one below /var/tmp.
    #[arg(long)]
    work: Option<PathBuf>,
}

#[derive(Args)]
struct UpArgs {
    /// The scenario (TOML).
    scenario: PathBuf,
    /// Folder for disks and logs: empty or not yet there; removed at the end. Default: a fresh one below /var/tmp.
    #[arg(long)]
    work: Option<PathBuf>,
    /// Stay in the foreground until ^C.
    #[arg(long)]
    foreground: bool,
}

#[derive(Args)]
struct SweepArgs {
    /// The sweep (TOML): `scenario`, `rate_mbit`, `rtt_ms`, `baseline`, `repeat`.
    sweep: PathBuf,
    /// Ledger of results (JSON lines), appended to; what it has already is not run again.
    #[arg(long)]
    ledger: PathBuf,
    /// The version that results belong to. Default: `git rev-parse HEAD` of the current folder.
    #[arg(long)]
    commit: Option<String>,
    /// Only print the table of what the ledger has.
    #[arg(long)]
    table: bool,
}

#[derive(Args)]
struct FiguresArgs {
    /// Which.
    #[arg(value_enum)]
    paper: Paper,
    /// Ledger of results (JSON lines), appended to; what it has already is not run again.
    #[arg(long, default_value = "figures.jsonl")]
    ledger: PathBuf,
    /// The version that results belong to. Default: `git rev-parse HEAD` of the current folder.
    #[arg(long)]
    commit: Option<String>,
    /// Only the runs that show most.
    #[arg(long)]
    quick: bool,
    /// Only runs whose name has this in it, or one of these; may be repeated.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// Folder for the tables (text, Markdown, JSON, HTML), the drawings (SVG) and each run's own report and page.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only say which runs there are, and which of them are done.
    #[arg(long)]
    list: bool,
    /// Write each run's scenario into this folder, for `godwit-lab run`, and run nothing.
    #[arg(long, value_name = "DIR")]
    scenarios: Option<PathBuf>,
    /// Only make the tables of what the ledger has.
    #[arg(long)]
    table: bool,
}

impl FiguresArgs {
    /// Whether a run of this name is meant.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// What the engine inside the sandbox is told.
#[derive(Serialize, Deserialize)]
struct EngineConfig {
    scenario_text: String,
    scenario_path: String,
    /// One cell of a sweep, by name.
    cell: Option<String>,
    work: PathBuf,
    /// Where the engine leaves the report; none for `up`.
    report: Option<PathBuf>,
    /// Where the engine says that all is up; only for `up`.
    ready: Option<PathBuf>,
    /// Where the engine records guests, and what of them; only for `capture`.
    #[serde(default)]
    capture: Option<(PathBuf, capture::Wanted)>,
}

fn main() -> ExitCode {
    match real_main() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("godwit-lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn real_main() -> Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(args) => run_command(&args),
        Command::Up(args) => up_command(&args),
        Command::Down { scenario } => {
            let ended = sandbox::down(scenario.as_deref())?;
            match ended.as_slice() {
                [] => println!("nothing was up"),
                names => names.iter().for_each(|n| println!("ended {n}")),
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Enter { site, scenario, command } => match sandbox::enter(&site, scenario.as_deref(), &command)? {},
        Command::Check { scenario } => {
            let checked = Scenario::load(&scenario)?;
            println!(
                "{}: {} sites, {} VMs, {} components, {} wires, {} extenders, {} steps; fine",
                checked.name.get_ref(),
                checked.site.len(),
                checked.vm.len(),
                checked.component.len(),
                checked.wire.len(),
                checked.extender.len(),
                checked.step.len()
            );
            Ok(ExitCode::SUCCESS)
        }
        Command::Plot { report: from, output, drawings } => {
            let output = output.unwrap_or_else(|| from.with_extension("html"));
            let report = read_report(&from)?;
            write_atomically(&output, plot::render_html(&report).as_bytes())?;
            println!("{}", output.display());
            if let Some(folder) = drawings {
                let name = from.file_stem().unwrap_or_default().to_string_lossy();
                let drawn = plot::guest_io_drawings(&name, &report);
                if drawn.is_empty() {
                    eprintln!("godwit-lab: nothing is known of the guests' disks and work");
                }
                for drawing in &drawn {
                    println!("{}", write_drawing(&folder, drawing)?.display());
                }
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Capture(args) => capture_command(&args),
        Command::Replay(args) => replay_command(&args),
        Command::Sweep(args) => sweep_command(&args),
        Command::Figures(args) => figures_command(&args),
        Command::Init { config } => match sandbox::run_init(&config)? {},
        Command::Engine { config } => engine(&config),
    }
}

fn read_report(path: &Path) -> Result<Report> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a report of godwit-lab", path.display()))
}

/// Writes beside the target and renames, so that nobody ever sees half a file.
fn write_atomically(target: &Path, body: &[u8]) -> Result<()> {
    let mut name = target.file_name().context("a file name is needed")?.to_owned();
    name.push(".new");
    let fresh = target.with_file_name(name);
    let context = || format!("cannot write {}", target.display());
    if let Some(folder) = target.parent().filter(|f| !f.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(context)?;
    }
    std::fs::write(&fresh, body).with_context(context)?;
    std::fs::rename(&fresh, target).with_context(context)
}

/// Set by SIGINT, SIGTERM and SIGHUP.
fn told_to_stop() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).context("cannot listen for signals")?;
    }
    Ok(stop)
}

/// Runs one scenario in a sandbox of its own; `None` when it was told to stop. What it recorded goes to `keep`, or with the run.
fn run_sandboxed(
    text: &str,
    path: &str,
    cell: Option<&Cell>,
    work: Option<&Path>,
    keep: Option<&Path>,
    stop: &AtomicBool,
) -> Result<Option<Report>> {
    let scenario = Scenario::parse(text, path)?;
    let folder = WorkFolder::create(work, scenario.name.get_ref(), false)?;
    let report = folder.path().join("report.json");
    let engine = EngineConfig {
        scenario_text: text.to_owned(),
        scenario_path: path.to_owned(),
        cell: cell.map(Cell::name),
        work: folder.path().to_owned(),
        report: Some(report.clone()),
        ready: None,
        capture: None,
    };
    let mut sandbox = start(&engine)?;
    match ended(&mut sandbox, stop)? {
        None => Ok(None),
        Some(status) if status.success() => {
            let mut report = read_report(&report)?;
            take_recordings(&mut report, &folder.path().join(recording::FOLDER), keep)?;
            Ok(Some(report))
        }
        Some(_) => bail!("the run failed; what it said stands above"),
    }
}

/// Moves recordings of frames out of the work folder, and has the report name them where they are then; without a folder for them it names
/// none.
fn take_recordings(report: &mut Report, from: &Path, to: Option<&Path>) -> Result<()> {
    let Some(to) = to else {
        report.captures.clear();
        return Ok(());
    };
    if !from.exists() {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    // Moved, or copied where the report is on another file system.
    let moved = std::process::Command::new("mv").args(["-T", "--"]).arg(from).arg(to).status();
    if !moved.is_ok_and(|status| status.success()) {
        bail!("cannot move the recordings from {} to {}", from.display(), to.display());
    }
    for file in report.captures.iter_mut().flat_map(|recorded| &mut recorded.files) {
        if let Ok(below) = Path::new(&file.file).strip_prefix(from) {
            file.file = to.join(below).display().to_string();
        }
    }
    Ok(())
}

/// Where a run's recordings go: beside its report. None: it has no step `capture`.
fn recordings_beside(report: &Path, scenario: &Scenario) -> Result<Option<PathBuf>> {
    if !scenario.step.iter().any(|step| matches!(step.action, Action::Capture(_))) {
        return Ok(None);
    }
    if report == Path::new("-") {
        bail!("the scenario has a step `capture`, whose files go beside the report: name a file with --report");
    }
    let folder = report.with_extension("captures");
    if folder.exists() {
        bail!("{} has the recordings of an earlier run: move or remove it", folder.display());
    }
    Ok(Some(std::path::absolute(folder)?))
}

/// Starts what a lab consists of.
fn start(engine: &EngineConfig) -> Result<Sandbox> {
    let config = engine.work.join("engine.json");
    std::fs::write(&config, serde_json::to_vec(engine)?)?;
    Sandbox::start(&config)
}

/// Waits for the lab's end; none: somebody has told us to stop.
fn ended(sandbox: &mut Sandbox, stop: &AtomicBool) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = sandbox.poll()? {
            return Ok(Some(status));
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn run_command(args: &RunArgs) -> Result<ExitCode> {
    let stop = told_to_stop()?;
    let text = std::fs::read_to_string(&args.scenario)
        .with_context(|| format!("cannot read the scenario {}", args.scenario.display()))?;
    let path = args.scenario.display().to_string();
    let keep = recordings_beside(&args.report, &Scenario::parse(&text, &path)?)?;
    let Some(report) = run_sandboxed(&text, &path, None, args.work.as_deref(), keep.as_deref(), &stop)? else {
        eprintln!("godwit-lab: told to stop; everything was taken down");
        return Ok(ExitCode::from(130));
    };
    let json = serde_json::to_vec_pretty(&report)?;
    if args.report == Path::new("-") {
        std::io::stdout().write_all(&json)?;
    } else {
        write_atomically(&args.report, &json)?;
        print!("{}", table::comparison(&report));
    }
    if let Some(page) = &args.plot {
        write_atomically(page, plot::render_html(&report).as_bytes())?;
    }
    if let Some(broken) = &report.broken {
        bail!("{broken}; the report has what had been measured until then");
    }
    // A guest that was hurt is the one thing that nobody may overlook.
    Ok(if report.is_well() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

fn capture_command(args: &CaptureArgs) -> Result<ExitCode> {
    let stop = told_to_stop()?;
    let text = std::fs::read_to_string(&args.scenario)
        .with_context(|| format!("cannot read the scenario {}", args.scenario.display()))?;
    let path = args.scenario.display().to_string();
    let scenario = Scenario::parse(&text, &path)?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    if std::fs::read_dir(&args.out)?.next().is_some() {
        bail!("{} is not empty", args.out.display());
    }
    let folder = WorkFolder::create(args.work.as_deref(), scenario.name.get_ref(), false)?;
    let recorded = folder.path().join("capture");
    let engine = EngineConfig {
        scenario_text: text,
        scenario_path: path,
        cell: None,
        work: folder.path().to_owned(),
        report: None,
        ready: None,
        capture: Some((recorded.clone(), capture::Wanted { after_s: args.after_s, memory_s: args.memory_s })),
    };
    let mut sandbox = start(&engine)?;
    let Some(status) = ended(&mut sandbox, &stop)? else {
        eprintln!("godwit-lab: told to stop; everything was taken down");
        return Ok(ExitCode::from(130));
    };
    if !status.success() {
        bail!("the recording failed; what it said stands above");
    }
    // Moved, or copied where DIR is on another file system; holes stay holes.
    for file in std::fs::read_dir(&recorded)? {
        let file = file?.path();
        let moved = std::process::Command::new("mv").arg(&file).arg(&args.out).status();
        if !moved.is_ok_and(|status| status.success()) {
            bail!("cannot move {} to {}", file.display(), args.out.display());
        }
        println!("{}", args.out.join(file.file_name().unwrap_or_default()).display());
    }
    Ok(ExitCode::SUCCESS)
}

fn up_command(args: &UpArgs) -> Result<ExitCode> {
    let text = std::fs::read_to_string(&args.scenario)
        .with_context(|| format!("cannot read the scenario {}", args.scenario.display()))?;
    let path = args.scenario.display().to_string();
    let scenario = Scenario::parse(&text, &path)?;
    if !args.foreground {
        return detach(args);
    }
    let stop = told_to_stop()?;
    let folder = WorkFolder::create(args.work.as_deref(), scenario.name.get_ref(), true)?;
    let ready = folder.path().join("ready");
    let engine = EngineConfig {
        scenario_text: text,
        scenario_path: path,
        cell: None,
        work: folder.path().to_owned(),
        report: None,
        ready: Some(ready),
        capture: None,
    };
    let mut sandbox = start(&engine)?;
    while !stop.load(Ordering::Relaxed) {
        if let Some(status) = sandbox.poll()? {
            bail!("the lab ended by itself ({status}); what it said stands above");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts `up --foreground` in a session of its own and waits until it says that all is up. Until then, whoever stops us stops it.
fn detach(args: &UpArgs) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    let stop = told_to_stop()?;
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg("up").arg("--foreground").arg(&args.scenario);
    if let Some(work) = &args.work {
        command.arg("--work").arg(work);
    }
    // Its own process group: the terminal's ^C is for whoever started it, not for what is to stay.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().context("cannot start the lab")?;
    // What it says is passed on, rather than letting it write itself: whoever reads our output waits for its end, and what
    // stays up would hold it open.
    let mut says = child.stderr.take().expect("stderr was asked for");
    let relay = std::thread::spawn(move || std::io::copy(&mut says, &mut std::io::stderr()));
    loop {
        if let Some(status) = child.try_wait()? {
            let _ = relay.join();
            bail!("the lab did not come up ({status}); what it said stands above");
        }
        let alive = sandbox::records()?.into_iter().filter(|f| f.alive).filter_map(|f| f.record);
        if let Some(record) = alive.into_iter().find(|r| r.supervisor == child.id())
            && let Ok(text) = std::fs::read_to_string(record.work.join("ready"))
        {
            print!("{text}");
            return Ok(ExitCode::SUCCESS);
        }
        if stop.load(Ordering::Relaxed) {
            // Its number is its own until it was waited for.
            kill_process(Pid::from_child(&child), Signal::TERM).context("cannot stop the lab that was coming up")?;
            child.wait()?;
            let _ = relay.join();
            eprintln!("godwit-lab: told to stop; everything was taken down");
            return Ok(ExitCode::from(130));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn engine(config: &Path) -> Result<ExitCode> {
    let config: EngineConfig =
        serde_json::from_slice(&std::fs::read(config)?).context("the engine's orders are not understood")?;
    let mut scenario = Scenario::parse(&config.scenario_text, &config.scenario_path)?;
    if let Some(name) = &config.cell {
        Cell::from_name(name).context("the sweep's cell is not understood")?.apply(&mut scenario);
    }
    let progress = Arc::new(Progress::default());
    if let Some(target) = &config.report {
        let report = run::run(&scenario, &config.work, &progress)?;
        write_atomically(target, &serde_json::to_vec(&report)?)?;
    }
    if let Some((target, wanted)) = &config.capture {
        let accel = run::accel(&config.work, &progress)?;
        capture::run(&scenario, &config.work, target, *wanted, accel, &progress)?;
    }
    if let Some(target) = &config.ready {
        run::hold(&scenario, &config.work, &progress, |pass| {
            let text = how_to_use(pass, scenario.name.get_ref());
            if let Err(e) = write_atomically(target, text.as_bytes()) {
                eprintln!("godwit-lab: {e:#}");
            }
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

fn how_to_use(pass: &Pass, name: &str) -> String {
    let mut text = format!("`{name}` is up.\n");
    for site in &pass.fabric().sites {
        text += &format!("  site {:<16} {}, clients speak from {}\n", site.name, site.underlay, site.client);
    }
    for vm in pass.vms() {
        let site = vm.site().unwrap_or_default();
        text += &format!("  VM   {:<16} {} in {site}\n", vm.name(), vm.address());
    }
    text += &format!("Look around: godwit-lab enter --scenario {name} SITE ip address\n");
    if let Some(installation) = pass.installation() {
        let home = &installation.home().name;
        text += &format!("Use Godwit:  godwit-lab enter --scenario {name} {home} -- godwit vm ls\n");
        if let (Some(vm), Some(to)) = (pass.vms().first(), pass.fabric().sites.get(1)) {
            text += &format!(
                "             godwit-lab enter --scenario {name} {home} -- godwit move {} --to {}\n",
                vm.name(),
                to.name
            );
        }
    }
    text + &format!("End it with: godwit-lab down {name}\n")
}

fn sweep_command(args: &SweepArgs) -> Result<ExitCode> {
    let stop = told_to_stop()?;
    let sweep = SweepFile::load(&args.sweep)?;
    let path = sweep.scenario.display().to_string();
    let text = std::fs::read_to_string(&sweep.scenario).with_context(|| format!("cannot read the scenario {path}"))?;
    let scenario = Scenario::parse(&text, &path)?.name.get_ref().clone();
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => current_commit(&args.ledger)?,
    };
    if args.table {
        let mut entries = ledger::read(&args.ledger)?;
        entries.retain(|e| e.key.scenario == scenario && e.key.commit == commit);
        print!("{}", sweep::table(&entries));
        return Ok(ExitCode::SUCCESS);
    }
    let mut ledger = Ledger::open(&args.ledger)?;
    if let Some(dropped) = ledger.dropped() {
        eprintln!("godwit-lab: the ledger's last line was cut short by a crash and was dropped: {dropped}");
    }
    let all = sweep.runs().count();
    let mut open = 0;
    for (number, (repeat, cell)) in sweep.runs().enumerate() {
        let key = Key { commit: commit.clone(), scenario: scenario.clone(), cell: cell.name(), repeat };
        if ledger.has(&key) {
            continue;
        }
        eprintln!("godwit-lab: {} of {all}: {}", number + 1, cell.name());
        let Some(report) = run_sandboxed(&text, &path, Some(&cell), None, None, &stop)? else {
            eprintln!("godwit-lab: told to stop; the ledger has what was finished, and the same command goes on");
            return Ok(ExitCode::from(130));
        };
        // A baseline that fails is a result; half a run is none.
        if let Some(broken) = &report.broken {
            eprintln!("godwit-lab: {}: {broken}", cell.name());
            open += 1;
            continue;
        }
        ledger.append(&Entry { key, at_unix_s: report.started_unix_s, report })?;
    }
    let mine: Vec<Entry> =
        ledger.entries().iter().filter(|e| e.key.scenario == scenario && e.key.commit == commit).cloned().collect();
    print!("{}", sweep::table(&mine));
    if open > 0 {
        bail!("{open} of {all} runs could not be made; the same command tries them again");
    }
    Ok(ExitCode::SUCCESS)
}

fn figures_command(args: &FiguresArgs) -> Result<ExitCode> {
    let extent = if args.quick { Extent::Quick } else { Extent::Full };
    let mut cells = args.paper.cells(extent);
    cells.retain(|cell| args.wants(&cell.name));
    if cells.is_empty() {
        bail!("no run of these has `{}` in its name; `--list` names them", args.only.join("` or `"));
    }
    if let Some(folder) = &args.scenarios {
        for cell in &cells {
            let file = folder.join(format!("{}.toml", cell.name));
            write_atomically(&file, cell.scenario.as_bytes())?;
            println!("{}", file.display());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let stop = told_to_stop()?;
    let scenario = format!("figures-{}", args.paper.name());
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => current_commit(&args.ledger)?,
    };
    let key = |cell: &str| Key { commit: commit.clone(), scenario: scenario.clone(), cell: cell.to_owned(), repeat: 0 };
    let mine = |entries: &[Entry]| -> Vec<Entry> {
        entries.iter().filter(|e| e.key.scenario == scenario && e.key.commit == commit).cloned().collect()
    };
    if args.list || args.table {
        let entries = if args.ledger.exists() { mine(&ledger::read(&args.ledger)?) } else { vec![] };
        if args.list {
            for cell in &cells {
                let done = entries.iter().any(|entry| entry.key.cell == cell.name);
                println!("{} {}", if done { "done" } else { "open" }, cell.name);
            }
            return Ok(ExitCode::SUCCESS);
        }
        return show_figures(args, &entries);
    }
    let mut ledger = Ledger::open(&args.ledger)?;
    if let Some(dropped) = ledger.dropped() {
        eprintln!("godwit-lab: the ledger's last line was cut short by a crash and was dropped: {dropped}");
    }
    let all = cells.len();
    let mut open = 0;
    for (number, cell) in cells.iter().enumerate() {
        if ledger.has(&key(&cell.name)) {
            continue;
        }
        eprintln!("godwit-lab: {} of {all}: {}", number + 1, cell.name);
        let report = match run_sandboxed(&cell.scenario, &cell.name, None, None, None, &stop) {
            Ok(Some(report)) => report,
            Ok(None) => {
                eprintln!("godwit-lab: told to stop; the ledger has what was finished, and the same command goes on");
                return Ok(ExitCode::from(130));
            }
            // The others are worth having; this one is tried again by the next command.
            Err(e) => {
                eprintln!("godwit-lab: {}: {e:#}", cell.name);
                open += 1;
                continue;
            }
        };
        if let Some(out) = &args.out {
            write_atomically(&out.join(format!("{}.json", cell.name)), &serde_json::to_vec_pretty(&report)?)?;
            write_atomically(&out.join(format!("{}.html", cell.name)), plot::render_html(&report).as_bytes())?;
        }
        if !report.is_well() {
            eprint!(
                "godwit-lab: {}: not all was well, and the ledger has nothing of it\n{}",
                cell.name,
                table::comparison(&report)
            );
            open += 1;
            continue;
        }
        ledger.append(&Entry { key: key(&cell.name), at_unix_s: report.started_unix_s, report })?;
        // So that an early end leaves a whole set of what there is.
        show_files(args, &mine(ledger.entries()))?;
    }
    let code = show_figures(args, &mine(ledger.entries()))?;
    if open > 0 {
        bail!("{open} of {all} runs could not be made, or were not well; the same command tries them again");
    }
    Ok(code)
}

fn show_files(args: &FiguresArgs, entries: &[Entry]) -> Result<()> {
    let Some(out) = &args.out else { return Ok(()) };
    write_document(out, args.paper.name(), &args.paper.document(entries))
}

fn write_document(out: &Path, name: &str, document: &Document) -> Result<()> {
    write_atomically(&out.join(format!("{name}.txt")), document.text().as_bytes())?;
    write_atomically(&out.join(format!("{name}.md")), document.markdown().as_bytes())?;
    write_atomically(&out.join(format!("{name}.json")), &serde_json::to_vec_pretty(&document.json())?)?;
    write_atomically(&out.join(format!("{name}.html")), document.html().as_bytes())?;
    document.drawings.iter().try_for_each(|drawing| write_drawing(out, drawing).map(drop))
}

/// Where it is then.
fn write_drawing(folder: &Path, drawing: &Drawing) -> Result<PathBuf> {
    let path = folder.join(format!("{}.svg", drawing.name));
    write_atomically(&path, drawing.svg().as_bytes())?;
    Ok(path)
}

fn replay_command(args: &ReplayArgs) -> Result<ExitCode> {
    let document = replays::run(&args.recordings, |said| eprintln!("godwit-lab: {said}"))?;
    if let Some(out) = &args.out {
        write_document(out, "cloudnet", &document)?;
    }
    print!("{}", document.text());
    Ok(ExitCode::SUCCESS)
}

fn show_figures(args: &FiguresArgs, entries: &[Entry]) -> Result<ExitCode> {
    show_files(args, entries)?;
    print!("{}", args.paper.document(entries).text());
    // As with a single run. Ledgers from before may have what was not well.
    let well = entries.iter().all(|entry| entry.report.is_well());
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// What the working tree stands for; results belong to a version, so a changed tree is marked. The ledger does not count: a
/// sweep that writes to it would else never find its own results again.
fn current_commit(ledger: &Path) -> Result<String> {
    let git = |args: &[&str]| -> Result<String> {
        let output = std::process::Command::new("git").args(args).output().context("cannot run git; give --commit")?;
        if !output.status.success() {
            bail!("this is no git checkout; say with --commit which version the results belong to");
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let top = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?);
    let mut look: Vec<String> =
        ["status", "--porcelain", "--untracked-files=no", "--", ":(top)"].map(str::to_owned).into();
    // Before the first run there is none yet, and then it is no change either.
    if let Ok(inside) = ledger.canonicalize().unwrap_or_default().strip_prefix(&top) {
        look.push(format!(":(top,exclude,literal){}", inside.display()));
    }
    let look: Vec<&str> = look.iter().map(String::as_str).collect();
    let changed = !git(&look)?.is_empty();
    Ok(if changed { commit + "-changed" } else { commit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_papers_runs_is_named_by_any_of_several_texts() {
        let wanted = |words: &str| -> Vec<&'static str> {
            let words = format!("godwit-lab figures predict {words}");
            let Command::Figures(args) = Cli::try_parse_from(words.split_whitespace()).unwrap().command else {
                panic!("other words")
            };
            let names = ["10mbit-qemu", "50mbit-qemu", "50mbit-godwit", "web"];
            names.into_iter().filter(|name| args.wants(name)).collect()
        };
        assert_eq!(wanted("").len(), 4);
        assert_eq!(wanted("--only 10mbit,web"), ["10mbit-qemu", "web"]);
        assert_eq!(wanted("--only godwit --only 10mbit"), ["10mbit-qemu", "50mbit-godwit"]);
        assert!(wanted("--only nothing").is_empty());
    }
}
