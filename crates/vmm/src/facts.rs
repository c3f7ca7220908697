//! What this host's QEMU can do, and whether that is enough for a VM.

use crate::command::{PROGRAM, monitor_option};
use crate::error::{VmmError, io_error};
use crate::qemu::UP;
use crate::spec::{Accel, VmSpec};
use godwit_qmp::Qmp;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How often it is looked whether a QEMU that does not listen is still there.
const LOOK: Duration = Duration::from_secs(2);

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 7 of 7.2.
    pub major: u32,
    /// 2 of 7.2.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a host can do.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// QEMU's version.
    pub version: Version,
    /// Machine types, aliases not among them.
    pub machines: Vec<String>,
    /// Aliases: `q35` and what it stands for.
    pub aliases: BTreeMap<String, String>,
    /// Whether guests run by hardware.
    pub kvm: bool,
    /// What CPUs guests can be given, by how they are executed.
    pub cpus: BTreeMap<Accel, Cpus>,
}

/// CPUs that guests can be given.
#[derive(Clone, Debug, Default)]
pub struct Cpus {
    /// Models, and what each has and this host has not: QEMU refuses to start with that.
    pub models: BTreeMap<String, Vec<String>>,
    /// Features that can be had, in the spelling of [`Cpus::spelling`].
    pub features: BTreeSet<String>,
    /// All that can be set of a CPU, features or not, in the same spelling.
    pub properties: BTreeSet<String>,
}

/// Switches of a CPU that no processor has or lacks. Enlightenments (`hv-`) are the kernel's, and QEMU says of them only at a start.
const NOT_FEATURES: [&str; 7] = [
    "check",
    "enforce",
    "host-cache-info",
    "host-phys-bits",
    "kvm-no-smi-migration",
    "migratable",
    "start-powered-off",
];

impl Cpus {
    /// A name as it is kept: QEMU takes `sse4.1`, `sse4_1` and `sse4-1` for the same.
    fn spelling(name: &str) -> String {
        name.replace(['_', '.'], "-")
    }

    /// What of a CPU cannot be had here, and why.
    fn missing(&self, cpu: &str, version: Version) -> Vec<(String, &'static str)> {
        const OTHER_QEMU: &str = "install a QEMU that does, or move to a host with one";
        const OTHER_CPU: &str = "choose a host whose CPU has it";
        let mut parts = cpu.split(',');
        let model = parts.next().unwrap_or_default();
        let mut missing = vec![];
        // As QEMU: the last word counts, and `+` and `-` count more than `=`.
        let (mut set, mut signed) = (BTreeMap::new(), BTreeMap::new());
        for part in parts {
            let (name, on) = match (part.strip_prefix('+'), part.strip_prefix('-'), part.split_once('=')) {
                (Some(name), ..) => (name, true),
                (_, Some(name), _) => (name, false),
                (.., Some((name, value))) => (name, matches!(value, "on" | "yes" | "true" | "y")),
                (.., None) => (part, true),
            };
            let to = if part.starts_with(['+', '-']) { &mut signed } else { &mut set };
            to.insert(Self::spelling(name), on);
        }
        set.extend(signed);
        for (name, on) in &set {
            if !self.properties.contains(name) {
                missing.push((format!("QEMU {version} here knows no CPU feature `{name}`"), OTHER_QEMU));
            } else if *on && !self.features.contains(name) && !is_switch(name) {
                missing.push((format!("CPU feature `{name}` cannot be had here"), OTHER_CPU));
            }
        }
        let Some(lacking) = self.models.get(model) else {
            missing.push((format!("QEMU {version} here knows no CPU model `{model}`"), OTHER_QEMU));
            return missing;
        };
        let lacking = lacking.iter().filter(|feature| !set.contains_key(&Self::spelling(feature)));
        missing.extend(
            lacking
                .map(|f| (format!("CPU model `{model}` has the feature `{f}`, which cannot be had here"), OTHER_CPU)),
        );
        missing
    }
}

fn is_switch(name: &str) -> bool {
    NOT_FEATURES.contains(&name) || name.starts_with("hv-")
}

/// Something that a VM needs and this host has not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// `machine`, `cpu`, `accel` or `vm`.
    pub kind: &'static str,
    /// What is missing.
    pub message: String,
    /// What to do.
    pub remedy: String,
}

impl HostFacts {
    /// Asks a QEMU that runs nothing. `run` is for its socket. Takes a fraction of a second.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn ask(run: &Path) -> Result<Self, VmmError> {
        let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        let mut facts = Self::ask_with(run, Accel::Tcg)?;
        if kvm && let Ok(by_hardware) = Self::ask_with(run, Accel::Kvm) {
            facts.kvm = true;
            facts.cpus.extend(by_hardware.cpus);
        }
        Ok(facts)
    }

    fn ask_with(run: &Path, accel: Accel) -> Result<Self, VmmError> {
        let socket = run.join("facts.sock");
        let _ = std::fs::remove_file(&socket);
        let mut child = Command::new(PROGRAM)
            .args(["-machine", "none", "-accel", accel.name(), "-nodefaults", "-display", "none", "-S"])
            .arg("-qmp")
            .arg(monitor_option(&socket))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(io_error("start", Path::new(PROGRAM)))?;
        let began = Instant::now();
        let facts = loop {
            match Qmp::connect(&socket, LOOK) {
                Ok(qmp) => break read(&qmp, accel),
                // One that has ended, as where the kernel's module is there and does not work, will not answer.
                Err(error) if began.elapsed() > UP || !matches!(child.try_wait(), Ok(None)) => break Err(error.into()),
                Err(_) => {}
            }
        };
        let _ = child.kill();
        let _ = child.wait();
        let _ = std::fs::remove_file(&socket);
        facts
    }

    /// The versioned machine type that a name stands for.
    #[must_use]
    pub fn resolve(&self, machine: &str) -> Option<String> {
        let name = self.aliases.get(machine).map_or(machine, String::as_str);
        self.machines.iter().any(|m| m == name).then(|| name.to_owned())
    }
}

