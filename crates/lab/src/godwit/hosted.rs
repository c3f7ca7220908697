//! A VM that Godwit runs: created by the user's command, looked at from outside.

use super::places::{self, Place};
use super::{COMPONENT, Folders, Installation, host_of, lock};
use crate::disks::Monitor;
use crate::fabric::{GUEST_MTU, Site};
use crate::guest::{Accel, GuestSpec, PORTABLE_CPU, await_ready, load_program, tail};
use crate::reboot::{self, Before};
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::host::{Ownership, RunState};
use godwit_api::public;
use godwit_api::vm::{self, Boot, DiskSpec, NicSpec, Store, VmSpec};
use godwit_load::control::Control;
use godwit_units::{VmId, VolumeId};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a VM may take until all agree on where it is: a hand-off that a crash has interrupted is finished by messages that
/// are repeated after seconds, and daemons take moments to start.
pub const SETTLE: Duration = Duration::from_secs(90);

/// How long after the command to start a VM its QEMU may take to have its memory.
const STARTED: Duration = Duration::from_secs(60);

/// How long a host may take to clear away what a VM that has left had there.
const CLEARED: Duration = Duration::from_secs(60);

/// A VM of Godwit's.
#[derive(Debug)]
pub struct Hosted {
    /// What it runs.
    pub spec: GuestSpec,
    /// Its number.
    pub id: VmId,
    /// Its disks' volumes, in order.
    pub volumes: Vec<VolumeId>,
    /// The site that it was last found in.
    pub site: String,
    /// Its RAM there.
    pub ram: File,
    /// Its disks were following it there when it was last looked at: what is at that site is no whole copy.
    pub unfinished: bool,
    installation: Arc<Installation>,
    before_kill: Mutex<Option<Before>>,
}

impl Hosted {
    /// Creates and starts a VM in `site`. Its disks are copied in from [`GuestSpec::disk_file`], which are removed then.
    ///
    /// # Errors
    /// With Godwit's own words, or when there is no QEMU to be seen afterwards.
    pub fn create(installation: &Arc<Installation>, site: &Site, spec: &GuestSpec) -> Result<Self> {
        let name = spec.name.as_str();
        let disks: Vec<_> = (0..spec.disks.len()).map(|disk| spec.disk_file(site, 0, disk)).collect();
        let described = serde_json::to_string(&describe(spec, &disks)?)?;
        let host = host_of(&site.name);
        let create = ["vm", "create", name, "--at", &host, "--file", "-"];
        match &spec.domain {
            None => installation.command_with(create.into_iter().chain(["--start"]), Some(&described))?,
            Some(domain) => {
                let token = installation.token(domain)?;
                let by = [OsStr::new("--api-token-file"), token.as_os_str()];
                installation.command_with(by.into_iter().chain(create.map(OsStr::new)), Some(&described))?;
                import(installation, name, &disks)?;
                installation.command(["vm", "start", name])?
            }
        };
        for disk in &disks {
            std::fs::remove_file(disk).with_context(|| format!("cannot remove {}", disk.display()))?;
        }
        let shown: public::Vm = installation.json(&["vm", "show", name])?;
        let all: Vec<public::Volume> = installation.json(&["volume", "ls"])?;
        let volume = |disk: usize| {
            let wanted = volume_name(name, disk);
            let found = all.iter().find(|v| v.name.as_str() == wanted);
            found.map(|v| v.id).with_context(|| format!("`godwit volume ls` does not show `{wanted}`"))
        };
        let volumes = (0..spec.disks.len()).map(volume).collect::<Result<_>>()?;
        let (place, ram) = started(installation, shown.id, spec)?;
        Ok(Self {
            spec: spec.clone(),
            id: shown.id,
            volumes,
            site: place.site,
            ram,
            unfinished: false,
            installation: installation.clone(),
            before_kill: Mutex::default(),
        })
    }

    /// The installation that runs it.
    #[must_use]
    pub fn installation(&self) -> &Arc<Installation> {
        &self.installation
    }

