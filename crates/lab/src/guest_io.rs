//! The guest's own disk I/O and work through a move: asked of its load program, put on the host's clock.
//!
//! The guest counts in intervals of its own clock ([`godwit_load::activity`]), and that clock stands still while the guest does. So each
//! answer is a pair of clocks, the guest's and the host's, and what lies between two pairs that do not fit is a pause: intervals from
//! before it are put before the stop, the others behind it.
//!
//! What can go wrong: the guest does not answer (it is paused, or lost). Then the curve has a gap, or ends; a move is never held up.

use crate::fabric::Fabric;
use crate::machine::Machine;
use crate::pass::{Pass, lock};
use crate::report::{IoPoint, IoWindow};
use crate::scenario::IoStep;
use anyhow::{Context, Result, bail};
use godwit_load::activity::{ActivityReport, EVERY, Sample, quantile_us};
use godwit_load::control::{Control, ControlError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the guest is asked. Each answer is one or two kilobytes on the WAN where the guest has left.
const ASK: Duration = Duration::from_millis(500);
/// How many intervals from before the first question are taken: five seconds.
const LEAD: u64 = 20;
/// How long a guest may take to be reached at first. One that stands still is not waited for.
const CONNECTED: Duration = Duration::from_secs(5);
/// How long it may be silent later: a move may hold it for long.
const ANSWERED: Duration = Duration::from_secs(600);
/// How long an answer that is under way is waited for at the end.
const LAST: Duration = Duration::from_secs(2);
/// Clocks that differ by so much more than before have a pause between them; less is the noise of an emulated guest.
const PAUSE_S: f64 = 0.05;

/// What the guest said, and when.
#[derive(Debug, Default)]
struct Heard {
    /// The guest's clock at a moment of the host's.
    clocks: Vec<(Instant, f64)>,
    samples: Vec<Sample>,
}

impl Heard {
    fn take(&mut self, asked: Instant, report: ActivityReport) {
        // The answer was written somewhere between the question and its arrival.
        self.clocks.push((asked + asked.elapsed() / 2, report.uptime_s));
        self.samples.extend(report.samples);
    }
}

/// Asks a guest again and again.
#[derive(Debug)]
pub struct GuestWatch {
    stop: Arc<AtomicBool>,
    heard: Arc<Mutex<Heard>>,
    thread: JoinHandle<()>,
}

impl GuestWatch {
    /// Begins to ask the guest of `machine`. The connection is made from the site where it is now, and outlives the move.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn start(machine: &Machine, fabric: &Fabric) -> Result<Self> {
        let mut control = machine.ask(fabric, CONNECTED, ANSWERED)?;
        let (stop, heard) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Heard>>::default());
        let (told, writes) = (stop.clone(), heard.clone());
        let thread = std::thread::Builder::new().name("guest-watch".into()).spawn(move || {
            // A guest that does not answer any more has no curve any more.
            let _ = ask(&mut control, &told, &writes);
        })?;
        Ok(Self { stop, heard, thread })
    }

    /// Ends, and yields the curve: seconds from `zero`, with the guest standing still from `stop_s` on, if it did.
    #[must_use]
    pub fn curve(self, zero: Instant, stop_s: Option<f64>) -> Vec<IoPoint> {
        self.stop.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + LAST;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let heard = lock(&self.heard);
        let seconds = |at: Instant| match at.checked_duration_since(zero) {
            Some(later) => later.as_secs_f64(),
            None => -(zero - at).as_secs_f64(),
        };
        let clocks: Vec<(f64, f64)> = heard.clocks.iter().map(|(at, guest)| (seconds(*at), *guest)).collect();
        heard
            .samples
            .iter()
            .filter_map(|sample| Some(point(sample, on_hosts_clock(sample.at_s, &clocks, stop_s)?)))
            .collect()
    }
}

/// The intervals of the next so many seconds. A question takes a guest some milliseconds of its processor, and whatever it reads or writes meanwhile waits
/// for them: where the guest was asked twice a second it was one operation in a hundred. So it is asked before and behind.
///
/// # Errors
/// When the guest does not answer.
fn intervals(control: &mut Control, seconds: f64) -> Result<Vec<Sample>, ControlError> {
    // The one that goes on now has this question in it.
    let mut from = control.activity(u64::MAX)?.next + 1;
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let (mut heard, mut end_s) = (vec![], None);
    loop {
        let report = control.activity(from)?;
        let end_s = *end_s.get_or_insert(report.uptime_s);
        from = report.next;
        let before = heard.len();
        heard.extend(report.samples.into_iter().take_while(|sample| sample.at_s <= end_s));
        if heard.len() == before {
            return Ok(heard);
        }
    }
}

