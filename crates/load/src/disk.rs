//! The disk load: writes records to random slots, and keeps account of what the disk has acknowledged.
//!
//! Writes are synchronous and bypass the page cache (O_DIRECT), so a check reads what the disk holds and not what the
//! guest remembers, and the longest write is the stall that a move caused. Records are acknowledged in groups: one
//! flush every [`FLUSH_EVERY`], or sooner when [`MAX_UNACKNOWLEDGED`] have gathered.
//!
//! A failed write leaves its slot in doubt until it is written again. A failed flush acknowledges nothing that was
//! written before it, ever: the kernel may have dropped the data along with the error, so a later flush that succeeds
//! says nothing about it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    activity::Recorder,
    content::Prf,
    fault::Fault,
    page::Page,
    protocol::{
        BadRecord, CheckReport, CorruptReport, CorruptTarget, DiskCheck, DiskStatus, MAX_LISTED, Problem, Refusal,
    },
    record::{LastWrite, RECORD_BYTES, RecordFormat, Sequence, Slot, SlotState},
    wire::refusal,
    worker::{ErrorLog, Longest, RunClock, Work},
};

/// Time between flushes.
pub const FLUSH_EVERY: Duration = Duration::from_millis(250);

/// Most records between two flushes, 4 MiB: bounds what a check must leave open.
pub const MAX_UNACKNOWLEDGED: usize = 1024;

const RECORDS_PER_MIB: u32 = (1 << 20) / RECORD_BYTES as u32;

/// A disk the program may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// Block device or preallocated file.
    pub path: PathBuf,
    /// Where on it the region starts, bytes; a multiple of [`RECORD_BYTES`].
    pub offset: u64,
}

/// Why a disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The load names a disk that the program was not given.
    #[error("the load wants disk {index}, but the program was started with {have} --disk argument(s), counted from 0")]
    NoSuchDisk {
        /// Index in the load.
        index: usize,
        /// How many there are.
        have: usize,
    },
    /// It cannot be opened.
    #[error(
        "cannot open disk {path} for reading and writing: {source}; give --disk a block device or a preallocated file"
    )]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is too small.
    #[error(
        "disk {path} has {have} bytes, but the load needs {need} (offset {offset} and its working set); \
         make it larger (`truncate -s {need}` for a file) or the working set smaller"
    )]
    TooSmall {
        /// Which.
        path: PathBuf,
        /// Its size, bytes.
        have: u64,
        /// Where the region would end, bytes.
        need: u64,
        /// Where the region starts, bytes.
        offset: u64,
    },
    /// The offset does not suit O_DIRECT.
    #[error("--disk-offset {offset} of disk {path} is not a multiple of {RECORD_BYTES}")]
    Misaligned {
        /// Which.
        path: PathBuf,
        /// The offset, bytes.
        offset: u64,
    },
}

/// How the disk is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// With O_DIRECT.
    Direct,
    /// Through the page cache: the file system (tmpfs) has no O_DIRECT.
    Cached,
}

pub(crate) fn open(path: &Path) -> io::Result<(File, Access)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    match options.clone().custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => Ok((file, Access::Direct)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok((options.open(path)?, Access::Cached)),
        Err(error) => Err(error),
    }
}

/// What a disk load counts, readable while it runs.
#[derive(Default)]
pub(crate) struct DiskCounters {
    pub clock: Arc<RunClock>,
    written: AtomicU64,
    issued: AtomicU64,
    acknowledged: AtomicU64,
    max_stall: Longest,
    errors: ErrorLog,
}

impl DiskCounters {
    pub fn status(&self, access: Access) -> DiskStatus {
        let kib = self.written.load(Relaxed) * (RECORD_BYTES as u64 / 1024);
        DiskStatus {
            kib_written: kib,
            kib_per_s: self.clock.rate(kib),
            issued_sequence: self.issued.load(Relaxed),
            acknowledged_sequence: self.acknowledged.load(Relaxed),
            max_stall_ms: self.max_stall.ms(),
            direct: access == Access::Direct,
            errors: self.errors.count(),
            first_error: self.errors.first(),
        }
    }
}

/// How fast, and how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskPace {
    /// Written, KiB a second.
    pub kib_per_s: u32,
    /// Read back meanwhile, KiB a second.
    pub read_kib_per_s: u32,
    /// Ends after so many MiB, slot by slot; 0: never, at random.
    pub total_mib: u32,
}

