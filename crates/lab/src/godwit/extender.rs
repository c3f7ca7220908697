//! Extenders of a run: pairs of sites that encrypted tunnels join, connected as a user connects them, before there is any guest.
//!
//! Of a site its host carries, and its second one where it has one (`carriers = 2`). What crosses the WAN between two such sites the emulator sees, all of it: packets of
//! wires outside a tunnel are counted from when the extender is up, and there should be none, whoever is killed.
//!
//! Programs that stand in for the kernel's WireGuard have their sockets in one folder of the machine; each site that carries gets
//! an empty one of its own over that.

use super::{Installation, places};
use crate::fabric::{Fabric, Site, TUNNEL_PORTS};
use crate::report::ExtenderReport;
use anyhow::{Context, Result, bail};
use godwit_api::extender::Extender;
use godwit_wan::{Class, Counters};
use rustix::mount::{MountFlags, mount};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Where `wg` looks for programs' sockets.
const SOCKETS: &str = "/run/wireguard";
/// How long tunnels may take until they are answered: seconds, on a machine that is not busy.
const UP: Duration = Duration::from_secs(60);
/// The variable that names programs of extenders.
const MARK: &str = "GODWIT_EXTENDER";
/// How the names of tunnels' devices begin.
const DEVICES: &str = "gx";

/// What the option `--extender` of this site's node is.
#[must_use]
pub fn offer(site: &Site) -> String {
    SocketAddr::from((site.underlay, *TUNNEL_PORTS.start())).to_string()
}

/// Gives a site that carries a folder of its own for programs' sockets.
///
/// # Errors
/// When it cannot be mounted.
pub fn prepare(site: &Site) -> Result<()> {
    site.ns.run(|| {
        std::fs::create_dir_all(SOCKETS).with_context(|| format!("cannot make {SOCKETS}"))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", SOCKETS, "tmpfs", flags, Some(c"size=64k,mode=0700"))
            .with_context(|| format!("cannot mount over {SOCKETS}"))
    })
}

/// An extender that was up, and what had been counted on its path before.
#[derive(Clone, Debug)]
pub struct Joined {
    between: [String; 2],
    before: Counters,
}

/// Joins the fabric's pairs of sites, and waits until each is joined.
///
/// # Errors
/// With Godwit's words; when one does not come up, with what is wrong with it.
pub fn connect(installation: &Installation) -> Result<Vec<Joined>> {
    let fabric = installation.fabric();
    for [a, b] in &fabric.extenders {
        installation.command(["extender", "connect", a, b])?;
    }
    let joined = fabric.extenders.iter().map(|between| {
        let [a, b] = between;
        await_up(installation, a, b)?;
        Ok(Joined { between: between.clone(), before: fabric.counters(a, b)? })
    });
    joined.collect()
}

/// Whether all tunnels of a pair of sites are up, as hosts say that are asked now.
///
/// # Errors
/// With Godwit's words, or with what is wrong.
pub fn look(installation: &Installation, a: &str, b: &str) -> Result<()> {
    let shown: Extender = installation.json(&["extender", "show", a, b])?;
    if !shown.up || !shown.problems.is_empty() {
        bail!("the extender of `{a}` and `{b}`: {}", shown.problems.join("; "));
    }
    Ok(())
}

fn await_up(installation: &Installation, a: &str, b: &str) -> Result<()> {
    let deadline = Instant::now() + UP;
    loop {
        match look(installation, a, b) {
            Err(error) if Instant::now() > deadline => return Err(error.context("it does not come up")),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
            Ok(()) => return Ok(()),
        }
    }
}

/// What has passed since they were up.
#[must_use]
pub fn seen(installation: &Installation) -> Vec<ExtenderReport> {
    installation.joined.iter().filter_map(|joined| passed(installation.fabric(), joined)).collect()
}

fn passed(fabric: &Fabric, Joined { between, before }: &Joined) -> Option<ExtenderReport> {
    let since = fabric.counters(&between[0], &between[1]).ok()?.since(before);
    let (tunnel, clear) = (since.class(Class::Tunnel), since.class(Class::Client));
    Some(ExtenderReport {
        between: between.clone(),
        tunnel_packets: tunnel.delivered.packets,
        tunnel_bytes: tunnel.delivered.bytes.0,
        // What was lost on the way was to be seen there all the same.
        clear_packets: clear.delivered.packets + clear.dropped().packets,
    })
}

/// Kills what carries the tunnels of a site's first host: the programs, or, where the kernel does it, the devices.
///
/// # Errors
/// When there is nothing of that kind.
pub fn kill(site: &Site) -> Result<()> {
    let programs = programs(site);
    programs.iter().try_for_each(|id| places::kill(*id))?;
    if !programs.is_empty() {
        return Ok(());
    }
    let devices: Vec<String> = site.ns.run(|| {
        let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().filter_map(Result::ok);
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(DEVICES)).collect()
    });
    if devices.is_empty() {
        bail!("`{}` has no tunnel that could be killed", site.name);
    }
    site.ns.ip(devices.iter().map(|device| format!("link delete {device}")))
}

/// Ends the programs of all hosts; the nodes, which would start them again, have ended.
pub fn end_all(fabric: &Fabric) {
    // One that is gone meanwhile is what is wanted.
    fabric.hosts().flat_map(|(_, host)| programs(host)).for_each(|id| drop(places::kill(id)));
}

/// The programs that carry tunnels of this host.
fn programs(site: &Site) -> Vec<u32> {
    let here = places::namespace_of(site);
    let lives_here = |id: &u32| here.is_some() && std::fs::read_link(format!("/proc/{id}/ns/net")).ok() == here;
    places::marked(&format!("{MARK}=/")).into_iter().filter(lives_here).collect()
}
