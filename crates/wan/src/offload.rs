//! Making a sender hand over packets instead of super-frames.
//!
//! With segmentation offload, a veth accepts lumps of up to 64 KiB. That is fast, and wrong for an emulated WAN with loss or
//! jitter: a lump is lost or overtaken as a whole, forty packets at once, and TCP sees a path that exists nowhere. With the
//! interface's segmentation features off, the kernel itself cuts each lump just before it enters the veth.
//!
//! Which features? All of them. TCP needs `tx-tcp-segmentation` and its siblings off, QUIC (`UDP_SEGMENT`) `tx-udp-segmentation`,
//! anything inside VXLAN `tx-udp_tnl-segmentation` and `tx-udp_tnl-csum-segmentation`; other tunnels have theirs, and kernels
//! add new ones (`tx-tcp-accecn-segmentation`). So instead of a list that rots, every feature that the interface names
//! `...-segmentation` is switched, unless the driver has fixed it, and then looked at again.
//!
//! Checksum offload may stay on: the kernel's note on a packet carries that across.

use crate::WanError;
use std::io;
use std::process::Command;

/// What an interface is given to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Lumps of segments: less CPU time; fit for paths without loss and jitter.
    SuperFrames,
    /// Each packet by itself.
    SinglePackets,
}

impl Offload {
    fn switch(self) -> &'static str {
        match self {
            Self::SuperFrames => "on",
            Self::SinglePackets => "off",
        }
    }
}

/// Switches all segmentation offloads of `iface`. Call it in the **sender's** network namespace (the calling thread's),
/// for the interface whose frames enter the path: the veth's end at the site. Needs root and `ethtool`.
///
/// # Errors
///
/// [`WanError::NoEthtool`], or [`WanError::Offload`] when the interface is not as asked afterwards.
pub fn set_segmentation(iface: &str, offload: Offload) -> Result<(), WanError> {
    let switch = offload.switch();
    let before = ethtool(iface, &["-k", iface])?;
    let wrong = features_other_than(&before, switch);
    if wrong.is_empty() {
        return Ok(());
    }
    let mut arguments = vec!["-K", iface];
    arguments.extend(wrong.iter().flat_map(|feature| [*feature, switch]));
    ethtool(iface, &arguments)?;
    let after = ethtool(iface, &["-k", iface])?;
    let left = features_other_than(&after, switch);
    if left.is_empty() {
        return Ok(());
    }
    Err(WanError::Offload { interface: iface.to_owned(), answer: format!("{} will not be {switch}", left.join(", ")) })
}

/// The segmentation features that could be switched to `wanted` and are not.
fn features_other_than<'a>(listing: &'a str, wanted: &str) -> Vec<&'a str> {
    listing
        .lines()
        .filter_map(|line| line.trim().split_once(": "))
        .filter(|(feature, _)| {
            // "tcp-segmentation-offload" is a name for several others; "generic" is one of its own.
            feature.ends_with("-segmentation")
                || *feature == "generic-segmentation-offload"
                || *feature == "tx-gso-list"
        })
        .filter(|(_, state)| !state.contains("[fixed]") && state.split(' ').next() != Some(wanted))
        .map(|(feature, _)| feature)
        .collect()
}

fn ethtool(iface: &str, arguments: &[&str]) -> Result<String, WanError> {
    let missing = |source: io::Error| WanError::NoEthtool { interface: iface.to_owned(), source };
    let output = Command::new("ethtool").args(arguments).output().map_err(missing)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let answer = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(WanError::Offload { interface: iface.to_owned(), answer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_segmentation_feature_that_can_be_switched_is_found() {
        let listing = "Features for a1:\n\
            rx-checksumming: on\n\
            tcp-segmentation-offload: on\n\
            \ttx-tcp-segmentation: on\n\
            \ttx-tcp6-segmentation: off\n\
            generic-segmentation-offload: on\n\
            tx-esp-segmentation: on [fixed]\n\
            tx-udp_tnl-csum-segmentation: off [requested on]\n\
            tx-gso-list: on\n";
        assert_eq!(
            features_other_than(listing, "off"),
            ["tx-tcp-segmentation", "generic-segmentation-offload", "tx-gso-list"]
        );
        assert_eq!(features_other_than(listing, "on"), ["tx-tcp6-segmentation", "tx-udp_tnl-csum-segmentation"]);
    }
}
