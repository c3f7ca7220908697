//! `godwit volume serve`, `import` and `export`, as their users run them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn godwit() -> Command {
    Command::new(env!("CARGO_BIN_EXE_godwit"))
}

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn disk(&self) -> PathBuf {
        let disk = self.path("disk");
        std::fs::File::create(&disk).unwrap().set_len(8 * MIB).unwrap();
        disk
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("socket").display())
    }

    fn serve(&self, options: &[&str]) -> Serving {
        let mut command = godwit();
        command.args(["volume", "serve"]).arg(self.path("disk")).arg("--socket").arg(self.path("socket")).args(options);
        let serving = Serving(command.spawn().unwrap());
        for _ in 0..500 {
            if std::os::unix::net::UnixStream::connect(self.path("socket")).is_ok() {
                return serving;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("nobody listens");
    }
}

struct Serving(Child);

impl Serving {
    fn signal(&mut self, signal: &str) -> Option<i32> {
        assert!(Command::new("kill").args([signal, &self.0.id().to_string()]).status().unwrap().success());
        self.0.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn run(command: &mut Command) -> (bool, String) {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|e| panic!("cannot run {command:?} ({e}); scripts/setup.sh installs it"));
    (status.success(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

fn io(uri: &str, commands: &[&str]) -> String {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw"]).args(commands.iter().flat_map(|c| ["-c", c])).arg(uri);
    let (done, said) = run(&mut command);
    assert!(done && !said.contains("verification failed"), "{said}");
    said
}

fn clean(disk: &Path) -> (bool, u64) {
    let folder = PathBuf::from(format!("{}.godwit", disk.display()));
    let (replica, opened) = godwit_volume::Replica::open_beside(&folder, disk).unwrap();
    replica.close().unwrap();
    (opened.clean, opened.doubted)
}

#[test]
fn what_was_written_is_there_after_a_kill_and_only_a_kill_leaves_blocks_in_doubt() {
    let place = Place::new();
    let disk = place.disk();
    let mut serving = place.serve(&[]);
    io(&place.uri(), &["write -P 7 1M 64k"]);
    assert_eq!(serving.signal("-KILL"), None);
    let (was_clean, doubted) = clean(&disk);
    assert!(!was_clean && doubted > 0);
    let mut serving = place.serve(&[]);
    io(&place.uri(), &["read -P 7 1M 64k", "write -P 8 2M 64k"]);
    assert_eq!(serving.signal("-TERM"), Some(0));
    assert_eq!(clean(&disk), (true, 0));
    assert!(!place.path("socket").exists(), "the socket is removed");
    let mut serving = place.serve(&["--no-track"]);
    io(&place.uri(), &["read -P 8 2M 64k", "write -P 9 2M 64k"]);
    assert_eq!(serving.signal("-TERM"), Some(0));
}

#[test]
fn a_file_is_served_once() {
    let place = Place::new();
    place.disk();
    let _serving = place.serve(&[]);
    for options in [&[][..], &["--no-track"]] {
        let mut command = godwit();
        command
            .args(["volume", "serve"])
            .arg(place.path("disk"))
            .arg("--socket")
            .arg(place.path("other"))
            .args(options);
        let (done, said) = run(&mut command);
        assert!(!done && said.contains("in use"), "{said}");
    }
}

#[test]
fn a_socket_that_libnbd_opened_is_served_and_one_that_was_opened_for_somebody_else_is_not() {
    let place = Place::new();
    let disk = place.disk();
    let mut info = Command::new("nbdinfo");
    info.args(["--size", "--", "[", env!("CARGO_BIN_EXE_godwit"), "volume", "serve"]).arg(&disk).arg("]");
    let (done, said) = run(&mut info);
    assert!(done && said.trim().ends_with("8388608"), "{said}");
    let (done, said) = run(godwit().args(["volume", "serve"]).arg(&disk).env("LISTEN_FDS", "1").env("LISTEN_PID", "1"));
    assert!(!done && said.contains("--socket"), "{said}");
}

/// A reply to a request that libnbd and QEMU refuse to send: its error.
fn raw_request(place: &Place, kind: u16, offset: u64, length: u32) -> u32 {
    let mut socket = std::os::unix::net::UnixStream::connect(place.path("socket")).unwrap();
    let take = |socket: &mut std::os::unix::net::UnixStream, n: usize| {
        let mut bytes = vec![0; n];
        socket.read_exact(&mut bytes).unwrap();
        bytes
    };
    take(&mut socket, 18);
    // No zeroes after the export's description; the default export.
    socket.write_all(&[0, 0, 0, 3]).unwrap();
    socket.write_all(&[b"IHAVEOPT".as_slice(), &1_u32.to_be_bytes(), &0_u32.to_be_bytes()].concat()).unwrap();
    take(&mut socket, 10);
    let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &[9; 8]].concat();
    socket.write_all(&[&head[..], &offset.to_be_bytes(), &length.to_be_bytes()].concat()).unwrap();
    let reply = take(&mut socket, 16);
    u32::from_be_bytes(std::array::from_fn(|i| reply[4 + i]))
}

#[test]
fn a_read_past_the_end_is_invalid_and_the_last_byte_is_not() {
    let place = Place::new();
    place.disk();
    let _serving = place.serve(&[]);
    assert_eq!(raw_request(&place, 0, 8 * MIB - 1, 1), 0);
    assert_eq!(raw_request(&place, 0, 8 * MIB - 1, 2), 22);
    assert_eq!(raw_request(&place, 0, u64::MAX, 2), 22);
    assert_eq!(raw_request(&place, 4, 8 * MIB, 4096), 22, "nor is there anything to trim");
    assert_eq!(raw_request(&place, 6, 8 * MIB, 4096), 28, "zeroes past the end find no room");
}

#[test]
fn over_tcp_only_who_has_a_certificate_of_the_authority_reads_and_nobody_in_the_clear() {
    let place = Place::new();
    place.disk();
    let make = |folder: &str| {
        let folder = place.path(folder);
        std::fs::create_dir(&folder).unwrap();
        let openssl = |words: &str| {
            let (done, said) = run(Command::new("openssl").args(words.split(' ')).current_dir(&folder));
            assert!(done, "{said}");
        };
        openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ca -days 2 -keyout ca-key.pem -out ca-cert.pem",
        );
        for who in ["server", "client"] {
            openssl(&format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={who} -keyout {who}-key.pem -out {who}.csr"
            ));
            std::fs::write(folder.join("ext"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
            openssl(&format!(
                "x509 -req -in {who}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 -extfile ext -out {who}-cert.pem"
            ));
        }
        folder
    };
    let (ours, theirs) = (make("ours"), make("theirs"));
    let mut command = godwit();
    command.args(["volume", "serve"]).arg(place.path("disk")).args(["--listen", "127.0.0.1:0"]);
    let mut serving = Serving(command.arg("--tls-creds").arg(&ours).stderr(Stdio::piped()).spawn().unwrap());
    // It says which port it was given; what it says later is read as well, so that it is not held up.
    let mut said = BufReader::new(serving.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    let port: u16 = said.find_map(|line| line.split_once("address=127.0.0.1:")?.1.trim().parse().ok()).unwrap();
    std::thread::spawn(move || said.for_each(drop));
    let size = |uri: String| run(Command::new("nbdinfo").args(["--size", &uri]));
    let with = |folder: &Path| size(format!("nbds://localhost:{port}/?tls-certificates={}", folder.display()));
    let (done, said) = with(&ours);
    assert!(done && said.trim() == "8388608", "{said}");
    assert!(!with(&theirs).0, "a client of another authority was served");
    let (done, said) = size(format!("nbd://localhost:{port}"));
    assert!(!done, "{said}");
    // More than a TLS record both ways.
    let (from, to) = (place.path("from"), place.path("to"));
    let contents: Vec<u8> = (0..8 * MIB).map(|i| (i * 7 / 13) as u8).collect();
    std::fs::write(&from, &contents).unwrap();
    let uri = format!("nbds://localhost:{port}/?tls-certificates={}", ours.display());
    for (from, to) in [(from.to_str().unwrap(), &uri[..]), (&uri, to.to_str().unwrap())] {
        let (done, said) = run(Command::new("nbdcopy").args([from, to]));
        assert!(done, "{said}");
    }
    assert!(std::fs::read(&to).unwrap() == contents);
}

#[test]
fn an_address_that_others_reach_takes_tls_or_an_explicit_word() {
    let place = Place::new();
    let disk = place.disk();
    let (done, said) = run(godwit().args(["volume", "serve"]).arg(&disk).args(["--listen", "0.0.0.0:0"]));
    assert!(!done && said.contains("--tls-creds"), "{said}");
}

#[test]
fn a_socket_that_was_passed_takes_the_same_word_where_others_reach_it() {
    let place = Place::new();
    let disk = place.disk();
    // It is the shell's input, which passes it on as a service manager does.
    let passed = |address: &str| {
        let listener = TcpListener::bind(address).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut shell = Command::new("sh");
        shell.args(["-c", "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\" 3<&0", "sh", env!("CARGO_BIN_EXE_godwit")]);
        shell.args(["volume", "serve"]).arg(&disk).stdin(OwnedFd::from(listener));
        (shell, port)
    };
    let (mut shell, _) = passed("0.0.0.0:0");
    let (done, said) = run(&mut shell);
    assert!(!done && said.contains("--tls-creds"), "{said}");
    for (address, options) in [("127.0.0.1:0", &[][..]), ("0.0.0.0:0", &["--plain-tcp"][..])] {
        let (mut shell, port) = passed(address);
        let _serving = Serving(shell.args(options).spawn().unwrap());
        // If nobody serves it, nobody has it open.
        drop(shell);
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut greeting = [0; 8];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGIC");
    }
    let mut elsewhere = godwit();
    elsewhere.args(["volume", "serve", "--plain-tcp", "--socket"]).arg(place.path("socket")).arg(&disk);
    let (done, said) = run(&mut elsewhere);
    assert!(!done && said.contains("cannot be used with"), "{said}");
}

#[test]
fn a_qcow2_image_goes_in_and_comes_out_with_its_contents() {
    let place = Place::new();
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let img = |words: &[&str]| {
        let (done, said) = run(Command::new("qemu-img").args(words));
        assert!(done, "{said}");
    };
    img(&["create", "-q", "-f", "qcow2", &path("in.qcow2"), "8M"]);
    let (done, said) = run(Command::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 5 1M 3M", &path("in.qcow2")]));
    assert!(done, "{said}");
    for words in [["import", "in.qcow2", "disk"], ["export", "disk", "out.qcow2"]] {
        let (done, said) = run(godwit().args(["volume", words[0]]).args(words[1..].iter().map(|name| path(name))));
        assert!(done, "{said}");
    }
    img(&["compare", "-f", "qcow2", "-F", "raw", &path("in.qcow2"), &path("disk")]);
    img(&["compare", "-f", "qcow2", "-F", "qcow2", &path("in.qcow2"), &path("out.qcow2")]);
    use std::os::unix::fs::MetadataExt;
    let allocated = std::fs::metadata(place.path("disk")).unwrap().blocks() * 512;
    assert!(allocated < 4 * MIB, "{allocated} bytes: its holes are none");
    let (replica, opened) =
        godwit_volume::Replica::open_beside(&place.path("disk.godwit"), &place.path("disk")).unwrap();
    assert!(opened.clean && !replica.stamp_runs().unwrap().is_empty(), "what was imported is tracked");
}
