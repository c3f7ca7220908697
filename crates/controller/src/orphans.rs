//! What may be removed of what hosts find to be nobody's.
//!
//! A host sees only itself. Here it is known which VMs there are, who owns them, and which moves are under way. The rule is
//! one: never what may be the truth about a VM. What a VM's owner says outweighs the store; an owner that is silent says nothing,
//! so what is left of its VM elsewhere is kept. What belongs to a VM that was deleted may go, because numbers are never given
//! twice; what belongs to a number that this store never gave may be all that is left of another store, and is kept.

use crate::record::{MoveRecord, Step, VmRecord};
use crate::state::{Controller, HostRecord, conflict, missing};
use crate::store::{Counter, Kind};
use axum::Json;
use axum::extract::{Path, State};
use godwit_api::host::{LocalVm, Ownership};
use godwit_api::orphan::{JudgedOrphan, Orphan, OrphanKind};
use godwit_api::{ApiError, Name, done};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// How long something must have been nobody's before it is removed: longer than anything takes that makes it somebody's.
const GRACE_S: u64 = 600;

/// What is known of the VM that an orphan is of.
#[derive(Clone, Debug, PartialEq)]
pub enum Whose {
    /// A number that this store has never given, or none.
    Unknown,
    /// It was deleted.
    Deleted,
    /// It is no VM's: part of a wire between ports that there is, and that its host does not know yet, or has not read.
    Wire,
    /// It is being made or taken away.
    InHand,
    /// It takes part in a move that has not ended, with this host.
    Moving,
    /// It is owned by the host of the orphan itself.
    OwnedHere,
    /// Its owner, which is another host, is silent.
    OwnerSilent(Name),
    /// Its owner, which is another host, says that it owns it by this right.
    Owned(Name, (godwit_units::Lineage, godwit_units::Generation)),
}

/// Whether it may be removed, whether it is removed without anybody's asking, and why.
#[must_use]
pub fn judge(orphan: &Orphan, whose: &Whose) -> (bool, bool, String) {
    let keep = |why: String| (false, false, why);
    if let Some(why) = &orphan.may_be_truth {
        return keep(why.clone());
    }
    let by_itself = orphan.kind != OrphanKind::Replica;
    match whose {
        Whose::Unknown => keep("nobody here knows what it belongs to".into()),
        Whose::Wire => keep("there is such a wire, and its host is told of it".into()),
        Whose::InHand => keep("its VM is being made or deleted".into()),
        Whose::Moving => keep("its VM is being moved".into()),
        Whose::OwnedHere => keep("this host owns its VM, as far as is known".into()),
        Whose::OwnerSilent(owner) => keep(format!("its VM's owner `{owner}` does not say that it has it")),
        Whose::Owned(owner, right) if orphan.owner.is_some_and(|here| here > *right) => {
            keep(format!("it is newer than what `{owner}` has"))
        }
        // A new lineage begins with whole disks ([`godwit_api::promote`], a claim), and fetches nothing of an older one's.
        Whose::Owned(owner, right) if orphan.lent && orphan.owner.is_none_or(|here| here.0 == right.0) => {
            keep(format!("`{owner}` has not fetched all of it yet"))
        }
        _ if orphan.seen_s < GRACE_S => {
            keep(format!("nobody's for {} s only; it is kept for {GRACE_S} s", orphan.seen_s))
        }
        Whose::Deleted => (true, true, "its VM was deleted".into()),
        Whose::Owned(owner, _) => (true, by_itself, format!("its VM is at `{owner}`")),
    }
}

