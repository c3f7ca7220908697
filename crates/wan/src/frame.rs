//! What a frame is: how many packets it stands for, how many bytes those occupy on a wire, and which ports they carry.
//!
//! # Super-frames
//!
//! Between a sender's stack and a veth, Linux keeps segments together: one buffer of up to 64 KiB with one set of
//! headers, and a note (`virtio_net_hdr`) that says how to cut it. A real WAN would see every segment with headers of its
//! own. Charging the lump as it is would flatter the rate by 4 %, so it is charged as what it stands for.
//!
//! # Two counts of bytes
//!
//! - **layer 2**: each packet's Ethernet frame from the destination address to the end of the payload, padded to the
//!   minimum of 60 bytes, headers repeated for every segment. This is what a capture on the wire would add up to, and
//!   what [counters](crate::counters) report.
//! - **wire**: that and 24 bytes a packet for preamble and delimiter (8), checksum (4) and gap (12). This is what occupies the line.
//!
//! # What can go wrong
//!
//! A frame is whatever a guest chose to send, so nothing here trusts a length: every read is checked, and a header that
//! ends early, or is not understood, yields a frame without ports, never a panic. The header length that the kernel
//! notes is no help: it is that of the buffer's linear part, only a hint. It is found from the headers instead, beginning at the
//! checksum's start where the kernel gives one: that is the *inner* transport header of a tunnelled super-frame.

use crate::class::Ports;
use godwit_units::Bytes;

/// The least that an Ethernet frame occupies, without its checksum.
pub const MINIMUM_FRAME: u64 = 60;
/// What each packet occupies beyond its frame: preamble and delimiter 8, checksum 4, gap 12.
pub const FRAMING: u64 = 24;

const ETHERNET_ADDRESSES: usize = 12;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88a8;
const TCP: u8 = 6;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
/// Tags that are followed: a customer's inside a provider's. More are legal nowhere.
const MOST_VLAN_TAGS: usize = 2;
/// IPv6 extension headers that are followed: more than any stack sends, so that a crafted chain ends.
const MOST_EXTENSIONS: usize = 8;

/// The kernel's note on a frame (`struct virtio_net_hdr`): a checksum still to be computed, and how to segment.
///
/// It is passed on unchanged from the receiving socket to the sending one; so checksums that the sender left to "the
/// hardware" stay left to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// Bit 0: a checksum is wanted at `csum_start + csum_offset`.
    pub flags: u8,
    /// Zero for an ordinary frame, else the kind of segmentation.
    pub gso_type: u8,
    /// A hint at the length of the headers, in bytes; not to be relied on.
    pub hdr_len: u16,
    /// Payload bytes of each segment but the last.
    pub gso_size: u16,
    /// Where the checksummed part begins, in bytes from the frame's start.
    pub csum_start: u16,
    /// Where the checksum goes, in bytes from `csum_start`.
    pub csum_offset: u16,
}

impl VnetHeader {
    /// Its length in memory.
    pub const LEN: usize = 10;
    const NEEDS_CHECKSUM: u8 = 1;
    const GSO_UDP_SEGMENT: u8 = 5;
    const GSO_ECN: u8 = 0x80;

    /// Reads the kernel's form; all its fields are in the machine's byte order.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// The kernel's form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        for (i, word) in [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset].into_iter().enumerate() {
            bytes[2 + 2 * i..4 + 2 * i].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// The note that is right once a VLAN tag has been put into the frame: everything behind it lies 4 bytes further.
    #[must_use]
    pub fn behind_a_vlan_tag(self) -> Self {
        let later = |offset: u16| offset.saturating_add(VlanTag::LEN as u16);
        Self {
            hdr_len: if self.hdr_len == 0 { 0 } else { later(self.hdr_len) },
            csum_start: if self.needs_checksum() { later(self.csum_start) } else { self.csum_start },
            ..self
        }
    }

    fn needs_checksum(&self) -> bool {
        self.flags & Self::NEEDS_CHECKSUM != 0
    }

