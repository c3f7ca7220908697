//! A guest's hypervisor: one QEMU process in one site.
//!
//! Every QEMU of a VM is started from the same [`GuestSpec`], so that the machine at the destination has the same
//! devices in the same places. RAM is a file in memory (`memory-backend-file,share=on`) below the site's own folder:
//! so the lab can compare the RAM of a stopped source with the destination's, page for page, from outside.
//!
//! **Odd RAM sizes.** QEMU 7.2 under TCG loses dirty pages: a fast path in the dirty bitmap's synchronisation, taken
//! when a block of RAM covers whole words of the bitmap (64 pages), clears bits without telling the TLBs, so that later
//! writes through them are missed. A block whose size is not a multiple of 256 KiB never takes that path. So under TCG
//! each guest has 8 KiB more than the scenario asks for, and no other large block (`-vga none`).
//! `GODWIT_LAB_EVEN_RAM=1` leaves them away, to see the RAM check fail.

use crate::disks::Monitor;
use crate::fabric::{GUEST_MTU, Site};
use crate::images::{DiskLayout, GuestImage};
use crate::scenario::{self, Vm};
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::vm::OnCut;
use godwit_load::control::Control;
use godwit_qmp::{LISTENS, Qmp};
use godwit_units::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Port of the load program's control protocol.
pub const CONTROL_PORT: u16 = 7000;
/// Bound on what takes moments on an idle machine: QEMU's monitor and the load program answer. A busy one emulates slowly.
const UP: Duration = Duration::from_secs(120);
/// Port of the load program's echo.
pub const ECHO_PORT: u16 = 7007;

/// How guest instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// By the processor.
    Kvm,
    /// By QEMU's translator.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

impl Accel {
    /// CPU model. Under TCG a small one: what it lacks (AVX above all) the guest's kernel would use and the translator
    /// would have to imitate.
    fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => PORTABLE_CPU,
        }
    }
}

/// A CPU model that is the same on every host. Godwit's guests have it under KVM too: `host` is another CPU on another host.
pub const PORTABLE_CPU: &str = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt";

/// An interface that is a port for wires.
#[derive(Clone, Debug)]
pub struct Nic {
    /// Its name, in the guest and as a port.
    pub name: String,
    /// Its address, with the length of its prefix.
    pub address: String,
    /// The address alone.
    pub ip: Ipv4Addr,
    /// MAC address.
    pub mac: String,
    /// Bytes.
    pub mtu: u16,
}

/// What is the same in every QEMU of one VM.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// The VM's name.
    pub name: String,
    /// Its kernel and file system.
    pub image: GuestImage,
    /// Kernel's first file system, with the load program.
    pub initrd: PathBuf,
    /// RAM.
    pub memory: Bytes,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Sizes of the disks.
    pub disks: Vec<Bytes>,
    /// Where the disks are, if that is a place that all sites reach.
    pub shared: Option<PathBuf>,
    /// What becomes of it, with Godwit, while a block does not come that it waits for.
    pub on_cut: OnCut,
    /// Its trust domain.
    pub domain: Option<String>,
    /// Where things are on the first disk.
    pub layout: DiskLayout,
    /// Address on the guests' segment.
    pub address: Ipv4Addr,
    /// MAC address.
    pub mac: String,
    /// Its other interfaces, in order.
    pub nics: Vec<Nic>,
    /// Its routes by these: where to, and by whom.
    pub routes: Vec<(String, Ipv4Addr)>,
    /// How instructions are executed.
    pub accel: Accel,
}

