//! Proof that frames pass a wire's tunnel there and back, without anybody behind it: the hosts of its two ends ask each other.
//!
//! What is sent goes to the address of MAC PAUSE, which no bridge forwards (IEEE 802.1Q, table 8-1, and the kernel's bridge), and a packet
//! socket on the tunnel's device sees it before the bridge does: so neither guests nor components ever see it, and neither need an address.
//! It passes whatever their frames pass: encapsulation, the table of hosts, the rules about who may send, an extender. What is left between the
//! tunnel and a port is one bridge on the same host: [`Wires::is_joined`] looks at that.
//!
//! What can go wrong: *somebody else answers*. Whoever may send into the tunnel is who is to be proved, and says the nonce that it was told over
//! the nodes' own link.

use super::{PROBE_EVERY, WireError, Wires, net};
use crate::WireId;
use godwit_net::{Frame, MacAddr, NetError, PacketSocket};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// What the frames of one greeting have in common, and no others.
pub type Nonce = [u8; 16];

const PAUSE: MacAddr = MacAddr([0x01, 0x80, 0xc2, 0, 0, 1]);
/// For local experiments (IEEE 802, table 3): no kernel takes it up.
const KIND: [u8; 2] = [0x88, 0xb5];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    There = 1,
    Back = 2,
}

fn frame(from: MacAddr, way: Way, nonce: &Nonce) -> Frame {
    let mut frame = [&PAUSE.0[..], &from.0, &KIND, b"gw", &[way as u8], nonce].concat();
    frame.resize(60, 0);
    frame
}

fn is_of(frame: &[u8], way: Way, nonce: &Nonce) -> bool {
    frame.get(12..14) == Some(&KIND)
        && frame.get(14..17) == Some(&[b'g', b'w', way as u8])
        && frame.get(17..33) == Some(nonce)
}

/// A wire's tunnel, to greet through.
#[derive(Debug)]
pub struct Greeter {
    device: String,
    mac: MacAddr,
    socket: PacketSocket,
}

impl Greeter {
    fn failed(&self, source: std::io::Error) -> WireError {
        net("greet over", &self.device)(NetError::Kernel {
            operation: "use raw socket on",
            object: self.device.clone(),
            source,
        })
    }

    /// Waits until `end` for a frame that goes this way; whether one came.
    async fn heard(&self, way: Way, nonce: &Nonce, end: Instant) -> Result<bool, WireError> {
        let mut buffer = [0; 64];
        while let Ok(got) = timeout_at(end, self.socket.receive(&mut buffer)).await {
            let length = got.map_err(|e| self.failed(e))?;
            if is_of(&buffer[..length.min(buffer.len())], way, nonce) {
                return Ok(true);
            }
            // A busy wire has always a frame more.
            if Instant::now() >= end {
                break;
            }
        }
        Ok(false)
    }

    /// Asks until an answer comes; gives how long that took.
    ///
    /// # Errors
    /// [`WireError::NoEcho`] after `bound`; [`WireError::Net`].
    pub async fn greet(&self, nonce: &Nonce, bound: Duration) -> Result<Duration, WireError> {
        let start = Instant::now();
        while start.elapsed() < bound {
            self.socket.send(&frame(self.mac, Way::There, nonce)).map_err(|e| self.failed(e))?;
            let next = (Instant::now() + PROBE_EVERY).min(start + bound);
            if self.heard(Way::Back, nonce, next).await? {
                return Ok(start.elapsed());
            }
        }
        Err(WireError::NoEcho { device: self.device.clone(), waited: bound })
    }

    /// Answers whoever asks so, as often as that is within `bound`.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn answer(&self, nonce: &Nonce, bound: Duration) -> Result<(), WireError> {
        let end = Instant::now() + bound;
        while self.heard(Way::There, nonce, end).await? {
            self.socket.send(&frame(self.mac, Way::Back, nonce)).map_err(|e| self.failed(e))?;
        }
        Ok(())
    }
}

impl Wires {
    /// Opens a wire's tunnel for that: what comes from now on is heard.
    ///
    /// # Errors
    /// [`WireError::Net`], as where the wire has no tunnel here.
    pub async fn greeter(&self, wire: WireId) -> Result<Greeter, WireError> {
        let device = self.device('v', wire);
        let link = self.net.get(&device).await.map_err(net("greet over", &device))?;
        let socket = PacketSocket::open(link.index).map_err(net("greet over", &device))?;
        Ok(Greeter { device, mac: link.mac, socket })
    }

    /// Whether a device is a port of its wire's bridge, and both are up.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn is_joined(&self, wire: WireId, device: &str) -> Result<bool, WireError> {
        let name = self.device('b', wire);
        let found = tokio::try_join!(self.net.find(&name), self.net.find(device)).map_err(net("look at", device))?;
        let (Some(bridge), Some(port)) = found else { return Ok(false) };
        Ok(bridge.up && port.up && port.master == Some(bridge.index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_known_by_its_nonce_and_its_way_and_nothing_shorter_is_one() {
        let nonce = [7; 16];
        let sent = frame(MacAddr([2, 0, 0, 0, 0, 1]), Way::There, &nonce);
        assert_eq!((sent.len(), &sent[..6]), (60, &[0x01, 0x80, 0xc2, 0, 0, 1][..]));
        assert!(is_of(&sent, Way::There, &nonce));
        assert!(!is_of(&sent, Way::Back, &nonce) && !is_of(&sent, Way::There, &[8; 16]));
        assert!((0..33).all(|length| !is_of(&sent[..length], Way::There, &nonce)));
    }
}
