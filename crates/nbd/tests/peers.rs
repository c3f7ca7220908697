//! The clients that matter, against a disk in memory: libnbd's tools and QEMU's own client code.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use godwit_nbd::{Client, Command, Errno, Event, Export, Extent, Piece, Reply, Server};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::{Arc, Mutex};

const BLOCK: usize = 4096;

/// A disk: blocks that were never written, or were zeroed, are holes.
struct Disk {
    blocks: Vec<Option<Box<[u8; BLOCK]>>>,
    flushes: usize,
}

impl Disk {
    fn read(&self, offset: u64, length: u32) -> Vec<Piece> {
        let mut pieces = vec![];
        let (mut at, end) = (offset as usize, offset as usize + length as usize);
        while at < end {
            let next = ((at / BLOCK + 1) * BLOCK).min(end);
            pieces.push(match &self.blocks[at / BLOCK] {
                Some(block) => Piece::Data(Bytes::copy_from_slice(&block[at % BLOCK..at % BLOCK + next - at])),
                None => Piece::Hole((next - at) as u32),
            });
            at = next;
        }
        pieces
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let at = offset as usize + i;
            self.blocks[at / BLOCK].get_or_insert_with(|| Box::new([0; BLOCK]))[at % BLOCK] = *byte;
        }
    }

    fn zero(&mut self, offset: u64, length: u32) {
        for at in offset as usize..offset as usize + length as usize {
            if let Some(block) = &mut self.blocks[at / BLOCK] {
                block[at % BLOCK] = 0;
                if block.iter().all(|b| *b == 0) {
                    self.blocks[at / BLOCK] = None;
                }
            }
        }
    }

    fn perform(&mut self, command: Command) -> Reply {
        match command {
            Command::Read { offset, length } => return Reply::Data(self.read(offset, length)),
            Command::Write { offset, data, .. } => self.write(offset, &data),
            Command::Trim { offset, length, .. } | Command::WriteZeroes { offset, length, .. } => {
                self.zero(offset, length)
            }
            Command::Flush => self.flushes += 1,
            Command::Cache { .. } => {}
            Command::BlockStatus { offset, length, .. } => {
                let extents = self.read(offset, length).into_iter().map(|p| match p {
                    Piece::Data(data) => Extent { length: data.len() as u32, hole: false },
                    Piece::Hole(length) => Extent { length, hole: true },
                });
                return Reply::Status(extents.collect());
            }
        }
        Reply::Done
    }
}

/// A server that ends with the test.
struct Served {
    disk: Arc<Mutex<Disk>>,
    socket: PathBuf,
    folder: tempfile::TempDir,
}

impl Served {
    fn new(size: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let disk = Arc::new(Mutex::new(Disk { blocks: (0..size / BLOCK).map(|_| None).collect(), flushes: 0 }));
        let exports = vec![Export { name: "disk".into(), size: size as u64, preferred_block: 4096, read_only: false }];
        let shared = disk.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (disk, exports) = (shared.clone(), exports.clone());
                std::thread::spawn(move || serve(client.unwrap(), &disk, exports));
            }
        });
        Self { disk, socket, folder }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn serve(mut client: UnixStream, disk: &Mutex<Disk>, exports: Vec<Export>) {
    let mut server = Server::new(exports);
    let mut buffer = vec![0; 256 << 10];
    loop {
        while let Some(request) = server.poll_request().unwrap() {
            let reply = disk.lock().unwrap().perform(request.command);
            server.reply(request.cookie, reply);
        }
        let out = server.transmit().split();
        if client.write_all(&out).is_err() || server.is_closed() {
            return;
        }
        if !out.is_empty() {
            // There is room again for requests that have come already.
            continue;
        }
        match client.read(&mut buffer) {
            Ok(n) if n > 0 => server.receive(&buffer[..n]),
            _ => return,
        }
    }
}

