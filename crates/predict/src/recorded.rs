//! A guest's memory over a while, with its contents: what a codec needs to be tried on a move that never took place.
//!
//! [`Log`](crate::Log) says which pages changed and when; this says what they changed to. It is large (a page for each change that was seen), so it
//! is read as it is needed, and whoever keeps one packs it.
//!
//! The format, numbers little-endian: [`MAGIC`], pages of RAM (8 bytes); then looks, each with the microseconds since the first one (8 bytes), how many
//! pages differ from the look before (4 bytes), and for each its number (4 bytes) and its contents. The first look has every page that is not zero. A look
//! at [`END`] with no pages ends it; without that the recording was cut short, and is refused.

use crate::amount::{PAGE, Pages};
use std::io::{self, Read, Write};
use std::time::Duration;

/// First bytes of a recording.
pub const MAGIC: [u8; 8] = *b"GWRAM1\r\n";
/// The time of what is no look any more.
const END: u64 = u64::MAX;
/// The most memory that a recording is believed to be of: it is held whole.
pub const MOST: Pages = Pages(1 << 24);
const SIZE: usize = PAGE.0 as usize;

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordedError {
    /// The medium failed, or what was to be unpacked is damaged.
    #[error("the recording cannot be read: {0}")]
    Read(#[from] io::Error),
    /// It is something else.
    #[error("this is no recording of a guest's memory: it begins with {0:02x?}")]
    Magic([u8; 8]),
    /// It is of more memory than is believed.
    #[error("a recording of {0} is more than is taken, {MOST}")]
    TooLarge(Pages),
    /// It names a page that there is not.
    #[error("the recording is damaged: page {page} of {pages}")]
    Page {
        /// The page's number.
        page: u32,
        /// How many there are.
        pages: Pages,
    },
    /// Times go backwards, or a look has more pages than there are.
    #[error("the recording is damaged: {0}")]
    Damaged(&'static str),
}

/// Writes a recording.
#[derive(Debug)]
pub struct Recorder<W>(W);

impl<W: Write> Recorder<W> {
    /// Of a guest with so much memory.
    ///
    /// # Errors
    /// The medium's.
    pub fn new(mut into: W, ram: Pages) -> io::Result<Self> {
        into.write_all(&MAGIC)?;
        into.write_all(&ram.0.to_le_bytes())?;
        Ok(Self(into))
    }

    /// A look, so long after the first one: the pages that differ, each with its contents.
    ///
    /// # Errors
    /// The medium's.
    pub fn look<'a>(&mut self, at: Duration, pages: impl ExactSizeIterator<Item = (u32, &'a [u8])>) -> io::Result<()> {
        let micros = u64::try_from(at.as_micros()).unwrap_or(END - 1);
        self.0.write_all(&micros.to_le_bytes())?;
        self.0.write_all(&u32::try_from(pages.len()).unwrap_or(u32::MAX).to_le_bytes())?;
        for (page, contents) in pages {
            self.0.write_all(&page.to_le_bytes())?;
            self.0.write_all(contents)?;
        }
        Ok(())
    }

    /// That was all; what it was written into.
    ///
    /// # Errors
    /// The medium's.
    pub fn end(mut self) -> io::Result<W> {
        self.0.write_all(&END.to_le_bytes())?;
        self.0.write_all(&0_u32.to_le_bytes())?;
        Ok(self.0)
    }
}

/// A look.
#[derive(Clone, Debug, Default)]
struct Look {
    at: Duration,
    pages: Vec<u32>,
    /// Theirs, one after the other.
    contents: Vec<u8>,
}

/// A guest's memory as it was, played again.
#[derive(Debug)]
pub struct Recorded<R> {
    from: R,
    ram: Vec<u8>,
    /// The look that is being played: by its end the memory is as it was seen.
    next: Look,
    begins: Duration,
    /// In which order its pages change, and how many have.
    order: Vec<u32>,
    done: usize,
    ended: bool,
}

