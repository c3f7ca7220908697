//! A guest's memory, watched from outside while it runs: which pages change from look to look, as a log of dirtied pages; or their contents, too, as a
//! recording on which codecs are tried.
//!
//! For baselines, which have no node that would watch: their QEMU says how many pages are dirty and never which, and its own
//! `calc-dirty-rate` by bitmap brings QEMU 7.2 down under emulation. So this keeps a copy of the RAM file and compares. Pages that are
//! written and stay as they were are not seen. A look that ends past its interval lets the next ones be missed, and the log says so.

use crate::truth::PAGE;
use anyhow::{Context, Result};
use godwit_predict::log::Header;
use godwit_predict::recorded::Recorder;
use godwit_predict::{LogWriter, Observed, Pages};
use godwit_units::Bytes;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What is read at once: small enough to stay in the processor's cache.
const CHUNK: usize = 256 << 10;
const WORD: usize = 64;

/// What was seen.
#[derive(Debug)]
pub struct Watched {
    /// The log of dirtied pages.
    pub log: Vec<u8>,
    /// Pages that changed in a second, on average over the intervals that were watched.
    pub changed_per_s: f64,
    /// What looking took.
    pub looking: Duration,
}

/// A copy of a RAM file as it was at the last look.
struct Copy<'a> {
    ram: &'a File,
    known: Vec<u8>,
}

impl<'a> Copy<'a> {
    fn of(ram: &'a File, memory: Bytes) -> Result<Self> {
        let size = usize::try_from(memory.0)?;
        let mut known = vec![0; size];
        ram.read_exact_at(&mut known, 0).context("cannot read the guest's RAM")?;
        Ok(Self { ram, known })
    }

    /// A bit for each page that is not what it was.
    fn look(&mut self) -> Result<Vec<u64>> {
        let mut changed = vec![0; self.known.len().div_ceil(PAGE * WORD)];
        let mut now = vec![0; CHUNK];
        for (nth, known) in self.known.chunks_mut(CHUNK).enumerate() {
            let now = &mut now[..known.len()];
            self.ram.read_exact_at(now, (nth * CHUNK) as u64).context("cannot read the guest's RAM")?;
            if known == now {
                continue;
            }
            let first = nth * (CHUNK / PAGE);
            for (page, (was, is)) in known.chunks_mut(PAGE).zip(now.chunks(PAGE)).enumerate() {
                if was != is {
                    was.copy_from_slice(is);
                    changed[(first + page) / WORD] |= 1 << ((first + page) % WORD);
                }
            }
        }
        Ok(changed)
    }
}

/// Watches a RAM file for `lasting`, a look each `interval`.
///
/// # Errors
/// The file cannot be read, or the interval is none that a log has.
pub fn watch(ram: &File, memory: Bytes, lasting: Duration, interval: Duration) -> Result<Watched> {
    let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let header = Header { observed: Observed::Contents, pages: Pages::of(memory), interval, start };
    let (mut writer, mut log) = LogWriter::new(header)?;
    let begun = Instant::now();
    let mut copy = Copy::of(ram, memory)?;
    let mut looking = begun.elapsed();
    // Intervals are counted from when there is something to compare with.
    let zero = Instant::now();
    let (mut nth, mut looks, mut pages) = (1_u32, 0_u32, 0_u64);
    while interval * nth <= lasting {
        std::thread::sleep((zero + interval * nth).saturating_duration_since(Instant::now()));
        let begun = Instant::now();
        let changed = copy.look()?;
        looking += begun.elapsed();
        pages += changed.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        looks += 1;
        log.extend(writer.frame(&changed, &changed));
        nth += 1;
        while zero + interval * nth < Instant::now() && interval * nth <= lasting {
            writer.miss();
            nth += 1;
        }
    }
    Ok(Watched { log, changed_per_s: pages as f64 / (f64::from(looks.max(1)) * interval.as_secs_f64()), looking })
}

/// What a recording has.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Looks after the first.
    pub looks: u32,
    /// Pages with other contents that they saw.
    pub pages: u64,
    /// What the guest was seen for.
    pub lasting: Duration,
}

