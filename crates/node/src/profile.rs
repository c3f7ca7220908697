//! `godwit vm profile`: a guest's memory watched for a while, without moving it.
//!
//! The node opens the RAM that QEMU shares, and compares each page's hash at every look ([`godwit_memory::watcher`]). What changed becomes a
//! log of [`godwit_predict`]'s, what is in the pages a few figures; both lie in the VM's folder until newer ones push them out.
//!
//! # What is seen
//!
//! Changes of content, under any accelerator; not writes that change nothing. Those would be seen by the kernel's soft-dirty bits (not in
//! every kernel), by `userfaultfd` (only QEMU itself can ask for it) or QEMU's `calc-dirty-rate` in its mode `dirty-bitmap`, which says how many
//! pages and not which, and which QEMU 7.2 dies of under TCG.
//!
//! # What it costs
//!
//! A look reads and hashes all RAM that the guest has ever touched, on one thread of low priority; [`SHARE`] is the most of a processor
//! that looks may take, and where a look takes longer than that of the interval the next ones are missed, and the log says so. Each profile
//! says what it cost ([`Profile::looking_s`], [`Profile::log_bytes`]). The guest is never stopped. A look at 1 GiB took 0.26 s on a busy machine
//! (`cargo run --release -p godwit-memory --example watch_cost`), so 16 s of a processor for a GiB and minute at one look a second; what a
//! log takes is in [`godwit_predict::log`].
//!
//! # What can go wrong
//!
//! *The guest leaves, or ends*: what was seen until then is kept. *The node ends*: a log is written as it grows, and what is there of it is
//! whole up to a frame; it has no figures then, and is removed at the next start of a profile. *Profiles pile up*: [`MOST_LOGS`] and [`MOST_BYTES`].

use crate::node::Node;
use crate::parts::{Parts, lock};
use crate::tracker::unix_ms;
use godwit_api::host::RunState;
use godwit_api::profile::{INTERVAL_MS, LONGEST_S, Profile, ProfileLog, ProfileState, StartProfile};
use godwit_api::{ApiError, Problem};
use godwit_memory::watcher::{Sampler, Watcher};
use godwit_predict::{LogWriter, Observed, Pages, log::Header};
use godwit_units::Bytes;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Profiles of a VM that are kept: one an hour ([`crate::routine`]) for two days and some.
pub const MOST_LOGS: usize = 64;
/// What the logs of a VM may take together, the newest not counted.
pub const MOST_BYTES: u64 = 64 << 20;
/// What one log may take: it is sent in one answer. It ends when it has that.
pub const MOST_BYTES_OF_A_LOG: u64 = 6 << 20;
/// The most of a processor that looking may take.
pub const SHARE: f64 = 0.25;
/// How long watching sleeps at the most before it looks whether it is still wanted.
const NAP: Duration = Duration::from_millis(100);

/// What is being watched, if anything is.
pub type Watched = Mutex<Option<Profile>>;

fn failed(what: &str, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Failed, format!("{what}: {error}"))
}

fn folder(parts: &Parts) -> PathBuf {
    parts.folder.join("profiles")
}

fn log_file(folder: &Path, start: u64) -> PathBuf {
    folder.join(format!("{start:014}.gwdl"))
}

fn figures_file(folder: &Path, start: u64) -> PathBuf {
    folder.join(format!("{start:014}.json"))
}

