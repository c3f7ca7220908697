//! A pass: sites and guests, up, loaded and warm, and who moves them.

use crate::application::Watched;
use crate::convoy::Convoy;
use crate::fabric::Fabric;
use crate::flow::{Flow, Happened};
use crate::godwit::Installation;
use crate::godwit::extender;
use crate::godwit::hosted::{self, Hosted};
use crate::godwit::incident::{Incident, Later};
use crate::guest::{self, Accel, ECHO_PORT, Guest, GuestSpec, Start};
use crate::images::GuestImage;
use crate::machine::Machine;
use crate::moves::{Ended, Running};
use crate::progress::Progress;
use crate::recording::{self, Recordings};
use crate::report::{
    Application, CaptureReport, ComponentReport, ExtenderReport, IncidentReport, IoWindow, Mark, MoveReport,
    ProfileReport, TogetherReport,
};
use crate::scenario::{Baseline, Damage, Image, Scenario};
use crate::steps::TRAIL;
use crate::truth;
use crate::watch::Client;
use anyhow::{Context, Result};
use godwit_load::protocol::LoadSpec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a guest may take until all its loads run, and to be warmed.
pub(crate) const LOADED: Duration = Duration::from_secs(1800);

/// Longest boot of a tiny guest; a debian guest gets ten times this.
pub(crate) const BOOT: Duration = Duration::from_secs(300);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who makes the moves of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// Godwit.
    Godwit,
    /// QEMU alone.
    Baseline(Baseline),
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Godwit => f.pad("godwit"),
            Self::Baseline(kind) => kind.fmt(f),
        }
    }
}

/// One VM of a pass.
pub struct Vm {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) spec: GuestSpec,
    /// Nobody's while it moves.
    pub(crate) guest: Mutex<Option<Machine>>,
    pub(crate) lives: AtomicU32,
    pub(crate) clients: Mutex<Vec<Client>>,
    /// What it is loaded with.
    pub(crate) described: crate::scenario::Vm,
    /// Whether it has loads that check themselves.
    pub(crate) checkable: bool,
    /// Ordered for its next hand-off.
    pub(crate) damage: Mutex<Vec<Damage>>,
    /// Ordered for its move by Godwit, the one under way or the next.
    pub(crate) incidents: Mutex<Vec<Incident>>,
}

impl Vm {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it runs, unless it is on the move or lost.
    #[must_use]
    pub fn site(&self) -> Option<String> {
        lock(&self.guest).as_ref().map(|g| g.site().to_owned())
    }

    /// Its address on the guests' segment.
    #[must_use]
    pub fn address(&self) -> std::net::Ipv4Addr {
        self.spec.address
    }
}

/// Sites and guests, up and loaded.
pub struct Pass {
    pub(crate) means: Means,
    pub(crate) scenario: Scenario,
    pub(crate) vms: Vec<Arc<Vm>>,
    pub(crate) running: Vec<Running>,
    pub(crate) ended: Arc<Mutex<Vec<Ended>>>,
    pub(crate) done: Vec<MoveReport>,
    pub(crate) warnings: Vec<String>,
    /// Why the run is not whole, or not to be believed.
    pub(crate) broken: Option<String>,
    pub(crate) windows: Vec<IoWindow>,
    pub(crate) components: Vec<ComponentReport>,
    pub(crate) applications: Vec<Watched>,
    pub(crate) marks: Vec<Mark>,
    pub(crate) convoys: Vec<Arc<Convoy>>,
    pub(crate) profiles: Vec<ProfileReport>,
    pub(crate) recordings: Recordings,
    pub(crate) flows: Vec<Flow>,
    pub(crate) happened: Vec<Happened>,
    /// The zero of what happens in the pass: its first step.
    pub(crate) zero: Instant,
    pub(crate) progress: Arc<Progress>,
    /// In a pass by Godwit.
    pub(crate) installation: Option<Arc<Installation>>,
    /// Paths to be restored later, in a pass by a baseline.
    pub(crate) later: Later,
    pub(crate) fabric: Arc<Fabric>,
}