    /// Waits until the guest says that its load program is up.
    ///
    /// # Errors
    /// With the end of the console when its QEMU ends, or when that takes more than `timeout`.
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        await_ready(&self.spec.name, &self.console(), timeout, || {
            if self.places().is_empty() {
                bail!("it has no QEMU any more; {}", self.last_words());
            }
            Ok(())
        })
    }

    /// A connection to the guest's load program, from the site that it is in, or from its gateway's.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn control(&self) -> Result<Control> {
        load_program(self.installation.fabric().entrance(&self.site), &self.spec, &self.console())
    }

    fn state(&self, site: &str) -> PathBuf {
        Folders::of(self.installation.fabric().site(site)).state
    }

    fn logs(&self) -> PathBuf {
        self.state(&self.site).join("vms").join(self.id.0.to_string())
    }

    fn console(&self) -> PathBuf {
        self.logs().join("console.log")
    }

    /// What the guest, its QEMU and its node said last, for a failure's report.
    #[must_use]
    pub fn last_words(&self) -> String {
        let node = self.installation.fabric().site(&self.site).folder.join("node.log");
        let qemu = tail(&self.logs().join("qemu.log"));
        format!("QEMU: {qemu}; console: {}; node: {}", tail(&self.console()), tail(&node))
    }

    /// Its disks' replicas in `site`.
    #[must_use]
    pub fn replicas(&self, site: &str) -> Vec<PathBuf> {
        let own = self.state(site).join("volumes");
        let folder = |(disk, volume): (usize, &VolumeId)| {
            shared_volume(&self.spec, disk).unwrap_or_else(|| own.join(volume.0.to_string()))
        };
        self.volumes.iter().enumerate().map(|disk| folder(disk).join("data")).collect()
    }

    /// The block nodes of its disks.
    #[must_use]
    pub fn disk_nodes(&self) -> Vec<String> {
        (0..self.volumes.len()).map(|disk| format!("disk{disk}")).collect()
    }

    /// Its QEMUs: one as a rule, two for a while during a move.
    #[must_use]
    pub fn places(&self) -> Vec<Place> {
        places::of(self.installation.fabric(), self.id)
    }

    /// Kills its QEMU in `site`. What its disk holds there is looked at first, if it is there at all: the guest may have to boot
    /// from it.
    ///
    /// # Errors
    /// When there is none.
    pub fn kill_qemu(&self, site: &str) -> Result<()> {
        let place = self.place(site)?;
        *lock(&self.before_kill) = reboot::before(self, site).ok();
        place.kill()
    }

    /// What was known just before its QEMU was last killed.
    #[must_use]
    pub fn before_kill(&self) -> Option<Before> {
        lock(&self.before_kill).clone()
    }

    /// Its QEMU in `site`.
    ///
    /// # Errors
    /// When there is none.
    pub fn place(&self, site: &str) -> Result<Place> {
        let found = self.places().into_iter().find(|place| place.site == site);
        found.with_context(|| format!("there is no QEMU of `{}` in {site}", self.spec.name))
    }

    /// The QMP monitor of its QEMU in `site`, by way of Godwit.
    #[must_use]
    pub fn monitor_in<'a>(&'a self, site: &'a str) -> MonitorIn<'a> {
        MonitorIn { vm: self, site }
    }

    /// Takes it as being in `site` from now on.
    ///
    /// # Errors
    /// When there is no QEMU of it.
    pub fn settle_in(&mut self, site: &str) -> Result<()> {
        self.ram = self.place(site)?.ram(self.spec.memory)?;
        self.site = site.to_owned();
        Ok(())
    }

    /// Waits until Godwit says that the VM runs, owned by one host and not on the move. Returns that host's site.
    ///
    /// # Errors
    /// With what was seen last when that does not come within [`SETTLE`].
    pub fn await_owner(&self) -> Result<String> {
        self.await_settled(|_, _| true)
    }

    /// As [`Hosted::await_owner`], and until there is one QEMU of it, in that site.
    ///
    /// # Errors
    /// As [`Hosted::await_owner`].
    pub fn await_one_place(&self) -> Result<String> {
        self.await_settled(|owner, seen| seen == [owner])
    }

    /// Waits until no site but `owner` has an interface of the VM's.
    ///
    /// # Errors
    /// With those that are there still after [`CLEARED`].
    pub fn await_no_taps_but_in(&self, owner: &str) -> Result<()> {
        let taps = taps_of(&self.spec.name, &self.installation.json::<Vec<Value>>(&["wire", "ls"])?);
        let deadline = Instant::now() + CLEARED;
        loop {
            let mut left = vec![];
            for site in self.installation.fabric().sites.iter().filter(|site| site.name != owner) {
                let names = taps.clone();
                let found = site.ns.run(move || {
                    let there = |tap: &String| Path::new("/sys/class/net").join(tap).exists();
                    names.into_iter().filter(there).collect::<Vec<_>>()
                });
                left.extend(found.into_iter().map(|tap| format!("{tap} in {}", site.name)));
            }
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("`{}` has left interfaces behind: {}", self.spec.name, left.join(", "));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// `accept` looks at the owner's site and at the sites with QEMUs.
    fn await_settled(&self, accept: impl Fn(&str, &[String]) -> bool) -> Result<String> {
        let name = self.spec.name.as_str();
        let deadline = Instant::now() + SETTLE;
        loop {
            let shown = self.installation.json::<public::Vm>(&["vm", "show", name]);
            let seen: Vec<_> = self.places().into_iter().map(|place| place.site).collect();
            match &shown {
                Ok(vm)
                    if vm.mv.is_none()
                        && vm.run == Some(RunState::Running)
                        && vm.ownership == Some(Ownership::Here)
                        && accept(vm.site.as_str(), &seen) =>
                {
                    return Ok(vm.site.to_string());
                }
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(250)),
                Ok(vm) => bail!(
                    "`{name}` has not settled after {} s: Godwit says {:?}, {:?} in {}, move {:?}; there are QEMUs in {seen:?}",
                    SETTLE.as_secs(),
                    vm.ownership,
                    vm.run,
                    vm.site,
                    vm.mv
                ),
                Err(e) => bail!("`{name}` has not settled after {} s: {e:#}; QEMUs in {seen:?}", SETTLE.as_secs()),
            }
        }
    }
}

