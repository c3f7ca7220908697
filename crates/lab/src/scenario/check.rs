//! What only makes sense together: names that exist, figures in their bounds, disks that hold their data.

use super::network::{KINDS, MAX_FLOW_PER_S, MAX_NICS, MAX_PORTS, route};
use super::{
    Action, Baseline, DATA_SETS_MIB, DiskStrategy, End, Image, Kill, MAX_SITES, MAX_VMS, Move, Network, PathChange,
    Point, Scenario, ScenarioError, Site, Victim, Vm, same_pair,
};
use godwit_load::protocol::LoadSpec;
use godwit_units::Bytes;
use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use toml::Spanned;

/// The longest that frames are recorded, as Godwit has it.
const LONGEST_CAPTURE_S: u32 = 60;
/// What a path may be, each figure by itself: its rate in Mbit/s, its times in ms, its loss. Less than that of the rate would never bring anything.
const RATE_MBIT: [f64; 2] = [0.1, 100_000.0];
const TIME_MS: [f64; 2] = [0.0, 10_000.0];
const LOSS: [f64; 2] = [0.0, 1.0];

/// The checks that need more than one key, with the text at hand to name lines.
pub(super) struct Checker<'a> {
    pub text: &'a str,
    pub path: &'a str,
    /// Whether Godwit makes moves: its names are a little narrower.
    pub godwit: bool,
}

