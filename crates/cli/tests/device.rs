//! A volume on a block device of its host, from the command line to the device. Needs loop devices; skipped, aloud, without.

use crate::common::pair::{Pair, can_run};
use serde_json::json;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;

struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn write(pair: &Pair, host: &str, what: &str) {
    let vms = std::fs::read_dir(pair.path(&format!("run-{host}/vms"))).unwrap();
    let vm = vms.map(|vm| vm.unwrap().path()).find(|vm| vm.join("disk0.sock").exists()).unwrap();
    let uri = format!("nbd+unix:///root?socket={}", vm.join("disk0.sock").display());
    let output = Command::new("qemu-io").args(["-f", "raw", "-c", what, &uri]).output().unwrap();
    assert!(output.status.success(), "{what}: {output:?}");
}

fn device(file: &PathBuf, contents: &[u8]) -> Option<Loop> {
    std::fs::write(file, contents).unwrap();
    let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
    made.status.success().then(|| Loop(String::from_utf8(made.stdout).unwrap().trim().to_owned()))
}

#[test]
fn a_vms_disk_lies_on_a_block_device_and_moves_to_a_host_where_it_lies_in_a_file_and_back() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::new("device");
    let Some(device) = device(&pair.path("under"), &vec![0xee; 16 << 20]) else {
        eprintln!("SKIPPED: this needs loop devices");
        return;
    };
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    std::fs::write(pair.path("disk"), vec![0x5a; 4 << 20]).unwrap();
    let spec = json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2"});
    std::fs::write(pair.path("spec.json"), spec.to_string()).unwrap();
    let create = |pair: &Pair, more: &str| {
        let disk = format!("root=16M,device={}{more},from={}", device.0, pair.path("disk").display());
        let file = pair.path("spec.json");
        pair.godwit(&["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--disk", &disk, "--start"])
    };
    // Somebody's file system; then nobody's.
    assert!(Command::new("mkfs.ext4").args(["-q", &device.0]).status().unwrap().success());
    let (code, _, said) = create(&pair, "");
    assert!(code == 1 && said.contains("holds ext4; say overwrite"), "{said}");
    let (code, _, said) = create(&pair, ",overwrite");
    assert_eq!(code, 0, "{said}{}", pair.logs());
    let mut new = vec![0x5a; 4 << 20];
    new.resize(16 << 20, 0);
    let held = |pair: &Pair| {
        // Past what the kernel still has in memory of the device.
        assert!(Command::new("blockdev").args(["--flushbufs", &device.0]).status().unwrap().success());
        std::fs::read(pair.path("under")).unwrap()
    };
    let data = std::fs::read_link(pair.path("a/volumes/3/data")).or(std::fs::read_link(pair.path("a/volumes/2/data")));
    assert_eq!(data.unwrap(), PathBuf::from(&device.0));
    assert!(held(&pair) == new);
    // Nobody else gets it.
    let spec = pair.path("spec.json");
    let disk = format!("two=16M,device={},overwrite", device.0);
    let words = ["vm", "create", "two", "--at", "a", "--file", spec.to_str().unwrap(), "--disk", &disk];
    let (code, _, said) = pair.godwit(&words);
    assert!(code == 1 && said.contains("holds the volume of"), "{said}");

    // There and back, with what was written at each.
    write(&pair, "a", "write -P 0x11 6M 64k");
    pair.ok(&["move", "web", "--to", "b"]);
    new[6 << 20..(6 << 20) + 65536].fill(0x11);
    assert!(std::fs::read(pair.path("b/volumes/2/data")).unwrap() == new);
    write(&pair, "b", "write -P 0x22 7M 64k");
    write(&pair, "b", "discard 0 1M");
    pair.ok(&["move", "web", "--to", "a"]);
    new[7 << 20..(7 << 20) + 65536].fill(0x22);
    new[..1 << 20].fill(0);
    assert!(held(&pair) == new);
    // Sparse is what is exported of it.
    pair.ok(&["volume", "export", "--volume", "root", "root.qcow2"]);
    let raw = pair.path("raw");
    let words = ["convert", "-O", "raw", pair.path("images/root.qcow2").to_str().unwrap(), raw.to_str().unwrap()]
        .map(str::to_owned);
    assert!(Command::new("qemu-img").args(words).status().unwrap().success());
    assert!(std::fs::read(raw).unwrap() == new);

    // What was the volume's stays on the device when the VM goes.
    pair.ok(&["vm", "stop", "web", "--force"]);
    pair.until("it is off", || pair.json(&["vm", "show", "web"])["run"] == "off");
    pair.ok(&["vm", "rm", "web"]);
    assert!(!pair.path("a/volumes/2").exists());
    assert!(held(&pair) == new);

    // A device is an image, too, though it has no length as files have one.
    let disk = format!("copy=16M,from={}", device.0);
    let spec = pair.path("spec.json");
    pair.ok(&["vm", "create", "copy", "--at", "a", "--file", spec.to_str().unwrap(), "--disk", &disk]);
    let volumes = std::fs::read_dir(pair.path("a/volumes")).unwrap();
    let volumes: Vec<_> = volumes.map(|entry| entry.unwrap().path().join("data")).collect();
    assert_eq!(volumes.len(), 1, "{volumes:?}");
    assert!(std::fs::read(&volumes[0]).unwrap() == new);
}