/// Begins to watch a guest.
///
/// # Errors
/// It does not run here, is being moved or watched already, or its RAM cannot be seen.
pub async fn start(node: &Arc<Node>, parts: &Arc<Parts>, wanted: StartProfile) -> Result<Profile, ApiError> {
    if !(1..=LONGEST_S).contains(&wanted.for_s) || !INTERVAL_MS.contains(&wanted.interval_ms) {
        return Err(ApiError::new(Problem::Invalid, "a profile of no time, or at no interval that there is"));
    }
    if node.local(parts).await.run != RunState::Running {
        return Err(ApiError::new(Problem::Conflict, format!("`{}` does not run here", parts.name))
            .remedy(format!("`godwit vm start {}`", parts.name)));
    }
    if is_moving(parts) {
        return Err(ApiError::new(Problem::Conflict, format!("`{}` is being moved", parts.name))
            .remedy("profile it when it has arrived"));
    }
    let qemu = parts.qemu().ok_or_else(|| failed("the VM has no QEMU", &parts.name))?;
    let memory = parts.definition().spec.memory;
    let ram = qemu.ram(memory).map_err(|e| failed("cannot see the guest's RAM", &e))?;
    let watcher = Watcher::new(ram, memory).map_err(|e| failed("cannot see the guest's RAM", &e))?;
    let profile = Profile::begun(node.config().name.clone(), unix_ms(), wanted, memory);
    {
        let mut watched = lock(&parts.watched);
        if watched.is_some() {
            return Err(ApiError::new(Problem::Conflict, format!("`{}` is being profiled already", parts.name))
                .remedy(format!("`godwit vm profile {} --ls` shows how that stands", parts.name)));
        }
        *watched = Some(profile.clone());
    }
    let parts = parts.clone();
    let (shown, still) = (profile.clone(), {
        let parts = parts.clone();
        move || {
            let same = parts.qemu().is_some_and(|now| Arc::ptr_eq(&now, &qemu));
            match (same && qemu.is_alive(), is_moving(&parts)) {
                (false, _) => Some("its QEMU ended"),
                (true, true) => Some("it is being moved"),
                (true, false) => None,
            }
        }
    });
    // A thread of its own, since it is given the least of priorities.
    let thread = std::thread::Builder::new().name("profile".into());
    let (shown_parts, watch) = (parts.clone(), move || {
        let watching = Watching { parts: &parts, profile, still: &still };
        let done = watching.run(watcher);
        if let Err(error) = &done {
            tracing::warn!(vm = parts.name, %error, "the guest's profile ended in an error");
        }
        *lock(&parts.watched) = None;
    });
    thread.spawn(watch).map_err(|e| {
        *lock(&shown_parts.watched) = None;
        failed("cannot begin to watch", &e)
    })?;
    Ok(shown)
}

fn is_moving(parts: &Parts) -> bool {
    parts.moving().is_some_and(|moving| !moving.tracker.ended())
}

struct Watching<'a> {
    parts: &'a Parts,
    profile: Profile,
    /// Why it is not wanted any more.
    still: &'a dyn Fn() -> Option<&'static str>,
}