/// The QEMU of a VM that was just told to start, and its RAM: Godwit answers before it has either.
fn started(installation: &Installation, id: VmId, spec: &GuestSpec) -> Result<(Place, File)> {
    let deadline = Instant::now() + STARTED;
    loop {
        let seen = places::of(installation.fabric(), id);
        let found = match seen.as_slice() {
            [place] => place.ram(spec.memory).map(|ram| (place.clone(), ram)),
            others => {
                Err(anyhow!("VM `{}` was started, and there are {} QEMUs of it: {others:?}", spec.name, others.len()))
            }
        };
        if found.is_ok() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The monitor of a VM in one site. During a hand-off two QEMUs have one: so it is said which is meant.
#[derive(Clone, Copy, Debug)]
pub struct MonitorIn<'a> {
    vm: &'a Hosted,
    site: &'a str,
}

impl Monitor for MonitorIn<'_> {
    fn monitor(&self, command: &str, arguments: Value) -> Result<Value> {
        let order = match arguments {
            Value::Null => json!({ "execute": command }),
            arguments => json!({ "execute": command, "arguments": arguments }),
        };
        let words = ["vm", "monitor", &self.vm.spec.name, "--at", &host_of(self.site), &order.to_string()];
        let text = self.vm.installation.command(words)?;
        // Commands that return nothing may print nothing.
        match text.trim() {
            "" => Ok(Value::Null),
            text => serde_json::from_str(text).with_context(|| format!("`godwit vm monitor` printed: {text}")),
        }
    }
}

pub(crate) fn volume_name(vm: &str, disk: usize) -> String {
    format!("{vm}-disk{disk}")
}

/// The name of the kernel, and of the initrd, of an image in the nodes' image folders.
#[must_use]
pub fn boot_files(image: &str) -> [String; 2] {
    [format!("{image}-vmlinuz"), format!("{image}-initrd")]
}

/// Fills the volumes of a VM that is off, as the deployment's admin does for a customer.
fn import(installation: &Installation, vm: &str, disks: &[PathBuf]) -> Result<()> {
    for (index, file) in disks.iter().enumerate() {
        let volume = volume_name(vm, index);
        let words = ["volume", "import", "--format", "raw", "--overwrite", "--volume", volume.as_str()];
        installation.command(words.map(OsStr::new).into_iter().chain([file.as_os_str()]))?;
    }
    Ok(())
}

