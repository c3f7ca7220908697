//! One site: the node's machine, its ledger, its disk and network, the QEMU, and what is under way.

use crate::media::{BLOCKS, Store};
use crate::nic::Nic;
use godwit_handoff::{Action, Event, Generation, Ledger, Lineage, Machine, Record, Seen, Ticket, VmId};
use godwit_units::{Bytes, VolumeId};
use godwit_volume::mirror::{self, Source, Target};
use godwit_volume::{BLOCK, Guards, Replica, VolumeError};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::Path;

/// A disk with one record: what is durable, and what is being written.
#[derive(Clone, Debug, Default)]
pub struct SimLedger {
    /// What survives, unless there is something beneath.
    pub durable: Option<Record>,
    /// What the medium has, where the process that wrote the other one did not live to sync it: a loss of power brings it back.
    pub beneath: Option<Option<Record>>,
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
        self.beneath = None;
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
    /// Source: its post-copy has begun. Gives pages; resumes only when that is cancelled, and `cont` does so.
    Serving,
    /// Destination: the stream is coming in.
    Incoming,
    /// Destination: everything is in, paused.
    Loaded,
    /// Destination: everything but pages of memory is in, paused.
    Fetching,
}

/// What the guest wants of its disk.
#[derive(Clone, Debug)]
pub enum Wish {
    /// Sectors to be this.
    Write(std::ops::Range<usize>, u64),
    /// Blocks to be zero.
    Zero(std::ops::Range<usize>),
    /// What was written to be durable.
    Flush,
}

/// A request of the guest, kept by its QEMU until it is answered.
#[derive(Clone, Debug)]
pub struct Request {
    /// What it is.
    pub wish: Wish,
    /// When the export took it, if it did: it waits for the mirror then.
    pub taken: Option<(u64, mirror::Place)>,
}

/// A QEMU, and what its guest remembers.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// What it does.
    pub state: QemuState,
    /// The number of the guest's last write, in its RAM.
    pub ram: u64,
    /// The migration under way: the ticket, and a number that tells two streams of one ticket apart.
    pub stream: Option<(Ticket, u64)>,
    /// Whether the node ended it, rather than a fault.
    pub quit: bool,
    /// Source: it keeps its stream's other end, which does not end with the node then.
    pub held: bool,
    /// Source: its post-copy has broken off. It waits for another stream.
    pub broken_off: bool,
    /// Source: it was about to agree over another stream what has come, when that ended, too.
    pub stuck: bool,
    /// A fault has ended it while it held what its guest needed.
    pub lost: bool,
    /// Destination: the attempt of which pages are still to come. A guest that runs waits for them now and then.
    pub owed: Option<Ticket>,
    /// Requests that are not answered, oldest first.
    pub requests: VecDeque<Request>,
}

impl Qemu {
    /// There is no process any more; `ended`: by the node.
    pub fn die(&mut self, ended: bool) {
        if self.state != QemuState::Dead {
            self.quit = ended;
            self.lost |= !ended && (self.state == QemuState::Fetching || self.owed.is_some());
        }
        (self.held, self.broken_off, self.stuck) = (false, false, false);
        self.state = QemuState::Dead;
        self.stream = None;
        self.owed = None;
        self.requests.clear();
    }
}

/// The disk as the node's process has it.
#[derive(Debug)]
pub struct Disk {
    /// What it lies on; outlives the process.
    pub store: Store,
    /// None while the process is down.
    pub replica: Option<Replica>,
    /// Whether the guest's writes are taken.
    pub open: bool,
    /// The mirror of a move from here.
    pub source: Option<Source>,
    /// The mirror of a move to here.
    pub target: Option<Target>,
    /// The attempt whose blocks are expected.
    pub receiving: Option<Ticket>,
    /// The attempt whose blocks are all here.
    pub complete: Option<Ticket>,
}

impl Disk {
    fn new() -> Self {
        let store = Store::new();
        let size = Bytes(BLOCKS as u64 * BLOCK);
        Replica::format(&store, VolumeId(1), size).expect("an empty disk takes a description");
        Self { store, replica: None, open: false, source: None, target: None, receiving: None, complete: None }
    }

    /// The node's process starts.
    ///
    /// # Errors
    /// When the medium fails on the way.
    pub fn start(&mut self, guards: Guards) -> Result<(), VolumeError> {
        self.replica = Some(Replica::open_on_with(Path::new("simulated"), self.store.media(), guards)?.0);
        Ok(())
    }

    /// The node's process ends.
    pub fn lose_process(&mut self) {
        self.replica = None;
        self.open = false;
        self.source = None;
        self.target = None;
        self.receiving = None;
        self.complete = None;
    }
}

