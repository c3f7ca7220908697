//! Blocks of an epoch that is not complete yet, beside a replica that is an image of the one before.
//!
//! A redo log: what comes is appended; when the epoch's last word has come it is made durable with it, then written in
//! place. Nothing touches the image before all of the next one is here. An undo log would have to sync before each
//! overwrite; this syncs once an epoch. The price is that each byte is written twice at the secondary, and room for one epoch: a
//! block is in it once, so never more than the volume and a fiftieth.
//!
//! # What can go wrong
//!
//! *Power goes while it is appended to.* The journal has no end that checks: what is in it is forgotten, and the image
//! stands. *While it is written in place*: the replica says durably that this had begun, so all of it is written again when
//! it is opened, and nothing is doubted for having been hot. *After that*: its epoch is the one that the replica
//! holds, so it is forgotten. Where other volumes' epochs ended in the same [`Moment`], none is written in place before all are here, or one loss
//! of power would leave images of different moments: the journal is *sealed*, and whoever holds all of them decides, durably, before the first is written. A
//! sealed one is left alone when its replica is opened, until it is heard what was decided ([`Journal::settle`]). Each record's check covers the one before, so that records of an earlier journal, which
//! lie behind a shorter one, or come back with a loss of power, are never taken for its own.

use crate::error::{VolumeError, io_error};
use crate::file::{Disk, Medium};
use crate::meta::{Complete, Moment};
use crate::mirror::{MAX_MESSAGE, MOST_BLOCKS};
use crate::replica::{Contents, Replica};
use crate::runs::parse_run;
use std::path::Path;

/// Length and check.
const HEAD: usize = 4 + 16;
const FILE: &str = "journal";

/// The journal of a secondary.
#[derive(Debug)]
pub struct Journal {
    medium: Box<dyn Medium>,
    /// Where the next record goes.
    end: u64,
    /// How long what earlier sessions left is.
    room: u64,
    chain: [u8; 16],
    #[cfg(test)]
    pub(crate) without: Option<Rule>,
}

/// Rules of a journal that tests take away.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// The journal is durable before it is written in place.
    DurableFirst,
    /// The replica says durably that it is being written.
    RedoSaid,
    /// What was written in place is durable before the replica says so.
    CommitBeforeComplete,
}

/// A record: what the mirror's message says, or the end.
pub(crate) const END: u8 = b'E';

impl Journal {
    /// Whether a replica's folder has one.
    #[must_use]
    pub fn exists(folder: &Path) -> bool {
        folder.join(FILE).exists()
    }