    fn is_super_frame(&self) -> bool {
        self.gso_type & !Self::GSO_ECN != 0 && self.gso_size > 0
    }
}

/// A VLAN tag that the kernel took out of a frame on reception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VlanTag {
    /// 0x8100, or 0x88a8 for a provider's.
    pub protocol: u16,
    /// Priority and VLAN id.
    pub control: u16,
}

impl VlanTag {
    /// Its length in a frame.
    pub const LEN: usize = 4;

    /// The frame with this tag where it belongs, behind the two addresses. A frame too short to have them is copied as it is.
    #[must_use]
    pub fn insert_into(self, frame: &[u8]) -> Box<[u8]> {
        let Some((addresses, rest)) = frame.split_at_checked(ETHERNET_ADDRESSES) else {
            return frame.into();
        };
        let mut tagged = Vec::with_capacity(frame.len() + Self::LEN);
        tagged.extend_from_slice(addresses);
        tagged.extend_from_slice(&self.protocol.to_be_bytes());
        tagged.extend_from_slice(&self.control.to_be_bytes());
        tagged.extend_from_slice(rest);
        tagged.into_boxed_slice()
    }
}

/// What a frame stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameInfo {
    /// Packets that a real wire would carry: one, or the number of segments.
    pub packets: u64,
    /// Their bytes at layer 2; see the module's opening.
    pub l2_bytes: Bytes,
    /// Their bytes at layer 1, which occupy the line.
    pub wire_bytes: Bytes,
    /// The outermost TCP or UDP ports. VXLAN is thus known by its own port (4789), not by what it carries.
    pub ports: Option<Ports>,
}

impl FrameInfo {
    /// Reads a frame that begins at its destination address, with the kernel's note on it. Any bytes will do.
    #[must_use]
    pub fn of(frame: &[u8], note: &VnetHeader) -> Self {
        let transport = Transport::find(frame);
        let ports = transport.and_then(|transport| transport.ports(frame));
        let (packets, l2_bytes) = if note.is_super_frame() {
            segment_sizes(frame.len() as u64, header_len(frame, note, transport), u64::from(note.gso_size))
        } else {
            (1, (frame.len() as u64).max(MINIMUM_FRAME))
        };
        Self { packets, l2_bytes: Bytes(l2_bytes), wire_bytes: Bytes(l2_bytes + packets * FRAMING), ports }
    }

    /// True when the frame stands for several packets, which then share one fate.
    #[must_use]
    pub fn is_super_frame(&self) -> bool {
        self.packets > 1
    }
}

/// Packets, and the sum of their layer-2 bytes, of a frame of `len` bytes whose first `header` bytes are repeated.
fn segment_sizes(len: u64, header: u64, gso_size: u64) -> (u64, u64) {
    let payload = len.saturating_sub(header);
    let full = payload / gso_size;
    let rest = payload % gso_size;
    let full_bytes = full * (header + gso_size).max(MINIMUM_FRAME);
    if rest > 0 || full == 0 { (full + 1, full_bytes + (header + rest).max(MINIMUM_FRAME)) } else { (full, full_bytes) }
}

/// The bytes that every segment of a super-frame repeats.
fn header_len(frame: &[u8], note: &VnetHeader, transport: Option<Transport>) -> u64 {
    let start = if note.needs_checksum() {
        usize::from(note.csum_start)
    } else if let Some(transport) = transport {
        transport.offset
    } else {
        return u64::from(note.hdr_len).min(frame.len() as u64);
    };
    let own = if note.gso_type & !VnetHeader::GSO_ECN == VnetHeader::GSO_UDP_SEGMENT {
        UDP_HEADER
    } else {
        // TCP: the upper half of byte 12 counts words of 4 bytes.
        frame.get(start + 12).map_or(0, |byte| usize::from(byte >> 4) * 4)
    };
    (start + own).min(frame.len()) as u64
}

/// Where a frame's outermost transport header begins, and which it is.
#[derive(Clone, Copy)]
struct Transport {
    protocol: u8,
    offset: usize,
}

