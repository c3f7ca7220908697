//! A tunnel's device: made, given its keys and its peer, read, and removed. `wg` speaks to the kernel's WireGuard and to programs alike.
//!
//! Keys go to it by its standard input, never on a command line.

use super::{Engine, PREFIX};
use godwit_net::{Net, NetError};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

/// How long `wg` may take: it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a tunnel sends something, whatever there is to send: a mapping of a translating router lasts, and one that was lost is made
/// again, within this time. Seconds; the shortest that such routers are known for is 30.
const KEEPALIVE_S: u16 = 15;
/// How long a tunnel is silent before its only end that may speak first agrees on session keys anew.
const RENEW_AFTER: Duration = Duration::from_secs(5);
/// How long after a tunnel was made one of two ends that may speak first does so again: more than a WAN's round trip.
const RENEW_FIRST: Duration = Duration::from_secs(1);
/// Session keys that are older are never used (WireGuard's `REJECT_AFTER_TIME`).
const KEYS_LAST: Duration = Duration::from_secs(180);
/// A key in base64.
const KEY_LENGTH: usize = 44;

/// Why a tunnel is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// The network refused.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The program that stands in for the kernel's WireGuard.
    #[error("the kernel has no WireGuard, and {0}; install wireguard-go, or a kernel with WireGuard")]
    Engine(io::Error),
    /// `wg` refused.
    #[error("wg {doing} `{device}`: {why}; see that wireguard-tools is installed")]
    Wg {
        /// What was tried.
        doing: &'static str,
        /// On which device.
        device: String,
        /// Its words.
        why: String,
    },
    /// Not a key.
    #[error("`{0}` is no WireGuard key: 44 characters of base64 are needed")]
    BadKey(String),
}

fn is_key(text: &str) -> bool {
    let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/');
    text.len() == KEY_LENGTH && text.strip_suffix('=').is_some_and(|body| body.bytes().all(base64))
}

/// A public key, in base64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(String);

impl PublicKey {
    /// From its text.
    ///
    /// # Errors
    /// [`TunnelError::BadKey`].
    pub fn new(text: &str) -> Result<Self, TunnelError> {
        // What was refused is quoted, so it must not be of any length.
        if is_key(text) { Ok(Self(text.to_owned())) } else { Err(TunnelError::BadKey(text.chars().take(80).collect())) }
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A private key, in base64. Not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(String);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(..)")
    }
}

impl PrivateKey {
    /// A new one.
    ///
    /// # Errors
    /// [`TunnelError::Wg`].
    pub async fn generate() -> Result<Self, TunnelError> {
        Self::new(wg("genkey", "-", &["genkey"], None).await?.trim())
    }

    /// From its text, as it was kept.
    ///
    /// # Errors
    /// [`TunnelError::BadKey`], without the key.
    pub fn new(text: &str) -> Result<Self, TunnelError> {
        if is_key(text) { Ok(Self(text.to_owned())) } else { Err(TunnelError::BadKey("what was kept".into())) }
    }

    /// Its text, to be kept.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// The public key that belongs to it.
    ///
    /// # Errors
    /// [`TunnelError::Wg`].
    pub async fn public(&self) -> Result<PublicKey, TunnelError> {
        PublicKey::new(wg("pubkey", "-", &["pubkey"], Some(self.secret())).await?.trim())
    }
}

/// The other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its key.
    pub key: PublicKey,
    /// Where it is reached; none: it speaks first.
    pub endpoint: Option<SocketAddr>,
    /// The hosts behind it: what comes from it, comes from one of these.
    pub hosts: Vec<Ipv4Addr>,
}

/// A tunnel as it is to be on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Its device.
    pub device: String,
    /// This end's key.
    pub key: PrivateKey,
    /// The UDP port here; none: any.
    pub listen: Option<u16>,
    /// The addresses of this end and of the other one, for probes.
    pub addresses: [Ipv4Addr; 2],
    /// Bytes.
    pub mtu: u16,
    /// The other end, once it is known.
    pub peer: Option<Peer>,
}