/// Which VM an orphan is of: by the host's word, or because the volume or the wire is the VM's.
fn vm_of(orphan: &Orphan, vms: &[VmRecord]) -> Option<u64> {
    let has = |vm: &&VmRecord| match (orphan.kind, orphan.number) {
        (OrphanKind::Volume, Some(volume)) => vm.definition.volumes.iter().any(|v| v.0 == volume),
        (OrphanKind::Interface | OrphanKind::Port | OrphanKind::Rules, Some(wire)) => {
            vm.definition.wires.iter().any(|w| u64::from(w.id) == wire)
        }
        _ => false,
    };
    orphan.vm.map(|vm| vm.0).or_else(|| Some(vms.iter().find(has)?.definition.id.0))
}

fn whose(
    c: &Controller,
    orphan: &Orphan,
    host: &Name,
    vms: &[VmRecord],
    moves: &[MoveRecord],
    said: &HashMap<Name, Result<Vec<LocalVm>, ApiError>>,
) -> Result<Whose, ApiError> {
    let Some(id) = vm_of(orphan, vms) else {
        // Of no VM that there is. Was it ever one of this store's?
        if orphan.kind == OrphanKind::Interface
            && let Some(wire) = orphan.number
            && c.store.get(Kind::Wire, &wire.to_string())?.is_some()
        {
            return Ok(Whose::Wire);
        }
        let of_wire = matches!(orphan.kind, OrphanKind::Interface | OrphanKind::Port | OrphanKind::Rules);
        let counter = if of_wire { Counter::Wire } else { Counter::Volume };
        let last = c.store.last(counter)?;
        let given = orphan.number.is_some_and(|number| (1..=last).contains(&number));
        return Ok(if given { Whose::Deleted } else { Whose::Unknown });
    };
    let Some(vm) = vms.iter().find(|vm| vm.definition.id.0 == id) else {
        let given = c.store.last(Counter::Vm)? >= id;
        return Ok(if given { Whose::Deleted } else { Whose::Unknown });
    };
    if vm.life != crate::record::Life::Ready || c.is_in_hand(vm.definition.id) {
        return Ok(Whose::InHand);
    }
    if moves.iter().any(|m| m.step != Step::Ended && m.order.vm == vm.definition.id) {
        return Ok(Whose::Moving);
    }
    if &vm.host == host {
        return Ok(Whose::OwnedHere);
    }
    let owner = said.get(&vm.host).and_then(|vms| vms.as_ref().ok());
    let owner = owner.and_then(|vms| vms.iter().find(|local| local.definition.id == vm.definition.id));
    Ok(match owner.filter(|local| local.ownership == Ownership::Here) {
        Some(local) => Whose::Owned(vm.host.clone(), (local.lineage, local.generation)),
        None => Whose::OwnerSilent(vm.host.clone()),
    })
}

/// All orphans of all hosts that answer, judged.
///
/// # Errors
/// The store's.
pub async fn all(c: &Arc<Controller>) -> Result<Vec<JudgedOrphan>, ApiError> {
    let hosts = c.hosts()?;
    let said = c.look_at(hosts.clone()).await;
    let mut judged = vec![];
    for host in &hosts {
        // A host that cannot be asked is shown as such by `host ls`.
        let Ok(orphans) = c.node(host).orphans().await else { continue };
        // After the hosts were asked: what has come to be since is not taken for nobody's.
        let (vms, moves) = (c.vm_records()?, c.store.read_all::<MoveRecord>(Kind::Move)?);
        for orphan in orphans {
            // A gateway's host cannot know that the wire's VM is another host's, and well.
            if orphan.kind == OrphanKind::Port && vm_of(&orphan, &vms).is_some() {
                continue;
            }
            let whose = whose(c, &orphan, &host.name, &vms, &moves, &said)?;
            let (removable, by_itself, why) = judge(&orphan, &whose);
            judged.push(JudgedOrphan { host: host.name.clone(), orphan, removable, by_itself, why });
        }
    }
    Ok(judged)
}

