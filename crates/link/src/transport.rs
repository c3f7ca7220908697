//! QUIC as this crate sets it up: one socket per lane, which both accepts and connects.

use crate::samples::Sampling;
use crate::wire::ALPN;
use crate::{Config, Lane, LinkError};
use godwit_trust::{Credentials, Identity, PeerCertificate, PeerError, Role};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{AckFrequencyConfig, ConnectionError, MtuDiscoveryConfig, TransportConfig, VarInt};
use quinn_proto::RandomConnectionIdGenerator;
use rustls::pki_types::CertificateDer;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

/// The flow-control window of a connection: 1 Gbit/s times 180 ms is 22.5 MB; twice that, for the reader's own delay. All streams of a lane share it,
/// and what is written to quinn counts, whether it has left or not: a write that finds nothing left of it waits, whatever its priority.
const RECEIVE_WINDOW: u32 = 48 << 20;

/// So many of these bytes all bulk may have under way on a lane.
pub const FOR_BULK: usize = 24 << 20;
/// And so many the background: each for itself, or what stands behind all bulk would hold what is bulk's. The rest is for what somebody waits
/// for: some 8 MiB, since the peer says an eighth of the window late what it has read, but for what an aborted stream has left with quinn.
pub const FOR_BACKGROUND: usize = 10 << 20;

/// What quinn may hold unacknowledged. The peer's window is the bound that matters; this only must not be less.
const SEND_WINDOW: u64 = 64 << 20;

/// After so many packets memory's are acknowledged, not after every second: each answer is a packet that both hosts handle. The other lanes
/// keep QUIC's way: what gives way lives by the times of single answers. At 10 Mbit/s this is 8 ms.
const ACKNOWLEDGED_EVERY: u32 = 8;

/// Bytes of a connection's id, which every packet carries; quinn's own has 8. An endpoint gives out some hundreds at the most, and draws again where
/// it has one already.
const CONNECTION_ID: usize = 4;

/// What may go before the first acknowledgement: a tenth of a second at 10 Mbit/s.
const INITIAL_WINDOW: u64 = 128 << 10;

/// What the kernel may hold for us: 20 ms at 1 Gbit/s, while the task that reads does something else.
const SOCKET_BUFFER: usize = 4 << 20;

/// Binds one lane. No address reuse: two nodes on one port would each get half of the packets. UDP knows no TIME_WAIT,
/// so a node that restarts has its port at once.
pub fn bind(config: &Config, credentials: &Credentials, lane: Lane) -> Result<quinn::Endpoint, LinkError> {
    let address = config.listen.of(lane);
    let failed = |source| LinkError::Bind { lane, address, source };
    let unfit = |e: &dyn std::fmt::Display| LinkError::Config(e.to_string());
    let transport = Arc::new(transport(config, lane)?);
    let tls = QuicServerConfig::try_from(credentials.server_config(ALPN)).map_err(|e| unfit(&e))?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls));
    server.transport_config(Arc::clone(&transport));
    let tls = QuicClientConfig::try_from(credentials.client_config(ALPN)).map_err(|e| unfit(&e))?;
    let mut client = quinn::ClientConfig::new(Arc::new(tls));
    client.transport_config(transport);

    let socket = UdpSocket::bind(address).map_err(failed)?;
    // As much as we may: beyond rmem_max only root may go, and less still works.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER)
        .or_else(|_| rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER));
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
    let runtime = Arc::new(quinn::TokioRuntime);
    let mut shared = quinn::EndpointConfig::default();
    shared.cid_generator(|| Box::new(RandomConnectionIdGenerator::new(CONNECTION_ID)));
    let mut endpoint = quinn::Endpoint::new(shared, Some(server), socket, runtime).map_err(failed)?;
    endpoint.set_default_client_config(client);
    Ok(endpoint)
}

fn transport(config: &Config, lane: Lane) -> Result<TransportConfig, LinkError> {
    let mut t = TransportConfig::default();
    let silence =
        config.silence.try_into().map_err(|_| LinkError::Config(format!("silence of {:?}", config.silence)))?;
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(config.max_datagram);
    t.max_idle_timeout(Some(silence))
        .keep_alive_interval(Some(config.keep_alive))
        .initial_rtt(Duration::from_millis(100))
        .stream_receive_window(VarInt::from_u32(RECEIVE_WINDOW))
        .receive_window(VarInt::from_u32(RECEIVE_WINDOW))
        .send_window(SEND_WINDOW)
        .max_concurrent_bidi_streams(VarInt::from_u32(2 * crate::MAX_STREAMS as u32))
        .max_concurrent_uni_streams(VarInt::from_u32(if lane == Lane::Control { 64 } else { 0 }))
        .mtu_discovery_config(Some(mtu))
        .congestion_controller_factory(Arc::new(Sampling { initial_window: INITIAL_WINDOW }));
    if lane == Lane::Memory {
        let mut acknowledged = AckFrequencyConfig::default();
        acknowledged.ack_eliciting_threshold(VarInt::from_u32(ACKNOWLEDGED_EVERY));
        t.ack_frequency_config(Some(acknowledged));
    }
    Ok(t)
}

/// Who is at the other end: a node, or nobody to us.
pub fn node_at(connection: &quinn::Connection) -> Result<Identity, PeerError> {
    let identity = certificate_at(connection)?.identity;
    identity.require(Role::Node)?;
    Ok(identity)
}

/// The certificate of who is at the other end.
pub fn certificate_at(connection: &quinn::Connection) -> Result<PeerCertificate, PeerError> {
    let shown = connection.peer_identity().ok_or(PeerError::NoCertificate)?;
    let certs = shown.downcast::<Vec<CertificateDer<'static>>>().map_err(|_| PeerError::NoCertificate)?;
    PeerCertificate::read(&certs)
}

/// What TLS found wrong, if that is why the connection failed. QUIC carries a TLS alert as error 0x100 + alert.
pub fn refusal(error: &ConnectionError) -> Option<PeerError> {
    let alert = |code: u64| (0x100..0x200).contains(&code).then_some((code & 0xff) as u8);
    match error {
        ConnectionError::TransportError(e) => {
            let number = alert(u64::from(e.code))?;
            Some(PeerError::found(number, &e.reason))
        }
        ConnectionError::ConnectionClosed(e) => Some(PeerError::from_alert(alert(u64::from(e.error_code))?)),
        ConnectionError::ApplicationClosed(e) if e.error_code == VarInt::from_u32(crate::wire::code::ROLE) => {
            Some(PeerError::RefusedUs { why: String::from_utf8_lossy(&e.reason).into_owned() })
        }
        _ => None,
    }
}

/// Whether the peer had no room for another session.
pub fn is_busy(error: &ConnectionError) -> bool {
    let busy = VarInt::from_u32(crate::wire::code::BUSY);
    matches!(error, ConnectionError::ApplicationClosed(e) if e.error_code == busy)
}

/// The address that a socket got: ports given as 0 are known only now.
pub fn local(endpoint: &quinn::Endpoint) -> Option<SocketAddr> {
    endpoint.local_addr().ok()
}
