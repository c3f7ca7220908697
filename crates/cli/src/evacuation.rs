//! `godwit predict --site SITE --all --deadline TIME`: how a site's VMs would leave it, as the controller plans it. With `--json` the plan itself,
//! to be kept in a file (`docs/evacuation.md`).

use crate::failure::Failure;
use crate::follow::{print_text, write_json};
use crate::foretell::{between, ms, seconds};
use crate::predict::{PredictArgs, read};
use crate::table::Table;
use godwit_api::evacuation::{Evacuation, InTime, PlanEvacuation};
use godwit_api::{Name, PublicClient};
use std::path::Path;

/// The largest list of VMs that is read.
const LARGEST_LIST: u64 = 4 << 20;

/// Asks the controller.
///
/// # Errors
/// The controller's; a list of VMs that makes no sense.
pub async fn run(
    api: &PublicClient,
    args: &PredictArgs,
    site: &Name,
    at_unix_s: Option<u64>,
    json: bool,
) -> Result<(), Failure> {
    let deadline_s = args.deadline.ok_or_else(|| Failure::usage("until when? say it with --deadline"))?.as_secs_f64();
    let vms = args.vms.as_deref().map(listed).transpose()?;
    let wanted = PlanEvacuation { deadline_s, vms, to: args.to.clone(), limit: args.limit, at_unix_s, cold: args.cold };
    let plan = api.plan_evacuation(site, &wanted).await?;
    if json { write_json(&plan) } else { print_text(&show(&plan)) }
}

/// VMs that a file names, one in a line; empty lines and what follows `#` count for nothing.
fn listed(file: &Path) -> Result<Vec<Name>, Failure> {
    let wrong = |why: String| Failure::usage(format!("{}: {why}", file.display()));
    let text = String::from_utf8(read(file, LARGEST_LIST)?).map_err(|_| wrong("it is no text".into()))?;
    names(&text).map_err(wrong)
}

fn names(text: &str) -> Result<Vec<Name>, String> {
    let lines = text.lines().enumerate().map(|(n, line)| (n + 1, line.split('#').next().unwrap_or_default().trim()));
    let named = lines.filter(|(_, line)| !line.is_empty());
    let names: Vec<Name> = named
        .map(|(n, line)| line.parse::<Name>().map_err(|e| format!("line {n}: {e}; write a VM's name in each line")))
        .collect::<Result<_, String>>()?;
    if names.is_empty() { Err("it names no VM; write one in each line, or ask for --all".into()) } else { Ok(names) }
}

fn show(plan: &Evacuation) -> String {
    let mut moves = Table::new(&["VM", "FROM", "TO", "STRATEGY", ">STARTS", ">ENDS", ">PAUSE", ">SENT", "IN TIME"]);
    for mv in &plan.moves {
        let in_time = match mv.in_time {
            InTime::Surely => "surely",
            InTime::Likely => "likely",
            InTime::Late => "late",
        };
        moves.row([
            mv.vm.to_string(),
            mv.from.to_string(),
            mv.to.to_string(),
            mv.strategy.clone(),
            seconds(mv.start_s),
            between(&mv.end_s, seconds),
            between(&mv.downtime_ms, ms),
            mv.bytes.to_string(),
            in_time.into(),
        ]);
    }
    let mut links = Table::new(&["LINK TO", ">GOODPUT", "BY", ">MOVES", ">SENT", ">ENDS"]);
    for link in &plan.links {
        links.row([
            link.to.to_string(),
            between(&link.goodput_mbit, |mbit| format!("{mbit:.1} Mbit/s")),
            link.goodput_by.clone(),
            link.moves.to_string(),
            link.bytes.to_string(),
            between(&link.end_s, seconds),
        ]);
    }
    let mut text = format!("{}\n{}\n", moves.lines(), links.lines());
    for mv in plan.moves.iter().filter(|mv| mv.note.is_some()) {
        text += &format!("{}: {}\n", mv.vm, mv.note.as_deref().unwrap_or_default());
    }
    for left in &plan.left_out {
        text += &format!("{} stays on {}: {}\n", left.vm, left.host, left.why);
    }
    for host in &plan.silent {
        text += &format!("{} does not answer, and is not counted on: {}\n", host.host, host.why);
    }
    text + &format!(
        "{} of {} VMs of {} are likely away within {}, {} of them surely; no plan has more than {} away by then. All are away after {}.\n",
        plan.in_time,
        plan.vms,
        plan.site,
        seconds(plan.deadline_s),
        plan.surely,
        plan.at_most,
        between(&plan.end_s, seconds)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_vm_in_each_line_and_says_which_line_is_wrong() {
        let found = names("web\n\n  db # the old one\n# nobody\n").unwrap();
        assert_eq!(found.iter().map(Name::as_str).collect::<Vec<_>>(), ["web", "db"]);
        assert!(names("web\nno name\n").unwrap_err().contains("line 2"));
        assert!(names("# none\n").unwrap_err().contains("--all"));
    }
}
