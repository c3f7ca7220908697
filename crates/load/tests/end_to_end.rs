//! The real binary on loopback, driven as a host drives it.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use godwit_load::{
    control::{Control, ControlError},
    echo::{EchoClient, EchoLog, EchoReport},
    protocol::{
        Activity, CorruptTarget, Listening, LoadSpec, LoadStatus, MAX_LINE_BYTES, PagePlace, Pattern, Problem, Reply,
    },
};

const TIMEOUT: Duration = Duration::from_secs(120);

struct Guest {
    child: Child,
    listening: Listening,
    _dir: tempfile::TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn guest() -> Guest {
    let dir = tempfile::tempdir().unwrap();
    let (disk, content) = (dir.path().join("disk"), dir.path().join("content"));
    File::create(&disk).unwrap().set_len((2 << 20) + 4096).unwrap();
    std::fs::create_dir(&content).unwrap();
    std::fs::write(content.join("file"), "content").unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_godwit-load"))
        .args(["serve", "--listen", "127.0.0.1:0", "--echo", "127.0.0.1:0", "--disk-offset", "4096", "--disk"])
        .arg(&disk)
        .arg("--content")
        .arg(&content)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    Guest { child, listening: serde_json::from_str(&line).unwrap(), _dir: dir }
}

/// Waits until `is_so`.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Pages that a load of memory has dirtied.
fn dirtied(load: &LoadStatus) -> u64 {
    match load {
        LoadStatus::Memory(status) => status.pages_dirtied,
        _ => unreachable!("the load is one of memory"),
    }
}

impl Guest {
    fn control(&self) -> Control {
        Control::connect(self.listening.control, TIMEOUT).unwrap()
    }
}

fn memory(pattern: Pattern) -> LoadSpec {
    LoadSpec::Memory { pages_per_s: 5000, pattern, working_set_mib: 4, bytes_per_page: 64, busy_s: 0, rest_s: 0 }
}

fn loads() -> Vec<LoadSpec> {
    vec![
        memory(Pattern::Zipf),
        LoadSpec::Disk { kib_per_s: 2048, working_set_mib: 2, disk: 0, read_kib_per_s: 512, total_mib: 0 },
        LoadSpec::Echo { from: "here".into(), per_s: 100 },
        memory(Pattern::Sequential),
    ]
}

#[test]
fn a_datagram_comes_back_as_it_was() {
    let guest = guest();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    for said in [&b"1"[..], &[0x5a; 1400]] {
        socket.send_to(said, guest.listening.echo).unwrap();
        let mut heard = [0; 2048];
        let (length, from) = socket.recv_from(&mut heard).unwrap();
        assert_eq!((&heard[..length], from), (said, guest.listening.echo));
    }
}

#[test]
fn a_guest_under_load_is_clean_until_it_is_corrupted() {
    let guest = guest();
    let mut control = guest.control();
    assert_eq!(control.hello().unwrap().boot_id, guest.listening.boot_id);
    assert_eq!(control.status().unwrap().activity, Activity::Idle);
    assert!(matches!(control.check(), Err(ControlError::Refused { .. })));

    control.start(&loads(), 1).unwrap();
    wait_for("some work", || {
        let status = control.status().unwrap();
        let LoadStatus::Disk(disk) = &status.loads[1] else { panic!("{status:?}") };
        dirtied(&status.loads[0]) > 500 && disk.acknowledged_sequence > 0
    });
    let status = control.status().unwrap();
    assert_eq!(status.activity, Activity::Running);
    let [LoadStatus::Memory(zipf), LoadStatus::Disk(disk), LoadStatus::Echo, LoadStatus::Memory(_)] = &status.loads[..]
    else {
        panic!("{status:?}");
    };
    assert_eq!((zipf.pages, zipf.errors, disk.errors), (1024, 0, 0), "{status:?}");
    assert!(zipf.pages_dirtied > 500 && disk.acknowledged_sequence > 0, "{status:?}");
    assert!(disk.acknowledged_sequence <= disk.issued_sequence, "{status:?}");

    let report = control.check().unwrap();
    assert!(report.is_clean() && report.disk.records_checked > 0, "{report:?}");
    assert_eq!(report.memory.pages_checked, 2 * (1024 + 3));

    // The loads go on after a check, and a second connection sees the same.
    let before = control.status().unwrap();
    let mut second = guest.control();
    wait_for("more work", || dirtied(&second.status().unwrap().loads[0]) > dirtied(&before.loads[0]));

    let page = control.corrupt(CorruptTarget::MemoryPage).unwrap();
    assert_eq!(control.corrupt(CorruptTarget::MemoryPage).unwrap(), page);
    let record = control.corrupt(CorruptTarget::DiskRecord).unwrap();
    // The loads go on around them.
    let before = control.status().unwrap();
    wait_for("more work", || dirtied(&control.status().unwrap().loads[0]) > dirtied(&before.loads[0]) + 1000);
    let report = control.check().unwrap();
    assert!(!report.is_clean());
    assert_eq!((report.memory.bad_count, report.disk.bad_count), (1, 1), "{report:?}");
    let bad = &report.memory.bad[0];
    assert_eq!((bad.kind, bad.place, bad.page), (Problem::Torn, PagePlace::Arena { load: 0 }, page.index));
    assert_eq!((report.disk.bad[0].kind, report.disk.bad[0].slot), (Problem::Torn, record.index));

    // Stopped loads rest but can be checked; a new start begins clean on the same disk.
    control.stop().unwrap();
    let stopped = control.status().unwrap();
    assert_eq!(stopped.activity, Activity::Stopped);
    assert_eq!(control.check().unwrap().memory.bad_count, 1);
    assert_eq!(control.status().unwrap().loads[0..1], stopped.loads[0..1]);
    control.start(&loads()[..2], 2).unwrap();
    wait_for("some work", || dirtied(&control.status().unwrap().loads[0]) > 1000);
    let report = control.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn refusals_say_what_to_do_and_leave_the_connection_usable() {
    let guest = guest();
    let mut control = guest.control();
    let mut refused = |loads: &[LoadSpec]| match control.start(loads, 1) {
        Err(ControlError::Refused { refusal, .. }) => refusal.message,
        other => panic!("{other:?}"),
    };
    let disk =
        |disk, working_set_mib| LoadSpec::Disk { kib_per_s: 1, working_set_mib, disk, read_kib_per_s: 0, total_mib: 0 };
    assert!(refused(&[disk(1, 1)]).contains("started with 1 --disk"));
    assert!(refused(&[disk(0, 3)]).contains("truncate -s"));
    assert!(refused(&[disk(0, 1), disk(0, 1)]).contains("two loads write to disk 0"));
    let huge = LoadSpec::Memory {
        pages_per_s: 1,
        pattern: Pattern::Uniform,
        working_set_mib: 1 << 20,
        bytes_per_page: 64,
        busy_s: 0,
        rest_s: 0,
    };
    assert!(refused(&[huge]).contains("working sets smaller"));
    assert!(matches!(control.corrupt(CorruptTarget::DiskRecord), Err(ControlError::Refused { .. })));
    assert!(matches!(control.warm(101), Err(ControlError::Refused { .. })));
    let warm = control.warm(100).unwrap();
    assert!(warm.mem_total_kib > 0 && warm.heap_mib == 0, "{warm:?}");
}

#[test]
fn lines_that_are_no_requests_are_refused_and_oversize_ones_end_the_connection() {
    let guest = guest();
    let mut stream = TcpStream::connect(guest.listening.control).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut replies = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut reply = || serde_json::from_str::<Reply>(&replies.next().unwrap().unwrap()).unwrap();
    stream.write_all(b"{\"request\":\"hello\",\"x\":1}\n\xff\xfe\n{\"request\":\"hello\"}\n").unwrap();
    assert!(matches!(reply(), Reply::Error(_)));
    assert!(matches!(reply(), Reply::Error(_)));
    assert!(matches!(reply(), Reply::Ok(_)));
    stream.write_all(&vec![b'x'; MAX_LINE_BYTES]).unwrap();
    let Reply::Error(refusal) = reply() else { panic!("an oversize line was accepted") };
    assert!(refusal.message.contains("longer than"), "{refusal}");
    assert!(replies.next().is_none());
}

#[test]
fn a_reply_that_is_late_is_never_taken_for_the_next_one() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(silent.local_addr().unwrap()).unwrap();
    let mut control = Control::new(stream, Duration::from_millis(50));
    assert!(matches!(control.hello(), Err(ControlError::TimedOut { .. })));
    assert!(matches!(control.hello(), Err(ControlError::OutOfStep { .. })));
}

/// Runs the echo client against `address` until it ends by itself or has done `enough`, and then waits for what is
/// outstanding, but no longer than `drain_limit`.
fn echo(address: SocketAddr, per_s: u32, drain_limit: Duration, enough: impl Fn(&EchoReport) -> bool) -> EchoReport {
    let stream = TcpStream::connect(address).unwrap();
    let (stop, log) = (Arc::new(AtomicBool::new(false)), EchoLog::new());
    let client = EchoClient { per_s, drain_limit };
    let running = {
        let (stop, log) = (stop.clone(), log.clone());
        thread::spawn(move || client.run(stream, Instant::now(), &stop, &log))
    };
    wait_for("enough echoes", || running.is_finished() || enough(&log.snapshot()));
    stop.store(true, Relaxed);
    let report = running.join().unwrap();
    assert_eq!(report, log.snapshot());
    report
}

/// A proxy before the guest's echo port that does `mangle` to the bytes that come back.
fn proxy(guest: &Guest, mut mangle: impl FnMut(&mut Vec<u8>) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, upstream) = (listener.local_addr().unwrap(), guest.listening.echo);
    thread::spawn(move || {
        let mut client = listener.accept().unwrap().0;
        let mut server = TcpStream::connect(upstream).unwrap();
        let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || {
            let _ = std::io::copy(&mut from_client, &mut to_server);
            let _ = to_server.shutdown(Shutdown::Both);
        });
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = server.read(&mut buffer) {
            let mut bytes = buffer[..read].to_vec();
            mangle(&mut bytes);
            if client.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = client.shutdown(Shutdown::Both);
    });
    address
}

