//! Sessions with other nodes: one to each, kept, whoever began it.
//!
//! One that was down for a while has another one beside it, and may come back: what it carries goes on. Once nobody uses it any more at this end,
//! it is closed ([`Peers::look_round`]).

use crate::node::Node;
use crate::parts::lock;
use anyhow::{Context, Result};
use bytes::Bytes;
use godwit_api::host::PeerHost;
use godwit_api::progress::MoveBytes;
use godwit_api::{ApiError, Problem};
use godwit_link::{Addresses, Config, Counters, Endpoint, Lane, Peer, RequestError, Session, State, StreamError};
use godwit_memory::levels::Found;
use godwit_trust::{Credentials, Identity};
use godwit_units::BitRate;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long a session may be down before another one is tried beside it.
const STALE: Duration = Duration::from_secs(3);
/// How long nobody may have used a session that another one has replaced before it is closed.
const IDLE: Duration = Duration::from_secs(60);
/// Between two looks at which sessions are of use, and at what the limits are.
const LOOK: Duration = Duration::from_secs(1);
/// Those who hold a session that nobody uses: the three tasks that serve it, and whoever keeps it.
const SERVING: usize = 4;

/// A session that is served.
#[derive(Debug)]
struct Kept {
    session: Session,
    /// When something came by it last.
    used: Arc<Mutex<Instant>>,
    limit: Option<BitRate>,
}

impl Kept {
    fn is_open(&self) -> bool {
        !matches!(*self.session.state().borrow(), State::Closed(_))
    }

    fn is_idle(&self) -> bool {
        self.session.holders() <= SERVING && lock(&self.used).elapsed() > IDLE
    }

    fn limit(&mut self, limit: Option<BitRate>) {
        if self.limit != limit {
            self.limit = limit;
            self.session.set_limit(limit);
        }
    }
}

/// The last try to connect to a host, and when it ended: whoever waited for it need not try again.
type Failed = (Instant, ApiError);

/// The sessions.
#[derive(Debug)]
pub struct Peers {
    endpoint: Endpoint,
    sessions: Mutex<BTreeMap<String, Kept>>,
    /// Those that another one has taken the place of, and their peers' names.
    replaced: Mutex<Vec<(String, Kept)>>,
    /// One connection is made to a host at a time; others wait for it and then find it. A host that does not answer, as a gateway
    /// that is asked again and again, holds up nobody else's. As many as there are hosts.
    connecting: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<Option<Failed>>>>>,
    found: Mutex<Found>,
    node: Mutex<Weak<Node>>,
}

impl Peers {
    /// Listens.
    ///
    /// # Errors
    /// When the ports cannot be had.
    pub fn bind(listen: Addresses, credentials: &Credentials) -> Result<Self> {
        let endpoint = Endpoint::bind(Config::new(listen), credentials).context("the link cannot listen")?;
        Ok(Self {
            endpoint,
            sessions: Mutex::default(),
            replaced: Mutex::default(),
            connecting: Mutex::default(),
            found: Mutex::default(),
            node: Mutex::default(),
        })
    }

    /// Takes sessions from now on, and serves them by `node`.
    pub fn serve(&self, node: &Arc<Node>) {
        *lock(&self.node) = Arc::downgrade(node);
        let looking = Arc::downgrade(node);
        tokio::spawn(async move {
            while let Some(node) = looking.upgrade() {
                node.peers().look_round(&node);
                drop(node);
                tokio::time::sleep(LOOK).await;
            }
        });
        let node = node.clone();
        tokio::spawn(async move {
            loop {
                match node.peers().endpoint.accept().await {
                    Ok(session) => node.peers().keep(session),
                    Err(error) => {
                        tracing::error!(%error, "the link takes no more sessions");
                        return;
                    }
                }
            }
        });
    }

    /// A session that is of use now. One that has been down for a while may be the last word of a peer's earlier process, which
    /// only the peer could tell us: so another one is tried. Whoever holds the old one keeps it; after a mere cut it goes on.
    fn known(&self, name: &str) -> Option<Session> {
        let mut sessions = lock(&self.sessions);
        if !sessions.get(name)?.is_open() {
            sessions.remove(name);
            let mut replaced = lock(&self.replaced);
            let at = replaced.iter().rposition(|(peer, kept)| peer == name && kept.is_open())?;
            sessions.insert(name.to_owned(), replaced.remove(at).1);
        }
        let kept = sessions.get(name)?;
        Some(kept.session.clone()).filter(|s| s.down_for().is_none_or(|down| down < STALE))
    }