impl GuestSpec {
    /// The `index`-th VM of a scenario.
    ///
    /// # Errors
    /// When the image's data and the loads do not fit the disks.
    pub fn new(
        index: usize,
        vm: &Vm,
        image: &GuestImage,
        initrd: PathBuf,
        shared: Option<PathBuf>,
        accel: Accel,
    ) -> Result<Self> {
        let number = u8::try_from(index + 11).context("too many VMs")?;
        let odd = match accel {
            Accel::Tcg if std::env::var_os("GODWIT_LAB_EVEN_RAM").is_none() => Bytes::kib(8),
            _ => Bytes::ZERO,
        };
        Ok(Self {
            name: vm.name.get_ref().clone(),
            image: image.clone(),
            initrd,
            memory: Bytes::mib(u64::from(*vm.memory_mib.get_ref())) + odd,
            vcpus: vm.vcpus,
            disks: vm.disks(),
            shared,
            on_cut: vm.on_cut,
            domain: vm.domain.as_ref().map(|domain| domain.get_ref().clone()),
            layout: image.layout(vm)?,
            address: Ipv4Addr::new(10, 99, 0, number),
            mac: format!("02:67:77:00:00:{number:02x}"),
            nics: vm.nic.iter().enumerate().filter_map(|(index, nic)| further(nic, index, number)).collect(),
            routes: vm
                .routes
                .iter()
                .filter_map(|text| scenario::route(text.get_ref()))
                .map(|(to, via)| (to.to_owned(), via))
                .collect(),
            accel,
        })
    }

    /// A disk's file in `site`; `life` tells the QEMUs apart that a VM has had.
    #[must_use]
    pub fn disk_file(&self, site: &Site, life: u32, disk: usize) -> PathBuf {
        match &self.shared {
            Some(folder) => folder.join(format!("{}.disk{disk}.raw", self.name)),
            None => site.folder.join(format!("{}.{life}.disk{disk}.raw", self.name)),
        }
    }

    /// The kernel's command line: the load program's orders are in it.
    #[must_use]
    pub fn kernel_words(&self) -> String {
        let Self { address, layout, .. } = self;
        let content = self.image.content_folder();
        let mut arguments =
            format!("serve,--listen,0.0.0.0:{CONTROL_PORT},--echo,0.0.0.0:{ECHO_PORT},--content,{content}");
        for (index, _) in self.disks.iter().enumerate() {
            let letter = char::from(b'a' + u8::try_from(index).expect("at most eight disks"));
            let offset = if index == 0 { layout.records_at } else { Bytes::ZERO };
            arguments += &format!(",--disk,/dev/vd{letter},--disk-offset,{}", offset.0);
        }
        format!(
            "console=ttyS0 quiet panic=-1 oops=panic random.trust_cpu=on no_timer_check tsc=reliable clocksource=tsc \
             nowatchdog nosoftlockup rcupdate.rcu_cpu_stall_suppress=1 \
             godwit.ip={address}/16 godwit.mtu={GUEST_MTU}{} godwit.args={arguments}",
            self.network_words()
        )
    }

    /// What it is told of its further interfaces.
    fn network_words(&self) -> String {
        let nic = |(index, nic): (usize, &Nic)| {
            let n = index + 1;
            format!(" godwit.name{n}={} godwit.ip{n}={} godwit.mtu{n}={}", nic.name, nic.address, nic.mtu)
        };
        let nics: String = self.nics.iter().enumerate().map(nic).collect();
        let routes: Vec<String> = self.routes.iter().map(|(to, via)| format!("{to}@{via}")).collect();
        if routes.is_empty() { nics } else { format!("{nics} godwit.routes={}", routes.join(",")) }
    }
}

/// The `index`-th of the further interfaces of the guest of that number.
fn further(nic: &scenario::Nic, index: usize, number: u8) -> Option<Nic> {
    Some(Nic {
        name: nic.port(index),
        address: nic.address.get_ref().clone(),
        ip: nic.ip()?,
        mac: format!("02:67:77:10:{:02x}:{number:02x}", index + 1),
        mtu: nic.mtu,
    })
}

/// Whether a QEMU boots or waits for a guest to arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Boots.
    Boot,
    /// Waits for a migration (`-incoming defer`), and does not run it by itself (`-S`).
    Incoming,
}

