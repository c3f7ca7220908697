//! `godwit volume promote`: the site that had a VM is gone, and another one has images of all its disks.
//!
//! It is a claim, and has a claim's rules ([`crate::resolve`]): the host must not answer, what was done to it is asked for and stored before
//! anything is done, a new lineage begins, and who comes back from an older one is paused. There is no move that could be resolved; so
//! the evidence is kept with the VM.
//!
//! Or there is one, and its source was lost while disks were copied: then nobody could end it any more, since its destination waits for a
//! source that never comes. It ends with the promotion ([`comes_to_nothing`], [`moves::give_up`]).

use crate::moves;
use crate::precache::volume_called;
use crate::record::{Claim, MoveRecord, Step, VmRecord};
use crate::resolve::check_evidence;
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, missing};
use crate::store::{Change, Kind};
use crate::vms;
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::host::Ownership;
use godwit_api::promote::{PromoteVm, PromoteVolume, Promoted, RecoveryPoint};
use godwit_api::public::Volume;
use godwit_api::{ApiError, Name, Problem};
use godwit_units::Lineage;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub async fn promote(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(how): Json<PromoteVolume>,
) -> Result<Json<Promoted>, ApiError> {
    if !how.dry_run {
        check_evidence(&how.fenced, "a promotion needs to know how the VM's host is kept from running it")?;
    }
    let (volume, vm) = volume_called(&c, &who, &name)?;
    if how.dry_run {
        return Ok(Json(carry_out(&c, &volume, vm, &how).await?));
    }
    // While its host is only about to obey, it would say that it does not have the VM, and another one be ordered to take it, too.
    let in_hand = c.take_alone(vm.definition.id, &vm.definition.name)?;
    // Whoever asks may go away; what was begun ends all the same.
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        carry_out(&c, &volume, vm, &how).await
    });
    Ok(Json(task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the promotion broke off: {e}")))??))
}

async fn carry_out(
    c: &Arc<Controller>,
    volume: &Volume,
    vm: VmRecord,
    how: &PromoteVolume,
) -> Result<Promoted, ApiError> {
    let id = vm.definition.id;
    let here = place(c, &how.site, volume, &vm)?;
    let lost = c.host(&vm.host)?;
    if c.node(&lost).facts().await.is_ok() {
        return Err(conflict(format!("`{}` answers, so it is not lost", lost.name))
            .remedy(format!("`godwit move {} --to {}`; or fence that host first", volume.vm, how.site)));
    }
    let mv = vms::open_move(c, id)?;
    if let Some(mv) = &mv {
        comes_to_nothing(c, &vm, mv, &how.also_fenced).await?;
    }
    let earlier = unheard(vm.lineage, vm.promoted.as_ref(), &here.name);
    if let Some(earlier) = earlier.filter(|earlier| !how.also_fenced.contains(&earlier.host)) {
        does_not_have(c, &vm, earlier).await?;
    }
    let mut known = mv.as_ref().map_or(vm.lineage, |mv| vm.lineage.max(mv.owner.0));
    for earlier in [vm.promoted.as_ref(), mv.as_ref().and_then(|mv| mv.claim.as_ref())] {
        known = newest(known, earlier, &here.name);
    }
    let order = PromoteVm {
        definition: vm.definition.clone(),
        lost: lost.name.clone(),
        fenced: how.fenced.clone(),
        newest: known,
        dry_run: how.dry_run,
    };
    if !how.dry_run {
        if mv.is_some() {
            // The move ends before the VM is promoted: not for something that can be seen now.
            c.node(&here).promote(&PromoteVm { dry_run: true, ..order.clone() }).await?;
        }
        tracing::warn!(vm = %volume.vm, at = %here.name, lost = %lost.name, fenced = how.fenced, also = ?how.also_fenced, "an operator promotes a VM's images");
        // Before it is done: who promoted, and why, is known whatever happens now.
        let claim =
            Claim { host: here.name.clone(), lost: lost.name.clone(), fenced: how.fenced.clone(), newest: known };
        record(c, &vm, mv.as_ref(), claim)?;
    }
    let images = c.node(&here).promote(&order).await?.images;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
    let moment = images.first().and_then(|image| image.moment);
    let one_moment = images.len() < 2 || (moment.is_some() && images.iter().all(|image| image.moment == moment));
    let mut disks = vec![];
    for image in images {
        let of: Option<Volume> = c.store.read(Kind::Volume, image.volume.0)?;
        disks.push(RecoveryPoint {
            volume: of.map_or_else(|| volume.name.clone(), |v| v.name),
            epoch: image.epoch,
            epoch_unix_ms: image.epoch_unix_ms,
            age_s: now_ms.saturating_sub(image.epoch_unix_ms) as f64 / 1000.0,
        });
    }
    if !how.dry_run {
        // Else within seconds, all the same.
        vms::refresh(c).await?;
    }
    Ok(Promoted {
        vm: vm.definition.name,
        host: here.name,
        lost: lost.name,
        lineage: Lineage(known.0 + 1),
        disks,
        one_moment,
        dry_run: how.dry_run,
    })
}

/// Writes down that `vm` is promoted, if it and its move still stand as they were seen, and ends that move.
fn record(c: &Controller, vm: &VmRecord, mv: Option<&MoveRecord>, claim: Claim) -> Result<(), ApiError> {
    let (id, name) = (vm.definition.id, &vm.definition.name);
    let _deciding = c.decide();
    let now: Option<VmRecord> = c.store.read(Kind::Vm, id.0)?;
    let mut now = now.ok_or_else(|| missing("VM", name))?;
    if now.host != vm.host || now.lineage != vm.lineage || now.promoted != vm.promoted {
        return Err(conflict(format!("`{name}` has another host by now")).remedy("look at it again"));
    }
    let open = vms::open_move(c, id)?;
    let seen = |mv: &MoveRecord| (mv.id(), mv.step == Step::Finish, mv.claim.clone());
    if open.as_ref().map(seen) != mv.map(seen) {
        return Err(conflict(format!("`{name}`'s move stands otherwise by now")).remedy("look at it again"));
    }
    let why = format!("`{}` is lost, and `{name}` is promoted at `{}`", claim.lost, claim.host);
    now.promoted = Some(claim);
    let ended = open.map(|mv| moves::give_up(c, mv, why));
    let changes: Vec<Change> = ended.into_iter().chain([Change::put(Kind::Vm, id.0, &now)]).collect();
    Ok(c.store.commit(&changes)?)
}

/// Whether a move that is under way cannot bring the VM over any more, since its source is lost: its destination says that the VM is another
/// host's, so it lacks something, or has given the VM back, and nobody is left who could grant it; or it is fenced, too.
async fn comes_to_nothing(
    c: &Controller,
    vm: &VmRecord,
    mv: &MoveRecord,
    also_fenced: &[Name],
) -> Result<(), ApiError> {
    let (name, to, number) = (&vm.definition.name, &mv.order.to.name, mv.id().0);
    let moved = format!("`{name}` is being moved (move {number})");
    if mv.from != vm.host || mv.step == Step::Finish {
        return Err(conflict(moved).remedy(format!(
            "`godwit move resolve {number} --claim HOST --fenced HOW` takes it for one of its two hosts"
        )));
    }
    match c.node_of(to)?.vm(vm.definition.id).await {
        Err(error) if error.problem == Problem::NotFound => Ok(()),
        Ok(local) if local.ownership == Ownership::Elsewhere => Ok(()),
        Ok(local) if local.ownership == Ownership::Here => Err(conflict(format!("{moved}, and `{to}` has it"))
            .remedy(format!("`godwit vm show {name}` says how it is there, in a few seconds"))),
        Ok(_) => Err(conflict(format!("{moved}, and `{to}` may have it"))
            .remedy(format!("`godwit move resolve {number} --claim {to} --fenced HOW` takes it there"))),
        Err(_) if also_fenced.contains(to) => Ok(()),
        Err(error) => Err(conflict(format!("{moved} to `{to}`, which may have it and does not answer: {error}"))
            .remedy(format!(
                "bring that host back; or fence it as well, say so with --fenced, and add --also-fenced {to}"
            ))),
    }
}

/// The newest lineage there may be, for an order to begin the one after it at `here`. An earlier order to another host may have been obeyed, though
/// nobody heard of it: two owners of one lineage would never yield to each other.
pub(crate) fn newest(known: Lineage, earlier: Option<&Claim>, here: &Name) -> Lineage {
    match (unheard(known, earlier, here), earlier) {
        (Some(claim), _) => Lineage(claim.newest.0 + 1),
        // The same order again begins the same lineage.
        (None, Some(claim)) if claim.newest >= known => claim.newest,
        _ => known,
    }
}

/// An earlier order to another host of whose lineage nobody has heard.
fn unheard<'a>(known: Lineage, earlier: Option<&'a Claim>, here: &Name) -> Option<&'a Claim> {
    earlier.filter(|claim| claim.newest >= known && claim.host != *here)
}

