//! Watching from the outside: clients that talk to a VM, and the WAN's counters over time.

use crate::fabric::Fabric;
use crate::report::{WanBytes, WanSample};
use anyhow::Result;
use godwit_load::echo::{EchoClient, EchoLog};
use godwit_wan::{Class, Counters};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the WAN's counters are read for the curves.
const SAMPLE: Duration = Duration::from_millis(200);

/// A client in a site that talks to a VM over one TCP session.
pub struct Client {
    /// Where it is.
    pub site: String,
    /// The zero of its times.
    pub began: Instant,
    /// What it has seen.
    pub log: EchoLog,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Client {
    /// Begins to talk over `stream`.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(site: &str, stream: TcpStream, per_s: u32) -> Result<Self> {
        let (began, log, stop) = (Instant::now(), EchoLog::new(), Arc::new(AtomicBool::new(false)));
        let (writes, told) = (log.clone(), stop.clone());
        // It takes only what is under way: a pass that ends does not wait for echoes.
        let client = EchoClient { drain_limit: Duration::ZERO, ..EchoClient::new(per_s) };
        let thread = std::thread::Builder::new()
            .name("echo-client".into())
            .spawn(move || drop(client.run(stream, began, &told, &writes)))?;
        Ok(Self { site: site.to_owned(), began, log, stop, thread: Some(thread) })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Bytes that a class put on the line, both directions; what the WAN then lost was sent all the same.
fn on_the_line(counters: &Counters, class: Class) -> u64 {
    let c = counters.class(class);
    (c.delivered.bytes + c.dropped_loss.bytes).0
}

/// What a path carried, by the report's classes.
#[must_use]
pub fn wan_bytes(counters: &Counters) -> WanBytes {
    WanBytes {
        memory: on_the_line(counters, Class::Memory),
        disk: on_the_line(counters, Class::Disk),
        other: [Class::Control, Class::Client, Class::Tunnel, Class::Other]
            .into_iter()
            .map(|c| on_the_line(counters, c))
            .sum(),
        split_by_hypervisor: false,
    }
}

/// Reads the WAN's counters again and again.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, WanSample)>>,
    zero: Instant,
}

impl Sampler {
    /// Begins to read the path between two sites; counts from `before`.
    #[must_use]
    pub fn start(fabric: Arc<Fabric>, from: String, to: String, before: Counters) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut samples = vec![];
            while !told.load(Ordering::Relaxed) {
                if let Ok(counters) = fabric.counters(&from, &to) {
                    let bytes = wan_bytes(&counters.since(&before));
                    let sample = WanSample { t_s: 0.0, memory: bytes.memory, disk: bytes.disk, other: bytes.other };
                    samples.push((Instant::now(), sample));
                }
                std::thread::sleep(SAMPLE);
            }
            samples
        });
        Self { stop, thread, zero: Instant::now() }
    }

    /// With times that count from `zero`.
    #[must_use]
    pub fn rebased(self, zero: Instant) -> Self {
        Self { zero, ..self }
    }

    /// Ends, and yields the curve.
    #[must_use]
    pub fn finish(self) -> Vec<WanSample> {
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().unwrap_or_default();
        let at = |t: Instant| match t.checked_duration_since(self.zero) {
            Some(later) => later.as_secs_f64(),
            None => -(self.zero - t).as_secs_f64(),
        };
        samples.into_iter().map(|(t, sample)| WanSample { t_s: at(t), ..sample }).collect()
    }
}
