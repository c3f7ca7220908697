//! Steady flows over the user's wires, and what was missing of them while something was killed or cut.
//!
//! A flow begins in a component's namespace, goes over its wires to a guest, and comes back: numbered datagrams, or one TCP session
//! ([`EchoClient`](godwit_load::echo::EchoClient)'s). Both times of each number are taken at the beginning, by the machine's clock. An
//! *incident* is what the script has killed, cut and moved from one step `whole` to the next; each flow is looked at from an incident's first deed
//! until the next incident's, so that what a repair itself costs counts, too.
//!
//! What can go wrong: the machine is busy, and the flow stands although nothing is amiss. So the time before the first incident is looked at in
//! the same way, and stands first in the report.

use crate::godwit::{Folders, Installation, extender};
use crate::pass::Pass;
use crate::report::{FlowSeen, IncidentReport};
use crate::scenario::{FlowKind, Whole};
use crate::watch::Client;
use anyhow::{Context, Result};
use godwit_api::component::ComponentObject;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a datagram.
const DATAGRAM: usize = 200;
/// Numbers that a flow keeps, 24 MiB: a thousand a second for a quarter of an hour. What comes after them is not looked at.
const MOST: usize = 1 << 20;
/// How long a session may take to begin: frames have to find their way first.
const BEGUN: Duration = Duration::from_secs(60);
/// A datagram that was sent so shortly before the end is on its way, and not lost; and a silence so short is none that lasts.
const UNDER_WAY_S: f64 = 1.0;
/// A number is taken for under way for so many times the usual time there and back: some take longer than most.
const LONGER: f64 = 2.0;
/// Nothing is whole that was not for so long: a node may not have found out yet.
const STEADY: Duration = Duration::from_secs(3);

/// A number of a flow; seconds from the flow's beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Number {
    sent_s: f64,
    answered_s: Option<f64>,
}

/// A flow that goes on.
pub(crate) struct Flow {
    name: String,
    kind: FlowKind,
    began: Instant,
    goes: Goes,
}

enum Goes {
    Udp(Datagrams),
    Tcp(Client),
}

impl Flow {
    fn begin(name: String, kind: FlowKind, space: &Path, to: SocketAddr, per_s: u32) -> Result<Self> {
        let goes = match kind {
            FlowKind::Udp => {
                let socket = within(space, move || {
                    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                    socket.connect(to)?;
                    Ok(socket)
                })?;
                Goes::Udp(Datagrams::start(socket, per_s)?)
            }
            FlowKind::Tcp => Goes::Tcp(Client::start(&name, session(space, to)?, per_s)?),
        };
        let began = match &goes {
            Goes::Udp(datagrams) => datagrams.began,
            Goes::Tcp(client) => client.began,
        };
        Ok(Self { name, kind, began, goes })
    }

    /// Its numbers so far, in the order in which they were sent, and how it broke, if it did.
    fn numbers(&self) -> (Vec<Number>, Option<String>) {
        match &self.goes {
            Goes::Udp(datagrams) => (crate::pass::lock(&datagrams.numbers).clone(), None),
            Goes::Tcp(client) => {
                let seen = client.log.snapshot();
                let number = |s: &godwit_load::echo::EchoSample| Number {
                    sent_s: s.sent_at_s,
                    answered_s: Some(s.received_at_s),
                };
                (seen.samples.iter().map(number).collect(), seen.error)
            }
        }
    }

