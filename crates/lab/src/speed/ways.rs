//! What is between two ends: made by hand, by other programs, or by Godwit.

use super::traffic::Pair;
use super::{Speed, Way};
use crate::fabric::{GUEST_MTU, Site, VXLAN_PORT};
use crate::godwit::{Installation, host_of};
use crate::ns::Namespace;
use anyhow::{Context, Result, bail};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// UDP port of tunnels made by hand: not Godwit's, which has rules about who may send to it.
const BY_HAND: u16 = VXLAN_PORT + 1;
/// First VXLAN number of these.
const NUMBERS: usize = 100_000;
/// How long a program may take until it has a tap, and until it lets something through.
const UP: Duration = Duration::from_secs(20);

/// A way that is there. It goes with this.
pub(super) struct World {
    pair: Pair,
    // The programs first: they are ended before the namespaces go.
    _programs: Vec<Program>,
    _places: Vec<Namespace>,
}

impl World {
    pub(super) fn pair(&self) -> &Pair {
        &self.pair
    }
}

/// A program that is ended with this.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn address(link: usize, end: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, u8::try_from(link).expect("at most 64 links"), 1 + end as u8)
}

fn links(count: usize) -> Vec<[Ipv4Addr; 2]> {
    (0..count).map(|link| [address(link, 0), address(link, 1)]).collect()
}

/// Makes a way; `number` tells it from the others of a run.
///
/// # Errors
/// When the kernel, a program or Godwit refuses.
pub(super) fn build(way: Way, asked: &Speed, number: usize, godwit: &Installation, work: &Path) -> Result<World> {
    let (count, chain) = (usize::from(asked.links), usize::from(asked.chain));
    let [a, b] = godwit.fabric().sites.as_slice() else { bail!("wires are measured between two sites") };
    let by_hand = ByHand { number, count };
    match way {
        Way::Veth => by_hand.veth(),
        Way::Vxlan => by_hand.vxlan([a, b]),
        Way::Bridge => by_hand.bridge(a),
        Way::Openvpn => by_hand.openvpn([a, b], work),
        Way::UserSpace => by_hand.user_space([a, b]),
        Way::PlainChain => by_hand.chain(a, chain),
        Way::Wire => wires(godwit, count, [a, b], number),
        Way::Collapsed => wires(godwit, count, [a, a], number),
        Way::CollapsedChain => switches(godwit, chain, |_| a, number),
        Way::TunnelledChain => switches(godwit, chain, |place| if place % 2 == 0 { a } else { b }, number),
    }
}

struct ByHand {
    number: usize,
    count: usize,
}

impl ByHand {
    fn ends(&self) -> Result<[Namespace; 2]> {
        Ok([Namespace::new("near")?, Namespace::new("far")?])
    }

    fn world(&self, ends: [Namespace; 2], programs: Vec<Program>, more: Vec<Namespace>) -> Result<World> {
        for (end, place) in ends.iter().enumerate() {
            let lines = (0..self.count).flat_map(|link| {
                [
                    format!("link set g{link} mtu {GUEST_MTU} up"),
                    format!("address add {}/24 dev g{link}", address(link, end)),
                ]
            });
            place.ip(lines)?;
        }
        let pair = Pair { ends: [ends[0].path().to_owned(), ends[1].path().to_owned()], links: links(self.count) };
        Ok(World { pair, _programs: programs, _places: ends.into_iter().chain(more).collect() })
    }

    fn veth(&self) -> Result<World> {
        let ends = self.ends()?;
        let far = ends[1].path().display().to_string();
        ends[0].ip((0..self.count).map(|link| format!("link add g{link} type veth peer name g{link} netns {far}")))?;
        self.world(ends, vec![], vec![])
    }

    /// The name of something in a site: several ways are there at once.
    fn name(&self, letter: char, link: usize, end: usize) -> String {
        format!("{letter}{}-{link}-{end}", self.number)
    }

    /// A bridge for each link in the end's site, with the end's interface on it.
    fn bridges(&self, end: usize, place: &Namespace, site: &Site) -> Result<()> {
        let lines = (0..self.count).flat_map(|link| {
            let (port, bridge) = (self.name('e', link, end), self.name('b', link, end));
            [
                format!("link add {port} type veth peer name g{link} netns {}", place.path().display()),
                format!("link add {bridge} type bridge"),
                format!("link set {bridge} up"),
                format!("link set {port} mtu {GUEST_MTU} master {bridge} up"),
            ]
        });
        site.ns.ip(lines)
    }

