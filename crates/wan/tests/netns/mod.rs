//! Two sites and the emulator's place between them, as anonymous network namespaces.
//!
//! A namespace lives as long as a thread or a descriptor refers to it. Ours have no name and no file: when the process
//! ends, however it ends, they and their interfaces are gone.

pub mod traffic;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// No wait for what takes moments on an idle machine is longer.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Segment payload of a full packet at MTU 1500 with TCP timestamps, over the bytes it occupies on a wire.
pub const TCP_SHARE_OF_LINE: f64 = 1448.0 / 1538.0;
/// What the emulator's interfaces are called, in its own namespace.
pub const ENDS: (&str, &str) = ("a0", "b0");
/// The sites' interfaces.
pub const SITE_A: &str = "a1";
pub const SITE_B: &str = "b1";
pub const ADDRESS_A: &str = "10.77.0.1";
pub const ADDRESS_B: &str = "10.77.0.2";

/// A network namespace without a name.
pub struct Namespace(File);

impl Namespace {
    pub fn new() -> io::Result<Self> {
        thread::spawn(|| {
            // SAFETY: `unshare` takes an integer. Only this thread changes its namespace, and it ends right here.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return Err(io::Error::last_os_error());
            }
            // The caller has no say in what the emulator's and the sites' stacks add of their own accord.
            fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")?;
            fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")?;
            File::open("/proc/thread-self/ns/net").map(Self)
        })
        .join()
        .expect("the thread that makes a namespace does not panic")
    }

    /// Does `work` on a thread that is in this namespace, and waits for it.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                // SAFETY: `setns` takes a descriptor, which `self` keeps open, and an integer.
                let answer = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
                assert_eq!(answer, 0, "setns: {}", io::Error::last_os_error());
                work()
            });
            match inside.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// A name for it that `ip` understands.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Two sites, each joined to the emulator's namespace by a veth.
pub struct Sites {
    pub emulator: Namespace,
    pub a: Namespace,
    pub b: Namespace,
}

impl Sites {
    pub fn new() -> io::Result<Self> {
        let sites = Self { emulator: Namespace::new()?, a: Namespace::new()?, b: Namespace::new()? };
        for (end, interface, address, site) in
            [(ENDS.0, SITE_A, ADDRESS_A, &sites.a), (ENDS.1, SITE_B, ADDRESS_B, &sites.b)]
        {
            let peer = site.path();
            sites.emulator.enter(|| {
                run(&["ip", "link", "add", end, "type", "veth", "peer", "name", interface, "netns", &peer])?;
                run(&["ip", "link", "set", end, "up"])
            })?;
            site.enter(|| {
                fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 4194304 67108864")?;
                fs::write("/proc/sys/net/ipv4/tcp_wmem", "4096 4194304 67108864")?;
                // The one that every kernel lets a namespace choose; and without early exits from slow start.
                fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno")?;
                fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")?;
                run(&["ip", "link", "set", "lo", "up"])?;
                run(&["ip", "address", "add", &format!("{address}/24"), "dev", interface])?;
                run(&["ip", "link", "set", interface, "up"])
            })?;
        }
        Ok(sites)
    }
}

/// Runs a command in the calling thread's namespace.
pub fn run(command: &[&str]) -> io::Result<()> {
    let output = Command::new(command[0]).args(&command[1..]).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Whether network namespaces can be made here. If not, says so where the test harness does not hide it.
pub fn privileged(who: &str) -> bool {
    match Namespace::new() {
        Ok(_) => true,
        Err(error) => {
            // Not `eprintln!`: the harness would swallow that. In one piece, since others write too.
            let reason = format!("SKIPPED {who}: it needs root to make network namespaces ({error})\n");
            let _ = io::stderr().write_all(reason.as_bytes());
            false
        }
    }
}
