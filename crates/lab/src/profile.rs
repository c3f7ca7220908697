//! The step `profile`: a guest's memory is watched by its node, as `godwit vm profile` has it done, and the scenario goes on afterwards.

use crate::machine::Machine;
use crate::pass::{Pass, lock};
use crate::scenario::ProfileStep;
use anyhow::Result;
use godwit_api::profile::Profile;

impl Pass {
    /// Watches a guest.
    ///
    /// # Errors
    /// With the command's words.
    pub(crate) fn profile(&mut self, step: &ProfileStep) -> Result<()> {
        let name = step.vm.get_ref();
        self.join(|vm| vm == name);
        let vm = self.vm(name);
        let installation = match lock(&vm.guest).as_ref() {
            Some(Machine::Godwit(hosted)) => Some(hosted.installation().clone()),
            _ => None,
        };
        let Some(installation) = installation else {
            self.leave_out("profile");
            return Ok(());
        };
        let (lasting, interval) = (format!("{}s", step.s), format!("{}s", step.interval_s));
        let told: Profile = installation.json(&["vm", "profile", name, "--for", &lasting, "--interval", &interval])?;
        self.progress.note(&format!(
            "{name} changes {:.0} pages a second, {} in all; packed to {:?}, again to {:?}, {:.0} % zero; {} looks took {:.2} s, {} of log",
            told.changed_per_s,
            told.working_set,
            told.contents.packed,
            told.contents.again,
            told.contents.zero * 100.0,
            told.looks,
            told.looking_s,
            told.log_bytes
        ));
        let Some(to) = step.to.as_ref().map(|to| to.get_ref().as_str()) else { return Ok(()) };
        let told = installation.command(["predict", name, "--to", to])?;
        self.progress.note(&told);
        Ok(())
    }
}
