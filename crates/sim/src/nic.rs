//! One site's network: the kernel's side of an endpoint, and the gateway that leads to whoever has the VM.
//!
//! The endpoint's machine remembers nothing: for each order it is rebuilt from what the kernel shows, as on a node.

use godwit_wire::{Action, Endpoint, Order, Port, PortAction, PortOrder, PortState, Sequence, Stale, State};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

/// What the kernel has of an endpoint; and what of it the node's process does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nic {
    tap: bool,
    alias: Option<Sequence>,
    joined: bool,
    /// A task of the process announces it.
    announcing: bool,
}

impl Nic {
    /// Whether frames pass.
    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.tap && self.joined
    }

    /// Whether somebody announces an endpoint that no frame passes.
    #[must_use]
    pub const fn announces_nothing(&self) -> bool {
        self.announcing && !self.is_active()
    }

    /// As whom it was activated last.
    #[must_use]
    pub const fn sequence(&self) -> Option<Sequence> {
        self.alias
    }

    /// Whether anything is left of it.
    #[must_use]
    pub const fn exists(&self) -> bool {
        self.tap
    }

    /// Asks the machine what an order needs.
    ///
    /// # Errors
    /// What the machine says.
    pub fn order(&self, order: Order) -> Result<VecDeque<(Action, State)>, Stale> {
        let seen = if self.tap { godwit_wire::state_of_tap(self.alias, self.joined) } else { State::Absent };
        let mut machine = Endpoint::recover(seen);
        let actions = machine.handle(order)?;
        Ok(actions.iter().map(|action| (*action, machine.state())).collect())
    }

    /// Does one thing; `state` is the machine's when all are done.
    pub fn perform(&mut self, action: Action, state: State) {
        match action {
            Action::MakeTap => {
                self.tap = true;
                self.joined = false;
            }
            Action::Record => {
                if let State::Active(sequence) = state {
                    self.alias = Some(sequence);
                }
            }
            Action::Join => self.joined = self.tap,
            Action::Announce => self.announcing = true,
            Action::Hush => self.announcing = false,
            Action::Pen => self.joined = false,
            Action::RemoveTap => *self = Self { announcing: self.announcing, ..Self::default() },
            Action::MakeTunnel | Action::RemoveTunnel => {}
        }
    }

    /// The node's process ends.
    pub const fn lose_process(&mut self) {
        self.announcing = false;
    }

    /// The host loses its power.
    pub fn lose_power(&mut self) {
        *self = Self::default();
    }
}

/// A wire's end at a gateway, which the controller points to whoever has the VM.
#[derive(Clone, Copy, Debug)]
pub struct Gateway {
    state: PortState,
}

/// The address of a site, as the gateway knows it.
#[must_use]
pub const fn address(site: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, if site == 0 { 1 } else { 2 }))
}

impl Gateway {
    /// Without a port.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: PortState::Absent }
    }

    /// Points the wire; whether it was taken.
    pub fn attach(&mut self, sequence: Sequence, site: usize) -> bool {
        let mut machine = Port::recover(self.state);
        let Ok(actions) = machine.handle(PortOrder::Attach(sequence, address(site))) else { return false };
        for action in actions {
            match action {
                PortAction::Record(sequence, to) => self.state = PortState::Attached(sequence, to),
                PortAction::Make | PortAction::Point(_) => {}
                PortAction::Remove => self.state = PortState::Absent,
            }
        }
        true
    }

    /// Where it leads.
    #[must_use]
    pub fn leads_to(&self, site: usize) -> bool {
        matches!(self.state, PortState::Attached(_, to) if to == address(site))
    }
}

impl Default for Gateway {
    fn default() -> Self {
        Self::new()
    }
}