impl Pass {
    /// Builds sites below `work`, Godwit in them where it is the means, and the guests.
    ///
    /// # Errors
    /// When something cannot be built; nothing that was made stays, but for files in `work`.
    pub fn build(
        scenario: &Scenario,
        means: Means,
        work: &Path,
        accel: Accel,
        progress: &Arc<Progress>,
    ) -> Result<Self> {
        progress.note("building sites");
        let fabric = Arc::new(Fabric::build(scenario, work)?);
        let installation = match means {
            Means::Godwit => {
                progress.note("starting Godwit");
                Some(Arc::new(Installation::start(&fabric, &scenario.site, work)?))
            }
            Means::Baseline(_) => None,
        };
        let mut pass = Self {
            means,
            scenario: scenario.clone(),
            vms: vec![],
            running: vec![],
            ended: Arc::default(),
            done: vec![],
            warnings: vec![],
            broken: None,
            windows: vec![],
            components: vec![],
            applications: vec![],
            marks: vec![],
            convoys: vec![],
            profiles: vec![],
            recordings: Recordings::into(work.join(recording::FOLDER)),
            flows: vec![],
            happened: vec![],
            zero: Instant::now(),
            progress: progress.clone(),
            installation,
            later: Later::default(),
            fabric,
        };
        pass.make_components()?;
        let mut images = Images { work, known: HashMap::new() };
        let mut booting = vec![];
        for (index, vm) in scenario.vm.iter().enumerate() {
            let (image, initrd) = images.get(vm.image, pass.installation.as_deref())?;
            let shared = scenario.shares_disks(vm.name.get_ref()).then(|| work.join("shared"));
            if let Some(folder) = &shared {
                std::fs::create_dir_all(folder)?;
            }
            let spec = GuestSpec::new(index, vm, &image, initrd, shared, accel)?;
            let site = pass.fabric.site(vm.site.get_ref());
            image.make_disks(vm, |disk| spec.disk_file(site, 0, disk))?;
            progress.note(&format!("booting {} in {}", spec.name, site.name));
            let machine = match &pass.installation {
                Some(installation) => Machine::Godwit(Hosted::create(installation, site, &spec)?),
                None => Machine::Qemu(Guest::start(site, &spec, 0, Start::Boot)?),
            };
            booting.push((index, vm.clone(), spec, machine));
        }
        pass.connect_wires()?;
        for (index, vm, spec, mut machine) in booting {
            machine.wait_ready(if vm.image == Image::Debian { BOOT * 10 } else { BOOT })?;
            pass.load_and_warm(&vm, &spec, &machine)?;
            let clients = pass.clients(&vm, &spec)?;
            pass.vms.push(Arc::new(Vm {
                index,
                name: spec.name.clone(),
                spec,
                guest: Mutex::new(Some(machine)),
                lives: AtomicU32::new(1),
                clients: Mutex::new(clients),
                described: vm.clone(),
                checkable: vm
                    .load
                    .iter()
                    .any(|l| !matches!(l.get_ref(), LoadSpec::Echo { .. } | LoadSpec::Tier { .. })),
                damage: Mutex::default(),
                incidents: Mutex::default(),
            }));
        }
        pass.begin_applications()?;
        pass.begin_flows()?;
        pass.zero = Instant::now();
        Ok(pass)
    }

    pub(crate) fn load_and_warm(
        &mut self,
        vm: &crate::scenario::Vm,
        spec: &GuestSpec,
        machine: &Machine,
    ) -> Result<()> {
        // A kernel compile takes minutes to its first object.
        let mut control = machine.control(&self.fabric)?.with_patience(LOADED);
        self.progress.note(&format!("starting the loads of {}", spec.name));
        let loads: Vec<LoadSpec> = vm.load.iter().map(|l| l.get_ref().clone()).collect();
        control.start(&loads, self.scenario.seed.wrapping_add(u64::from(spec.address.octets()[3])))?;
        let wanted = f64::from(*self.scenario.warm_percent.get_ref()) / 100.0;
        self.progress.note(&format!("warming {}", spec.name));
        let mut share = truth::nonzero_share(machine.ram(), spec.memory.0)?;
        // Not all that the kernel holds as used is non-zero: so ask for less and less free memory.
        for free_percent in [12, 8, 5, 3] {
            if share >= wanted {
                break;
            }
            control.warm(free_percent)?;
            share = truth::nonzero_share(machine.ram(), spec.memory.0)?;
        }
        self.progress.note(&format!("{} is warm: {:.0} % of its memory is not zero", spec.name, share * 100.0));
        if share < wanted {
            self.warnings.push(format!(
                "VM `{}` could only be warmed to {:.0} % non-zero memory ({:.0} % asked for); give it more data or larger loads",
                spec.name, share * 100.0, wanted * 100.0
            ));
        }
        Ok(())
    }

    pub(crate) fn clients(&self, vm: &crate::scenario::Vm, spec: &GuestSpec) -> Result<Vec<Client>> {
        let start = |(from, per_s): (&str, u32)| -> Result<Client> {
            let stream = guest::connect(self.fabric.site(from), SocketAddr::from((spec.address, ECHO_PORT)))
                .with_context(|| format!("the client in {from} cannot reach `{}`", spec.name))?;
            Client::start(from, stream, per_s)
        };
        vm.echoes().map(start).collect()
    }