    /// Whether a host is heard now. That it is not says little: perhaps there is nothing to say.
    #[must_use]
    pub fn hears(&self, name: &str) -> bool {
        let up = |kept: &Kept| matches!(*kept.session.state().borrow(), State::Up);
        // By whichever: the one that is found by its name here may be another at the other end.
        lock(&self.sessions).get(name).is_some_and(up)
            || lock(&self.replaced).iter().any(|(peer, kept)| peer == name && up(kept))
    }

    fn connecting(&self, name: &str) -> Arc<tokio::sync::Mutex<Option<Failed>>> {
        lock(&self.connecting).entry(name.to_owned()).or_default().clone()
    }

    /// The session with a host; connects when there is none.
    ///
    /// # Errors
    /// When it cannot be reached, or is not who it should be.
    pub async fn session(&self, host: &PeerHost) -> Result<Session, ApiError> {
        let name = host.name.as_str();
        if let Some(session) = self.known(name) {
            return Ok(session);
        }
        let (connecting, asked) = (self.connecting(name), Instant::now());
        let mut one = connecting.lock().await;
        if let Some(session) = self.known(name) {
            return Ok(session);
        }
        if let Some((_, error)) = one.as_ref().filter(|(ended, _)| *ended >= asked) {
            return Err(error.clone());
        }
        let refuse = |error: &dyn std::fmt::Display| unreachable(name, error);
        let identity = Identity::node(name).map_err(|e| refuse(&e))?;
        let addresses = Addresses { control: host.link.control, disk: host.link.disk, memory: host.link.memory };
        let connected = self.endpoint.connect(Peer { identity, addresses }).await.map_err(|e| refuse(&e));
        *one = connected.as_ref().err().map(|error| (Instant::now(), error.clone()));
        let session = connected?;
        self.keep(session.clone());
        Ok(session)
    }

    /// Asks a host, and waits for the answer. Where the session turns out to be with the host's process before this one, it is asked
    /// once more: that one has not answered, and took what it knew with it.
    ///
    /// # Errors
    /// When it cannot be reached, or does not answer in time.
    pub async fn request(&self, host: &PeerHost, request: Bytes, timeout: Duration) -> Result<Bytes, ApiError> {
        let restarted = RequestError::Stream(StreamError::PeerRestarted);
        let mut tries = 0;
        loop {
            let session = self.session(host).await?;
            let answer = tokio::select! {
                answer = session.request(request.clone(), timeout) => answer,
                never = self.look_after(host, &session) => match never {},
            };
            tries += 1;
            match answer {
                Err(error) if error == restarted && tries == 1 => {}
                answer => return answer.map_err(|e| unreachable(host.name.as_str(), &e)),
            }
        }
    }

    /// Looks after a session for as long as somebody waits for what comes by it. Who began a session has to connect it anew, and may
    /// have died with it: then another session tells so, and what was waited for ends with an error.
    pub async fn look_after(&self, host: &PeerHost, session: &Session) -> std::convert::Infallible {
        loop {
            tokio::time::sleep(STALE / 4).await;
            if session.down_for().is_some_and(|down| down >= STALE) {
                let _ = self.session(host).await;
            }
        }
    }

    /// Ends every session with a peer that is not trusted any more.
    pub fn disconnect(&self, who: &Identity) {
        lock(&self.sessions).remove(who.name());
        self.endpoint.disconnect(who);
    }

    /// Says something that may be lost.
    pub fn say(self: &Peers, node: &Arc<Node>, host: PeerHost, message: Bytes) {
        let node = node.clone();
        tokio::spawn(async move {
            let known = node.peers().known(host.name.as_str());
            let session = match known {
                Some(session) => session,
                // Somebody is connecting already: this message is lost, and said again.
                None if node.peers().connecting(host.name.as_str()).try_lock().is_err() => return,
                None => match node.peers().session(&host).await {
                    Ok(session) => session,
                    Err(error) => {
                        tracing::debug!(%error, "a message was lost");
                        return;
                    }
                },
            };
            if let Err(error) = session.send_message(message) {
                tracing::debug!(%error, "a message was lost");
            }
        });
    }