    fn vxlan(&self, sites: [&Site; 2]) -> Result<World> {
        let ends = self.ends()?;
        for (end, site) in sites.into_iter().enumerate() {
            self.bridges(end, &ends[end], site)?;
            let lines = (0..self.count).flat_map(|link| {
                let (device, bridge) = (self.name('v', link, end), self.name('b', link, end));
                let (local, remote) = (site.underlay, sites[1 - end].underlay);
                let vni = NUMBERS + 1000 * self.number + link;
                [
                    format!("link add {device} type vxlan id {vni} dstport {BY_HAND} local {local} remote {remote}"),
                    format!("link set {device} mtu {GUEST_MTU} master {bridge} up"),
                ]
            });
            site.ns.ip(lines)?;
        }
        self.world(ends, vec![], vec![])
    }

    fn bridge(&self, site: &Site) -> Result<World> {
        let ends = self.ends()?;
        self.bridges(0, &ends[0], site)?;
        let lines = (0..self.count).flat_map(|link| {
            let (port, bridge) = (self.name('e', link, 1), self.name('b', link, 0));
            [
                format!("link add {port} type veth peer name g{link} netns {}", ends[1].path().display()),
                format!("link set {port} mtu {GUEST_MTU} master {bridge} up"),
            ]
        });
        site.ns.ip(lines)?;
        self.world(ends, vec![], vec![])
    }

    /// Bridges in namespaces of their own, and between each two what a collapsed wire is: a veth, a bridge, a veth.
    fn chain(&self, site: &Site, length: usize) -> Result<World> {
        let ends = self.ends()?;
        let mut switches = vec![];
        for _ in 0..length {
            let switch = Namespace::new("switch")?;
            switch.ip(["link add sw type bridge", "link set sw up"])?;
            switches.push(switch);
        }
        let [near, far] = &ends;
        let places: Vec<&Namespace> = [near].into_iter().chain(&switches).chain([far]).collect();
        for (hop, pair) in places.windows(2).enumerate() {
            let bridge = self.name('c', hop, 0);
            site.ns.ip([format!("link add {bridge} type bridge"), format!("link set {bridge} up")])?;
            for (side, place) in pair.iter().enumerate() {
                let port = self.name('h', hop, side);
                let inner = match (hop + side, side) {
                    (0, _) => "g0".to_owned(),
                    (last, _) if last == length + 1 => "g0".to_owned(),
                    (_, side) => format!("p{}", 2 - side),
                };
                site.ns.ip([
                    format!("link add {port} type veth peer name {inner} netns {}", place.path().display()),
                    format!("link set {port} mtu {GUEST_MTU} master {bridge} up"),
                ])?;
                if inner != "g0" {
                    place.ip([format!("link set {inner} mtu {GUEST_MTU} master sw up")])?;
                }
            }
        }
        self.world(ends, vec![], switches)
    }

    fn user_space(&self, sites: [&Site; 2]) -> Result<World> {
        let port = 6000 + self.number;
        self.by_program(sites, |tap, end| {
            let (local, remote) = (sites[end].underlay, sites[1 - end].underlay);
            let mut command = Command::new("socat");
            command.arg(format!("TUN,tun-type=tap,iff-no-pi,iff-up,tun-name={tap}"));
            // Not `UDP4`: that ends when the other one is not there yet.
            command.arg(format!("UDP4-DATAGRAM:{remote}:{port},bind={local}:{port}"));
            command
        })
    }

    fn openvpn(&self, sites: [&Site; 2], work: &Path) -> Result<World> {
        let keys = work.join("openvpn");
        std::fs::create_dir_all(&keys)?;
        let prints = [certificate(&keys, 0)?, certificate(&keys, 1)?];
        let port = 1194 + self.number;
        self.by_program(sites, |tap, end| {
            let mut command = Command::new("openvpn");
            command.args(["--dev", tap, "--dev-type", "tap", "--proto", "udp4", "--verb", "1", "--dh", "none"]);
            command.args([
                "--local",
                &sites[end].underlay.to_string(),
                "--remote",
                &sites[1 - end].underlay.to_string(),
            ]);
            command.args(["--port", &port.to_string(), if end == 0 { "--tls-server" } else { "--tls-client" }]);
            command
                .arg("--cert")
                .arg(keys.join(format!("{end}.crt")))
                .arg("--key")
                .arg(keys.join(format!("{end}.key")));
            command.args(["--peer-fingerprint", &prints[1 - end], "--data-ciphers", "AES-256-GCM"]);
            command
        })
    }

