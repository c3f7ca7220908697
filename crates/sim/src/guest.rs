//! What guests do: write, flush, read what they wrote, and wait for answers.

use crate::check::Violation;
use crate::media::{BLOCKS, SECTOR, SECTORS};
use crate::site::{QemuState, Request, Wish};
use crate::world::{Place, TICK, World};
use godwit_volume::mirror::PATIENCE;
use godwit_volume::{BLOCK, VolumeError};
use rand::Rng;

/// Requests that a guest has under way at most.
const DEPTH: usize = 4;
/// How much longer than the mirror's patience a write may wait: the shell looks at the clock now and then.
const SLACK: u64 = 20;

impl World {
    pub(crate) fn guests_act(&mut self) {
        for at in 0..2 {
            if self.violation.is_some() {
                return;
            }
            if self.sites[at].runs() && !self.waits_for_pages(at) && self.rng.random_ratio(1, 2) {
                if self.sites[at].disk.open && self.sites[at].qemu.ram != self.last_write {
                    self.violated(Violation::LostWrite);
                    return;
                }
                self.wish(at);
                self.look(at);
            }
            let asks = matches!(self.sites[at].qemu.state, QemuState::Running | QemuState::Stopped);
            if asks && self.rng.random_ratio(3, 4) {
                self.submit(at);
            }
        }
    }

    /// The guest wants something of its disk.
    fn wish(&mut self, at: Place) {
        if self.sites[at].qemu.requests.len() >= DEPTH {
            return;
        }
        let first = self.rng.random_range(0..BLOCKS - 2);
        let count = self.rng.random_range(1..=2);
        self.last_write += 1;
        let value = self.last_write;
        let sectors = first * SECTORS..(first + count) * SECTORS;
        let wish = match self.rng.random_range(0..10) {
            0..=4 => Wish::Write(sectors, value),
            5..=6 => {
                let sector = sectors.start + self.rng.random_range(0..SECTORS);
                Wish::Write(sector..sector + 1, value)
            }
            7 => Wish::Zero(first..first + count),
            _ => Wish::Flush,
        };
        let qemu = &mut self.sites[at].qemu;
        qemu.ram = value;
        if self.diskless {
            return;
        }
        let blocks = |wish: &Wish| match wish {
            Wish::Write(sectors, _) => sectors.start / SECTORS..sectors.end.div_ceil(SECTORS),
            Wish::Zero(blocks) => blocks.clone(),
            Wish::Flush => 0..0,
        };
        // No guest writes where it has a write under way: nobody promises an order.
        let wanted = blocks(&wish);
        if qemu.requests.iter().map(|r| blocks(&r.wish)).any(|b| b.start < wanted.end && wanted.start < b.end) {
            return;
        }
        qemu.requests.push_back(Request { wish, taken: None });
    }

    /// The guest reads a few blocks.
    fn look(&mut self, at: Place) {
        let first = self.rng.random_range(0..BLOCKS - 2);
        let Some(replica) = &self.sites[at].disk.replica else { return };
        let mut bytes = [0; 2 * BLOCK as usize];
        if let Err(error) = replica.read(first as u64 * BLOCK, &mut bytes) {
            self.violated(Violation::Volume(error.to_string()));
            return;
        }
        let found: Vec<u64> = bytes.chunks(SECTOR).map(|s| u64::from_le_bytes(std::array::from_fn(|i| s[i]))).collect();
        if let Err(wrong) = self.truth.check(first..first + 2, &found) {
            self.violated(Violation::WrongBlock(wrong));
        }
    }

    /// QEMU asks the export for what is next. A node that is away, or whose replica takes no writes now, is waited for.
    fn submit(&mut self, at: Place) {
        let now = self.now;
        let site = &mut self.sites[at];
        let Some(replica) = &site.disk.replica else { return };
        let Some(index) = site.qemu.requests.iter().position(|r| r.taken.is_none()) else { return };
        let wish = site.qemu.requests[index].wish.clone();
        let (sectors, value) = match &wish {
            Wish::Write(sectors, value) => (sectors.clone(), *value),
            Wish::Zero(blocks) => (blocks.start * SECTORS..blocks.end * SECTORS, 0),
            Wish::Flush => (0..0, 0),
        };
        let (offset, length) = ((sectors.start * SECTOR) as u64, sectors.len() * SECTOR);
        let done = match &wish {
            Wish::Write(..) => {
                let mut bytes = vec![0; length];
                bytes.as_chunks_mut::<8>().0.fill(value.to_le_bytes());
                replica.write(offset, &bytes).map(|w| Some(w.blocks))
            }
            Wish::Zero(_) => replica.zero(offset, length as u64).map(|w| Some(w.blocks)),
            Wish::Flush => replica.flush().map(|()| None),
        };
        let line = || format!("  site {at}: guest {wish:?}, {done:?}");
        if self.trace.is_some() {
            let line = line();
            self.tell(|| line);
        }
        let site = &mut self.sites[at];
        let Some(replica) = &site.disk.replica else { return };
        match done {
            Ok(None) => {
                self.truth.flushed();
                site.qemu.requests.remove(index);
            }
            Ok(Some(_)) if !site.disk.open => self.violated(Violation::WroteWhileClosed),
            Ok(Some(blocks)) => {
                self.truth.wrote(sectors, value);
                let told = match &mut site.disk.source {
                    None => Ok(None),
                    Some(source) => source.guest_wrote(blocks, TICK * u32::try_from(now).unwrap_or(0), replica),
                };
                match told {
                    Ok(None) => drop(site.qemu.requests.remove(index)),
                    Ok(Some(mirrored)) => {
                        site.qemu.requests[index].taken = Some((now, mirrored.until));
                        self.mirror_sends(at, mirrored.messages);
                        self.answer(at);
                    }
                    Err(error) => self.violated(Violation::Mirror(error.to_string())),
                }
            }
            Err(VolumeError::Frozen) => {}
            Err(_) if site.disk.store.is_blown() => self.truth.tried(sectors, value),
            Err(error) => self.violated(Violation::Volume(error.to_string())),
        }
    }

    /// Answers the writes that need not wait any more.
    pub(crate) fn answer(&mut self, at: Place) {
        let now = self.now;
        let site = &mut self.sites[at];
        let source = site.disk.source.as_ref();
        let mut longest = 0;
        site.qemu.requests.retain(|request| {
            let Some((since, write)) = request.taken else { return true };
            longest = longest.max(now - since);
            source.is_some_and(|s| !s.is_answered(write))
        });
        let bound = u64::try_from(PATIENCE.as_millis() / TICK.as_millis()).unwrap_or(0) + SLACK;
        if longest > bound {
            self.violated(Violation::WriteStalled(longest));
        }
    }
}