fn run(program: &str, package: &str, arguments: &[&str]) -> String {
    let output = Process::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|e| panic!("cannot run {program} ({e}); it comes with the Debian package {package}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn random_image(path: &Path, size: usize) -> Vec<u8> {
    // Not random, but different everywhere, with holes.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut image = vec![0; size];
    for (i, chunk) in image.chunks_mut(8).enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if !(i * 8 / 65536).is_multiple_of(3) {
            chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
        }
    }
    std::fs::write(path, &image).unwrap();
    image
}

#[test]
fn nbdinfo_sees_what_the_server_offers() {
    let served = Served::new(8 << 20);
    let json = run("nbdinfo", "libnbd-bin", &["--json", &served.uri()]);
    for fact in [
        r#""export-size": 8388608"#,
        r#""can_multi_conn": true"#,
        r#""can_flush": true"#,
        r#""can_fua": true"#,
        r#""can_trim": true"#,
        r#""can_zero": true"#,
        r#""can_fast_zero": true"#,
        r#""can_cache": true"#,
        r#""can_df": true"#,
        r#""is_read_only": false"#,
        r#""structured": true"#,
        "base:allocation",
    ] {
        assert!(json.contains(fact), "{fact} is missing in {json}");
    }
    assert!(run("nbdinfo", "libnbd-bin", &["--list", &served.uri()]).contains("disk"));
}

#[test]
fn nbdinfo_finds_each_capability_by_its_name() {
    let served = Served::new(1 << 20);
    for can in ["cache", "df", "fast-zero", "flush", "fua", "multi-conn", "read", "trim", "write", "zero"] {
        run("nbdinfo", "libnbd-bin", &["--can", can, &served.uri()]);
    }
    run("nbdinfo", "libnbd-bin", &["--can", "connect", &served.uri()]);
    for is_not in ["read-only", "rotational", "tls"] {
        let mut process = Process::new("nbdinfo");
        let no = process.args(["--is", is_not, &served.uri()]).output();
        assert_eq!(no.expect("nbdinfo comes with the Debian package libnbd-bin").status.code(), Some(2), "{is_not}");
    }
}

#[test]
fn nbdcopy_over_four_connections_brings_everything_in_and_out() {
    let served = Served::new(64 << 20);
    let (image, back) = (served.file("image"), served.file("back"));
    let contents = random_image(&image, 64 << 20);
    let many = ["--connections=4", "--requests=64", "--request-size=1048576"];
    let (uri, image, to) = (served.uri(), image.to_str().unwrap(), back.to_str().unwrap());
    run("nbdcopy", "libnbd-bin", &[&many[..], &[image, &uri]].concat());
    run("nbdcopy", "libnbd-bin", &[&many[..], &["--allocated", &uri, to]].concat());
    assert!(std::fs::read(&back).unwrap() == contents, "the copy differs");
}

#[test]
fn requests_for_more_than_may_be_held_are_all_answered() {
    let served = Served::new(64 << 20);
    // 16 reads of 16 MiB at once, four times what one connection may hold.
    let mut arguments = vec!["-f", "raw", "-c", "write -P 0x11 0 32M", "-c", "write -P 0x11 32M 32M"];
    (0..16).for_each(|_| arguments.extend(["-c", "aio_read -P 0x11 8M 16M"]));
    let uri = served.uri();
    arguments.extend(["-c", "aio_flush", &uri]);
    let said = run("qemu-io", "qemu-utils", &arguments);
    assert_eq!(said.matches("read 16777216/16777216").count(), 16, "{said}");
    assert!(!said.contains("verification failed"), "{said}");
}