    /// One tunnel, that a program makes from a tap on each host.
    fn by_program(&self, sites: [&Site; 2], command: impl Fn(&str, usize) -> Command) -> Result<World> {
        if self.count != 1 {
            bail!("a tunnel of a program is measured with one link");
        }
        let ends = self.ends()?;
        let mut programs = vec![];
        for (end, site) in sites.into_iter().enumerate() {
            self.bridges(end, &ends[end], site)?;
            let tap = self.name('u', 0, end);
            let mut command = command(&tap, end);
            let name = command.get_program().to_string_lossy().into_owned();
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = site.ns.run(move || command.spawn());
            programs.push(Program(child.with_context(|| format!("cannot start {name}: apt-get install {name}"))?));
            let deadline = Instant::now() + UP;
            let line = format!("link set {tap} mtu {GUEST_MTU} master {} up", self.name('b', 0, end));
            while let Err(error) = site.ns.ip([&line]) {
                if Instant::now() > deadline {
                    return Err(error).with_context(|| format!("{name} has no interface after {} s", UP.as_secs()));
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let world = self.world(ends, programs, vec![])?;
        world.await_answer()?;
        Ok(world)
    }
}

impl World {
    /// Waits until something passes: programs agree on keys first.
    fn await_answer(&self) -> Result<()> {
        let deadline = Instant::now() + UP;
        loop {
            match super::traffic::latency(&self.pair) {
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => {}
                Ok(_) => return Ok(()),
            }
        }
    }
}

/// A certificate of its own for an end; gives its fingerprint.
fn certificate(folder: &Path, end: usize) -> Result<String> {
    let file = |ending: &str| folder.join(format!("{end}.{ending}")).display().to_string();
    let (key, cert) = (file("key"), file("crt"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=wire", "-keyout", &key, "-out", &cert])
        .stderr(Stdio::null())
        .status()
        .context("cannot run openssl")?;
    let shown = Command::new("openssl").args(["x509", "-noout", "-fingerprint", "-sha256", "-in", &cert]).output()?;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    match text.trim().split_once('=') {
        Some((_, print)) if made.success() => Ok(print.to_owned()),
        _ => bail!("openssl made no certificate in {}", folder.display()),
    }
}

/// A component's file with the same MTU at each port, and addresses where it routes.
fn file(ports: usize, address: impl Fn(usize) -> Option<Ipv4Addr>) -> String {
    let mut text = String::new();
    for port in 0..ports {
        // Writing to a String cannot fail.
        let _ = write!(text, "[[port]]\nnumber = {}\nmtu = {GUEST_MTU}\n", port + 1);
        if let Some(address) = address(port) {
            let _ = writeln!(text, "addresses = [\"{address}/24\"]");
        }
    }
    text
}

/// A component, made by the user's command; gives its namespace.
fn component(godwit: &Installation, name: &str, kind: &str, site: &Site, ports: usize, file: &str) -> Result<PathBuf> {
    let (count, host) = (ports.to_string(), host_of(&site.name));
    let words = ["component", "create", name, "--kind", kind, "--ports", &count, "--host", &host, "--config", "-"];
    godwit.command_with(words, Some(file))?;
    crate::flow::space_of(godwit, name)
}

/// Two routers as ends, and a wire for each link.
fn wires(godwit: &Installation, count: usize, sites: [&Site; 2], number: usize) -> Result<World> {
    let name = |end: usize| format!("end{end}-{number}");
    let mut ends = vec![];
    for (end, site) in sites.into_iter().enumerate() {
        let file = file(count, |link| Some(address(link, end)));
        ends.push(component(godwit, &name(end), "router", site, count, &file)?);
    }
    for link in 0..count {
        let port = |end: usize| format!("{}:p{}", name(end), link + 1);
        godwit.command(["wire", "connect", &port(0), &port(1)])?;
    }
    let [near, far] = [ends.remove(0), ends.remove(0)];
    Ok(World { pair: Pair { ends: [near, far], links: links(count) }, _programs: vec![], _places: vec![] })
}

/// Two routers as ends, switches between them, and a wire from each to the next.
fn switches<'a>(godwit: &Installation, chain: usize, site: impl Fn(usize) -> &'a Site, number: usize) -> Result<World> {
    let name = |place: usize| format!("hop{place}-{number}");
    let mut ends = vec![];
    for place in 0..chain + 2 {
        if place == 0 || place == chain + 1 {
            let file = file(1, |_| Some(address(0, usize::from(place > 0))));
            ends.push(component(godwit, &name(place), "router", site(place), 1, &file)?);
        } else {
            component(godwit, &name(place), "switch", site(place), 2, &file(2, |_| None))?;
        }
        if place > 0 {
            let from = format!("{}:p{}", name(place - 1), if place == 1 { 1 } else { 2 });
            godwit.command(["wire", "connect", &from, &format!("{}:p1", name(place))])?;
        }
    }
    let [near, far] = [ends.remove(0), ends.remove(0)];
    Ok(World { pair: Pair { ends: [near, far], links: links(1) }, _programs: vec![], _places: vec![] })
}
