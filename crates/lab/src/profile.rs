//! The step `profile`: a guest's memory is watched by its node, as `godwit vm profile` has it done, and the scenario goes on afterwards.
//!
//! A baseline's guest is watched by the lab itself ([`ram_watch`]), and its log goes into the report, so that the move that follows can be foretold
//! by the same models from what this very guest was seen to write.

use crate::machine::Machine;
use crate::pass::{Pass, lock};
use crate::ram_watch;
use crate::report::ProfileReport;
use crate::scenario::ProfileStep;
use anyhow::{Context, Result};
use godwit_api::hex;
use godwit_api::profile::Profile;
use godwit_units::Bytes;
use std::time::Duration;

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
        let Some(installation) = installation else { return self.profile_baseline(step) };
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

    fn profile_baseline(&mut self, step: &ProfileStep) -> Result<()> {
        let name = step.vm.get_ref();
        let vm = self.vm(name);
        let at_s = self.zero.elapsed().as_secs_f64();
        let (lasting, interval) = (Duration::from_secs(step.s.into()), Duration::from_secs_f64(step.interval_s));
        let guest = lock(&vm.guest);
        let guest = guest.as_ref().with_context(|| format!("VM `{name}` was lost"))?;
        let seen = ram_watch::watch(guest.ram(), vm.spec.memory, lasting, interval)?;
        self.progress.note(&format!(
            "{name} changes {:.0} pages a second; looks took {:.2} s, {} of log",
            seen.changed_per_s,
            seen.looking.as_secs_f64(),
            Bytes(seen.log.len() as u64)
        ));
        self.profiles.push(ProfileReport {
            at_s,
            changed_per_s: seen.changed_per_s,
            looking_s: seen.looking.as_secs_f64(),
            ..ProfileReport::new(name, &seen.log)
        });
        Ok(())
    }
}

impl ProfileReport {
    /// Of a VM and its log's bytes.
    #[must_use]
    pub fn new(vm: &str, log: &[u8]) -> Self {
        Self { vm: vm.to_owned(), log: hex::text(log), ..Self::default() }
    }

    /// The log's bytes; none where they are not hexadecimal.
    #[must_use]
    pub fn bytes(&self) -> Option<Vec<u8>> {
        hex::bytes(&self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_from_the_report_as_it_was_written_and_nothing_else_is_believed() {
        let of = |log: &str| ProfileReport { log: log.into(), ..ProfileReport::default() };
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(ProfileReport::new("vm", &bytes).bytes(), Some(bytes));
        assert!(of("0").bytes().is_none() && of("0g").bytes().is_none() && of("\u{e9}").bytes().is_none());
    }
}