/// Records a RAM file's contents for `lasting`, a look each `interval` or as often as there is time for.
///
/// # Errors
/// The file cannot be read, or the recording cannot be written.
pub fn record(ram: &File, memory: Bytes, lasting: Duration, interval: Duration, into: impl Write) -> Result<Taken> {
    let cannot = "cannot write the recording";
    let mut recorder = Recorder::new(into, Pages::of(memory)).context(cannot)?;
    let zero = Instant::now();
    let mut copy = Copy::of(ram, memory)?;
    let zeroes = vec![0; PAGE];
    let numbered = copy.known.chunks_exact(PAGE).zip(0_u32..);
    let first: Vec<_> = numbered.filter(|(page, _)| *page != zeroes).map(|(page, n)| (n, page)).collect();
    recorder.look(Duration::ZERO, first.into_iter()).context(cannot)?;
    let mut taken = Taken { looks: 0, pages: 0, lasting: Duration::ZERO };
    let mut next = zero.elapsed() + interval;
    while taken.lasting < lasting {
        std::thread::sleep((zero + next).saturating_duration_since(Instant::now()));
        taken.lasting = zero.elapsed();
        next = taken.lasting + interval;
        let changed = copy.look()?;
        let pages: Vec<_> = (0..copy.known.len() / PAGE)
            .filter(|page| changed[page / WORD] >> (page % WORD) & 1 == 1)
            .map(|page| (page as u32, &copy.known[page * PAGE..][..PAGE]))
            .collect();
        taken.looks += 1;
        taken.pages += pages.len() as u64;
        recorder.look(taken.lasting, pages.into_iter()).context(cannot)?;
    }
    recorder.end().context(cannot)?.flush().context(cannot)?;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_predict::{Log, Taken};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_look_tells_the_pages_that_changed_since_the_last_one_to_the_very_last_page() {
        let ram = tempfile::tempfile().unwrap();
        // An odd number of pages, past a chunk and past a word.
        let pages = 131_u64;
        ram.set_len(pages * PAGE as u64).unwrap();
        let mut copy = Copy::of(&ram, Pages(pages).bytes()).unwrap();
        assert_eq!(copy.look().unwrap(), [0, 0, 0]);
        for page in [0, 63, 64, 130] {
            ram.write_all_at(&[1], page * PAGE as u64 + 4095).unwrap();
        }
        assert_eq!(copy.look().unwrap(), [1 | 1 << 63, 1, 1 << 2]);
        assert_eq!(copy.look().unwrap(), [0, 0, 0]);
    }

    #[test]
    fn what_was_watched_is_a_log_of_the_guest() {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(64 * PAGE as u64).unwrap();
        let (lasting, interval) = (Duration::from_millis(300), Duration::from_millis(100));
        let seen_enough = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0_u64.. {
                    ram.write_all_at(&n.to_le_bytes(), 7 * PAGE as u64).unwrap();
                    std::thread::yield_now();
                    if seen_enough.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let seen = watch(&ram, Bytes(64 * PAGE as u64), lasting, interval);
            seen_enough.store(true, Ordering::Relaxed);
            seen.unwrap()
        });
        let log = Log::read(seen.log).unwrap();
        assert_eq!((log.header().pages, log.header().interval, log.torn()), (Pages(64), interval, 0));
        assert!((1..=3).contains(&log.intervals()));
        let mut words = vec![];
        for interval in 0..log.intervals() {
            log.for_each_word(interval, Taken::Changed, |word, bits| words.push((word, bits)));
        }
        words.dedup();
        assert_eq!(words, [(0, 1 << 7)]);
        assert!(seen.changed_per_s > 0.0);
    }

    #[test]
    fn a_recording_has_the_memory_as_it_was_first_and_as_it_became() {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(130 * PAGE as u64).unwrap();
        ram.write_all_at(&[1; PAGE], 129 * PAGE as u64).unwrap();
        let begun = AtomicBool::new(false);
        struct Begun<'a>(Vec<u8>, &'a AtomicBool);
        impl Write for Begun<'_> {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                // The first look's contents.
                self.1.fetch_or(bytes.len() == PAGE, Ordering::Relaxed);
                self.0.write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut into = Begun(vec![], &begun);
        let taken = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !begun.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                ram.write_all_at(&[2; PAGE], 129 * PAGE as u64).unwrap();
                ram.write_all_at(&[3; PAGE], 0).unwrap();
            });
            let (lasting, interval) = (Duration::from_millis(300), Duration::from_millis(50));
            record(&ram, Bytes(130 * PAGE as u64), lasting, interval, &mut into).unwrap()
        });
        assert!(taken.looks >= 1 && taken.pages == 2 && taken.lasting >= Duration::from_millis(300), "{taken:?}");
        let mut played = godwit_predict::recorded::Recorded::open(&into.0[..]).unwrap();
        assert_eq!((played.page(129)[0], played.page(0)[0]), (1, 0));
        played.until(taken.lasting, |_| ()).unwrap();
        assert_eq!((played.page(129)[4095], played.page(0)[0], played.page(1)[0]), (2, 3, 0));
    }
}
