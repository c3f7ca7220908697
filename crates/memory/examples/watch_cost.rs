//! What a look at a guest's memory costs: 1 GiB, all of it touched, of which some pages change between two looks.
//!
//! `cargo run --release -p godwit-memory --example watch_cost`

use godwit_memory::PAGE_SIZE;
use godwit_memory::watcher::{Sampler, Watcher};
use godwit_units::Bytes;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const PAGES: u64 = 1 << 18;
const CHANGES: u64 = 5000;
const LOOKS: u64 = 10;

fn main() -> std::io::Result<()> {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
    let ram = File::from(fd);
    let mut page = [0_u8; PAGE_SIZE];
    for number in 0..PAGES {
        page[..8].copy_from_slice(&(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        ram.write_all_at(&page, number * PAGE_SIZE as u64)?;
    }
    let mut watcher = Watcher::new(ram.try_clone()?, Bytes(PAGES * PAGE_SIZE as u64))?;
    let (mut sampler, mut took) = (Sampler::default(), Duration::ZERO);
    for look in 0..=LOOKS {
        for change in 0..CHANGES {
            let number = (change * 52 + look) % PAGES;
            page[..8].copy_from_slice(&(look * PAGES + number).to_le_bytes());
            ram.write_all_at(&page, number * PAGE_SIZE as u64)?;
        }
        let (mut bits, began) = (vec![0; watcher.words()], Instant::now());
        let found = watcher.look(&mut bits, |page, content| sampler.changed(page, content))?;
        // The first one finds everything.
        if look > 0 {
            took += began.elapsed();
            assert_eq!(found.changed, CHANGES);
        }
    }
    let each = took.as_secs_f64() / LOOKS as f64;
    let began = Instant::now();
    watcher.packed()?;
    let sampled = began.elapsed().as_secs_f64();
    println!(
        "a look at 1 GiB: {:.0} ms; at one a second {:.1} s of a processor a minute; its samples {sampled:.3} s, once",
        each * 1e3,
        each * 60.0
    );
    Ok(())
}
