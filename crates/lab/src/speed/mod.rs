//! How fast wires are, beside other ways between two hosts: VirtualWire's figures 11 to 14.
//!
//! ```text
//!   near ── host a ═══════ host b ── far      veth, vxlan, wire, openvpn, user-space: one link or many, side by side
//!   near ── s1 ── s2 ── ... ── far            plain, collapsed, tunnelled: a chain of switches
//! ```
//!
//! Two hosts are two sites that a veth joins, without the WAN's emulator. What Godwit makes it makes by the user's commands: the ends of
//! its wires are routers, its chains are switches ([`ways`]). Everything that is compared stands there at once and is measured in turn,
//! window by window, so that what else the machine does falls on all ([`traffic`]). A figure belongs to its machine; ratios of one
//! round's windows are what counts.

mod traffic;
mod ways;

use crate::fabric::Fabric;
use crate::godwit::Installation;
use crate::progress::Progress;
use crate::report::SpeedWindow;
use crate::scenario::Scenario;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use traffic::Pair;

/// Most links side by side: a component's ports.
pub const MAX_LINKS: u8 = 64;
/// Longest chain of switches.
pub const MAX_CHAIN: u8 = 8;

/// What a scenario asks for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// What is compared.
    pub ways: Vec<Way>,
    /// Links side by side; 1 to [`MAX_LINKS`].
    #[serde(default = "one")]
    pub links: u8,
    /// Switches between the ends, for the ways that are chains; at most [`MAX_CHAIN`].
    #[serde(default)]
    pub chain: u8,
    /// How often each is measured.
    #[serde(default = "seven")]
    pub windows: u8,
    /// For how long, seconds.
    #[serde(default = "second")]
    pub window_s: f64,
}

const fn one() -> u8 {
    1
}

const fn seven() -> u8 {
    7
}

const fn second() -> f64 {
    1.0
}

/// A way from one end to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A pair of interfaces from end to end.
    Veth,
    /// On each host a bridge and a VXLAN device, made by hand.
    Vxlan,
    /// A wire of Godwit's between the hosts.
    Wire,
    /// On each host a bridge and OpenVPN, with AES-256-GCM.
    Openvpn,
    /// On each host a bridge and the simplest tunnel that there is: socat from a tap to UDP.
    UserSpace,
    /// Both ends on one host, on a bridge made by hand.
    Bridge,
    /// Both ends on one host, joined by a wire.
    Collapsed,
    /// A chain on one host, made by hand: bridges in namespaces, with a veth, a bridge and a veth between each two.
    PlainChain,
    /// The same of Godwit's switches and wires.
    CollapsedChain,
    /// Godwit's switches, by turns on either host.
    TunnelledChain,
}

impl Way {
    fn is_chain(self) -> bool {
        matches!(self, Self::PlainChain | Self::CollapsedChain | Self::TunnelledChain)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Veth => "veth",
            Self::Vxlan => "vxlan",
            Self::Wire => "wire",
            Self::Openvpn => "openvpn",
            Self::UserSpace => "user-space",
            Self::Bridge => "bridge",
            Self::Collapsed => "collapsed",
            Self::PlainChain => "plain-chain",
            Self::CollapsedChain => "collapsed-chain",
            Self::TunnelledChain => "tunnelled-chain",
        })
    }
}

impl Speed {
    /// What is wrong with it, if anything is.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if self.ways.is_empty() {
            return Some("`ways` is empty; nothing would be measured".into());
        }
        if !(1..=MAX_LINKS).contains(&self.links) || self.chain > MAX_CHAIN {
            return Some(format!("takes 1 to {MAX_LINKS} `links` and a `chain` of at most {MAX_CHAIN}"));
        }
        if self.ways.iter().any(|way| way.is_chain()) && (self.chain == 0 || self.links != 1) {
            return Some("has a chain among its `ways`: say how long, by `chain`, and leave out `links`".into());
        }
        if self.windows == 0 || !(0.1..=60.0).contains(&self.window_s) {
            return Some("takes at least one of `windows`, each of 0.1 to 60 seconds".into());
        }
        None
    }
}

/// Measures all that the scenario asks for, below `work`.
///
/// # Errors
/// When something cannot be made; nothing stays.
pub fn run(scenario: &Scenario, asked: &Speed, work: &Path, progress: &Progress) -> Result<Vec<SpeedWindow>> {
    progress.note("building hosts");
    let names = scenario.site.iter().map(|site| site.name.get_ref().as_str());
    let fabric = Arc::new(Fabric::direct(names, work)?);
    progress.note("starting Godwit");
    let installation = Installation::start(&fabric, &scenario.site, work)?;
    let mut worlds = vec![];
    for way in &asked.ways {
        progress.note(&format!("building {way}"));
        worlds.push(ways::build(*way, asked, worlds.len(), &installation, work)?);
    }
    let window = Duration::from_secs_f64(asked.window_s);
    let mut found = vec![];
    for round in 0..usize::from(asked.windows) {
        progress.note(&format!("round {} of {}", round + 1, asked.windows));
        for number in turn(round, worlds.len()) {
            let (way, pair): (Way, &Pair) = (asked.ways[number], worlds[number].pair());
            let tcp = traffic::throughput(pair, window)?;
            let udp = traffic::frames(pair, window / 2)?;
            found.push(SpeedWindow {
                way: way.to_string(),
                links: asked.links,
                chain: asked.chain,
                round: round as u32,
                mbit: tcp,
                frames_per_s: udp.frames_per_s,
                cpu_us_per_frame: udp.cpu_us_per_frame,
                us: traffic::latency(pair)?,
            });
        }
    }
    Ok(found)
}

/// The order of a round: another one each time, so that what one leaves behind falls on each.
fn turn(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).map(|n| (n + round) % count).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_each_way_once_and_begins_with_another() {
        let rounds: Vec<Vec<usize>> = (0..4).map(|round| turn(round, 4)).collect();
        assert_eq!(rounds, [vec![0, 1, 2, 3], vec![0, 3, 2, 1], vec![2, 3, 0, 1], vec![2, 1, 0, 3]]);
    }
}
