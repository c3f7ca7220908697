//! The memory load: touches pages at a rate, each verified before it is written.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    arena::{Arena, Chooser},
    page::PageIndex,
    protocol::{CheckReport, CorruptReport, CorruptTarget, MemoryStatus, PagePlace, Refusal},
    worker::{ErrorLog, Longest, RunClock, Work},
};

/// What a memory load counts, readable while it runs.
#[derive(Default)]
pub(crate) struct MemoryCounters {
    pub clock: Arc<RunClock>,
    touches: AtomicU64,
    max_gap: Longest,
    errors: ErrorLog,
}

impl MemoryCounters {
    pub fn status(&self, pages: u32) -> MemoryStatus {
        let touches = self.touches.load(Relaxed);
        MemoryStatus {
            pages: pages.into(),
            pages_dirtied: touches,
            pages_per_s: self.clock.rate(touches),
            max_gap_ms: self.max_gap.ms(),
            errors: self.errors.count(),
            first_error: self.errors.first(),
        }
    }
}

/// When a load writes: a guest whose moves are better at one moment than at another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phases {
    pub busy_s: u32,
    /// 0: it never rests.
    pub rest_s: u32,
}

impl Phases {
    fn rests_at(self, since_1970: Duration) -> bool {
        let period = u64::from(self.busy_s) + u64::from(self.rest_s);
        self.rest_s > 0 && since_1970.as_secs() % period >= self.busy_s.into()
    }
}

/// The load; see [`crate::worker`] for its life.
pub(crate) struct MemoryLoad {
    pub load: usize,
    pub pages_per_s: u32,
    pub phases: Phases,
    pub arena: Arena,
    pub chooser: Chooser,
    /// What was damaged on purpose; flipping the same bit twice would heal it.
    pub damaged: Option<CorruptReport>,
    pub counters: Arc<MemoryCounters>,
}

impl Work for MemoryLoad {
    fn per_s(&self) -> f64 {
        self.pages_per_s.into()
    }

    fn step(&mut self, units: u64) {
        if self.phases.rests_at(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()) {
            return;
        }
        for _ in 0..units {
            let page = self.chooser.choose();
            if let Err(fault) = self.arena.touch(page) {
                self.counters.errors.note(format_args!("page {} is {fault}", page.0));
            }
        }
        self.counters.touches.fetch_add(units, Relaxed);
    }

    fn note_gap(&mut self, gap: Duration) {
        self.counters.max_gap.note(gap);
    }

    fn verify(&mut self, report: &mut CheckReport) {
        let load = self.load;
        self.arena.check(PagePlace::Arena { load }, PagePlace::Table { load }, &mut report.memory);
        report.memory.touch_errors += self.counters.errors.count();
    }

    fn damage(&mut self) -> Result<CorruptReport, Refusal> {
        let arena = &mut self.arena;
        let damage = self.damaged.get_or_insert_with(|| {
            let index = PageIndex(arena.len() / 2);
            let byte = arena.damage(index);
            CorruptReport { what: CorruptTarget::MemoryPage, index: index.0.into(), byte }
        });
        Ok(damage.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_rests_does_so_at_the_same_seconds_of_each_period() {
        let rests = |busy_s, rest_s, at| Phases { busy_s, rest_s }.rests_at(Duration::from_millis(at));
        assert!(!rests(0, 0, 5000) && !rests(3, 0, 5000));
        assert_eq!(
            [0, 2999, 3000, 4999, 5000, 8000].map(|at| rests(3, 2, at)),
            [false, false, true, true, false, true]
        );
    }
}
