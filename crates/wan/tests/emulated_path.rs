//! The path as traffic meets it: real stacks in network namespaces, plain sockets, one property a test.
//!
//! Needs root; without it each test says so and passes. Bounds that the emulator must never pass hold on a busy machine
//! too, and are looked at always. What it can reach only while the scheduler lets it, a full line and a prompt answer, is
//! measured again until it was reached once, with patience. What is under way is waited for by the emulator's own counters.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers and all")]

#[allow(dead_code, reason = "shared with the example, which uses other parts of it")]
mod netns;

use godwit_units::{BitRate, Bytes};
use godwit_wan::frame::VnetHeader;
use godwit_wan::packet_socket::{Packet, PacketSocket, ReceiveBuffers};
use godwit_wan::{Class, ClassCounters, Classifier, Offload, Path, PathSpec, WanError, set_segmentation};
use netns::traffic::{Train, median, round_trips, stream, train};
use netns::{ADDRESS_A, ADDRESS_B, ENDS, PATIENCE, SITE_A, SITE_B, Sites, TCP_SHARE_OF_LINE, privileged, run};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MEMORY_PORT: u16 = 7000;
const DISK_PORT: u16 = 7001;
const ECHO_PORT: u16 = 7100;
/// One way, for what must not arrive before the test has done something.
const LONG_WAY: Duration = Duration::from_secs(10);

fn spec() -> PathSpec {
    PathSpec {
        rate: BitRate::from_mbit(100.0),
        rtt: Duration::from_millis(20),
        jitter: Duration::ZERO,
        loss: 0.0,
        queue: Duration::from_millis(50),
    }
}

fn rules() -> Classifier {
    Classifier::new([
        (MEMORY_PORT..=MEMORY_PORT, Class::Memory),
        (DISK_PORT..=DISK_PORT, Class::Disk),
        (ECHO_PORT..=ECHO_PORT, Class::Client),
    ])
}

/// Sites joined by a path. Tests take turns: each wants the machine to itself.
struct World {
    sites: Sites,
    path: Path,
    _turn: MutexGuard<'static, ()>,
}

fn world(spec: PathSpec) -> Option<World> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if !privileged(std::thread::current().name().unwrap_or("a test")) {
        return None;
    }
    let sites = Sites::new().unwrap();
    let path = sites.emulator.enter(|| Path::start("test", ENDS.0, ENDS.1, spec, rules(), 42)).unwrap();
    Some(World { sites, path, _turn: turn })
}

impl World {
    fn send_single_packets(&self) {
        self.sites.a.enter(|| set_segmentation(SITE_A, Offload::SinglePackets)).unwrap();
        self.sites.b.enter(|| set_segmentation(SITE_B, Offload::SinglePackets)).unwrap();
    }

    /// Lets ARP happen, so that it is not counted with what follows.
    fn greet(&self) {
        assert_eq!(round_trips(&self.sites, ECHO_PORT, 1, Duration::ZERO).len(), 1);
    }

    /// A train to the disk's port until each of its datagrams has met its fate, and what was counted of it.
    fn train(&self, load: (u32, usize), bursts: (u32, Duration)) -> (Train, ClassCounters) {
        let before = self.path.counters();
        let counted = || self.path.counters().since(&before).a_to_b.classes.disk;
        let train = train(&self.sites, DISK_PORT, load, bursts, |arrived| {
            let counted = counted();
            counted.delivered.packets + counted.dropped().packets == u64::from(load.0)
                && counted.delivered.packets == arrived as u64
        });
        (train, counted())
    }
}

/// Waits until `is_so`.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn tcp_fills_the_line_and_never_exceeds_it() {
    let Some(world) = world(spec()) else { return };
    let line = 100e6 / 8.0;
    let (deadline, mut bytes) = (Instant::now() + PATIENCE, 0);
    loop {
        let result = stream(&world.sites, MEMORY_PORT, Duration::from_millis(800), Duration::from_millis(2500));
        let overall = result.bytes as f64 / result.whole.as_secs_f64();
        assert!(overall <= line * TCP_SHARE_OF_LINE, "{overall} B/s is more than the line carries");
        bytes += result.bytes;
        let share = result.steady_rate / (line * TCP_SHARE_OF_LINE);
        println!("{share:.3} of the theoretical goodput");
        if share >= 0.90 {
            break;
        }
        assert!(Instant::now() < deadline, "never more than {share:.3} of the theoretical goodput");
    }

    // Whatever the application read was counted in its class, headers on top.
    let memory = || world.path.counters().a_to_b.classes.memory.delivered;
    wait_for("what was read is counted", || memory().bytes >= Bytes(bytes * 1514 / 1448));
    assert!(memory().frames < memory().packets, "this one was sent as super-frames");
}

