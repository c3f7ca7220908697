//! Is KVM usable here? That `/dev/kvm` opens says little: in a VM that was not given nested virtualisation in full, a
//! guest may start and never get anywhere. So the question is put to a guest: the tiny image is booted under KVM, once
//! for each start of the machine. That it could not be put (no image, no QEMU) is no answer, and the next run asks again.

use crate::images::GuestImage;
use crate::progress::Progress;
use crate::scenario::Image;
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A tiny guest boots in under two seconds where KVM works.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whether a guest boots under KVM; its console is in `work` meanwhile. Without an image, or where KVM cannot be opened, it does not.
#[must_use]
pub fn usable(work: &Path, progress: &Progress) -> bool {
    if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return false;
    }
    let answer = known_or(&crate::sandbox::registry().join("kvm"), || {
        progress.note("trying whether KVM is usable");
        try_boot(&work.join("kvm-console"))
    });
    answer.unwrap_or_else(|error| {
        progress.note(&format!("whether KVM is usable could not be tried: {error:#}"));
        false
    })
}

/// The answer that is known, or else that of `ask`, which is known from then on.
fn known_or(known: &Path, ask: impl FnOnce() -> Result<bool>) -> Result<bool> {
    if let Ok(answer) = std::fs::read_to_string(known) {
        return Ok(answer.trim() == "yes");
    }
    let answer = ask()?;
    // Not to be told is only slower.
    let _ = std::fs::write(known, if answer { "yes\n" } else { "no\n" });
    Ok(answer)
}

fn try_boot(console: &Path) -> Result<bool> {
    let image = GuestImage::find(Image::Tiny)?;
    let mut qemu = Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-machine",
            "q35",
            "-m",
            "256",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ])
        .arg("-kernel")
        .arg(image.kernel_file())
        .arg("-initrd")
        .arg(image.initrd_file())
        .args(["-append", "console=ttyS0 quiet panic=-1", "-serial", &format!("file:{}", console.display())])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start qemu-system-x86_64")?;
    let booted = boots(&mut qemu, console);
    let _ = qemu.kill();
    let _ = qemu.wait();
    let _ = std::fs::remove_file(console);
    booted
}

fn boots(qemu: &mut Child, console: &Path) -> Result<bool> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if says_ready(console) {
            return Ok(true);
        }
        if Instant::now() > deadline || qemu.try_wait()?.is_some() {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn says_ready(console: &Path) -> bool {
    std::fs::read(console).is_ok_and(|text| String::from_utf8_lossy(&text).contains("GODWIT-GUEST-READY"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_kept_and_that_there_was_none_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("kvm");
        assert!(known_or(&known, || anyhow::bail!("no image")).is_err() && !known.exists());
        assert!(known_or(&known, || Ok(true)).unwrap());
        assert!(known_or(&known, || panic!("it is known")).unwrap());
    }
}
