//! Is KVM usable here? That `/dev/kvm` opens says little: in a VM that was not given nested virtualisation in full, a
//! guest may start and never get anywhere. So the question is put to a guest: the tiny image is booted under KVM, once
//! for each start of the machine.

use crate::images::GuestImage;
use crate::progress::Progress;
use crate::scenario::Image;
use anyhow::Result;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A tiny guest boots in under two seconds where KVM works.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whether a guest boots under KVM. Without an image, or where KVM cannot be opened, it does not.
#[must_use]
pub fn usable(progress: &Progress) -> bool {
    if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return false;
    }
    let known = crate::sandbox::registry().join("kvm");
    if let Ok(answer) = std::fs::read_to_string(&known) {
        return answer.trim() == "yes";
    }
    progress.note("trying whether KVM is usable");
    let answer = try_boot().unwrap_or(false);
    // Not to be told is only slower.
    let _ = std::fs::write(known, if answer { "yes\n" } else { "no\n" });
    answer
}

fn try_boot() -> Result<bool> {
    let image = GuestImage::find(Image::Tiny)?;
    let console = std::env::temp_dir().join(format!("godwit-kvm-{}", std::process::id()));
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
        .stderr(Stdio::from(File::open("/dev/null")?))
        .spawn()?;
    let deadline = Instant::now() + PATIENCE;
    let booted = loop {
        if says_ready(&console) {
            break true;
        }
        if Instant::now() > deadline || qemu.try_wait()?.is_some() {
            break false;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let _ = qemu.kill();
    let _ = qemu.wait();
    let _ = std::fs::remove_file(&console);
    Ok(booted)
}

fn says_ready(console: &Path) -> bool {
    std::fs::read(console).is_ok_and(|text| String::from_utf8_lossy(&text).contains("GODWIT-GUEST-READY"))
}
