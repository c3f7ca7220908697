//! A guest, whoever runs it: the lab's own QEMU (baselines) or Godwit.

use crate::fabric::Fabric;
use crate::godwit::hosted::Hosted;
use crate::guest::{CONTROL_PORT, Guest, load_program};
use anyhow::{Context, Result};
use godwit_load::control::Control;
use std::fs::File;
use std::net::{SocketAddr, TcpStream};
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

    /// A connection to its load program that is made within `limit`, and on which a quick answer may take `patience`.
    ///
    /// # Errors
    /// When the guest is not reached.
    pub fn ask(&self, fabric: &Fabric, limit: Duration, patience: Duration) -> Result<Control> {
        let spec = match self {
            Self::Qemu(guest) => &guest.spec,
            Self::Godwit(vm) => &vm.spec,
        };
        let to = SocketAddr::from((spec.address, CONTROL_PORT));
        let made = fabric.entrance(self.site()).ns.run(move || TcpStream::connect_timeout(&to, limit));
        let stream = made.with_context(|| format!("the load program of `{}` is not reached", spec.name))?;
        Ok(Control::new(stream, patience))
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
