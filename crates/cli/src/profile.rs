//! `godwit vm profile`: has a VM's host watch which pages of its memory change, and shows what was seen.
//!
//! Following is only looking: the host goes on when this ends.

use crate::failure::{Code, Failure};
use crate::follow::{print_text, write_json};
use crate::predict::span;
use crate::quantity::time;
use crate::table::Table;
use clap::Args;
use godwit_api::profile::{Profile, ProfileState, StartProfile};
use godwit_api::{Name, PublicClient};
use godwit_units::Bytes;
use serde::Deserialize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// How often the host is asked how far it is.
const POLL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
#[command(
    after_help = "Pages whose contents change are seen; those that are written and stay as they were are not, and do not travel\nin a move either. The log can be predicted from without a VM: `godwit predict --log FILE --rate RATE`."
)]
pub struct ProfileArgs {
    /// The VM
    pub vm: Name,
    /// How long
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = span)]
    pub lasting: Duration,
    /// How often to look; less often where that would take too much of a processor
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = span)]
    pub interval: Duration,
    /// List the profiles that are kept instead
    #[arg(long, conflicts_with_all = ["lasting", "interval"])]
    pub ls: bool,
    /// Write the newest profile's log into a file; alone with --ls, else when it is there
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Do not wait for its end
    #[arg(long, conflicts_with_all = ["ls", "log"])]
    pub detach: bool,
}

/// How often a host watches its guests without being asked; none: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Routine(pub Option<Duration>);

impl Default for Routine {
    fn default() -> Self {
        Self(Some(Duration::from_secs(3600)))
    }
}

impl FromStr for Routine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self(None));
        }
        time(text).map(|every| Self(Some(every))).map_err(|error| format!("{error}, or never"))
    }
}

impl TryFrom<String> for Routine {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Carries it out.
///
/// # Errors
/// The controller's, and that a log cannot be written.
pub async fn run(api: &PublicClient, args: &ProfileArgs, json: bool) -> Result<(), Failure> {
    if args.ls {
        let all = api.profiles(&args.vm).await?;
        if let Some(newest) = all.iter().rev().find(|profile| profile.state != ProfileState::Watching) {
            save(api, args, newest).await?;
        }
        return if json { write_json(&all) } else { print_text(&show(&all)) };
    }
    let whole = |time: Duration, what: &str| {
        u32::try_from(time.as_millis()).map_err(|_| Failure::usage(format!("{what} is too long")))
    };
    let for_s = args.lasting.as_secs_f64().ceil();
    // What is out of bounds is refused by the controller.
    let wanted = StartProfile { for_s: for_s as u32, interval_ms: whole(args.interval, "--interval")? };
    let mut profile = api.start_profile(&args.vm, wanted).await?;
    while !args.detach && profile.state == ProfileState::Watching {
        tokio::time::sleep(POLL).await;
        let all = api.profiles(&args.vm).await?;
        let now = all.into_iter().find(|now| now.start_unix_ms == profile.start_unix_ms);
        profile = now
            .ok_or_else(|| Failure::new(Code::Failed, format!("`{}` ended before anything was seen of it", args.vm)))?;
    }
    if profile.state != ProfileState::Watching {
        save(api, args, &profile).await?;
    }
    if json { write_json(&profile) } else { print_text(&show(std::slice::from_ref(&profile))) }
}

async fn save(api: &PublicClient, args: &ProfileArgs, profile: &Profile) -> Result<(), Failure> {
    let Some(file) = &args.log else { return Ok(()) };
    let log = api.profile_log(&args.vm, profile.start_unix_ms).await?;
    let bytes = log.bytes().ok_or_else(|| Failure::new(Code::Failed, "the log that was sent is no hexadecimal"))?;
    std::fs::write(file, bytes).map_err(|e| Failure::new(Code::Failed, format!("cannot write {}: {e}", file.display())))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// As tables: what changed, and what is in the pages.
#[must_use]
pub fn show(all: &[Profile]) -> String {
    let mut changes =
        Table::new(&[">START", "HOST", "STATE", ">WATCHED", ">CHANGED/S", ">MOST/S", ">WORKING SET", ">LOG", ">COST"]);
    let mut contents =
        Table::new(&[">START", ">MEMORY", ">ZERO", ">DUPLICATE", ">PACKED TO", ">BECOME ZERO", ">AGAIN TO"]);
    let share = |known: Option<f64>| known.map_or_else(|| "-".into(), percent);
    for p in all {
        let watched = f64::from(p.looks) * f64::from(p.interval_ms) / 1e3;
        let state = match p.state {
            ProfileState::Watching => format!("watching, {:.0} s to go", (f64::from(p.for_s) - watched).max(0.0)),
            ProfileState::Done => "done".into(),
            ProfileState::Ended => format!("ended: {}", p.why.as_deref().unwrap_or("no reason given")),
        };
        let gib_minutes = p.memory.0 as f64 / f64::from(1 << 30) * watched / 60.0;
        let cost = if gib_minutes > 0.0 { format!("{:.1} s/GiB min", p.looking_s / gib_minutes) } else { "-".into() };
        let start = p.start_unix_ms.to_string();
        changes.row([
            start.clone(),
            p.host.to_string(),
            state,
            format!("{watched:.1} s"),
            format!("{:.0}", p.changed_per_s),
            format!("{:.0}", p.most_changed_per_s),
            p.working_set.to_string(),
            p.log_bytes.to_string(),
            cost,
        ]);
        let c = &p.contents;
        let memory: Bytes = p.memory;
        contents.row([
            start,
            memory.to_string(),
            percent(c.zero),
            percent(c.duplicate),
            share(c.packed),
            percent(c.zeroed),
            share(c.again),
        ]);
    }
    format!("{}\n{}", changes.lines(), contents.lines())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_are_watched_every_so_often_or_never() {
        assert_eq!("never".parse(), Ok(Routine(None)));
        assert_eq!("15m".parse(), Ok(Routine(Some(Duration::from_secs(900)))));
        for bad in ["", "0s", "1", "Never", "off"] {
            let said = bad.parse::<Routine>().unwrap_err();
            assert!(said.contains("such as 12h, or never"), "{said}");
        }
    }

    #[test]
    fn the_tables_say_what_changed_what_it_packs_to_and_what_looking_cost() {
        let profile: Profile = serde_json::from_value(serde_json::json!({
            "host": "a", "start_unix_ms": 7, "for_s": 30, "interval_ms": 1000, "state": "done", "observed": "contents",
            "memory": 2_u64 << 30, "looks": 30, "missed": 0, "changed_per_s": 1234.4, "most_changed_per_s": 2000.0,
            "working_set": 64 << 20, "log_bytes": 4096, "looking_s": 3.0,
            "contents": {"zero": 0.5, "duplicate": 0.01, "packed": 0.25, "zeroed": 0.0}
        }))
        .unwrap();
        let text = show(&[profile]);
        for part in ["1234", "2000", "30.0 s", "50.0 %", "25.0 %", "3.0 s/GiB min", "done"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