impl<R: Read> Recorded<R> {
    /// From its first look on.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn open(mut from: R) -> Result<Self, RecordedError> {
        let mut magic = [0; 8];
        from.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err(RecordedError::Magic(magic));
        }
        let pages = Pages(u64::from_le_bytes(array(&mut from)?));
        if pages > MOST {
            return Err(RecordedError::TooLarge(pages));
        }
        let ram = vec![0; pages.0 as usize * SIZE];
        let mut recorded =
            Self { from, ram, next: Look::default(), begins: Duration::ZERO, order: vec![], done: 0, ended: false };
        recorded.read()?;
        let first = recorded.next.at;
        recorded.until(first, |_| ())?;
        Ok(recorded)
    }

    /// How much memory the guest has.
    #[must_use]
    pub fn pages(&self) -> Pages {
        Pages((self.ram.len() / SIZE) as u64)
    }

    /// A page as it is now.
    #[must_use]
    pub fn page(&self, page: u64) -> &[u8] {
        let from = page as usize * SIZE;
        &self.ram[from..from + SIZE]
    }

    /// Pages that change in a second, by the two looks that it is between.
    #[must_use]
    pub fn pace(&self) -> f64 {
        let lasts = self.next.at.saturating_sub(self.begins).as_secs_f64();
        if lasts > 0.0 { self.next.pages.len() as f64 / lasts } else { 0.0 }
    }

    /// Whether all has been played: nothing changes any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.ended
    }

    /// Goes on to that time; `changed` is told of each page that gets other contents. Between two looks pages change one after the other, evenly, in no order
    /// that a migration's would agree with.
    ///
    /// # Errors
    /// What is wrong with the recording.
    pub fn until(&mut self, time: Duration, mut changed: impl FnMut(u64)) -> Result<(), RecordedError> {
        while !self.ended {
            let (pages, lasts) = (self.next.pages.len(), self.next.at.saturating_sub(self.begins));
            let due = if time >= self.next.at {
                pages
            } else {
                let share = time.saturating_sub(self.begins).as_secs_f64() / lasts.as_secs_f64();
                ((share * pages as f64) as usize).min(pages)
            };
            for nth in &self.order[self.done.min(due)..due] {
                let page = u64::from(self.next.pages[*nth as usize]);
                let from = *nth as usize * SIZE;
                self.ram[page as usize * SIZE..][..SIZE].copy_from_slice(&self.next.contents[from..from + SIZE]);
                changed(page);
            }
            self.done = self.done.max(due);
            if time < self.next.at {
                return Ok(());
            }
            self.read()?;
        }
        Ok(())
    }

    /// The next look.
    fn read(&mut self) -> Result<(), RecordedError> {
        let micros = u64::from_le_bytes(array(&mut self.from)?);
        let count = u32::from_le_bytes(array(&mut self.from)?);
        if micros == END {
            self.ended = true;
            return Ok(());
        }
        let at = Duration::from_micros(micros);
        if at < self.next.at {
            return Err(RecordedError::Damaged("a look before the one before it"));
        }
        let all = self.pages();
        if u64::from(count) > all.0 {
            return Err(RecordedError::Damaged("a look with more pages than there are"));
        }
        self.begins = self.next.at;
        self.next.at = at;
        self.next.pages.clear();
        self.next.contents.resize(count as usize * SIZE, 0);
        for contents in self.next.contents.chunks_exact_mut(SIZE) {
            let page = u32::from_le_bytes(array(&mut self.from)?);
            if u64::from(page) >= all.0 {
                return Err(RecordedError::Page { page, pages: all });
            }
            self.next.pages.push(page);
            self.from.read_exact(contents)?;
        }
        self.order = (0..count).collect();
        // As good as shuffled, and the same each time.
        self.order.sort_by_key(|nth| self.next.pages[*nth as usize].wrapping_mul(0x9e37_79b1).rotate_left(15));
        self.done = 0;
        Ok(())
    }
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A recording of so many pages: looks, each at a time with pages and the byte that fills them.
    pub fn recording(ram: u64, looks: &[(u64, Vec<(u32, u8)>)]) -> Vec<u8> {
        let mut recorder = Recorder::new(vec![], Pages(ram)).unwrap();
        for (ms, pages) in looks {
            let contents: Vec<_> = pages.iter().map(|(page, fill)| (*page, [*fill; SIZE])).collect();
            let pages = contents.iter().map(|(page, contents)| (*page, &contents[..]));
            recorder.look(Duration::from_millis(*ms), pages).unwrap();
        }
        recorder.end().unwrap()
    }

    #[test]
    fn what_was_recorded_is_played_again_look_by_look_and_evenly_between_them() {
        let bytes = recording(
            8,
            &[(0, vec![(0, 1), (7, 7)]), (100, vec![(0, 2), (1, 1), (2, 1), (3, 1)]), (300, vec![(0, 3)])],
        );
        let mut played = Recorded::open(&bytes[..]).unwrap();
        assert_eq!((played.pages(), played.page(0)[0], played.page(7)[4095], played.page(1)[0]), (Pages(8), 1, 7, 0));
        let mut changed = vec![];
        for (ms, so_many) in [(0, 0), (49, 1), (50, 2), (99, 3), (100, 4), (299, 4), (300, 5)] {
            played.until(Duration::from_millis(ms), |page| changed.push(page)).unwrap();
            assert_eq!(changed.len(), so_many, "{ms} ms: {changed:?}");
            match ms {
                0..100 => assert_eq!(played.pace(), 40.0),
                100..300 => assert_eq!(played.pace(), 5.0),
                _ => {}
            }
        }
        assert!(played.is_over());
        assert_eq!((played.page(0)[0], played.page(3)[0]), (3, 1));
        played.until(Duration::from_secs(9), |page| panic!("{page}")).unwrap();
    }

    #[test]
    fn what_is_no_recording_or_a_damaged_one_is_refused() {
        let good = recording(2, &[(0, vec![(0, 1)]), (10, vec![(1, 1)])]);
        let play = |bytes: &[u8]| {
            let mut played = Recorded::open(bytes)?;
            played.until(Duration::MAX, |_| ())
        };
        play(&good).unwrap();
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            play(&bad).unwrap_err()
        };
        assert!(matches!(with(0, 0), RecordedError::Magic(_)));
        assert!(matches!(with(12, 1), RecordedError::TooLarge(_)));
        assert!(matches!(with(24, 3), RecordedError::Damaged(_)), "three pages of two");
        assert!(matches!(with(28, 2), RecordedError::Page { page: 2, .. }));
        assert!(matches!(play(&good[..good.len() - 1]).unwrap_err(), RecordedError::Read(_)));
        let backwards = recording(1, &[(0, vec![]), (10, vec![]), (9, vec![])]);
        assert!(matches!(play(&backwards).unwrap_err(), RecordedError::Damaged(_)));
    }
}
