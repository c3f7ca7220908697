//! `godwit stream` on a small stream made by hand.

#[allow(dead_code, reason = "shared with the codec's own tests")]
#[path = "../../memory/tests/common/mod.rs"]
mod common;

use self::common::{PAGE, Stream};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn godwit(folder: &Path, words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_godwit"))
        .current_dir(folder)
        .arg("stream")
        .args(words.split(' '))
        .output()
        .unwrap()
}

/// A guest of 64 pages, 40 of which are those of a disk, and some differ from each other by little.
fn recorded(folder: &Path) -> (Vec<u8>, Vec<u8>) {
    let mut x = 1u64;
    let mut noise = |_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as u8
    };
    let disk: Vec<u8> = (0..40 * PAGE).map(&mut noise).collect();
    let other: Vec<u8> = (0..8 * PAGE).map(&mut noise).collect();
    let mut stream = Stream::begin(&[("pc.ram", 64)]);
    stream.part_of(0, &disk);
    stream.part_of(40, &other);
    stream.part_of(40, &other);
    let raw = stream.end(&[(0, 63, None)]);
    std::fs::write(folder.join("raw"), &raw).unwrap();
    std::fs::write(folder.join("disk"), &disk).unwrap();
    (raw, disk)
}

#[test]
fn every_codec_of_the_command_line_gives_back_the_file_that_went_in() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, _) = recorded(folder.path());
    let mut sizes = vec![];
    for (codec, disk) in
        [("plain", ""), ("zstd", ""), ("full", " --disk disk"), ("cloudnet", ""), ("cloudnet-zstd", " --cache 1M")]
    {
        let encoded = godwit(folder.path(), &format!("encode raw small --codec {codec}{disk} --stats json"));
        assert!(encoded.status.success(), "{codec}: {encoded:?}");
        let stats: Value = serde_json::from_slice(&encoded.stdout).unwrap();
        assert_eq!(stats["raw_bytes"], raw.len(), "{stats}");
        sizes.push(stats["wire_bytes"].as_u64().unwrap());
        assert_eq!(std::fs::metadata(folder.path().join("small")).unwrap().len(), *sizes.last().unwrap());
        let disk = if codec == "full" { " --disk disk" } else { "" };
        let decoded = godwit(folder.path(), &format!("decode small back{disk}"));
        assert!(decoded.status.success(), "{codec}: {decoded:?}");
        assert_eq!(std::fs::read(folder.path().join("back")).unwrap(), raw, "{codec}");
    }
    let [plain, zstd, full, cloudnet, cloudnet_zstd] = sizes[..] else { panic!() };
    assert_eq!(plain, raw.len() as u64);
    // 48 pages of noise are 48 pages of noise; 40 of them are on the disk.
    assert!((48 * 4096..plain).contains(&zstd) && (48 * 4096..plain).contains(&cloudnet), "{sizes:?}");
    assert!((8 * 4096..9 * 4096).contains(&full) && cloudnet_zstd < plain, "{sizes:?}");
}

#[test]
fn a_stream_is_packed_by_each_window_that_moves_have() {
    let folder = tempfile::tempdir().unwrap();
    let noise = recorded(folder.path()).1;
    let mut stream = Stream::begin(&[("pc.ram", 8192)]);
    // What lies apart from its like by 1.25 MiB, and by 20: too far for a mebibyte, and for 16.
    let (one, other, filler) = (&noise[..32 * PAGE], &noise[32 * PAGE..], |n: usize| {
        let mut x = n as u64;
        let next = |_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) as u8
        };
        (0..n * PAGE).map(next).collect::<Vec<u8>>()
    });
    let mut first = 0;
    for part in [one, &filler(320), one, other, &filler(5000), other] {
        stream.part_of(first, part);
        first += (part.len() / PAGE) as u64;
    }
    let raw = stream.end(&[(0, 8191, None)]);
    std::fs::write(folder.path().join("raw"), &raw).unwrap();
    let size = |reach: &str| {
        let encoded = godwit(folder.path(), &format!("encode raw small --codec zstd{reach} --stats json"));
        assert!(encoded.status.success(), "{encoded:?}");
        let decoded = godwit(folder.path(), "decode small back");
        assert!(decoded.status.success(), "{decoded:?}");
        assert!(std::fs::read(folder.path().join("back")).unwrap() == raw, "{reach}");
        let stats: Value = serde_json::from_slice(&encoded.stdout).unwrap();
        // All of it is pages that zstd is given.
        assert!(stats["given_bytes"].as_u64().unwrap() >= first * PAGE as u64, "{stats}");
        stats["wire_bytes"].as_u64().unwrap()
    };
    let [far, middle, near] = [" --reach far", " --reach middle", " --reach near"].map(size);
    assert_eq!(size(""), far);
    assert!(middle > far + (other.len() * 3 / 4) as u64, "{far} {middle}");
    assert!(near > middle + (one.len() * 3 / 4) as u64, "{middle} {near}");
}

#[test]
fn what_cannot_be_done_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut disk) = recorded(folder.path());
    for (words, said) in [
        ("encode disk small", "QEVM"),
        ("encode raw small --codec zstd --disk disk", "has no use for disks"),
        ("encode raw small --codec gzip", "there are plain, zstd"),
        ("decode disk back", "no migration stream"),
        ("encode nothing small", "nothing"),
    ] {
        let output = godwit(folder.path(), words);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(said), "{words}: {error}");
    }
    assert!(godwit(folder.path(), "encode raw small --disk disk").status.success());
    disk[5000] ^= 1;
    std::fs::write(folder.path().join("disk"), &disk).unwrap();
    let output = godwit(folder.path(), "decode small back --disk disk");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("give the disks as they were"), "{error}");
}

#[test]
fn a_recording_is_whole_whatever_fails_and_also_where_it_is_named_twice() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, disk) = recorded(folder.path());
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    // What is no stream takes nothing of what is there.
    for words in ["encode disk raw", "decode disk raw", "encode disk disk", "decode disk disk"] {
        assert!(!godwit(folder.path(), words).status.success(), "{words}");
        assert!(read("raw") == raw && read("disk") == disk, "{words}");
    }
    assert!(godwit(folder.path(), "encode raw raw").status.success());
    assert!(read("raw") != raw);
    assert!(godwit(folder.path(), "decode raw raw").status.success());
    assert_eq!(read("raw"), raw);
    // A pipe, or a device, is what is written to.
    assert!(godwit(folder.path(), "encode raw /dev/null").status.success());
    let mut left: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["disk", "raw"]);
}