/// The load; see [`crate::worker`] for its life.
pub(crate) struct DiskLoad {
    disk: usize,
    place: DiskPlace,
    file: File,
    access: Access,
    pace: DiskPace,
    /// Reads that are owed, in [`DiskPace::kib_per_s`]-ths of one.
    reads_owed: u64,
    /// Slots that were written, for choosing one to read.
    written: Vec<Slot>,
    recorder: Arc<Recorder>,
    format: RecordFormat,
    slots: Vec<SlotState>,
    issued: Sequence,
    unacknowledged: Vec<Slot>,
    last_flush: Instant,
    chooser: Prf,
    /// Damaged on purpose; not written again, lest the evidence be overwritten.
    damaged: Option<Slot>,
    buffer: Box<Page>,
    counters: Arc<DiskCounters>,
}

impl DiskLoad {
    pub fn open(
        disks: &[DiskPlace],
        disk: usize,
        working_set_mib: u32,
        pace: DiskPace,
        format: RecordFormat,
        recorder: Arc<Recorder>,
    ) -> Result<Self, DiskError> {
        let place = disks.get(disk).ok_or(DiskError::NoSuchDisk { index: disk, have: disks.len() })?.clone();
        let failed = |source| DiskError::Open { path: place.path.clone(), source };
        if place.offset % RECORD_BYTES as u64 != 0 {
            return Err(DiskError::Misaligned { path: place.path, offset: place.offset });
        }
        let (mut file, access) = open(&place.path).map_err(failed)?;
        let have = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let need = place.offset.saturating_add(u64::from(working_set_mib) << 20);
        if have < need {
            return Err(DiskError::TooSmall { path: place.path, have, need, offset: place.offset });
        }
        let slots = vec![SlotState::default(); (working_set_mib * RECORDS_PER_MIB) as usize];
        Ok(Self {
            disk,
            place,
            file,
            access,
            pace,
            reads_owed: 0,
            written: vec![],
            recorder,
            chooser: Prf::new(format.seed, u64::MAX, disk as u64),
            format,
            slots,
            issued: Sequence(0),
            unacknowledged: Vec::with_capacity(MAX_UNACKNOWLEDGED),
            last_flush: Instant::now(),
            damaged: None,
            buffer: Box::new(Page::ZERO),
            counters: Arc::default(),
        })
    }

    pub fn counters(&self) -> Arc<DiskCounters> {
        self.counters.clone()
    }

    pub fn access(&self) -> Access {
        self.access
    }

    fn position(&self, slot: Slot) -> u64 {
        self.place.offset + u64::from(slot.0) * RECORD_BYTES as u64
    }

    fn is_done(&self) -> bool {
        self.pace.total_mib > 0 && self.issued.0 >= u64::from(self.pace.total_mib) * u64::from(RECORDS_PER_MIB)
    }

    fn write_one(&mut self) {
        let slots = self.slots.len() as u64;
        let mut slot = match self.pace.total_mib {
            0 => Slot(self.chooser.below(slots) as u32),
            _ => Slot((self.issued.0 % slots) as u32),
        };
        if self.damaged == Some(slot) {
            slot = Slot((slot.0 + 1) % self.slots.len() as u32);
        }
        self.issued.0 += 1;
        self.format.write(&mut self.buffer, slot, self.issued);
        let begun = Instant::now();
        let outcome = self.file.write_all_at(&self.buffer.0, self.position(slot));
        self.counters.max_stall.note(begun.elapsed());
        self.recorder.took(begun.elapsed());
        let state = &mut self.slots[slot.0 as usize];
        if self.pace.read_kib_per_s > 0 && state.issued == Sequence(0) {
            self.written.push(slot);
        }
        state.issued = self.issued;
        self.counters.issued.store(self.issued.0, Relaxed);
        match outcome {
            Ok(()) => {
                state.last_write = LastWrite::Whole;
                self.counters.written.fetch_add(1, Relaxed);
                self.unacknowledged.push(slot);
            }
            Err(error) => {
                state.last_write = LastWrite::InDoubt;
                let path = self.place.path.display();
                let (number, at) = (slot.0, self.position(slot));
                self.counters.errors.note(format_args!(
                    "write of slot {number} at byte {at} of {path} failed: {error}; see the guest's kernel log"
                ));
            }
        }
    }

