//! The tools that matter, against real files: libnbd's and QEMU's.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use godwit_export::{Backend, Listener, Plain, Stop, Tracked, serve_all};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;

const MIB: usize = 1 << 20;

/// A file that is served until the test ends.
struct Served {
    folder: tempfile::TempDir,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(size: usize, open: impl FnOnce(&Path) -> Arc<dyn Backend>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::File::create(&file).unwrap().set_len(size as u64).unwrap();
        let listener = Listener::unix(&folder.path().join("socket")).unwrap();
        let (stop, backend) = (Stop::new().unwrap(), open(&file));
        let told = stop.clone();
        let thread = Some(std::thread::spawn(move || serve_all(&listener, &backend, None, &told).unwrap()));
        Self { folder, stop, thread }
    }

    fn plain(size: usize) -> Self {
        Self::new(size, |file| Arc::new(Plain::open(file).unwrap()))
    }

    fn tracked(size: usize) -> Self {
        Self::new(size, |file| Arc::new(Tracked::open(file).unwrap()))
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("socket").display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.now();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn run(program: &str, package: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|e| panic!("cannot run {program} ({e}); it comes with the Debian package {package}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Different everywhere, with holes.
fn image(path: &Path, size: usize) -> Vec<u8> {
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

/// Drops what the page cache has of a file, so that reads have to wait for the disk.
fn chill(file: &Path) {
    let to = format!("of={}", file.display());
    run("sync", "coreutils", &[file.to_str().unwrap()]);
    run("dd", "coreutils", &["status=none", &to, "oflag=nocache", "conv=notrunc", "count=0"]);
}

#[test]
fn an_image_goes_in_and_comes_out_unchanged_warm_and_cold_with_and_without_tracking() {
    for served in [Served::plain(64 * MIB), Served::tracked(64 * MIB)] {
        let (from, to) = (served.path("from"), served.path("to"));
        let contents = image(&from, 64 * MIB);
        let (uri, from, out) = (served.uri(), from.to_str().unwrap(), to.to_str().unwrap());
        let many = ["--connections=4", "--requests=64", "--request-size=1048576", "--flush"];
        run("nbdcopy", "libnbd-bin", &[&many[..], &[from, &uri]].concat());
        run("qemu-img", "qemu-utils", &["compare", "-f", "raw", "-F", "raw", from, &uri]);
        chill(&served.path("disk"));
        run("nbdcopy", "libnbd-bin", &["--requests=64", "--request-size=65536", &uri, out]);
        assert!(std::fs::read(&to).unwrap() == contents, "the copy differs");
        assert!(std::fs::read(served.path("disk")).unwrap() == contents, "the file differs");
    }
}

#[test]
fn long_reads_that_begin_and_end_anywhere_bring_what_was_written_last_also_where_the_file_ends_within_a_page() {
    let size = 3 * MIB + 1234;
    let served = Served::plain(size);
    let commands = [
        "write -P 1 0 3M",
        "read -P 1 0 3M",
        "write -P 2 100k 300001",
        "read -P 2 102400 300001",
        "read -P 1 402401 1999999",
        "write -P 3 3145728 1234",
        "read -P 3 -s 998766 -l 1234 2146962 1000000",
        "read -P 1 -l 998766 2146962 1000000",
        "discard 1M 1M",
        "read -P 0 1M 1M",
        "read -P 1 2M 777777",
    ];
    for cold in [false, true] {
        for command in &commands {
            if cold {
                chill(&served.path("disk"));
            }
            run("qemu-io", "qemu-utils", &["-f", "raw", "-c", command, &served.uri()]);
        }
    }
}

#[test]
fn the_map_shows_data_where_something_was_written_and_holes_elsewhere() {
    let served = Served::tracked(8 * MIB);
    let uri = served.uri();
    let commands = ["write -P 1 1M 1M", "write -P 2 4M 64k", "discard 1M 512k", "flush"];
    let arguments: Vec<&str> = ["-f", "raw"].into_iter().chain(commands.iter().flat_map(|c| ["-c", c])).collect();
    run("qemu-io", "qemu-utils", &[&arguments[..], &[&uri]].concat());
    let map = run("nbdinfo", "libnbd-bin", &["--map", &uri]);
    let found: Vec<Vec<&str>> = map.lines().map(|l| l.split_whitespace().take(3).collect()).collect();
    let expected =
        [["0", "1572864", "3"], ["1572864", "524288", "0"], ["2097152", "2097152", "3"], ["4194304", "65536", "0"]];
    assert_eq!(found[..4], expected, "{map}");
}

#[test]
fn patterns_that_overlap_and_straddle_blocks_are_read_back() {
    for served in [Served::plain(8 * MIB), Served::tracked(8 * MIB)] {
        let uri = served.uri();
        let commands = [
            "write -P 0x11 0 1M",
            "write -P 0x22 1000 5000",
            "write -f -P 0x33 4095 2",
            "write -z 64k 32k",
            "write -z -u 128k 32k",
            "aio_write -P 0x44 2M 3M",
            "aio_flush",
            "read -P 0x11 0 1000",
            "read -P 0x22 1000 3095",
            "read -P 0x33 4095 2",
            "read -P 0x22 4097 1903",
            "read -P 0 64k 32k",
            "read -P 0 128k 32k",
            "read -P 0x11 160k 10k",
            "read -P 0x44 2M 3M",
        ];
        let arguments: Vec<&str> = ["-f", "raw"].into_iter().chain(commands.iter().flat_map(|c| ["-c", c])).collect();
        let said = run("qemu-io", "qemu-utils", &[&arguments[..], &[&uri]].concat());
        assert!(!said.contains("verification failed"), "{said}");
    }
}

#[test]
fn what_one_connection_wrote_another_one_reads() {
    let served = Served::tracked(8 * MIB);
    let uri = served.uri();
    let io = |command: &str| run("qemu-io", "qemu-utils", &["-f", "raw", "-c", command, &uri]);
    // Another client is there all the time, with a read of the old contents behind it.
    let mut other = Command::new("qemu-io")
        .args(["-f", "raw", &uri])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    use std::io::{BufRead, BufReader, Write};
    let mut stdin = other.stdin.take().unwrap();
    let mut stdout = BufReader::new(other.stdout.take().unwrap());
    let mut read = |fill: u32| {
        stdin.write_all(format!("read -P {fill} 0 64k\n").as_bytes()).unwrap();
        // Answered before it is written again: what is written while it is under way it may see or not.
        let mut said = String::new();
        while !said.contains("ops/sec)\n") && stdout.read_line(&mut said).unwrap() > 0 {}
        assert!(said.contains("ops/sec)") && !said.contains("verification failed"), "{fill}: {said}");
    };
    read(0);
    for fill in 1..20 {
        io(&format!("write -P {fill} 0 64k"));
        read(fill);
    }
    drop(stdin);
    assert!(other.wait().unwrap().success());
}

#[test]
fn a_file_that_somebody_else_serves_is_refused_and_one_that_is_no_blocks_is_not_tracked() {
    let served = Served::plain(MIB);
    let disk = served.path("disk");
    assert!(Tracked::open(&disk).unwrap_err().to_string().contains("in use"));
    assert!(Plain::open(&disk).unwrap_err().to_string().contains("in use"));
    let odd = served.path("odd");
    std::fs::write(&odd, [7; 5000]).unwrap();
    let error = Tracked::open(&odd).unwrap_err().to_string();
    assert!(error.contains("--no-track"), "{error}");
    Plain::open(&odd).unwrap();
}

#[test]
fn a_file_that_was_changed_behind_our_back_gets_new_stamps_and_one_that_was_not_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("disk");
    let mut contents = vec![1; 4096];
    contents.resize(MIB, 0);
    std::fs::write(&file, &contents).unwrap();
    let stamps = || {
        let (replica, _) = godwit_volume::Replica::open_beside(&Tracked::folder_beside(&file), &file).unwrap();
        let runs = replica.stamp_runs().unwrap();
        replica.close().unwrap();
        runs
    };
    Tracked::open(&file).unwrap().close().unwrap();
    let first = stamps();
    assert_eq!(first.first().map(|(run, _)| run.start), Some(0), "what was there before counts as written");
    Tracked::open(&file).unwrap().close().unwrap();
    assert_eq!(stamps(), first, "nobody touched it");
    contents[8192..12288].fill(9);
    std::fs::write(&file, &contents).unwrap();
    Tracked::open(&file).unwrap().close().unwrap();
    let after = stamps();
    assert!(after.iter().any(|(run, _)| run.contains(&2)) && after[0].1 > first[0].1, "{first:?} {after:?}");
}