/// A running QEMU, killed on drop.
#[derive(Debug)]
pub struct Guest {
    /// What it runs.
    pub spec: GuestSpec,
    /// The site's name.
    pub site: String,
    /// Its control socket.
    pub qmp: Qmp,
    /// Its disks.
    pub disk_files: Vec<PathBuf>,
    /// Its RAM, readable from here.
    pub ram: File,
    process: Child,
    log: PathBuf,
    /// What the guest printed.
    pub console: PathBuf,
    tap: String,
}

impl Guest {
    /// Starts a QEMU in `site`. Its disks have to be there for [`Start::Boot`] and are made empty for
    /// [`Start::Incoming`].
    ///
    /// # Errors
    /// With the end of QEMU's log when it does not come up.
    pub fn start(site: &Site, spec: &GuestSpec, life: u32, start: Start) -> Result<Self> {
        let tag = format!("{}.{life}", spec.name);
        let disk_files: Vec<_> = (0..spec.disks.len()).map(|d| spec.disk_file(site, life, d)).collect();
        if start == Start::Incoming && spec.shared.is_none() {
            for (file, size) in disk_files.iter().zip(&spec.disks) {
                File::create_new(file)
                    .and_then(|f| f.set_len(size.0))
                    .with_context(|| format!("cannot make {}", file.display()))?;
            }
        }
        let run = site.run_folder();
        let socket = run.join(format!("{tag}.qmp"));
        let ram = run.join(format!("{tag}.ram"));
        let log = site.folder.join(format!("{tag}.log"));
        let console = site.folder.join(format!("{tag}.console"));
        // An interface name has 15 bytes at most, which a VM's name may exceed; its address tells it apart as well.
        let tap = format!("tap{}-{life}", spec.address.octets()[3]);
        site.ns.ip([
            format!("tuntap add dev {tap} mode tap vnet_hdr"),
            format!("link set {tap} mtu {GUEST_MTU} master br0 up"),
        ])?;

        let memory_kib = spec.memory.0 >> 10;
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-name",
            &tag,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-vga",
            "none",
            "-no-reboot",
        ]);
        command.args([
            "-machine",
            "q35,memory-backend=ram0",
            "-cpu",
            spec.accel.cpu(),
            "-smp",
            &spec.vcpus.to_string(),
        ]);
        command.args(["-accel", if spec.accel == Accel::Kvm { "kvm" } else { "tcg,thread=multi" }]);
        command.args(["-m", &format!("{memory_kib}k"), "-object"]);
        command.arg(format!("memory-backend-file,id=ram0,size={memory_kib}k,mem-path={},share=on", ram.display()));
        command.arg("-kernel").arg(spec.image.kernel_file()).arg("-initrd").arg(&spec.initrd);
        command.args(["-append", &spec.kernel_words()]);
        for (index, file) in disk_files.iter().enumerate() {
            // `-drive` rather than `-blockdev`: `migrate -b` finds disks by the names that only this gives them.
            let file = file.display();
            command.args([
                "-drive",
                &format!("if=none,id=disk{index},node-name=node{index},format=raw,discard=unmap,file={file}"),
            ]);
            command.args(["-device", &format!("virtio-blk-pci,drive=disk{index},id=vd{index}")]);
        }
        command.args(["-netdev", &format!("tap,id=net0,ifname={tap},script=no,downscript=no,vhost=off")]);
        command.args(["-device", &format!("virtio-net-pci,netdev=net0,mac={},romfile=", spec.mac)]);
        command.args(["-device", "virtio-rng-pci"]);
        command.args(["-serial", &format!("file:{}", console.display())]);
        command.args(["-qmp", &format!("unix:{}{LISTENS}", socket.display())]);
        if start == Start::Incoming {
            command.args(["-S", "-incoming", "defer"]);
        }
        let errors = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(errors.try_clone()?).stderr(errors);
        let process =
            site.ns.run(move || command.spawn()).context("cannot start qemu-system-x86_64; is it installed?")?;

        let connected = site.ns.run(move || {
            // Writable, so that a page can be damaged on purpose.
            let open = || OpenOptions::new().read(true).write(true).open(&ram);
            Qmp::connect(&socket, UP).map(|qmp| (qmp, open()))
        });
        // From here on a failure drops `Booting`, which kills the process.
        let booting = Booting(Some(process));
        let (qmp, ram) = connected.with_context(|| format!("QEMU of `{tag}` did not come up: {}", tail(&log)))?;
        let ram = ram.context("QEMU's RAM file is not there")?;
        let process = booting.done();
        Ok(Self { spec: spec.clone(), site: site.name.clone(), qmp, disk_files, ram, process, log, console, tap })
    }

    /// Waits until the guest says that its load program is up.
    ///
    /// # Errors
    /// With the end of the console when QEMU ends, or when that takes more than `timeout`.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<()> {
        let process = &mut self.process;
        await_ready(&self.spec.name, &self.console, timeout, || match process.try_wait() {
            Ok(Some(status)) => bail!("its QEMU ended ({status}): {}", tail(&self.log)),
            _ => Ok(()),
        })
    }

    /// The block nodes of its disks.
    #[must_use]
    pub fn disk_nodes(&self) -> Vec<String> {
        (0..self.spec.disks.len()).map(|disk| format!("node{disk}")).collect()
    }

    /// Runs a QMP command.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).with_context(|| format!("VM `{}` in {}", self.spec.name, self.site))
    }

    /// Ends this QEMU and removes its tap; the disk files stay.
    pub fn quit(mut self, site: &Site) {
        let _ = self.qmp.execute_within("quit", Value::Null, Duration::from_secs(5));
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let tap = self.tap.clone();
        drop(self);
        // The tap is persistent; it would go with the site at the latest.
        let _ = site.ns.ip([format!("link delete {tap}")]);
    }

    /// What QEMU and the guest said last, for a failure's report.
    #[must_use]
    pub fn last_words(&self) -> String {
        format!("QEMU: {}; console: {}", tail(&self.log), tail(&self.console))
    }
}

