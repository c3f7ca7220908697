//! Scrub of a volume that this host holds: the machine of [`godwit_volume::scrub`] leads, the other holders are asked over the link.
//!
//! Nothing is remembered between two slices. Digests cross the link, and contents only where a rotten block is repaired.
//!
//! # What can go wrong
//!
//! *A node asks for digests, or blocks, of what is none of its business.* It is answered where the controller's signature names it, this
//! host, the volume and its size, and says that this is to verify; and not in the name of an owner before the last one that is known here.
//! *A holder is away, or does not answer*: it is left out, and the answer says so. *The guests want the disk*: what is read in a second is
//! bounded for all scrubs of a node together ([`Pace`]). *A slice takes longer than the controller waits*: it is cut off between two extents
//! (`cut`), and what was not done is the next one's. The first extent is done whole, so that each slice gets on; where so much of it is rotten
//! that there is no time to repair all, the rest is told.

use crate::covered::VolumeRight;
use crate::node::Node;
use crate::precache;
use crate::proto::{self, Request};
use bytes::Bytes;
use godwit_api::host::{Ownership, PeerHost};
use godwit_api::verify::{CopyState, HeldCopy, LEAST_RATE, Rot, ToldBy, Verified, VerifiedHolder, VerifyOrder, digest};
use godwit_api::{ApiError, Name, Problem};
use godwit_trust::SignedCapability;
use godwit_units::{Bytes as Amount, Generation, Lineage, VmId, VolumeId};
use godwit_volume::scrub::{
    Answer, Ask, Attested, BlockDigest, Digest, EXTENT, ExtentDigest, Finding, Held, MOST_EXTENTS, MOST_HOLDERS, Mend,
    Scrub, Settled,
};
use godwit_volume::{BLOCK, Stamp, VolumeError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long a slice takes before it ends with what it has.
const SLICE: Duration = Duration::from_secs(4);
/// How long its first extent may take, with all that is to be repaired: the controller waits for a minute.
const LONGEST: Duration = Duration::from_secs(50);
/// Extents of a slice, where the disk is fast.
const MOST: usize = 256;
/// Findings after which a slice ends: where a whole disk is rotten the answer has to stay small.
const MOST_FINDINGS: usize = 1024;
/// How long another holder may take to read what it is asked for, where many scrubs share the rate.
const PATIENCE: Duration = Duration::from_secs(40);

/// When the next scrub of this node may read.
#[derive(Debug, Default)]
pub struct Pace(tokio::sync::Mutex<Option<Instant>>);

impl Pace {
    /// Waits until so many bytes may be read.
    pub(crate) async fn take(&self, bytes: u64, rate: Amount) {
        let mut next = self.0.lock().await;
        let now = Instant::now();
        let at = next.map_or(now, |next| next.max(now));
        *next = Some(at + Duration::from_secs_f64(bytes as f64 / rate.0.max(LEAST_RATE.0) as f64));
        drop(next);
        tokio::time::sleep_until(at).await;
    }
}

/// Extents of one question: half a second's reading, so that there are moments at which a slice can end.
fn at_once(rate: Amount) -> usize {
    usize::try_from(rate.0 / 2 / (EXTENT * BLOCK)).unwrap_or(MOST_EXTENTS).clamp(1, MOST_EXTENTS)
}

/// Where a slice that began with the extent `first` ends when it has taken so long, and `left` is what it would do next; none: it goes on.
fn cut(first: u64, left: Option<u64>, taken: Duration) -> Option<u64> {
    left.filter(|left| *left > first && taken >= SLICE)
}

/// What another holder is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScrubAsk {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// Its size.
    pub size: Amount,
    /// The owner's lineage.
    pub lineage: Lineage,
    /// The owner's generation.
    pub generation: Generation,
    /// What shows that the controller has ordered it.
    pub capability: SignedCapability,
    /// What may be read in a second.
    pub rate: Amount,
    /// What.
    pub what: What,
}

