//! Components whose hosts are lost: an operator claims one for another host.
//!
//! A component has no disks, and its file is in the controller's record: so any host can take it, with nothing learnt, as after a power
//! failure. The rules are those of every claim ([`crate::resolve`]): whoever may own it must not answer, neither here nor at the node that
//! takes it; what was done to them is asked for and stored first; a new lineage begins, and who comes back from an older one is
//! outranked ([`crate::components::tend`]).
//!
//! # What can go wrong
//!
//! *The controller dies in between.* The node has it or has not; the order may be given again, and finds which. *It is being moved.* Then two
//! hosts may own it, and both have to be lost, but for the one that is to have it. *A file was changed at the lost host and never heard
//! of here.* Then the one before is taken; `apply` answers only after it was stored.

use crate::components::{ComponentRecord, find, put, shown};
use crate::record::{Claim, Life};
use crate::resolve::check_evidence;
use crate::rights::Caller;
use crate::state::{Controller, conflict, missing};
use crate::store::Kind;
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::component::{ClaimComponent, ClaimOrder, ComponentObject};
use godwit_api::host::Ownership;
use godwit_api::progress::Outcome;
use godwit_api::{ApiError, Name, Problem};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Hosts that may own it, for all that is known here.
fn owners(record: &ComponentRecord) -> BTreeSet<Name> {
    let mut all = BTreeSet::from([record.host.clone()]);
    if let Some(order) = &record.order {
        all.insert(order.to.name.clone());
        all.extend(record.last_move.as_ref().map(|mv| mv.from.clone()));
    }
    all
}

pub async fn claim(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(how): Json<ClaimComponent>,
) -> Result<Json<ComponentObject>, ApiError> {
    check_evidence(&how.fenced, "a claim needs to know how the component's host is kept from running it")?;
    let record = find(&c, &who, &name)?;
    if record.life != Life::Ready {
        return Err(conflict(format!("`{name}` is being made or deleted")).remedy("wait until that has ended"));
    }
    let here = crate::vms::place(&c, &how.at).await?;
    let id = record.definition.id;
    let lost: Vec<Name> = owners(&record).into_iter().filter(|host| *host != here.name).collect();
    let there = c.node(&here).component(id).await.ok();
    if lost.is_empty() || there.is_some_and(|local| local.ownership == Ownership::Here && record.order.is_none()) {
        return Err(conflict(format!("`{name}` is `{}`'s already", here.name)));
    }
    for host in &lost {
        // One that was removed has been given up by its operator.
        if let Ok(node) = c.node_of(host)
            && node.facts().await.is_ok()
        {
            return Err(conflict(format!("`{host}` answers, so it is not lost"))
                .remedy(format!("`godwit move {name} --to {}`; or fence that host first", here.name)));
        }
    }
    let newest = record.lineage;
    tracing::warn!(component = %name, at = %here.name, ?lost, fenced = how.fenced, "an operator claims a component");
    let in_hand = {
        // Before it is done: who claimed, and why, is known whatever happens now.
        let _deciding = c.decide();
        let mut now = find(&c, &who, &name)?;
        if owners(&now) != owners(&record) || now.lineage != newest || now.life != Life::Ready {
            return Err(conflict(format!("`{name}` has changed hands meanwhile")).remedy("look at it again"));
        }
        let claim = Claim { host: here.name.clone(), lost: record.host.clone(), fenced: how.fenced.clone(), newest };
        now.claimed = Some(claim);
        // Whoever deletes it, or looks for who has it, asks all of them.
        now.left.extend(lost.iter().cloned().chain([here.name.clone()]));
        c.store.commit(&[put(&now)])?;
        c.take_in_hand(id)
    };
    let order = ClaimOrder { definition: record.definition, lost, fenced: how.fenced, newest };
    // Whoever asks may go away; what was begun ends all the same.
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        let local = c.node(&here).claim_component(&order).await?;
        let now = {
            let _deciding = c.decide();
            let now: Option<ComponentRecord> = c.store.read(Kind::ComponentObject, id.0)?;
            let mut now = now.ok_or_else(|| missing("component", &order.definition.name))?;
            if let (Some(_), Some(mv)) = (now.order.take(), &mut now.last_move) {
                mv.outcome = Outcome::Failed;
                mv.error = Some(format!("it was claimed for `{}`", here.name));
            }
            now.host = here.name.clone();
            (now.lineage, now.generation, now.mtus) = (local.lineage, local.generation, local.mtus);
            c.store.commit(&[put(&now)])?;
            now
        };
        shown(&c, now).await
    });
    Ok(Json(task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the claim broke off: {e}")))??))
}
