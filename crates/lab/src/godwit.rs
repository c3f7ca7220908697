//! Godwit in the lab: its nodes, its controller, and its commands, as a user has them.
//!
//! ```text
//!   site illinois                 site texas                    site california (the last one)
//!   godwit node  -- godwit/       godwit node  -- godwit/       godwit node, godwit controller
//!     qemu ...                      qemu ...                    godwit vm create, godwit move ...
//! ```
//!
//! The lab knows the binary's commands and the JSON that they print ([`godwit_api`]'s types), and nothing else of Godwit:
//! what it finds, a user would find. It looks at the guests from outside ([`places`]), and it can hold a node at a point of
//! a move ([`failpoint`]), which is what a node's tests offer.
//!
//! What can go wrong: the binary is missing (the error says how to build it), a daemon ends (its log's end is quoted), a
//! command fails (with its own words). A daemon that a scenario kills is started again; the guests go on meanwhile, and are
//! ended with the installation.

pub mod daemon;
pub mod extender;
pub mod failpoint;
pub mod hosted;
pub mod incident;
pub mod journey;
pub mod places;

use crate::fabric::{CONTROLLER_PORT, DISK_PORT, Fabric, LINK_PORT, MEMORY_PORT, NODE_PORT, Site};
use crate::guest::tail;
use crate::scenario::{self, Network};
use anyhow::{Context, Result, bail};
use daemon::Daemon;
use failpoint::Failpoints;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The component that every guest is wired to: the segment that is stretched over the sites, or the gateway in the last one.
pub const COMPONENT: &str = "lan";
/// How long a daemon may take until it listens. It starts in moments; the machine may be busy with guests.
const UP: Duration = Duration::from_secs(120);
/// The file in a site's folder that says how commands there reach the controller: `NAME=VALUE` lines.
pub const ENVIRONMENT: &str = "godwit.env";

/// A lock that outlives a panic of its holder: what it guards is replaced whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The `godwit` binary: `$GODWIT_BIN`, or the one beside `godwit-lab`.
///
/// # Errors
/// When there is none.
pub fn binary() -> Result<PathBuf> {
    let path = match std::env::var_os("GODWIT_BIN") {
        Some(path) => std::path::absolute(path)?,
        None => std::env::current_exe()?.with_file_name("godwit"),
    };
    if !path.is_file() {
        bail!(
            "there is no Godwit to move with at {}: run `cargo build -p godwit`, set GODWIT_BIN, or put `godwit = false` \
             into the scenario for its baselines alone",
            path.display()
        );
    }
    Ok(path)
}

/// The host of a site that guests run on, as Godwit knows it (and of a second host's name its own): a host and a site cannot have the same name, since VMs move to either.
#[must_use]
pub fn host_of(site: &str) -> String {
    format!("host-{site}")
}

/// Where a site's node and commands have their files.
#[derive(Clone, Debug)]
pub struct Folders {
    /// A node's durable state.
    pub state: PathBuf,
    /// A node's sockets; a folder in memory that only the site sees.
    pub run: PathBuf,
    /// Boot files.
    pub images: PathBuf,
    /// Certificates, a folder for each role.
    pub credentials: PathBuf,
}

impl Folders {
    /// Those of `site`.
    #[must_use]
    pub fn of(site: &Site) -> Self {
        Self {
            state: site.folder.join("godwit"),
            run: site.run_folder().join("godwit"),
            images: site.folder.join("images"),
            credentials: site.folder.join("credentials"),
        }
    }
}

/// Godwit, installed in all sites of a run. Ended on drop, with the guests that it runs.
#[derive(Debug)]
pub struct Installation {
    binary: PathBuf,
    fabric: Arc<Fabric>,
    /// By their hosts: sites' names, and those of second hosts.
    nodes: HashMap<String, Mutex<Daemon>>,
    controller: Mutex<Daemon>,
    failpoints: HashMap<String, Failpoints>,
    /// Pairs of sites that are joined by extenders.
    joined: Vec<extender::Joined>,
    /// Restarts and restorations that are still to come.
    pub(crate) later: incident::Later,
}