/// How the other end was heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Where it is, as its packets say.
    pub endpoint: Option<SocketAddr>,
    /// When keys were agreed on last, seconds since 1970.
    pub handshake_unix_s: Option<u64>,
    /// Bytes, since the device was made, or session keys were agreed on anew after a silence.
    pub received: u64,
    /// Bytes.
    pub sent: u64,
}

impl Tunnel {
    /// The device is there as this says, by the kernel or by a program whose number is in `file`; and whether it is by a program. A
    /// session that stands is not disturbed.
    ///
    /// # Errors
    /// [`TunnelError`]; it may be repeated.
    pub async fn ensure(&self, net: &Net, file: &Path) -> Result<Option<Engine>, TunnelError> {
        let engine = if Engine::find(file, &self.device).is_none() && net.ensure_wireguard(&self.device).await? {
            None
        } else {
            let (file, device) = (file.to_owned(), self.device.clone());
            let started = tokio::task::spawn_blocking(move || Engine::ensure(&file, &device)).await;
            Some(started.map_err(io::Error::other).and_then(|started| started).map_err(TunnelError::Engine)?)
        };
        wg("syncconf", &self.device, &["syncconf", &self.device, "/dev/stdin"], Some(&self.configuration())).await?;
        let link = net.get(&self.device).await?;
        net.set_mtu(link.index, self.mtu).await?;
        net.ensure_pair(link.index, self.addresses[0], self.addresses[1]).await?;
        // What comes by a tunnel comes from hosts that other packets go to by other ways.
        setting(&self.device, "rp_filter", "2")?;
        setting(&self.device, "forwarding", "1")?;
        Net::without_ipv6(&self.device)?;
        if !link.up {
            net.up(link.index).await?;
        }
        Ok(engine)
    }

    /// After which silence this end agrees on session keys anew by itself, if it is this one that does. `heard`: the tunnel has been answered
    /// since it was made.
    ///
    /// *An end that alone may speak first* ([`RENEW_AFTER`]): if the other one has lost its session keys, which it says to nobody, it cannot agree on
    /// new ones, and would not hear from here for as long as a keepalive takes.
    ///
    /// *Both may*: each gets new ones by itself, and to throw away what may still be good would do harm: what was cut off goes on at once with the
    /// keys that it had. But two ends that both speak first at the same moment hear neither each other, and both try again after the same 5 s, to
    /// within WireGuard's third of a second: on a long path, or where both are spoken through at the same pace, again and again. So where there can be
    /// no keys that are good, the one with the lower address tries more often than that: when nothing was ever heard ([`RENEW_FIRST`]), and when
    /// all keys are too old ([`KEYS_LAST`]).
    #[must_use]
    pub fn renews_after(&self, heard: bool) -> Option<Duration> {
        self.peer.as_ref()?.endpoint?;
        match (self.listen, heard) {
            (None, _) => Some(RENEW_AFTER),
            (Some(_), _) if self.addresses[0] > self.addresses[1] => None,
            (Some(_), false) => Some(RENEW_FIRST),
            (Some(_), true) => Some(KEYS_LAST),
        }
    }

    /// Agrees on session keys anew: those that there are count no more.
    ///
    /// # Errors
    /// [`TunnelError::Wg`].
    pub async fn renew(&self) -> Result<(), TunnelError> {
        let Some(peer) = &self.peer else { return Ok(()) };
        wg("set", &self.device, &["set", &self.device, "peer", peer.key.as_str(), "remove"], None).await?;
        wg("syncconf", &self.device, &["syncconf", &self.device, "/dev/stdin"], Some(&self.configuration())).await?;
        Ok(())
    }

