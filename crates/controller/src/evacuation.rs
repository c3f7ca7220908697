//! A whole site's VMs away before a deadline: what is known of them, of the other sites' hosts and of the links between is gathered here,
//! and made a plan in [`fleet`]. Nothing is moved.
//!
//! Each host is asked a few questions, all hosts at the same time, and none for each VM: thousands of VMs take as many questions as there are
//! hosts. A link between two sites is measured between the first two hosts that answer, where no move of the last hour has shown what it
//! carries.
//!
//! # What can go wrong
//!
//! *A host does not answer*: nothing is counted on it, and its VMs are left out of the plan; the plan names them. *A node is of an older version
//! and does not know the question*: its guests are taken to be quiet. *Something changes before the plan is carried out*: a plan is of its moment,
//! and each move is checked when it is ordered.

mod fleet;

use crate::predictions::{FRESH, now_s};
use crate::record::{MoveRecord, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::Kind;
use axum::Json;
use axum::extract::{Extension, Path, State};
use fleet::Seen;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use godwit_api::evacuation::{Activity, Evacuation, LONGEST_S, MOST_VMS, PlanEvacuation, SilentHost};
use godwit_api::host::{HostFacts, PeerHost};
use godwit_api::predict::{AskPath, PathFacts};
use godwit_api::{ApiError, Name, Problem};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Hosts that are asked at a time.
const AT_ONCE: usize = 64;
/// Less than this would carry nothing.
const LEAST_LIMIT: u64 = 100_000;

pub async fn plan(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(site): Path<Name>,
    Json(wanted): Json<PlanEvacuation>,
) -> Result<Json<Evacuation>, ApiError> {
    check(&wanted)?;
    let seen = gather(&c, &who, site, &wanted).await?;
    let answer = tokio::task::spawn_blocking(move || fleet::plan(seen, &wanted)).await;
    answer.map_err(|_| ApiError::new(Problem::Failed, "the plan ended in a bug"))?.map(Json)
}

fn check(wanted: &PlanEvacuation) -> Result<(), ApiError> {
    if !(0.0..=LONGEST_S).contains(&wanted.deadline_s) {
        return Err(invalid(format!("deadline_s: 0 to {LONGEST_S} seconds")));
    }
    if wanted.limit.is_some_and(|limit| limit.0 < LEAST_LIMIT) {
        return Err(invalid("limit: at least 100 kbit/s"));
    }
    Ok(())
}

/// The hosts that VMs may go to: of other sites, and of those that were named.
fn destinations(all: &[HostRecord], site: &Name, wanted: &[Name]) -> Result<Vec<HostRecord>, ApiError> {
    for name in wanted {
        let Some(host) = all.iter().find(|host| &host.site == name || &host.name == name) else {
            return Err(missing("host", name).remedy("name sites or hosts: `godwit host ls`, `godwit site ls`"));
        };
        if &host.site == site {
            return Err(conflict(format!("`{name}` is in the site that is to be left")).remedy("name another one"));
        }
    }
    let is_named = |host: &&HostRecord| wanted.is_empty() || wanted.contains(&host.site) || wanted.contains(&host.name);
    let found: Vec<HostRecord> = all.iter().filter(|host| &host.site != site).filter(is_named).cloned().collect();
    if found.is_empty() {
        return Err(conflict(format!("there is no host outside of `{site}`"))
            .remedy("`godwit host add NAME --site SITE --api ADDR`"));
    }
    Ok(found)
}

/// The VMs that are to leave.
fn leaving(
    c: &Controller,
    who: &Caller,
    here: &HashSet<&Name>,
    wanted: Option<&[Name]>,
) -> Result<Vec<VmRecord>, ApiError> {
    let all: Vec<VmRecord> = c.vm_records()?.into_iter().filter(|vm| who.sees(vm)).collect();
    let mut vms: Vec<VmRecord> = match wanted {
        None => all.into_iter().filter(|vm| here.contains(&vm.host)).collect(),
        Some(names) => {
            let mut known: HashMap<Name, VmRecord> =
                all.into_iter().map(|vm| (vm.definition.name.clone(), vm)).collect();
            let find = |name: &Name| {
                let vm = known.remove(name).ok_or_else(|| missing("VM", name))?;
                let elsewhere = || conflict(format!("`{name}` is on `{}`, which is not in the site", vm.host));
                if here.contains(&vm.host) { Ok(vm) } else { Err(elsewhere().remedy("leave it out")) }
            };
            let names: std::collections::BTreeSet<&Name> = names.iter().collect();
            names.into_iter().map(find).collect::<Result<_, ApiError>>()?
        }
    };
    if vms.len() > MOST_VMS {
        return Err(conflict(format!("{} VMs are more than the {MOST_VMS} that are planned at once", vms.len()))
            .remedy("plan them in parts, with --vms"));
    }
    vms.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
    Ok(vms)
}

async fn gather(c: &Controller, who: &Caller, site: Name, wanted: &PlanEvacuation) -> Result<Seen, ApiError> {
    if c.store.get(Kind::Site, site.as_str())?.is_none() {
        return Err(missing("site", site));
    }
    let hosts = c.hosts()?;
    let to = destinations(&hosts, &site, &wanted.to)?;
    let from: Vec<HostRecord> = hosts.iter().filter(|host| host.site == site).cloned().collect();
    let here: HashSet<&Name> = from.iter().map(|host| &host.name).collect();
    let vms = leaving(c, who, &here, wanted.vms.as_deref())?;
    let at = wanted.at_unix_s.unwrap_or_else(now_s);
    let (said, facts, activity) =
        tokio::join!(c.look_at(from.clone()), facts(c, from.iter().chain(&to)), activity(c, hosts.iter(), at));
    let (facts, mut silent) = facts;
    let mut local = HashMap::new();
    for (host, answer) in said {
        match answer {
            Ok(vms) => local.extend(vms.into_iter().map(|vm| ((host.clone(), vm.definition.id), vm))),
            Err(error) => silent.push(SilentHost { host, why: error.message }),
        }
    }
    silent.sort_by(|a, b| a.host.cmp(&b.host));
    silent.dedup_by(|a, b| a.host == b.host);
    let moves = c.move_records()?;
    let paths = paths(c, &from, &to, &facts, &moves).await;
    let sites = hosts.into_iter().map(|host| (host.name, host.site)).collect();
    Ok(Seen {
        site,
        sites,
        to,
        vms,
        local,
        facts,
        activity,
        moves,
        volumes: c.store.read_all(Kind::Volume)?,
        precaches: crate::precache::all_figures(c),
        paths,
        silent,
        now_s: now_s(),
        at_unix_s: at,
    })
}

/// What hosts say of themselves, and which do not answer.
async fn facts(
    c: &Controller,
    hosts: impl Iterator<Item = &HostRecord>,
) -> (HashMap<Name, HostFacts>, Vec<SilentHost>) {
    let asked = stream::iter(hosts.cloned().collect::<Vec<_>>())
        .map(|host| async move { (c.node(&host).facts().await, host.name) });
    let answers: Vec<_> = asked.buffer_unordered(AT_ONCE).collect().await;
    let (mut known, mut silent) = (HashMap::new(), vec![]);
    for (answer, host) in answers {
        match answer {
            Ok(facts) => {
                known.insert(host, facts);
            }
            Err(error) => silent.push(SilentHost { host, why: error.message }),
        }
    }
    (known, silent)
}

/// What all hosts know of guests: a VM's profiles stay where it was watched.
async fn activity(c: &Controller, hosts: impl Iterator<Item = &HostRecord>, at: u64) -> Vec<(Name, Vec<Activity>)> {
    let asked = stream::iter(hosts.cloned().collect::<Vec<_>>())
        .map(|host| async move { (c.node(&host).activity(at).await.unwrap_or_default(), host.name) });
    asked.buffer_unordered(AT_ONCE).map(|(told, host)| (host, told)).collect().await
}

/// By site, what the link there is like: measured where nothing fresh is known of it and no move is under way over it.
async fn paths(
    c: &Controller,
    from: &[HostRecord],
    to: &[HostRecord],
    facts: &HashMap<Name, HostFacts>,
    moves: &[MoveRecord],
) -> HashMap<Name, PathFacts> {
    let Some(source) = from.iter().find(|host| facts.contains_key(&host.name)) else { return HashMap::new() };
    let mut first: BTreeMap<&Name, &HostRecord> = BTreeMap::new();
    for host in to.iter().filter(|host| facts.contains_key(&host.name)) {
        first.entry(&host.site).or_insert(host);
    }
    let sources: HashSet<&Name> = from.iter().map(|host| &host.name).collect();
    let asked = first.into_iter().map(|(site, host)| {
        let there: HashSet<&Name> = to.iter().filter(|other| &other.site == site).map(|other| &other.name).collect();
        let links = fleet::between(moves, &sources, &there);
        let is_open = links.iter().any(|mv| mv.step != crate::record::Step::Ended);
        let pair = crate::predictions::past::pair(links.into_iter());
        let stale = pair.goodput.is_none() || pair.last_unix_us / 1_000_000 + FRESH.as_secs() < now_s();
        let known = c.links.get(&source.name, &host.name).filter(|_| stale);
        let facts = &facts[&host.name];
        let peer = PeerHost { name: host.name.clone(), link: facts.link, underlay: facts.underlay };
        let asked = AskPath { peer, measure: stale && known.is_none() && !is_open };
        async move {
            let mut path = c.node(source).path(&asked).await.ok()?;
            match path.goodput {
                Some(rate) => c.links.put(&source.name, &host.name, rate),
                None => path.goodput = known,
            }
            Some((site.clone(), path))
        }
    });
    join_all(asked).await.into_iter().flatten().collect()
}
