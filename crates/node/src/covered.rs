//! What another node may ask for: what the controller has signed, and nothing else.
//!
//! A peer's certificate says who it is; that gives it no VM. A source shows the capability of its order when it asks for a
//! place ([`stage`]). Everything later of that attempt rests on the place: streams, and the hand-off's messages, are taken from
//! the peer that the place was made for, for that ticket, and for the volumes of that VM. A gateway is shown the capability
//! with the order to lead elsewhere ([`repoint`]). A pre-cache and a scrub each have a capability of their own, for one volume ([`volume`]).
//!
//! Neither asks the controller anything, and the capability does not run out under way ([`godwit_trust::Capability`] says why): a
//! hand-off ends with the controller gone.
//!
//! # What this does not cover
//!
//! A source that was taken over has the VM that it runs, and may send what it likes of it; it also says first, where the destination has
//! not heard of them, where the wires of that VM end. A destination that was ordered to
//! take a VM and did not get it keeps a capability for it: with that it may point the VM's wires at itself until the gateway
//! hears of a later owner, from that owner or from the controller. It gets neither memory nor disks by it. And a source may say that it has
//! taken its VM back for as long as nobody has heard that its destination has it.
//!
//! # What was given back
//!
//! A source that takes back what its destination had been granted is the owner after that one. Whoever has heard of the destination cannot
//! tell such a source from one whose move was completed, so its word is not enough: first the destination says that it gave the VM back, as
//! only it can, and to whom. That is its last word as that owner; from then on the source's own word counts, and nobody's who relays it.

use crate::parts::Parts;
use crate::proto::{Repoint, Stage};
use godwit_api::component::ComponentDefinition;
use godwit_api::host::{GatewayPort, PeerHost};
use godwit_api::precache::NO_MOVE;
use godwit_api::wire::{EndView, OrderedEnd};
use godwit_api::{ApiError, Name, Problem};
use godwit_handoff::Ticket;
use godwit_trust::{Capability, CapabilityError, Credentials, SignedCapability};
use godwit_units::{Generation, Lineage, VmId, VolumeId};
use std::io;
use std::time::SystemTime;

const FILE: &str = "capability";

pub(crate) fn forbidden(from: &str, what: &str, why: &dyn std::fmt::Display) -> ApiError {
    tracing::warn!(peer = from, %why, "a node asks for what it was not given: {what}");
    ApiError::new(Problem::Forbidden, format!("{from} may not {what}: {why}"))
        .remedy("only a move that the controller has ordered allows this; if nobody did, look after that host")
}

const NONE: &str = "it shows no capability of the controller";

/// Whether `from` was given the place that it asks for.
///
/// # Errors
/// [`Problem::Forbidden`], saying what does not fit.
pub fn stage(credentials: &Credentials, from: &str, stage: &Stage) -> Result<(), ApiError> {
    let check = || -> Result<(), CapabilityError> {
        let signed = stage.capability.as_ref().ok_or(CapabilityError::Form(NONE))?;
        let allowed = credentials.open(signed)?;
        allowed.may_begin(SystemTime::now())?;
        let (ticket, definition) = (&stage.ticket, &stage.definition);
        Capability::same("the source", &allowed.from.name(), &from)?;
        Capability::same("the destination", &&allowed.to, &credentials.identity())?;
        Capability::same("the move", &allowed.mv, &ticket.mv)?;
        Capability::same("the VM", &allowed.vm, &ticket.vm)?;
        Capability::same("the VM", &allowed.vm, &definition.id)?;
        Capability::same("the lineage", &allowed.lineage, &ticket.lineage)?;
        Capability::same("the generation", &allowed.generation, &ticket.generation)?;
        Capability::same("the volumes", &allowed.volumes, &definition.sorted_volumes())?;
        Capability::same("the wires", &allowed.wires, &definition.sorted_wires())?;
        Capability::same("a VM with the definition", &allowed.definition, &definition.digest())
    };
    check().map_err(|why| forbidden(from, &format!("bring VM {} here", stage.definition.id.0), &why))
}

/// Whether `from` was given the place that it asks for a component.
///
/// # Errors
/// [`Problem::Forbidden`], saying what does not fit.
pub fn component(
    credentials: &Credentials,
    from: &str,
    ticket: &Ticket,
    definition: &ComponentDefinition,
    capability: Option<&SignedCapability>,
) -> Result<(), ApiError> {
    let check = || -> Result<(), CapabilityError> {
        let allowed = credentials.open(capability.ok_or(CapabilityError::Form(NONE))?)?;
        allowed.may_begin(SystemTime::now())?;
        Capability::same("the source", &allowed.from.name(), &from)?;
        Capability::same("the destination", &&allowed.to, &credentials.identity())?;
        Capability::same("the move", &allowed.mv, &ticket.mv)?;
        Capability::same("the component", &allowed.vm, &ticket.vm)?;
        Capability::same("the component", &allowed.vm, &definition.id)?;
        Capability::same("the lineage", &allowed.lineage, &ticket.lineage)?;
        Capability::same("the generation", &allowed.generation, &ticket.generation)?;
        Capability::same("the wires", &allowed.wires, &definition.sorted_endpoints())?;
        Capability::same("a component with the definition", &allowed.definition, &definition.digest())
    };
    check().map_err(|why| forbidden(from, &format!("bring component {} here", definition.id.0), &why))
}

