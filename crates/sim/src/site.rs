//! One site: the node's machine, its ledger, the QEMU and what is open to the world.

use godwit_handoff::{Action, Ledger, Machine, Record, Seen, Ticket, VmId};
use std::collections::VecDeque;
use std::convert::Infallible;

/// A disk with one record: what is durable, and what is being written.
#[derive(Clone, Debug, Default)]
pub struct SimLedger {
    /// What survives.
    pub durable: Option<Record>,
    /// Writes under way, oldest first.
    pub pending: VecDeque<Record>,
}

impl Ledger for SimLedger {
    type Error = Infallible;

    fn load(&self, _vm: VmId) -> Result<Option<Record>, Infallible> {
        Ok(self.durable)
    }

    fn store(&mut self, _vm: VmId, record: &Record) -> Result<(), Infallible> {
        self.durable = Some(*record);
        Ok(())
    }
}

/// What a QEMU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuState {
    /// No process.
    Dead,
    /// vCPUs run.
    Running,
    /// Source: vCPUs stopped for the last round; resumes by itself when the socket breaks.
    Stopped,
    /// Source: done; resumes only by `cont`.
    Postmigrate,
    /// Destination: the stream is coming in.
    Incoming,
    /// Destination: everything is in, paused.
    Loaded,
}

/// A QEMU, and what its guest remembers.
#[derive(Clone, Copy, Debug)]
pub struct Qemu {
    /// What it does.
    pub state: QemuState,
    /// The number of the guest's last write, in its RAM.
    pub ram: u64,
    /// The migration under way: the ticket, and a number that tells two streams of one ticket apart.
    pub stream: Option<(Ticket, u64)>,
    /// Whether the node ended it, rather than a fault.
    pub quit: bool,
}

/// One site.
#[derive(Clone, Debug)]
pub struct Site {
    /// The node's machine; none while the node is down, or before the VM was ever here.
    pub machine: Option<Machine>,
    /// Whether the node's process runs.
    pub up: bool,
    /// Fenced: stays down until the fence is lifted.
    pub fenced: bool,
    /// Counts starts of the process: what an earlier one began is not reported to a later one.
    pub incarnation: u32,
    /// The durable records.
    pub ledger: SimLedger,
    /// Effects not done yet, oldest first.
    pub effects: VecDeque<Action>,
    /// The QEMU.
    pub qemu: Qemu,
    /// Whether the export takes writes.
    pub export_open: bool,
    /// Whether the endpoints are active.
    pub endpoint_active: bool,
    /// Only the timer set last counts.
    pub timer: u64,
    /// A claim allows the next boot to drop RAM.
    pub may_drop_ram: bool,
}

impl Site {
    /// A site that has never seen the VM.
    #[must_use]
    pub fn new() -> Self {
        Self {
            machine: None,
            up: true,
            fenced: false,
            incarnation: 0,
            ledger: SimLedger::default(),
            effects: VecDeque::new(),
            qemu: Qemu { state: QemuState::Dead, ram: 0, stream: None, quit: false },
            export_open: false,
            endpoint_active: false,
            timer: 0,
            may_drop_ram: false,
        }
    }

    /// What a restarting node finds of the QEMU.
    #[must_use]
    pub const fn seen(&self) -> Seen {
        match self.qemu.state {
            QemuState::Running => Seen::Running,
            QemuState::Stopped | QemuState::Postmigrate => Seen::Stopped,
            QemuState::Loaded => Seen::Loaded,
            QemuState::Dead | QemuState::Incoming => Seen::Gone,
        }
    }

    /// Whether the guest runs here.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.qemu.state == QemuState::Running
    }
}

impl Default for Site {
    fn default() -> Self {
        Self::new()
    }
}