#[test]
fn an_idle_path_takes_the_round_trip_it_was_asked_for() {
    let Some(world) = world(spec()) else { return };
    for rtt in [Duration::from_millis(5), Duration::from_millis(20)] {
        world.path.set(PathSpec { rtt, ..spec() }).unwrap();
        wait_for("a median as asked", || {
            let times = round_trips(&world.sites, ECHO_PORT, 31, Duration::ZERO);
            assert_eq!(times.len(), 31);
            assert!(times[0] >= rtt, "{:?} is less than {rtt:?}", times[0]);
            println!("{:?} for {rtt:?}", median(&times));
            median(&times) <= rtt + Duration::from_millis(1)
        });
    }
}

#[test]
fn loss_is_as_frequent_as_asked_and_every_datagram_is_accounted_for() {
    const SENT: u32 = 6_000;
    let Some(world) = world(spec()) else { return };
    world.greet();
    world.path.set(PathSpec { loss: 0.05, ..spec() }).unwrap();
    // 158 bytes of frame, 182 on the wire: 6000 of them are 87 ms of line; in bursts of 100, far from any queue.
    let (Train { arrived, .. }, counted) = world.train((SENT, 116), (100, Duration::from_millis(5)));

    let lost = f64::from(SENT) - arrived.len() as f64;
    let sigma = (f64::from(SENT) * 0.05 * 0.95).sqrt();
    assert!((lost - f64::from(SENT) * 0.05).abs() <= 5.0 * sigma, "{lost} of {SENT} lost");
    assert_eq!(counted.delivered.packets, arrived.len() as u64);
    assert_eq!(counted.delivered.bytes, Bytes(arrived.len() as u64 * 158));
    assert_eq!(counted.dropped_loss.packets, lost as u64);
    assert_eq!(counted.dropped(), counted.dropped_loss, "nothing else was dropped");
    assert!(arrived.is_sorted(), "without jitter nothing overtakes");
}

#[test]
fn jitter_reorders_and_loses_nothing() {
    let Some(world) = world(PathSpec { jitter: Duration::from_millis(10), ..spec() }) else {
        return;
    };
    let (Train { mut arrived, .. }, _) = world.train((300, 100), (10, Duration::from_millis(1)));
    assert!(!arrived.is_sorted());
    arrived.sort_unstable();
    assert!(arrived.iter().copied().eq(0..300));
}

#[test]
fn a_full_queue_drops_what_the_line_cannot_take() {
    let slow = PathSpec { rate: BitRate::from_mbit(10.0), queue: Duration::from_millis(20), ..spec() };
    let Some(world) = world(slow) else { return };
    world.greet();
    // At once: 200 frames of 1538 wire bytes, 1.23 ms each. The queue takes 20 ms, and one.
    let (Train { arrived, sending, .. }, disk) = world.train((200, 1472), (200, Duration::ZERO));
    assert_eq!(disk.delivered.packets + disk.dropped_queue.packets, 200);
    assert_eq!(disk.delivered.packets, arrived.len() as u64);
    // More than 17 and a few only by what the line took while the sender sent its burst.
    let meanwhile = (sending.as_secs_f64() / 1.23e-3) as usize;
    assert!((17..25 + meanwhile).contains(&arrived.len()), "{} arrived, sent within {sending:?}", arrived.len());
}