impl Checker<'_> {
    pub fn fail<T>(&self, at: Range<usize>, key: &str, what: impl Into<String>) -> Result<T, ScenarioError> {
        let line = 1 + self.text[..at.start.min(self.text.len())].matches('\n').count();
        Err(ScenarioError::Meaning { path: self.path.into(), line, key: key.into(), what: what.into() })
    }

    pub fn scenario(&self, s: &Scenario) -> Result<(), ScenarioError> {
        if s.name.get_ref().is_empty() {
            return self.fail(s.name.span(), "name", "is empty; reports and ledgers need it");
        }
        if s.repeat == 0 {
            return self.fail(s.name.span(), "repeat", "is 0; nothing would run");
        }
        if !(1..=1000).contains(s.patience_rounds.get_ref()) {
            let what = format!("is {}; it takes 1 to 1000 rounds", s.patience_rounds.get_ref());
            return self.fail(s.patience_rounds.span(), "patience_rounds", what);
        }
        if !(1..=86_400).contains(s.move_timeout_s.get_ref()) {
            let what = format!("is {}; it takes 1 to 86400 seconds", s.move_timeout_s.get_ref());
            return self.fail(s.move_timeout_s.span(), "move_timeout_s", what);
        }
        if *s.warm_percent.get_ref() > 95 {
            return self.fail(s.warm_percent.span(), "warm_percent", "is above 95; a guest keeps some free memory");
        }
        self.sites(s)?;
        self.network(s)?;
        self.wan(s)?;
        self.vms(s)?;
        self.users_network(s)?;
        self.flows(s)?;
        self.speed(s)?;
        self.steps(s)?;
        self.captures(s)
    }

    /// A run that measures wires has two sites, and nothing else that could be busy.
    fn speed(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let Some(speed) = &s.speed else { return Ok(()) };
        let other = !s.vm.is_empty() || !s.step.is_empty() || !s.component.is_empty() || !s.baseline.is_empty();
        if other || !s.extender.is_empty() || s.site.len() != 2 || !s.godwit {
            let what = "goes with two sites, and without [[vm]], [[component]], [[extender]], [[step]], `baseline` and `godwit = false`";
            return self.fail(speed.span(), "speed", what);
        }
        match speed.get_ref().problem() {
            Some(what) => self.fail(speed.span(), "speed", what),
            None => Ok(()),
        }
    }

    fn name(&self, name: &Spanned<String>, key: &str, seen: &mut HashSet<String>) -> Result<(), ScenarioError> {
        let text = name.get_ref();
        let fits = (1..=24).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !text.starts_with('-');
        let fits_godwit = text.starts_with(|c: char| c.is_ascii_lowercase()) && !text.ends_with('-');
        if !fits {
            let what =
                format!("`{text}`: use 1 to 24 of a-z, 0-9 and `-` (it becomes part of file and interface names)");
            return self.fail(name.span(), key, what);
        }
        if self.godwit && !fits_godwit {
            let what = format!("`{text}`: Godwit's names begin with a letter and do not end with `-`");
            return self.fail(name.span(), key, what);
        }
        if !seen.insert(text.clone()) {
            return self.fail(name.span(), key, format!("`{text}` is there twice"));
        }
        Ok(())
    }

    fn sites(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut seen = HashSet::new();
        for site in &s.site {
            self.name(&site.name, "site.name", &mut seen)?;
            if let Some(qemu) = &site.qemu {
                self.other_qemu(s, qemu)?;
            }
        }
        for site in &s.site {
            self.carriers(s, site, &mut seen)?;
        }
        if s.site.len() < 2 || s.site.len() > MAX_SITES {
            let what = format!("{} sites; a scenario has 2 to {MAX_SITES} [[site]] tables", s.site.len());
            return self.fail(s.name.span(), "site", what);
        }
        Ok(())
    }

    /// A second host carries, and takes nothing else: what moved to its site could come to it, where the lab does not look.
    fn carriers(&self, s: &Scenario, site: &Site, names: &mut HashSet<String>) -> Result<(), ScenarioError> {
        let fail = |what: String| self.fail(site.carriers.span(), "site.carriers", what);
        if !(1..=2).contains(site.carriers.get_ref()) {
            return fail(format!("is {}; 1 or 2 hosts of a site carry", site.carriers.get_ref()));
        }
        let Some(second) = site.second() else { return Ok(()) };
        let name = site.name.get_ref();
        if !s.carries(name) {
            return fail(format!("is 2, and `{name}` has no [[extender]] to be carried"));
        }
        let comes = |to: &Spanned<String>| to.get_ref() == name;
        let moves = s.step.iter().any(|step| match &step.action {
            Action::Move(order) => comes(&order.to),
            Action::Component(step) => comes(&step.to),
            Action::Precache(step) => comes(&step.to),
            _ => false,
        });
        if moves {
            return fail(format!("is 2, and a step brings something to `{name}`, where it may come to either host"));
        }
        if !names.insert(second.clone()) {
            return fail(format!("is 2, and there is a site `{second}` already, as the second host is called"));
        }
        Ok(())
    }

    fn other_qemu(&self, s: &Scenario, folder: &Spanned<PathBuf>) -> Result<(), ScenarioError> {
        let fail = |what: String| self.fail(folder.span(), "site.qemu", what);
        let program = folder.get_ref().join("qemu-system-x86_64");
        if !s.baseline.is_empty() || !s.godwit {
            return fail("goes with Godwit alone: leave out `baseline` and `godwit = false`".into());
        }
        if !program.is_absolute() || !program.is_file() {
            let what =
                format!("there is no {}; `scripts/setup.sh qemu10` makes one, and says where", program.display());
            return fail(what);
        }
        Ok(())
    }

    /// Behind a gateway are the clients of its own site, and only Godwit leads there.
    fn network(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let (Network::Gateway, Some(last)) = (s.network, s.site.last()) else { return Ok(()) };
        if !s.baseline.is_empty() || !s.godwit {
            let what = "is \"gateway\", which only Godwit has: leave out `baseline` and `godwit = false`";
            return self.fail(s.name.span(), "network", what);
        }
        for load in s.vm.iter().flat_map(|vm| &vm.load) {
            if let Some(from) = client_site(load.get_ref())
                && from != last.name.get_ref()
            {
                let what =
                    format!("is `{from}`; with a gateway all clients are in the last site, `{}`", last.name.get_ref());
                return self.fail(load.span(), "vm.load.from", what);
            }
        }
        Ok(())
    }

    fn known_site(&self, s: &Scenario, name: &str, at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        if s.site.iter().any(|site| site.name.get_ref() == name) {
            return Ok(());
        }
        let known: Vec<_> = s.site.iter().map(|site| site.name.get_ref().as_str()).collect();
        self.fail(at, key, format!("there is no site `{name}`; there are: {}", known.join(", ")))
    }

    fn known_pair(&self, s: &Scenario, pair: &Spanned<[String; 2]>, key: &str) -> Result<(), ScenarioError> {
        let [a, b] = pair.get_ref();
        self.known_site(s, a, pair.span(), key)?;
        self.known_site(s, b, pair.span(), key)?;
        if a == b {
            return self.fail(pair.span(), key, format!("`{a}` twice; a path joins two different sites"));
        }
        Ok(())
    }

    fn within(&self, value: f64, [least, most]: [f64; 2], at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        self.fail(at, key, format!("is {value}; it takes {least} to {most}"))
    }

    /// A path's other figures: each by itself, since only then they can be reckoned with, and what they come to.
    fn path_change(&self, s: &Scenario, change: &PathChange, key: &str) -> Result<(), ScenarioError> {
        self.known_pair(s, &change.between, &format!("{key}.between"))?;
        let at = change.between.span();
        for (figure, name, range) in [
            (change.rate_mbit, "rate_mbit", RATE_MBIT),
            (change.rtt_ms, "rtt_ms", TIME_MS),
            (change.jitter_ms, "jitter_ms", TIME_MS),
            (change.loss, "loss", LOSS),
            (change.queue_ms, "queue_ms", TIME_MS),
        ] {
            if let Some(value) = figure {
                self.within(value, range, at.clone(), &format!("{key}.{name}"))?;
            }
        }
        let [a, b] = change.between.get_ref();
        match change.apply(s.path_spec(a, b)).validate() {
            Ok(()) => Ok(()),
            Err(e) => self.fail(at, key, e.to_string()),
        }
    }

    fn wan(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let w = &s.wan;
        for (figure, key, range) in [
            (&w.rate_mbit, "wan.rate_mbit", RATE_MBIT),
            (&w.rtt_ms, "wan.rtt_ms", TIME_MS),
            (&w.jitter_ms, "wan.jitter_ms", TIME_MS),
            (&w.loss, "wan.loss", LOSS),
            (&w.queue_ms, "wan.queue_ms", TIME_MS),
        ] {
            self.within(*figure.get_ref(), range, figure.span(), key)?;
        }
        w.path.iter().try_for_each(|path| self.path_change(s, path, "wan.path"))
    }

    fn vms(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut seen = HashSet::new();
        if s.vm.len() > MAX_VMS {
            return self.fail(s.name.span(), "vm", format!("{} VMs; the most is {MAX_VMS}", s.vm.len()));
        }
        for vm in &s.vm {
            self.name(&vm.name, "vm.name", &mut seen)?;
            self.known_site(s, vm.site.get_ref(), vm.site.span(), "vm.site")?;
            if let Some(domain) = &vm.domain {
                self.name(domain, "vm.domain", &mut HashSet::new())?;
            }
            if !(96..=16_384).contains(vm.memory_mib.get_ref()) {
                let what = format!("is {}; a guest takes 96 to 16384", vm.memory_mib.get_ref());
                return self.fail(vm.memory_mib.span(), "vm.memory_mib", what);
            }
            if !(1..=8).contains(&vm.vcpus) {
                return self.fail(vm.name.span(), "vm.vcpus", format!("is {}; a guest takes 1 to 8", vm.vcpus));
            }
            self.disks(s, vm)?;
            for load in &vm.load {
                let beside = vm.load.iter().map(Spanned::get_ref);
                self.load((load.get_ref(), beside), vm.image, &load.span(), "vm.load")?;
                if let Some(from) = client_site(load.get_ref()) {
                    self.known_site(s, from, load.span(), "vm.load.from")?;
                }
            }
        }
        Ok(())
    }

    /// Components, guests' ports, and the wires between them.
    fn users_network(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut names: HashSet<String> = s.vm.iter().map(|vm| vm.name.get_ref().clone()).collect();
        names.insert(crate::godwit::COMPONENT.to_owned());
        for component in &s.component {
            self.name(&component.name, "component.name", &mut names)?;
            self.known_site(s, component.site.get_ref(), component.site.span(), "component.site")?;
            if !KINDS.contains(&component.kind.get_ref().as_str()) {
                let what = format!("is `{}`; there are: {}", component.kind.get_ref(), KINDS.join(", "));
                return self.fail(component.kind.span(), "component.kind", what);
            }
            if !(1..=MAX_PORTS).contains(component.ports.get_ref()) {
                let what = format!("is {}; a component has 1 to {MAX_PORTS}", component.ports.get_ref());
                return self.fail(component.ports.span(), "component.ports", what);
            }
        }
        for vm in &s.vm {
            self.nics(vm)?;
        }
        self.extenders(s)?;
        let has_any = !s.component.is_empty()
            || !s.wire.is_empty()
            || !s.extender.is_empty()
            || s.vm.iter().any(|vm| !vm.nic.is_empty());
        if has_any && (!s.baseline.is_empty() || !s.godwit) {
            let what = "stands beside components, wires, extenders or `nic`, which only Godwit has: leave out `baseline` and `godwit = false`";
            return self.fail(s.name.span(), "baseline", what);
        }
        let mut taken = HashSet::new();
        for wire in &s.wire {
            for text in wire.ends.get_ref() {
                self.end(s, text, wire.ends.span())?;
                if !taken.insert(text.as_str()) {
                    return self.fail(wire.ends.span(), "wire.ends", format!("`{text}` has a wire already"));
                }
            }
        }
        Ok(())
    }

    /// Each pair of sites has at most one.
    fn extenders(&self, s: &Scenario) -> Result<(), ScenarioError> {
        for (index, extender) in s.extender.iter().enumerate() {
            self.known_pair(s, &extender.between, "extender.between")?;
            let [a, b] = extender.between.get_ref();
            if s.extender[..index].iter().any(|before| same_pair(before.between.get_ref(), a, b)) {
                let what = format!("`{a}` and `{b}` have an extender already");
                return self.fail(extender.between.span(), "extender.between", what);
            }
        }
        Ok(())
    }

    /// Flows begin in components that stay, and end at guests' interfaces.
    fn flows(&self, s: &Scenario) -> Result<(), ScenarioError> {
        for flow in &s.flow {
            let from = flow.from.get_ref();
            if !s.component.iter().any(|component| component.name.get_ref() == from) {
                return self.fail(flow.from.span(), "flow.from", format!("there is no component `{from}`"));
            }
            let moves = |action: &Action| matches!(action, Action::Component(c) if c.component.get_ref() == from);
            if s.step.iter().any(|step| moves(&step.action)) {
                let what = format!("`{from}` moves, and a flow does not follow its beginning: let it begin elsewhere");
                return self.fail(flow.from.span(), "flow.from", what);
            }
            if s.flow_target(flow).is_none() {
                let what =
                    format!("is `{}`; write VM:PORT, one of the VM's `nic`, such as web:eth1", flow.to.get_ref());
                return self.fail(flow.to.span(), "flow.to", what);
            }
            if !(1..=MAX_FLOW_PER_S).contains(flow.per_s.get_ref()) {
                let what = format!("is {}; it takes 1 to {MAX_FLOW_PER_S}", flow.per_s.get_ref());
                return self.fail(flow.per_s.span(), "flow.per_s", what);
            }
        }
        Ok(())
    }

    /// What is recorded passes wires, and each recording has a folder of its own.
    fn captures(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut names = HashSet::new();
        for step in &s.step {
            let Action::Capture(capture) = &step.action else { continue };
            let of = capture.of.get_ref();
            let mut ends = s.wire.iter().flat_map(|wire| wire.ends.get_ref()).filter_map(|text| End::of(text));
            if !ends.any(|end| &end.object == of) {
                let what = format!("`{of}` is at no end of a [[wire]]: there is nothing to record");
                return self.fail(capture.of.span(), "step.capture.of", what);
            }
            if !(1..=LONGEST_CAPTURE_S).contains(&capture.s) {
                let what = format!("is {}; it takes 1 to {LONGEST_CAPTURE_S} seconds", capture.s);
                return self.fail(capture.of.span(), "step.capture.s", what);
            }
            self.name(capture.name(), "step.capture.name", &mut names)?;
        }
        Ok(())
    }

    fn nics(&self, vm: &Vm) -> Result<(), ScenarioError> {
        if vm.nic.len() > MAX_NICS {
            let what = format!("{} of them; a guest has at most {MAX_NICS} besides eth0", vm.nic.len());
            return self.fail(vm.name.span(), "vm.nic", what);
        }
        let mut names = HashSet::from(["eth0".to_owned()]);
        for (index, nic) in vm.nic.iter().enumerate() {
            if nic.ip().is_none() {
                let what = format!("is `{}`; write an address and its prefix: 10.20.1.2/24", nic.address.get_ref());
                return self.fail(nic.address.span(), "vm.nic.address", what);
            }
            let port = nic.port(index);
            if port.parse::<godwit_api::wire::PortName>().is_err() || !names.insert(port.clone()) {
                let what = format!("`{port}` is no name for a port, or another interface has it");
                return self.fail(nic.address.span(), "vm.nic.name", what);
            }
            if !(576..=9000).contains(&nic.mtu) {
                return self.fail(nic.address.span(), "vm.nic.mtu", format!("is {}; it takes 576 to 9000", nic.mtu));
            }
        }
        for text in &vm.routes {
            if route(text.get_ref()).is_none() {
                let what = format!("is `{}`; write `10.20.2.0/24 via 10.20.1.1`", text.get_ref());
                return self.fail(text.span(), "vm.routes", what);
            }
        }
        Ok(())
    }

    /// An end of a wire is a port that there is.
    fn end(&self, s: &Scenario, text: &str, at: Range<usize>) -> Result<(), ScenarioError> {
        let Some(end) = End::of(text) else {
            return self.fail(at, "wire.ends", format!("`{text}`: write OBJECT:PORT, such as web:eth1 or fw:p1"));
        };
        let component = s.component.iter().find(|c| c.name.get_ref() == &end.object);
        let vm = s.vm.iter().find(|vm| vm.name.get_ref() == &end.object);
        let ports: Vec<String> = match (component, vm) {
            (Some(component), _) => (1..=*component.ports.get_ref()).map(|n| format!("p{n}")).collect(),
            (None, Some(vm)) => vm.nic.iter().enumerate().map(|(index, nic)| nic.port(index)).collect(),
            (None, None) => {
                let what = format!("`{text}`: there is no VM and no component `{}`", end.object);
                return self.fail(at, "wire.ends", what);
            }
        };
        if ports.contains(&end.port) {
            return Ok(());
        }
        let there = if ports.is_empty() { "none (give it a `nic`)".into() } else { ports.join(", ") };
        self.fail(at, "wire.ends", format!("`{text}`: `{}` has no such port; there are: {there}", end.object))
    }

    fn known_component(&self, s: &Scenario, name: &Spanned<String>) -> Result<(), ScenarioError> {
        if s.component.iter().any(|component| component.name.get_ref() == name.get_ref()) {
            return Ok(());
        }
        let known: Vec<_> = s.component.iter().map(|component| component.name.get_ref().as_str()).collect();
        let what = format!("there is no component `{}`; there are: {}", name.get_ref(), known.join(", "));
        self.fail(name.span(), "step.move.component", what)
    }

    fn disks(&self, s: &Scenario, vm: &Vm) -> Result<(), ScenarioError> {
        let at = match (&vm.disk_gib, &vm.disks_gib) {
            (Some(_), Some(several)) => {
                return self.fail(several.span(), "vm.disks_gib", "stands beside `disk_gib`; keep one of the two");
            }
            (Some(one), None) => one.span(),
            (None, Some(several)) => several.span(),
            (None, None) => return self.fail(vm.name.span(), "vm.disk_gib", "is missing (or `disks_gib = [...]`)"),
        };
        let disks = vm.disks();
        if disks.is_empty() || disks.len() > 8 || disks.iter().any(|d| *d < Bytes::mib(16) || *d > Bytes::gib(16_384)) {
            return self.fail(at, "vm.disks_gib", "takes 1 to 8 disks of 0.016 to 16384 GiB");
        }
        // Found by trial: QEMU 7.2's destination breaks the connection off at the end of such a disk.
        if s.baseline.contains(&Baseline::QemuBlock) && disks.iter().any(|d| !d.0.is_multiple_of(Bytes::mib(1).0)) {
            let what = "`qemu-block` brings only disks of whole MiB: 6.125 GiB, for one, and not 6.1";
            return self.fail(at, "vm.disks_gib", what);
        }
        let Some(data) = &vm.data_mib else { return Ok(()) };
        if vm.image == Image::Debian {
            return self.fail(data.span(), "vm.data_mib", "a `debian` guest's data is its root file system");
        }
        if !DATA_SETS_MIB.contains(data.get_ref()) {
            let what = format!("is {}; data sets are made of {DATA_SETS_MIB:?} MiB", data.get_ref());
            return self.fail(data.span(), "vm.data_mib", what);
        }
        if Bytes::mib(u64::from(*data.get_ref()) * 5 / 4) > disks[0] {
            return self.fail(data.span(), "vm.data_mib", format!("does not fit a first disk of {}", disks[0]));
        }
        Ok(())
    }

    /// A load, with all of its guest.
    fn load<'a>(
        &self,
        (load, all): (&LoadSpec, impl IntoIterator<Item = &'a LoadSpec>),
        image: Image,
        at: &Range<usize>,
        key: &str,
    ) -> Result<(), ScenarioError> {
        if let Err(e) = load.validate().and_then(|()| load.validate_beside(all)) {
            return self.fail(at.clone(), key, e.to_string());
        }
        if load.is_work() && image != Image::Debian {
            let kind = load.kind();
            let what =
                format!("has a {kind}, for which the tiny guest has no programs: give the VM `image = \"debian\"`");
            return self.fail(at.clone(), key, what);
        }
        Ok(())
    }

    fn steps(&self, s: &Scenario) -> Result<(), ScenarioError> {
        for step in &s.step {
            match &step.action {
                Action::Move(m) => self.a_move(s, m)?,
                Action::Component(step) => {
                    self.known_component(s, &step.component)?;
                    self.known_site(s, step.to.get_ref(), step.to.span(), "step.move.to")?;
                }
                Action::Verify(v) => self.known_vm(s, &v.vm, "step.verify.vm")?,
                Action::Cancel(v) => self.known_vm(s, &v.vm, "step.cancel.vm")?,
                Action::Alter(a) => self.known_vm(s, &a.vm, "step.alter.vm")?,
                Action::Whole(whole) => self.seconds(whole.timeout_s, s.name.span(), "step.whole.timeout_s")?,
                // Looked at when they were read, and together.
                Action::Wait(_) | Action::Capture(_) => {}
                Action::Precache(p) => {
                    self.known_vm(s, &p.vm, "step.precache.vm")?;
                    self.known_site(s, p.to.get_ref(), p.to.span(), "step.precache.to")?;
                    self.seconds(p.lag_s, p.vm.span(), "step.precache.lag_s")?;
                    self.seconds(p.timeout_s, p.vm.span(), "step.precache.timeout_s")?;
                    if p.interval_s == 0 || p.interval_s > 3600 {
                        return self.fail(
                            p.vm.span(),
                            "step.precache.interval_s",
                            "`interval_s` takes 1 to 3600 seconds",
                        );
                    }
                }
                Action::Profile(p) => {
                    self.known_vm(s, &p.vm, "step.profile.vm")?;
                    if let Some(to) = &p.to {
                        self.known_site(s, to.get_ref(), to.span(), "step.profile.to")?;
                    }
                    if !(1..=3600).contains(&p.s) || !(0.05..=60.0).contains(&p.interval_s) {
                        let what = "watches for 1 to 3600 seconds, each 0.05 to 60 seconds";
                        return self.fail(p.vm.span(), "step.profile", what);
                    }
                }
                Action::Io(io) => {
                    self.known_vm(s, &io.vm, "step.io.vm")?;
                    if !(1.0..=600.0).contains(&io.s) {
                        let what = format!("is {}; it takes 1 to 600 seconds", io.s);
                        return self.fail(io.vm.span(), "step.io.s", what);
                    }
                }
                Action::Load(step) => {
                    self.known_vm(s, &step.vm, "step.load.vm")?;
                    let image = s.vm.iter().find(|vm| vm.name.get_ref() == step.vm.get_ref()).map(|vm| vm.image);
                    for load in &step.load {
                        if client_site(load).is_some() {
                            let what =
                                "has clients (an echo, or a tier with `from`); those are the VM's own, in [[vm]]";
                            return self.fail(step.vm.span(), "step.load", what);
                        }
                        self.load((load, &step.load), image.unwrap_or_default(), &step.vm.span(), "step.load")?;
                    }
                }
                Action::Cut(cut) => {
                    self.known_pair(s, &cut.between, "step.cut.between")?;
                    self.seconds(cut.for_s.unwrap_or(0.0), cut.between.span(), "step.cut.for_s")?;
                    self.moment(s, (cut.at, cut.share), cut.vm.as_ref(), cut.between.span(), "step.cut")?;
                }
                Action::Kill(kill) => self.kill(s, kill)?,
                Action::Expect(e) => {
                    self.known_vm(s, &e.vm, "step.expect.vm")?;
                    if let Some(site) = &e.site {
                        self.known_site(s, site.get_ref(), site.span(), "step.expect.site")?;
                    }
                }
                Action::Restore(b) => self.known_pair(s, &b.between, "step.restore.between")?,
                Action::Rate(change) => self.path_change(s, change, "step.rate")?,
            }
        }
        Ok(())
    }

    fn a_move(&self, s: &Scenario, m: &Move) -> Result<(), ScenarioError> {
        let at = m.to.span();
        self.known_site(s, m.to.get_ref(), at.clone(), "step.move.to")?;
        let mut seen = HashSet::new();
        for vm in &m.vms {
            self.known_vm(s, vm, if m.vms.len() > 1 { "step.move.vms" } else { "step.move.vm" })?;
            if !seen.insert(vm.get_ref()) {
                return self.fail(vm.span(), "step.move.vms", format!("`{}` is there twice", vm.get_ref()));
            }
            if (m.disk == DiskStrategy::Shared) != s.shares_disks(vm.get_ref()) {
                let what = format!(
                    "`{}` moves once with a shared disk and once without; a disk is one or the other",
                    vm.get_ref()
                );
                return self.fail(vm.span(), "step.move.disk", what);
            }
        }
        if let Some(what) = m.moment.and_then(|moment| moment.problem()) {
            return self.fail(at, "step.move.moment", what);
        }
        let leaves = m.leave_at.is_none_or(|share| share > 0.0 && share < 1.0);
        if !leaves || (m.leave_at.is_some() && m.disk != DiskStrategy::Postcopy) {
            let what = "takes more than 0 and less than 1, with `disk = \"postcopy\"`";
            return self.fail(at, "step.move.leave_at", what);
        }
        Ok(())
    }

    fn kill(&self, s: &Scenario, kill: &Kill) -> Result<(), ScenarioError> {
        let at = kill.what.span();
        self.seconds(kill.restart_after_s, at.clone(), "step.kill.restart_after_s")?;
        self.moment(s, (kill.at, kill.share), kill.vm.as_ref(), at.clone(), "step.kill")?;
        if let Some(site) = &kill.site {
            self.known_site(s, site.get_ref(), site.span(), "step.kill.site")?;
        }
        match kill.what.get_ref() {
            Victim::Node if kill.site.is_none() && kill.at.is_none() => {
                self.fail(at, "step.kill.site", "is missing: say which site's node, or `at` which point of a move")
            }
            Victim::Extender => match &kill.site {
                None if kill.at.is_none() => self.fail(at, "step.kill.site", "is missing: say which site's extender"),
                Some(site) if !s.carries(site.get_ref()) => {
                    let what = format!("`{}` has no [[extender]]", site.get_ref());
                    self.fail(site.span(), "step.kill.site", what)
                }
                None if s.extender.is_empty() => {
                    self.fail(at, "step.kill.what", "there is no [[extender]] to be killed")
                }
                _ => Ok(()),
            },
            Victim::Qemu if kill.vm.is_none() => self.fail(at, "step.kill.vm", "is missing: say whose QEMU"),
            Victim::Controller if kill.site.is_some() => {
                self.fail(at, "step.kill.site", "goes with a node or a QEMU; there is one controller")
            }
            _ => Ok(()),
        }
    }

    /// `at` and `vm` of a step that waits for a point of a move.
    fn moment(
        &self,
        s: &Scenario,
        (at, share): (Option<Point>, Option<f64>),
        vm: Option<&Spanned<String>>,
        step: Range<usize>,
        key: &str,
    ) -> Result<(), ScenarioError> {
        match (share, at) {
            (None, _) => {}
            (Some(share), Some(Point::CopyDisk | Point::Memory | Point::Fill)) if share > 0.0 && share < 1.0 => {}
            (Some(share), _) => {
                let what =
                    format!("is {share}; it takes more than 0 and less than 1, with `at` copy-disk, memory or fill");
                return self.fail(step, &format!("{key}.share"), what);
            }
        }
        match (at, vm) {
            (Some(_), None) => self.fail(step, &format!("{key}.vm"), "is missing: say on whose move `at` is"),
            (_, Some(vm)) => self.known_vm(s, vm, &format!("{key}.vm")),
            (None, None) => Ok(()),
        }
    }

    fn seconds(&self, value: f64, at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        if (0.0..=86_400.0).contains(&value) {
            return Ok(());
        }
        self.fail(at, key, format!("is {value}; it takes seconds from 0 to 86400"))
    }

    fn known_vm(&self, s: &Scenario, name: &Spanned<String>, key: &str) -> Result<(), ScenarioError> {
        if s.vm.iter().any(|vm| vm.name.get_ref() == name.get_ref()) {
            return Ok(());
        }
        let known: Vec<_> = s.vm.iter().map(|vm| vm.name.get_ref().as_str()).collect();
        self.fail(name.span(), key, format!("there is no VM `{}`; there are: {}", name.get_ref(), known.join(", ")))
    }
}

/// Where a load's clients are, if it has any.
fn client_site(load: &LoadSpec) -> Option<&String> {
    match load {
        LoadSpec::Echo { from, .. } => Some(from),
        LoadSpec::Tier { from, .. } => from.as_ref(),
        _ => None,
    }
}
