//! A thread that wakes when it has to: waiting with nanoseconds, being woken, and being scheduled at once.
//!
//! A delay is only as exact as the wake-up that ends it. Three habits of the kernel stand in the way of that:
//! `poll` counts in milliseconds (`ppoll` does not), timers are batched within 50 us of slack (`PR_SET_TIMERSLACK`), and
//! a busy machine lets a thread that has become ready wait for others (`SCHED_FIFO`, where allowed: a forwarding thread is idle nearly
//! always and must run at once when it is not). Priority 1, the lowest of that class, so that it disturbs nobody with a better claim.
//!
//! A real-time thread that spins would lock up a small machine: whoever calls [`prefer_this_thread`] sleeps when idle.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// How the kernel schedules a path's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// `SCHED_FIFO`: at once when there is something to do.
    RealTime,
    /// As any other thread: this process may not use real-time scheduling. Delays are less exact on a busy machine.
    Ordinary,
}

/// Makes the calling thread wake exactly and run at once, as far as the kernel allows. Threads that it starts do not inherit it.
pub fn prefer_this_thread() -> Scheduling {
    // SAFETY: this form of `prctl` takes integers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    // SAFETY: `sched_param` is plain integers, for which zero is a value.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = 1;
    // SAFETY: zero means the calling thread; `parameters` lives through the call.
    let answer =
        unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters) };
    if answer == 0 { Scheduling::RealTime } else { Scheduling::Ordinary }
}

/// The kernel's number for the calling thread.
#[must_use]
pub fn thread_id() -> u32 {
    // SAFETY: `gettid` takes nothing and cannot fail.
    unsafe { libc::gettid() }.unsigned_abs()
}

/// The processor time that a thread of this process has used; zero when it has ended or the kernel does not say.
#[must_use]
pub fn cpu_time_of(thread: u32) -> Duration {
    let spent = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat"));
    let nanos = spent.ok().and_then(|line| line.split(' ').next()?.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// What ended a wait. Neither, when the time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The input is readable, or has an error to report.
    pub input: bool,
    /// The bell has been rung.
    pub bell: bool,
}

impl Ready {
    /// The time was up, or the wait was interrupted.
    pub const NOTHING: Self = Self { input: false, bell: false };
}

/// Waits until the input is readable (if one is given), the bell is rung, or `timeout` has passed; for ever without one.
/// May return early with neither.
pub fn wait(input: Option<BorrowedFd<'_>>, bell: &Bell, timeout: Option<Duration>) -> Ready {
    let interest = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // The kernel passes over negative descriptors.
    let mut descriptors = [interest(input.map_or(-1, |input| input.as_raw_fd())), interest(bell.0.as_raw_fd())];
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `descriptors` holds two entries with descriptors that are borrowed through the call; `timeout` is null or
    // points at a live `timespec`; the signal mask may be null.
    let answer = unsafe { libc::ppoll(descriptors.as_mut_ptr(), 2, timeout, std::ptr::null()) };
    // An error can only be EINTR here: no harm in looking again.
    let ready = |n: usize| answer > 0 && descriptors[n].revents != 0;
    Ready { input: ready(0), bell: ready(1) }
}

/// Something that another thread can ring and [`wait`] hears.
#[derive(Debug)]
pub struct Bell(std::fs::File);

impl Bell {
    /// A silent bell (an `eventfd`).
    ///
    /// # Errors
    ///
    /// The kernel's, when the process has too many open files.
    pub fn new() -> io::Result<Self> {
        // SAFETY: `eventfd` takes integers only.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is a descriptor that was just made and that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }.into()))
    }

    /// Rings; it keeps ringing until it is silenced.
    pub fn ring(&self) {
        // It fails only when it has been rung 2^64 - 2 times since it was last silenced: then it rings already.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Silences it.
    pub fn silence(&self) {
        // It fails only when the bell was silent.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    #[test]
    fn a_bell_is_heard_until_it_is_silenced() {
        let bell = Bell::new().unwrap();
        let hears = || wait(None, &bell, Some(Duration::ZERO)).bell;
        assert!(!hears());
        bell.ring();
        bell.ring();
        assert!(hears() && hears());
        bell.silence();
        assert!(!hears());
    }

    #[test]
    fn input_is_noticed_when_it_is_asked_for() {
        let bell = Bell::new().unwrap();
        let (reader, mut writer) = UnixStream::pair().unwrap();
        let notices = |input| wait(input, &bell, Some(Duration::ZERO)).input;
        assert!(!notices(Some(reader.as_fd())));
        writer.write_all(b"x").unwrap();
        assert!(notices(Some(reader.as_fd())));
        assert!(!notices(None));
    }

    #[test]
    fn waiting_never_ends_before_the_timeout() {
        let began = Instant::now();
        wait(None, &Bell::new().unwrap(), Some(Duration::from_micros(300)));
        assert!(began.elapsed() >= Duration::from_micros(300));
    }

    #[test]
    fn a_thread_that_works_uses_processor_time() {
        // The kernel brings its figure up to date from time to time; and another thread may have had the processor.
        let began = Instant::now();
        while cpu_time_of(thread_id()) == Duration::ZERO {
            assert!(began.elapsed() < Duration::from_secs(60), "it has used none");
        }
        assert_eq!(cpu_time_of(u32::MAX), Duration::ZERO);
    }
}