#[test]
fn senders_of_single_packets_send_no_super_frame_even_in_tunnels_and_by_udp_segment() {
    let Some(world) = world(PathSpec { loss: 0.001, ..spec() }) else {
        return;
    };
    world.send_single_packets();
    let tcp = stream(&world.sites, MEMORY_PORT, Duration::from_millis(200), Duration::from_millis(400));
    assert!(tcp.bytes > 0);

    for (site, interface, local, remote, inner) in [
        (&world.sites.a, SITE_A, ADDRESS_A, ADDRESS_B, "10.78.0.1/24"),
        (&world.sites.b, SITE_B, ADDRESS_B, ADDRESS_A, "10.78.0.2/24"),
    ] {
        site.enter(|| {
            let vxlan = ["type", "vxlan", "id", "7", "dstport", "4789", "dev", interface];
            let ends = ["local", local, "remote", remote];
            run(&[&["ip", "link", "add", "vx0"][..], &vxlan, &ends].concat()).unwrap();
            run(&["ip", "address", "add", inner, "dev", "vx0"]).unwrap();
            run(&["ip", "link", "set", "vx0", "up"]).unwrap();
        });
    }
    let listener = world.sites.b.enter(|| TcpListener::bind("10.78.0.2:7777").unwrap());
    let mut sender = world.sites.a.enter(|| TcpStream::connect("10.78.0.2:7777").unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    let tunnelled = std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut sender, &vec![1; 1 << 20]).unwrap());
        std::io::copy(&mut receiver, &mut std::io::sink()).unwrap()
    });
    assert_eq!(tunnelled, 1 << 20);

    let before = world.path.counters();
    let segmenting = world.sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    segment_at(&segmenting, 1000);
    segmenting.send_to(&[9; 10_000], (ADDRESS_B, DISK_PORT)).unwrap();
    let disk = || world.path.counters().since(&before).a_to_b.classes.disk;
    let frames = || disk().delivered.frames + disk().dropped_loss.frames;
    wait_for("ten datagrams, each a frame", || frames() >= 10);
    assert_eq!(frames(), 10);

    let counters = world.path.counters();
    assert_eq!(counters.superframes_under_loss(), 0);
    assert_eq!(counters.total().delivered.frames, counters.total().delivered.packets);
}

/// Has the kernel cut what is sent on `socket` into datagrams of `size` bytes, as QUIC implementations do.
fn segment_at(socket: &UdpSocket, size: libc::c_int) {
    use std::os::fd::AsRawFd;
    // SAFETY: the pointer and the length are those of `size`, which lives through the call.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const size).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn super_frames_under_loss_are_noticed() {
    let Some(world) = world(PathSpec { loss: 0.001, ..spec() }) else {
        return;
    };
    let tcp = stream(&world.sites, MEMORY_PORT, Duration::from_millis(100), Duration::from_millis(200));
    assert!(tcp.bytes > 0);
    assert!(world.path.counters().superframes_under_loss() > 0);
}

#[test]
fn a_super_datagram_crosses_whole_and_is_counted_as_its_segments() {
    let Some(world) = world(spec()) else { return };
    world.greet();
    let before = world.path.counters();
    let receiver = world.sites.b.enter(|| UdpSocket::bind((ADDRESS_B, DISK_PORT)).unwrap());
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let sender = world.sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    segment_at(&sender, 1000);
    sender.send_to(&[9; 4_500], (ADDRESS_B, DISK_PORT)).unwrap();
    let sizes: Vec<usize> = (0..5).map(|_| receiver.recv(&mut [0; 2000]).unwrap()).collect();
    assert_eq!(sizes, [1000, 1000, 1000, 1000, 500]);
    let delivered = || world.path.counters().since(&before).a_to_b.classes.disk.delivered;
    wait_for("what arrived is counted", || delivered().bytes.0 > 0);
    let disk = delivered();
    assert_eq!((disk.frames, disk.packets, disk.bytes), (1, 5, Bytes(4 * 1042 + 542)));
}

#[test]
fn a_vlan_tag_survives_the_crossing_with_the_checksum_behind_it_still_to_be_filled_in() {
    let Some(world) = world(spec()) else { return };
    // By raw sockets at the sites, since not every kernel has VLAN devices.
    let sender = world.sites.a.enter(|| PacketSocket::open(SITE_A)).unwrap();
    let receiver = world.sites.b.enter(|| PacketSocket::open(SITE_B)).unwrap();
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 1, 0x81, 0x00, 0x00, 0x05, 0x08, 0x00]); // from, 802.1Q, VLAN 5, IPv4
    frame.extend([0x45, 0, 0, 128, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0x9c, 0x40]);
    frame.extend(DISK_PORT.to_be_bytes());
    frame.extend([0, 108, 0, 0]);
    frame.extend([7; 100]);
    let note = VnetHeader { flags: 1, csum_start: 38, csum_offset: 6, ..VnetHeader::default() };
    let sent = Packet { note, frame: frame.into() };
    sender.send(std::slice::from_ref(&sent), |_, outcome| outcome.unwrap());

    let (mut buffers, mut arrivals) = (ReceiveBuffers::new(), Vec::new());
    wait_for("the frame, tag and all", || {
        // What is not there yet is an error of its own.
        let _ = receiver.receive(&mut buffers, &mut arrivals);
        arrivals.iter().any(|arrival| arrival.packet.frame == sent.frame)
    });
    let arrived = arrivals.iter().find(|arrival| arrival.packet.frame == sent.frame).expect("tag and all");
    assert_eq!((arrived.packet.note.flags & 1, arrived.packet.note.csum_start), (1, 38));
    wait_for("it is counted", || world.path.counters().a_to_b.classes.disk.delivered.bytes.0 > 0);
    let disk = world.path.counters().a_to_b.classes.disk.delivered;
    assert_eq!((disk.packets, disk.bytes), (1, Bytes(146)), "classified behind its tag, which is part of the frame");
}

