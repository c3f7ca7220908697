//! The daemons as a service manager sees them: configured by a file, told about by datagrams, ended by a signal.

use godwit_trust::{Authority, Identity, Role, Validity};
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn certify(folder: &Path, role: Role, name: &str) {
    let authority = folder.join("ca");
    let authority =
        if authority.exists() { Authority::open(&authority).unwrap() } else { Authority::create(&authority).unwrap() };
    let issued = authority.issue(&Identity::new(role, name).unwrap(), Validity::days(1)).unwrap();
    issued.write(&folder.join(format!("cert-{name}"))).unwrap();
}

fn hear(socket: &UnixDatagram) -> String {
    let mut words = [0; 4096];
    let length = socket.recv(&mut words).expect("the daemon says something in good time");
    String::from_utf8(words[..length].to_vec()).unwrap()
}

/// Starts a daemon with a watchdog of 400 ms; it says where it stands, gives signs of life, and says that it ends.
fn serves(folder: &Path, daemon: &str, file: &str) {
    let heard = UnixDatagram::bind(folder.join(format!("notify-{daemon}"))).unwrap();
    heard.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let config = folder.join(format!("{daemon}.toml"));
    std::fs::write(&config, file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command.args([daemon, "--config"]).arg(&config).stdin(Stdio::null()).stdout(Stdio::null());
    command.env("NOTIFY_SOCKET", folder.join(format!("notify-{daemon}"))).env("WATCHDOG_USEC", "400000");
    command.env_remove("WATCHDOG_PID").env_remove("GODWIT_CREDENTIALS");
    let mut running = Ended(command.spawn().unwrap());

    assert!(hear(&heard).starts_with("STATUS="));
    assert!(hear(&heard).starts_with("READY=1\n"));
    let (mut signs, until) = (0, Instant::now() + Duration::from_secs(120));
    while signs < 3 {
        // A busy machine may be late with an answer to its own question.
        let sign = hear(&heard);
        assert!(sign.starts_with("WATCHDOG=1\nSTATUS=0 ") || sign == "STATUS=its work does not answer", "{sign}");
        signs += usize::from(sign.starts_with("WATCHDOG=1"));
        assert!(Instant::now() < until, "{signs} signs of life in two minutes: {sign}");
    }
    Command::new("kill").arg(running.0.id().to_string()).status().unwrap();
    while !hear(&heard).starts_with("STOPPING=1\n") {}
    assert!(running.0.wait().unwrap().success());
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_controller_with_a_file_says_that_it_is_ready_lives_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    certify(at, Role::Controller, "controller");
    let file = format!(
        "listen = \"127.77.30.9:{}\"\nstate = \"{}\"\ncredentials = \"{}\"\n",
        TcpListener::bind("127.77.30.9:0").unwrap().local_addr().unwrap().port(),
        at.join("state").display(),
        at.join("cert-controller").display(),
    );
    serves(at, "controller", &file);
}

#[test]
fn a_node_with_a_file_says_that_it_is_ready_lives_and_ends() {
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    if !root || Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("SKIPPED: this needs root and qemu-system-x86_64");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    certify(at, Role::Node, "host1");
    let path = |name: &str| at.join(name).display().to_string();
    // No name: the certificate's.
    let file = format!(
        "address = \"127.77.30.1\"\nstate = \"{}\"\nrun = \"{}\"\nimages = \"{}\"\ncredentials = \"{}\"\n",
        path("state"),
        path("run"),
        path("images"),
        path("cert-host1"),
    );
    serves(at, "node", &file);
}

#[test]
fn a_daemon_does_not_start_with_a_file_that_has_an_unknown_key() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("node.toml");
    std::fs::write(&config, "state = \"/nowhere\"\nadress = \"127.0.0.1\"\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    let output = command.args(["node", "--config"]).arg(&config).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("node.toml, line 2: there is no key `adress`: the keys are"), "{said}");
}