    /// As `wg` takes it.
    fn configuration(&self) -> String {
        let mut text = format!("[Interface]\nPrivateKey = {}\n", self.key.secret());
        if let Some(port) = self.listen {
            text += &format!("ListenPort = {port}\n");
        }
        let Some(peer) = &self.peer else { return text };
        text += &format!("[Peer]\nPublicKey = {}\nPersistentKeepalive = {KEEPALIVE_S}\n", peer.key.as_str());
        if let Some(endpoint) = peer.endpoint {
            text += &format!("Endpoint = {endpoint}\n");
        }
        let hosts = peer.hosts.iter().chain(&self.addresses[1..]).map(|ip| format!("{ip}/32"));
        text + &format!("AllowedIPs = {}\n", hosts.collect::<Vec<_>>().join(", "))
    }

    /// What the device has heard; none: there is no peer yet.
    ///
    /// # Errors
    /// [`TunnelError::Wg`]: the device is not there.
    pub async fn state(device: &str) -> Result<Option<PeerState>, TunnelError> {
        Ok(read(&wg("show", device, &["show", device, "dump"], None).await?))
    }

    /// The device is not there any more, nor what has made it.
    ///
    /// # Errors
    /// [`TunnelError`]; it may be repeated.
    pub async fn remove(net: &Net, device: &str, file: &Path) -> Result<(), TunnelError> {
        let (engine, left, name) = (Engine::find(file, device), file.to_owned(), device.to_owned());
        let ended = tokio::task::spawn_blocking(move || {
            engine.map_or(Ok(()), Engine::end)?;
            Engine::forget(&left, &name);
            Ok(())
        });
        ended.await.map_err(io::Error::other).and_then(|ended| ended).map_err(TunnelError::Engine)?;
        Ok(net.remove(device).await?)
    }

    /// The tunnels' devices of this network namespace.
    ///
    /// # Errors
    /// [`TunnelError::Net`].
    pub async fn devices(net: &Net) -> Result<Vec<String>, TunnelError> {
        Ok(net.list(PREFIX).await?.into_iter().map(|link| link.name).filter(|name| is_device(name)).collect())
    }
}

