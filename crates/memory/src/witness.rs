//! The stopped guest's RAM itself, beside what QEMU says of it.
//!
//! # What can go wrong
//!
//! QEMU's TCG keeps its own track of writes: a page's bit in the dirty bitmap, and in each vCPU's TLB whether a store
//! may skip setting it. A vCPU that has set the bit goes on to open its TLB's fast path; if the bitmap is synchronised
//! and the TLB closed between the two (the vCPU's thread need only lose its processor there), the fast path stays
//! open over a clear bit, and no later store to that page is seen. It was seen in 6 of some 300 moves on a busy machine,
//! with a page of the guest's kernel each time. QEMU 7.2 besides forgets to close the TLB at all where a RAM block is a multiple
//! of 256 KiB. A page that QEMU does not send is wrong at the destination, whatever lies between.
//!
//! So where QEMU cannot be believed, all of RAM is compared at the end of its last section, when the guest stands still, with
//! what was sent; what differs is sent then. The cost is in the pause: reading and hashing the RAM that the guest ever
//! touched, on two threads, some 100 ms for a gigabyte. Hardware does not lose writes: under KVM there is no need.

use crate::record::{PAGE_SIZE, PageBytes};
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::xxh3_64;

/// Read at once: enough to make calls cheap, and it stays in the processor's cache.
const CHUNK: usize = 256 * PAGE_SIZE;
/// Threads that compare. Memory's bandwidth is the bound, not processors.
const THREADS: u64 = 2;

/// A block of RAM that QEMU shares with whoever may open it.
#[derive(Debug)]
pub struct Witness {
    block: String,
    ram: File,
}

impl Witness {
    /// Of the block that QEMU's stream calls `block`: the id of its memory backend. `ram`: that backend's memory.
    #[must_use]
    pub fn new(block: impl Into<String>, ram: File) -> Self {
        Self { block: block.into(), ram }
    }

    pub(crate) fn block(&self) -> &str {
        &self.block
    }

    pub(crate) fn is_of(&self, block: &[u8]) -> bool {
        block == self.block.as_bytes()
    }

    /// Reads a page as it is now.
    pub(crate) fn read(&self, page: u64, into: &mut [u8; PAGE_SIZE]) -> io::Result<()> {
        self.ram.read_exact_at(into, page * PAGE_SIZE as u64)
    }