impl Installation {
    /// Makes certificates below `work`, starts a node in each site and the controller in the last one, and makes the sites
    /// known to it.
    ///
    /// # Errors
    /// When something does not start or is refused, with its own words.
    pub fn start(fabric: &Arc<Fabric>, wanted: &[scenario::Site], work: &Path) -> Result<Self> {
        let binary = binary()?;
        let home = fabric.sites.last().context("a scenario has sites")?;
        let issue = Issuer { binary: &binary, authority: work.join("pki") };
        issue.found()?;
        let mut nodes = HashMap::new();
        let mut failpoints = HashMap::new();
        for (of, site) in fabric.hosts() {
            let folders = Folders::of(site);
            issue.issue("node", &host_of(&site.name), &folders.credentials.join("node"))?;
            issue.issue("client", "lab", &folders.credentials.join("client"))?;
            std::fs::create_dir_all(&folders.images)?;
            if fabric.carries(of) {
                extender::prepare(site)?;
            }
            let points = Failpoints::create(site.folder.join("failpoints"))?;
            let mut node = node(&binary, fabric.carries(of), site, &folders, &points);
            if let Some(qemu) = wanted.iter().find(|w| w.name.get_ref() == of).and_then(|w| w.qemu.as_ref()) {
                node = node.with_environment("PATH", path_with(qemu.get_ref())?);
            }
            nodes.insert(site.name.clone(), Mutex::new(node));
            failpoints.insert(site.name.clone(), points);
            write_environment(site, home)?;
        }
        issue.issue("controller", "controller", &Folders::of(home).credentials.join("controller"))?;
        let mut installation = Self {
            controller: Mutex::new(controller(&binary, home)),
            binary,
            fabric: fabric.clone(),
            nodes,
            failpoints,
            joined: vec![],
            later: incident::Later::default(),
        };
        installation.bring_up()?;
        installation.joined = extender::connect(&installation)?;
        Ok(installation)
    }

    fn bring_up(&self) -> Result<()> {
        let home = self.home();
        lock(&self.controller).start(home)?;
        for (_, host) in self.fabric.hosts() {
            lock(self.node(&host.name)).start(host)?;
        }
        self.await_listening(&self.controller, SocketAddr::from((home.underlay, CONTROLLER_PORT)))?;
        for site in &self.fabric.sites {
            self.command(["site", "add", &site.name])?;
        }
        for (of, host) in self.fabric.hosts() {
            let api = SocketAddr::from((host.underlay, NODE_PORT));
            self.await_listening(self.node(&host.name), api)?;
            self.command(["host", "add", &host_of(&host.name), "--site", of, "--api", &api.to_string()])?;
        }
        let gateway = format!("{}:br0", host_of(&home.name));
        match self.fabric.network {
            Network::Switch => self.command(["component", "add", COMPONENT, "--switch", "br0"])?,
            Network::Gateway => self.command(["component", "add", COMPONENT, "--gateway", &gateway])?,
        };
        Ok(())
    }