/// A `qemu-nbd` that ends with the test.
struct QemuNbd(std::process::Child);

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn our_client_writes_reads_and_maps_a_disk_of_qemus_server() {
    let folder = tempfile::tempdir().unwrap();
    let (image, socket) = (folder.path().join("image"), folder.path().join("socket"));
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let _server = QemuNbd(
        Process::new("qemu-nbd")
            .args(["-f", "raw", "-x", "disk", "--discard=unmap", "-k"])
            .args([&socket, &image])
            .spawn()
            .expect("qemu-nbd comes with the Debian package qemu-utils"),
    );
    let mut stream = (0..6000)
        .find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            UnixStream::connect(&socket).ok()
        })
        .expect("qemu-nbd listens");
    let mut client = Client::new("disk");
    let mut next = |client: &mut Client| {
        let mut buffer = vec![0; 1 << 20];
        loop {
            if let Some(event) = client.poll_event().unwrap() {
                return event;
            }
            // After the poll: in the handshake it is what gives something to send.
            let out = client.transmit().split();
            stream.write_all(&out).unwrap();
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "qemu-nbd hung up");
            client.receive(&buffer[..n]);
        }
    };
    let Event::Ready(remote) = next(&mut client) else { panic!("answered before it was asked") };
    assert_eq!(remote.size, 64 << 20);
    assert!(remote.has_block_status() && remote.is_structured() && !remote.is_read_only());
    let mut ask = |command| {
        let cookie = client.request(command).unwrap();
        let Event::Answered(answered, reply) = next(&mut client) else { panic!("ready twice") };
        assert_eq!(answered, cookie);
        reply
    };
    let data = Bytes::from(vec![0x5a; 32 << 20]);
    let (offset, length) = (1 << 20, 1 << 20);
    assert_eq!(ask(Command::Write { offset: 0, data, fua: true }), Reply::Done);
    let zeroes = Command::WriteZeroes { offset, length, fua: false, no_hole: false, fast: false };
    assert_eq!(ask(zeroes), Reply::Done);
    assert_eq!(ask(Command::Trim { offset: 48 << 20, length, fua: false }), Reply::Done);
    assert_eq!(ask(Command::Flush), Reply::Done);
    let Reply::Data(pieces) = ask(Command::Read { offset: 0, length: 32 << 20 }) else { panic!("no data") };
    let mut read = vec![];
    for piece in pieces {
        match piece {
            Piece::Data(data) => read.extend_from_slice(&data),
            Piece::Hole(length) => read.resize(read.len() + length as usize, 0),
        }
    }
    let mut expected = vec![0x5a; 32 << 20];
    expected[1 << 20..2 << 20].fill(0);
    assert!(read == expected);
    let Reply::Status(extents) = ask(Command::BlockStatus { offset: 0, length: 64 << 20, one: false }) else {
        panic!("no status")
    };
    let mib: Vec<_> = extents.iter().map(|e| (e.length >> 20, e.hole)).collect();
    assert_eq!(mib, [(1, false), (1, true), (30, false), (32, true)]);
    client.disconnect();
    stream.write_all(client.transmit()).unwrap();
}

