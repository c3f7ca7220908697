//! VMs of this host that cannot be had: their file, their record or a disk of theirs cannot be read. Nothing is done with them,
//! and nothing of theirs is touched, so that what is left can still be rescued; the other VMs are looked after as ever.

use godwit_api::{ApiError, Problem};
use godwit_handoff::VmId;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Which, and why.
#[derive(Debug, Default)]
pub struct Quarantine {
    vms: Mutex<BTreeMap<VmId, String>>,
}

impl Quarantine {
    /// Puts a VM there.
    pub fn add(&self, vm: VmId, why: String) {
        tracing::error!(
            vm = vm.0,
            why,
            "quarantined: nothing is done with this VM until it is mended and the node restarted"
        );
        self.vms.lock().unwrap_or_else(PoisonError::into_inner).insert(vm, why);
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> BTreeMap<VmId, String> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// That a VM is not there.
    ///
    /// # Errors
    /// Why it is, and what to do.
    pub fn check(&self, vm: VmId) -> Result<(), ApiError> {
        match self.vms.lock().unwrap_or_else(PoisonError::into_inner).get(&vm) {
            None => Ok(()),
            Some(why) => Err(ApiError::new(Problem::Failed, format!("VM {} is quarantined here: {why}", vm.0))
                .remedy("mend what is said to be broken, or bring it back from a copy, and restart the node")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarantined_vm_is_here_and_cannot_be_had_and_no_other_is_concerned() {
        let quarantine = Quarantine::default();
        quarantine.add(VmId(3), "vm.json: no JSON".into());
        quarantine.check(VmId(4)).expect("another");
        let error = quarantine.check(VmId(3)).expect_err("quarantined");
        // "Not found" would have a controller conclude that it is gone.
        assert_eq!(error.problem, Problem::Failed);
        assert!(error.message.contains("no JSON"), "{error}");
        assert_eq!(quarantine.all().len(), 1);
    }
}