/// Does `mangle` to the bytes once `after` bytes have gone by.
fn once(after: usize, mangle: impl Fn(&mut Vec<u8>) + Send + 'static) -> impl FnMut(&mut Vec<u8>) + Send + 'static {
    let (mut passed, mut done) = (0, false);
    move |bytes| {
        passed += bytes.len();
        if passed > after && !done {
            done = true;
            mangle(bytes);
        }
    }
}

#[test]
fn a_clean_echo_session_is_ok_and_has_no_gap_to_speak_of() {
    let guest = guest();
    // Every session is clean. That nothing is late can be seen only while the machine is not busy with something else.
    wait_for("a session without a gap", || {
        let report = echo(guest.listening.echo, 500, TIMEOUT, |so_far| so_far.received >= 250);
        assert!(report.session_ok && report.error.is_none(), "{:?}", report.error);
        assert_eq!((report.sent, report.skipped), (report.received, 0));
        assert_eq!(report.samples.len() as u64, report.received);
        assert!(report.sent >= 250, "{} sent", report.sent);
        assert!(report.samples.iter().all(|sample| sample.sent_at_s <= sample.received_at_s));
        report.longest_gap(0.0, report.samples.last().unwrap().received_at_s).gap_ms < 400.0
    });
}

type Mangle = Box<dyn Fn(&mut Vec<u8>) + Send>;

#[test]
fn a_damaged_echo_session_is_not_ok_and_says_why() {
    let guest = guest();
    let broken = |mangle: Mangle, why: &str| {
        let report = echo(proxy(&guest, once(640, mangle)), 500, TIMEOUT, |_| false);
        let error = report.error.expect("the session was damaged");
        assert!(!report.session_ok && error.contains(why), "{error}");
    };
    broken(Box::new(|bytes| bytes[0] ^= 1), "altered");
    broken(Box::new(|bytes| drop(bytes.drain(..32))), "messages are missing");
    broken(Box::new(|bytes| drop(bytes.drain(..7))), "bytes of it are missing");
    broken(Box::new(|bytes| bytes.extend_from_within(..32)), "repeated");
}

#[test]
fn a_reset_closed_or_silent_echo_session_is_not_ok() {
    let guest = guest();
    enum Ending {
        Close,
        Reset,
    }
    let ended = |ending: Ending| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut messages = [0; 320];
            stream.read_exact(&mut messages).unwrap();
            stream.write_all(&messages).unwrap();
            match ending {
                Ending::Close => stream.shutdown(Shutdown::Write).unwrap(),
                // A close that does not linger is a reset.
                Ending::Reset => rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap(),
            }
        });
        let report = echo(address, 500, TIMEOUT, |_| false);
        assert!(!report.session_ok);
        report.error.unwrap()
    };
    let closed = ended(Ending::Close);
    assert!(closed.contains("closed the session"), "{closed}");
    let reset = ended(Ending::Reset);
    assert!(reset.contains("reset"), "{reset}");

    let silent = proxy(&guest, {
        let mut seen = 0;
        move |bytes: &mut Vec<u8>| {
            seen += bytes.len();
            if seen > 640 {
                bytes.clear();
            }
        }
    });
    let answered_no_more = |so_far: &EchoReport| so_far.received > 0 && so_far.sent > so_far.received + 40;
    let report = echo(silent, 500, Duration::from_millis(300), answered_no_more);
    assert!(report.error.unwrap().contains("unanswered"));
}

#[test]
fn a_peer_that_does_not_read_makes_the_client_skip_and_never_block() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let peer = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        held.recv().unwrap();
        let mut buffer = [0; 65536];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
    });
    let stream = TcpStream::connect(address).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&stream, 4096).unwrap();
    let (stop, log) = (Arc::new(AtomicBool::new(false)), EchoLog::new());
    let running = {
        let (stop, log) = (stop.clone(), log.clone());
        thread::spawn(move || EchoClient::new(1_000_000).run(stream, Instant::now(), &stop, &log))
    };
    let deadline = Instant::now() + TIMEOUT;
    while log.snapshot().skipped < 1000 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    stop.store(true, Relaxed);
    release.send(()).unwrap();
    let report = running.join().unwrap();
    peer.join().unwrap();
    assert!(report.skipped >= 1000, "{} skipped", report.skipped);
    assert!(report.session_ok, "no message was cut in the middle: {:?}", report.error);
    assert_eq!(report.sent, report.received);
}