#[test]
fn nbdcopy_brings_an_image_in_and_out_unchanged_and_its_holes_stay_holes() {
    let served = Served::new(8 << 20);
    let (image, back) = (served.file("image"), served.file("back"));
    let contents = random_image(&image, 8 << 20);
    run("nbdcopy", "libnbd-bin", &["--flush", image.to_str().unwrap(), &served.uri()]);
    assert!(served.disk.lock().unwrap().flushes > 0);
    let map = run("nbdinfo", "libnbd-bin", &["--map", &served.uri()]);
    assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
    run("nbdcopy", "libnbd-bin", &[&served.uri(), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == contents, "the copy differs");
}

#[test]
fn qemus_client_reads_what_it_wrote_zeroed_and_discarded() {
    let served = Served::new(8 << 20);
    let commands = [
        "write -P 0x5a 0 1M",
        "read -P 0x5a 0 1M",
        "write -z 64k 64k",
        "read -P 0 64k 64k",
        "read -P 0x5a 0 64k",
        "discard 256k 64k",
        "read -P 0 256k 64k",
        "write -f -P 0x33 1023k 3k",
        "read -P 0x33 1023k 3k",
        "read -P 0x5a 1022k 1k",
        "aio_write -P 0x77 2M 512k",
        "aio_write -P 0x78 3M 512k",
        "aio_flush",
        "read -P 0x77 2M 512k",
        "read -P 0x78 3M 512k",
        "flush",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|c| arguments.extend(["-c", c]));
    let uri = served.uri();
    arguments.push(&uri);
    let said = run("qemu-io", "qemu-utils", &arguments);
    assert!(!said.contains("Pattern verification failed"), "{said}");
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    let served = Served::new(8 << 20);
    let image = served.file("image");
    random_image(&image, 8 << 20);
    let (uri, image) = (served.uri(), image.to_str().unwrap());
    run("qemu-img", "qemu-utils", &["convert", "-n", "-f", "raw", "-O", "raw", image, &uri]);
    run("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", image, &uri]);
    let map = run("qemu-img", "qemu-utils", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains(r#""data": false"#) && map.contains(r#""data": true"#), "{map}");
    served.disk.lock().unwrap().write(0x12345, b"x");
    let different = Process::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", image, &uri]).output().unwrap();
    assert_eq!(different.status.code(), Some(1), "a difference is found");
}

#[test]
fn a_request_past_the_end_and_one_in_chunks_of_one_byte_are_answered_properly() {
    let exports = vec![Export { name: "disk".into(), size: 8192, preferred_block: 4096, read_only: false }];
    let mut server = Server::new(exports);
    server.transmit().clear();
    let mut talk = vec![0, 0, 0, 3];
    talk.extend(0x4948_4156_454f_5054_u64.to_be_bytes());
    talk.extend([0, 0, 0, 1, 0, 0, 0, 4]);
    talk.extend(b"disk");
    // A read that ends past the end, then one that does not.
    for (handle, offset) in [(1_u64, 4097_u64), (2, 4096)] {
        talk.extend([0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0]);
        talk.extend(handle.to_be_bytes());
        talk.extend(offset.to_be_bytes());
        talk.extend(4096_u32.to_be_bytes());
    }
    let mut asked = vec![];
    for byte in talk {
        server.receive(&[byte]);
        asked.extend(server.poll_request().unwrap());
    }
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].command, Command::Read { offset: 4096, length: 4096 });
    let said = server.transmit().split();
    let refused = &said[10..26];
    assert_eq!(refused[..4], [0x67, 0x44, 0x66, 0x98]);
    assert_eq!(refused[4..8], Errno::Invalid.code().to_be_bytes());
    assert_eq!(refused[8..16], 1_u64.to_be_bytes());
    // An answer that is too short is an error, not someone's old memory.
    server.reply(asked[0].cookie, Reply::Data(vec![Piece::Hole(100)]));
    assert_eq!(server.transmit()[4..8], Errno::Io.code().to_be_bytes());
}

proptest::proptest! {
    #[test]
    fn whatever_a_client_sends_it_is_taken_or_declined(bytes in proptest::collection::vec(0_u8..=255, 0..600), cut in 1_usize..50) {
        let exports = vec![Export { name: "disk".into(), size: 8192, preferred_block: 4096, read_only: false }];
        let mut server = Server::new(exports);
        let mut greeting = vec![0, 0, 0, 3];
        greeting.extend(0x4948_4156_454f_5054_u64.to_be_bytes());
        greeting.extend(bytes);
        'talk: for piece in greeting.chunks(cut) {
            server.receive(piece);
            loop {
                match server.poll_request() {
                    Ok(Some(request)) => server.reply(request.cookie, Reply::Error(Errno::Io)),
                    Ok(None) => break,
                    Err(_) => break 'talk,
                }
            }
            proptest::prop_assert!(server.input().capacity() < 64 << 20);
        }
    }
}
