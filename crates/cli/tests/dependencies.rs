//! What comes into the build: licences, sources and yanked versions of everything in `Cargo.lock`, by the rules of `deny.toml`.
//! `make deny` (cargo-deny) checks the same and more; it takes minutes to install, so this is what runs each time.
//!
//! Whether a version was yanked is read from what cargo keeps of the registry's index: as of when it last asked.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The packages that come from elsewhere.
fn packages() -> Vec<Value> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--offline", "--all-features"]);
    // What is built for other systems is not here, and is not asked for.
    cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = cargo.current_dir(workspace()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = metadata["packages"].as_array().unwrap();
    all.iter().filter(|package| !package["source"].is_null()).cloned().collect()
}

fn rules() -> toml::Table {
    std::fs::read_to_string(workspace().join("deny.toml")).unwrap().parse().unwrap()
}

/// The words of a licence expression; `MIT/Apache-2.0` is an old way to say OR.
fn words(expression: &str) -> Vec<String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ").replace(" WITH ", "~");
    spaced.split_whitespace().map(|word| word.replace('~', " WITH ")).collect()
}

/// Whether an expression can be fulfilled with what is allowed: AND binds closer than OR.
fn fulfilled(words: &[String], at: &mut usize, allowed: &BTreeSet<&str>) -> bool {
    let mut any = false;
    loop {
        let mut all = true;
        loop {
            let word = words.get(*at).unwrap_or_else(|| panic!("{words:?} ends too soon"));
            *at += 1;
            let one = if word == "(" {
                let inner = fulfilled(words, at, allowed);
                assert_eq!(words.get(*at).map(String::as_str), Some(")"), "{words:?}");
                *at += 1;
                inner
            } else {
                allowed.contains(word.as_str())
            };
            all &= one;
            if words.get(*at).map(String::as_str) != Some("AND") {
                break;
            }
            *at += 1;
        }
        any |= all;
        if words.get(*at).map(String::as_str) != Some("OR") {
            return any;
        }
        *at += 1;
    }
}

fn may_come(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    fulfilled(&words(expression), &mut 0, allowed)
}

#[test]
fn every_dependency_has_a_licence_and_a_source_that_deny_toml_allows() {
    let rules = rules();
    let allowed = rules["licenses"]["allow"].as_array().unwrap().iter().filter_map(|l| l.as_str()).collect();
    let packages = packages();
    assert!(packages.len() > 100, "{}", packages.len());
    let mut wrong = vec![];
    for package in &packages {
        let name = format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        match package["license"].as_str() {
            Some(licence) if may_come(licence, &allowed) => {}
            licence => wrong.push(format!("{name}: {}", licence.unwrap_or("no licence"))),
        }
        if package["source"] != "registry+https://github.com/rust-lang/crates.io-index" {
            wrong.push(format!("{name} comes from {}", package["source"]));
        }
    }
    assert!(wrong.is_empty(), "not allowed by deny.toml:\n{}", wrong.join("\n"));
}

#[test]
fn an_expression_is_fulfilled_as_spdx_reads_it() {
    let allowed = BTreeSet::from(["MIT", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"]);
    for good in
        ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(GPL-2.0 OR MIT) AND Unicode-3.0", "GPL-2.0 AND ISC OR MIT"]
    {
        assert!(may_come(good, &allowed), "{good}");
    }
    for bad in ["GPL-3.0", "MIT AND GPL-3.0", "Apache-2.0", "MIT AND (GPL-2.0 OR ISC)"] {
        assert!(!may_come(bad, &allowed), "{bad}");
    }
    assert!(may_come("Apache-2.0 WITH LLVM-exception", &allowed));
}

/// Where cargo keeps what it was told of a package, under the index's folder.
fn cached(index: &Path, name: &str) -> PathBuf {
    let name = name.to_lowercase();
    let folder = match name.len() {
        1 | 2 => name.len().to_string(),
        3 => format!("3/{}", &name[..1]),
        _ => format!("{}/{}", &name[..2], &name[2..4]),
    };
    index.join(".cache").join(folder).join(name)
}

#[test]
fn no_version_in_use_is_known_to_have_been_yanked() {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo"))).unwrap();
    let indices: Vec<PathBuf> = std::fs::read_dir(home.join("registry/index"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    let (mut looked_at, mut yanked) = (0, vec![]);
    for package in packages() {
        let (name, version) = (package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        let known = indices.iter().filter_map(|index| std::fs::read(cached(index, name)).ok());
        // A header, then for each version its number and a line of JSON, ended by zeroes.
        let lines: Vec<Value> = known
            .flat_map(|bytes| {
                bytes.split(|b| *b == 0).filter_map(|l| serde_json::from_slice(l).ok()).collect::<Vec<_>>()
            })
            .filter(|line: &Value| line["vers"] == version)
            .collect();
        looked_at += usize::from(!lines.is_empty());
        if lines.iter().any(|line| line["yanked"] == true) {
            yanked.push(format!("{name} {version}"));
        }
    }
    println!("{looked_at} versions looked up in what cargo keeps of the index");
    assert!(yanked.is_empty(), "yanked: {yanked:?}; `cargo update -p NAME` takes another version");
}

/// A file of tests that no program has would be run by nobody, and nobody would notice.
#[test]
fn every_file_of_tests_is_in_a_program() {
    for package in ["cli", "controller"] {
        let folder = workspace().join("crates").join(package);
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse::<toml::Table>().unwrap();
        let programs: Vec<_> =
            manifest["test"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
        let all = std::fs::read_to_string(folder.join("tests/all.rs")).unwrap();
        for file in std::fs::read_dir(folder.join("tests"))
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        {
            let Some(name) = file.strip_suffix(".rs") else { continue };
            let is_run = programs.contains(&name) || all.lines().any(|line| line == format!("mod {name};"));
            assert!(is_run, "no program has {package}/tests/{file}: name it in {package}/tests/all.rs");
        }
    }
}
