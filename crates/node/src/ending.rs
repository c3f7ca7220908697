//! A planned stop: a node that was told to end, and that another process of the same host takes the place of, as a rule at once.
//!
//! A node that dies leaves replicas that nobody has closed. What is hot of them the next process doubts: it travels again to every secondary, and
//! where this host is the secondary, it is forgotten. A node that is told to end has time to close them, in this order:
//!
//! 1. *No new work.* The API has let go of its clients when this begins ([`crate::run`]).
//! 2. *What guests have written goes to disk while they are still served*, for [`AHEAD`] at the most: they stand for the rest only.
//! 3. *Whatever the node does ends where it stands*, as in a crash: the runtime ends, and with it keepers of VMs, moves, mirrors, pre-caches, fills,
//!    sessions, and the listeners of disks' exports. A hand-off bears the death of its node between any two steps, so it bears this, and no
//!    step of one comes after what follows here.
//! 4. *Guests' connections are cut.* Their threads end what they have begun; a write that they come to later waits, and is never made. What
//!    runs has [`QUIET`] to end, but nothing rests on that:
//! 5. *Each replica is closed under the lock that writes are made under* ([`godwit_volume::Replica::end`]). A thread that is late, be it a
//!    client's, one of a move or one of a fill, has made its write before, or finds the replica closed.
//!
//! So no write is made that the mark of a clean end does not cover. None is lost or counted by half, either: one that was answered is durable, and one
//! that was not is asked for again, since a guest's QEMU keeps what it was not answered, connects again for ten minutes (its `reconnect-delay`), and
//! takes a node that is away for a disk that is slow. The next process cannot serve it before this one has gone, which holds the lock of each replica.
//!
//! # What can go wrong
//!
//! *Storage stands, or is slow.* After [`IN_ALL`] the process ends all the same; the service manager would wait for longer. What was not closed by
//! then is as a crash leaves it, in whichever step it was. Nothing here waits for one of the runtime's threads, all of which may stand there, nor a
//! disk for another one's storage, up to [`AT_ONCE`] disks. Nobody lets go of the node, which would close its files. Whatever stands all the same, the
//! program has a thread that ends it after [`LONGEST`].
//!
//! *A move is under way.* Its replicas are closed as all others are. The source's: what its mirror may have passed on is unsure, as its description says
//! already, and gets new stamps when the next mirror compares. The destination's: what has come stays. A shadow volume's: words say what is
//! absent, as ever.
//!
//! *A pre-cache is.* What it was about to bring is not there, and nobody was told that it is. A journal that was being written in its place is
//! written again.

use crate::disk::Disk;
use crate::node::Node;
use crate::parts::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// From the moment that a node is told to end until its process has to be gone: the API's clients may take their grace, then comes what this
/// module does, and a moment for what goes on beside it.
pub const LONGEST: Duration = godwit_api::server::GRACE.saturating_add(IN_ALL).saturating_add(Duration::from_secs(1));
/// All of it, at the most, from when the API has let go of its clients.
const IN_ALL: Duration = Duration::from_secs(5);
/// Of that, while guests are served.
const AHEAD: Duration = Duration::from_secs(2);
/// Of that, until what runs has ended. Little: a copy or a scrub that reads on harms nobody, and guests' QEMUs, which try again after one, two and
/// four seconds, must not find the next node too late by a moment.
const QUIET: Duration = Duration::from_millis(300);
/// Disks that are seen to at the same time, by a thread each: those that stand keep none of the others waiting before there are so many.
const AT_ONCE: usize = 512;

/// A node that is ending.
#[derive(Debug)]
pub struct Ending {
    node: Arc<Node>,
    until: Instant,
}

impl Ending {
    /// Begins: guests are still served.
    pub async fn begin(node: Arc<Node>) -> Self {
        let until = Instant::now() + IN_ALL;
        ahead(node.disks(), AHEAD).await;
        Self { node, until }
    }