    /// Reads back a slot that was written, and verifies it.
    fn read_one(&mut self) {
        if self.written.is_empty() {
            return;
        }
        let slot = self.written[self.chooser.below(self.written.len() as u64) as usize];
        let state = &self.slots[slot.0 as usize];
        if state.last_write == LastWrite::InDoubt || self.damaged == Some(slot) {
            return;
        }
        let at = self.position(slot);
        let begun = Instant::now();
        let outcome = self.file.read_exact_at(&mut self.buffer.0, at);
        self.counters.max_stall.note(begun.elapsed());
        self.recorder.took(begun.elapsed());
        let (number, path) = (slot.0, self.place.path.display());
        match outcome.map(|()| self.format.check(&self.buffer, slot, state)) {
            Ok(Ok(())) => {}
            Ok(Err(fault)) => {
                let Fault { kind, expected, found } = fault;
                self.counters.errors.note(format_args!(
                    "slot {number} of {path} was read and is {kind}: expected {expected}, found {found}"
                ));
            }
            Err(error) => self.counters.errors.note(format_args!("read of slot {number} of {path} failed: {error}")),
        }
    }

    fn flush(&mut self) {
        let begun = Instant::now();
        let outcome = self.file.sync_data();
        self.last_flush = Instant::now();
        self.counters.max_stall.note(begun.elapsed());
        match outcome {
            Ok(()) => {
                for slot in self.unacknowledged.drain(..) {
                    let state = &mut self.slots[slot.0 as usize];
                    // A write that failed later does not take back what this flush made durable, but is not part of it.
                    if state.last_write == LastWrite::Whole {
                        state.acknowledged = state.issued;
                    }
                }
                self.counters.acknowledged.store(self.issued.0, Relaxed);
            }
            Err(error) => {
                self.unacknowledged.clear();
                let path = self.place.path.display();
                self.counters.errors.note(format_args!("flush of {path} failed: {error}; see the guest's kernel log"));
            }
        }
    }

    fn report(&self, slot: Slot, fault: Fault, report: &mut DiskCheck) {
        report.bad_count += 1;
        if report.bad.len() < MAX_LISTED {
            let Fault { kind, expected, found } = fault;
            report.bad.push(BadRecord { kind, disk: self.disk, slot: slot.0.into(), expected, found });
        }
    }
}

impl Work for DiskLoad {
    fn per_s(&self) -> f64 {
        f64::from(self.pace.kib_per_s) * 1024.0 / RECORD_BYTES as f64
    }

    fn step(&mut self, units: u64) {
        for _ in 0..units {
            if self.is_done() {
                break;
            }
            self.write_one();
            if self.unacknowledged.len() >= MAX_UNACKNOWLEDGED {
                self.flush();
            }
            self.reads_owed += u64::from(self.pace.read_kib_per_s);
            while self.reads_owed >= u64::from(self.pace.kib_per_s) {
                self.reads_owed -= u64::from(self.pace.kib_per_s);
                self.read_one();
            }
        }
        if !self.unacknowledged.is_empty() && self.last_flush.elapsed() >= FLUSH_EVERY {
            self.flush();
        }
    }

    fn settle(&mut self) {
        if !self.unacknowledged.is_empty() {
            self.flush();
        }
    }

    fn verify(&mut self, report: &mut CheckReport) {
        let report = &mut report.disk;
        let mut read = Box::new(Page::ZERO);
        for (number, state) in self.slots.iter().enumerate() {
            let slot = Slot(number as u32);
            if state.issued == Sequence(0) {
                continue;
            }
            if state.last_write == LastWrite::InDoubt {
                report.in_doubt += 1;
                continue;
            }
            report.records_checked += 1;
            let verdict = match self.file.read_exact_at(&mut read.0, self.position(slot)) {
                Ok(()) => self.format.check(&read, slot, state),
                Err(error) => {
                    let path = self.place.path.display();
                    self.counters.errors.note(format_args!("read of slot {number} of {path} failed: {error}"));
                    Err(Fault::new(Problem::Lost, "a readable slot", format!("read error: {error}")))
                }
            };
            if let Err(fault) = verdict {
                self.report(slot, fault, report);
            }
        }
        report.io_errors += self.counters.errors.count();
    }