/// A move from here, as its node drives it.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    /// Tells it from others of the same ticket.
    pub id: u64,
    /// The attempt.
    pub ticket: Ticket,
    /// The disks are in step, and QEMU migrates.
    pub memory: bool,
    /// QEMU's stream has brought the end of RAM, or all that comes of it before the guest has gone.
    pub ram_ended: bool,
    /// A part of memory follows the guest.
    pub follows: bool,
}

/// A part of an effect.
#[derive(Clone, Debug)]
pub enum Step {
    /// Whether what was granted is still held.
    Look,
    /// The replica takes this owner's writes.
    OpenDisk(Lineage, Generation),
    /// An order to the endpoint.
    Endpoint(godwit_wire::Order),
    /// One thing that its machine wants done.
    Kernel(godwit_wire::Action, godwit_wire::State),
    /// Nobody waits for the other side any more.
    LetGo,
    /// The guest's last writes have come, or have not until then.
    Drained(u64),
    /// The replica takes no writes.
    Freeze,
    /// The QEMU ends, and the VM with it.
    EndQemu,
    /// What is left of a QEMU ends, to make room for one that boots the VM.
    MakeRoom,
    /// The QEMU goes on.
    Cont,
    /// A QEMU boots the VM.
    Boot,
    /// The replica is another host's, or nobody writes to it.
    Rest,
    /// The replica expects an attempt's blocks.
    ReceiveDisk(Ticket),
    /// A QEMU waits for an attempt's stream.
    Incoming(Ticket),
    /// A migration begins.
    Migrate(Ticket),
    /// QEMU is let go to `postmigrate`.
    Shut,
    /// A migration is given up.
    Abort,
    /// The machine is told.
    Report(Event),
}

/// What died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The node's process.
    Process,
    /// The host's power.
    Power,
}

/// One site.
#[derive(Debug)]
pub struct Site {
    /// The node's machine; none while the node is down, or before the VM was ever here.
    pub machine: Option<Machine>,
    /// Whether the node's process runs.
    pub up: bool,
    /// Fenced: stays down until the fence is lifted.
    pub fenced: bool,
    /// Counts starts of the process: what an earlier one began is not reported to a later one.
    pub incarnation: u32,
    /// The records.
    pub ledger: SimLedger,
    /// Effects not done yet, oldest first.
    pub effects: VecDeque<Action>,
    /// What is left of the first of them, once it has begun.
    pub steps: Option<VecDeque<Step>>,
    /// The QEMU.
    pub qemu: Qemu,
    /// The disk.
    pub disk: Disk,
    /// The network.
    pub nic: Nic,
    /// A move from here.
    pub moving: Option<Moving>,
    /// The attempt that a place is being looked for.
    pub reserving: Option<Ticket>,
    /// Only the timer set last counts.
    pub timer: u64,
    /// A claim allows the next boot to drop RAM.
    pub may_drop_ram: bool,
    /// What a fuse in the disk stands for.
    pub fuse: Death,
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
            steps: None,
            qemu: Qemu {
                state: QemuState::Dead,
                ram: 0,
                stream: None,
                quit: false,
                held: false,
                broken_off: false,
                stuck: false,
                lost: false,
                owed: None,
                requests: VecDeque::new(),
            },
            disk: Disk::new(),
            nic: Nic::default(),
            moving: None,
            reserving: None,
            timer: 0,
            may_drop_ram: false,
            fuse: Death::Process,
        }
    }

    /// What a restarting node finds of the QEMU. `verified`: the node remembers that everything had come; ours does not, but
    /// the hand-off allows for one that does.
    #[must_use]
    pub const fn seen(&self, verified: bool) -> Seen {
        match (self.qemu.state, self.ledger.durable) {
            // Its pages were given up, and will never come.
            (QemuState::Running, Some(Record::Owned(_) | Record::Started(_))) if self.qemu.owed.is_some() => Seen::Gone,
            (QemuState::Running, _) => Seen::Running,
            (QemuState::Fetching, Some(Record::Prepared(_) | Record::Draining(_))) => Seen::Loaded,
            (QemuState::Loaded, Some(Record::Granted(_) | Record::Started(_))) => Seen::Loaded,
            (QemuState::Loaded, Some(Record::Staged(_))) if verified => Seen::Loaded,
            (_, Some(Record::Staged(_))) | (QemuState::Dead | QemuState::Incoming, _) => Seen::Gone,
            (
                QemuState::Stopped
                | QemuState::Postmigrate
                | QemuState::Serving
                | QemuState::Loaded
                | QemuState::Fetching,
                _,
            ) => Seen::Stopped,
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
