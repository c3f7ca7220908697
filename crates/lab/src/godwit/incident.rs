//! What a scenario does to a move of Godwit's: a daemon is killed, a QEMU is killed, a path is cut, at a point of the move.
//!
//! A step with `at` does nothing at once: it is ordered for the VM's move, the one under way or the next. The move holds the
//! node that gets to the point, lets it happen there, and lets the node go. What mends itself (a daemon that is started again,
//! a path that is restored) does so later, in a thread of its own, and the end of the move waits for it.

use super::hosted::Hosted;
use super::{Installation, extender, lock};
use crate::fabric::Fabric;
use crate::scenario::{Point, Victim};
use anyhow::{Context, Result};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Something that happens at a point of a move.
#[derive(Clone, Debug, PartialEq)]
pub struct Incident {
    /// Where in the move.
    pub at: Point,
    /// When this share of what goes there has gone; without it, before any has.
    pub share: Option<f64>,
    /// What.
    pub deed: Deed,
}

/// Something that is done to the installation.
#[derive(Clone, Debug, PartialEq)]
pub enum Deed {
    /// Kills.
    Kill {
        /// What.
        what: Victim,
        /// In which site; without one, in the site where the point is.
        site: Option<String>,
        /// Until a daemon is started again.
        restart_after: Duration,
    },
    /// Cuts a path.
    Cut {
        /// Its two sites.
        between: [String; 2],
        /// Until it is restored by itself.
        restored_after: Option<Duration>,
    },
}

impl Deed {
    /// What was done, for a report.
    #[must_use]
    pub fn told(&self) -> String {
        let at = |site: &Option<String>| site.as_ref().map_or(String::new(), |site| format!(" of {site}"));
        match self {
            Self::Kill { what: Victim::Controller, restart_after, .. } => {
                format!("the controller killed, started again after {} s", restart_after.as_secs_f64())
            }
            Self::Kill { what: Victim::Node, site, restart_after } => {
                format!("the node{} killed, started again after {} s", at(site), restart_after.as_secs_f64())
            }
            Self::Kill { what: Victim::Extender, site, .. } => format!("the extender's program{} killed", at(site)),
            Self::Kill { what: Victim::Qemu, site, .. } => format!("a QEMU{} killed", at(site)),
            Self::Cut { between: [one, other], .. } => format!("the path {one} - {other} cut"),
        }
    }
}

impl std::fmt::Display for Deed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kill { what: Victim::Controller, .. } => f.write_str("killing the controller"),
            Self::Kill { what, site, .. } => {
                let what = match what {
                    Victim::Node => "the node",
                    Victim::Extender => "the extender",
                    Victim::Qemu | Victim::Controller => "the QEMU",
                };
                match site {
                    Some(site) => write!(f, "killing {what} in {site}"),
                    None => write!(f, "killing {what}"),
                }
            }
            Self::Cut { between: [one, other], .. } => write!(f, "cutting {one} - {other}"),
        }
    }
}

/// Things that happen after a while; waited for by whoever needs all to be whole again.
#[derive(Debug, Default)]
pub struct Later {
    threads: Mutex<Vec<JoinHandle<Result<()>>>>,
    failed: Mutex<Vec<String>>,
}

impl Later {
    /// Does `what` after a while.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn after(&self, while_: Duration, what: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name("later".into()).spawn(move || {
            std::thread::sleep(while_);
            what()
        })?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// Waits until all of it has happened.
    pub fn wait(&self) {
        // What happens later may order more.
        while let Some(thread) = { lock(&self.threads).pop() } {
            let result =
                thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a bug of the lab (a panic; see above)")));
            if let Err(e) = result {
                lock(&self.failed).push(format!("{e:#}"));
            }
        }
    }

    /// What of it did not work, each thing once.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.failed))
    }
}

/// Cuts a path, and has it restored later.
///
/// # Errors
/// When the path cannot be cut.
pub fn cut(fabric: &Arc<Fabric>, later: &Later, between: &[String; 2], restored_after: Option<Duration>) -> Result<()> {
    let [one, other] = between.clone();
    fabric.path(&one, &other)?.cut()?;
    if let Some(while_) = restored_after {
        let fabric = fabric.clone();
        later.after(while_, move || Ok(fabric.path(&one, &other)?.restore()?))?;
    }
    Ok(())
}

/// Does it. `at` is the site of the point that was reached; `vm` is whose move it is, or whose QEMU is meant.
///
/// # Errors
/// When it cannot be done.
pub fn perform(installation: &Arc<Installation>, deed: &Deed, at: Option<&str>, vm: Option<&Hosted>) -> Result<()> {
    match deed {
        Deed::Cut { between, restored_after } => {
            cut(installation.fabric(), &installation.later, between, *restored_after)
        }
        Deed::Kill { what: Victim::Controller, restart_after, .. } => {
            lock(installation.controller()).kill();
            let weak = Arc::downgrade(installation);
            installation.later.after(*restart_after, move || match weak.upgrade() {
                Some(i) => lock(i.controller()).start(i.home()),
                None => Ok(()),
            })
        }
        Deed::Kill { what: Victim::Node, site, restart_after } => {
            let site = site.as_deref().or(at).context("nobody said which site's node")?.to_owned();
            lock(installation.node(&site)).kill();
            let weak = Arc::downgrade(installation);
            installation.later.after(*restart_after, move || match weak.upgrade() {
                Some(i) => lock(i.node(&site)).start(i.fabric().site(&site)),
                None => Ok(()),
            })
        }
        Deed::Kill { what: Victim::Extender, site, .. } => {
            let site = site.as_deref().or(at).context("nobody said which site's extender")?;
            extender::kill(installation.fabric().site(site))
        }
        Deed::Kill { what: Victim::Qemu, site, .. } => {
            let vm = vm.context("nobody said whose QEMU")?;
            let site = site.as_deref().or(at).unwrap_or(&vm.site);
            vm.kill_qemu(site)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn whoever_waits_finds_all_done_and_hears_once_what_did_not_work() {
        let later = Later::default();
        let done = Arc::new(AtomicU32::new(0));
        for i in 0..3 {
            let done = done.clone();
            let result = move || {
                done.fetch_add(1, Ordering::Relaxed);
                if i == 1 { Err(anyhow::anyhow!("it is gone")) } else { Ok(()) }
            };
            later.after(Duration::from_millis(30 * i), result).unwrap();
        }
        later.wait();
        assert_eq!(done.load(Ordering::Relaxed), 3);
        assert_eq!(later.failures(), ["it is gone"]);
        assert_eq!(later.failures(), [""; 0]);
    }
}
