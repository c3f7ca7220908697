//! Are the disks at the destination what they were at the source?
//!
//! They are too large to be compared while the guest is held, so its hypervisor keeps a record from the hand-off on (a
//! dirty bitmap, begun before the guest runs) of what the guest has written since. Later the two copies are compared,
//! and a difference that nobody wrote is an error.
//!
//! What can go wrong: the hypervisor refuses the bitmap, or cannot be reached; then there is no record, and the caller has to
//! compare while the guest is held, or say that nothing was checked.

use crate::fabric::Site;
use crate::images::DiskLayout;
use crate::truth::{self, Difference};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The dirty bitmap that records what the guest wrote since the hand-off.
const BITMAP: &str = "since-handoff";

/// A write that the comparison saw is in the bitmap as soon as it has completed: so long it may take.
const WRITES_COMPLETE: Duration = Duration::from_millis(200);

/// Who passes QMP commands to a VM's hypervisor.
pub trait Monitor {
    /// Runs a command; yields what QEMU returned.
    ///
    /// # Errors
    /// When QEMU refuses it or cannot be reached.
    fn monitor(&self, command: &str, arguments: Value) -> Result<Value>;
}

/// A disk at both ends. Open files stay readable whatever becomes of their names.
#[derive(Debug)]
pub struct Pair {
    /// As it was at the source when the guest stopped.
    pub old: File,
    /// The destination's.
    pub new: File,
}

/// Begins the record of what is written to the block nodes `nodes`. The guest must not run yet.
///
/// # Errors
/// When QEMU refuses.
pub fn begin_record(guest: &dyn Monitor, nodes: &[String]) -> Result<()> {
    for node in nodes {
        let bitmap = json!({"node": node, "name": BITMAP, "granularity": truth::GRANULE});
        guest.monitor("block-dirty-bitmap-add", bitmap)?;
    }
    Ok(())
}

/// The granules that differ and that the guest has not written since [`begin_record`], by disk. Ends the record.
///
/// # Errors
/// When the comparison could not be made.
pub fn compare(guest: &dyn Monitor, site: &Site, nodes: &[String], pairs: &[Pair]) -> Result<Vec<Difference>> {
    let mut found = vec![];
    for (node, pair) in nodes.iter().zip(pairs) {
        let mut difference = truth::compare_disks(&pair.old, &pair.new)?;
        if !difference.units.is_empty() {
            let written = written_since(guest, site, node)?;
            difference.units.retain(|granule| !written.contains(granule));
        }
        found.push(difference);
    }
    for node in nodes {
        guest.monitor("block-dirty-bitmap-remove", json!({"node": node, "name": BITMAP}))?;
    }
    Ok(found)
}

/// What the guest has written to a block node since the hand-off. The bitmap is frozen and read through a read-only export.
fn written_since(guest: &dyn Monitor, site: &Site, node: &str) -> Result<BTreeSet<u64>> {
    std::thread::sleep(WRITES_COMPLETE);
    guest.monitor("block-dirty-bitmap-disable", json!({"node": node, "name": BITMAP}))?;
    // One for each: several guests of a site may be looked at at once.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let socket = site.run_folder().join(format!("truth-{}.nbd", NEXT.fetch_add(1, Ordering::Relaxed)));
    guest.monitor("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}))?;
    let export = json!({"type": "nbd", "id": "truth", "node-name": node, "name": "truth", "bitmaps": [BITMAP]});
    let map = guest.monitor("block-export-add", export).and_then(|_| {
        let image = format!(
            "driver=nbd,server.type=unix,server.path={},export=truth,x-dirty-bitmap=qemu:dirty-bitmap:{BITMAP}",
            socket.display()
        );
        let run = site
            .ns
            .run(move || Command::new("qemu-img").args(["map", "--output=json", "--image-opts", &image]).output());
        let output = run.context("cannot run qemu-img")?;
        if !output.status.success() {
            bail!("qemu-img map: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    });
    guest.monitor("nbd-server-stop", Value::Null)?;
    truth::written_granules(&map?)
}

/// Damages a byte of a first disk, in its fresh random bytes: nothing in the guest reads those.
///
/// # Errors
/// When the file cannot be written.
pub fn damage(disk: &Path, layout: &DiskLayout) -> Result<()> {
    let context = || format!("cannot damage {}", disk.display());
    let file = OpenOptions::new().read(true).write(true).open(disk).with_context(context)?;
    let (mut byte, at) = ([0], layout.fs_end.0 + 1);
    file.read_exact_at(&mut byte, at).with_context(context)?;
    file.write_all_at(&[!byte[0]], at).with_context(context)
}