    /// The file with a token for all that may be done in a trust domain; made when it is first asked for.
    pub(crate) fn token(&self, domain: &str) -> Result<PathBuf> {
        let file = Folders::of(self.home()).credentials.join(format!("token-{domain}"));
        if !file.exists() {
            let words = self.command(["token", "create", domain, "--domain", domain, "--role", "admin"])?;
            let mut options = OpenOptions::new();
            let made = options.write(true).create_new(true).mode(0o600).open(&file);
            let written = made.and_then(|mut made| made.write_all(words.trim().as_bytes()));
            written.with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(file)
    }

    /// Waits until `daemon` takes connections from the site where the controller and the commands are.
    fn await_listening(&self, daemon: &Mutex<Daemon>, at: SocketAddr) -> Result<()> {
        let deadline = Instant::now() + UP;
        loop {
            let tried = self.home().ns.run(move || TcpStream::connect_timeout(&at, Duration::from_secs(1)));
            let Err(error) = tried else { return Ok(()) };
            let mut daemon = lock(daemon);
            if let Some(status) = daemon.ended() {
                bail!("{} ended while it started ({status}); its log ends:\n{}", daemon.name(), tail(daemon.log()));
            }
            if Instant::now() > deadline {
                bail!(
                    "{} does not listen at {at} after {} s ({error}); its log ends:\n{}",
                    daemon.name(),
                    UP.as_secs(),
                    tail(daemon.log())
                );
            }
            drop(daemon);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The site where the controller and the commands are: the last one, which is the clients' as a rule.
    #[must_use]
    pub fn home(&self) -> &Site {
        self.fabric.sites.last().expect("a scenario has sites")
    }

    /// The sites.
    #[must_use]
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    pub(crate) fn node(&self, host: &str) -> &Mutex<Daemon> {
        self.nodes.get(host).expect("each site has a node, and a checked scenario names only sites that exist")
    }

    pub(crate) fn controller(&self) -> &Mutex<Daemon> {
        &self.controller
    }

    /// The points at which the node of `site` can be held.
    pub(crate) fn failpoints(&self, site: &str) -> &Failpoints {
        self.failpoints.get(site).expect("each site has a node, and a checked scenario names only sites that exist")
    }

    /// Puts a boot file into every site's image folder.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn provide(&self, name: &str, file: &Path) -> Result<()> {
        for site in &self.fabric.sites {
            let target = Folders::of(site).images.join(name);
            std::fs::copy(file, &target)
                .with_context(|| format!("cannot copy {} to {}", file.display(), target.display()))?;
        }
        Ok(())
    }

    /// Starts `godwit ARGUMENTS` at the user's site, with its output to be read.
    ///
    /// # Errors
    /// When the binary cannot be run.
    pub fn spawn<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>, stdin: Stdio) -> Result<Child> {
        let home = self.home();
        let mut command = Command::new(&self.binary);
        command.args(arguments).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.envs(environment(home, home));
        // Waiting is done outside, so that the site's thread is free for others.
        home.ns.run(move || command.spawn()).with_context(|| format!("cannot run {}", self.binary.display()))
    }

    /// Runs `godwit ARGUMENTS` at the user's site to its end; yields what it printed.
    ///
    /// # Errors
    /// With its own words when it fails.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        self.command_with(arguments, None)
    }

    /// As [`Installation::command`], with `input` on its standard input.
    ///
    /// # Errors
    /// As [`Installation::command`].
    pub fn command_with<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
        input: Option<&str>,
    ) -> Result<String> {
        let arguments: Vec<_> = arguments.into_iter().map(|a| a.as_ref().to_owned()).collect();
        let mut child = self.spawn(&arguments, if input.is_some() { Stdio::piped() } else { Stdio::null() })?;
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
            // A command that fails before it has read everything says why by itself.
            let _ = std::io::Write::write_all(&mut stdin, input.as_bytes());
        }
        succeeded(&arguments, child.wait_with_output()?)
    }

    /// Runs `godwit ARGUMENTS --json` and reads what it printed.
    ///
    /// # Errors
    /// As [`Installation::command`], and when that is not what this command prints.
    pub fn json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let text = self.command(arguments.iter().chain(&["--json"]))?;
        serde_json::from_str(&text)
            .with_context(|| format!("`godwit {} --json` printed what is not understood: {text}", arguments.join(" ")))
    }

    /// What has to be said of daemons that ended without having been told to.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let daemons = self.nodes.values().chain([&self.controller]);
        let said = daemons.filter_map(|daemon| {
            let mut daemon = lock(daemon);
            let status = daemon.ended()?;
            Some(format!("{} ended by itself ({status}); its log ends: {}", daemon.name(), tail(daemon.log())))
        });
        said.collect()
    }
}

/// The daemons first, so that nobody starts a guest again; then the guests, which outlive their nodes by design.
impl Drop for Installation {
    fn drop(&mut self) {
        lock(&self.controller).kill();
        self.nodes.values().for_each(|node| lock(node).kill());
        places::end_all(&self.fabric);
        places::end_components();
        extender::end_all(&self.fabric);
    }
}

/// What is found first in `folder`, else where it was.
fn path_with(folder: &Path) -> Result<OsString> {
    let rest = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&rest));
    std::env::join_paths(folders).with_context(|| format!("`site.qemu`: {} cannot be in PATH", folder.display()))
}