    /// What it had between two moments. Nobody knows yet what becomes of numbers that are sent after `now`.
    fn seen(&self, from: Instant, until: Instant, now: Instant, stood: &[[Instant; 2]]) -> (FlowSeen, Missing) {
        let at = |moment: Instant| moment.saturating_duration_since(self.began).as_secs_f64();
        let (numbers, broke) = self.numbers();
        let stood: Vec<[f64; 2]> = stood.iter().map(|pause| pause.map(at)).collect();
        let found = look(&numbers, [at(from), at(until)], at(now), &stood);
        let counts = |n: u64| (self.kind == FlowKind::Udp).then_some(n);
        let seen = FlowSeen {
            flow: self.name.clone(),
            kind: self.kind,
            sent: found.sent,
            lost: counts(found.lost),
            lost_awake: counts(found.lost_awake),
            silent_ms: found.silent_s * 1e3,
            back_s: found.back_s,
            broke,
        };
        (seen, found)
    }
}

/// What was missing of a flow in a stretch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Missing {
    sent: u64,
    lost: u64,
    /// Those of the lost that no pause explains.
    lost_awake: u64,
    /// The longest time without an answer, as far as it lies in the stretch.
    silent_s: f64,
    /// When that was over, from the stretch's beginning; nothing where it never was.
    back_s: Option<f64>,
    /// When the last of the lost was sent, from the stretch's beginning.
    last_lost_s: Option<f64>,
}

/// How long a number is under way, there and back: few take longer.
fn trip_s(numbers: &[Number]) -> f64 {
    crate::table::median(numbers.iter().filter_map(|number| Some(number.answered_s? - number.sent_s))).unwrap_or(0.0)
        * LONGER
}

/// A number belongs to the stretch in which its answer was to come: what was under way at its beginning is the work of what was done
/// then. `stood`: when guests stood still.
fn look(numbers: &[Number], [from_s, until_s]: [f64; 2], now_s: f64, stood: &[[f64; 2]]) -> Missing {
    let trip_s = trip_s(numbers);
    let in_a_pause = |sent_s: f64| stood.iter().any(|[stopped, ran]| (stopped - trip_s..*ran).contains(&sent_s));
    let settled_s = until_s.min(now_s - UNDER_WAY_S);
    let inside = numbers.iter().filter(|number| (from_s..settled_s).contains(&(number.sent_s + trip_s)));
    let (mut sent, mut lost, mut lost_awake, mut last_lost_s) = (0, 0, 0, None);
    for number in inside {
        sent += 1;
        if number.answered_s.is_none() {
            lost += 1;
            last_lost_s = Some(number.sent_s - from_s);
            lost_awake += u64::from(!in_a_pause(number.sent_s));
        }
    }
    let mut answers: Vec<f64> = numbers.iter().filter_map(|number| number.answered_s).collect();
    answers.sort_by(f64::total_cmp);
    let over = answers.last().is_none_or(|last| now_s - last > UNDER_WAY_S).then_some((now_s, false));
    let (mut silent_s, mut back_s, mut last) = (0.0, None, from_s);
    for (at, is_answer) in answers.into_iter().map(|at| (at, true)).chain(over) {
        // Of a silence that comes from the stretch before, or goes on into the next one, what lies in this one.
        let silent = at.min(until_s) - last.max(from_s);
        if silent > silent_s {
            silent_s = silent;
            back_s = is_answer.then_some(at - from_s);
        }
        last = at;
    }
    Missing { sent, lost, lost_awake, silent_s, back_s, last_lost_s }
}