/// Whether a name is one of ours: others' may begin as ours do.
fn is_device(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|drawn| drawn.len() == 8 && drawn.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Writes a setting of IPv4 on an interface.
pub(crate) fn setting(device: &str, name: &str, value: &str) -> Result<(), NetError> {
    std::fs::write(format!("/proc/sys/net/ipv4/conf/{device}/{name}"), value).map_err(|source| NetError::Kernel {
        operation: "set up forwarding on",
        object: device.to_owned(),
        source,
    })
}

/// The only peer's line of what `wg show DEVICE dump` prints: key, preshared key, endpoint, hosts, handshake, received, sent, keepalive.
fn read(dump: &str) -> Option<PeerState> {
    let words: Vec<&str> = dump.lines().nth(1)?.split('\t').collect();
    let [_, _, endpoint, _, handshake, received, sent, ..] = words[..] else { return None };
    Some(PeerState {
        endpoint: endpoint.parse().ok(),
        handshake_unix_s: handshake.parse().ok().filter(|at| *at != 0),
        received: received.parse().ok()?,
        sent: sent.parse().ok()?,
    })
}

async fn wg(doing: &'static str, device: &str, words: &[&str], input: Option<&str>) -> Result<String, TunnelError> {
    let failed = |why: String| TunnelError::Wg { doing, device: device.to_owned(), why };
    let mut command = Command::new("wg");
    command.args(words).stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let running = async {
        let mut child = command.spawn()?;
        if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(input.as_bytes()).await?;
        }
        child.wait_with_output().await
    };
    match timeout(PATIENCE, running).await {
        Err(_) => Err(failed(format!("it did not end within {PATIENCE:?}"))),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Ok(Ok(output)) if !output.status.success() => {
            Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
        Ok(Ok(output)) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "6NFm8lWQz0T2oXbZ2Yf9d3mC1yq0o9mJ6Q4yK0eXb2E=";

    #[test]
    fn a_key_is_44_characters_of_base64_and_a_private_one_is_not_shown() {
        assert!(PublicKey::new(KEY).is_ok());
        for bad in ["", "x", &KEY[..43], &KEY.replace('6', "\n"), &format!("{KEY}="), &KEY.replace('=', "A")] {
            assert!(PublicKey::new(bad).is_err(), "{bad}");
        }
        let private = PrivateKey::new(KEY).unwrap();
        assert!(!format!("{private:?}").contains(&KEY[..5]));
        let error = PrivateKey::new(&KEY[1..]).unwrap_err().to_string();
        assert!(!error.contains(&KEY[1..6]), "{error}");
    }

    #[test]
    fn the_configuration_lets_in_only_the_hosts_behind_the_peer_and_one_end_begins_anew() {
        let mut tunnel = Tunnel {
            device: "gx00000001".into(),
            key: PrivateKey::new(KEY).unwrap(),
            listen: Some(51820),
            addresses: [[169, 254, 64, 2].into(), [169, 254, 64, 3].into()],
            mtu: 1420,
            peer: None,
        };
        assert_eq!(tunnel.configuration(), format!("[Interface]\nPrivateKey = {KEY}\nListenPort = 51820\n"));
        tunnel.listen = None;
        assert_eq!(tunnel.renews_after(false), None, "with nobody");
        tunnel.peer = Some(Peer {
            key: PublicKey::new(KEY).unwrap(),
            endpoint: Some("192.0.2.1:51821".parse().unwrap()),
            hosts: vec![[10, 0, 0, 2].into()],
        });
        let said = tunnel.configuration();
        assert!(said.ends_with("Endpoint = 192.0.2.1:51821\nAllowedIPs = 10.0.0.2/32, 169.254.64.3/32\n"), "{said}");
        assert!(!said.contains("ListenPort"));
        let renewed = |tunnel: &Tunnel| [false, true].map(|heard| tunnel.renews_after(heard));
        assert_eq!(renewed(&tunnel), [Some(RENEW_AFTER); 2], "it speaks alone");
        tunnel.listen = Some(51820);
        assert_eq!(renewed(&tunnel), [Some(RENEW_FIRST), Some(KEYS_LAST)]);
        tunnel.addresses.reverse();
        assert_eq!(renewed(&tunnel), [None; 2], "the other one does");
        tunnel.listen = None;
        assert_eq!(renewed(&tunnel), [Some(RENEW_AFTER); 2], "the other one cannot");
        tunnel.peer.iter_mut().for_each(|peer| peer.endpoint = None);
        assert_eq!(renewed(&tunnel), [None; 2], "nobody knows where to");
    }

    #[test]
    fn a_device_whose_name_only_begins_as_ours_is_somebody_elses() {
        assert!(is_device("gx0123abcd"));
        for other in ["gx", "gx0", "gx0123abcg", "gx0123abcd0", "gxinternal", "gw0123abcd"] {
            assert!(!is_device(other), "{other}");
        }
    }

    #[test]
    fn a_dump_is_read_and_what_never_happened_is_not_there() {
        let dump = "PRIV\tPUB\t51820\toff\nKEY\t(none)\t192.0.2.1:1\t10.0.0.2/32\t1700000000\t12\t34\t15\n";
        let state = read(dump).unwrap();
        assert_eq!((state.handshake_unix_s, state.received, state.sent), (Some(1_700_000_000), 12, 34));
        assert_eq!(state.endpoint, Some("192.0.2.1:1".parse().unwrap()));
        let dump = "PRIV\tPUB\t51820\toff\nKEY\t(none)\t(none)\t10.0.0.2/32\t0\t0\t0\t15\n";
        assert_eq!(read(dump), Some(PeerState::default()));
        assert_eq!(read("PRIV\tPUB\t51820\toff\n"), None);
    }
}