/// All that the load's reads and writes took in these.
fn window(step: &IoStep, samples: &[Sample]) -> IoWindow {
    let latency = || samples.iter().flat_map(|sample| sample.latency.iter().copied());
    let ms = |share| quantile_us(latency(), share).map(|us| us / 1e3);
    IoWindow {
        vm: step.vm.get_ref().clone(),
        name: step.name.clone(),
        seconds: samples.iter().map(|sample| sample.seconds).sum(),
        operations: latency().map(|(_, count)| u64::from(count)).sum(),
        read_kib: samples.iter().map(|sample| sample.read_kib).sum(),
        write_kib: samples.iter().map(|sample| sample.write_kib).sum(),
        units: samples.iter().map(|sample| sample.units).sum(),
        p50_ms: ms(0.5),
        p90_ms: ms(0.9),
        p95_ms: ms(0.95),
        p99_ms: ms(0.99),
        p999_ms: ms(0.999),
        longest_ms: ms(1.0),
        ..IoWindow::default()
    }
}

fn ask(control: &mut Control, stop: &AtomicBool, heard: &Mutex<Heard>) -> Result<(), ControlError> {
    let mut from = control.activity(u64::MAX)?.next.saturating_sub(LEAD);
    loop {
        // Looked at before the question: so there is one more after the end.
        let last = stop.load(Ordering::Relaxed);
        let asked = Instant::now();
        let report = control.activity(from)?;
        let more = report.next.saturating_sub(from) as usize >= godwit_load::activity::MOST;
        from = report.next;
        lock(heard).take(asked, report);
        if more {
            continue;
        }
        if last {
            return Ok(());
        }
        let until = Instant::now() + ASK;
        while Instant::now() < until && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The host's time of a moment of the guest's, from pairs `(host, guest)` in their order.
fn on_hosts_clock(guest_s: f64, clocks: &[(f64, f64)], stop_s: Option<f64>) -> Option<f64> {
    let after = clocks.partition_point(|(_, guest)| *guest < guest_s);
    let ahead = |(host, guest): (f64, f64)| host - guest;
    let (before, later) = (after.checked_sub(1).map(|i| ahead(clocks[i])), clocks.get(after).copied().map(ahead));
    Some(match (before, later) {
        (Some(before), Some(later)) if later - before > PAUSE_S => {
            let at = guest_s + before;
            if stop_s.is_none_or(|stop| at <= stop) { at } else { guest_s + later }
        }
        (Some(_), Some(later)) => guest_s + later,
        (Some(one), None) | (None, Some(one)) => guest_s + one,
        (None, None) => return None,
    })
}

fn point(sample: &Sample, t_s: f64) -> IoPoint {
    let each = |ms: u64, count: u64| (count > 0).then(|| ms as f64 / count as f64);
    let latency = |share| quantile_us(sample.latency.iter().copied(), share).map(|us| us / 1e3);
    IoPoint {
        t_s,
        seconds: sample.seconds,
        read_kib: sample.read_kib,
        write_kib: sample.write_kib,
        read_ms: each(sample.read_ms, sample.reads),
        write_ms: each(sample.write_ms, sample.writes),
        units: sample.units,
        p50_ms: latency(0.5),
        longest_ms: latency(1.0),
    }
}

impl Pass {
    /// The step `io`: what the guest's own reads and writes take, over a while.
    ///
    /// # Errors
    /// When the guest does not answer, or has no load whose reads and writes are timed.
    pub(crate) fn io(&mut self, step: &IoStep) -> Result<()> {
        let name = step.vm.get_ref();
        self.join(|vm| vm == name);
        let vm = self.vm(name);
        let mut control = {
            let guest = lock(&vm.guest);
            let guest = guest.as_ref().with_context(|| format!("VM `{name}` was lost"))?;
            guest.ask(&self.fabric, CONNECTED, ANSWERED)?
        };
        let samples = intervals(&mut control, step.s).with_context(|| format!("VM `{name}` was asked of its I/O"))?;
        let window = window(step, &samples);
        let (Some(p50), Some(p99)) = (window.p50_ms, window.p99_ms) else {
            bail!("VM `{name}` has no disk load, whose reads and writes are the ones that are timed");
        };
        self.progress.note(&format!(
            "{name}: {} reads and writes {}: half within {p50:.2} ms, 99 % within {p99:.2} ms",
            window.operations, step.name
        ));
        if window.seconds + 4.0 * EVERY.as_secs_f64() < step.s {
            self.warnings.push(format!(
                "VM `{name}`, `{}`: only {:.1} of {:.1} s were seen by the guest's clock",
                step.name, window.seconds, step.s
            ));
        }
        self.windows.push(window);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_from_before_a_pause_stay_before_it_and_the_others_come_behind() {
        // The guest's clock is 100 s behind the host's, and after a pause of two seconds 102 s.
        let clocks = [(101.0, 1.0), (103.0, 3.0), (107.0, 5.0), (109.0, 7.0)];
        let at = |guest| on_hosts_clock(guest, &clocks, Some(104.0)).unwrap();
        assert_eq!([0.5, 2.0, 3.9].map(at), [100.5, 102.0, 103.9]);
        assert_eq!([4.1, 6.0, 8.0].map(at), [106.1, 108.0, 110.0]);
        assert_eq!(on_hosts_clock(1.0, &[], None), None);
    }
}
