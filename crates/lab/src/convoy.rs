//! Several VMs that move in one order (`move = { vms = [...] }`): what is known only of all of them together.
//!
//! Godwit is given one command for all, `godwit move A B C D --to SITE`, when every VM's own thread is ready for it; a baseline makes its plain
//! moves at once, each by itself. Each VM has a thread and a report of its own, as in any move. What crosses the path between the two sites meanwhile
//! cannot be told apart by the WAN emulator, which sees kinds of traffic and no VMs: so the bytes are counted here, for all, from before the order
//! until the last move has ended.
//!
//! What can go wrong: the order is refused (all the moves have failed, with its words); the controller is away for a while (it is
//! asked again); a move has no end (its own thread gives up on it after the move's time limit).

use crate::fabric::Fabric;
use crate::godwit::Installation;
use crate::pass::{Means, lock};
use crate::report::{MoveReport, TogetherReport, WanBytes, WanSample};
use crate::watch::wan_bytes;
use anyhow::{Context, Result, anyhow};
use godwit_api::public;
use godwit_wan::Counters;
use std::sync::{Arc, Barrier, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the controller is asked how all of them stand.
const ASK: Duration = Duration::from_millis(500);

/// Points of a curve that goes into ledgers.
const CURVE: usize = 60;

/// When an order was given, by two clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Began {
    /// For what the lab measures.
    pub at: Instant,
    /// Microseconds since 1970: for what Godwit tells.
    pub unix_us: u64,
}

impl Began {
    /// Now.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { at: Instant::now(), unix_us: u64::try_from(since.as_micros()).unwrap_or(u64::MAX) }
    }
}

/// VMs that move in one order.
pub(crate) struct Convoy {
    means: Means,
    vms: Vec<String>,
    from: String,
    to: String,
    fabric: Arc<Fabric>,
    before: Counters,
    /// Where every VM's thread waits for the others before the order, and for the order.
    ready: Barrier,
    order: Mutex<Option<Result<Began, String>>>,
    /// What Godwit said last of each.
    said: Mutex<Vec<public::Move>>,
    ended: Mutex<Ended>,
}

/// What the moves that have ended come to.
#[derive(Clone, Debug, Default, PartialEq)]
struct Ended {
    /// Until each guest ran, seconds from the order, and how long the lab held it, seconds.
    times: Vec<(f64, f64)>,
    bytes: WanBytes,
}

impl Convoy {
    /// Of these VMs, which are in `from` and move to `to`; counts the path's bytes from now on.
    pub fn new(means: Means, vms: Vec<String>, from: &str, to: &str, fabric: &Arc<Fabric>) -> Self {
        Self {
            means,
            ready: Barrier::new(vms.len()),
            vms,
            from: from.to_owned(),
            to: to.to_owned(),
            fabric: fabric.clone(),
            before: fabric.counters(from, to).unwrap_or_default(),
            order: Mutex::default(),
            said: Mutex::default(),
            ended: Mutex::default(),
        }
    }

    /// Waits until the threads of all VMs are here; then one of them gives the order: `godwit move` with all VMs and `options`. Every thread has to
    /// come here once, whatever has become of its VM.
    ///
    /// # Errors
    /// With the command's own words when it was refused.
    pub fn order(self: &Arc<Self>, installation: &Arc<Installation>, options: &[&str]) -> Result<Began> {
        if self.ready.wait().is_leader() {
            let began = Began::now();
            let given = self.give(installation, options).map(|()| began);
            *lock(&self.order) = Some(given.map_err(|e| format!("{e:#}")));
        }
        self.ready.wait();
        let given = lock(&self.order).clone().context("nobody gave the order")?;
        given.map_err(|words| anyhow!(words))
    }

    fn give(self: &Arc<Self>, installation: &Arc<Installation>, options: &[&str]) -> Result<()> {
        let names = self.vms.iter().map(String::as_str);
        let command: Vec<&str> = ["move"].into_iter().chain(names).chain(options.iter().copied()).collect();
        *lock(&self.said) = installation.json(&[command.as_slice(), &["--detach"]].concat())?;
        let (convoy, installation) = (Arc::downgrade(self), installation.clone());
        std::thread::Builder::new().name("convoy".into()).spawn(move || ask(&convoy, &installation))?;
        Ok(())
    }

