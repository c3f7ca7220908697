//! An application of several tiers, watched from outside: how many requests were answered, when, and how.

use crate::fabric::Fabric;
use crate::pass::{Pass, Vm};
use crate::report::{Application, ApplicationPoint, RequestPoint};
use anyhow::{Context, Result};
use godwit_load::tier::{Asked, Clients, Verdict};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests are counted in intervals of so many seconds.
const INTERVAL_S: f64 = 0.5;
/// How long a connection to the first tier may take.
const CONNECTED: Duration = Duration::from_secs(3);
/// How much of the time before the first step is told.
const LEAD_S: f64 = 5.0;

/// How much of the time before a move its requests show, seconds.
const REQUESTS_LEAD_S: f64 = 20.0;

/// Requests that a move tells: some minutes of a hundred a second. A line of a ledger has room for several such moves.
const MOST_REQUESTS: usize = 12_000;

/// Clients of a VM's tier.
pub(crate) struct Watched {
    vm: String,
    from: String,
    sessions: u32,
    think_ms: u32,
    clients: Clients,
}

impl Pass {
    /// Begins to ask the tiers that have clients.
    ///
    /// # Errors
    /// When there are no threads to be had.
    pub(crate) fn begin_applications(&mut self) -> Result<()> {
        for vm in self.vms.clone() {
            for (from, port, sessions, think_ms) in vm.described.asked() {
                let connect = connector(&self.fabric, from, &vm, port);
                let clients = Clients::start(sessions, Duration::from_millis(think_ms.into()), connect);
                let clients = clients.with_context(|| format!("the clients of `{}`", vm.name))?;
                let (vm, from) = (vm.name.clone(), from.to_owned());
                self.applications.push(Watched { vm, from, sessions, think_ms, clients });
            }
        }
        Ok(())
    }

    /// Ends the clients; what they saw, counted from the first step.
    pub(crate) fn end_applications(&mut self) -> Vec<Application> {
        let (zero, now) = (self.zero, self.seconds(Instant::now()));
        self.applications.drain(..).map(|watched| told(&watched, zero, now)).collect()
    }
}

/// What the clients of `vm` saw from [`REQUESTS_LEAD_S`] before `began` until `until`, one by one.
pub(crate) fn requests(all: &[Watched], vm: &str, began: Instant, until: Instant) -> Vec<RequestPoint> {
    let seen = all.iter().filter(|watched| watched.vm == vm).flat_map(|watched| {
        let zero = began.saturating_duration_since(watched.clients.began).as_secs_f64();
        watched.clients.seen().asked.into_iter().map(move |asked| point(&asked, zero))
    });
    let until_s = until.saturating_duration_since(began).as_secs_f64();
    let mut seen: Vec<_> = seen.filter(|point| (-REQUESTS_LEAD_S..=until_s).contains(&point.t_s)).collect();
    seen.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
    seen.truncate(MOST_REQUESTS);
    seen
}

fn point(asked: &Asked, zero: f64) -> RequestPoint {
    let answered = matches!(asked.verdict, Verdict::Good | Verdict::Late);
    RequestPoint { t_s: asked.at_s - zero, ms: asked.took_s * 1e3, answered }
}

fn connector(fabric: &Arc<Fabric>, from: &str, vm: &Vm, port: u16) -> impl Fn() -> std::io::Result<TcpStream> + use<> {
    let (fabric, from, to) = (fabric.clone(), from.to_owned(), SocketAddr::from((vm.address(), port)));
    move || fabric.site(&from).ns.run(move || TcpStream::connect_timeout(&to, CONNECTED))
}