/// In which owner's name somebody asks for something to be done with a volume, and what shows that it was ordered.
#[derive(Clone, Copy, Debug)]
pub struct VolumeRight<'a> {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// The owner's lineage.
    pub lineage: Lineage,
    /// The owner's generation.
    pub generation: Generation,
    /// What stands for what is to be done, and for the volume's size.
    pub digest: [u8; 32],
    /// What shows it.
    pub capability: &'a SignedCapability,
}

/// Whether the controller has ordered what `from` wants done here with a volume.
///
/// # Errors
/// What does not fit.
pub fn volume(credentials: &Credentials, from: &str, asked: &VolumeRight<'_>) -> Result<(), CapabilityError> {
    let allowed = credentials.open(asked.capability)?;
    allowed.may_begin(SystemTime::now())?;
    Capability::same("the source", &allowed.from.name(), &from)?;
    Capability::same("the destination", &&allowed.to, &credentials.identity())?;
    Capability::same("the move", &allowed.mv, &NO_MOVE)?;
    Capability::same("the VM", &allowed.vm, &asked.vm)?;
    Capability::same("the lineage", &allowed.lineage, &asked.lineage)?;
    Capability::same("the generation", &allowed.generation, &asked.generation)?;
    Capability::same("the volumes", &allowed.volumes, &vec![asked.volume])?;
    Capability::same("a volume of the size", &allowed.definition, &asked.digest)
}

/// Where a wire's end on a gateway leads, and in whose name, once `from` has its way: to where it says, or, where it says that it gave the VM
/// back, to where it led.
///
/// # Errors
/// [`Problem::Forbidden`], saying what does not fit.
pub fn repoint(
    credentials: &Credentials,
    from: &str,
    order: &Repoint,
    known: &GatewayPort,
) -> Result<GatewayPort, ApiError> {
    let stands = (known.remote, known.lineage, known.generation);
    let its = known.host.as_ref().is_none_or(|host| host.as_str() == from);
    if its && stands == (order.remote, order.lineage, order.generation) {
        // It leads there in that owner's name already: the owner has booted its guest again, or the first answer was lost.
        return Ok(known.clone());
    }
    let check = || -> Result<GatewayPort, CapabilityError> {
        let signed = order.capability.as_ref().ok_or(CapabilityError::Form(NONE))?;
        let allowed = credentials.open(signed)?;
        if !allowed.wires.contains(&order.wire) {
            let (allowed, asked) = (format!("{:?}", allowed.wires), order.wire.to_string());
            return Err(CapabilityError::Other { what: "the wires", allowed, asked });
        }
        let (had, given) = ((known.lineage, known.generation), (allowed.lineage, allowed.generation));
        let host = known.host.as_ref().map_or("", Name::as_str);
        if allowed.to.name() == from && (order.lineage, order.generation) == (given.0, given.1.next()) {
            // It gave back what it had been given. That counts though it had pointed nothing: its order to do so may be on its way.
            if had > given {
                return Ok(known.clone());
            }
            if had == given && host != allowed.from.name() {
                Capability::same("the host", &host, &from)?;
            }
            let source = allowed.from.name().parse().ok();
            return Ok(GatewayPort { host: source, lineage: given.0, generation: given.1, ..known.clone() });
        }
        owner(&allowed, from, order.lineage, order.generation)?;
        if had == given {
            // Its destination has been heard: it has it, or says itself that it gave it back, and has not had it since.
            Capability::same("the host", &host, &from)?;
        }
        if allowed.to.name() == from {
            Capability::same("the address", &allowed.remote, &order.remote)?;
        } else if had != given {
            // Nobody has had it since: it is where it was.
            if known.host.is_some() {
                Capability::same("the host", &host, &from)?;
            }
            Capability::same("the address", &known.remote, &order.remote)?;
        }
        let (remote, lineage, generation) = (order.remote, order.lineage, order.generation);
        Ok(GatewayPort { remote, host: from.parse().ok(), lineage, generation, ..known.clone() })
    };
    check().map_err(|why| forbidden(from, &format!("point wire {}", order.wire), &why))
}