/// What another holder is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum What {
    /// Digests of extents.
    Extents(Vec<u64>),
    /// Digests of an extent's blocks.
    Blocks(u64),
    /// The contents of a block, where another one's is rotten.
    Read {
        /// Which.
        block: u64,
        /// Its stamp.
        stamp: Stamp,
        /// Their digest.
        digest: Digest,
    },
    /// To overwrite its own rotten block.
    Mend {
        /// Which.
        block: u64,
        /// Its stamp.
        stamp: Stamp,
        /// What it is now.
        was: Option<Digest>,
        /// What it should be.
        digest: Digest,
        /// That.
        contents: Vec<u8>,
    },
}

/// What it answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Said {
    /// To [`What::Extents`].
    Extents(Vec<ExtentDigest>),
    /// To [`What::Blocks`].
    Blocks(Vec<BlockDigest>),
    /// To [`What::Read`].
    Contents(Vec<u8>),
    /// To [`What::Mend`].
    Mended,
}

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Failed, error.to_string())
}

/// Another node asks.
pub async fn asked(node: &Arc<Node>, from: &str, ask: ScrubAsk) -> Bytes {
    let answer = match covered(node, from, &ask) {
        Ok(()) => here(node, ask.vm, ask.volume, ask.size, ask.rate, ask.what).await,
        Err(error) => Err(error),
    };
    proto::encode(&answer)
}

fn covered(node: &Node, from: &str, ask: &ScrubAsk) -> Result<(), ApiError> {
    let right = VolumeRight {
        vm: ask.vm,
        volume: ask.volume,
        lineage: ask.lineage,
        generation: ask.generation,
        digest: digest(ask.volume, ask.size),
        capability: &ask.capability,
    };
    crate::covered::volume(node.credentials(), from, &right).map_err(|why| {
        tracing::warn!(peer = from, %why, "a node wants to verify what it was not told to");
        ApiError::new(Problem::Forbidden, format!("{from} may not verify volume {} here: {why}", ask.volume.0))
            .remedy("only `godwit volume verify` allows this; if nobody ordered it, look after that host")
    })?;
    match precache::newest(node, ask.vm, ask.volume).filter(|newest| *newest > (ask.lineage, ask.generation)) {
        None => Ok(()),
        Some(newest) => {
            Err(ApiError::new(Problem::Conflict, format!("volume {} has had a later owner: {newest:?}", ask.volume.0))
                .remedy("wait until the controller has heard of it, and verify again"))
        }
    }
}

/// What is asked of this holder, done.
async fn here(
    node: &Arc<Node>,
    vm: VmId,
    volume: VolumeId,
    size: Amount,
    rate: Amount,
    what: What,
) -> Result<Said, ApiError> {
    let disk = precache::holding(node, vm, volume, size).await?;
    match what {
        What::Extents(extents) if extents.len() <= MOST_EXTENTS => {
            let mut found = vec![];
            for extent in extents {
                node.pace().take(EXTENT * BLOCK, rate).await;
                let blocks = disk.clone().blocking(move |d| d.replica().digest_extent(volume, extent)).await;
                found.push(ExtentDigest::of(&blocks.map_err(failed)?));
            }
            Ok(Said::Extents(found))
        }
        What::Extents(_) => Err(ApiError::new(Problem::Invalid, "too many extents at once")),
        What::Blocks(extent) => {
            node.pace().take(EXTENT * BLOCK, rate).await;
            let blocks = disk.blocking(move |d| d.replica().digest_extent(volume, extent)).await;
            Ok(Said::Blocks(blocks.map_err(failed)?))
        }
        What::Read { block, stamp, digest } => {
            let read = disk.blocking(move |d| d.replica().read_attested(volume, block, stamp, digest)).await;
            Ok(Said::Contents(read.map_err(failed)?))
        }
        What::Mend { block, stamp, was, digest, contents } => {
            let name = disk.name.clone();
            let mended = disk.blocking(move |d| d.mend(&Mend { block, stamp, was, contents: &contents, digest }));
            let changed = mended.await.map_err(failed)?;
            tracing::warn!(volume = name, block, changed, "a rotten block was repaired from another holder");
            Ok(Said::Mended)
        }
    }
}