    /// The pages that are not as `sums` has them, in order.
    pub(crate) fn differing(&self, sums: &[Sum]) -> io::Result<Vec<u64>> {
        let pages = sums.len() as u64;
        let size = self.ram.metadata()?.len();
        if size < pages * PAGE_SIZE as u64 {
            let what = format!("the memory of `{}` has {size} bytes, and {pages} pages in QEMU's stream", self.block);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let each = pages.div_ceil(THREADS).max(1);
        std::thread::scope(|scope| {
            let parts: Vec<_> = (0..pages)
                .step_by(each as usize)
                .map(|from| scope.spawn(move || self.differing_in(from, (from + each).min(pages), sums)))
                .collect();
            let mut all = vec![];
            for part in parts {
                all.extend(part.join().expect("no comparison panics")?);
            }
            Ok(all)
        })
    }

    /// Calls `with` for each page that is not a hole, of so many. Another's error ends it.
    pub(crate) fn each(&self, pages: u64, mut with: impl FnMut(u64, &PageBytes) -> io::Result<()>) -> io::Result<()> {
        let ram = File::open(format!("/proc/self/fd/{}", self.ram.as_raw_fd()))?;
        let (mut at, mut buffer) = (0, vec![0; CHUNK]);
        while at < pages {
            let (data, end) = data_from(&ram, at, pages)?;
            at = data;
            while at < end {
                let n = (((end - at) as usize) * PAGE_SIZE).min(CHUNK);
                ram.read_exact_at(&mut buffer[..n], at * PAGE_SIZE as u64)?;
                for content in buffer[..n].chunks_exact(PAGE_SIZE) {
                    with(at, content.first_chunk().expect("a chunk has a page"))?;
                    at += 1;
                }
            }
        }
        Ok(())
    }

    fn differing_in(&self, from: u64, to: u64, sums: &[Sum]) -> io::Result<Vec<u64>> {
        // A descriptor of its own, because finding what is not a hole moves its position.
        let ram = File::open(format!("/proc/self/fd/{}", self.ram.as_raw_fd()))?;
        let (mut found, mut buffer) = (vec![], vec![0; CHUNK]);
        let mut at = from;
        while at < to {
            let (data, end) = data_from(&ram, at, to)?;
            found.extend((at..data).filter(|page| !sums[*page as usize].is_zero()));
            at = data;
            while at < end {
                let n = (((end - at) as usize) * PAGE_SIZE).min(CHUNK);
                ram.read_exact_at(&mut buffer[..n], at * PAGE_SIZE as u64)?;
                for content in buffer[..n].chunks_exact(PAGE_SIZE) {
                    if !sums[at as usize].is_of(content) {
                        found.push(at);
                    }
                    at += 1;
                }
            }
        }
        Ok(found)
    }
}

/// Where the next pages lie that are no hole, from `at` and before `to`.
pub(crate) fn data_from(ram: &File, at: u64, to: u64) -> io::Result<(u64, u64)> {
    let size = PAGE_SIZE as u64;
    let data = match rustix::fs::seek(ram, SeekFrom::Data(at * size)) {
        Ok(data) => (data / size).min(to),
        // No data up to its end.
        Err(rustix::io::Errno::NXIO) => return Ok((to, to)),
        Err(e) => return Err(e.into()),
    };
    let hole = rustix::fs::seek(ram, SeekFrom::Hole(data * size))?;
    Ok((data, hole.div_ceil(size).min(to)))
}

/// What was last sent of a page: XXH3, which is as fast as memory. Nothing is left out because of it; two pages that it takes
/// for one are a write that stays lost, with a chance of 2^-64 for each page that QEMU lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Sum(u64);

impl Sum {
    /// Never sent, or as zeroes: RAM that nobody touched is zero at both ends.
    const ZERO: Self = Self(0);

    pub(crate) fn of(content: Option<&[u8; PAGE_SIZE]>) -> Self {
        content.map_or(Self::ZERO, |content| Self(xxh3_64(content)))
    }

    pub(crate) fn is_zero(self) -> bool {
        self == Self::ZERO || self == Self(xxh3_64(&[0; PAGE_SIZE]))
    }

    fn is_of(self, content: &[u8]) -> bool {
        Self(xxh3_64(content)) == self || (self == Self::ZERO && content.iter().all(|byte| *byte == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_differ_are_found_in_holes_and_in_data_and_no_others() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("ram");
        let ram = File::options().read(true).write(true).create_new(true).open(&path).expect("opens");
        let page = |fill: u8| [fill; PAGE_SIZE];
        const PAGES: u64 = 2000;
        ram.set_len(PAGES * PAGE_SIZE as u64).expect("grows");
        // 700: sent and gone since; 800: written behind QEMU's back; 900: as sent; 1999: as sent; 1500: zeroes, as content.
        let mut sums = vec![Sum::default(); PAGES as usize];
        for (number, sent, now) in [
            (700, Some(7), None),
            (800, None, Some(8)),
            (801, Some(8), Some(9)),
            (900, Some(9), Some(9)),
            (1999, Some(1), Some(1)),
            (1500, Some(0), None),
        ] {
            sums[number as usize] = Sum::of(sent.map(page).as_ref());
            if let Some(now) = now {
                ram.write_all_at(&page(now), number * PAGE_SIZE as u64).expect("writes");
            }
        }
        let witness = Witness::new("ram0", File::open(path).expect("opens"));
        assert_eq!(witness.differing(&sums).expect("reads"), [700, 800, 801]);
        assert_eq!(witness.differing(&[]).expect("reads"), [0; 0]);
        let longer = witness.differing(&vec![Sum::default(); PAGES as usize + 1]).expect_err("too short").to_string();
        assert!(longer.contains("ram0") && longer.contains("2001"), "{longer}");
    }
}