#[test]
fn a_move_puts_a_volume_on_a_device_of_its_destination_and_on_none_that_is_too_small_in_use_or_somebodys() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_a_disk("place");
    let made = (device(&pair.path("under"), &vec![0xee; 16 << 20]), device(&pair.path("little"), &vec![0; 8 << 20]));
    let (Some(device), Some(little)) = made else {
        eprintln!("SKIPPED: this needs loop devices");
        return;
    };
    let held = |pair: &Pair| {
        assert!(Command::new("blockdev").args(["--flushbufs", &device.0]).status().unwrap().success());
        std::fs::read(pair.path("under")).unwrap()
    };
    let moved = |pair: &Pair, place: &str, more: &[&str]| {
        pair.godwit(&[&["move", "web", "--to", "b", "--place", place], more].concat())
    };
    let on_device = format!("root,device={}", device.0);

    // What is refused is refused before anything is made, and by a dry run, too.
    let refused = |pair: &Pair, place: &str, why: &str| {
        for more in [&[][..], &["--dry-run"]] {
            let (code, out, said) = moved(pair, place, more);
            assert!(code != 0 && format!("{out}{said}").contains(why), "{place}: {out}{said}");
        }
        assert!(!pair.path("b/volumes/1").exists(), "{place}");
        assert_eq!(pair.json(&["vm", "show", "web"])["run"], "running");
    };
    refused(&pair, &format!("root,device={}", little.0), "has 8388608 bytes, and the volume 16777216");
    refused(&pair, "root,device=/dev/null", "it is no block device");
    refused(&pair, "root,device=/dev/nosuch", "No such file");
    refused(&pair, "data,device=/dev/nosuch", "`data`");
    refused(&pair, "root,device=nosuch", "no path of a device");
    assert!(Command::new("mkfs.ext4").args(["-q", &device.0]).status().unwrap().success());
    let before = held(&pair);
    refused(&pair, &on_device, "holds ext4; say overwrite");
    let exclusively = rustix::fs::OFlags::EXCL.bits().cast_signed();
    let user = std::fs::OpenOptions::new().read(true).custom_flags(exclusively).open(&device.0).unwrap();
    refused(&pair, &format!("{on_device},overwrite"), "in use by the system or another process");
    drop(user);
    assert!(held(&pair) == before, "nothing was touched");

    // A move that fails leaves the place for the next try, over a restart of the node that has made it.
    std::fs::write(pair.path("points/copy-disk"), "hold").unwrap();
    let overwrite = format!("{on_device},overwrite");
    let (code, _, said) = moved(&pair, &overwrite, &["--detach"]);
    assert_eq!(code, 0, "{said}{}", pair.logs());
    pair.until("blocks are copied", || pair.path("points/copy-disk.reached").exists());
    assert_eq!(std::fs::read_link(pair.path("b/volumes/1/data")).unwrap(), PathBuf::from(&device.0));
    assert!(held(&pair)[8 << 20..].iter().all(|byte| *byte == 0), "zeroed: nothing comes there");
    pair.ok(&["move", "web", "--cancel"]);
    std::fs::remove_file(pair.path("points/copy-disk")).unwrap();
    pair.until("it is cancelled", || pair.json(&["move", "ls"])[0]["progress"]["outcome"] == "cancelled");
    pair.kill_node("b");
    pair.start_node("b");
    let (code, _, said) = moved(&pair, &format!("root,device={}", little.0), &[]);
    assert!(code != 0 && said.contains("has a replica of `root` already"), "{said}");
    let (code, _, said) = moved(&pair, &on_device, &[]);
    assert_eq!(code, 0, "{said}{}", pair.logs());
    let mut new = vec![0x5a; 8 << 20];
    new.resize(16 << 20, 0);
    assert!(held(&pair) == new);

    // What is written there is there; it goes back to a file, and comes to the device again by itself.
    write(&pair, "b", "write -P 0x11 6M 64k");
    pair.ok(&["move", "web", "--to", "a"]);
    new[6 << 20..(6 << 20) + 65536].fill(0x11);
    assert!(std::fs::read(pair.path("a/volumes/1/data")).unwrap() == new);
    write(&pair, "a", "discard 0 1M");
    pair.ok(&["move", "web", "--to", "b"]);
    new[..1 << 20].fill(0);
    assert!(held(&pair) == new);

    // Another volume does not get it.
    let spec = json!({
        "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
        "disks": [{"volume": "second", "size": 8 << 20}],
    });
    pair.create("two", &spec);
    let place = format!("second,device={},overwrite", device.0);
    let (code, _, said) = pair.godwit(&["move", "two", "--to", "b", "--place", &place]);
    assert!(code != 0 && said.contains("in use by the system or another process"), "{said}");
}