    /// The VMs.
    #[must_use]
    pub fn vms(&self) -> &[Arc<Vm>] {
        &self.vms
    }

    /// The sites and their paths.
    #[must_use]
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// Godwit's installation, where it is the means.
    #[must_use]
    pub fn installation(&self) -> Option<&Arc<Installation>> {
        self.installation.as_ref()
    }

    pub(crate) fn vm(&self, name: &str) -> Arc<Vm> {
        self.vms.iter().find(|vm| vm.name == name).expect("a checked scenario names only VMs that exist").clone()
    }

    /// Where files of what is recorded go; without it into a folder that goes with the pass.
    pub fn record_into(&mut self, folder: PathBuf) {
        self.recordings = Recordings::into(folder);
    }

    /// Takes everything down; yields what was measured, and what is to be said beside it.
    pub fn finish(mut self) -> Finished {
        self.running.iter().for_each(|r| r.cancel.store(true, Ordering::Relaxed));
        self.join(|_| true);
        for vm in self.vms.clone() {
            self.settle(&vm.name, TRAIL);
        }
        let applications = self.end_applications();
        let incidents = self.end_flows();
        let together = self.convoys.iter().map(|convoy| convoy.report_with(&self.done)).collect();
        let captures = self.end_captures();
        self.check_network();
        let extenders = self.installation.as_ref().map(|i| extender::seen(i)).unwrap_or_default();
        self.later.wait();
        self.warnings.extend(self.later.failures());
        if let Some(installation) = &self.installation {
            installation.later.wait();
            self.warnings.extend(installation.later.failures());
            self.warnings.extend(installation.complaints());
        }
        for (one, other, path) in self.fabric.paths() {
            let counters = path.counters();
            if counters.superframes_under_loss() > 0 {
                self.warnings.push(format!(
                    "{one} - {other}: super-frames met loss or jitter as a lump; the figures are not a WAN's"
                ));
            }
            let missed = counters.a_to_b.missed + counters.b_to_a.missed;
            if missed > 0 {
                self.warnings
                    .push(format!("{one} - {other}: the emulator missed {missed} frames; the machine was too busy"));
            }
        }
        Finished {
            moves: std::mem::take(&mut self.done),
            warnings: std::mem::take(&mut self.warnings),
            broken: self.broken.take(),
            windows: std::mem::take(&mut self.windows),
            components: std::mem::take(&mut self.components),
            applications,
            marks: std::mem::take(&mut self.marks),
            together,
            extenders,
            captures,
            profiles: std::mem::take(&mut self.profiles),
            incidents,
        }
    }
}

/// What a pass brought.
#[derive(Debug, Default)]
pub struct Finished {
    /// The moves.
    pub moves: Vec<MoveReport>,
    /// What is to be said beside them.
    pub warnings: Vec<String>,
    /// Why the run is not whole, or not to be believed.
    pub broken: Option<String>,
    /// What guests' own reads and writes took.
    pub windows: Vec<IoWindow>,
    /// Components' moves.
    pub components: Vec<ComponentReport>,
    /// What clients of applications saw.
    pub applications: Vec<Application>,
    /// When what moved.
    pub marks: Vec<Mark>,
    /// What VMs that moved in one order come to.
    pub together: Vec<TogetherReport>,
    /// What passed extenders.
    pub extenders: Vec<ExtenderReport>,
    /// What was recorded.
    pub captures: Vec<CaptureReport>,
    /// What guests were seen to write.
    pub profiles: Vec<ProfileReport>,
    /// What flows had while something was killed or cut.
    pub incidents: Vec<IncidentReport>,
}

/// The images of a pass, each with its load program made once.
struct Images<'a> {
    work: &'a Path,
    known: HashMap<Image, (GuestImage, PathBuf)>,
}

impl Images<'_> {
    /// An image and its initrd; `installation`'s nodes get both the first time.
    fn get(&mut self, kind: Image, installation: Option<&Installation>) -> Result<(GuestImage, PathBuf)> {
        match self.known.entry(kind) {
            Entry::Occupied(known) => Ok(known.get().clone()),
            Entry::Vacant(free) => {
                let image = GuestImage::find(kind)?;
                let initrd = self.work.join(format!("{kind}.initrd"));
                image.make_initrd(&initrd)?;
                if let Some(installation) = installation {
                    let [kernel_name, initrd_name] = hosted::boot_files(&kind.to_string());
                    installation.provide(&kernel_name, &image.kernel_file())?;
                    installation.provide(&initrd_name, &initrd)?;
                }
                Ok(free.insert((image, initrd)).clone())
            }
        }
    }
}