    /// Serves what comes by a session, and finds it by its peer's name from now on.
    fn keep(&self, session: Session) {
        let Some(node) = lock(&self.node).upgrade() else { return };
        let from = session.peer().name().to_owned();
        tracing::info!(peer = from, "link up");
        let used = Arc::new(Mutex::new(Instant::now()));
        let limit = node.limit_to(&from);
        let kept = Kept { session: session.clone(), used: used.clone(), limit };
        session.set_limit(limit);
        if let Some(before) = lock(&self.sessions).insert(from.clone(), kept) {
            lock(&self.replaced).push((from.clone(), before));
        }
        let use_it = move || *lock(&used) = Instant::now();
        let (n, s, f, now) = (node.clone(), session.clone(), from.clone(), use_it.clone());
        tokio::spawn(async move {
            while let Ok(message) = s.recv_message().await {
                now();
                n.heard(&f, &message);
            }
        });
        let (n, s, f, now) = (node.clone(), session.clone(), from.clone(), use_it.clone());
        tokio::spawn(async move {
            while let Ok(asked) = s.accept_request().await {
                now();
                let (n, f) = (n.clone(), f.clone());
                tokio::spawn(async move {
                    // Whoever broke it off knows.
                    let Ok((request, responder)) = asked.whole().await else { return };
                    let answer = n.asked(&f, &request).await;
                    if let Err(error) = responder.respond(answer).await {
                        tracing::debug!(%error, "an answer was lost");
                    }
                });
            }
        });
        tokio::spawn(async move {
            while let Ok((_, hello, stream)) = session.accept_stream().await {
                use_it();
                node.streamed(&from, &hello, stream);
            }
            tracing::info!(peer = from, "link closed");
        });
    }
}

/// What a session has carried since `before`, by what it was for.
#[must_use]
pub fn carried(session: &Session, before: &Counters) -> MoveBytes {
    let now = session.counters();
    let on = |lane| godwit_units::Bytes(now.lane(lane).saturating_sub(before.lane(lane)));
    MoveBytes { control: on(Lane::Control), disk: on(Lane::Disk), memory: on(Lane::Memory) }
}

fn unreachable(name: &str, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Unreachable, format!("{name} cannot be reached over the link: {error}"))
        .remedy("see that its node runs, and that its UDP ports are open to this host")
}

impl Peers {
    /// How far a peer is, there and back.
    #[must_use]
    pub fn rtt(&self, name: &str) -> Option<Duration> {
        self.known(name)?.rtt()
    }

    /// All sessions that are kept, by the peer's name; for figures.
    #[must_use]
    pub fn sessions(&self) -> Vec<(String, Session)> {
        let sessions = lock(&self.sessions);
        let open = sessions.iter().filter(|(_, kept)| kept.is_open());
        open.map(|(name, kept)| (name.clone(), kept.session.clone())).collect()
    }

    /// Limits what goes to a peer, by whichever session.
    pub fn limit(&self, name: &str, limit: Option<BitRate>) {
        if let Some(kept) = lock(&self.sessions).get_mut(name) {
            kept.limit(limit);
        }
        lock(&self.replaced).iter_mut().filter(|(peer, _)| peer == name).for_each(|(_, kept)| kept.limit(limit));
    }

    /// How memory streams to the others were packed in the end.
    pub(crate) fn found(&self) -> MutexGuard<'_, Found> {
        lock(&self.found)
    }

    /// Closes what nobody uses any more, and lifts the limits of moves that have ended.
    fn look_round(&self, node: &Node) {
        lock(&self.replaced).retain(|(name, kept)| {
            if kept.is_idle() {
                tracing::info!(peer = name, "a link that another one has replaced is closed");
                kept.session.close();
            }
            kept.is_open()
        });
        let names: BTreeSet<String> = lock(&self.sessions)
            .keys()
            .cloned()
            .chain(lock(&self.replaced).iter().map(|(name, _)| name.clone()))
            .collect();
        for name in names {
            self.limit(&name, node.limit_to(&name));
        }
    }
}
