//! What a claim rests on: that the other side cannot run the VM, and somebody's word for it.
//!
//! What can go wrong is that the other side is not dead at all, but only out of the sight of whoever claims. A controller that
//! is cut off from a host takes it for lost while the peer goes on talking to it. So the node that is to take the VM
//! looks for itself: a peer that it hears is not fenced, whatever anybody says. And an order to claim may come twice, the second
//! time long after the first was obeyed and the VM has moved on: so it names the newest lineage that it knows of, and means
//! nothing to a node that knows a newer one ([`crate::Why::ClaimTooOld`]).

use crate::guards::{Guard, Guards};
use crate::io::PeerHistory;
use godwit_units::Lineage;

/// Less than this tells nobody what was done to a host, in characters.
pub const SHORTEST_STATEMENT: usize = 8;

/// Evidence for a claim: the other side *is* fenced (powered off, or cut from storage and network), and stays so until
/// its record was overwritten ([`crate::Record::overridden_by`]). To build one is to vouch for that.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fenced {
    /// Who vouches and by what means, for the audit log.
    pub statement: String,
    /// What is known of the other side since the stop.
    pub peer: PeerHistory,
    /// The newest lineage ever begun for the VM, from the controller's store or the fenced node's own record. This
    /// node's record may be older than that: two claims, one at each site, must not begin the same lineage.
    pub newest: Lineage,
}

/// What the node that is to take the VM sees of the other side itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// It answers, or did until a moment ago.
    Heard,
    /// Nothing is heard of it. That alone proves nothing.
    Silent,
}

/// Why something is no evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEvidence {
    /// Nobody says what was done.
    #[error("a claim needs to know how the other host is kept from running the VM; say what was done and by whom")]
    NothingSaid,
    /// The other side is there.
    #[error(
        "the other host of the hand-off is heard here, so it is not fenced; fence it first, or let the two end the move"
    )]
    PeerHeard,
}

impl Fenced {
    /// Takes somebody's word, unless what this node sees contradicts it.
    ///
    /// # Errors
    /// When it says nothing, or the other side is heard.
    pub fn vouched(statement: &str, history: PeerHistory, newest: Lineage, peer: Peer) -> Result<Self, NoEvidence> {
        Self::vouched_guarded(statement, history, newest, peer, Guards::ALL)
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn vouched_with(
        statement: &str,
        history: PeerHistory,
        newest: Lineage,
        peer: Peer,
        guards: Guards,
    ) -> Result<Self, NoEvidence> {
        Self::vouched_guarded(statement, history, newest, peer, guards)
    }

    fn vouched_guarded(
        statement: &str,
        history: PeerHistory,
        newest: Lineage,
        peer: Peer,
        guards: Guards,
    ) -> Result<Self, NoEvidence> {
        if guards.hold(Guard::ClaimNeedsStatement) && statement.trim().chars().count() < SHORTEST_STATEMENT {
            return Err(NoEvidence::NothingSaid);
        }
        if guards.hold(Guard::ClaimNeedsSilence) && peer == Peer::Heard {
            return Err(NoEvidence::PeerHeard);
        }
        Ok(Self { statement: statement.to_owned(), peer: history, newest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_needs_somebodys_word_and_a_silent_peer() {
        let vouch = |said: &str, peer| Fenced::vouched(said, PeerHistory::MayHaveRun, Lineage(3), peer);
        assert_eq!(vouch("  yes    ", Peer::Silent), Err(NoEvidence::NothingSaid));
        assert_eq!(vouch("power cut at the PDU, by ann", Peer::Heard), Err(NoEvidence::PeerHeard));
        let fenced = vouch("power cut at the PDU, by ann", Peer::Silent).unwrap();
        assert_eq!((fenced.peer, fenced.newest), (PeerHistory::MayHaveRun, Lineage(3)));
    }
}
