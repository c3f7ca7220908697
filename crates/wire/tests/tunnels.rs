//! Tunnels between two hosts, each a network namespace: by the kernel where it has WireGuard, by the program where it has not. Needs root,
//! `ip`, `ping`, `wg`, and in the second case `wireguard-go`.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::place::Place;
use godwit_net::{Net, NetError};
use godwit_wire::extender::{Engine, PREFIX, Peer, PrivateKey, Tunnel, TunnelError};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Names so far: tests run side by side, and programs have their sockets in one folder of the machine.
static DRAWN: AtomicU32 = AtomicU32::new(0);

fn draw() -> u32 {
    (std::process::id() << 10) | DRAWN.fetch_add(1, Ordering::Relaxed)
}

fn succeeds(command: &str) -> bool {
    let mut words = command.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Whether the kernel makes such devices; it loads the module for it.
fn kernel_has_wireguard() -> bool {
    Place::new().enter();
    succeeds("ip link add gxtry type wireguard")
}

fn ready() -> bool {
    let ready = succeeds("wg --version") && (kernel_has_wireguard() || succeeds("wireguard-go --version"));
    if !ready {
        eprintln!("SKIPPED: this needs wireguard-tools, and wireguard-go or a kernel with WireGuard");
    }
    ready
}

/// A host, with a runtime of its own: threads are born into the namespace of the one that makes them.
struct Host {
    number: u8,
    place: Place,
    net: Net,
    runtime: Runtime,
    /// For the numbers of programs.
    folder: PathBuf,
}

/// Two hosts on one underlay.
fn hosts() -> [Host; 2] {
    let hosts = [1, 2].map(|number| {
        let place = Place::new();
        place.enter();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let net = runtime.block_on(async { Net::open() }).unwrap();
        let folder = std::env::temp_dir().join(format!("godwit-tunnels-{:08x}", draw()));
        std::fs::create_dir_all(&folder).unwrap();
        Host { number, place, net, runtime, folder }
    });
    hosts[0].place.run(&format!("ip link add eth0 type veth peer name eth0 netns {}", hosts[1].place.path()));
    for host in &hosts {
        host.place.run(&format!("ip addr add {}/24 dev eth0; ip link set eth0 up", host.underlay()));
    }
    hosts
}

impl Drop for Host {
    fn drop(&mut self) {
        self.place.enter();
        for device in self.devices() {
            let _ = self.runtime.block_on(Tunnel::remove(&self.net, &device, &self.file(&device)));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Host {
    fn underlay(&self) -> Ipv4Addr {
        [10, 0, 0, self.number].into()
    }

    fn file(&self, device: &str) -> PathBuf {
        self.folder.join(format!("{device}.pid"))
    }

    /// Its end of the tunnel of an epoch, with nobody at the other end yet.
    fn end(&self, epoch: u8) -> Tunnel {
        self.place.enter();
        let inner = |number: u8| Ipv4Addr::from([169, 254, 64, 4 * epoch + number]);
        Tunnel {
            device: format!("{PREFIX}{:08x}", draw()),
            key: self.runtime.block_on(PrivateKey::generate()).unwrap(),
            listen: Some(51820 + u16::from(epoch)),
            addresses: [inner(self.number), inner(3 - self.number)],
            mtu: 1420,
            peer: None,
        }
    }

    /// Makes it; whether it is by a program.
    fn ensure(&self, tunnel: &Tunnel) -> Option<Engine> {
        self.place.enter();
        self.runtime.block_on(tunnel.ensure(&self.net, &self.file(&tunnel.device))).unwrap()
    }

    fn remove(&self, tunnel: &Tunnel) {
        self.place.enter();
        self.runtime.block_on(Tunnel::remove(&self.net, &tunnel.device, &self.file(&tunnel.device))).unwrap();
    }

    fn devices(&self) -> Vec<String> {
        self.place.enter();
        self.runtime.block_on(Tunnel::devices(&self.net)).unwrap()
    }

    fn last_handshake(&self, tunnel: &Tunnel) -> Option<u64> {
        self.place.enter();
        self.runtime.block_on(Tunnel::state(&tunnel.device)).unwrap().and_then(|state| state.handshake_unix_s)
    }

    /// Whether each of some questions is answered through the tunnel.
    fn reaches(&self, tunnel: &Tunnel) -> bool {
        self.place.enter();
        succeeds(&format!("ping -q -c 5 -i 0.05 -w 3 {}", tunnel.addresses[1]))
    }

    fn until_it_reaches(&self, tunnel: &Tunnel) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.reaches(tunnel) {
            assert!(Instant::now() < end, "nothing comes through {}", tunnel.device);
        }
    }
}

/// A tunnel of new keys between the two, up; and whether programs made it.
fn join(hosts: &[Host; 2], epoch: u8) -> ([Tunnel; 2], [bool; 2]) {
    let mut ends = [0, 1].map(|n: usize| hosts[n].end(epoch));
    let keys = [0, 1].map(|n: usize| hosts[n].runtime.block_on(ends[n].key.public()).unwrap());
    for n in [0, 1] {
        let other = &hosts[1 - n];
        let endpoint = Some((other.underlay(), 51820 + u16::from(epoch)).into());
        ends[n].peer = Some(Peer { key: keys[1 - n].clone(), endpoint, hosts: vec![other.underlay()] });
    }
    let programs = [0, 1].map(|n: usize| hosts[n].ensure(&ends[n]).is_some());
    hosts[0].until_it_reaches(&ends[0]);
    (ends, programs)
}

#[test]
fn a_tunnel_is_the_kernels_where_that_has_wireguard_and_lasts_while_it_is_said_again_and_keys_are_agreed_on_anew() {
    if !ready() {
        return;
    }
    let hosts = hosts();
    let (ends, programs) = join(&hosts, 0);
    assert_eq!(programs, [!kernel_has_wireguard(); 2]);
    println!("tunnels are made by {}", if programs[0] { Engine::PROGRAM } else { "the kernel" });

    let agreed = hosts[0].last_handshake(&ends[0]);
    assert!(agreed.is_some());
    for (host, end) in hosts.iter().zip(&ends) {
        host.ensure(end);
    }
    assert!(hosts[0].reaches(&ends[0]));
    assert_eq!(hosts[0].last_handshake(&ends[0]), agreed, "a session that stands is not disturbed");

    hosts[0].place.enter();
    hosts[0].runtime.block_on(ends[0].renew()).unwrap();
    hosts[0].until_it_reaches(&ends[0]);
}

#[test]
fn a_device_of_another_kind_is_not_taken_for_the_kernels_tunnel_and_is_left_as_it_is() {
    if !ready() {
        return;
    }
    let [host, _other] = hosts();
    let tunnel = host.end(0);
    host.place.run(&format!("ip link add {} type bridge", tunnel.device));
    let refused = host.runtime.block_on(tunnel.ensure(&host.net, &host.file(&tunnel.device))).unwrap_err();
    assert!(matches!(refused, TunnelError::Net(NetError::OtherKind { .. })), "{refused}");
    assert!(refused.to_string().contains("is no WireGuard device"), "{refused}");
    assert!(host.place.run(&format!("ip -d link show {}", tunnel.device)).contains("bridge"));
}

#[test]
fn a_tunnel_of_new_keys_stands_beside_the_old_one_and_stays_when_that_goes() {
    if !ready() {
        return;
    }
    let hosts = hosts();
    let (old, _) = join(&hosts, 0);
    let (new, _) = join(&hosts, 1);
    assert!(hosts[0].reaches(&old[0]) && hosts[1].reaches(&new[1]));
    for (host, end) in hosts.iter().zip(&old) {
        host.remove(end);
    }
    assert!(hosts[0].reaches(&new[0]) && !hosts[0].reaches(&old[0]));
    assert_eq!(hosts[0].devices(), [new[0].device.as_str()]);
    for (host, end) in hosts.iter().zip(&new) {
        host.remove(end);
        // Removed again, as after a crash.
        host.remove(end);
        assert!(host.devices().is_empty());
        assert_eq!(std::fs::read_dir(&host.folder).unwrap().count(), 0, "files are left");
    }
}

#[test]
fn a_tunnel_whose_device_was_removed_or_set_down_is_made_anew_with_its_keys() {
    if !ready() {
        return;
    }
    let hosts = hosts();
    let (ends, _) = join(&hosts, 0);
    let device = &ends[0].device;
    hosts[0].place.run(&format!("ip link set {device} down"));
    assert!(!hosts[0].reaches(&ends[0]));
    hosts[0].ensure(&ends[0]);
    hosts[0].until_it_reaches(&ends[0]);
    match hosts[0].ensure(&ends[0]) {
        Some(program) => drop(hosts[0].place.run(&format!("kill -9 {}", program.pid()))),
        None => drop(hosts[0].place.run(&format!("ip link del {device}"))),
    }
    let gone = Instant::now() + Duration::from_secs(10);
    while !hosts[0].devices().is_empty() {
        assert!(Instant::now() < gone);
    }
    hosts[0].ensure(&ends[0]);
    hosts[0].until_it_reaches(&ends[0]);
}