impl Watching<'_> {
    fn run(mut self, mut watcher: Watcher) -> io::Result<()> {
        // Guests first: whoever only watches waits. It is this thread's alone.
        let _ = rustix::process::nice(10);
        let folder = folder(self.parts);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let path = log_file(&folder, self.profile.start_unix_ms);
        let result = self.watch(&mut watcher, &path);
        if let Err(error) = &result {
            (self.profile.state, self.profile.why) = (ProfileState::Ended, Some(error.to_string()));
        }
        if self.profile.looks == 0 {
            let _ = std::fs::remove_file(&path);
            return result;
        }
        let figures = serde_json::to_vec(&self.profile).map_err(io::Error::other)?;
        std::fs::write(figures_file(&folder, self.profile.start_unix_ms), figures)?;
        tidy(&folder, self.profile.start_unix_ms)?;
        result
    }

    fn watch(&mut self, watcher: &mut Watcher, path: &Path) -> io::Result<()> {
        let words = watcher.words();
        let begun = Instant::now();
        watcher.look(&mut vec![0; words], |_, _| {})?;
        let mut looking = begun.elapsed();
        self.measure_contents(watcher)?;
        // One that takes long is made less often from the beginning: the log has one interval.
        let least = u32::try_from((looking.as_secs_f64() / SHARE * 1e3) as u64).unwrap_or(u32::MAX);
        self.profile.interval_ms = self.profile.interval_ms.max(least).min(*INTERVAL_MS.end());
        let interval = Duration::from_millis(self.profile.interval_ms.into());
        let header = Header {
            observed: Observed::Contents,
            pages: Pages::of(self.profile.memory),
            interval,
            start: Duration::from_millis(unix_ms()),
        };
        let (mut writer, first) = LogWriter::new(header).map_err(io::Error::other)?;
        let mut out = OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)?;
        out.write_all(&first)?;
        let mut log_bytes = first.len() as u64;
        let (mut sampler, mut all, mut zeroed, mut changed_in_all) = (Sampler::default(), vec![0_u64; words], 0, 0_u64);
        let (origin, mut next) = (Instant::now(), 1_u32);
        let end = origin + Duration::from_secs(self.profile.for_s.into());
        // The pages that changed since the last look, whenever that was.
        let mut last_look = origin;
        loop {
            let due = origin + interval * next;
            if due > end {
                self.profile.state = ProfileState::Done;
                break;
            }
            if let Some(why) = self.wait_until(due) {
                (self.profile.state, self.profile.why) = (ProfileState::Ended, Some(why.into()));
                break;
            }
            let (began, mut changed) = (Instant::now(), vec![0; words]);
            let looked = watcher.look(&mut changed, |page, content| sampler.changed(page, content))?;
            looking += began.elapsed();
            let frame = writer.frame(&changed, &changed);
            log_bytes += frame.len() as u64;
            out.write_all(&frame)?;
            all.iter_mut().zip(&changed).for_each(|(all, now)| *all |= now);
            (changed_in_all, zeroed) = (changed_in_all + looked.changed, zeroed + looked.zeroed);
            let since = began.saturating_duration_since(last_look).as_secs_f64().max(1e-3);
            last_look = began;
            let p = &mut self.profile;
            p.looks += 1;
            p.most_changed_per_s = p.most_changed_per_s.max(looked.changed as f64 / since);
            p.changed_per_s = changed_in_all as f64 / began.saturating_duration_since(origin).as_secs_f64().max(1e-3);
            p.working_set = Pages(all.iter().map(|word| u64::from(word.count_ones())).sum()).bytes();
            p.contents.zeroed = zeroed as f64 / changed_in_all.max(1) as f64;
            (p.log_bytes, p.looking_s) = (Bytes(log_bytes), looking.as_secs_f64());
            *lock(&self.parts.watched) = Some(p.clone());
            next += 1;
            // A look that came too late stands for the intervals that it took.
            while origin + interval * next < Instant::now() && next < u32::MAX {
                writer.miss();
                self.profile.missed += 1;
                next += 1;
            }
            if log_bytes >= MOST_BYTES_OF_A_LOG {
                let why = format!("its log has {}, the most that is kept", Bytes(log_bytes));
                (self.profile.state, self.profile.why) = (ProfileState::Ended, Some(why));
                break;
            }
        }
        self.profile.contents.again = sampler.again()?.map(|(share, _)| share);
        out.sync_data()
    }

    fn measure_contents(&mut self, watcher: &Watcher) -> io::Result<()> {
        let census = watcher.census();
        let of_all = |pages: u64| pages as f64 / census.pages.max(1) as f64;
        let contents = &mut self.profile.contents;
        (contents.zero, contents.duplicate) = (of_all(census.zero), of_all(census.duplicate));
        contents.packed = watcher.packed()?.map(|(share, _)| share);
        Ok(())
    }

    fn wait_until(&self, due: Instant) -> Option<&'static str> {
        loop {
            if let Some(why) = (self.still)() {
                return Some(why);
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}

/// Starts of the profiles that lie in a folder, the oldest first, with what each log takes.
fn kept(folder: &Path) -> Vec<(u64, u64)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<(u64, u64)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((name.strip_suffix(".gwdl")?.parse().ok()?, entry.metadata().ok()?.len()))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Removes what is too much, the oldest first, and what has no figures.
fn tidy(folder: &Path, newest: u64) -> io::Result<()> {
    let mut all = kept(folder);
    all.retain(|(start, _)| *start != newest);
    let mut bytes: u64 = all.iter().map(|(_, bytes)| bytes).sum();
    let mut count = all.len() + 1;
    for (start, size) in all {
        if count > MOST_LOGS || bytes > MOST_BYTES || !figures_file(folder, start).exists() {
            std::fs::remove_file(log_file(folder, start))?;
            let _ = std::fs::remove_file(figures_file(folder, start));
            (count, bytes) = (count - 1, bytes - size);
        }
    }
    Ok(())
}

/// When the newest profile of a VM began that is kept, or is under way: milliseconds since 1970.
pub(crate) fn newest(parts: &Parts) -> Option<u64> {
    let watched = lock(&parts.watched).as_ref().map(|profile| profile.start_unix_ms);
    watched.max(kept(&folder(parts)).last().map(|(start, _)| *start))
}

/// The profiles of a VM, the oldest first, and the one under way.
#[must_use]
pub fn list(parts: &Parts) -> Vec<Profile> {
    let folder = folder(parts);
    let read = |start: u64| serde_json::from_slice(&std::fs::read(figures_file(&folder, start)).ok()?).ok();
    let mut all: Vec<Profile> = kept(&folder).into_iter().filter_map(|(start, _)| read(start)).collect();
    let watched = lock(&parts.watched).clone();
    all.retain(|profile| watched.as_ref().is_none_or(|now| now.start_unix_ms != profile.start_unix_ms));
    all.extend(watched);
    all
}

/// A profile with its log.
///
/// # Errors
/// There is none that began then, or it cannot be read.
pub fn log(parts: &Parts, start: u64) -> Result<ProfileLog, ApiError> {
    let Some(profile) = list(parts).into_iter().find(|profile| profile.start_unix_ms == start) else {
        let message = format!("no profile of `{}` began at {start}", parts.name);
        return Err(ApiError::new(Problem::NotFound, message).remedy("list those that are kept, and their times"));
    };
    let bytes = File::open(log_file(&folder(parts), start)).and_then(|mut file| {
        let mut bytes = vec![];
        io::Read::read_to_end(&mut file, &mut bytes).map(|_| bytes)
    });
    Ok(ProfileLog::new(profile, &bytes.map_err(|e| failed("the profile's log cannot be read", &e))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(folder: &Path, start: u64, bytes: usize, figures: bool) {
        std::fs::write(log_file(folder, start), vec![0; bytes]).expect("writes");
        if figures {
            std::fs::write(figures_file(folder, start), "{}").expect("writes");
        }
    }

    #[test]
    fn the_oldest_profiles_go_when_there_are_too_many_or_too_much() {
        let dir = tempfile::tempdir().expect("a folder");
        let starts = || kept(dir.path()).into_iter().map(|(start, _)| start).collect::<Vec<_>>();
        for start in 0..MOST_LOGS as u64 + 3 {
            put(dir.path(), start, 1, true);
        }
        tidy(dir.path(), MOST_LOGS as u64 + 2).expect("tidies");
        assert_eq!((starts().len(), starts()[0]), (MOST_LOGS, 3));
        assert!(!figures_file(dir.path(), 2).exists() && figures_file(dir.path(), 3).exists());
        let big = File::create(log_file(dir.path(), 4)).expect("makes");
        big.set_len(MOST_BYTES).expect("grows");
        tidy(dir.path(), 66).expect("tidies");
        assert_eq!(starts()[0], 5);
    }

    #[test]
    fn a_log_that_a_node_died_over_goes_at_the_next_profile() {
        let dir = tempfile::tempdir().expect("a folder");
        put(dir.path(), 1, 10, false);
        put(dir.path(), 2, 10, true);
        put(dir.path(), 3, 10, true);
        tidy(dir.path(), 3).expect("tidies");
        assert_eq!(kept(dir.path()), [(2, 10), (3, 10)]);
    }
}