impl Transport {
    fn find(frame: &[u8]) -> Option<Self> {
        let mut at = ETHERNET_ADDRESSES;
        for _ in 0..=MOST_VLAN_TAGS {
            match be16(frame, at)? {
                ETHERTYPE_VLAN | ETHERTYPE_SERVICE_VLAN => at += VlanTag::LEN,
                ETHERTYPE_IPV4 => return Self::in_ipv4(frame, at + 2),
                ETHERTYPE_IPV6 => return Self::in_ipv6(frame, at + 2),
                _ => return None,
            }
        }
        None
    }

    fn in_ipv4(frame: &[u8], ip: usize) -> Option<Self> {
        let header = usize::from(frame.get(ip)? & 0x0f) * 4;
        let fragment_offset = be16(frame, ip + 6)? & 0x1fff;
        let protocol = *frame.get(ip + 9)?;
        (header >= 20 && fragment_offset == 0).then_some(Self { protocol, offset: ip + header })
    }

    fn in_ipv6(frame: &[u8], ip: usize) -> Option<Self> {
        const HOP_BY_HOP: u8 = 0;
        const ROUTING: u8 = 43;
        const FRAGMENT: u8 = 44;
        const DESTINATION_OPTIONS: u8 = 60;
        let mut protocol = *frame.get(ip + 6)?;
        let mut offset = ip + 40;
        for _ in 0..MOST_EXTENSIONS {
            match protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    protocol = *frame.get(offset)?;
                    offset += (usize::from(*frame.get(offset + 1)?) + 1) * 8;
                }
                FRAGMENT => {
                    if be16(frame, offset + 2)? & 0xfff8 != 0 {
                        return None;
                    }
                    protocol = *frame.get(offset)?;
                    offset += 8;
                }
                _ => return Some(Self { protocol, offset }),
            }
        }
        None
    }

    fn ports(self, frame: &[u8]) -> Option<Ports> {
        match self.protocol {
            TCP | UDP => Some(Ports { source: be16(frame, self.offset)?, destination: be16(frame, self.offset + 2)? }),
            _ => None,
        }
    }
}