/// Whether a host that was ordered to take a VM says that it did not.
async fn does_not_have(c: &Controller, vm: &VmRecord, earlier: &Claim) -> Result<(), ApiError> {
    let (name, host) = (&vm.definition.name, &earlier.host);
    let answer = match c.node_of(host) {
        Ok(node) => node.vm(vm.definition.id).await,
        // It was removed: who did that has said that it is gone.
        Err(error) if error.problem == Problem::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    match answer {
        Err(error) if error.problem == Problem::NotFound => Ok(()),
        Ok(local) if local.ownership == Ownership::Elsewhere => Ok(()),
        Ok(_) => Err(conflict(format!("`{name}` was promoted to `{host}`, which has it"))
            .remedy(format!("`godwit vm show {name}` says how it is there, in a few seconds"))),
        Err(error) => Err(conflict(format!(
            "`{name}` was ordered to be promoted to `{host}`, which may run it and does not answer: {error}"
        ))
        .remedy(format!(
            "order it there again; or fence that host as well, say so with --fenced, and add --also-fenced {host}"
        ))),
    }
}

/// The host there that has a replica of each of the VM's volumes.
fn place(c: &Controller, site: &Name, volume: &Volume, vm: &VmRecord) -> Result<HostRecord, ApiError> {
    let mut all: Vec<Volume> = vec![];
    for id in &vm.definition.volumes {
        all.extend(c.store.read::<Volume>(Kind::Volume, id.0)?);
    }
    let there = c.hosts()?.into_iter().filter(|host| &host.name == site || &host.site == site);
    let mut last = ApiError::new(Problem::NotFound, format!("`{site}` has no replica of `{}`", volume.name))
        .remedy("`godwit volume ls` lists who has one");
    for host in there {
        if host.name == vm.host {
            last = conflict(format!("`{}` is `{}`'s already", vm.definition.name, host.name));
            continue;
        }
        match all.iter().find(|v| !v.replicas.contains(&host.name)) {
            None => return Ok(host),
            Some(lacks) => {
                last = conflict(format!(
                    "`{}` has no replica of `{}`, another disk of `{}`",
                    host.name, lacks.name, vm.definition.name
                ));
            }
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_that_nobody_heard_of_again_is_outranked_by_the_next_one_and_repeated_by_itself() {
        let name = |text: &str| text.parse::<Name>().expect("a name");
        let claim = |host: &str, newest| Claim {
            host: name(host),
            lost: name("a"),
            fenced: "its power is off".into(),
            newest: Lineage(newest),
        };
        let next = |known, earlier: Option<Claim>, here: &str| newest(Lineage(known), earlier.as_ref(), &name(here)).0;
        assert_eq!(next(4, None, "c"), 4);
        assert_eq!(next(4, Some(claim("c", 4)), "c"), 4, "the same order");
        assert_eq!(next(4, Some(claim("c", 4)), "d"), 5, "`c` may own it by now");
        assert_eq!(next(4, Some(claim("d", 5)), "c"), 6);
        assert_eq!(next(6, Some(claim("c", 4)), "d"), 6, "what came of that one is known");
    }
}
