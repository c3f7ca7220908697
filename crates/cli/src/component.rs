//! `godwit component`, for those that Godwit makes, and their moves.

use crate::args::MoveArgs;
use crate::failure::{Code, Failure};
use crate::table::{Table, printable};
use clap::{Args, ValueEnum};
use godwit_api::component::{
    ApplyConfig, ComponentKind, ComponentMove, ComponentObject, CreateComponent, MoveComponent,
};
use godwit_api::host::{DiskStrategy, Ownership};
use godwit_api::progress::Outcome;
use godwit_api::public::Component;
use godwit_api::{Name, Problem, PublicClient};
use godwit_units::Policy;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often a move is looked at: it lasts some hundred milliseconds.
const LOOK: Duration = Duration::from_millis(100);
/// How long the controller may be away before following a move ends; the move goes on.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
#[command(
    after_help = "Ports are called p1, p2, ...; a wire ends at NAME:p1. The file is TOML: ports' addresses, MTUs and VLANs,\nroutes, rules for nft. See docs/components.md."
)]
pub struct CreateArgs {
    /// Its name; no VM may have it
    pub name: Name,
    /// What it is
    #[arg(long)]
    pub kind: Kind,
    /// How many ports it has, for ever
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub ports: u8,
    /// The site to make it at: on its first host that answers
    #[arg(long, required_unless_present = "host")]
    pub site: Option<Name>,
    /// The host to make it on
    #[arg(long)]
    pub host: Option<Name>,
    /// Its file; `-` reads it from standard input
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A bridge
    Switch,
    /// Addresses and routes
    Router,
    /// A bridge or a router with rules; what they do not accept is dropped
    Firewall,
    /// A router with a port in its host's outside network
    Gateway,
}

impl From<Kind> for ComponentKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Switch => Self::Switch,
            Kind::Router => Self::Router,
            Kind::Firewall => Self::Firewall,
            Kind::Gateway => Self::Gateway,
        }
    }
}