/// Datagrams with numbers, at a steady pace, by a thread of its own.
struct Datagrams {
    began: Instant,
    numbers: Arc<Mutex<Vec<Number>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Datagrams {
    fn start(socket: UdpSocket, per_s: u32) -> Result<Self> {
        socket.set_nonblocking(true)?;
        let (began, numbers, stop) =
            (Instant::now(), Arc::<Mutex<Vec<Number>>>::default(), Arc::<AtomicBool>::default());
        let (writes, told) = (numbers.clone(), stop.clone());
        let every = Duration::from_secs(1) / per_s;
        let thread = std::thread::Builder::new()
            .name("datagrams".into())
            .spawn(move || exchange(&socket, every, began, &writes, &told))?;
        Ok(Self { began, numbers, stop, thread: Some(thread) })
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends and hears until it is told to stop. What should have been sent while the machine was busy is left out, not sent at once.
fn exchange(socket: &UdpSocket, every: Duration, began: Instant, numbers: &Mutex<Vec<Number>>, stop: &AtomicBool) {
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        hear(socket, began, numbers);
        let now = Instant::now();
        if now < next {
            let wait = Timespec::try_from(next - now).expect("less than a second");
            let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait));
            continue;
        }
        let mut numbers = crate::pass::lock(numbers);
        if numbers.len() < MOST {
            let mut datagram = [0x5a; DATAGRAM];
            datagram[..8].copy_from_slice(&(numbers.len() as u64).to_le_bytes());
            numbers.push(Number { sent_s: began.elapsed().as_secs_f64(), answered_s: None });
            // Where there is no way it is lost, as it would be further on.
            let _ = socket.send(&datagram);
        }
        drop(numbers);
        next = (next + every).max(now);
    }
}

fn hear(socket: &UdpSocket, began: Instant, numbers: &Mutex<Vec<Number>>) {
    let mut heard = [0; DATAGRAM];
    loop {
        match socket.recv(&mut heard) {
            Ok(DATAGRAM) => {
                let number = u64::from_le_bytes(heard[..8].try_into().expect("eight bytes"));
                let mut numbers = crate::pass::lock(numbers);
                let known = usize::try_from(number).ok().and_then(|number| numbers.get_mut(number));
                if let Some(number) = known.filter(|number| number.answered_s.is_none()) {
                    number.answered_s = Some(began.elapsed().as_secs_f64());
                }
            }
            // An ICMP error of an earlier one is read once, and says nothing about what may still be there.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Ok(_) | Err(_) => {}
        }
    }
}

fn session(space: &Path, to: SocketAddr) -> Result<TcpStream> {
    let deadline = Instant::now() + BEGUN;
    loop {
        match within(space, move || TcpStream::connect_timeout(&to, Duration::from_secs(5))) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) if Instant::now() > deadline => return Err(error.context(format!("{to} is not reached"))),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// Does something in a network namespace. What is opened there stays there.
///
/// # Errors
/// When the namespace is gone, and what `job` fails with.
pub(crate) fn within<T: Send>(namespace: &Path, job: impl FnOnce() -> std::io::Result<T> + Send) -> Result<T> {
    let space = std::fs::File::open(namespace).with_context(|| format!("cannot open {}", namespace.display()))?;
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            job()
        });
        inside.join().expect("a job in a namespace does not panic")
    })
    .with_context(|| format!("in {}", namespace.display()))
}

/// The network namespace of a component.
///
/// # Errors
/// When it has no process.
pub(crate) fn space_of(godwit: &Installation, component: &str) -> Result<PathBuf> {
    let made: ComponentObject = godwit.json(&["component", "show", component])?;
    let site = godwit.fabric().site(made.site.as_str());
    let file = Folders::of(site).run.join("components").join(format!("{}.pid", made.id.0));
    let text = site.ns.run(move || std::fs::read_to_string(file)).context("a component has no process")?;
    Ok(PathBuf::from(format!("/proc/{}/ns/net", text.trim())))
}

/// What was killed and cut together, or who moved.
#[derive(Debug)]
pub(crate) struct Happened {
    what: Vec<String>,
    began: Instant,
    /// Whether more may be killed and cut in it.
    open: bool,
    whole: Option<Instant>,
}

