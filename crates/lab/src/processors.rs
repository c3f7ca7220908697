//! What the processes of sites have had of the machine's processors: QEMU, with what its guest runs under emulation, and Godwit.
//!
//! A process belongs to a site by its network namespace. All of them are looked at every [`LOOK`], since one that has ended cannot be asked any more: of
//! a process that ends, what it did after the last look is missing.

use crate::fabric::Fabric;
use crate::report::ProcessTime;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(200);
/// Of a second: `USER_HZ`, which Linux on x86 shows to programs whatever the kernel's own clock.
const TICKS: f64 = 100.0;

/// What a process has had, from its begin on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Had {
    program: String,
    ticks: u64,
    /// When it began, since the machine did: an id may be used again.
    began: u64,
}

impl Had {
    /// Understands `/proc/PID/stat` (proc(5)).
    fn of(stat: &str) -> Option<Self> {
        // The name, in parentheses, may hold anything.
        let (open, close) = (stat.find('(')?, stat.rfind(')')?);
        let fields: Vec<&str> = stat.get(close + 1..)?.split_ascii_whitespace().collect();
        let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
        Some(Self {
            program: stat.get(open + 1..close)?.to_owned(),
            ticks: number(11)? + number(12)?,
            began: number(19)?,
        })
    }
}

/// A site, and the number of its network namespace.
struct Host {
    site: String,
    namespace: u64,
}

/// Process id and when it began.
type Process = (u32, u64);

/// What was seen: of each process its site, what it had had at first, and at last.
#[derive(Default)]
struct Seen(BTreeMap<Process, (usize, Had, u64)>);

impl Seen {
    /// `first`: whether nobody looked before. What a process had until then is not counted; one that is new later has begun since.
    fn look(&mut self, hosts: &[Host], first: bool) {
        let Ok(folder) = std::fs::read_dir("/proc") else { return };
        let ids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        for id in ids {
            let folder = Path::new("/proc").join(id.to_string());
            let Ok(namespace) = std::fs::metadata(folder.join("ns/net")) else { continue };
            let Some(host) = hosts.iter().position(|host| host.namespace == namespace.ino()) else { continue };
            let Some(had) = std::fs::read_to_string(folder.join("stat")).ok().and_then(|stat| Had::of(&stat)) else {
                continue;
            };
            self.note(id, host, had, first);
        }
    }

    fn note(&mut self, id: u32, host: usize, had: Had, first: bool) {
        let before = if first { had.ticks } else { 0 };
        match self.0.entry((id, had.began)) {
            Entry::Occupied(mut seen) => seen.get_mut().1 = had,
            Entry::Vacant(new) => drop(new.insert((host, had, before))),
        }
    }

    /// What they had meanwhile, by site and program.
    fn times(&self, hosts: &[Host]) -> Vec<ProcessTime> {
        let mut ticks: BTreeMap<(usize, &str), u64> = BTreeMap::new();
        for (host, had, before) in self.0.values() {
            *ticks.entry((*host, &had.program)).or_default() += had.ticks.saturating_sub(*before);
        }
        let time = |((host, program), ticks): ((usize, &str), u64)| ProcessTime {
            site: hosts[host].site.clone(),
            program: program.to_owned(),
            s: ticks as f64 / TICKS,
        };
        ticks.into_iter().map(time).collect()
    }
}

/// Looks at the processes of two sites until it is told to end.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<ProcessTime>>,
}

impl Watch {
    /// Counts from now on.
    ///
    /// # Errors
    /// When there is no thread to be had, or a namespace that cannot be looked at.
    pub fn start(fabric: &Fabric, sites: [&str; 2]) -> std::io::Result<Self> {
        let host = |site: &str| -> std::io::Result<Host> {
            Ok(Host { site: site.to_owned(), namespace: fabric.site(site).ns.number()? })
        };
        let hosts = [host(sites[0])?, host(sites[1])?];
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let mut seen = Seen::default();
        seen.look(&hosts, true);
        let thread = std::thread::Builder::new().name("processors".into()).spawn(move || {
            while !told.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
                seen.look(&hosts, false);
            }
            seen.times(&hosts)
        })?;
        Ok(Self { stop, thread })
    }

    /// Looks for the last time: seconds by site and program.
    #[must_use]
    pub fn finish(self) -> Vec<ProcessTime> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_understood_whatever_its_name() {
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194560 100 0 0 0 123 45 0 0 20 0 3 0 9876 1000 10";
        assert_eq!(Had::of(stat), Some(Had { program: "a ) b".into(), ticks: 168, began: 9876 }));
        assert_eq!(Had::of("42 (short) S 1"), None);
        assert_eq!(Had::of(")("), None);
    }

    #[test]
    fn what_was_before_is_not_counted_and_what_has_ended_is() {
        let hosts = [Host { site: "a".into(), namespace: 1 }, Host { site: "b".into(), namespace: 2 }];
        let had = |program: &str, ticks, began| Had { program: program.into(), ticks, began };
        let mut seen = Seen::default();
        seen.note(7, 0, had("qemu", 500, 1), true);
        seen.note(7, 0, had("qemu", 700, 1), false);
        // The id is used again, and a second one runs at the other site.
        seen.note(7, 0, had("qemu", 30, 9), false);
        seen.note(8, 1, had("godwit", 5, 8), false);
        seen.note(8, 1, had("godwit", 50, 8), false);
        let time = |site: &str, program: &str, s| ProcessTime { site: site.into(), program: program.into(), s };
        assert_eq!(seen.times(&hosts), [time("a", "qemu", 2.3), time("b", "godwit", 0.5)]);
    }

    #[test]
    fn this_process_is_found_in_the_machines_own_namespace() {
        let namespace = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        let hosts = [Host { site: "here".into(), namespace }];
        let mut seen = Seen::default();
        seen.look(&hosts, false);
        let me = std::process::id();
        assert!(seen.0.keys().any(|(id, _)| *id == me), "{:?}", seen.0);
    }
}
