//! Wires between two ports, in the kernel.
//!
//! What can go wrong within a VM's pause is kept short: the bridge and the tunnel are there before the VM is ([`Wires::lay`] with no
//! device open yet), so that what is left is one change of a port and one of a table. The guard's rules take a process: they are
//! written before there is a tunnel, and else, or where that failed, afterwards, by [`Wires::rule`].

use super::{Wires, net};
use crate::guard::Allowed;
use crate::{EndpointSpec, PortWire, Vni, WireError, WireId};
use godwit_net::{Kind, Link, Net, NetError, Vxlan};
use std::net::IpAddr;
use std::time::Duration;

impl Wires {
    /// The wire is on this host as it says, and what was otherwise is changed without losing a frame. A device that is not named is
    /// left where it is: isolating it is its endpoint's. Gives whether the rules about who may send have to follow.
    ///
    /// # Errors
    /// [`WireError::Net`]; it may be repeated.
    pub async fn lay(&self, wire: &PortWire) -> Result<bool, WireError> {
        let name = self.device('b', wire.wire);
        self.lay_on(&name, wire).await.map_err(net("lay wire", &name))
    }

    async fn lay_on(&self, name: &str, wire: &PortWire) -> Result<bool, NetError> {
        let tunnel = self.device('v', wire.wire);
        let (bridge, known) = tokio::try_join!(self.net.ensure_wire_bridge(name), self.net.find(&tunnel))?;
        if !bridge.up {
            Net::without_ipv6(name)?;
            self.net.up(bridge.index).await?;
        }
        if wire.remotes.is_empty() {
            // The way from port to port first.
            self.join(&bridge, wire).await?;
            if known.is_some() {
                self.net.remove(&tunnel).await?;
            }
            return Ok(known.is_some());
        }
        let mut ruled = known.is_none();
        let vxlan = match known {
            Some(known) => known.of_kind(Kind::Vxlan, "VXLAN device")?,
            None => {
                // Before there is a device that could let something in.
                if let Err(error) = self.guard.only(&[self.allowed(wire)]).await {
                    tracing::warn!(wire = name, %error, "its rules have to follow");
                    ruled = false;
                }
                let wanted = Vxlan { name: &tunnel, vni: wire.vni.0, local: self.underlay, port: wire.port };
                self.net.ensure_vxlan(&wanted).await?
            }
        };
        if vxlan.mtu != u32::from(wire.mtu) {
            self.net.set_mtu(vxlan.index, wire.mtu).await?;
        }
        let joins = vxlan.master != Some(bridge.index);
        if joins {
            Net::without_ipv6(&tunnel)?;
            self.net.set_master(vxlan.index, Some(bridge.index)).await?;
        }
        // Whoever made it a port may have died, or failed, before this; it is up when all is done.
        if joins || !vxlan.up {
            self.net.pass_groups(vxlan.index).await?;
        }
        let changed = self.point(&vxlan, &wire.remotes).await?;
        if !vxlan.up {
            self.net.up(vxlan.index).await?;
        }
        self.join(&bridge, wire).await?;
        Ok(changed && !ruled)
    }

    fn allowed<'a>(&self, wire: &'a PortWire) -> Allowed<'a> {
        Allowed { vni: wire.vni, port: wire.port, local: self.underlay, remotes: &wire.remotes }
    }

    /// Into each of these wires the hosts that it leads to may send, and no other: one process for all of them.
    ///
    /// # Errors
    /// [`WireError::Net`]: the former hosts may, still, and new ones may not. To be repeated.
    pub async fn rule(&self, wires: &[PortWire]) -> Result<(), WireError> {
        let (leading, collapsed): (Vec<_>, Vec<_>) = wires.iter().partition(|wire| !wire.remotes.is_empty());
        let allowed: Vec<_> = leading.into_iter().map(|wire| self.allowed(wire)).collect();
        let ruled = self.guard.only(&allowed).await;
        for wire in collapsed {
            self.guard.forget(wire.vni).await;
        }
        ruled.map_err(net("guard", &self.prefix))
    }

    async fn join(&self, bridge: &Link, wire: &PortWire) -> Result<(), NetError> {
        for device in &wire.devices {
            let port = self.net.get(device).await?;
            if port.master != Some(bridge.index) {
                self.net.set_master(port.index, Some(bridge.index)).await?;
            }
            self.net.pass_groups(port.index).await?;
            if !port.up {
                self.net.up(port.index).await?;
            }
        }
        Ok(())
    }

    /// The wire is not on this host any more: devices that are still its ports go to the pen.
    ///
    /// # Errors
    /// [`WireError::Net`]; it may be repeated.
    pub async fn take_up(&self, wire: WireId) -> Result<(), WireError> {
        let name = self.device('b', wire);
        self.take_up_from(&name, wire).await.map_err(net("take up wire", &name))
    }

    async fn take_up_from(&self, name: &str, wire: WireId) -> Result<(), NetError> {
        if let Some(bridge) = self.net.find(name).await? {
            let links = self.net.list(&self.prefix).await?;
            for port in links.iter().filter(|l| l.master == Some(bridge.index) && l.kind != Kind::Vxlan) {
                let pen = self.pen().await?;
                self.net.set_master(port.index, Some(pen.index)).await?;
            }
        }
        let tunnel = self.device('v', wire);
        if let Some(link) = self.net.find(&tunnel).await? {
            self.net.remove(&tunnel).await?;
            if let Some(vni) = link.vni {
                self.guard.forget(Vni(vni)).await;
            }
        }
        self.net.remove(name).await
    }

    /// An endpoint's device goes to the pen, if it exists: a veth's side is isolated as a tap is.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn pen_device(&self, device: &str) -> Result<(), WireError> {
        let penned = async {
            let Some(link) = self.net.find(device).await? else { return Ok(()) };
            let pen = self.pen().await?;
            if link.master == Some(pen.index) { Ok(()) } else { self.net.set_master(link.index, Some(pen.index)).await }
        };
        penned.await.map_err(net("isolate", device))
    }

    /// Announces a guest into its wire, in the background, until it is isolated: what is behind the other end learns where it is.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn announce_on(&self, wire: WireId, spec: &EndpointSpec) -> Result<(), WireError> {
        let from = self.device('b', wire);
        self.announce_from(&from, spec, None).await.map_err(net("announce", &spec.tap))
    }

    /// As [`Wires::announce_on`], once more, if its announcements were not ended by isolation meanwhile.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn announce_on_again(&self, wire: WireId, spec: &EndpointSpec) -> Result<(), WireError> {
        let Some(live) = super::lock(&self.live).get(&spec.tap).cloned() else { return Ok(()) };
        let from = self.device('b', wire);
        self.announce_from(&from, spec, Some(live)).await.map_err(net("announce", &spec.tap))
    }

    /// Whether there is an interface of that name.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn is_there(&self, device: &str) -> Result<bool, WireError> {
        Ok(self.net.find(device).await.map_err(net("look for", device))?.is_some())
    }

    /// Proof that the guest answers on its wire, asked from this host's end of it: the guest's own host, or the other one, through the
    /// tunnel. Without an IPv4 address, any frame of the guest at its device.
    ///
    /// # Errors
    /// [`WireError::NoAnswer`] after `bound`.
    pub async fn probe_on(&self, wire: WireId, spec: &EndpointSpec, bound: Duration) -> Result<Duration, WireError> {
        let known = spec.ips.iter().any(IpAddr::is_ipv4);
        let from = if known { self.device('b', wire) } else { spec.tap.clone() };
        self.probe_from(&from, spec.mac, &spec.ips, bound).await
    }
}