/// The scrub of a slice, at the holder that leads.
struct Leader<'a> {
    node: &'a Arc<Node>,
    order: &'a VerifyOrder,
    errors: Vec<Option<String>>,
    began: Instant,
}

impl Leader<'_> {
    /// The host of a holder.
    fn host(&self, holder: usize) -> Name {
        match holder.checked_sub(1).and_then(|i| self.order.others.get(i)) {
            Some(other) => other.peer.name.clone(),
            None => self.node.config().name.clone(),
        }
    }

    /// How long another holder may take now.
    fn patience(&self) -> Duration {
        PATIENCE.min(LONGEST.saturating_sub(self.began.elapsed()))
    }

    fn question(&self, holder: usize, what: What) -> Option<(PeerHost, Bytes)> {
        let other = self.order.others.get(holder.checked_sub(1)?)?;
        let VerifyOrder { vm, volume, size, lineage, generation, rate, .. } = *self.order;
        let capability = other.capability.clone();
        let ask = ScrubAsk { vm, volume, size, lineage, generation, capability, rate, what };
        Some((other.peer.clone(), proto::encode(&Request::Scrub(Box::new(ask)))))
    }

    /// Asks one holder, this host included.
    async fn ask(&self, holder: usize, what: What) -> Result<Said, ApiError> {
        let VerifyOrder { vm, volume, size, rate, .. } = *self.order;
        match self.question(holder, what.clone()) {
            Some((peer, question)) => other(self.node, &peer, question, self.patience()).await,
            None => here(self.node, vm, volume, size, rate, what).await,
        }
    }

    /// Asks all of them at once what the machine wants to know, tells it, and writes down about what all agreed.
    async fn step(&mut self, mut machine: Scrub, ask: Ask, record: &Arc<Attested>) -> Result<Scrub, ApiError> {
        let VerifyOrder { vm, volume, size, rate, .. } = *self.order;
        let what = match &ask {
            Ask::Extents(extents) => What::Extents(extents.clone()),
            Ask::Blocks(extent) => What::Blocks(*extent),
        };
        let (mut asking, patience) = (JoinSet::new(), self.patience());
        for holder in (1..=self.order.others.len()).filter(|h| !machine.is_out(*h)) {
            let Some((peer, question)) = self.question(holder, what.clone()) else { continue };
            let node = self.node.clone();
            asking.spawn(async move { (holder, other(&node, &peer, question, patience).await) });
        }
        let ours = match &ask {
            Ask::Blocks(_) => match here(self.node, vm, volume, size, rate, what).await? {
                Said::Blocks(blocks) => Answer::Blocks(blocks),
                _ => Answer::Failed,
            },
            Ask::Extents(extents) => {
                let disk = precache::holding(self.node, vm, volume, size).await?;
                let mut all = vec![];
                for extent in extents.iter().copied() {
                    self.node.pace().take(EXTENT * BLOCK, rate).await;
                    let looked = disk.clone().blocking(move |d| d.replica().look_at(volume, extent)).await;
                    all.push(looked.map_err(failed)?);
                }
                Answer::Here(all)
            }
        };
        let mut answers = vec![(0, ours)];
        while let Some(Ok((holder, said))) = asking.join_next().await {
            let answer = match said {
                Ok(Said::Extents(extents)) => Answer::Extents(extents),
                Ok(Said::Blocks(blocks)) => Answer::Blocks(blocks),
                Ok(_) => Answer::Failed,
                Err(error) => {
                    self.errors[holder] = Some(error.to_string());
                    Answer::Failed
                }
            };
            answers.push((holder, answer));
        }
        // The record lies on a disk.
        let record = record.clone();
        let heard = tokio::task::spawn_blocking(move || {
            for (holder, answer) in answers {
                machine.answered(holder, answer, &|block, stamp| record.get(block, stamp));
            }
            record.put(&machine.agreed())?;
            Ok::<Scrub, VolumeError>(machine)
        });
        let machine = heard.await.map_err(failed)?.map_err(failed)?;
        for holder in (1..=self.order.others.len()).filter(|h| machine.is_out(*h)) {
            self.errors[holder].get_or_insert_with(|| "it answers what makes no sense".into());
        }
        Ok(machine)
    }

    /// Repairs what can be, and says how it was found.
    async fn look_after(&self, finding: &Finding, believed: Option<usize>) -> Rot {
        let copies = finding.copies.iter().enumerate();
        let copies = copies.map(|(holder, held)| HeldCopy { host: self.host(holder), state: state(*held) }).collect();
        let told_by = match finding.settled {
            Settled::Record => ToldBy::Record,
            Settled::Readable => ToldBy::Readable,
            Settled::Majority => ToldBy::Majority,
            Settled::Nothing => ToldBy::Nothing,
        };
        let mut rot = Rot { block: finding.block, blocks: 1, copies, told_by, repaired: false, error: None };
        tracing::error!(volume = self.order.volume.0, block = finding.block, ?rot.copies, ?told_by, "bit rot");
        if self.order.repair && self.began.elapsed() >= LONGEST {
            rot.error = Some("there was no time left for it; verify again".into());
        } else if self.order.repair {
            match self.repair(finding, believed).await {
                Ok(()) => rot.repaired = true,
                Err(error) => rot.error = Some(error.to_string()),
            }
        }
        rot
    }

    async fn repair(&self, finding: &Finding, believed: Option<usize>) -> Result<(), ApiError> {
        let Some(repair) = finding.repair(believed) else {
            return Err(match &self.order.believe {
                Some(host) => ApiError::new(
                    Problem::Conflict,
                    format!("nobody can tell which replica is right, and that at `{host}`, which is to be believed, was not compared"),
                )
                .remedy("verify again when it answers, and without `--site` or with its own"),
                None => ApiError::new(Problem::Conflict, "nobody can tell which replica is right")
                    .remedy("name the one to be believed: `--from SITE`"),
            });
        };
        let (block, stamp, digest) = (finding.block, finding.stamp, repair.digest);
        let Said::Contents(contents) = self.ask(repair.giver, What::Read { block, stamp, digest }).await? else {
            return Err(failed("what was asked for a block answers something else"));
        };
        for (taker, was) in repair.takers {
            let mend = What::Mend { block, stamp, was, digest, contents: contents.clone() };
            self.ask(taker, mend).await.map_err(|e| failed(format!("{}: {e}", self.host(taker))))?;
        }
        Ok(())
    }
}