fn be16(frame: &[u8], at: usize) -> Option<u16> {
    let bytes = frame.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GSO_TCPV4: u8 = 1;
    const PLAIN: VnetHeader =
        VnetHeader { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

    fn ethernet(tags: &[u16], ethertype: u16, packet: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; ETHERNET_ADDRESSES];
        for tag in tags {
            frame.extend_from_slice(&tag.to_be_bytes());
            frame.extend_from_slice(&7u16.to_be_bytes());
        }
        frame.extend_from_slice(&ethertype.to_be_bytes());
        frame.extend_from_slice(packet);
        frame
    }

    fn ipv4(protocol: u8, fragment_offset: u16, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0u8; 20];
        packet[0] = 0x45;
        packet[6..8].copy_from_slice(&fragment_offset.to_be_bytes());
        packet[9] = protocol;
        packet.extend_from_slice(body);
        packet
    }

    fn ipv6(next: u8, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0u8; 40];
        packet[0] = 0x60;
        packet[6] = next;
        packet.extend_from_slice(body);
        packet
    }

    fn tcp(payload: usize) -> Vec<u8> {
        let mut segment = vec![0u8; 32 + payload];
        segment[..4].copy_from_slice(&[0x9c, 0x40, 0x1b, 0x58]); // 40000 -> 7000
        segment[12] = 8 << 4; // 32 bytes of header: with timestamps
        segment
    }

    fn udp(payload: usize) -> Vec<u8> {
        let mut datagram = vec![0u8; 8 + payload];
        datagram[..4].copy_from_slice(&[0x9c, 0x40, 0x12, 0xb5]); // 40000 -> 4789
        datagram
    }

    fn ports_of(frame: &[u8]) -> Option<(u16, u16)> {
        FrameInfo::of(frame, &PLAIN).ports.map(|ports| (ports.source, ports.destination))
    }

    #[test]
    fn a_full_tcp_segment_occupies_1538_bytes() {
        let info = FrameInfo::of(&ethernet(&[], ETHERTYPE_IPV4, &ipv4(TCP, 0, &tcp(1448))), &PLAIN);
        assert_eq!((info.packets, info.l2_bytes, info.wire_bytes), (1, Bytes(1514), Bytes(1538)));
        assert_eq!(info.ports, Some(Ports { source: 40_000, destination: 7000 }));
    }

    #[test]
    fn a_small_frame_is_padded_to_the_minimum() {
        let info = FrameInfo::of(&ethernet(&[], 0x0806, &[0; 28]), &PLAIN);
        assert_eq!((info.l2_bytes, info.wire_bytes, info.ports), (Bytes(60), Bytes(84), None));
    }

    #[test]
    fn every_segment_of_a_super_frame_is_charged_its_own_headers() {
        let frame = ethernet(&[], ETHERTYPE_IPV4, &ipv4(TCP, 0, &tcp(1448 * 3 + 100)));
        for flags in [0, VnetHeader::NEEDS_CHECKSUM] {
            for ecn in [0, VnetHeader::GSO_ECN] {
                let note = VnetHeader {
                    flags,
                    gso_type: GSO_TCPV4 | ecn,
                    hdr_len: 9999, // only a hint, and a wrong one
                    gso_size: 1448,
                    csum_start: 34,
                    csum_offset: 16,
                };
                let info = FrameInfo::of(&frame, &note);
                assert_eq!((info.packets, info.l2_bytes), (4, Bytes(3 * 1514 + 166)));
                assert_eq!(info.wire_bytes, Bytes(3 * 1538 + 190));
            }
        }
    }

    #[test]
    fn a_super_datagram_is_cut_behind_its_eight_byte_header() {
        let frame = ethernet(&[], ETHERTYPE_IPV4, &ipv4(UDP, 0, &udp(1200 * 2 + 1)));
        let note = VnetHeader { gso_type: VnetHeader::GSO_UDP_SEGMENT, gso_size: 1200, ..PLAIN };
        let info = FrameInfo::of(&frame, &note);
        assert_eq!((info.packets, info.l2_bytes), (3, Bytes(2 * 1242 + 60)), "the last is padded");
    }

    #[test]
    fn a_tunnelled_super_frame_repeats_outer_and_inner_headers_and_is_known_by_the_outer_port() {
        let inner = ethernet(&[], ETHERTYPE_IPV4, &ipv4(TCP, 0, &tcp(1398 * 2)));
        let mut vxlan = udp(8);
        vxlan.extend_from_slice(&inner);
        let frame = ethernet(&[], ETHERTYPE_IPV4, &ipv4(UDP, 0, &vxlan));
        let inner_tcp = 14 + 20 + 16 + 14 + 20;
        let note = VnetHeader { flags: 1, gso_type: GSO_TCPV4, gso_size: 1398, csum_start: inner_tcp, ..PLAIN };
        let info = FrameInfo::of(&frame, &note);
        assert_eq!((info.packets, info.l2_bytes), (2, Bytes(2 * 1514)));
        assert_eq!(info.ports, Some(Ports { source: 40_000, destination: 4789 }));
    }

    #[test]
    fn ports_are_found_behind_vlan_tags_and_extension_headers() {
        let tags = [ETHERTYPE_SERVICE_VLAN, ETHERTYPE_VLAN];
        assert_eq!(ports_of(&ethernet(&tags[1..], ETHERTYPE_IPV4, &ipv4(UDP, 0, &udp(9)))), Some((40_000, 4789)));
        assert_eq!(ports_of(&ethernet(&tags, ETHERTYPE_IPV6, &ipv6(TCP, &tcp(0)))), Some((40_000, 7000)));
        let mut hop_by_hop = vec![UDP, 1];
        hop_by_hop.resize(16, 0);
        hop_by_hop.extend(udp(0));
        assert_eq!(ports_of(&ethernet(&[], ETHERTYPE_IPV6, &ipv6(0, &hop_by_hop))), Some((40_000, 4789)));
    }

    #[test]
    fn later_fragments_and_other_protocols_have_no_ports() {
        assert_eq!(ports_of(&ethernet(&[], ETHERTYPE_IPV4, &ipv4(UDP, 185, &udp(9)))), None);
        assert_eq!(ports_of(&ethernet(&[], ETHERTYPE_IPV4, &ipv4(1, 0, &udp(9)))), None);
        let mut fragment = vec![UDP, 0, 0, 8, 0, 0, 0, 0];
        fragment.extend(udp(9));
        assert_eq!(ports_of(&ethernet(&[], ETHERTYPE_IPV6, &ipv6(44, &fragment))), None);
        assert_eq!(ports_of(&ethernet(&[ETHERTYPE_VLAN; 3], ETHERTYPE_IPV4, &ipv4(UDP, 0, &udp(9)))), None);
    }

    #[test]
    fn a_reinserted_tag_moves_the_checksum_with_the_header_it_belongs_to() {
        let bare = ethernet(&[], ETHERTYPE_IPV4, &ipv4(TCP, 0, &tcp(5)));
        let tagged = VlanTag { protocol: ETHERTYPE_VLAN, control: 7 }.insert_into(&bare);
        assert_eq!(tagged[..], ethernet(&[ETHERTYPE_VLAN], ETHERTYPE_IPV4, &ipv4(TCP, 0, &tcp(5)))[..]);
        let note = VnetHeader { flags: 1, hdr_len: 66, csum_start: 34, ..PLAIN }.behind_a_vlan_tag();
        assert_eq!((note.hdr_len, note.csum_start), (70, 38));
        assert_eq!(PLAIN.behind_a_vlan_tag(), PLAIN);
    }

    fn any_note() -> impl Strategy<Value = VnetHeader> {
        any::<[u8; VnetHeader::LEN]>().prop_map(VnetHeader::from_bytes)
    }

    /// Arbitrary bytes that get past the first checks often enough to reach the last.
    fn any_frame() -> impl Strategy<Value = Vec<u8>> {
        let ethertype = prop_oneof![Just(ETHERTYPE_IPV4), Just(ETHERTYPE_IPV6), any::<u16>()];
        let tags = prop::collection::vec(Just(ETHERTYPE_VLAN), 0..4);
        let body = prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(TCP), Just(0x45)], 0..200);
        (tags, ethertype, body, 0usize..220).prop_map(|(tags, ethertype, body, keep)| {
            let mut frame = ethernet(&tags, ethertype, &body);
            frame.truncate(keep);
            frame
        })
    }

    proptest! {
        #[test]
        fn no_frame_and_no_note_can_make_the_parser_panic(frame in any_frame(), note in any_note()) {
            let info = FrameInfo::of(&frame, &note);
            prop_assert!(info.packets >= 1);
            prop_assert!(info.l2_bytes.0 >= info.packets * MINIMUM_FRAME);
            prop_assert!(info.l2_bytes.0 >= frame.len() as u64);
            prop_assert_eq!(info.wire_bytes.0, info.l2_bytes.0 + info.packets * FRAMING);
            let _ = VlanTag { protocol: 1, control: 2 }.insert_into(&frame);
        }

        #[test]
        fn a_note_survives_the_round_trip_through_its_kernel_form(bytes in any::<[u8; VnetHeader::LEN]>()) {
            prop_assert_eq!(VnetHeader::from_bytes(bytes).to_bytes(), bytes);
        }

        #[test]
        fn segments_sum_to_the_payload_and_one_header_each(header in 60u64..200, payload in 1u64..65_000, gso in 1u64..9_000) {
            let (packets, l2) = segment_sizes(header + payload, header, gso);
            prop_assert_eq!(packets, payload.div_ceil(gso));
            prop_assert_eq!(l2, packets * header + payload);
        }
    }
}
