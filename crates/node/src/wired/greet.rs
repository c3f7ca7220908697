//! Proof that frames pass between the two ends of a wire, whoever is behind them: their hosts greet each other through the tunnel
//! ([`godwit_wire::Greeter`]), and each looks whether its port is on the wire. So a component's move is proved, and that of a guest without an
//! address; and neither hears of it.

use super::{ANSWER, Held, LONGEST_PROBE, LOOK, Node, from_other_end, unknown};
use crate::node::network;
use crate::parts::lock;
use crate::proto::{self, GreetWire, Greeted, Request};
use crate::spec;
use godwit_api::host::PeerHost;
use godwit_api::{ApiError, Problem};
use godwit_wire::{Nonce, Side, WireId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// How long one greeting waits for its echo, before the other host is asked again: the end may have gone to another one meanwhile.
const GREETING: Duration = Duration::from_secs(1);
/// How long a port that is open may take to be on its wire.
const JOINING: Duration = Duration::from_secs(2);

/// Whoever listens for a greeting, until that is over or another one is asked for.
#[derive(Debug)]
pub(super) struct Listening(AbortHandle);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn failed(why: impl std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Failed, why.to_string())
}

/// What a wire's end is called by people, and the other one.
fn named(held: &Held, side: Side) -> String {
    let [here, there] = [side.index(), 1 - side.index()].map(|i| &held.order.ends[i].name);
    format!("the wire from {here} to {there}")
}

impl Node {
    /// Proves that frames pass from an open port here to the other end of its wire and back. One without a wire leads nowhere, which is as it
    /// should be, and so does one whose other end is not open anywhere.
    ///
    /// # Errors
    /// When they do not within that time, with the wire's name.
    pub(crate) async fn greet_end(self: &Arc<Self>, endpoint: u32, within: Duration) -> Result<(), ApiError> {
        let Some((held, side)) = self.wired().of(endpoint) else { return Ok(()) };
        let (wire, named) = {
            let held = held.lock().await;
            (held.order.id, named(&held, side))
        };
        self.has_joined(WireId(wire), endpoint).await?;
        from_other_end(self, &held, side, within, |other, left| async move { self.greet(wire, &other, left).await })
            .await
            .map_err(|error| ApiError { message: format!("{named}: {}", error.message), ..error })
    }

    /// The port is on its wire's bridge, or comes there: one that was just opened is being joined to it.
    async fn has_joined(&self, wire: WireId, endpoint: u32) -> Result<(), ApiError> {
        let (device, end) = (spec::device(endpoint), Instant::now() + JOINING);
        while !self.wires().is_joined(wire, &device).await.map_err(network)? {
            if Instant::now() >= end {
                return Err(self.is_not_joined(wire, &device));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    fn is_not_joined(&self, wire: WireId, device: &str) -> ApiError {
        failed(format!("{device} is not a port of wire {:08x} on {}, or is down", wire.0, self.name()))
    }

    /// Asks the host of the other end to answer, and greets. [`Problem::Unreachable`] where nothing comes back.
    async fn greet(self: &Arc<Self>, wire: u32, other: &PeerHost, left: Duration) -> Result<(), ApiError> {
        let left = left.min(GREETING);
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce).map_err(|e| failed(format!("no random numbers: {e}")))?;
        let within_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let asked = proto::encode(&Request::GreetWire(GreetWire { wire, nonce, within_ms }));
        let answer = self.peers().request(other, asked, ANSWER).await?;
        let answer = proto::decode::<Result<Greeted, ApiError>>(&answer);
        match answer.unwrap_or_else(|e| Err(failed(format!("{}: {e}", other.name))))? {
            Greeted::NobodyThere => Ok(()),
            Greeted::Listens => {
                // The tunnel goes when the other end comes here.
                let greeting = async { self.wires().greeter(WireId(wire)).await?.greet(&nonce, left).await };
                let silent =
                    |error| ApiError::new(Problem::Unreachable, format!("{error}; the other one is {}", other.name));
                greeting.await.map(drop).map_err(silent)
            }
        }
    }

    /// Another host has an end of a wire that has its other end here, and is about to greet.
    ///
    /// # Errors
    /// When the wire does not lead to whoever asks, or its end here is not as it should be.
    pub(crate) async fn greeted(self: &Arc<Self>, from: &str, asked: &GreetWire) -> Result<Greeted, ApiError> {
        let held = self.wired().get(asked.wire).ok_or_else(|| unknown(self, asked.wire))?;
        let endpoint = {
            let held = held.lock().await;
            let of = |side: Side| &held.order.ends[side.index()];
            let theirs = Side::BOTH.into_iter().find(|side| of(*side).view.host.name.as_str() == from);
            let Some(ours) = theirs.map(Side::other) else {
                let message = format!("wire {:08x} does not lead to {from}, who greets over it", asked.wire);
                return Err(ApiError::new(Problem::Forbidden, message));
            };
            if !held.machine.is_open(ours) {
                // It has gone, and its new host is to be asked; or it does not run.
                let gone = of(ours).view.host.name.as_str() != self.name();
                return if gone { Err(unknown(self, asked.wire)) } else { Ok(Greeted::NobodyThere) };
            }
            of(ours).endpoint
        };
        let wire = WireId(asked.wire);
        self.has_joined(wire, endpoint).await?;
        let greeter = self.wires().greeter(wire).await.map_err(network)?;
        let (nonce, within) = (asked.nonce, Duration::from_millis(asked.within_ms).min(LONGEST_PROBE));
        let listening = tokio::spawn(async move {
            if let Err(error) = greeter.answer(&nonce, within).await {
                tracing::debug!(wire = wire.0, %error, "a greeting is not answered");
            }
        });
        // One of each wire: who asks again has given up what was asked before.
        lock(&self.wired().listening).insert(wire.0, Listening(listening.abort_handle()));
        Ok(Greeted::Listens)
    }
}