/// Removes what goes without anybody's asking.
///
/// # Errors
/// The store's.
pub async fn sweep(c: &Arc<Controller>) -> Result<(), ApiError> {
    for found in all(c).await?.into_iter().filter(|found| found.by_itself) {
        let removed = c.node_of(&found.host)?.remove_orphan(&found.orphan.id).await;
        match removed {
            Ok(()) => {
                tracing::warn!(host = %found.host, orphan = found.orphan.id, why = found.why, "removed an orphan")
            }
            Err(error) => {
                tracing::warn!(host = %found.host, orphan = found.orphan.id, %error, "cannot remove an orphan")
            }
        }
    }
    Ok(())
}

pub async fn list(State(c): Shared) -> Answer<Vec<JudgedOrphan>> {
    Ok(Json(all(&c).await?))
}

pub async fn remove(State(c): Shared, Path((host, id)): Path<(Name, String)>) -> Answer<Value> {
    let place: HostRecord = c.host(&host)?;
    let found = all(&c).await?.into_iter().find(|found| found.host == host && found.orphan.id == id);
    let found = found.ok_or_else(|| missing("orphan", &id))?;
    if !found.removable {
        return Err(conflict(format!("`{id}` on `{host}` is kept: {}", found.why))
            .remedy("`godwit orphan ls` shows what may go"));
    }
    c.node(&place).remove_orphan(&id).await?;
    Ok(done())
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::{Generation, Lineage, VmId};

    fn orphan(kind: OrphanKind, seen_s: u64) -> Orphan {
        Orphan {
            id: "x-1".into(),
            kind,
            vm: Some(VmId(1)),
            number: None,
            what: String::new(),
            bytes: None,
            owner: Some((Lineage(0), Generation(3))),
            lent: false,
            seen_s,
            may_be_truth: None,
        }
    }

    fn owned(generation: u64) -> Whose {
        Whose::Owned("texas".parse().unwrap(), (Lineage(0), Generation(generation)))
    }

    #[test]
    fn nothing_is_removed_that_may_be_the_truth() {
        let old = orphan(OrphanKind::Volume, GRACE_S);
        let protected = Orphan { may_be_truth: Some("a record says so".into()), ..old.clone() };
        assert!(!judge(&protected, &Whose::Deleted).0);
        for whose in [
            Whose::Unknown,
            Whose::Wire,
            Whose::InHand,
            Whose::Moving,
            Whose::OwnedHere,
            Whose::OwnerSilent("texas".parse().unwrap()),
            owned(2),
        ] {
            let (removable, by_itself, why) = judge(&old, &whose);
            assert!(!removable && !by_itself && !why.is_empty(), "{whose:?}");
        }
    }

    #[test]
    fn what_is_of_a_deleted_vm_or_older_than_its_owner_goes_after_a_grace() {
        for whose in [Whose::Deleted, owned(4)] {
            assert!(!judge(&orphan(OrphanKind::Volume, GRACE_S - 1), &whose).0, "{whose:?}");
            let (removable, by_itself, _) = judge(&orphan(OrphanKind::Volume, GRACE_S), &whose);
            assert!(removable && by_itself, "{whose:?}");
        }
    }

    #[test]
    fn replicas_for_the_way_back_go_only_when_somebody_asks() {
        let (removable, by_itself, _) = judge(&orphan(OrphanKind::Replica, GRACE_S), &owned(4));
        assert!(removable && !by_itself);
        assert!(judge(&orphan(OrphanKind::Replica, GRACE_S), &Whose::Deleted).1, "there is no way back");
    }

    #[test]
    fn what_its_owner_is_to_fetch_is_kept_until_it_has_it() {
        let lent = Orphan { lent: true, ..orphan(OrphanKind::Replica, GRACE_S) };
        let (removable, _, why) = judge(&lent, &owned(4));
        assert!(!removable && why.contains("texas"), "{why}");
        assert!(judge(&lent, &Whose::Deleted).0, "nobody fetches it any more");
        let claimed = Whose::Owned("texas".parse().unwrap(), (Lineage(1), Generation(1)));
        assert!(judge(&lent, &claimed).0, "whoever claimed it had all");
    }
}
