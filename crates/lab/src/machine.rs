//! A guest, whoever runs it: the lab's own QEMU (baselines) or Godwit.

use crate::fabric::Fabric;
use crate::godwit::hosted::Hosted;
use crate::guest::{Guest, load_program};
use anyhow::Result;
use godwit_load::control::Control;
use std::fs::File;
use std::time::Duration;

/// A guest that runs somewhere.
#[derive(Debug)]
pub enum Machine {
    /// By QEMU alone.
    Qemu(Guest),
    /// By Godwit.
    Godwit(Hosted),
}

impl Machine {
    /// The site that it is in.
    #[must_use]
    pub fn site(&self) -> &str {
        match self {
            Self::Qemu(guest) => &guest.site,
            Self::Godwit(vm) => &vm.site,
        }
    }

    /// Its RAM, readable from here.
    #[must_use]
    pub fn ram(&self) -> &File {
        match self {
            Self::Qemu(guest) => &guest.ram,
            Self::Godwit(vm) => &vm.ram,
        }
    }

    /// Waits until its load program is up.
    ///
    /// # Errors
    /// With the end of the console when it does not come up.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<()> {
        match self {
            Self::Qemu(guest) => guest.wait_ready(timeout),
            Self::Godwit(vm) => vm.wait_ready(timeout),
        }
    }

    /// A connection to its load program, from its own site.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn control(&self, fabric: &Fabric) -> Result<Control> {
        match self {
            Self::Qemu(guest) => load_program(fabric.site(&guest.site), &guest.spec, &guest.console),
            Self::Godwit(vm) => vm.control(),
        }
    }

    /// What it said last, for a failure's report.
    #[must_use]
    pub fn last_words(&self) -> String {
        match self {
            Self::Qemu(guest) => guest.last_words(),
            Self::Godwit(vm) => vm.last_words(),
        }
    }
}