    /// What Godwit said last of a VM's move.
    pub fn said(&self, vm: &str) -> Option<public::Move> {
        lock(&self.said).iter().find(|mv| mv.vm.as_str() == vm).cloned()
    }

    /// A VM's move has ended.
    pub fn ended(&self, report: &MoveReport) {
        let bytes = wan_bytes(&self.fabric.counters(&self.from, &self.to).unwrap_or_default().since(&self.before));
        let mut ended = lock(&self.ended);
        ended.times.push((report.total_s, report.held_ms / 1e3));
        ended.bytes = bytes;
    }

    /// What all of them come to, once they have ended.
    fn report(&self) -> TogetherReport {
        let ended = lock(&self.ended).clone();
        TogetherReport {
            by: self.means.to_string(),
            vms: self.vms.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            total_s: all_run_s(self.means, &ended.times),
            bytes: ended.bytes,
            curve: vec![],
        }
    }

    /// The same, with the curve of the path's bytes, which the move that ended last has seen to its end.
    pub fn report_with(&self, moves: &[MoveReport]) -> TogetherReport {
        let mine = |m: &&MoveReport| m.to == self.to && self.vms.contains(&m.vm);
        let last = moves.iter().filter(mine).max_by(|a, b| a.total_s.total_cmp(&b.total_s));
        TogetherReport { curve: last.map(|m| thinned(&m.series.wan)).unwrap_or_default(), ..self.report() }
    }
}

/// At most [`CURVE`] of the points from the order on.
fn thinned(samples: &[WanSample]) -> Vec<(f64, u64)> {
    let all: Vec<_> = samples.iter().filter(|s| s.t_s >= 0.0).map(|s| (s.t_s, s.memory + s.disk)).collect();
    all.iter().copied().step_by(all.len().div_ceil(CURVE).max(1)).collect()
}

/// When the last guest ran, less what the lab held guests. Godwit's go one after another: each waits for what those before it were held.
fn all_run_s(means: Means, times: &[(f64, f64)]) -> f64 {
    let last = |of: &dyn Fn(&(f64, f64)) -> f64| times.iter().map(of).fold(0.0, f64::max);
    match means {
        Means::Godwit => last(&|t| t.0) - times.iter().map(|t| t.1).sum::<f64>(),
        Means::Baseline(_) => last(&|t| t.0 - t.1),
    }
}

/// Asks how they stand until nobody wants to know.
fn ask(convoy: &Weak<Convoy>, installation: &Installation) {
    loop {
        std::thread::sleep(ASK);
        let Some(convoy) = convoy.upgrade() else { return };
        // The controller may be away for a while.
        let Ok(all) = installation.json::<Vec<public::Move>>(&["move", "ls"]) else { continue };
        for known in &mut *lock(&convoy.said) {
            if let Some(now) = all.iter().find(|mv| mv.id == known.id) {
                known.clone_from(now);
            }
        }
        if lock(&convoy.said).iter().all(|mv| !mv.progress.outcome.is_open()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Baseline;

    #[test]
    fn a_curve_has_some_dozens_of_points_from_the_order_on() {
        let sample = |n: i32| WanSample { t_s: f64::from(n) / 5.0, memory: 1, disk: 2, other: 4 };
        let long: Vec<_> = (-10..1000).map(sample).collect();
        let curve = thinned(&long);
        assert!(curve.len() <= CURVE && curve.len() > CURVE / 2, "{}", curve.len());
        assert_eq!((curve[0], thinned(&long[..12]).len(), thinned(&[]).len()), ((0.0, 3), 2, 0));
    }

    #[test]
    fn what_the_lab_held_is_taken_off_once_for_each_guest_that_others_waited_for() {
        let times = [(10.0, 1.0), (20.0, 2.0), (19.0, 0.5)];
        assert_eq!(all_run_s(Means::Godwit, &times), 16.5);
        assert_eq!(all_run_s(Means::Baseline(Baseline::Qemu), &times), 18.5);
    }
}
