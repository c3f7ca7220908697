//! The few frames that announce a guest or ask for it.

use crate::MacAddr;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A whole Ethernet frame, without its check sum.
pub type Frame = Vec<u8>;

fn ethernet(to: MacAddr, from: MacAddr, kind: u16) -> Frame {
    let mut frame = Vec::with_capacity(90);
    frame.extend(to.0);
    frame.extend(from.0);
    frame.extend(kind.to_be_bytes());
    frame
}

fn arp(kind: u16, operation: u16, sender: (MacAddr, Ipv4Addr), target: (MacAddr, Ipv4Addr)) -> Frame {
    let mut frame = ethernet(MacAddr::BROADCAST, sender.0, kind);
    frame.extend([0, 1, 8, 0, 6, 4]);
    frame.extend(operation.to_be_bytes());
    frame.extend(sender.0.0);
    frame.extend(sender.1.octets());
    frame.extend(target.0.0);
    frame.extend(target.1.octets());
    frame.resize(60, 0);
    frame
}

/// "I am here": a gratuitous ARP request (RFC 5227), which neighbours' caches and switches both take up.
#[must_use]
pub fn gratuitous_arp(mac: MacAddr, ip: Ipv4Addr) -> Frame {
    arp(0x0806, 1, (mac, ip), (MacAddr::ZERO, ip))
}

/// A RARP request as hypervisors send it: needs no IP address, and moves `mac` in every switch.
#[must_use]
pub fn rarp(mac: MacAddr) -> Frame {
    arp(0x8035, 3, (mac, Ipv4Addr::UNSPECIFIED), (mac, Ipv4Addr::UNSPECIFIED))
}

/// Asks who has `ip`, as a probe without an address of its own (RFC 5227): no cache learns from it.
#[must_use]
pub fn arp_request(from: MacAddr, ip: Ipv4Addr) -> Frame {
    arp(0x0806, 1, (from, Ipv4Addr::UNSPECIFIED), (MacAddr::ZERO, ip))
}

/// Whether `frame` is the ARP answer of `mac` for `ip`.
#[must_use]
pub fn arp_reply_from(frame: &[u8], mac: MacAddr, ip: Ipv4Addr) -> bool {
    frame.len() >= 42
        && frame[12..14] == [8, 6]
        && frame[20..22] == [0, 2]
        && frame[22..28] == mac.0
        && frame[28..32] == ip.octets()
}

/// Who sent a frame.
#[must_use]
pub fn source_of(frame: &[u8]) -> Option<MacAddr> {
    frame.get(6..12)?.try_into().ok().map(MacAddr)
}

/// "I am here" for IPv6: an unsolicited neighbour advertisement that overrides (RFC 4861, 7.2.6).
#[must_use]
pub fn unsolicited_neighbour(mac: MacAddr, ip: Ipv6Addr) -> Frame {
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut icmp = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    icmp.extend(ip.octets());
    icmp.extend([2, 1]);
    icmp.extend(mac.0);
    let mut pseudo = [ip.octets(), all_nodes.octets()].concat();
    pseudo.extend([0, 0, 0, 32, 0, 0, 0, 58]);
    pseudo.extend(&icmp);
    let mut sum: u32 = pseudo.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    icmp[2..4].copy_from_slice(&(!sum as u16).to_be_bytes());
    let mut frame = ethernet(MacAddr([0x33, 0x33, 0, 0, 0, 1]), mac, 0x86dd);
    frame.extend([0x60, 0, 0, 0, 0, 32, 58, 255]);
    frame.extend(ip.octets());
    frame.extend(all_nodes.octets());
    frame.extend(icmp);
    frame
}