/// What of `from`'s word on a wire's end is to be believed, where `known` was believed before: an older or equal one changes nothing, a later
/// owner has to be shown, and of where an owner is about to go that owner's own host tells. Whoever took back what this host had been
/// given and gave back is `given_back`'s; what another host had been given, it has to have said itself that it gave back.
///
/// # Errors
/// [`Problem::Forbidden`], saying what does not fit.
pub fn end(
    credentials: &Credentials,
    from: &str,
    told: &OrderedEnd,
    known: &EndView,
    given_back: impl FnOnce() -> Option<PeerHost>,
) -> Result<EndView, ApiError> {
    let view = &told.view;
    let owners = |view: &EndView| (view.lineage, view.generation);
    if (owners(view), view.step) <= (owners(known), known.step) {
        return Ok(known.clone());
    }
    let later = owners(view) > owners(known);
    let check = || -> Result<EndView, CapabilityError> {
        let covers = |signed: Option<&SignedCapability>| {
            let allowed = credentials.open(signed.ok_or(CapabilityError::Form(NONE))?)?;
            if allowed.wires.contains(&told.endpoint) {
                return Ok(allowed);
            }
            let (wires, asked) = (format!("{:?}", allowed.wires), told.endpoint.to_string());
            Err(CapabilityError::Other { what: "the wires", allowed: wires, asked })
        };
        if later {
            let allowed = covers(view.capability.as_ref())?;
            owner(&allowed, view.host.name.as_str(), view.lineage, view.generation)?;
            if allowed.to.name() == view.host.name.as_str() {
                Capability::same("the address", &allowed.remote, &view.host.underlay)?;
            } else {
                let given = owners(known) == (allowed.lineage, allowed.generation);
                let is_at = |host: &PeerHost| {
                    Capability::same("the address", &host.underlay, &view.host.underlay)?;
                    Capability::same("the host", &host.name, &view.host.name)
                };
                if let Some(source) = given_back() {
                    is_at(&source)?;
                } else if given && known.host.name.as_str() == from && allowed.to.name() == from {
                    // It gave back what it had been given: its last word. The source's own is later.
                    let step = known.step.saturating_add(1);
                    return Ok(EndView { host: view.host.clone(), step, coming: None, ..known.clone() });
                } else {
                    // It has it where it was, as far as anybody has heard.
                    is_at(&known.host)?;
                    if given && view.host.name.as_str() != from {
                        return Ok(known.clone());
                    }
                }
            }
        }
        // What is relayed may have been made up on the way.
        let own_word = view.host.name.as_str() == from;
        if !own_word || (!later && view.host != known.host) {
            return Ok(if later { EndView { step: 0, coming: None, ..view.clone() } } else { known.clone() });
        }
        if let Some(coming) = &view.coming {
            let allowed = covers(coming.capability.as_ref())?;
            Capability::same("the source", &allowed.from.name(), &from)?;
            Capability::same("the destination", &allowed.to.name(), &coming.host.name.as_str())?;
            Capability::same("the lineage", &allowed.lineage, &view.lineage)?;
            Capability::same("the generation", &allowed.generation, &view.generation.next())?;
            Capability::same("the address", &allowed.remote, &coming.host.underlay)?;
        }
        let capability = if later { view.capability.clone() } else { known.capability.clone() };
        Ok(EndView { capability, ..view.clone() })
    };
    check().map_err(|why| forbidden(from, &format!("say where endpoint {} is", told.endpoint), &why))
}

/// Whether `who` owns the VM as this generation, if the move goes as it was ordered: as its destination, or as its source that took it
/// back after the seal.
pub(crate) fn owner(
    allowed: &Capability,
    who: &str,
    lineage: Lineage,
    generation: Generation,
) -> Result<(), CapabilityError> {
    Capability::same("the lineage", &allowed.lineage, &lineage)?;
    if allowed.to.name() == who && allowed.generation == generation {
        return Ok(());
    }
    if allowed.from.name() == who && allowed.generation.next() == generation {
        return Ok(());
    }
    let (to, from) = (allowed.to.name(), allowed.from.name());
    let next = allowed.generation.next().0;
    let asked = format!("{who} as {}", generation.0);
    let allowed = format!("{to} as {}, or {from} as {next}", allowed.generation.0);
    Err(CapabilityError::Other { what: "the owner", allowed, asked })
}

/// Keeps the capability of a VM that comes here: its gateways will ask for it, perhaps after a restart.
///
/// # Errors
/// When the medium fails.
pub fn keep(parts: &Parts, signed: &SignedCapability) -> io::Result<()> {
    crate::durable::replace(&parts.folder.join(FILE), String::from(signed.clone()).as_bytes())
}

