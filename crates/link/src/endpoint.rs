//! Listening and connecting: from QUIC connections to sessions.

use crate::limiter::Limiter;
use crate::session::{Inner, final_word};
use crate::transport::{self, is_busy, local, node_at, refusal};
use crate::wire::{Hello, Welcome, code};
use crate::{Addresses, Closed, Config, Lane, LinkError, Peer, Session, State};
use godwit_trust::{Credentials, Identity, PeerError};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_util::sync::CancellationToken;

/// Sessions that peers began with us: a node has one or two with each of its sites' hosts.
const MAX_SESSIONS: usize = 256;

/// How many of them one peer may have: more than one process of a node ever needs, cuts included. For another one its oldest ends.
const MAX_OF_A_PEER: usize = 8;

/// How long a client may take from its handshake to its hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// A node's end of all its sessions. Dropped, it closes them.
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
    accepted: AsyncMutex<mpsc::Receiver<Session>>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    credentials: Credentials,
    lanes: [quinn::Endpoint; 3],
    /// Another one in every process: who restarts is another.
    incarnation: u64,
    /// Every session here, accepted or connected.
    sessions: Mutex<HashMap<(Identity, u128), Arc<Inner>>>,
    /// What is sent to a peer is limited by one, whatever sessions there are with it.
    limiters: Mutex<HashMap<Identity, Weak<Limiter>>>,
    over: CancellationToken,
    ready: mpsc::Sender<Session>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

/// Why one attempt failed.
enum Attempt {
    /// The next may do better.
    Again(String),
    /// None will.
    Refused(PeerError),
    Over(Closed),
}