impl Pass {
    /// Begins the scenario's flows; their wires are connected, and their guests answer.
    ///
    /// # Errors
    /// When one does not begin.
    pub(crate) fn begin_flows(&mut self) -> Result<()> {
        let Some(installation) = self.installation.clone() else { return Ok(()) };
        for flow in &self.scenario.flow {
            let (from, to) = (flow.from.get_ref(), flow.to.get_ref());
            let address = self.scenario.flow_target(flow).expect("a checked scenario's flows go to interfaces");
            let at = SocketAddr::from((address, crate::guest::ECHO_PORT));
            self.progress.note(&format!("beginning {} from {from} to {to}", flow.kind));
            let begun = Flow::begin(
                format!("{from} to {to}"),
                flow.kind,
                &space_of(&installation, from)?,
                at,
                *flow.per_s.get_ref(),
            );
            self.flows.push(begun.with_context(|| format!("the flow from `{from}` to `{to}`"))?);
        }
        Ok(())
    }

    /// Something was killed or cut at once, or moves: another incident, unless the one before has not ended yet.
    pub(crate) fn note_incident(&mut self, what: String) {
        match self.happened.last_mut().filter(|incident| incident.open) {
            Some(incident) => incident.what.push(what),
            None => self.happened.push(Happened { what: vec![what], began: Instant::now(), open: true, whole: None }),
        }
    }

