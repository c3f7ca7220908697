//! What a daemon tells the service manager (systemd's `sd_notify`): that it is ready, how it stands, that it ends, and, by
//! the watchdog, that it still works.
//!
//! The protocol is a datagram of lines to the socket that `NOTIFY_SOCKET` names; where it names none, nothing is said. A sign
//! of life is sent only after the daemon's own work has answered (see the daemons' `health`), never by a timer alone: a hung
//! daemon falls silent, and the manager ends and restarts it. The pinging runs on the daemon's own runtime, for the same reason.
//!
//! There is no `RELOADING`: a change of the configuration takes a restart, which guests and moves outlive.

use std::future::Future;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The way to the service manager, if there is one.
#[derive(Debug)]
pub struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Manager {
    /// As the environment says.
    pub fn from_env() -> Self {
        let address = std::env::var_os("NOTIFY_SOCKET").and_then(|name| match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
            _ => SocketAddr::from_pathname(&name).ok(),
        });
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        // A pid that is another's: the limit was meant for a parent of this process.
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|us| ours && *us > 0).map(Duration::from_micros);
        Self::new(address, watchdog)
    }

    fn new(address: Option<SocketAddr>, watchdog: Option<Duration>) -> Self {
        let socket = address.and_then(|address| {
            let socket = UnixDatagram::unbound().ok()?;
            // A manager that does not read must not hold the daemon up: what does not fit is lost.
            socket.set_nonblocking(true).ok()?;
            Some((socket, address))
        });
        Self { socket, watchdog }
    }

    /// Says something; nothing rests on its being heard.
    fn say(&self, words: &str) {
        if let Some((socket, address)) = &self.socket
            && let Err(error) = socket.send_to_addr(words.as_bytes(), address)
        {
            tracing::debug!(%error, words, "the service manager does not hear");
        }
    }

    /// What it is doing before it is ready.
    pub fn starting(&self, what: &str) {
        self.say(&format!("STATUS={what}"));
    }

    /// It ends, as it was told.
    pub fn stopping(&self) {
        self.say("STOPPING=1\nSTATUS=ending");
    }

    /// It is ready; and from now on gives signs of life, as long as `look` answers in good time. Never returns.
    pub async fn serve<F: Future<Output = Result<String, String>>>(&self, look: impl Fn() -> F) {
        let Some(limit) = self.watchdog.filter(|_| self.socket.is_some()) else {
            self.say("READY=1\nSTATUS=serving");
            return std::future::pending().await;
        };
        self.say("READY=1\nWATCHDOG=1\nSTATUS=serving");
        // Two tries within the limit, and the second has half of it to answer.
        let every = limit / 4;
        loop {
            sleep(every).await;
            match timeout(limit / 2, look()).await {
                Ok(Ok(status)) => self.say(&format!("WATCHDOG=1\nSTATUS={status}")),
                Ok(Err(error)) => {
                    tracing::error!(%error, "no sign of life for the watchdog: the daemon cannot do its work");
                    self.say(&format!("STATUS=cannot do its work: {error}"));
                }
                Err(_) => {
                    tracing::error!(after = ?(limit / 2), "no sign of life for the watchdog: the daemon's work does not answer");
                    self.say("STATUS=its work does not answer");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn pair(limit: Duration) -> (tempfile::TempDir, UnixDatagram, Manager) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let heard = UnixDatagram::bind(&path).unwrap();
        heard.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let manager = Manager::new(Some(SocketAddr::from_pathname(&path).unwrap()), Some(limit));
        (folder, heard, manager)
    }

    fn hear(socket: &UnixDatagram) -> String {
        let mut words = [0; 4096];
        let length = socket.recv(&mut words).unwrap();
        String::from_utf8(words[..length].to_vec()).unwrap()
    }

    /// No sign of life for three times the limit; other words may come.
    fn falls_silent(socket: &UnixDatagram, limit: Duration) {
        let until = std::time::Instant::now() + 3 * limit;
        socket.set_read_timeout(Some(limit)).unwrap();
        while std::time::Instant::now() < until {
            let mut words = [0; 4096];
            if let Ok(length) = socket.recv(&mut words) {
                let words = String::from_utf8_lossy(&words[..length]).into_owned();
                assert!(!words.contains("WATCHDOG"), "{words}");
            }
        }
    }

    #[test]
    fn signs_of_life_come_while_the_work_answers_and_end_when_it_is_stuck_or_fails() {
        let limit = Duration::from_millis(200);
        for stuck in [true, false] {
            let (_folder, heard, manager) = pair(limit);
            let broken = std::sync::Arc::new(AtomicBool::new(false));
            let seen = broken.clone();
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.spawn(async move {
                let look = || async {
                    match (seen.load(Ordering::Relaxed), stuck) {
                        (false, _) => Ok("well".to_owned()),
                        (true, true) => std::future::pending().await,
                        (true, false) => Err("no store".to_owned()),
                    }
                };
                manager.serve(look).await;
            });
            assert!(hear(&heard).starts_with("READY=1\n"));
            for _ in 0..5 {
                assert_eq!(hear(&heard), "WATCHDOG=1\nSTATUS=well");
            }
            broken.store(true, Ordering::Relaxed);
            while hear(&heard).contains("WATCHDOG") {}
            falls_silent(&heard, limit);
        }
    }

    #[test]
    fn a_runtime_whose_threads_are_all_held_gives_no_sign_of_life() {
        let limit = Duration::from_millis(200);
        let (_folder, heard, manager) = pair(limit);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move { manager.serve(|| async { Ok("well".to_owned()) }).await });
        assert!(hear(&heard).starts_with("READY=1\n"));
        hear(&heard);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (hold, is_held) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            hold.send(()).unwrap();
            let _ = held.recv();
        });
        is_held.recv().unwrap();
        // What was said before that.
        heard.set_nonblocking(true).unwrap();
        while heard.recv(&mut [0; 4096]).is_ok() {}
        heard.set_nonblocking(false).unwrap();
        falls_silent(&heard, limit);
        drop(release);
    }

    #[test]
    fn without_a_manager_nothing_is_said_and_nothing_fails() {
        let manager = Manager::new(None, Some(Duration::from_millis(1)));
        manager.starting("x");
        manager.stopping();
    }
}