impl Endpoint {
    /// Binds all lanes and listens. Within a tokio runtime.
    ///
    /// # Errors
    /// A port cannot be had, or a setting is none for QUIC.
    pub fn bind(config: Config, credentials: &Credentials) -> Result<Self, LinkError> {
        let [a, b, c] = Lane::ALL.map(|lane| transport::bind(&config, credentials, lane));
        let lanes = [a?, b?, c?];
        let (ready, accepted) = mpsc::channel(MAX_SESSIONS);
        // 0 stands for "not known" on the wire.
        let incarnation = random_u64()?.max(1);
        let over = CancellationToken::new();
        let credentials = credentials.clone();
        let (sessions, limiters) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { config, credentials, lanes, incarnation, sessions, limiters, over, ready });
        for lane in Lane::ALL {
            tokio::spawn(Arc::clone(&shared).listen(lane));
        }
        Ok(Self { shared, accepted: AsyncMutex::new(accepted) })
    }

    /// Where it listens, with the ports that it got.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        let of = |lane: Lane| local(&self.shared.lanes[lane.index()]).unwrap_or(self.shared.config.listen.of(lane));
        Addresses { control: of(Lane::Control), disk: of(Lane::Disk), memory: of(Lane::Memory) }
    }

    /// A new session, when all its lanes are connected.
    ///
    /// # Errors
    /// Nobody answers within [`Config::connect`], or the one who does is not `peer` or will not have us.
    pub async fn connect(&self, peer: Peer) -> Result<Session, LinkError> {
        let shared = &self.shared;
        let id = u128::from(random_u64()?) << 64 | u128::from(random_u64()?);
        let inner = Inner::new(id, shared.limited(&peer.identity), true, 0, shared.config.clone());
        let session = Session::new(Arc::clone(&inner));
        let start = Instant::now();
        // Control first: it learns who the peer is, before the others insist on that one.
        for lane in Lane::ALL {
            loop {
                let waited = start.elapsed();
                match shared.attempt(&inner, &peer, lane).await {
                    Ok(()) => break,
                    Err(Attempt::Over(closed)) => return Err(closed.into()),
                    Err(Attempt::Refused(source)) => {
                        let address = peer.addresses.of(lane);
                        return Err(LinkError::Refused { peer: peer.identity, address, source });
                    }
                    Err(Attempt::Again(last)) if waited >= shared.config.connect => {
                        let address = peer.addresses.of(lane);
                        return Err(LinkError::Unreachable { peer: peer.identity, lane, address, waited, last });
                    }
                    Err(Attempt::Again(_)) => tokio::time::sleep(shared.config.retry).await,
                }
            }
        }
        shared.keep(&inner);
        for lane in Lane::ALL {
            let (shared, peer) = (Arc::clone(shared), peer.clone());
            inner.spawn(shared.reconnect(Arc::clone(&inner), peer, lane));
        }
        Ok(session)
    }

    /// The next session that a peer began; all its lanes are connected.
    ///
    /// # Errors
    /// The endpoint is closed.
    pub async fn accept(&self) -> Result<Session, LinkError> {
        tokio::select! {
            () = self.shared.over.cancelled() => Err(LinkError::EndpointClosed),
            session = async { self.accepted.lock().await.recv().await } => session.ok_or(LinkError::EndpointClosed),
        }
    }

    /// Ends every session with a peer; what was not acknowledged is lost. It may come again if its certificate lets it.
    pub fn disconnect(&self, peer: &Identity) {
        let theirs: Vec<_> =
            self.shared.lock().iter().filter(|((who, _), _)| who == peer).map(|(_, inner)| Arc::clone(inner)).collect();
        theirs.iter().for_each(|inner| inner.close(Closed::Here));
    }

    /// Closes every session and the sockets. Peers are told if the network lets them be.
    pub fn close(&self) {
        self.shared.over.cancel();
        let all: Vec<_> = self.shared.lock().drain().map(|(_, inner)| inner).collect();
        all.iter().for_each(|inner| inner.close(Closed::Here));
        self.shared.lanes.iter().for_each(|lane| lane.close(code::CLOSED.into(), b"the node stops"));
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(Identity, u128), Arc<Inner>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer, and what limits what is sent to it.
    fn limited(&self, peer: &Identity) -> (Identity, Arc<Limiter>) {
        let mut limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        limiters.retain(|_, limiter| limiter.strong_count() > 0);
        let known = limiters.get(peer).and_then(Weak::upgrade);
        let limiter = known.unwrap_or_else(|| {
            let new = Limiter::new();
            limiters.insert(peer.clone(), Arc::downgrade(&new));
            new
        });
        (peer.clone(), limiter)
    }

    /// Has the session closed with the endpoint, and forgets it when it is over.
    fn keep(self: &Arc<Self>, inner: &Arc<Inner>) {
        let key = (inner.peer.clone(), inner.id);
        self.lock().insert(key.clone(), Arc::clone(inner));
        let (shared, over) = (Arc::clone(self), inner.over.clone());
        tokio::spawn(async move {
            over.cancelled().await;
            shared.lock().remove(&key);
        });
    }

    /// Connects one lane, once.
    async fn attempt(&self, inner: &Arc<Inner>, peer: &Peer, lane: Lane) -> Result<(), Attempt> {
        let once = async {
            let failed = |e: quinn::ConnectionError| match (refusal(&e), final_word(&e)) {
                (Some(peer), _) => Attempt::Refused(peer),
                (None, Some(closed)) => Attempt::Over(closed),
                (None, None) if is_busy(&e) => Attempt::Again("it has as many sessions as it takes".into()),
                (None, None) => Attempt::Again(e.to_string()),
            };
            let again = |e: &dyn std::fmt::Display| Attempt::Again(e.to_string());
            let name = peer.identity.dns_name();
            let connecting = self.lanes[lane.index()].connect(peer.addresses.of(lane), &name).map_err(|e| again(&e))?;
            let connection = connecting.await.map_err(failed)?;
            node_at(&connection).map_err(Attempt::Refused)?;
            let (mut send, mut recv) = connection.open_bi().await.map_err(failed)?;
            let known = inner.peer_incarnation.load(Ordering::Relaxed);
            let (session, incarnation) = (inner.id, self.incarnation);
            let hello = Hello { session, incarnation, peer: known, live: inner.live(lane) };
            // An error here shows as the connection's own, below: in TLS 1.3 a server refuses after the handshake.
            let _ = send.write_chunk(hello.encode()).await;
            let _ = send.finish();
            let welcome = match Welcome::read(&mut recv).await {
                Ok(welcome) => welcome,
                Err(e) => return Err(connection.close_reason().map_or_else(|| again(&e), failed)),
            };
            if known != 0 && welcome.incarnation != known {
                connection.close(code::CLOSED.into(), b"another incarnation");
                return Err(Attempt::Over(Closed::PeerRestarted));
            }
            inner.peer_incarnation.store(welcome.incarnation, Ordering::Relaxed);
            self.close_those_before(&inner.peer, welcome.incarnation);
            inner.install(lane, connection.clone(), &welcome.live);
            self.accepts(inner, &connection).map_err(Attempt::Refused)
        };
        let late = || Attempt::Again(format!("no answer in {:?}", self.config.attempt));
        let done = tokio::time::timeout(self.config.attempt, once).await.unwrap_or_else(|_| Err(late()));
        if let Err(Attempt::Over(Closed::PeerRestarted)) = &done {
            // Whoever hears so from this session, and looks for another, must not find one that is as dead.
            let known = inner.peer_incarnation.load(Ordering::Relaxed);
            self.close_those(&inner.peer, |theirs| theirs == known);
        }
        done
    }

    /// Keeps one lane of a session that we began connected.
    async fn reconnect(self: Arc<Self>, inner: Arc<Inner>, peer: Peer, lane: Lane) {
        let mut connections = inner.connections(lane);
        while connections.wait_for(Option::is_none).await.is_ok() {
            match self.attempt(&inner, &peer, lane).await {
                Ok(()) => {}
                Err(Attempt::Over(closed)) => inner.close(closed),
                Err(Attempt::Refused(why)) => inner.close(Closed::Peer(why)),
                Err(Attempt::Again(why)) => {
                    tracing::debug!(peer = %peer.identity, ?lane, why, "not connected yet");
                    tokio::time::sleep(self.config.retry).await;
                }
            }
        }
    }

    async fn listen(self: Arc<Self>, lane: Lane) {
        loop {
            let incoming = tokio::select! {
                () = self.over.cancelled() => return,
                incoming = self.lanes[lane.index()].accept() => incoming,
            };
            let Some(incoming) = incoming else { return };
            let shared = Arc::clone(&self);
            tokio::spawn(async move {
                let Ok(connection) = incoming.await else { return };
                let greeting = tokio::time::timeout(HELLO_PATIENCE, shared.greet(lane, &connection));
                if greeting.await.is_err() {
                    connection.close(code::PROTOCOL.into(), b"no hello");
                }
            });
        }
    }

    /// A peer connected a lane: of a session that we know, or of a new one.
    async fn greet(self: &Arc<Self>, lane: Lane, connection: &quinn::Connection) {
        let refuse = |number: u32, why: &str| connection.close(number.into(), why.as_bytes());
        let peer = match node_at(connection) {
            Ok(peer) => peer,
            Err(e) => return refuse(code::ROLE, &e.to_string()),
        };
        let Ok((mut send, mut recv)) = connection.accept_bi().await else { return };
        let hello = match Hello::read(&mut recv).await {
            Ok(hello) => hello,
            Err(e) => return refuse(code::PROTOCOL, &e.to_string()),
        };
        if hello.peer != 0 && hello.peer != self.incarnation {
            return refuse(code::RESTARTED, "the process that you mean is gone");
        }
        let inner = match self.find(&peer, &hello) {
            Ok(inner) => inner,
            Err((number, why)) => return refuse(number, why),
        };
        let welcome = Welcome { incarnation: self.incarnation, live: inner.live(lane) };
        if send.write_chunk(welcome.encode()).await.is_ok() {
            let _ = send.finish();
            inner.install(lane, connection.clone(), &hello.live);
            let _ = self.accepts(&inner, connection);
        }
    }

    /// Once more, now that [`Endpoint::disconnect`] would find it: a peer that was revoked between its handshake and here must
    /// not stay.
    fn accepts(&self, inner: &Arc<Inner>, connection: &quinn::Connection) -> Result<(), PeerError> {
        let certificate = transport::certificate_at(connection)?;
        self.credentials.accepts(&certificate).inspect_err(|why| inner.close(Closed::Peer(why.clone())))
    }

    /// Ends the sessions with a process of that peer that is no more, whoever began them.
    fn close_those_before(&self, peer: &Identity, incarnation: u64) {
        self.close_those(peer, |theirs| theirs != incarnation);
    }

    /// Ends the sessions with such processes of that peer, which are no more.
    fn close_those(&self, peer: &Identity, gone: impl Fn(u64) -> bool) {
        let is_gone = |s: &Inner| {
            let theirs = s.peer_incarnation.load(Ordering::Relaxed);
            s.peer == *peer && theirs != 0 && gone(theirs)
        };
        let mut stale: Vec<_> = self.lock().extract_if(|_, s| is_gone(s)).map(|(_, s)| s).collect();
        // All are seen to be over before anything hears of it.
        stale.retain(|old| old.declare_over(Closed::PeerRestarted));
        stale.iter().for_each(|old| old.end());
    }

    /// For another session that this peer begins.
    fn make_room(&self, peer: &Identity) -> Result<(), (u32, &'static str)> {
        let oldest = {
            let sessions = self.lock();
            let accepted = sessions.values().filter(|s| !s.initiator && !s.over.is_cancelled());
            let accepted: Vec<&Arc<Inner>> = accepted.collect();
            let theirs = || accepted.iter().filter(move |s| s.peer == *peer);
            if theirs().count() < MAX_OF_A_PEER {
                return if accepted.len() < MAX_SESSIONS { Ok(()) } else { Err((code::BUSY, "too many sessions")) };
            }
            // What carries nothing before what does, also over a cut.
            theirs().min_by_key(|s| (s.is_used(), s.is_up(), s.began)).copied().cloned()
        };
        if let Some(oldest) = oldest {
            tracing::debug!(%peer, "it began more sessions than it may have: the oldest ends");
            oldest.close(Closed::Here);
        }
        Ok(())
    }

    fn find(self: &Arc<Self>, peer: &Identity, hello: &Hello) -> Result<Arc<Inner>, (u32, &'static str)> {
        let sessions = self.lock();
        let known = sessions.get(&(peer.clone(), hello.session)).map(Arc::clone);
        drop(sessions);
        self.close_those_before(peer, hello.incarnation);
        match known {
            Some(inner) if !inner.initiator && !inner.over.is_cancelled() => Ok(inner),
            Some(_) => Err((code::CLOSED, "the session is closed")),
            // The control lane always begins: another lane of an unknown session is one that we gave up.
            None if hello.peer != 0 => Err((code::EXPIRED, "the session was given up")),
            None => {
                self.make_room(peer)?;
                let (limited, config) = (self.limited(peer), self.config.clone());
                let inner = Inner::new(hello.session, limited, false, hello.incarnation, config);
                self.keep(&inner);
                let (ready, orphan) = (self.ready.clone(), self.config.orphan);
                let held = Arc::clone(&inner);
                inner.spawn(async move { watch_over(held, ready, orphan).await });
                Ok(inner)
            }
        }
    }
}

/// Hands an accepted session to the application once it is up, and ends it when its initiator stays away.
async fn watch_over(inner: Arc<Inner>, ready: mpsc::Sender<Session>, orphan: Duration) {
    let session = Session::new(Arc::clone(&inner));
    let mut state = session.state();
    let up = state.wait_for(|s| *s == State::Up);
    if !matches!(tokio::time::timeout(HELLO_PATIENCE * 4, up).await, Ok(Ok(_))) {
        return inner.close(Closed::Expired);
    }
    let _ = ready.try_send(session);
    loop {
        if state.wait_for(|s| matches!(s, State::Down { .. })).await.is_err() {
            return;
        }
        if tokio::time::timeout(orphan, state.wait_for(|s| *s == State::Up)).await.is_err() {
            return inner.close(Closed::Expired);
        }
    }
}

fn random_u64() -> Result<u64, LinkError> {
    getrandom::u64().map_err(|e| LinkError::Config(format!("the system gives no randomness: {e}")))
}
