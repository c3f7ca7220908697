//! What happens to VMs, hosts, volumes and moves, as a stream that may be followed: `GET /v1/events`.
//!
//! The stream is of server-sent events: plain HTTP, with a number for each event and a way to say "I have all up to
//! this one" built in (`Last-Event-ID`), so that browsers and many libraries resume by themselves, and `curl -N` shows it
//! as it is. Each event is one JSON object, the same that `godwit events --json` prints.
//!
//! # What can go wrong
//!
//! A reader that is slow, or comes back late, may have missed more than is kept: it is told so by [`Happening::Lost`], and has
//! to look at the things themselves. The connection may break at any time; whoever follows asks again, after the last number
//! that it has seen.

use crate::client::Body;
use crate::extender::LocalWay;
use crate::name::Name;
use crate::progress::{Outcome, PhaseName};
use crate::{ApiError, Problem, PublicClient};
use godwit_units::{Bytes, Generation, MoveId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Its number: greater than that of any event before, also across restarts of the controller.
    pub id: u64,
    /// When it was seen: microseconds since 1970, by the controller's clock.
    pub at_unix_us: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: Happening,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Happening {
    /// A site is known.
    SiteAdded {
        /// Its name.
        site: Name,
    },
    /// A site is forgotten.
    SiteRemoved {
        /// Its name.
        site: Name,
    },
    /// A host is known.
    HostAdded {
        /// Its name.
        host: Name,
        /// Its site.
        site: Name,
    },
    /// A host is forgotten.
    HostRemoved {
        /// Its name.
        host: Name,
    },
    /// A host that could not be reached answers, or one answers for the first time.
    HostReachable {
        /// Its name.
        host: Name,
    },
    /// A host does not answer.
    HostUnreachable {
        /// Its name.
        host: Name,
        /// Why.
        error: String,
    },
    /// A component is known.
    ComponentAdded {
        /// Its name.
        component: Name,
    },
    /// A component is forgotten.
    ComponentRemoved {
        /// Its name.
        component: Name,
    },
    /// A VM is wholly there.
    VmCreated {
        /// Its name.
        vm: Name,
        /// Its host.
        host: Name,
    },
    /// A VM has another owner.
    VmMoved {
        /// Its name.
        vm: Name,
        /// The host that owns it now.
        host: Name,
        /// Its generation there.
        generation: Generation,
    },
    /// A VM's description changed.
    VmChanged {
        /// Its name.
        vm: Name,
    },
    /// A VM is gone.
    VmRemoved {
        /// Its name.
        vm: Name,
    },
    /// A volume is there.
    VolumeCreated {
        /// Its name.
        volume: Name,
        /// The VM that it belongs to.
        vm: Name,
        /// Its size.
        size: Bytes,
    },
    /// A volume has other replicas, or another primary.
    VolumeChanged {
        /// Its name.
        volume: Name,
        /// Hosts that hold a replica; the first is the primary.
        replicas: Vec<Name>,
    },
    /// A volume is gone.
    VolumeRemoved {
        /// Its name.
        volume: Name,
    },
    /// A move was ordered.
    MoveOrdered {
        /// The move.
        #[serde(rename = "move")]
        mv: MoveId,
        /// The VM.
        vm: Name,
        /// The host that it leaves.
        from: Name,
        /// The host that it goes to.
        to: Name,
    },
    /// A move entered a phase.
    MovePhase {
        /// The move.
        #[serde(rename = "move")]
        mv: MoveId,
        /// The VM.
        vm: Name,
        /// The phase.
        phase: PhaseName,
    },
    /// A move's VM is paused until its peer is heard, or one side is claimed.
    MoveWaits {
        /// The move.
        #[serde(rename = "move")]
        mv: MoveId,
        /// The VM.
        vm: Name,
    },
    /// Somebody wants a move taken back.
    MoveCancelled {
        /// The move.
        #[serde(rename = "move")]
        mv: MoveId,
        /// The VM.
        vm: Name,
    },
    /// A move is over.
    MoveEnded {
        /// The move.
        #[serde(rename = "move")]
        mv: MoveId,
        /// The VM.
        vm: Name,
        /// How it ended.
        outcome: Outcome,
        /// The pause, where there was one.
        downtime_ms: Option<f64>,
        /// Why, where it did not go as it was meant to.
        error: Option<String>,
    },
    /// All hosts of two sites know of the extender that joins them.
    ExtenderConnected {
        /// The sites.
        sites: [Name; 2],
    },
    /// Two sites have no extender any more.
    ExtenderDisconnected {
        /// The sites.
        sites: [Name; 2],
    },
    /// A tunnel of an extender is up, and none was before.
    ExtenderUp {
        /// The sites.
        sites: [Name; 2],
    },
    /// No tunnel of an extender is up any more: what wires send there is lost.
    ExtenderDown {
        /// The sites.
        sites: [Name; 2],
    },
    /// A host's frames take another way than before: another tunnel, or another host that carries.
    ExtenderWayChanged {
        /// The sites.
        sites: [Name; 2],
        /// Whose frames.
        host: Name,
        /// Which way; none: nowhere.
        way: Option<LocalWay>,
    },
    /// Not an event, but a hole: some before this one are not kept any more.
    Lost {
        /// How many, if that is known; it is not when the controller was restarted.
        count: Option<u64>,
    },
}

impl Happening {
    /// Its kind, as in the member `kind`.
    #[must_use]
    pub fn kind(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["kind"].as_str().unwrap_or_default().to_owned()
    }
}

impl Event {
    /// As it travels.
    #[must_use]
    pub fn to_frame(&self) -> String {
        let data = serde_json::to_string(self).expect("an event has string keys and no failing types");
        format!("id: {}\nevent: {}\ndata: {data}\n\n", self.id, self.what.kind())
    }
}

/// Longest frame that a reader takes: an event with its reason is some hundred bytes.
const LONGEST_FRAME: usize = 64 << 10;

/// Events as they come.
#[derive(Debug)]
pub struct EventStream {
    body: Body,
    read: Vec<u8>,
}

impl EventStream {
    /// The next event; none at the end of the stream.
    ///
    /// # Errors
    /// [`Problem::Unreachable`] when the connection breaks, [`Problem::Failed`] for what is no event.
    pub async fn next(&mut self) -> Result<Option<Event>, ApiError> {
        let not_an_event = |why: String| {
            ApiError::new(Problem::Failed, format!("GET /v1/events answered what this version cannot read: {why}"))
                .remedy("run the same version of godwit on both machines")
        };
        loop {
            if let Some(end) = self.read.windows(2).position(|pair| pair == b"\n\n") {
                let frame: Vec<u8> = self.read.drain(..end + 2).collect();
                let text = String::from_utf8(frame).map_err(|e| not_an_event(e.to_string()))?;
                // A frame without data is a comment that keeps the connection alive.
                let Some(data) = text.lines().find_map(|line| line.strip_prefix("data: ")) else { continue };
                return serde_json::from_str(data).map(Some).map_err(|e| not_an_event(e.to_string()));
            }
            if self.read.len() > LONGEST_FRAME {
                return Err(not_an_event(format!("a frame is longer than {LONGEST_FRAME} bytes")));
            }
            match self.body.piece().await? {
                Some(piece) => self.read.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}

impl PublicClient {
    /// `GET /v1/events`: those after number `after`, as far as they are kept; without it those from now on. With `follow` it
    /// goes on for ever.
    ///
    /// # Errors
    /// As [`Client`](crate::Client).
    pub async fn events(&self, after: Option<u64>, follow: bool) -> Result<EventStream, ApiError> {
        let after = after.map_or(String::new(), |id| format!("&after={id}"));
        let body = self.0.open(&format!("/v1/events?follow={follow}{after}")).await?;
        Ok(EventStream { body, read: vec![] })
    }
}