fn read(qmp: &Qmp, accel: Accel) -> Result<HostFacts, VmmError> {
    let version = qmp.execute("query-version", Value::Null)?;
    let part = |key: &str| u32::try_from(version["qemu"][key].as_u64().unwrap_or(0)).unwrap_or(0);
    let answer = qmp.execute("query-machines", Value::Null)?;
    let (mut machines, mut aliases) = (vec![], BTreeMap::new());
    for machine in answer.as_array().into_iter().flatten() {
        let Some(name) = machine["name"].as_str() else { continue };
        machines.push(name.to_owned());
        if let Some(alias) = machine["alias"].as_str() {
            aliases.insert(alias.to_owned(), name.to_owned());
        }
    }
    machines.sort_unstable();
    let definitions = qmp.execute("query-cpu-definitions", Value::Null)?;
    let models = definitions.as_array().into_iter().flatten().filter_map(|definition| {
        let lacking = definition["unavailable-features"].as_array().into_iter().flatten();
        let mut lacking: Vec<_> = lacking.filter_map(|f| f.as_str().map(str::to_owned)).collect();
        lacking.sort_unstable();
        Some((definition["name"].as_str()?.to_owned(), lacking))
    });
    let models = models.collect();
    let max = qmp.execute("query-cpu-model-expansion", json!({"type": "full", "model": {"name": "max"}}))?;
    let all = || max["model"]["props"].as_object().into_iter().flatten();
    let features = all().filter(|(_, on)| on == &&Value::Bool(true)).map(|(name, _)| Cpus::spelling(name)).collect();
    let properties = all().map(|(name, _)| Cpus::spelling(name)).collect();
    Ok(HostFacts {
        version: Version { major: part("major"), minor: part("minor") },
        machines,
        aliases,
        kvm: accel == Accel::Kvm,
        cpus: BTreeMap::from([(accel, Cpus { models, features, properties })]),
    })
}

/// What a VM needs and this host has not.
#[must_use]
pub fn check(spec: &VmSpec, facts: &HostFacts) -> Vec<Unmet> {
    let mut unmet = vec![];
    let mut add = |kind, message: String, remedy: &str| unmet.push(Unmet { kind, message, remedy: remedy.into() });
    if let Err(why) = spec.check(facts.version) {
        add("vm", why, "create the VM with another specification");
    }
    if facts.resolve(&spec.machine).is_none() {
        add(
            "machine",
            format!("QEMU {} here has no machine type `{}`", facts.version, spec.machine),
            "install a QEMU that has it, or move to a host with one",
        );
    }
    if spec.accel == Accel::Kvm && !facts.kvm {
        add(
            "accel",
            "the VM runs under KVM, which does not work here".into(),
            "enable virtualisation, or choose another host",
        );
    }
    let Some(cpus) = facts.cpus.get(&spec.accel) else { return unmet };
    for (message, remedy) in cpus.missing(&spec.cpu, facts.version) {
        unmet.push(Unmet { kind: "cpu", message, remedy: remedy.into() });
    }
    unmet
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(cpu: &str) -> Vec<String> {
        let cpus = Cpus {
            models: BTreeMap::from([("small".into(), vec![]), ("big".into(), vec!["avx".into(), "x_y".into()])]),
            features: ["sse4-1"].map(str::to_owned).into(),
            properties: ["sse4-1", "avx", "x-y", "enforce", "hv-time", "level"].map(str::to_owned).into(),
        };
        let all = cpus.missing(cpu, Version { major: 7, minor: 2 });
        all.into_iter().map(|(message, _)| message.split('`').nth(1).unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn a_missing_feature_is_named_however_it_is_asked_for() {
        for cpu in ["small,+avx", "small,avx=on", "small,avx", "small,avx=off,+avx", "small,+avx,avx=off"] {
            assert_eq!(missing(cpu), ["avx"], "{cpu}");
        }
        for cpu in ["small,-avx", "small,avx=off", "small,+avx,-avx", "small,avx=on,-avx"] {
            assert_eq!(missing(cpu), [""; 0], "{cpu}");
        }
        for cpu in ["small,+sse4.1", "small,sse4_1=on,enforce", "small,hv_time=on,level=13"] {
            assert_eq!(missing(cpu), [""; 0], "{cpu}");
        }
        assert_eq!(
            missing("small,nothing=off"),
            ["nothing"],
            "QEMU refuses what it does not know, also when it is off"
        );
    }

    #[test]
    fn what_a_model_has_and_the_host_lacks_is_named_unless_it_is_switched_off() {
        let all = missing("big");
        assert_eq!(all, ["big", "big"], "the message begins with the model");
        assert_eq!(missing("big,-avx,x-y=off"), [""; 0]);
        assert_eq!(missing("none"), ["none"]);
    }
}