/// Reads a component's file.
///
/// # Errors
/// It cannot be read, or is no text.
fn read(path: &Path) -> Result<String, Failure> {
    let read =
        if path.as_os_str() == "-" { std::io::read_to_string(std::io::stdin()) } else { std::fs::read_to_string(path) };
    read.map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

/// Makes one.
///
/// # Errors
/// The controller's: with lines of the file, where that was refused.
pub async fn create(api: &PublicClient, args: CreateArgs) -> Result<ComponentObject, Failure> {
    let config = args.config.as_deref().map(read).transpose()?.unwrap_or_default();
    let at = args.host.or(args.site).ok_or_else(|| Failure::usage("where? name a --site or a --host"))?;
    let new = CreateComponent { name: args.name, kind: args.kind.into(), ports: args.ports, at, config };
    Ok(api.create_component(&new).await?)
}

/// Gives one another file.
///
/// # Errors
/// The controller's: with lines of the file, where that was refused; it has the one before then.
pub async fn apply(api: &PublicClient, name: &Name, file: &Path) -> Result<ComponentObject, Failure> {
    Ok(api.apply_config(name, &ApplyConfig { config: read(file)? }).await?)
}

/// The component of that name; none where there is none.
///
/// # Errors
/// The controller's.
pub async fn find(api: &PublicClient, name: &Name) -> Result<Option<ComponentObject>, Failure> {
    match api.component_object(name).await {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.problem == Problem::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What an order to move says that means nothing where a component moves is not passed over.
///
/// # Errors
/// The option that is for VMs.
pub fn refuse_of_vms(name: &Name, args: &MoveArgs) -> Result<(), Failure> {
    let said = [
        ("--disk", args.disk != DiskStrategy::default()),
        ("--limit", args.limit.is_some()),
        ("--policy", args.policy != Policy::default()),
        ("--throttle", args.throttle.is_some()),
        ("--memory-postcopy", args.memory_postcopy.is_some()),
        ("--vcpus", args.vcpus.is_some()),
        ("--keep-checkpoint", args.keep_checkpoint),
        ("--place", !args.place.is_empty()),
        ("--dry-run", args.dry_run),
    ];
    match said.into_iter().find(|(_, said)| *said) {
        Some((option, _)) => {
            Err(Failure::usage(format!("{option} is for VMs, and `{name}` is a component: leave it out")))
        }
        None => Ok(()),
    }
}

/// Moves one; waits for the end unless `detach`.
///
/// # Errors
/// The controller's, or that it stays where it was.
pub async fn move_to(api: &PublicClient, name: &Name, to: Name, detach: bool) -> Result<ComponentObject, Failure> {
    let mut now = api.move_component(name, &MoveComponent { to }).await?;
    let mut heard = Instant::now();
    let mv = now.last_move.as_ref().map(|mv| mv.id);
    while !detach && now.last_move.as_ref().is_some_and(|m| Some(m.id) == mv && m.outcome.is_open()) {
        tokio::time::sleep(LOOK).await;
        match api.component_object(name).await {
            Ok(found) => (now, heard) = (found, Instant::now()),
            // The controller may be away; the move goes on.
            Err(error) if error.problem == Problem::Unreachable && heard.elapsed() < PATIENCE => {}
            Err(error) => return Err(error.into()),
        }
    }
    match &now.last_move {
        Some(ComponentMove { outcome: Outcome::Failed, error, .. }) => {
            let why = error.as_deref().unwrap_or("the destination did not take it");
            Err(Failure::new(Code::Failed, format!("`{name}` stays on `{}`: {why}", now.host)))
        }
        Some(ComponentMove { outcome: Outcome::NetworkUnproved, error, .. }) => {
            let why = printable(error.as_deref().unwrap_or("no reason given"));
            let what = format!("`{name}` is on `{}`, but its network was not shown to lead there: {why}", now.host);
            Err(Failure::new(Code::Failed, what))
        }
        _ => Ok(now),
    }
}

/// Whose it is after a claim.
pub fn claimed(component: &ComponentObject) -> String {
    format!("`{}` is on `{}` now, with nothing learnt\n", component.name, component.host)
}

/// How a move stands, in a line.
pub fn moved(component: &ComponentObject) -> String {
    let Some(mv) = &component.last_move else { return String::new() };
    let isolated = mv.isolated_ms.map_or_else(String::new, |ms| format!(", isolated for {ms:.0} ms"));
    let along = match (mv.stations, mv.flows) {
        (0, 0) => String::new(),
        (stations, flows) => format!(", {stations} addresses and {flows} connections went along"),
    };
    match mv.outcome {
        Outcome::Completed => format!("`{}` is on `{}`{isolated}{along}\n", component.name, mv.to),
        Outcome::Failed => format!("`{}` stays on `{}`\n", component.name, mv.from),
        Outcome::NetworkUnproved => {
            let why = printable(mv.error.as_deref().unwrap_or("no reason given"));
            format!(
                "`{}` is on `{}`{isolated}{along}; its network was not shown to lead there: {why}\n",
                component.name, mv.to
            )
        }
        _ => format!("`{}` goes from `{}` to `{}`\n", component.name, mv.from, mv.to),
    }
}

/// Those that were made known and those that were made, in one list, as the API has each.
pub fn both(known: &[Component], made: &[ComponentObject]) -> Vec<Value> {
    let value = "plain data has a JSON form";
    let known = known.iter().map(|c| serde_json::to_value(c).expect(value));
    known.chain(made.iter().map(|c| serde_json::to_value(c).expect(value))).collect()
}

/// A table of them.
pub fn list(all: &[ComponentObject]) -> String {
    let mut table = Table::new(&["NAME", "KIND", ">PORTS", "SITE", "HOST", "STATE"]);
    for c in all {
        let state = match c.ownership {
            Some(Ownership::Here) => "here",
            Some(Ownership::Pausing) => "is being handed over",
            Some(Ownership::WaitsForPeer) => "waits for its peer",
            Some(Ownership::Elsewhere) => "elsewhere",
            None => "unknown",
        };
        let ports = c.ports.len().to_string();
        let cells =
            [c.name.to_string(), c.kind.to_string(), ports, c.site.to_string(), c.host.to_string(), state.into()];
        table.row(cells);
    }
    table.lines()
}

/// One of them, with its file.
pub fn show(component: &ComponentObject) -> String {
    let mut text = list(std::slice::from_ref(component));
    for port in &component.ports {
        text += &format!("{}:{}  endpoint {}\n", component.name, port.name, port.endpoint);
    }
    text += &moved(component);
    if !component.config.is_empty() {
        text += &format!("\n{}", component.config);
    }
    text
}