/// Keeps what shows that this host owns the VM now, as [`keep`] does, where an order from here has brought it: the next order takes that one's place.
///
/// # Errors
/// When the medium fails.
pub fn keep_held(credentials: &Credentials, parts: &Parts) -> io::Result<()> {
    let (lineage, generation) = parts.view().owner;
    let left = parts.file().order.and_then(|order| order.capability);
    match held_among(credentials, [None, left], Lineage(lineage), Generation(generation)) {
        Some(signed) => keep(parts, &signed),
        None => Ok(()),
    }
}

/// What shows that this host owns the VM as this generation: the capability that it came with, or that it left with and was taken
/// back. None where it was created here.
#[must_use]
pub fn held(
    credentials: &Credentials,
    parts: &Parts,
    lineage: Lineage,
    generation: Generation,
) -> Option<SignedCapability> {
    let came = std::fs::read_to_string(parts.folder.join(FILE)).ok().and_then(|text| text.try_into().ok());
    let left = parts.file().order.and_then(|order| order.capability);
    held_among(credentials, [came, left], lineage, generation)
}

/// As [`held`], of those that a component came with and left with.
#[must_use]
pub fn held_among(
    credentials: &Credentials,
    both: [Option<SignedCapability>; 2],
    lineage: Lineage,
    generation: Generation,
) -> Option<SignedCapability> {
    let me = credentials.identity().name();
    let mut both = both.into_iter().flatten();
    both.find(|signed| credentials.open(signed).is_ok_and(|c| owner(&c, me, lineage, generation).is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::View;
    use crate::registry::{Power, VmFile};
    use godwit_api::host::Ownership;
    use godwit_trust::{Authority, Identity, Role, Validity};
    use std::time::Duration;

    #[test]
    fn what_a_vm_came_with_and_what_it_left_with_are_found_again_each_for_its_owner() {
        let dir = tempfile::tempdir().expect("a folder");
        let authority = Authority::create(&dir.path().join("ca")).expect("is made");
        let issue = |role, name: &str| {
            let identity = Identity::new(role, name).expect("a name");
            authority
                .issue(&identity, Validity::days(1))
                .expect("is issued")
                .write(&dir.path().join(name))
                .expect("writes");
            Credentials::load(&dir.path().join(name)).expect("loads")
        };
        let (me, controller) = (issue(Role::Node, "b"), issue(Role::Controller, "c"));
        let definition: godwit_api::vm::VmDefinition = serde_json::from_value(serde_json::json!({
            "id": 1, "name": "web", "volumes": [], "wires": [], "spec": {"memory": 4096},
        }))
        .expect("a definition");
        let file = VmFile::new(definition, Power::Off);
        let parts = Parts::new(dir.path().join("vm"), dir.path().join("run"), file);
        std::fs::create_dir(&parts.folder).expect("is made");
        let grant = |from: &str, to: &str, generation| {
            let now = SystemTime::now();
            let capability = Capability {
                mv: godwit_units::MoveId(1),
                vm: parts.id,
                lineage: Lineage::FIRST,
                generation: Generation(generation),
                from: Identity::node(from).expect("a name"),
                to: Identity::node(to).expect("a name"),
                remote: [10, 0, 0, 2].into(),
                volumes: vec![],
                wires: vec![7],
                definition: parts.definition().digest(),
                begins: now,
                ends: now + Duration::from_secs(1),
            };
            controller.grant(&capability).expect("is signed")
        };
        let found = |generation| held(&me, &parts, Lineage::FIRST, Generation(generation));
        assert_eq!(found(2), None);
        let came = grant("a", "b", 2);
        keep(&parts, &came).expect("is kept");
        let left = grant("b", "c", 3);
        let order = |capability: &SignedCapability| {
            let order = serde_json::json!({
                "id": 1, "vm": 1, "disk": "mirror", "limit": null, "vcpus": null, "capability": capability,
                "to": {"name": "c", "underlay": "10.0.0.3", "link":
                    {"control": "10.0.0.3:1", "disk": "10.0.0.3:2", "memory": "10.0.0.3:3"}},
            });
            let order = serde_json::from_value(order).expect("an order");
            parts.change(|file| file.order = Some(order)).expect("is kept");
        };
        order(&left);
        // It came as 2; it goes as 3 to another; it would be taken back as 4.
        assert_eq!([found(2), found(3), found(4), found(5)], [Some(came), None, Some(left.clone()), None]);
        // It was taken back, and is to go once more.
        parts.publish(View { ownership: Ownership::Here, owner: (0, 4), newest: (0, 4), ticket: None });
        keep_held(&me, &parts).expect("is kept");
        order(&grant("b", "c", 5));
        assert_eq!(found(4), Some(left));
    }
}