async fn other(node: &Arc<Node>, peer: &PeerHost, question: Bytes, patience: Duration) -> Result<Said, ApiError> {
    let answer = node.peers().request(peer, question, patience).await?;
    proto::decode::<Result<Said, ApiError>>(&answer)
        .unwrap_or_else(|_| Err(failed(format!("{} answers what we do not know", peer.name))))
}

const fn state(held: Held) -> CopyState {
    match held {
        Held::Right(_) => CopyState::Right,
        Held::Rotten(_) => CopyState::Rotten,
        Held::Unreadable => CopyState::Unreadable,
        Held::Differs(_) => CopyState::Differs,
        Held::Other => CopyState::Other,
    }
}

/// Puts a block's finding to those before it, where it goes on.
fn join(found: &mut Vec<Rot>, next: Rot) {
    match found.last_mut() {
        Some(last)
            if last.block + last.blocks == next.block
                && (&last.copies, last.told_by, last.repaired, &last.error)
                    == (&next.copies, next.told_by, next.repaired, &next.error) =>
        {
            last.blocks += 1;
        }
        _ => found.push(next),
    }
}

/// Verifies a slice of a volume that is held here.
///
/// # Errors
/// When it is not held here, is being moved, or cannot be read at all.
pub async fn verify(node: &Arc<Node>, order: &VerifyOrder) -> Result<Verified, ApiError> {
    let began = Instant::now();
    node.quarantine().check(order.vm)?;
    if order.others.len() >= MOST_HOLDERS {
        return Err(ApiError::new(Problem::Invalid, format!("{MOST_HOLDERS} replicas can be compared at once")));
    }
    let disk = precache::holding(node, order.vm, order.volume, order.size).await?;
    let moving = || -> Result<(), ApiError> {
        let Some(parts) = node.vm(order.vm) else { return Ok(()) };
        let moving = parts.moving().is_some_and(|m| !m.tracker.ended() && !m.over.is_cancelled());
        if moving || !matches!(parts.view().ownership, Ownership::Here | Ownership::Elsewhere) {
            return Err(ApiError::new(Problem::Conflict, format!("`{}` is being moved", parts.name))
                .remedy("verify its volumes when the move has ended"));
        }
        Ok(())
    };
    moving()?;
    let (volume, from) = (order.volume, order.from);
    let extents = disk.clone().blocking(move |d| d.replica().written_extents(from, MOST)).await.map_err(failed)?;
    let record = disk.clone().blocking(move |d| Attested::open(d.replica().folder(), volume)).await;
    let record = Arc::new(record.map_err(failed)?);
    let holders = 1 + order.others.len();
    let mut leader = Leader { node, order, errors: vec![None; holders], began };
    let believed = (0..holders).find(|h| order.believe.as_ref() == Some(&leader.host(*h)));
    let (first, at_once) = (extents.first().copied().unwrap_or(from), at_once(order.rate));
    let (mut done, mut verified) = (0, Verified::default());
    // The first batch whatever it takes.
    while done < extents.len() && (done == 0 || began.elapsed() < SLICE) && verified.findings.len() < MOST_FINDINGS {
        let batch = &extents[done..extents.len().min(done + at_once)];
        let mut machine = Scrub::new(batch.to_vec(), holders);
        for out in (1..holders).filter(|h| leader.errors[*h].is_some()) {
            // It has failed in this slice once: not asked again, or each batch would wait for it.
            machine.leave_out(out);
        }
        let mut left = None;
        while left.is_none()
            && let Some(ask) = machine.poll()
        {
            moving()?;
            machine = leader.step(machine, ask, &record).await?;
            // All of one extent, which is the next slice's where there is no time to repair it now.
            let found = machine.findings();
            let rotten = found.first().filter(|_| order.repair).map(|finding| finding.block / EXTENT);
            left = cut(first, rotten, began.elapsed());
            if left.is_none() {
                for finding in found {
                    join(&mut verified.findings, leader.look_after(&finding, believed).await);
                }
                left = cut(first, machine.first_left(), began.elapsed());
            }
        }
        let totals = left.map_or_else(|| machine.totals(), |left| machine.totals_before(left));
        verified.alike.0 += totals.alike * BLOCK;
        verified.behind.0 += totals.behind * BLOCK;
        verified.unsettled.0 += totals.unsettled * BLOCK;
        done = left.map_or(done + batch.len(), |left| extents.partition_point(|extent| *extent < left));
    }
    verified.next = match extents.get(done) {
        Some(next) => Some(*next),
        // There may be more than were asked for.
        None if extents.len() == MOST => extents.last().map(|last| last + 1),
        None => None,
    };
    verified.holders = (0..holders)
        .map(|holder| VerifiedHolder { host: leader.host(holder), error: leader.errors[holder].clone() })
        .collect();
    Ok(verified)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_answered_in_half_a_second_whatever_the_rate() {
        for (rate, extents) in [(0, 1), (LEAST_RATE.0, 1), (8 << 20, 4), (32 << 20, 16), (u64::MAX, MOST_EXTENTS)] {
            assert_eq!(at_once(Amount(rate)), extents, "{rate}");
        }
    }

    #[test]
    fn a_slice_ends_before_an_extent_when_its_time_is_over_and_never_before_it_has_done_one() {
        let (early, late) = (SLICE / 2, SLICE);
        assert_eq!(cut(7, Some(9), early), None);
        assert_eq!(cut(7, Some(9), late), Some(9));
        assert_eq!((cut(7, Some(7), late), cut(7, None, late)), (None, None));
    }
}
