//! What this host's QEMU can do, and whether that is enough for a VM.

use crate::command::PROGRAM;
use crate::error::{VmmError, io_error};
use crate::spec::{Accel, VmSpec};
use godwit_qmp::Qmp;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

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
    /// Models. A feature that a model has and the host has not is left out by QEMU, on every host of this kind.
    pub models: BTreeSet<String>,
    /// Features.
    pub features: BTreeSet<String>,
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
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(io_error("start", Path::new(PROGRAM)))?;
        let facts =
            Qmp::connect(&socket, Duration::from_secs(10)).map_err(VmmError::from).and_then(|qmp| read(&qmp, accel));
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
    let cpu_models = definitions.as_array().into_iter().flatten();
    let cpu_models = cpu_models.filter_map(|d| d["name"].as_str().map(str::to_owned)).collect();
    let max = qmp.execute("query-cpu-model-expansion", json!({"type": "full", "model": {"name": "max"}}))?;
    let props = max["model"]["props"].as_object();
    let cpu_features = props.into_iter().flatten().filter(|(_, on)| on == &&Value::Bool(true));
    let cpu_features = cpu_features.map(|(name, _)| name.replace('_', "-")).collect();
    Ok(HostFacts {
        version: Version { major: part("major"), minor: part("minor") },
        machines,
        aliases,
        kvm: accel == Accel::Kvm,
        cpus: BTreeMap::from([(accel, Cpus { models: cpu_models, features: cpu_features })]),
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
    let mut add = |message: String, remedy: &str| unmet.push(Unmet { kind: "cpu", message, remedy: remedy.into() });
    let mut parts = spec.cpu.split(',');
    let model = parts.next().unwrap_or_default();
    if !cpus.models.contains(model) {
        add(
            format!("QEMU {} here knows no CPU model `{model}`", facts.version),
            "install a QEMU that does, or move to a host with one",
        );
    }
    for feature in parts.filter_map(|p| p.strip_prefix('+')) {
        if !cpus.features.contains(feature) && !cpus.features.contains(&feature.replace(['_', '.'], "-")) {
            add(format!("CPU feature `{feature}` cannot be had here"), "choose a host whose CPU has it");
        }
    }
    unmet
}
