//! Asks the other ends of tunnels, through them, by ICMP echo: the kernel there answers, whether its node runs or not.

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use std::io;
use std::net::Ipv4Addr;
use tokio::net::UdpSocket;

const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;
/// The longest header of IPv4, and what is asked with.
const LONGEST: usize = 60 + HEADER;
const HEADER: usize = 8;

/// A raw socket for echoes.
#[derive(Debug)]
pub struct Prober {
    /// Not of UDP, but one that sends to addresses, which is all that this type is about.
    socket: UdpSocket,
    /// By which answers to others are told apart.
    mark: u16,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Who.
    pub from: Ipv4Addr,
    /// To which question.
    pub sequence: u16,
}

impl Prober {
    /// Opens the socket in the network namespace of the calling thread; within a tokio runtime. `mark` tells its echoes from others'.
    ///
    /// # Errors
    /// CAP_NET_RAW is missing.
    pub fn open(mark: u16) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(ipproto::ICMP))?;
        Ok(Self { socket: UdpSocket::from_std(socket.into())?, mark })
    }

    /// Asks; never waits.
    ///
    /// # Errors
    /// The kernel's: there is no way.
    pub fn ask(&self, whom: Ipv4Addr, sequence: u16) -> io::Result<()> {
        self.socket.try_send_to(&echo(self.mark, sequence), (whom, 0).into()).map(drop)
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn answer(&self) -> io::Result<Answered> {
        loop {
            let mut buffer = [0; LONGEST];
            let (length, _) = self.socket.recv_from(&mut buffer).await?;
            if let Some(answered) = parse(&buffer[..length], self.mark) {
                return Ok(answered);
            }
        }
    }
}

fn echo(mark: u16, sequence: u16) -> [u8; HEADER] {
    let ([m, a], [s, q]) = (mark.to_be_bytes(), sequence.to_be_bytes());
    let mut packet = [ECHO, 0, 0, 0, m, a, s, q];
    let sum: u32 = packet.chunks_exact(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    packet[2..4].copy_from_slice(&(!u16::try_from(folded).unwrap_or(u16::MAX)).to_be_bytes());
    packet
}

/// An answer to one of ours, from a packet with its header.
fn parse(packet: &[u8], mark: u16) -> Option<Answered> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let from: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
    let [kind, code, _, _, m, a, s, q] = *packet.get(header..header + HEADER)? else { return None };
    let ours = kind == ECHO_REPLY && code == 0 && u16::from_be_bytes([m, a]) == mark;
    ours.then(|| Answered { from: from.into(), sequence: u16::from_be_bytes([s, q]) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_from_a_question_from_others_answers_and_from_what_is_cut() {
        let mut packet = vec![0x45; 20];
        packet[12..16].copy_from_slice(&[169, 254, 64, 3]);
        packet.extend(echo(7, 9));
        assert_eq!(parse(&packet, 7), None, "a question");
        packet[20] = ECHO_REPLY;
        assert_eq!(parse(&packet, 7), Some(Answered { from: [169, 254, 64, 3].into(), sequence: 9 }));
        assert_eq!(parse(&packet, 8), None);
        for length in 0..packet.len() {
            assert_eq!(parse(&packet[..length], 7), None);
        }
        packet[0] = 0x4f;
        assert_eq!(parse(&packet, 7), None);
    }

    #[test]
    fn the_checksum_is_the_internets() {
        for (mark, sequence) in [(0, 0), (7, 9), (u16::MAX, u16::MAX), (0x1234, 0xfffe)] {
            let sum: u32 =
                echo(mark, sequence).chunks_exact(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{mark} {sequence}");
        }
    }
}