    /// The journal in a replica's folder; made if there is none.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn open(folder: &Path) -> Result<Self, VolumeError> {
        let path = folder.join(FILE);
        let disk = Disk::open(&path, 0).map_err(io_error("open", &path))?;
        let room = disk.as_file().metadata().map_err(io_error("open", &path))?.len();
        Ok(Self { room, ..Self::on(Box::new(disk)) })
    }

    /// Removes the one in a replica's folder, if there is one: no image is kept there any more.
    ///
    /// # Errors
    /// When the medium fails, or it is still needed.
    pub fn remove(replica: &Replica) -> Result<(), VolumeError> {
        let path = replica.folder().join(FILE);
        if replica.redoes() {
            return Err(VolumeError::Damaged { path, why: "it is being written in its place".into() });
        }
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io_error("remove", &path)(e)),
            _ => Ok(()),
        }
    }

    /// On a medium of the caller's, which nobody else uses. What is in it is read by [`Journal::recover`] only.
    #[must_use]
    pub fn on(medium: Box<dyn Medium>) -> Self {
        Self {
            medium,
            end: 0,
            room: 0,
            chain: [0; 16],
            #[cfg(test)]
            without: None,
        }
    }

    #[cfg(test)]
    fn holds(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    fn check(chain: &[u8; 16], record: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(chain).update(record);
        std::array::from_fn(|i| hasher.finalize().as_bytes()[i])
    }

    /// Forgets what is in it, and begins a journal that none before can be taken for.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn begin(&mut self, nonce: [u8; 16]) -> Result<(), VolumeError> {
        let mut io = || -> std::io::Result<()> {
            // The room is given back, that of earlier sessions as well; nothing depends on it.
            let room = self.end.max(std::mem::take(&mut self.room));
            if room > 0 { self.medium.punch(0, room) } else { Ok(()) }
        };
        io().map_err(io_error("empty", Path::new(FILE)))?;
        (self.end, self.chain) = (0, [0; 16]);
        self.append(&nonce)
    }

    /// Appends a record.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn append(&mut self, record: &[u8]) -> Result<(), VolumeError> {
        let chain = Self::check(&self.chain, record);
        let length = u32::try_from(record.len()).map_err(|_| VolumeError::Range("a record is too long".into()))?;
        let mut bytes = Vec::with_capacity(HEAD + record.len());
        bytes.extend(length.to_le_bytes());
        bytes.extend(chain);
        bytes.extend(record);
        self.medium.write(self.end, &bytes).map_err(io_error("write", Path::new(FILE)))?;
        self.end += bytes.len() as u64;
        self.chain = chain;
        Ok(())
    }

    /// The epoch has all come: it becomes the replica's image.
    ///
    /// # Errors
    /// When a medium fails; it is done again when the replica is opened, or the image stands as it was.
    pub(crate) fn finish(&mut self, epoch: Complete, replica: &Replica) -> Result<(), VolumeError> {
        self.seal(epoch)?;
        self.redo(epoch, replica)
    }

    /// The epoch has all come, and is durable here: nothing but a decision is missing.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn seal(&mut self, epoch: Complete) -> Result<(), VolumeError> {
        let mut end = vec![END];
        end.extend(serde_json::to_vec(&epoch).map_err(|e| io_error("encode", Path::new(FILE))(e.into()))?);
        self.append(&end)?;
        #[cfg(test)]
        let durable = self.holds(Rule::DurableFirst);
        #[cfg(not(test))]
        let durable = true;
        if durable && let Err(error) = self.medium.sync() {
            // It may be in memory, and is not to be believed from there.
            self.empty();
            return Err(io_error("sync", Path::new(FILE))(error));
        }
        Ok(())
    }

    /// Writes what is sealed in its place.
    ///
    /// # Errors
    /// As [`Journal::finish`].
    pub(crate) fn redo(&mut self, epoch: Complete, replica: &Replica) -> Result<(), VolumeError> {
        #[cfg(test)]
        let (said, commit) = (self.holds(Rule::RedoSaid), self.holds(Rule::CommitBeforeComplete));
        #[cfg(not(test))]
        let (said, commit) = (true, true);
        if said && !replica.redoes() {
            replica.begin_redo()?;
        }
        let mut cursor = Cursor::default();
        while cursor.at < self.end {
            // What was written is not what is read: part of an epoch is no image.
            let Some(record) = cursor.next(&*self.medium)? else {
                replica.set_complete(None)?;
                let why = format!(
                    "it breaks off after {} of {} bytes; the next session brings what lacks",
                    cursor.at, self.end
                );
                return Err(VolumeError::Damaged { path: replica.folder().join(FILE), why });
            };
            if cursor.records > 1 && record.first() != Some(&END) {
                apply(&record, replica)?;
            }
        }
        if commit {
            replica.commit()?;
        }
        replica.set_complete(Some(epoch))?;
        // Of no use any more: nobody need read it to find that out.
        self.empty();
        Ok(())
    }

    /// Gives back the room of what is in it, where the medium does; nothing depends on that.
    fn empty(&mut self) {
        let _ = self.medium.punch(0, self.end);
        (self.end, self.chain) = (0, [0; 16]);
    }

    /// After a restart: what is whole and not in its place yet is written there; everything else is forgotten, but for what waits for a decision.
    ///
    /// # Errors
    /// When a medium fails, or the replica was in the middle of a journal that is not here.
    pub fn recover(self, replica: &Replica) -> Result<(), VolumeError> {
        self.settle(replica, |_| false)
    }

    /// As [`Journal::recover`], by whoever knows of which moments it was decided that all has come. What is of another one will be of no use any more.
    ///
    /// # Errors
    /// As [`Journal::recover`].
    pub fn settle(mut self, replica: &Replica, decided: impl Fn(Moment) -> bool) -> Result<(), VolumeError> {
        let (mut cursor, mut end) = (Cursor::default(), None);
        while let Some(record) = cursor.next(&*self.medium)? {
            if cursor.records > 1
                && let Some((&END, json)) = record.split_first()
            {
                end = serde_json::from_slice::<Complete>(json).ok();
                break;
            }
        }
        self.end = cursor.at;
        match end {
            // A replica that took a guest's writes since has nothing to do with it.
            Some(_) if replica.is_primary() => Ok(()),
            Some(epoch) if !replica.redoes() && epoch.moment.is_some_and(|moment| !decided(moment)) => Ok(()),
            Some(epoch) if replica.redoes() || is_next(replica.complete(), epoch) => {
                // A process may have died between the end and its sync: power that goes now must not take it.
                self.medium.sync().map_err(io_error("sync", Path::new(FILE)))?;
                self.redo(epoch, replica)
            }
            None if replica.redoes() => Err(VolumeError::Damaged {
                path: replica.folder().join(FILE),
                why: "it is being written in its place, and has no end".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// Whether a journal's epoch is one that a replica waits for. One that holds nothing for good has lost what the journal builds on.
fn is_next(held: Option<Complete>, epoch: Complete) -> bool {
    held.is_some_and(|held| held.image && held.epoch < epoch.epoch)
}

/// Writes what a record says in its place.
pub(crate) fn apply(record: &[u8], replica: &Replica) -> Result<(), VolumeError> {
    let bad = || VolumeError::Range("a record of the journal makes no sense".into());
    let (kind, body) = record.split_first().ok_or_else(bad)?;
    let (run, stamp, data) = parse_run(body).ok_or_else(bad)?;
    if run.end - run.start > MOST_BLOCKS {
        return Err(bad());
    }
    match *kind {
        crate::mirror::DATA if !data.is_empty() && data.len() as u64 == (run.end - run.start) * crate::BLOCK => {
            replica.apply(run.start, stamp, Contents::Data(data))
        }
        crate::mirror::ZEROES if data.is_empty() => {
            replica.apply(run.start, stamp, Contents::Zeroes(run.end - run.start))
        }
        crate::mirror::FORGET if data.is_empty() => replica.forget(run),
        _ => Err(bad()),
    }
}

/// Reads records one after the other, as long as they check.
#[derive(Debug, Default)]
struct Cursor {
    at: u64,
    records: u64,
    chain: [u8; 16],
}

impl Cursor {
    fn next(&mut self, medium: &dyn Medium) -> Result<Option<Vec<u8>>, VolumeError> {
        let mut head = [0; HEAD];
        let failed = io_error("read", Path::new(FILE));
        let read = |at, into: &mut [u8]| medium.read(at, into);
        let done: std::io::Result<Option<Vec<u8>>> = (|| {
            read(self.at, &mut head)?;
            let length = u32::from_le_bytes(std::array::from_fn(|i| head[i])) as usize;
            if length == 0 || length > MAX_MESSAGE {
                return Ok(None);
            }
            let mut record = vec![0; length];
            read(self.at + HEAD as u64, &mut record)?;
            Ok(Some(record))
        })();
        let Some(record) = done.map_err(failed)? else { return Ok(None) };
        let chain = Journal::check(&self.chain, &record);
        if chain[..] != head[4..] {
            return Ok(None);
        }
        (self.chain, self.records) = (chain, self.records + 1);
        self.at += (HEAD + record.len()) as u64;
        Ok(Some(record))
    }
}