/// The folder of a disk's volume, where that lies on storage that all sites reach.
fn shared_volume(spec: &GuestSpec, disk: usize) -> Option<PathBuf> {
    Some(spec.shared.as_ref()?.join(volume_name(&spec.name, disk)))
}

/// The VM as Godwit is told of it: the machine that the baselines have.
fn describe(spec: &GuestSpec, disks: &[PathBuf]) -> Result<VmSpec> {
    let [kernel, initrd] = boot_files(&spec.image.kind().to_string());
    let disk = |(index, size): (usize, &godwit_units::Bytes)| -> Result<DiskSpec> {
        let from = disks[index].to_str().context("the work folder's path is no text")?.to_owned();
        // A customer names no file of a host.
        let from = spec.domain.is_none().then_some(from);
        let store = match shared_volume(spec, index) {
            None => None,
            Some(folder) => {
                let path = folder.to_str().context("the work folder's path is no text")?.to_owned();
                Some(Store::Shared { path, device: None, overwrite: false, zeroed: false })
            }
        };
        Ok(DiskSpec { volume: volume_name(&spec.name, index).parse()?, size: *size, from, store })
    };
    Ok(VmSpec {
        machine: "q35".into(),
        cpu: PORTABLE_CPU.into(),
        vcpus: spec.vcpus,
        max_vcpus: spec.vcpus,
        memory: spec.memory,
        accel: match spec.accel {
            Accel::Kvm => vm::Accel::Kvm,
            Accel::Tcg => vm::Accel::Tcg,
        },
        boot: Boot::Kernel { kernel, initrd: Some(initrd), cmdline: spec.kernel_words() },
        disks: spec.disks.iter().enumerate().map(disk).collect::<Result<_>>()?,
        nics: interfaces(spec)?,
        devices: vec![],
        on_cut: spec.on_cut,
    })
}

/// The first is on the lab's own segment, by which the guest is reached; the others are ports for wires.
fn interfaces(spec: &GuestSpec) -> Result<Vec<NicSpec>> {
    let first = NicSpec {
        mac: spec.mac.clone(),
        component: Some(COMPONENT.parse()?),
        name: None,
        ips: vec![spec.address.into()],
        mtu: GUEST_MTU,
    };
    let port = |nic: &crate::guest::Nic| -> Result<NicSpec> {
        Ok(NicSpec {
            mac: nic.mac.clone(),
            component: None,
            name: Some(nic.name.parse()?),
            ips: vec![nic.ip.into()],
            mtu: nic.mtu,
        })
    };
    std::iter::once(Ok(first)).chain(spec.nics.iter().map(port)).collect()
}

/// The names of a VM's interfaces on its host, of what `godwit wire ls` shows: wires to components, which have the VM's name, and
/// wires between ports, whose ends do.
fn taps_of(vm: &str, wires: &[Value]) -> Vec<String> {
    let mut taps = vec![];
    for wire in wires {
        if wire["vm"] == vm {
            taps.push(format!("gwt{}", wire["id"]));
        }
        for end in wire["ends"].as_array().into_iter().flatten() {
            if end["end"].as_str().and_then(|text| text.split_once(':')).is_some_and(|(object, _)| object == vm) {
                taps.push(format!("gwt{}", end["endpoint"]));
            }
        }
    }
    taps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_interfaces_are_those_of_its_wires_of_either_kind() {
        let end = |name: &str, endpoint: u32| json!({"end": name, "endpoint": endpoint, "host": "a"});
        let wires = [
            json!({"id": 1, "vm": "web", "component": "lan"}),
            json!({"id": 2, "vm": "web2", "component": "lan"}),
            json!({"id": 7, "ends": [end("web:eth1", 3), end("web2:eth1", 4)]}),
        ];
        assert_eq!(taps_of("web", &wires), ["gwt1", "gwt3"]);
        assert_eq!(taps_of("web2", &wires), ["gwt2", "gwt4"]);
    }
}