fn node(binary: &Path, carries: bool, site: &Site, folders: &Folders, points: &Failpoints) -> Daemon {
    let mut arguments = vec!["node".into(), "--name".into(), host_of(&site.name).into()];
    for (flag, path) in [
        ("--state", &folders.state),
        ("--run", &folders.run),
        ("--images", &folders.images),
        ("--credentials", &folders.credentials.join("node")),
    ] {
        arguments.extend([flag.into(), path.clone().into_os_string()]);
    }
    for (flag, value) in [
        ("--address", site.underlay.to_string()),
        ("--api", NODE_PORT.to_string()),
        ("--control", LINK_PORT.to_string()),
        ("--disk", DISK_PORT.to_string()),
        ("--memory", MEMORY_PORT.to_string()),
        // What is measured is not to be disturbed now and then.
        ("--watch-every", "never".into()),
    ] {
        arguments.extend([flag.into(), value.into()]);
    }
    if carries {
        arguments.extend(["--extender".into(), extender::offer(site).into()]);
    }
    let log = site.folder.join("node.log");
    Daemon::new(&format!("the node of {}", site.name), binary, arguments, log)
        .with_environment("GODWIT_FAILPOINTS", points.folder())
}

fn controller(binary: &Path, home: &Site) -> Daemon {
    let listen = SocketAddr::from((home.underlay, CONTROLLER_PORT)).to_string();
    let state = home.folder.join("controller").into_os_string();
    let credentials = Folders::of(home).credentials.join("controller").into_os_string();
    let arguments = vec![
        "controller".into(),
        "--listen".into(),
        listen.into(),
        "--state".into(),
        state,
        "--credentials".into(),
        credentials,
    ];
    Daemon::new("the controller", binary, arguments, home.folder.join("controller.log"))
}

/// What commands in `site` have to know to reach the controller in `home`.
fn environment(site: &Site, home: &Site) -> [(&'static str, String); 2] {
    [
        ("GODWIT_CONTROLLER", SocketAddr::from((home.underlay, CONTROLLER_PORT)).to_string()),
        ("GODWIT_CREDENTIALS", Folders::of(site).credentials.join("client").display().to_string()),
    ]
}

/// Leaves [`environment`] where `godwit-lab enter` finds it, and the binary's folder for its search path.
fn write_environment(site: &Site, home: &Site) -> Result<()> {
    let folder = binary()?.parent().map(|f| f.display().to_string()).unwrap_or_default();
    let lines = environment(site, home).into_iter().chain([("PATH", folder)]);
    let text: String = lines.map(|(name, value)| format!("{name}={value}\n")).collect();
    std::fs::write(site.folder.join(ENVIRONMENT), text).context("cannot write a site's environment")
}

/// Issues certificates with the user's own commands, outside all sites.
struct Issuer<'a> {
    binary: &'a Path,
    authority: PathBuf,
}

impl Issuer<'_> {
    fn found(&self) -> Result<()> {
        self.pki(["init".as_ref(), "--dir".as_ref(), self.authority.as_os_str()])
    }

    fn issue(&self, role: &str, name: &str, out: &Path) -> Result<()> {
        std::fs::create_dir_all(out.parent().context("credentials lie in a folder")?)?;
        let words = ["issue", "--role", role, "--name", name, "--ca"].map(OsStr::new);
        self.pki(words.into_iter().chain([self.authority.as_os_str(), "--out".as_ref(), out.as_os_str()]))?;
        if !out.join("key.pem").is_file() {
            bail!("`{} pki issue` left no key in {}; is it a whole Godwit?", self.binary.display(), out.display());
        }
        Ok(())
    }

    fn pki<'b>(&self, arguments: impl IntoIterator<Item = &'b OsStr>) -> Result<()> {
        let mut command = Command::new(self.binary);
        command.arg("pki").args(arguments).stdin(Stdio::null());
        let words: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
        let output = command.output().with_context(|| format!("cannot run {}", self.binary.display()))?;
        succeeded(&words, output).map(drop)
    }
}

fn succeeded<S: AsRef<OsStr>>(arguments: &[S], output: Output) -> Result<String> {
    if !output.status.success() {
        let words: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`godwit {}` failed ({}): {}", words.join(" "), output.status, said.trim());
    }
    String::from_utf8(output.stdout).context("godwit printed what is not text")
}
