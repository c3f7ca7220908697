//! Images of a VM's several disks that are of one moment, so that a database finds its log as one loss of power would have left both.
//!
//! *At the source* the epochs of all its disks that are pre-cached with an image at one host end together: under the locks of the guest's writes to
//! all of them, so that no write lies between two ends ([`crate::disk::Disk::roll_together`]). Each bears the [`Moment`]. A disk of which the host holds no image yet is left
//! out until it does, and one whose session is away is waited for: an image that is older, but agrees with the others, is worth more than one that is newer. (After
//! a restart of this node nobody knows what an absent one's secondary holds; what the others' hold says whether they had it in common.)
//!
//! *At the secondary* an epoch with a moment is not written in its place before those of the others are here: its journal is sealed, durable, and the last one
//! decides ([`Moments::seal`]). Then each becomes its replica's image by itself.
//!
//! # What can go wrong
//!
//! *Power goes, or a process ends, before the decision*: no image has been touched; the sealed ones are of no use, and the next session begins their journals
//! anew. *After it*: it is durable, and whoever opens a journal next ([`Moments::settle`]) writes it in its place; so does a promotion before it looks at the
//! images.
//!
//! *A session ends before its epoch has come.* The others of the moment would wait for ever: the source ends them, too ([`Common`]).
//! *A session that has sealed is followed by another*: what was sealed does not count any more before its journal is begun anew, and both are done under the lock of what
//! receives, with which a session that is over seals nothing.

use crate::durable::replace_json;
use crate::parts::lock;
use anyhow::{Context, Result, anyhow};
use godwit_units::{VmId, VolumeId};
use godwit_volume::{Journal, Moment, Replica};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Decisions that are remembered of a VM: what was decided last, and what a disk has missed that has left the others' company since.
const REMEMBERED: usize = 8;

/// The moment under way of several sessions at the source; it is cancelled when one of them has ended before its epoch was complete.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// None, where one disk's epoch ended alone.
    pub moment: Option<Moment>,
    pub given_up: CancellationToken,
}

/// What a secondary's node knows of moments.
#[derive(Debug)]
pub struct Moments {
    folder: PathBuf,
    /// Held while it is decided: what is sealed stays so meanwhile.
    deciding: Mutex<()>,
    /// Volumes whose epochs are here, durable, and wait for others. Held for moments only.
    sealed: Mutex<BTreeMap<VmId, BTreeMap<VolumeId, Moment>>>,
    /// The last moments of which everything is here, as far as somebody has asked. As above.
    known: Mutex<BTreeMap<VmId, Vec<u64>>>,
    /// Something of these has changed.
    changed: watch::Sender<()>,
}

