//! Pages of a guest's RAM that a destination keeps between two tries of a move: where they lie, under which key, for how long.
//!
//! The source's node makes the key and keeps it beside the VM's file until the VM has moved, unless it has one of what the destination keeps already
//! ([`keys`](crate::keys)); it says it to the destination in each try, over the link. The destination's node keeps the sealed pages beside its own file of the VM, and the key nowhere.
//! See [`godwit_memory::Checkpoint`] for what can go wrong with the pages themselves. None of it is needed for a move: where it
//! fails, all pages travel.

use crate::keys::{self, EXPIRY, Keys, removed};
use crate::parts::{Moving, Parts};
use crate::proto::{self, Hello};
use anyhow::{Context, Result, bail};
use godwit_api::name::Name;
use godwit_api::progress::NoteKind;
use godwit_handoff::Ticket;
use godwit_link::{Lane, Priority, Session, Stream};
use godwit_memory::{Checkpoint, CheckpointKey, Holding};
use godwit_units::Bytes as Amount;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How long the memory rounds wait for the destination's answer. It is asked when the disks begin.
const ANSWER: Duration = Duration::from_secs(60);
/// And longer for each so many bytes of RAM: the destination reads all that it has kept, and what it finds need not travel.
const ANSWER_BYTES_PER_S: u64 = 1 << 30;
/// The destination's disk has to have this many times the guest's RAM free, or nothing is kept: its guests need room more.
const ROOM: u64 = 2;

fn pages_path(folder: &Path) -> PathBuf {
    folder.join("checkpoint")
}

/// Where it is while it is being removed.
fn gone_path(folder: &Path) -> PathBuf {
    folder.join("checkpoint.gone")
}

fn key_path(folder: &Path) -> PathBuf {
    folder.join("checkpoint.key")
}

/// Source: the key of what this host keeps of the VM with this folder and these keys, and will keep; made if there is none.
///
/// # Errors
/// When it can neither be read nor made.
pub fn key(folder: &Path, keys: &Keys, host: &Name) -> std::io::Result<CheckpointKey> {
    if let Some(key) = keys.of(host) {
        return Ok(key);
    }
    let path = key_path(folder);
    let mut bytes = [0; 32];
    match std::fs::File::open(&path).and_then(|mut file| file.read_exact(&mut bytes)) {
        Ok(()) => return Ok(CheckpointKey(bytes)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) => {}
        Err(e) => return Err(e),
    }
    let key = CheckpointKey::random();
    keys::put(&path, &key.0)?;
    Ok(key)
}

/// Forgets both sides' parts: the VM has moved, so what is kept of it here or for it there is of no more use. What a stream's writer still
/// has goes into a file without a name.
pub fn forget(folder: &Path) {
    forget_keys(folder);
    let gone = gone_path(folder);
    match std::fs::rename(pages_path(folder), &gone) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(folder = %folder.display(), %error, "what is kept of a guest's memory cannot be removed");
        }
        _ => {}
    }
    // It may be as large as the guest, and takes as long to be removed: whoever has just started that does not wait for it.
    crate::keeping::aside(move || removed(&gone));
}

/// Forgets the source's part.
pub fn forget_keys(folder: &Path) {
    removed(&key_path(folder));
    keys::forget(folder);
}

/// Removes what has waited for a try for too long, unless one is under way.
pub fn expire(parts: &Parts, now: SystemTime) {
    if parts.moving().is_none_or(|moving| moving.over.is_cancelled()) && expire_in(&parts.folder, now) {
        tracing::info!(vm = parts.name, "pages of a try that was not made again are dropped");
    }
}

fn expire_in(folder: &Path, now: SystemTime) -> bool {
    // Of a node that was killed meanwhile.
    removed(&gone_path(folder));
    let path = pages_path(folder);
    let age = std::fs::metadata(&path).and_then(|m| m.modified()).ok().and_then(|then| now.duration_since(then).ok());
    age.is_some_and(|age| age > EXPIRY) && std::fs::remove_file(&path).is_ok()
}

/// Source: asks the destination which pages it has kept. `None`: it cannot tell, and all travel.
pub async fn ask(parts: &Parts, moving: &Moving, session: &Session, key: CheckpointKey, ram: u64) -> Option<Holding> {
    let patience = ANSWER + Duration::from_secs(ram / ANSWER_BYTES_PER_S);
    match tokio::time::timeout(patience, answer(moving.ticket, session, key, ram)).await {
        Ok(Ok(holding)) => {
            let kept = Amount(holding.pages() * 4096);
            if kept.0 > 0 {
                moving.note(NoteKind::Decision, format!("the destination has kept {kept} of memory from earlier"));
            }
            Some(holding)
        }
        Ok(Err(error)) => {
            tracing::warn!(vm = parts.name, error = format!("{error:#}"), "all of memory travels");
            None
        }
        Err(_) => {
            tracing::warn!(vm = parts.name, "the destination does not say what it has kept; all of memory travels");
            None
        }
    }
}

async fn answer(ticket: Ticket, session: &Session, key: CheckpointKey, ram: u64) -> Result<Holding> {
    let hello = Hello::Kept { ticket, key: proto::Secret(key.0) };
    let (mut out, mut from) = session.open_stream(Lane::Memory, Priority::Bulk, proto::encode(&hello)).await?.split();
    out.finish()?;
    let mut bytes = vec![];
    while let Some(piece) = from.read().await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 > Holding::longest(ram) {
            bail!("the destination says more of what it has kept than there can be");
        }
    }
    Ok(Holding::decode(&bytes, ram)?)
}

