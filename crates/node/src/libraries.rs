//! What the volumes of this host hold, for each trust domain apart: a mirror that comes in need not bring what is here already.
//!
//! The domain stands in the VM's definition, whose digest the controller has signed: a node that was taken over cannot bring a VM
//! into a domain that is not its own, to find out what that has. A VM of no domain is one by itself.
//!
//! Libraries are in memory, under keys that are made anew with them. They are filled by what comes, and behind everybody's back by what lies here
//! already: after a restart, and after an image was imported.

use crate::node::Node;
use crate::parts::{Parts, lock};
use godwit_api::Name;
use godwit_content::{Domains, Key, TrustDomain};
use godwit_units::{Bytes, VmId};
use godwit_volume::Library;
use std::sync::{Arc, Mutex};

/// Memory of a library at the most: what 4 GiB of contents take. It is taken as it is filled.
const MEMORY: Bytes = Bytes::mib(16);
/// Domains of which something is remembered, and as many VMs of none: of others, what is in use. A disk that merely lies here uses its
/// domain's; that of a VM of none is of use to nobody else, and used only while something comes in.
const MOST: usize = 16;

/// How fast disks are read for that, all together and scrubs among them, and how much at once.
const RATE: Bytes = Bytes::mib(32);
const PIECE: Bytes = Bytes::mib(1);

/// Looks at what lies on a VM's disks here, for the library of its domain. One without a domain shares with nobody: whatever could be named
/// to it lies on the very disk that it would be named for.
pub(crate) fn look_at(node: &Arc<Node>, parts: &Parts) {
    if parts.definition().domain.is_none() {
        return;
    }
    for disk in parts.disks() {
        let Some(library) = disk.library() else { continue };
        let (node, disk) = (Arc::downgrade(node), Arc::downgrade(&disk));
        tokio::spawn(async move {
            let mut from = Some(0);
            while let (Some(at), Some(node), Some(disk)) = (from, node.upgrade(), disk.upgrade()) {
                let (name, library) = (disk.name.clone(), library.clone());
                let looked = disk.blocking(move |disk| library.look(disk.replica(), at, PIECE)).await;
                from = match looked {
                    Ok(Some((next, read))) => {
                        node.pace().take(read.0, RATE).await;
                        Some(next)
                    }
                    Ok(None) => None,
                    Err(error) => {
                        tracing::warn!(volume = name, %error, "what lies here is not looked at for others of its domain");
                        None
                    }
                };
            }
        });
    }
}

/// The libraries of a node.
#[derive(Debug)]
pub(crate) struct Libraries {
    shared: Mutex<Domains<Library>>,
    /// Of VMs of no domain. Apart, because there may be many, and they would take the places of those that are of use to others.
    alone: Arc<Alone>,
}

type Alone = Mutex<Domains<Library>>;

/// Where a disk finds its library.
#[derive(Debug)]
pub(crate) enum Shelf {
    /// Its domain's, which stays as long as the disk does.
    Shared(Arc<Library>),
    /// Its VM's own: among the last that were asked for, in use, or made anew.
    Alone(Arc<Alone>, VmId),
}

impl Shelf {
    /// The library; `None` as [`Libraries::shelf`].
    pub(crate) fn library(&self) -> Option<Arc<Library>> {
        match self {
            Self::Shared(library) => Some(library.clone()),
            Self::Alone(alone, vm) => find(alone, &domain(*vm, None)),
        }
    }
}

fn find(all: &Mutex<Domains<Library>>, domain: &TrustDomain) -> Option<Arc<Library>> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).ok()?;
    Some(lock(all).of(domain, || Library::new(Key::new(key), MEMORY)))
}

impl Default for Libraries {
    fn default() -> Self {
        Self { shared: Mutex::new(Domains::new(MOST)), alone: Arc::new(Mutex::new(Domains::new(MOST))) }
    }
}

/// Whose volumes a VM's own may share contents with. The two kinds cannot be taken for each other: a name has no colon.
fn domain(vm: VmId, domain: Option<&Name>) -> TrustDomain {
    TrustDomain(domain.map_or_else(|| format!("vm:{}", vm.0), |name| format!("domain:{name}")))
}

impl Libraries {
    /// Where a VM's volumes find theirs; `None` where the system gives no random bytes for a key, which costs bytes and nothing else.
    pub(crate) fn shelf(&self, vm: VmId, of: Option<&Name>) -> Option<Shelf> {
        match of {
            Some(_) => find(&self.shared, &domain(vm, of)).map(Shelf::Shared),
            None => Some(Shelf::Alone(self.alone.clone(), vm)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_of_one_domain_share_a_library_and_no_others_do() {
        let all = Libraries::default();
        let of = |id, domain: Option<&str>| {
            let shelf = all.shelf(VmId(id), domain.map(|name| name.parse().expect("a name")).as_ref());
            shelf.expect("a key").library().expect("a key")
        };
        assert!(Arc::ptr_eq(&of(1, Some("acme")), &of(2, Some("acme"))));
        assert!(!Arc::ptr_eq(&of(1, Some("acme")), &of(2, Some("other"))));
        assert!(!Arc::ptr_eq(&of(1, None), &of(2, None)), "two VMs of no domain are two customers");
        assert!(Arc::ptr_eq(&of(1, None), &of(1, None)));
        assert!(!Arc::ptr_eq(&of(1, None), &of(1, Some("vm-1"))));
        let (acme, shelf) = (of(1, Some("acme")), all.shelf(VmId(1), None).expect("one"));
        let (used, unused) = (shelf.library().expect("a key"), Arc::downgrade(&of(2, None)));
        for vm in 0..2 * MOST as u64 {
            of(vm, None);
        }
        assert!(Arc::ptr_eq(&acme, &of(2, Some("acme"))), "VMs of no domain took its place");
        assert!(Arc::ptr_eq(&used, &shelf.library().expect("a key")), "it is in use");
        assert!(unused.upgrade().is_none(), "a disk of a VM of no domain holds what nobody looks up in");
    }
}
