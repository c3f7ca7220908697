//! `godwit predict`, offline: no controller, no credentials.

use godwit_predict::log::Header;
use godwit_predict::{LogWriter, Observed, Pages};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The example of Akoush et al.: 1,024 MiB over 1 Gbit/s, of which a move gets 935 Mbit/s.
const PAPERS: &str = "--memory 1024MiB --rate 935.335Mbit --pre 3.8s --post 314ms";

fn godwit(words: &str) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command.env_clear().arg("predict").args(words.split_whitespace());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn json(words: &str) -> Value {
    let (code, said, error) = godwit(&format!("{words} --json"));
    assert_eq!(code, 0, "{words}: {error}");
    serde_json::from_str(&said).unwrap()
}

fn refused(words: &str, because: &str) {
    let (code, said, error) = godwit(words);
    assert!(code != 0 && said.is_empty() && error.contains(because), "{words}: {code} {said} {error}");
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn avg_says_time_downtime_bytes_and_rounds_and_nothing_else() {
    let moved = json(&format!("{PAPERS} --dirty-rate 10000 --rules xen --model avg"));
    let mut found = keys(&moved);
    found.sort_unstable();
    assert_eq!(found, ["bytes", "downtime_ms", "rounds", "total_s"]);
    let number = |value: &Value| value.as_f64().unwrap();
    assert!((13.3..50.0).contains(&number(&moved["total_s"])), "{moved}");
    assert!((314.0..330.0).contains(&number(&moved["downtime_ms"])), "{moved}");
    let rounds = moved["rounds"].as_array().unwrap();
    let sent: u64 = rounds.iter().map(|round| round["sent"].as_u64().unwrap()).sum();
    assert_eq!((rounds[0]["sent"].as_u64(), sent * 4096), (Some(262_144), moved["bytes"].as_u64().unwrap()));
    let seconds: f64 = rounds.iter().map(|round| number(&round["seconds"])).sum();
    assert!((seconds + 4.114 - number(&moved["total_s"])).abs() < 1e-6);
}

#[test]
fn bounds_are_those_of_table_i() {
    for words in [PAPERS.to_owned(), format!("{PAPERS} --rules xen --dirty-rate 20000 --model avg")] {
        let bounds = json(&format!("{words} --bounds"));
        assert_eq!(keys(&bounds).len(), 2);
        let at = |key: &str, end: &str| bounds[key][end].as_f64().unwrap();
        let cells =
            [at("total_s", "lower"), at("total_s", "upper"), at("downtime_ms", "lower"), at("downtime_ms", "upper")];
        assert_eq!(cells.map(|cell| format!("{cell:.1}")), ["13.3", "50.0", "314.0", "9497.8"]);
    }
    let (_, table, _) = godwit(&format!("{PAPERS} --bounds"));
    let cells: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(cells[1], ["total", "13.3", "s", "50.0", "s"], "{table}");
    assert_eq!(cells[2], ["downtime", "314.0", "ms", "9497.8", "ms"], "{table}");
}

#[test]
fn people_get_a_table_and_the_reason_for_the_stop() {
    let (code, said, _) = godwit(&format!("{PAPERS} --dirty-rate 40000 --rules xen"));
    assert_eq!(code, 0);
    for part in ["total ", "downtime ", "of pages", "the guest is stopped since", "ROUND", "SKIPPED", "\n stop  "] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn the_rules_make_a_difference() {
    let total = |rules: &str| {
        let moved = json(&format!("{PAPERS} --dirty-rate 25000 --pattern evenly --working-set 128MiB --rules {rules}"));
        moved["rounds"].as_array().unwrap().len()
    };
    let rounds = ["xen", "godwit", "qemu --downtime-limit 2s"].map(total);
    assert!(rounds[0] > rounds[1] && rounds[1] > rounds[2], "{rounds:?}");
}

#[test]
fn what_does_not_fit_together_is_refused_with_what_to_do() {
    refused("--memory 1G", "--rate");
    refused("--rate 1G", "--memory");
    refused("--memory 1G --rate 1G", "--dirty-rate");
    refused("--memory 1G --rate 1G --dirty-rate 1 --model hist", "--log");
    refused("--memory 0 --rate 1G --dirty-rate 1", "no memory");
    refused("--memory 1G --rate 1G --pre 5", "3.8s or 314ms");
    refused("--memory 1G --rate 1G --bounds --rules qemu", "no upper bound");
    refused("--memory 1G --rate 100M --dirty-rate 9000 --rules qemu", "never ends");
    refused("--fleet x", "--deadline");
    refused("--log /nowhere/log --rate 1G", "/nowhere/log");
}

fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

/// A guest of 64 MiB that dirties 4,000 pages a second for a minute, half of them changed, and rests for a minute.
fn log() -> Vec<u8> {
    let header = Header {
        observed: Observed::Both,
        pages: Pages(16_384),
        interval: Duration::from_millis(500),
        start: Duration::from_secs(1_790_000_000),
    };
    let (mut writer, mut bytes) = LogWriter::new(header).unwrap();
    for i in 0..240 {
        let (mut written, mut changed) = (vec![0_u64; 256], vec![0_u64; 256]);
        if i < 120 {
            for page in (0..2000).map(|n| (i * 2000 + n) % 16_384) {
                written[page / 64] |= 1 << (page % 64);
                changed[page / 64] |= ((page % 2) as u64) << (page % 64);
            }
        }
        bytes.extend(writer.frame(&written, &changed));
    }
    bytes
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn hist_moves_a_guest_as_its_log_says_and_finds_the_best_moment() {
    let (_folder, file) = file("web.log", &log());
    let link = format!("--log {} --rate 100Mbit --rules xen", path(&file));
    let at = |words: &str| json(&format!("{link} {words}"))["total_s"].as_f64().unwrap();
    let (busy, changed, idle) = (at("--model hist"), at("--changed"), at("--at 65s"));
    assert!(busy > changed && changed > idle, "{busy} {changed} {idle}");

    let found = json(&format!("{link} --when"));
    let best = &found["best"];
    assert!(best["at_s"].as_f64().unwrap() >= 55.0 && best["total_s"].as_f64().unwrap() <= idle + 0.1, "{found}");
    assert_eq!(best["at_unix_s"].as_f64().unwrap() - best["at_s"].as_f64().unwrap(), 1_790_000_000.0);
    assert!(found["mean"]["downtime_ms"].as_f64() > best["downtime_ms"].as_f64(), "{found}");
    let (_, table, _) = godwit(&format!("{link} --when"));
    assert!(table.contains("best") && table.contains("worst"), "{table}");

    refused(&format!("{link} --memory 1G"), "a guest of 64.0 MiB, not of 1.0 GiB");
    refused(&format!("{link} --model avg"), "--dirty-rate");
    let (code, _, error) = godwit(&format!("--log {} --rate 1Mbit", path(&file)));
    assert!(code == 0 && error.contains("outlasts the log"), "{error}");
}

#[test]
fn a_log_that_was_cut_off_is_used_as_far_as_it_goes_and_a_broken_one_is_not() {
    let mut bytes = log();
    bytes.truncate(bytes.len() / 2);
    let (_folder, cut) = file("cut.log", &bytes);
    let (code, _, error) = godwit(&format!("--log {} --rate 100M", path(&cut)));
    assert!(code == 0 && error.contains("no whole interval"), "{error}");
    bytes[4] = 9;
    let (_folder, newer) = file("newer.log", &bytes);
    refused(&format!("--log {} --rate 100M", path(&newer)), "version 9");
    let (_folder, none) = file("none.log", b"hello");
    refused(&format!("--log {} --rate 100M", path(&none)), "GWDL");
}

#[test]
fn a_fleet_is_planned_from_toml_and_from_json() {
    let toml = "[[link]]\nto = 'texas'\nrate_mbit = 100\n\
                [[vm]]\nname = 'web'\nmemory_mib = 1024\ndirty_pages_per_s = 500\n\
                [[vm]]\nname = 'db'\nmemory_mib = 4096\ndisk_gib = 20\n";
    let (_folder, file_toml) = file("fleet.toml", toml.as_bytes());
    let plan = json(&format!("--fleet {} --deadline 10m", path(&file_toml)));
    assert_eq!((&plan["in_time"], &plan["late"], &plan["deadline_s"]), (&json!(1), &json!(1), &json!(600.0)), "{plan}");
    assert_eq!((&plan["moves"][0]["vm"], &plan["moves"][0]["strategy"]), (&json!("web"), &json!("mirror")));
    let same = json!({
        "link": [{"to": "texas", "rate_mbit": 100}],
        "vm": [{"name": "web", "memory_mib": 1024, "dirty_pages_per_s": 500}, {"name": "db", "memory_mib": 4096, "disk_gib": 20}],
    });
    let (_folder, file_json) = file("fleet.json", same.to_string().as_bytes());
    assert_eq!(json(&format!("--fleet {} --deadline 600s", path(&file_json))), plan);
    let (_, said, _) = godwit(&format!("--fleet {} --deadline 10m", path(&file_toml)));
    assert!(said.contains("1 of 2 VMs are away within 600.0 s; no plan has more than 1 away by then"), "{said}");

    let (_folder, typo) = file("typo.toml", toml.replace("memory_mib", "memory_mb").as_bytes());
    refused(&format!("--fleet {} --deadline 10m", path(&typo)), "memory_mb");
    let (_folder, none) = file("none.toml", b"");
    refused(&format!("--fleet {} --deadline 10m", path(&none)), "[[link]]");
}