fn told(watched: &Watched, zero: Instant, until_s: f64) -> Application {
    let seen = watched.clients.seen();
    let began = watched.clients.began;
    let offset = zero.checked_duration_since(began).map_or(0.0, |later| later.as_secs_f64());
    let asked: Vec<Asked> = seen
        .asked
        .iter()
        .map(|asked| Asked { at_s: asked.at_s - offset, ..*asked })
        .filter(|asked| asked.at_s >= -LEAD_S)
        .collect();
    let count = |verdict| asked.iter().filter(|asked| asked.verdict == verdict).count() as u64;
    Application {
        vm: watched.vm.clone(),
        from: watched.from.clone(),
        sessions: watched.sessions,
        think_ms: watched.think_ms,
        tiers: seen.tiers,
        good: count(Verdict::Good),
        late: count(Verdict::Late),
        failed: count(Verdict::Failed),
        wrong: count(Verdict::Wrong),
        first_error: seen.first_error,
        longest_s: asked.iter().map(|asked| asked.took_s).fold(0.0, f64::max),
        interval_s: INTERVAL_S,
        points: points(&asked, until_s),
        ..Application::default()
    }
}

/// What ended in each interval from [`LEAD_S`] before the first step until `until_s`; those in which nothing did, too.
fn points(asked: &[Asked], until_s: f64) -> Vec<ApplicationPoint> {
    let first = (-LEAD_S / INTERVAL_S).floor() as i64;
    let last = (until_s / INTERVAL_S).floor() as i64;
    let mut points: Vec<ApplicationPoint> = (first..=last)
        .map(|number| ApplicationPoint { t_s: number as f64 * INTERVAL_S, ..ApplicationPoint::default() })
        .collect();
    let mut took = vec![vec![]; points.len()];
    for asked in asked {
        let number = (asked.at_s / INTERVAL_S).floor() as i64 - first;
        let Some(number) = usize::try_from(number).ok().filter(|number| *number < points.len()) else { continue };
        let point = &mut points[number];
        match asked.verdict {
            Verdict::Good => point.good += 1,
            Verdict::Late => point.late += 1,
            Verdict::Failed => point.failed += 1,
            Verdict::Wrong => point.wrong += 1,
        }
        took[number].push(asked.took_s);
    }
    for (point, mut took) in points.iter_mut().zip(took) {
        took.sort_by(f64::total_cmp);
        point.median_ms = took.get(took.len() / 2).map(|s| s * 1e3);
        point.longest_ms = took.last().map(|s| s * 1e3);
    }
    // The time before the first step, as far as the clients were there.
    let begun = points.iter().position(|p| p.median_ms.is_some()).unwrap_or(points.len());
    points.drain(..begun);
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_in_the_interval_in_which_they_ended_and_silence_is_told() {
        let asked = |at_s, took_s, verdict| Asked { at_s, took_s, verdict };
        let all = [
            asked(-0.2, 0.1, Verdict::Good),
            asked(0.1, 0.1, Verdict::Good),
            asked(0.4, 0.3, Verdict::Good),
            asked(1.6, 1.3, Verdict::Late),
            asked(1.7, 0.2, Verdict::Failed),
            asked(99.0, 0.2, Verdict::Good),
        ];
        let points = points(&all, 2.2);
        let counted: Vec<_> = points.iter().map(|p| (p.t_s, p.good, p.late, p.failed)).collect();
        assert_eq!(
            counted,
            [(-0.5, 1, 0, 0), (0.0, 2, 0, 0), (0.5, 0, 0, 0), (1.0, 0, 0, 0), (1.5, 0, 1, 1), (2.0, 0, 0, 0)]
        );
        assert_eq!((points[1].longest_ms, points[2].median_ms), (Some(300.0), None));
    }

    #[test]
    fn a_request_counts_from_the_command_and_one_that_failed_was_not_answered() {
        let told = |at_s, verdict| {
            let RequestPoint { t_s, ms, answered } = point(&Asked { at_s, took_s: 0.5, verdict }, 10.0);
            (t_s, ms, answered)
        };
        assert_eq!(told(12.0, Verdict::Late), (2.0, 500.0, true));
        assert_eq!(told(9.0, Verdict::Failed), (-1.0, 500.0, false));
        assert!(!told(9.0, Verdict::Wrong).2);
    }
}
