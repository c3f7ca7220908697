//! One site: the node's machine, its ledger, the QEMU and what is open to the world.

use godwit_handoff::{
    Action, Destination, DestinationState, Event, Guards, Ledger, Record, Seen, Source, Ticket, Verdict, VmId,
};
use std::collections::VecDeque;
use std::convert::Infallible;

/// The hand-off's machine that a node has for the VM at present.
#[derive(Clone, Debug)]
pub enum Machine {
    /// It owns the VM, or owned it last.
    Source(Source),
    /// It receives the VM, or refused it last.
    Destination(Destination),
}

impl Machine {
    /// The machine for a record, whichever role it belongs to.
    #[must_use]
    pub fn recover(record: Record, seen: Seen, guards: Guards) -> Self {
        match Source::recover_with(record, seen, guards) {
            Ok(source) => Self::Source(source),
            Err(_) => Self::Destination(
                Destination::recover_with(record, seen, guards).expect("every record belongs to one of the two roles"),
            ),
        }
    }

    /// Passes an event on.
    pub fn handle(&mut self, event: Event) -> Verdict {
        match self {
            Self::Source(source) => source.handle(event),
            Self::Destination(destination) => destination.handle(event),
        }
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        match self {
            Self::Source(source) => source.poll_action(),
            Self::Destination(destination) => destination.poll_action(),
        }
    }

    /// The state, for a trace.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Source(source) => format!("{:?}", source.state()),
            Self::Destination(destination) => format!("{:?}", destination.state()),
        }
    }

    /// Whether a destination's part has ended in ownership, so that a source has to take over.
    #[must_use]
    pub fn settled(&self) -> Option<Record> {
        match self {
            Self::Destination(d) => match d.state() {
                DestinationState::Settled { owner } => Some(Record::Owned(*owner)),
                _ => None,
            },
            Self::Source(_) => None,
        }
    }
}

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
