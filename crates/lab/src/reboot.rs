//! A guest whose QEMU was killed while that held its only RAM boots again from its disks. What has to be true then: it is
//! another life of its load program, in one place; and its disk holds every record that it held when QEMU died, or a newer
//! one. Memory and TCP sessions died with it, and nobody checks them.
//!
//! The disk is looked at from outside, as the replica's file in its owner's site: before the kill and after the boot. What a
//! guest was told is durable was on the disk before it was told, so it is in the first look.
//!
//! What can go wrong: the guest does not come up (its console is quoted), the records are older, torn or gone (they are
//! counted and the first is named), nobody has looked before the kill (an error: nothing would be proved).

use crate::godwit::hosted::Hosted;
use crate::pass::BOOT;
use anyhow::{Context, Result, bail};
use godwit_load::page::Page;
use godwit_load::protocol::BootId;
use godwit_load::record::{self, Found, RECORD_BYTES, Slot};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often a record that seems torn is read again.
const TORN_TRIES: u32 = 5;

/// What was known of a guest just before its QEMU was killed.
#[derive(Clone, Debug)]
pub struct Before {
    /// The records on its first disk.
    records: BTreeMap<u32, Found>,
}

/// The records behind `offset` of a disk.
fn records(disk: &Path, offset: u64) -> Result<BTreeMap<u32, Found>> {
    let file = File::open(disk).with_context(|| format!("cannot open the replica {}", disk.display()))?;
    let size = file.metadata()?.len();
    let mut page = Box::new(Page::ZERO);
    let mut found = BTreeMap::new();
    for slot in 0..u32::try_from(size.saturating_sub(offset) / RECORD_BYTES as u64)? {
        let mut tries = 0;
        loop {
            file.read_exact_at(&mut page.0, offset + u64::from(slot) * RECORD_BYTES as u64)
                .with_context(|| format!("cannot read record {slot} of {}", disk.display()))?;
            match record::look(&page, Slot(slot)) {
                Ok(Some(record)) => drop(found.insert(slot, record)),
                Ok(None) => {}
                // The guest may be writing just this one.
                Err(_) if tries < TORN_TRIES => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
                Err(problem) => bail!("record {slot} of {} is {problem:?}", disk.display()),
            }
            break;
        }
    }
    Ok(found)
}

fn on_disk(vm: &Hosted, site: &str) -> Result<BTreeMap<u32, Found>> {
    let replicas = vm.replicas(site);
    records(replicas.first().context("it has no disk")?, vm.spec.layout.records_at.0)
}

/// Looks at a VM whose QEMU in `site` is about to be killed.
///
/// # Errors
/// When its replica there cannot be read, or holds wrecks of records.
pub fn before(vm: &Hosted, site: &str) -> Result<Before> {
    Ok(Before { records: on_disk(vm, site)? })
}

/// Compares what was with what is. `newest` is the life of the load program that runs now.
fn compare(before: &BTreeMap<u32, Found>, now: &BTreeMap<u32, Found>, newest: BootId) -> Result<String> {
    if before.values().any(|r| r.boot == newest) {
        bail!("the guest was not restarted: its load program lives on as {:016x}", newest.0);
    }
    let lost: Vec<_> = before
        .iter()
        .filter(|(slot, was)| {
            // The restarted program writes nothing until it is told to.
            now.get(slot).is_none_or(|is| is.boot != was.boot || is.sequence < was.sequence)
        })
        .collect();
    if let Some((slot, was)) = lost.first() {
        bail!(
            "{} of {} records that were on the disk when QEMU died are older or gone; the first is {slot}: it was {}, it is {:?}",
            lost.len(),
            before.len(),
            was.sequence.0,
            now.get(slot).map(|r| r.sequence.0)
        );
    }
    Ok(format!(
        "the guest was restarted from its disk: all {} records are there; its memory and sessions died with its QEMU",
        before.len()
    ))
}

/// Looks at a VM that has to have been restarted; the note says what was found.
///
/// # Errors
/// When it was not, does not come up, or its disk is not what it was.
pub fn look(vm: &Hosted) -> Result<String> {
    let before = vm.before_kill().context("nobody looked at the disk before QEMU was killed: was it killed at all?")?;
    let deadline = Instant::now() + BOOT;
    let hello = loop {
        match vm.control().and_then(|mut control| Ok(control.hello()?)) {
            Ok(hello) => break hello,
            Err(e) if Instant::now() > deadline => return Err(e.context("the restarted guest does not answer")),
            Err(_) => std::thread::sleep(Duration::from_millis(500)),
        }
    };
    compare(&before.records, &on_disk(vm, &vm.site)?, hello.boot_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_load::page::RunId;
    use godwit_load::record::{RecordFormat, Sequence};

    fn disk(records: &[(u32, u64, u64)]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        for (slot, boot, sequence) in records {
            let format = RecordFormat { seed: 1, boot: BootId(*boot), run: RunId(3) };
            let mut page = Page::ZERO;
            format.write(&mut page, Slot(*slot), Sequence(*sequence));
            file.as_file().write_all_at(&page.0, 8192 + u64::from(*slot) * 4096).unwrap();
        }
        file
    }

    fn told(before: &[(u32, u64, u64)], now: &[(u32, u64, u64)], newest: u64) -> Result<String> {
        let (before, now) = (disk(before), disk(now));
        compare(&records(before.path(), 8192)?, &records(now.path(), 8192)?, BootId(newest))
    }

    #[test]
    fn a_restarted_guest_has_another_life_and_every_record_or_a_newer_one() {
        assert!(told(&[(1, 7, 5), (9, 7, 6)], &[(1, 7, 5), (9, 7, 8), (10, 7, 7)], 8).is_ok());
        let error =
            |now: &[(u32, u64, u64)], newest| told(&[(1, 7, 5), (9, 7, 6)], now, newest).unwrap_err().to_string();
        assert!(error(&[(1, 7, 5), (9, 7, 6)], 7).contains("not restarted"));
        assert!(error(&[(1, 7, 5)], 8).contains("1 of 2 records"));
        assert!(error(&[(1, 7, 5), (9, 7, 3)], 8).contains("the first is 9: it was 6, it is Some(3)"));
        assert!(error(&[(1, 6, 5), (9, 7, 6)], 8).contains("the first is 1"));
    }

    #[test]
    fn a_wreck_of_a_record_is_no_record() {
        let file = disk(&[(1, 7, 5)]);
        file.as_file().write_all_at(&[0xff], 8192 + 4096 + 2000).unwrap();
        assert!(records(file.path(), 8192).unwrap_err().to_string().contains("Torn"));
    }
}