    fn damage(&mut self) -> Result<CorruptReport, Refusal> {
        let byte = RECORD_BYTES / 2;
        let done = |slot: Slot| CorruptReport { what: CorruptTarget::DiskRecord, index: slot.0.into(), byte };
        if let Some(slot) = self.damaged {
            // Flipping the same bit again would heal it.
            return Ok(done(slot));
        }
        self.settle();
        let acknowledged = |state: &SlotState| state.acknowledged.0 > 0 && state.last_write == LastWrite::Whole;
        let Some(number) = self.slots.iter().position(acknowledged) else {
            return Err(refusal("the disk load has no acknowledged record to damage yet; let it run for a second"));
        };
        let slot = Slot(number as u32);
        let mut page = Box::new(Page::ZERO);
        let at = self.position(slot);
        let outcome = self.file.read_exact_at(&mut page.0, at).and_then(|()| {
            page.0[byte] ^= 0x10;
            self.file.write_all_at(&page.0, at)?;
            self.file.sync_data()
        });
        outcome.map_err(|error| {
            refusal(format_args!("cannot damage slot {number} of {}: {error}", self.place.path.display()))
        })?;
        self.damaged = Some(slot);
        Ok(done(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{page::RunId, protocol::BootId};

    fn format() -> RecordFormat {
        RecordFormat { seed: 7, boot: BootId(1), run: RunId(2) }
    }

    struct Rig {
        load: DiskLoad,
        _dir: tempfile::TempDir,
    }

    /// A load on a 1 MiB file behind an offset, with `records` written.
    fn rig(records: u64) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len((1 << 20) + 8192).unwrap();
        let pace = DiskPace { kib_per_s: 100, read_kib_per_s: 50, total_mib: 0 };
        let mut load = DiskLoad::open(
            &[DiskPlace { path, offset: 8192 }],
            0,
            1,
            pace,
            format(),
            Recorder::start(&[], Instant::now()),
        )
        .unwrap();
        load.step(records);
        Rig { load, _dir: dir }
    }

    impl Rig {
        fn check(&mut self) -> DiskCheck {
            let mut report =
                CheckReport { memory: Default::default(), disk: DiskCheck::default(), work: vec![], seconds: 0.0 };
            self.load.verify(&mut report);
            report.disk
        }

        fn only_problem(&mut self) -> (Problem, u64) {
            let report = self.check();
            assert_eq!(report.bad_count, 1, "{report:?}");
            (report.bad[0].kind, report.bad[0].slot)
        }

        fn read(&self, slot: Slot) -> Box<Page> {
            let mut page = Box::new(Page::ZERO);
            self.load.file.read_exact_at(&mut page.0, self.load.position(slot)).unwrap();
            page
        }

        fn put(&self, slot: Slot, page: &Page) {
            self.load.file.write_all_at(&page.0, self.load.position(slot)).unwrap();
        }

        /// Acknowledges everything, then writes until `slot` has a newer record; returns what was in it before.
        fn overwrite(&mut self, slot: Slot) -> Box<Page> {
            self.load.settle();
            let before = self.read(slot);
            let issued = self.load.slots[slot.0 as usize].issued;
            while self.load.slots[slot.0 as usize].issued == issued {
                self.load.write_one();
            }
            before
        }
    }

    #[test]
    fn a_load_with_an_end_writes_each_slot_in_turn_and_then_no_more() {
        let mut rig = rig(0);
        rig.load.pace.total_mib = 1;
        rig.load.step(1000);
        assert_eq!((rig.load.issued, rig.check().records_checked), (Sequence(256), 256));
        assert_eq!(rig.load.written.len(), 256, "each was written once");
    }

    #[test]
    fn a_read_that_finds_another_record_is_an_error() {
        let mut rig = rig(600);
        rig.load.settle();
        assert_eq!(rig.check().io_errors, 0, "300 reads were well");
        for number in 0..256 {
            rig.put(Slot(number), &Page::ZERO);
        }
        rig.load.read_one();
        assert_eq!(rig.load.counters.errors.count(), 1);
        assert!(rig.load.counters.errors.first().unwrap().contains("lost"), "{:?}", rig.load.counters.errors.first());
    }

    #[test]
    fn what_was_written_is_found_again() {
        let mut rig = rig(600);
        let report = rig.check();
        assert_eq!((report.bad_count, report.io_errors, report.in_doubt), (0, 0, 0), "{report:?}");
        assert!((200..=256).contains(&report.records_checked));
    }

    #[test]
    fn an_acknowledged_write_that_is_gone_is_stale() {
        let mut rig = rig(600);
        let before = rig.overwrite(Slot(3));
        rig.put(Slot(3), &before);
        assert_eq!(rig.check().bad_count, 0, "not acknowledged yet: may be old or new");
        rig.load.settle();
        assert_eq!(rig.only_problem(), (Problem::Stale, 3));
    }

    #[test]
    fn torn_swapped_flipped_and_zeroed_records_are_found() {
        let mut rig = rig(600);
        let before = rig.overwrite(Slot(3));
        rig.load.settle();
        let good = rig.read(Slot(3));
        let mut torn = good.clone();
        torn.0[2048..].copy_from_slice(&before.0[2048..]);
        rig.put(Slot(3), &torn);
        assert_eq!(rig.only_problem(), (Problem::Torn, 3));
        let mut flipped = good.clone();
        flipped.0[4095] ^= 1;
        rig.put(Slot(3), &flipped);
        assert_eq!(rig.only_problem(), (Problem::Torn, 3));
        rig.put(Slot(3), &Page::ZERO);
        assert_eq!(rig.only_problem(), (Problem::Lost, 3));
        let other = rig.read(Slot(4));
        rig.put(Slot(3), &other);
        rig.put(Slot(4), &good);
        let report = rig.check();
        assert_eq!(
            report.bad.iter().map(|bad| (bad.kind, bad.slot)).collect::<Vec<_>>(),
            [(Problem::Foreign, 3), (Problem::Foreign, 4)]
        );
    }

    #[test]
    fn damage_is_found_however_long_the_load_goes_on() {
        let mut rig = rig(600);
        let damaged = rig.load.damage().unwrap();
        rig.load.step(3000);
        assert_eq!(rig.load.damage().unwrap(), damaged, "done once, not undone by the second");
        assert_eq!(rig.only_problem(), (Problem::Torn, damaged.index));
    }

    #[test]
    fn there_is_nothing_to_damage_before_the_first_record() {
        assert!(rig(0).load.damage().is_err());
    }

    #[test]
    fn failed_writes_are_counted_and_leave_their_slots_in_doubt() {
        let mut rig = rig(600);
        rig.load.settle();
        let read_only = File::open(&rig.load.place.path).unwrap();
        let writable = std::mem::replace(&mut rig.load.file, read_only);
        rig.load.step(10);
        let report = rig.check();
        assert!(report.in_doubt > 0 && report.bad_count == 0 && report.io_errors == 10, "{report:?}");
        assert!(rig.load.counters.errors.first().unwrap().contains("write of slot"));
        rig.load.file = writable;
        rig.load.step(3000);
        assert_eq!(rig.check().in_doubt, 0);
    }

    #[test]
    fn a_failed_flush_acknowledges_nothing() {
        let mut rig = rig(600);
        let before = rig.overwrite(Slot(3));
        // A pipe cannot be flushed.
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let file = std::mem::replace(&mut rig.load.file, File::from(writer));
        rig.load.settle();
        rig.load.file = file;
        rig.load.flush();
        rig.put(Slot(3), &before);
        let report = rig.check();
        assert_eq!((report.bad_count, report.io_errors), (0, 1), "{report:?}");
    }

    #[test]
    fn unsuitable_disks_are_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let refused = |disk, offset| {
            let disks = [DiskPlace { path: path.clone(), offset }];
            let pace = DiskPace { kib_per_s: 1, read_kib_per_s: 0, total_mib: 0 };
            let opened = DiskLoad::open(&disks, disk, 1, pace, format(), Recorder::start(&[], Instant::now()));
            opened.err().map(|error| error.to_string()).unwrap()
        };
        assert!(refused(1, 0).contains("started with 1 --disk"));
        assert!(refused(0, 4096).contains("truncate -s 1052672"));
        assert!(refused(0, 100).contains("not a multiple of 4096"));
        std::fs::remove_file(&path).unwrap();
        assert!(refused(0, 0).contains("preallocated file"));
    }
}