    /// Ends what runs, and closes the replicas. The node is given back: to let go of it may take as long as its storage does. Not within a runtime.
    pub fn end(self, runtime: Runtime) -> Arc<Node> {
        runtime.shutdown_timeout(QUIET);
        let disks = self.node.disks();
        let replicas = disks.len();
        let late = each(disks, self.until, close);
        if late.is_empty() {
            tracing::info!(replicas, "the replicas are closed");
        } else {
            tracing::warn!(
                volumes = late.join(", "),
                "storage takes too long to close these; what was written last travels again"
            );
        }
        self.node
    }
}

/// What guests have written goes to disk, for so long at the most; what was not there by then may yet be.
async fn ahead(disks: Vec<Arc<Disk>>, within: Duration) {
    let (done, is_done) = oneshot::channel::<()>();
    let until = Instant::now() + within;
    let work = move || {
        let _done = done;
        each(disks, until, flush);
    };
    // Not one of the runtime's: those that may block may all wait for storage.
    if let Err(error) = std::thread::Builder::new().name("ending".into()).spawn(work) {
        tracing::warn!(%error, "no thread to have disks flushed");
    }
    let _ = tokio::time::timeout(within, is_done).await;
}

fn flush(disk: &Disk) {
    // What fails here fails again when it is closed.
    let _ = disk.replica().flush();
}

fn close(disk: &Disk) {
    if let Err(error) = disk.end() {
        tracing::warn!(volume = disk.name, %error, "the replica cannot be closed; what was written last travels again");
    }
}

/// Does something with each of these, in threads of its own, until a moment. Those with which it was not done by then: it may yet be.
fn each(disks: Vec<Arc<Disk>>, until: Instant, what: fn(&Disk)) -> Vec<String> {
    let mut left: BTreeMap<usize, String> = disks.iter().map(|disk| disk.name.clone()).enumerate().collect();
    let (done, heard) = mpsc::channel();
    let queue = Arc::new(Mutex::new(disks.into_iter().enumerate()));
    for _ in 0..AT_ONCE.min(left.len()) {
        let (queue, done) = (queue.clone(), done.clone());
        let work = move || {
            loop {
                let Some((at, disk)) = lock(&queue).next() else { return };
                what(&disk);
                // Before this is heard of: whoever opens the replica next finds it let go of.
                drop(disk);
                if done.send(at).is_err() {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("ending".into()).spawn(work) {
            // Those that there are do what they can.
            tracing::warn!(%error, "no thread to close disks with");
            break;
        }
    }
    drop(done);
    while !left.is_empty()
        && let Ok(at) = heard.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        left.remove(&at);
    }
    left.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::{Bytes, VolumeId};
    use std::path::Path;

    /// As storage that does not answer does.
    fn one_stands(disk: &Disk) {
        if disk.name == "slow" {
            std::thread::sleep(Duration::from_secs(60));
        }
    }

    fn disk(folder: &Path, name: &str, id: u64) -> Arc<Disk> {
        let (replica, socket) = (folder.join(id.to_string()), folder.join(format!("{id}.sock")));
        Disk::open_or_create(&replica, None, socket, VolumeId(id), name, Bytes::mib(1)).expect("opens")
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn disks_that_stand_hold_nobody_up_for_longer_than_there_is_time_nor_any_other_one() {
        let folder = tempfile::tempdir().expect("a folder");
        // They come first.
        let standing = (1..=40).map(|id| disk(folder.path(), "slow", id));
        let disks: Vec<_> = standing.chain([disk(folder.path(), "quick", 41)]).collect();
        let began = Instant::now();
        let late = tokio::task::spawn_blocking(move || each(disks, began + Duration::from_secs(3), one_stands)).await;
        assert_eq!(late.expect("ends"), ["slow"; 40]);
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }

    #[test]
    fn disks_are_flushed_ahead_though_all_that_may_block_waits_for_storage() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).max_blocking_threads(1).enable_all().build().expect("starts");
        let began = Instant::now();
        runtime.block_on(async {
            tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_secs(60)));
            ahead(vec![disk(folder.path(), "quick", 1)], Duration::from_secs(2)).await;
        });
        runtime.shutdown_background();
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}
