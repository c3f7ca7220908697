//! Network namespaces that go with the test.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

/// A network namespace without a name: it goes with the process.
pub struct Place(File);

impl Place {
    pub fn new() -> Self {
        let made = std::thread::spawn(|| {
            // SAFETY: takes flags only, and changes this thread's namespace alone.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "needs root");
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        let place = Self(made.join().unwrap());
        place.run("ip link set lo up");
        place
    }

    /// The calling thread is here from now on.
    pub fn enter(&self) {
        // SAFETY: the descriptor is open and a network namespace's; changes this thread's namespace alone.
        assert_eq!(unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
    }

    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// The calling thread is here afterwards.
    pub fn run(&self, commands: &str) -> String {
        self.enter();
        commands
            .split("; ")
            .map(|command| {
                let mut words = command.split(' ');
                let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
                assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8(output.stdout).unwrap()
            })
            .collect()
    }
}