    /// Waits until all is well again, and notes since when.
    pub(crate) fn whole(&mut self, step: &Whole) {
        let Some(installation) = self.installation.clone() else { return self.leave_out("whole") };
        self.progress.note("waiting until all is whole");
        let deadline = Instant::now() + Duration::from_secs_f64(step.timeout_s);
        let mut since = None;
        loop {
            let looked = Instant::now();
            match all_is_well(&installation) {
                // At the end of a look, not at its beginning: in between something may have been mended.
                Ok(()) => {
                    if since.get_or_insert_with(Instant::now).elapsed() >= STEADY {
                        break;
                    }
                }
                Err(error) if looked > deadline => {
                    since = None;
                    self.warnings.push(format!("not whole after {} s: {error:#}", step.timeout_s));
                    break;
                }
                Err(_) => since = None,
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        if let Some(incident) = self.happened.last_mut().filter(|incident| incident.open) {
            (incident.open, incident.whole) = (false, since);
        }
    }

    /// What the flows had in each incident, and first without any.
    pub(crate) fn end_flows(&mut self) -> Vec<IncidentReport> {
        let (flows, happened) = (std::mem::take(&mut self.flows), std::mem::take(&mut self.happened));
        if happened.is_empty() || flows.is_empty() {
            return vec![];
        }
        let now = Instant::now();
        let moment = |s: f64| self.zero + Duration::from_secs_f64(s.max(0.0));
        let stood: Vec<[Instant; 2]> =
            self.marks.iter().filter_map(|mark| mark.stop_s).map(|stop| stop.map(moment)).collect();
        let quiet = Happened { what: vec![], began: self.zero, open: false, whole: Some(self.zero) };
        let all: Vec<&Happened> = std::iter::once(&quiet).chain(&happened).collect();
        let ends = all.iter().skip(1).map(|next| next.began).chain([now]);
        let report = |(incident, until): (&&Happened, Instant)| {
            let seen = flows.iter().map(|flow| flow.seen(incident.began, until, now, &stood));
            let (flows, missing): (Vec<FlowSeen>, Vec<Missing>) = seen.unzip();
            // A node may say that a tunnel is up while its program has died: nothing is whole that still loses something.
            let lost_s = missing.iter().filter_map(|missing| missing.last_lost_s).fold(0.0, f64::max);
            let well_s = incident.whole.map(|whole| whole.saturating_duration_since(incident.began).as_secs_f64());
            IncidentReport {
                what: incident.what.clone(),
                at_s: self.seconds(incident.began),
                until_s: self.seconds(until),
                whole_s: well_s.map(|well_s| well_s.max(lost_s)),
                flows,
            }
        };
        all.iter().zip(ends).map(report).collect()
    }
}

/// Whether all tunnels are up, and `godwit net check` finds nothing.
fn all_is_well(installation: &Installation) -> Result<()> {
    for [a, b] in &installation.fabric().extenders {
        extender::look(installation, a, b)?;
    }
    installation.command(["net", "check"]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(sent_s: f64, answered: bool) -> Number {
        Number { sent_s, answered_s: answered.then_some(sent_s + 0.01) }
    }

    #[test]
    fn what_is_missing_is_counted_where_it_was_sent_and_silence_where_it_lies() {
        let numbers: Vec<Number> =
            (0..100).map(|n| f64::from(n) / 10.0).map(|s| number(s, !(3.0..5.0).contains(&s))).collect();
        let found = look(&numbers, [2.95, 7.0], 20.0, &[]);
        assert_eq!((found.sent, found.lost), (40, 20));
        assert!((found.last_lost_s.unwrap() - 1.95).abs() < 1e-9, "{found:?}");
        // The last answer before came at 2.91, and the next one at 5.01.
        assert!((found.silent_s - 2.06).abs() < 1e-9 && (found.back_s.unwrap() - 2.06).abs() < 1e-9, "{found:?}");
        let before = look(&numbers, [0.0, 2.95], 20.0, &[]);
        assert!(before.lost == 0 && before.silent_s < 0.11, "{before:?}");
        let cut_short = look(&numbers, [2.95, 4.0], 20.0, &[]);
        assert!(
            (cut_short.silent_s - 1.05).abs() < 1e-9 && (cut_short.back_s.unwrap() - 2.06).abs() < 1e-9,
            "{cut_short:?}"
        );
        assert!(look(&numbers, [5.5, 8.0], 20.0, &[]).silent_s < 0.11);
    }

    #[test]
    fn what_is_lost_in_a_pause_or_on_its_way_into_one_is_told_from_what_is_lost_otherwise() {
        let numbers: Vec<Number> =
            (0..100).map(|n| f64::from(n) / 10.0).map(|s| number(s, !(3.0..5.0).contains(&s))).collect();
        let awake = |stood: [f64; 2]| look(&numbers, [0.0, 9.0], 20.0, &[stood]).lost_awake;
        // Each takes 10 ms there and back, and may take 20.
        assert_eq!((awake([3.015, 5.0]), awake([3.05, 5.0]), awake([3.0, 4.65])), (0, 1, 3));
    }

    #[test]
    fn a_flow_that_does_not_come_back_is_silent_until_now_and_what_is_under_way_is_not_lost() {
        let numbers: Vec<Number> = (0..100).map(|n| f64::from(n) / 10.0).map(|s| number(s, s < 3.0)).collect();
        let found = look(&numbers, [2.0, 10.0], 10.0, &[]);
        assert_eq!((found.sent, found.lost, found.back_s), (70, 60, None));
        // What was on its way when something was done is not the loss of the stretch before.
        assert_eq!((look(&numbers, [0.0, 3.01], 10.0, &[]).lost, look(&numbers, [3.01, 9.0], 10.0, &[]).lost), (0, 60));
        assert!((found.silent_s - 7.09).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn datagrams_go_at_their_pace_and_each_answer_is_the_one_to_its_number() {
        let far = UdpSocket::bind("127.0.0.1:0").unwrap();
        let near = UdpSocket::bind("127.0.0.1:0").unwrap();
        near.connect(far.local_addr().unwrap()).unwrap();
        let flow = Datagrams::start(near, 200).unwrap();
        // The far end leaves out every third, and answers another twice.
        for _ in 0..30 {
            let mut heard = [0; DATAGRAM];
            let (length, from) = far.recv_from(&mut heard).unwrap();
            let number = u64::from_le_bytes(heard[..8].try_into().unwrap());
            for _ in 0..number % 3 {
                far.send_to(&heard[..length], from).unwrap();
            }
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        let answered = |n: usize| crate::pass::lock(&flow.numbers)[n].answered_s.is_some();
        while !answered(29) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        for n in 0..30 {
            assert_eq!(answered(n), n % 3 != 0, "number {n}");
        }
    }
}
