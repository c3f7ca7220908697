//! How well the emulator does on this machine: TCP goodput against what the line can carry, idle round trips against what
//! was asked, and what it costs.
//!
//! ```text
//! cargo run --release -p godwit-wan --example goodput              # senders hand over super-frames
//! cargo run --release -p godwit-wan --example goodput -- single    # every packet by itself
//! ```
//!
//! Root; everything happens in network namespaces that end with the process. About a minute. The
//! receiver's window is kept below what the queue takes, so that no packet is dropped: this measures the emulator, not congestion control.

#[allow(dead_code, clippy::unwrap_used, reason = "shared with the integration tests")]
#[path = "../tests/netns/mod.rs"]
mod netns;

use godwit_units::BitRate;
use godwit_wan::{Class, Classifier, Offload, Path, PathSpec, set_segmentation};
use netns::traffic::{median, round_trips, stream};
use netns::{ENDS, SITE_A, SITE_B, Sites, TCP_SHARE_OF_LINE, privileged};
use std::error::Error;
use std::time::{Duration, Instant};

const STREAM_PORT: u16 = 7000;
const ECHO_PORT: u16 = 7100;
const MEASURED: Duration = Duration::from_secs(4);
const ROUND_TRIPS: u32 = 200;

fn main() -> Result<(), Box<dyn Error>> {
    if !privileged("goodput") {
        return Ok(());
    }
    let offload = match std::env::args().nth(1).as_deref() {
        None => Offload::SuperFrames,
        Some("single") => Offload::SinglePackets,
        Some(other) => return Err(format!("unknown argument `{other}`: give `single` or nothing").into()),
    };
    println!("{offload:?}; the most that TCP can carry is {:.2} % of the line", 100.0 * TCP_SHARE_OF_LINE);
    println!("      line     rtt | goodput: of line  of theory   core | rtt error: median     p99 | late  dropped");
    for mbit in [100.0, 1000.0] {
        for rtt in [1, 20, 100] {
            measure(BitRate::from_mbit(mbit), Duration::from_millis(rtt), offload)?;
        }
    }
    Ok(())
}

fn measure(rate: BitRate, rtt: Duration, offload: Offload) -> Result<(), Box<dyn Error>> {
    let spec = PathSpec { rate, rtt, jitter: Duration::ZERO, loss: 0.0, queue: Duration::from_secs(1) };
    let rules = Classifier::new([(STREAM_PORT..=STREAM_PORT, Class::Memory), (ECHO_PORT..=ECHO_PORT, Class::Client)]);
    let sites = Sites::new()?;
    sites.a.enter(|| set_segmentation(SITE_A, offload))?;
    sites.b.enter(|| set_segmentation(SITE_B, offload))?;
    let path = sites.emulator.enter(|| Path::start("goodput", ENDS.0, ENDS.1, spec, rules, 1))?;

    // What the receiver offers at most: enough to fill the path and 100 ms of queue, twice, since the kernel reserves
    // memory for its own bookkeeping out of it.
    let window = 2 * rate.bytes_in(rtt + Duration::from_millis(100)).0;
    sites.b.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_rmem", format!("4096 131072 {window}")))?;

    let errors: Vec<Duration> = round_trips(&sites, ECHO_PORT, ROUND_TRIPS, Duration::from_millis(1))
        .into_iter()
        .map(|time| time.saturating_sub(rtt))
        .collect();

    // Twenty round trips of slow start and settling.
    let warm_up = Duration::from_millis(500) + rtt * 20;
    let (cpu_before, began) = (path.cpu_time(), Instant::now());
    let result = stream(&sites, STREAM_PORT, warm_up, MEASURED);
    let core = (path.cpu_time() - cpu_before).as_secs_f64() / began.elapsed().as_secs_f64();

    let share = result.steady_rate * 8.0 / rate.0 as f64;
    let counters = path.counters();
    println!(
        "{:>10} {:>4} ms |         {:>6.2} %   {:>6.2} %  {:>4.0} % |      {:>7.3} ms {:>5.3} ms | {:>4} {:>8}",
        rate.to_string(),
        rtt.as_millis(),
        100.0 * share,
        100.0 * share / TCP_SHARE_OF_LINE,
        100.0 * core,
        median(&errors).as_secs_f64() * 1e3,
        errors[errors.len() * 99 / 100].as_secs_f64() * 1e3,
        counters.a_to_b.late + counters.b_to_a.late,
        counters.total().dropped().packets + counters.a_to_b.missed + counters.b_to_a.missed,
    );
    Ok(())
}