impl Moments {
    /// With what was decided below `state`.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.join("moments"),
            deciding: Mutex::default(),
            sealed: Mutex::default(),
            known: Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }

    fn file(&self, vm: VmId) -> PathBuf {
        self.folder.join(format!("{}.json", vm.0))
    }

    /// What was decided of a VM.
    fn known(&self, vm: VmId) -> Result<Vec<u64>> {
        if let Some(known) = lock(&self.known).get(&vm) {
            return Ok(known.clone());
        }
        let file = self.file(vm);
        let cannot = || format!("cannot read {}", file.display());
        let known = match std::fs::read(&file) {
            Ok(bytes) => {
                // A process may have died before it was durable: power that goes now must not take it.
                File::open(&self.folder).and_then(|folder| folder.sync_all()).with_context(cannot)?;
                serde_json::from_slice(&bytes).with_context(cannot)?
            }
            Err(error) if error.kind() == ErrorKind::NotFound => vec![],
            Err(error) => return Err(error).with_context(cannot),
        };
        // Something may have been decided while it was read.
        Ok(lock(&self.known).entry(vm).or_insert(known).clone())
    }

    /// A volume's epoch of this moment is here and durable. With the last of them it is decided, durably when this returns. Under the lock of what receives the
    /// volume ([`crate::disk::Disk::unless_received`]), by who still may.
    ///
    /// # Errors
    /// When the decision cannot be written down.
    pub fn seal(&self, vm: VmId, volume: VolumeId, moment: Moment) -> Result<()> {
        let _deciding = lock(&self.deciding);
        let mut known = self.known(vm)?;
        let here = {
            let mut sealed = lock(&self.sealed);
            let of_vm = sealed.entry(vm).or_default();
            of_vm.insert(volume, moment);
            of_vm.values().filter(|other| **other == moment).count()
        };
        if here >= moment.volumes as usize {
            known.push(moment.id);
            known.drain(..known.len().saturating_sub(REMEMBERED));
            let file = self.file(vm);
            if let Err(error) = replace_json(&file, &known) {
                // Nobody knows which of the two is there: whoever asks next looks.
                lock(&self.known).remove(&vm);
                return Err(error).with_context(|| format!("cannot write {}", file.display()));
            }
            // In this order: what is not sealed any more is decided, or given up.
            lock(&self.known).insert(vm, known);
            self.keep(vm, |_, other| *other != moment);
        }
        self.changed.send_replace(());
        Ok(())
    }

    /// What was sealed of a volume does not count any more, and may be written over. Under the same lock.
    pub fn unseal(&self, vm: VmId, volume: VolumeId) {
        let _deciding = lock(&self.deciding);
        self.keep(vm, |other, _| *other != volume);
        self.changed.send_replace(());
    }

    fn keep(&self, vm: VmId, kept: impl Fn(&VolumeId, &Moment) -> bool) {
        let mut sealed = lock(&self.sealed);
        if let Some(of_vm) = sealed.get_mut(&vm) {
            of_vm.retain(|volume, moment| kept(volume, moment));
            if of_vm.is_empty() {
                sealed.remove(&vm);
            }
        }
    }

    /// Ends when all epochs of a moment are here, in which a volume has sealed its own.
    ///
    /// # Errors
    /// When that does not count any more.
    pub async fn until_decided(&self, vm: VmId, volume: VolumeId, moment: Moment) -> Result<()> {
        let mut changed = self.changed.subscribe();
        loop {
            let waits = lock(&self.sealed).get(&vm).and_then(|of_vm| of_vm.get(&volume)) == Some(&moment);
            if !waits {
                let decided = lock(&self.known).get(&vm).is_some_and(|known| known.contains(&moment.id));
                return if decided { Ok(()) } else { Err(anyhow!("what waited for other disks' epochs was given up")) };
            }
            changed.changed().await?;
        }
    }

    /// Brings what was decided to its place at this volume's replica; what was not will not be. Under the lock of what receives it.
    ///
    /// # Errors
    /// When the medium fails, or what was decided cannot be read.
    pub fn settle(&self, vm: VmId, volume: VolumeId, replica: &Replica) -> Result<()> {
        // First: from here on nothing is decided with what lies here.
        self.unseal(vm, volume);
        let folder = replica.folder();
        let known = self.known(vm)?;
        if Journal::exists(folder) && (replica.redoes() || !known.is_empty()) {
            Journal::open(folder)?.settle(replica, |moment| known.contains(&moment.id))?;
        }
        Ok(())
    }

    /// Nothing of the VM is kept here any more.
    pub fn forget(&self, vm: VmId) {
        let _deciding = lock(&self.deciding);
        lock(&self.sealed).remove(&vm);
        lock(&self.known).remove(&vm);
        let _ = std::fs::remove_file(self.file(vm));
        self.changed.send_replace(());
    }

    /// The VMs of which something was decided here.
    #[must_use]
    pub fn of(&self) -> Vec<VmId> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok);
        let id = |name: &str| name.strip_suffix(".json")?.parse().ok().map(VmId);
        entries.filter_map(|entry| id(entry.file_name().to_str()?)).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn is_decided(moments: &Moments, vm: VmId, moment: Moment) -> bool {
        moments.known(vm).unwrap().contains(&moment.id)
    }

    #[test]
    fn a_moment_is_decided_with_the_last_of_its_volumes_and_not_with_what_was_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let moments = Moments::new(folder.path());
        let (vm, one, two) = (VmId(1), VolumeId(1), VolumeId(2));
        let first = Moment { id: 7, volumes: 2 };
        moments.seal(vm, one, first).unwrap();
        moments.seal(vm, one, first).unwrap();
        assert!(!is_decided(&moments, vm, first));
        // Its session ended, and another one begins its journal anew.
        moments.unseal(vm, one);
        moments.seal(vm, two, first).unwrap();
        assert!(!is_decided(&moments, vm, first), "of the first volume nothing is here");
        // Another VM's volumes decide nothing here.
        moments.seal(VmId(2), one, first).unwrap();
        assert!(!is_decided(&moments, vm, first));
        moments.seal(vm, one, first).unwrap();
        assert!(is_decided(&moments, vm, first) && !is_decided(&moments, VmId(2), first));
        // What is left of one that was given up does not count for the next.
        let (second, third) = (Moment { id: 8, volumes: 2 }, Moment { id: 9, volumes: 2 });
        moments.seal(vm, one, second).unwrap();
        moments.seal(vm, two, third).unwrap();
        assert!(!is_decided(&moments, vm, second) && !is_decided(&moments, vm, third));
        moments.seal(vm, one, third).unwrap();
        // After a restart it is still known.
        let again = Moments::new(folder.path());
        assert!(is_decided(&again, vm, third) && is_decided(&again, vm, first) && !is_decided(&again, vm, second));
        assert_eq!(again.of(), [vm]);
        // What cannot be read is not taken for nothing.
        std::fs::write(folder.path().join("moments/1.json"), "[7").unwrap();
        assert!(Moments::new(folder.path()).known(vm).is_err());
        again.forget(vm);
        assert!(!is_decided(&again, vm, third));
    }

    #[tokio::test]
    async fn whoever_waits_for_a_decision_hears_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let moments = std::sync::Arc::new(Moments::new(folder.path()));
        let moment = Moment { id: 7, volumes: 2 };
        let waits = tokio::spawn({
            let moments = moments.clone();
            async move {
                moments.seal(VmId(1), VolumeId(1), moment).unwrap();
                moments.until_decided(VmId(1), VolumeId(1), moment).await
            }
        });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        moments.seal(VmId(1), VolumeId(2), moment).unwrap();
        let soon = std::time::Duration::from_secs(60);
        tokio::time::timeout(soon, waits).await.unwrap().unwrap().unwrap();
        // So does whoever waits in vain.
        let moment = Moment { id: 8, volumes: 2 };
        moments.seal(VmId(1), VolumeId(1), moment).unwrap();
        let waits = moments.until_decided(VmId(1), VolumeId(1), moment);
        moments.unseal(VmId(1), VolumeId(1));
        assert!(tokio::time::timeout(soon, waits).await.unwrap().is_err());
    }
}