#[test]
fn a_cut_stops_everything_and_restoring_resumes() {
    let Some(world) = world(spec()) else { return };
    world.greet();
    let sender = world.sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    let receiver = world.sites.b.enter(|| UdpSocket::bind((ADDRESS_B, DISK_PORT)).unwrap());
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let before = world.path.counters();
    let disk = || world.path.counters().since(&before).a_to_b.classes.disk;
    let send = || sender.send_to(b"x", (ADDRESS_B, DISK_PORT)).unwrap();
    let arrives = || receiver.recv(&mut [0; 8]).is_ok();

    send();
    assert!(arrives());
    // Under way for so long that the cut meets it.
    world.path.set(PathSpec { rtt: LONG_WAY * 2, ..spec() }).unwrap();
    send();
    world.path.cut().unwrap();
    assert!(world.path.is_cut());
    world.path.set(spec()).unwrap();
    send();
    wait_for("neither what was under way nor what came later", || disk().dropped_cut.packets == 2);
    assert_eq!(disk().delivered.packets, 1);

    world.path.restore().unwrap();
    assert!(!world.path.is_cut());
    send();
    assert!(arrives());
    receiver.set_read_timeout(Some(Duration::from_millis(60))).unwrap();
    assert!(!arrives(), "what was lost stays lost");
    wait_for("what arrived is counted", || disk().delivered.packets == 2);
    assert_eq!(disk().dropped_cut.packets, 2);
}

#[test]
fn an_interface_that_is_down_is_counted_and_survived() {
    let Some(world) = world(PathSpec { rtt: Duration::from_millis(2), ..spec() }) else {
        return;
    };
    world.greet();
    world.sites.emulator.enter(|| run(&["ip", "link", "set", ENDS.1, "down"])).unwrap();
    let (Train { arrived, .. }, disk) = world.train((5, 100), (5, Duration::ZERO));
    assert_eq!((arrived.len(), disk.dropped_unsent.packets), (0, 5));
    world.sites.emulator.enter(|| run(&["ip", "link", "set", ENDS.1, "up"])).unwrap();
    let (Train { arrived, .. }, _) = world.train((5, 100), (5, Duration::ZERO));
    assert_eq!(arrived.len(), 5);
}

#[test]
fn changing_the_rate_takes_effect_at_once_and_a_bad_spec_changes_nothing() {
    let Some(world) = world(PathSpec { queue: Duration::from_secs(1), ..spec() }) else {
        return;
    };
    world.greet();
    let slow = PathSpec { rate: BitRate::from_mbit(10.0), queue: Duration::from_secs(1), ..spec() };
    world.path.set(slow).unwrap();
    let refused = world.path.set(PathSpec { loss: 2.0, ..spec() });
    assert!(matches!(refused, Err(WanError::InvalidSpec { field: "loss", .. })));
    assert_eq!(world.path.spec(), slow);
    // 200 x 1538 bytes at 10 Mbit/s are 246 ms.
    let (Train { arrived, whole, .. }, _) = world.train((200, 1472), (200, Duration::ZERO));
    assert_eq!(arrived.len(), 200);
    assert!(whole >= Duration::from_millis(246), "{whole:?}");
}

#[test]
fn an_interface_that_is_not_there_is_named() {
    if !privileged("an_interface_that_is_not_there_is_named") {
        return;
    }
    let error = Path::start("test", "no-such-0", "no-such-1", spec(), rules(), 1).unwrap_err();
    assert!(error.to_string().contains("no-such-0"), "{error}");
}

#[test]
fn a_path_that_is_dropped_leaves_no_thread_behind() {
    let Some(world) = world(spec()) else { return };
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.starts_with("wan:"))
            .count()
    };
    // A thread gives itself its name, and is listed for a moment after it was joined.
    wait_for("a thread for each direction", || threads() == 2);
    drop(world.path);
    wait_for("no thread", || threads() == 0);
}