/// Destination: whether any may be, also while an earlier try's stream or a guest that has just left may still be on its way into the file.
pub fn may_be(parts: &Parts) -> bool {
    pages_path(&parts.folder).exists() || parts.keeping.try_lock().is_err()
}

/// Destination: tells which pages are kept.
pub fn tell(parts: &Arc<Parts>, moving: Arc<Moving>, key: CheckpointKey, stream: Stream) {
    let parts = parts.clone();
    // At once: memory, which ends the look, may come right behind.
    let looking = parts.look();
    crate::trace::spawn(async move {
        let telling = async {
            // An earlier try's stream may still be on its way into the file.
            let _until_nobody_waits = looking.clone().drop_guard();
            let held = parts.keeping.clone().lock_owned().await;
            let path = pages_path(&parts.folder);
            let encoded = tokio::task::spawn_blocking(move || {
                let _held = held;
                if !path.exists() {
                    return Ok(Some(Holding::default().encode()));
                }
                let holding = Checkpoint::open(&path, &key)?.holding(&|| !looking.is_cancelled())?;
                Ok::<_, std::io::Error>(holding.map(|holding| holding.encode()))
            });
            let encoded = encoded.await?.context("what was kept of an earlier try cannot be read");
            let encoded = encoded.inspect_err(|_| drop_pages(&parts))?;
            // Memory comes without an answer.
            let Some(encoded) = encoded else { return Ok(()) };
            let (mut send, _) = stream.split();
            send.write(encoded.into()).await?;
            send.finish()?;
            anyhow::Ok(())
        };
        tokio::select! {
            result = telling => {
                if let Err(error) = result {
                    tracing::warn!(vm = parts.name, error = format!("{error:#}"), "all of memory travels");
                }
            }
            () = moving.over.cancelled() => {}
        }
    });
}

/// Destination: what a stream's pages go into, while the guard is held; `None`, with a reason in the log: they are not kept.
pub fn open(parts: &Parts, key: &CheckpointKey) -> Option<Checkpoint> {
    let ram = parts.definition().spec.memory.0;
    let free = rustix::fs::statvfs(&parts.folder).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
    let path = pages_path(&parts.folder);
    let there = std::fs::metadata(&path).map(|file| file.blocks() * 512).ok();
    let room = has_room(free, there.unwrap_or(0), ram);
    if !room && there.is_none() {
        tracing::info!(vm = parts.name, free, "no room to keep pages for another try");
        return None;
    }
    match Checkpoint::open(&path, key) {
        // Other guests that come or leave at the same time have seen the same room. A page takes a little more when it is sealed.
        Ok(checkpoint) if room => Some(checkpoint.leaving(ram - ram / 32)),
        // The source may have been told of what is there.
        Ok(checkpoint) => Some(checkpoint.read_only(ErrorKind::StorageFull.into())),
        Err(error) => {
            tracing::warn!(vm = parts.name, %error, "pages are not kept for another try");
            None
        }
    }
}

/// Whether the guest's pages may be kept where so much is free, and a file of them takes up so much already.
const fn has_room(free: u64, there: u64, ram: u64) -> bool {
    free.saturating_add(there) >= ram.saturating_mul(ROOM)
}

/// Destination: what is kept cannot be relied on.
pub fn drop_pages(parts: &Parts) {
    let _ = std::fs::remove_file(pages_path(&parts.folder));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_kept_for_the_next_try_and_for_nobody_else_and_forgotten_with_the_move() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        let (there, elsewhere): (Name, Name) = ("b".parse().expect("a name"), "c".parse().expect("a name"));
        let key = |folder: &Path, host| key(folder, &Keys::read(folder, SystemTime::now()), host);
        let first = key(dir.path(), &there).expect("makes one");
        assert_eq!(key(dir.path(), &there).expect("reads it"), first);
        let mode = std::fs::metadata(key_path(dir.path())).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(key_path(dir.path()), b"torn").expect("writes");
        assert_ne!(key(dir.path(), &there).expect("makes another"), first);
        // What a former host keeps has a key of its own.
        let keeps = proto::Secret([9; 32]);
        Keys::default().with(elsewhere.clone(), keeps, SystemTime::now()).write(dir.path()).expect("writes");
        assert_eq!(key(dir.path(), &elsewhere).expect("reads it"), CheckpointKey([9; 32]));
        assert_ne!(key(dir.path(), &there).expect("reads it"), CheckpointKey([9; 32]));
        forget(dir.path());
        assert!(!key_path(dir.path()).exists());
        assert_ne!(key(dir.path(), &elsewhere).expect("makes one"), CheckpointKey([9; 32]));
        forget(dir.path());
    }

    #[test]
    fn a_file_that_is_there_makes_no_room_for_the_pages_that_it_lacks() {
        let gib = 1 << 30;
        assert!(has_room(64 * gib, 0, 32 * gib));
        assert!(has_room(40 * gib, 24 * gib, 32 * gib), "with what the file has taken there was enough");
        assert!(!has_room(10 * gib, gib, 32 * gib), "it may grow by what is free");
    }

    #[test]
    fn pages_expire_when_no_try_comes_for_a_day_and_not_before() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(pages_path(dir.path()), b"sealed").expect("writes");
        assert!(!expire_in(dir.path(), SystemTime::now() + EXPIRY - Duration::from_secs(60)));
        assert!(pages_path(dir.path()).exists());
        assert!(expire_in(dir.path(), SystemTime::now() + EXPIRY + Duration::from_secs(60)));
        assert!(!pages_path(dir.path()).exists());
    }
}