impl Monitor for Guest {
    fn monitor(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp(command, arguments)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A process that is killed unless it comes up.
struct Booting(Option<Child>);

impl Booting {
    fn done(mut self) -> Child {
        self.0.take().expect("taken once, here")
    }
}

impl Drop for Booting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A TCP connection made inside `site`.
///
/// # Errors
/// When nobody answers within [`UP`].
pub fn connect(site: &Site, to: SocketAddr) -> std::io::Result<TcpStream> {
    site.ns.run(move || TcpStream::connect_timeout(&to, UP))
}

/// Waits until the console says that the load program is up; `look` may find a reason to wait no longer.
///
/// # Errors
/// With the end of the console when `look` fails, or when that takes more than `timeout`.
pub fn await_ready(vm: &str, console: &Path, timeout: Duration, mut look: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + timeout;
    // Read as bytes: a guest may print anything.
    while !std::fs::read(console).is_ok_and(|text| String::from_utf8_lossy(&text).contains("GODWIT-GUEST-READY")) {
        let words = || format!("the guest `{vm}` did not boot; its console ends:\n{}", tail(console));
        look().with_context(words)?;
        if Instant::now() > deadline {
            return Err(anyhow!("it was not up after {} s", timeout.as_secs())).with_context(words);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A connection from `site` to the load program of a guest; `console` is quoted when there is none.
///
/// # Errors
/// When the guest does not answer within [`UP`].
pub fn load_program(site: &Site, spec: &GuestSpec, console: &Path) -> Result<Control> {
    let stream = connect(site, SocketAddr::from((spec.address, CONTROL_PORT))).with_context(|| {
        format!(
            "the load program of `{}` cannot be reached from {}; its console ends:\n{}",
            spec.name,
            site.name,
            tail(console)
        )
    })?;
    Ok(Control::new(stream, UP))
}

/// The last lines of a file, for errors.
#[must_use]
pub fn tail(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(1500)..]).into_owned();
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}
