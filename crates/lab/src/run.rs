//! Runs a scenario: its moves by Godwit, and the same moves again by each baseline.
//!
//! Each of them (and each repeat) is a *pass*: fresh sites, fresh guests, the same steps. A pass that fails says why
//! and ends the run; what had been measured until then is in the report, with the reason.

use crate::guest::Accel;
use crate::pass::{Finished, Means, Pass};
use crate::progress::Progress;
use crate::qemu_move;
use crate::recording;
use crate::report::{BaselineReport, Host, Report, WanFigures};
use crate::scenario::Scenario;
use anyhow::{Result, anyhow, bail};
use std::path::Path;
use std::sync::Arc;

/// Runs all passes of a scenario in `work`.
///
/// # Errors
/// When there is nothing to begin with. A pass that cannot be built, a step that cannot be made or a move that fails is no error: the report
/// says so.
pub fn run(scenario: &Scenario, work: &Path, progress: &Arc<Progress>) -> Result<Report> {
    let means: Vec<_> = passes(scenario);
    if means.is_empty() {
        bail!(
            "scenario `{}` has `godwit = false` and names no baseline: nothing would move; add for example \
             baseline = [\"qemu\"]",
            scenario.name.get_ref()
        );
    }
    if scenario.godwit {
        // Now, and not after the guests have booted.
        crate::godwit::binary()?;
    }
    let accel = accel(work, progress)?;
    let mut report = Report {
        name: scenario.name.get_ref().clone(),
        started_unix_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        host: host(accel),
        wan: wan_figures(scenario),
        moves: vec![],
        baselines: vec![],
        warnings: vec![],
        broken: None,
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
    };
    if let Some(asked) = &scenario.speed {
        progress.title("speed:");
        report.speeds = crate::speed::run(scenario, asked.get_ref(), work, progress)?;
        return Ok(report);
    }
    for repeat in 0..scenario.repeat {
        for means in &means {
            let of =
                if scenario.repeat > 1 { format!(" ({} of {})", repeat + 1, scenario.repeat) } else { String::new() };
            progress.title(&format!("{means}{of}:"));
            if let Err(error) = make_pass(scenario, (*means, repeat), work, accel, progress, &mut report) {
                report.broken = Some(format!("{means}{of}: {error:#}"));
                return Ok(report);
            }
        }
    }
    Ok(report)
}

/// Makes a pass. What it brought is in the report, also when it did not come to its end.
fn make_pass(
    scenario: &Scenario,
    (means, repeat): (Means, u32),
    work: &Path,
    accel: Accel,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<()> {
    let folder = work.join("pass");
    std::fs::create_dir_all(&folder)?;
    let mut pass = Pass::build(scenario, means, &folder, accel, progress)?;
    pass.record_into(if scenario.repeat > 1 {
        work.join(recording::FOLDER).join((repeat + 1).to_string())
    } else {
        work.join(recording::FOLDER)
    });
    let script = pass.script();
    let Finished {
        moves,
        warnings,
        broken,
        mut windows,
        components,
        mut applications,
        mut marks,
        together,
        extenders,
        captures,
        profiles,
        incidents,
    } = pass.finish();
    let by = means.to_string();
    windows.iter_mut().for_each(|window| (window.by, window.repeat) = (by.clone(), repeat));
    applications.iter_mut().for_each(|seen| (seen.by, seen.repeat) = (by.clone(), repeat));
    marks.iter_mut().for_each(|mark| (mark.by, mark.repeat) = (by.clone(), repeat));
    report.windows.extend(windows);
    report.incidents.extend(incidents);
    report.together.extend(together);
    report.extenders.extend(extenders);
    report.captures.extend(captures);
    report.profiles.extend(profiles);
    report.components.extend(components);
    report.applications.extend(applications);
    report.marks.extend(marks);
    report.warnings.extend(warnings);
    match means {
        Means::Godwit => report.moves.extend(moves),
        Means::Baseline(kind) => report.baselines.extend(moves.into_iter().map(|figures| BaselineReport {
            name: kind,
            stop_rule: qemu_move::stop_rule(kind, *scenario.patience_rounds.get_ref()),
            figures,
        })),
    }
    // What broke first may be why a later step could not be made.
    broken.map_or(script, |why| Err(anyhow!(why)))?;
    Ok(std::fs::remove_dir_all(&folder)?)
}

/// What a scenario's moves are made by, in order: Godwit first.
fn passes(scenario: &Scenario) -> Vec<Means> {
    let godwit = scenario.godwit.then_some(Means::Godwit);
    godwit.into_iter().chain(scenario.baseline.iter().copied().map(Means::Baseline)).collect()
}

/// Builds a scenario's sites and guests, says so, and keeps them until the process is ended. No steps are made.
///
/// # Errors
/// When something cannot be built.
pub fn hold(scenario: &Scenario, work: &Path, progress: &Arc<Progress>, ready: impl FnOnce(&Pass)) -> Result<()> {
    progress.title("up:");
    // Without Godwit the guests are the lab's own, for which every baseline is the same until something moves.
    let means = if scenario.godwit { Means::Godwit } else { Means::Baseline(crate::scenario::Baseline::Qemu) };
    let pass = Pass::build(scenario, means, work, accel(work, progress)?, progress)?;
    ready(&pass);
    loop {
        std::thread::park();
    }
}

/// How guests are to be executed: `$GODWIT_LAB_ACCEL`, else KVM where a guest boots under it, which is tried in `work`, else TCG.
///
/// # Errors
/// When the variable says something else.
pub fn accel(work: &Path, progress: &Progress) -> Result<Accel> {
    match std::env::var("GODWIT_LAB_ACCEL").as_deref() {
        Ok("kvm") => Ok(Accel::Kvm),
        Ok("tcg") => Ok(Accel::Tcg),
        Ok(other) => bail!("GODWIT_LAB_ACCEL is `{other}`; it takes kvm or tcg"),
        Err(_) => {
            let usable = crate::kvm::usable(work, progress);
            if !usable {
                progress.note("no usable KVM here: guests run under TCG");
            }
            Ok(if usable { Accel::Kvm } else { Accel::Tcg })
        }
    }
}

fn host(accel: Accel) -> Host {
    let first_line = |program: &str, argument: &str| {
        let output = std::process::Command::new(program).arg(argument).output();
        output
            .ok()
            .and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(str::to_owned))
            .unwrap_or_default()
    };
    Host {
        kernel: first_line("uname", "-r"),
        qemu: first_line("qemu-system-x86_64", "--version"),
        accel: accel.to_string(),
        cpus: std::thread::available_parallelism().map_or(0, usize::from),
    }
}

fn wan_figures(scenario: &Scenario) -> WanFigures {
    let w = &scenario.wan;
    WanFigures {
        rate_mbit: *w.rate_mbit.get_ref(),
        rtt_ms: *w.rtt_ms.get_ref(),
        jitter_ms: *w.jitter_ms.get_ref(),
        loss: *w.loss.get_ref(),
        queue_ms: *w.queue_ms.get_ref(),
    }
}
