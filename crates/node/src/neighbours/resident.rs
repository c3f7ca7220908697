//! Memory of guests of the trust domain that run at the destination, wherever they came from: the destination tells the source what
//! lies where in it ([`godwit_memory::hints`]), and the source names it as it names what it has brought there itself.
//!
//! ```text
//!   source: the disks begin to go ------ Neighbours --------> destination: looks at those guests' RAM
//!           memory is about to go ------ a byte ------------> looks again: what is as it was is told
//!           finds a page by its hash <-- hints --------------
//! ```
//!
//! Two looks, because what a guest wrote between them it will write again, and a page that is another when it is named costs a round trip. The
//! first one may be as long ago as the disks take; the second is made as late as it can be.
//!
//! # Who is told what
//!
//! Who asks is the source of a move that is under way to this host, and what it asks about is the VM of that move, whose place it was given for a
//! definition that the controller has signed ([`crate::covered`]). The trust domain stands in there, and is compared with what this host knows of
//! its other VMs: there is no word in the question for it. A VM of no domain is told of nobody.
//!
//! To be weighed: whoever has a guest of the domain and moves it here could name pages on suspicion already, and pays for each try. Told this, that
//! host learns how many guests of the domain run there, up to eight, where in their RAM what lies, and 40 bits of each page: it can try off-line
//! what a page holds that it knows but for a few bytes. It is told no names.
//!
//! # What it costs, and what it brings
//!
//! Five bytes for each page that is not zero, [`MOST_PAGES`] and [`FOR_EACH`] for each page of the guest at most: half a hundredth of
//! the guest's memory, against the stream, where a move has next to nothing to send, and behind whatever another move sends there. It pays where one
//! page in some hundred is found. The destination reads that memory twice, at a gigabyte a second or more, on a thread of the lowest priority and
//! for [`AT_ONCE`](super::AT_ONCE) moves at a time; the source looks for a page by another fast hash, which is less than zstd takes to find that it
//! has seen it.
//!
//! Nothing waits for any of it. Hints are used as they come; what went before they came went without. So on a link on which memory is
//! through before the second look is made they bring nothing, and end with the memory: that is when they are not needed either. Of a guest that the
//! source has brought there itself it may be told what it knows.
//!
//! # What can go wrong
//!
//! *The destination is of an earlier version*: it hangs up on a question that it does not know, as on one that it does not want to answer, and
//! memory goes without. *A guest there ends, or leaves*: its memory is let go of within [`GONE`], or when the first look at it has ended; what was
//! told of it costs round trips. *The memory of the move has come before the answer*: then nobody's is taken hold of any more. *A destination tells
//! wrong things*: they are bounded, and cost round trips, until nothing is named any more. *A source does not listen*: it has one question for each
//! attempt, and [`LONGEST`] to take the answer.

use super::{MOST, are_neighbours};
use crate::aside::Aside;
use crate::node::Node;
use crate::parts::{Moving, Parts, lock};
use crate::proto::{self, Hello};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use godwit_api::host::Ownership;
use godwit_api::progress::NoteKind;
use godwit_link::{Lane, Priority, Session, Stream};
use godwit_memory::{Hints, Looked, NEIGHBOURS, PAGE_SIZE};
use godwit_units::Bytes as Amount;
use godwit_vmm::Qemu;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

/// The first spot's disk that stands for a guest that the destination has told of: those before it the source names itself.
pub(super) const FIRST: u8 = NEIGHBOURS + MOST as u8;
/// Pages that are looked at for one move, at most: 4 GiB of RAM, five megabytes of hints, 35 of memory at the source and as many here.
const MOST_PAGES: u64 = 1 << 20;
/// And so many for each page of the guest that moves: a small one is not worth more.
const FOR_EACH: u64 = 4;
/// Guests come first: of priorities it has the least. What it locks it locks for moments only: what QEMU runs, and whose memory is shown.
const NICE: i32 = 19;
/// Two looks at a page lie so far apart, at least.
const QUIET: Duration = Duration::from_secs(1);
/// How long a second look, and telling what it finds, may take: 2 Mbit/s carry the most that there is to tell. What was told by then is used, and
/// another move has the turn.
const LONGEST: Duration = Duration::from_secs(30);
/// Between two looks whether guests are gone whose memory is held.
const GONE: Duration = Duration::from_secs(1);
/// Pieces of 64 KiB that may wait for the link.
const PIECES: usize = 4;

/// What the destination has told so far.
pub(crate) type Told = Arc<Mutex<Hints>>;

/// Pages that are worth hearing of for a guest with so much memory.
fn worth(memory: Amount) -> u64 {
    (memory.0 / PAGE_SIZE as u64).saturating_mul(FOR_EACH).min(MOST_PAGES)
}

/// Source: a destination that was asked.
pub(crate) struct Asked {
    told: Told,
    begins: CancellationToken,
}

impl Asked {
    /// Memory is about to go.
    pub(crate) fn begin(self) -> Told {
        self.begins.cancel();
        self.told
    }
}

/// Source: asks the destination, beside whatever else the move does. Nobody is asked for a VM of no trust domain.
pub(crate) fn ask(parts: &Arc<Parts>, moving: &Arc<Moving>, session: &Session) -> Option<Asked> {
    let definition = parts.definition();
    definition.domain.as_ref()?;
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).expect("the kernel gives random bytes once it has booted");
    let (seed, most) = (u64::from_le_bytes(seed), worth(definition.spec.memory));
    let hello = Hello::Neighbours { ticket: moving.ticket, seed, most };
    let told = Arc::new(Mutex::new(Hints::new(seed, FIRST, MOST as u8, most)));
    let asked = Asked { told: told.clone(), begins: CancellationToken::new() };
    let (begins, session) = (asked.begins.clone(), session.clone());
    let (parts, moving) = (parts.clone(), moving.clone());
    crate::trace::spawn(async move {
        let result = tokio::select! {
            result = listen(&session, &hello, &begins, &told) => result,
            () = moving.over.cancelled() => return,
            () = moving.ram_ended.cancelled() => return,
        };
        if let Err(error) = result {
            let error = format!("{error:#}");
            tracing::debug!(vm = parts.name, error, "the destination does not tell what its guests have in memory");
        }
        let pages = lock(&told).pages();
        if pages > 0 {
            let memory = Amount(pages * PAGE_SIZE as u64);
            let text = format!("the destination tells of {memory} that guests of the trust domain have there");
            moving.note(NoteKind::Decision, text);
        }
    });
    Some(asked)
}

/// Until the destination has told everything. Dropped before that, it hangs up, and the destination stops.
async fn listen(session: &Session, hello: &Hello, begins: &CancellationToken, told: &Told) -> Result<()> {
    // As what fills a link that is idle: pages may go that way, too, and somebody waits for those.
    let stream = session.open_stream(Lane::Memory, Priority::Background, proto::encode(hello)).await?;
    let (mut out, mut from) = stream.split();
    // A byte and acknowledgements, which this move's own pages must not hold up.
    out.set_priority(Priority::Interactive);
    begins.cancelled().await;
    out.write(Bytes::from_static(b"!")).await?;
    while let Some(piece) = from.read().await? {
        lock(told).take(&piece)?;
    }
    out.finish()?;
    Ok(())
}

/// Destination: the RAM of other guests for a move, by their places: of those that the source names, or of those that it was told of.
#[derive(Debug)]
pub(crate) struct Shown {
    asked: AtomicBool,
    /// None: nobody needs any more.
    guests: Mutex<Option<Vec<Option<Arc<File>>>>>,
}

/// Of nobody yet.
impl Default for Shown {
    fn default() -> Self {
        Self::of(vec![])
    }
}

impl Shown {
    pub(super) fn of(guests: Vec<Option<Arc<File>>>) -> Self {
        Self { asked: AtomicBool::new(false), guests: Mutex::new(Some(guests)) }
    }

    /// Copies pages of a guest out, from this one on; whether they are there.
    pub(super) fn read(&self, guest: usize, first: u32, into: &mut [u8]) -> bool {
        let at = u64::from(first) * PAGE_SIZE as u64;
        self.ram(guest).is_some_and(|ram| ram.read_exact_at(into, at).is_ok())
    }

    fn ram(&self, guest: usize) -> Option<Arc<File>> {
        lock(&self.guests).as_ref()?.get(guest)?.clone()
    }

    /// Whether it is shown: not once it was forgotten.
    fn show(&self, guests: Vec<Option<Arc<File>>>) -> bool {
        let mut shown = lock(&self.guests);
        let Some(shown) = shown.as_mut() else { return false };
        *shown = guests;
        true
    }

    /// Lets go of the guests that are not here any more; whether others may come.
    fn keep(&self, is_here: impl Fn(usize) -> bool) -> bool {
        let mut shown = lock(&self.guests);
        let Some(shown) = shown.as_mut() else { return false };
        for (place, ram) in shown.iter_mut().enumerate() {
            if !is_here(place) {
                *ram = None;
            }
        }
        true
    }

    /// The memory is here: nobody holds on to that of others any more.
    pub(crate) fn forget(&self) {
        *lock(&self.guests) = None;
    }
}

/// Lets go of guests that end or leave, whose memory would stay until that of the move has come; until nobody needs any.
pub(super) async fn let_go(shown: Weak<Shown>, is_here: impl Fn(usize) -> bool) {
    loop {
        tokio::time::sleep(GONE).await;
        if !shown.upgrade().is_some_and(|shown| shown.keep(&is_here)) {
            return;
        }
    }
}

/// A guest of this host's in the QEMU that it has: in another one it has another memory.
#[derive(Clone)]
pub(super) struct Guest {
    parts: Arc<Parts>,
    qemu: Weak<Qemu>,
}

impl Guest {
    /// None: it has no QEMU.
    pub(super) fn of(parts: Arc<Parts>) -> Option<Self> {
        let qemu = Arc::downgrade(&parts.qemu()?);
        Some(Self { parts, qemu })
    }

    fn qemu(&self) -> Option<Arc<Qemu>> {
        self.parts.qemu().filter(|qemu| std::ptr::eq(Arc::as_ptr(qemu), self.qemu.as_ptr()))
    }

    pub(super) fn is_here(&self) -> bool {
        self.qemu().is_some()
    }

    /// Its RAM, if it is here.
    pub(super) fn ram(&self) -> Option<Arc<File>> {
        self.qemu()?.ram(self.parts.definition().spec.memory).ok().map(Arc::new)
    }
}

/// What a source asks: see [`Hello::Neighbours`].
pub(crate) struct Question {
    pub(crate) seed: u64,
    pub(crate) most: u64,
}

/// Destination: tells, beside whatever else it does.
pub(crate) fn tell(node: &Node, parts: &Arc<Parts>, moving: Arc<Moving>, question: Question, stream: Stream) {
    let _in = crate::trace::span(parts).entered();
    if moving.over.is_cancelled() || moving.memory_loaded.load(Ordering::Acquire) {
        return;
    }
    if moving.shown.asked.swap(true, Ordering::Relaxed) {
        tracing::warn!(vm = parts.name, "its source asks a second time what others have in memory");
        return;
    }
    let guests = beside(node, parts);
    let (parts, turns) = (parts.clone(), node.neighbours().telling.clone());
    crate::trace::spawn(async move {
        let telling = async {
            match answer(&moving.shown, &guests, &question, &turns, stream).await {
                Ok(pages) => tracing::debug!(vm = parts.name, pages, "its source was told what others have in memory"),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::debug!(vm = parts.name, error, "its source is not told what others have in memory");
                }
            }
        };
        let is_here = |place: usize| guests.get(place).is_some_and(Guest::is_here);
        let letting_go = let_go(Arc::downgrade(&moving.shown), is_here);
        tokio::select! {
            _ = async { tokio::join!(telling, letting_go) } => {}
            () = moving.over.cancelled() => {}
        }
        moving.shown.forget();
    });
}

/// The guests that a VM's source is told of.
fn beside(node: &Node, parts: &Parts) -> Vec<Guest> {
    let own = parts.definition();
    let mut all = node.vms();
    all.retain(|other| are_neighbours(&own, &other.definition()) && stays(other));
    all.into_iter().filter_map(Guest::of).take(MOST).collect()
}

/// Whether a guest is not just coming or going: nobody else writes its memory.
fn stays(other: &Parts) -> bool {
    other.view().ownership == Ownership::Here
}

/// The RAM of one that a source is told of.
fn ram(guest: &Guest) -> Option<Arc<File>> {
    guest.ram().filter(|_| stays(&guest.parts))
}

/// Looks, waits until memory is about to go, looks again, and tells; how many pages.
async fn answer(
    shown: &Arc<Shown>,
    beside: &[Guest],
    question: &Question,
    turns: &Arc<Semaphore>,
    stream: Stream,
) -> Result<u64> {
    let (mut send, mut from) = stream.split();
    if beside.is_empty() {
        send.finish()?;
        return Ok(0);
    }
    let begins = CancellationToken::new();
    let hearing = async {
        while let Ok(Some(_)) = from.read().await {
            begins.cancel();
        }
    };
    let telling = async {
        let ends = CancellationToken::new();
        let _ends = ends.clone().drop_guard();
        let goes_on = move || !ends.is_cancelled();
        let (seed, most) = (question.seed, question.most.min(MOST_PAGES));
        let turn = turns.clone().acquire_owned().await?;
        let (began, guests, still) = (Instant::now(), beside.to_vec(), goes_on.clone());
        let aside = Aside::new("neighbours", NICE)?;
        let looked = aside.run(move || {
            let _turn = turn;
            Looked::look(seed, guests.iter().map(ram), most, &still)
        });
        let looked = looked.await?;
        begins.cancelled().await;
        tokio::time::sleep_until((began + QUIET).into()).await;
        let turn = turns.clone().acquire_owned().await?;
        let (guests, shown) = (beside.to_vec(), shown.clone());
        let (sender, mut pieces) = mpsc::channel::<Vec<u8>>(PIECES);
        let looking = aside.run(move || {
            let _turn = turn;
            anyhow::ensure!(shown.show(guests.iter().map(ram).collect()), "the memory has come without");
            let ram = |place: u8| shown.ram(usize::from(place));
            // Whoever does not take it any more has ended the look as well.
            anyhow::Ok(looked.tell(&ram, &goes_on, |piece| drop(sender.blocking_send(piece))))
        });
        let sending = async {
            while let Some(piece) = pieces.recv().await {
                send.write(piece.into()).await?;
            }
            anyhow::Ok(())
        };
        let both = tokio::time::timeout(LONGEST, async { tokio::try_join!(looking, sending) });
        let (told, ()) = both.await.context("it takes too long")??;
        let told = told?;
        send.finish()?;
        anyhow::Ok(told)
    };
    tokio::select! {
        told = telling => told,
        () = hearing => bail!("it does not listen any more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_index::Replicas;
    use crate::neighbours::Here;
    use godwit_memory::{Blocks, Spot};

    /// RAM whose second page is of fours.
    fn some() -> Option<Arc<File>> {
        let ram = tempfile::tempfile().expect("a file");
        ram.write_all_at(&[4; PAGE_SIZE], PAGE_SIZE as u64).expect("writes");
        Some(Arc::new(ram))
    }

    #[test]
    fn the_memory_of_a_guest_that_a_source_was_told_of_is_read_until_its_own_has_come() {
        let shown = Arc::new(Shown::default());
        let here = Here::new(Replicas::new(vec![]), Arc::default(), shown.clone());
        let read = |disk, block| {
            let mut content = [0; PAGE_SIZE];
            here.read(Spot { disk, block }, &mut content) && content == [4; PAGE_SIZE]
        };
        assert!(!read(FIRST + 1, 1), "nobody was told of anything");
        assert!(shown.show(vec![None, some()]));
        assert!(read(FIRST + 1, 1));
        for (disk, block) in [(FIRST + 1, 2), (FIRST, 1), (FIRST + 2, 1), (u8::MAX, 1), (NEIGHBOURS + 1, 1), (1, 1)] {
            assert!(!read(disk, block));
        }
        shown.forget();
        assert!(!read(FIRST + 1, 1));
        // Who looks twice for longer than the memory takes shows nothing any more.
        assert!(!shown.show(vec![None, some()]));
        assert!(!read(FIRST + 1, 1) && !shown.keep(|_| true));
    }

    #[test]
    fn the_memory_of_a_guest_that_is_gone_is_let_go_of_and_that_of_the_others_is_not() {
        let [gone, stays] = [some(), some()];
        let held = [&gone, &stays].map(|ram| ram.as_ref().map(Arc::downgrade));
        let shown = Shown::of(vec![gone, stays]);
        assert!(shown.keep(|place| place == 1), "others may come");
        assert_eq!(held.map(|ram| ram.is_some_and(|ram| ram.strong_count() > 0)), [false, true]);
        let mut content = [0; PAGE_SIZE];
        assert!(!shown.read(0, 1, &mut content) && shown.read(1, 1, &mut content));
    }

    #[tokio::test]
    async fn nobody_looks_for_guests_that_are_gone_once_nobody_needs_their_memory() {
        let shown = Arc::new(Shown::of(vec![some()]));
        let looking = let_go(Arc::downgrade(&shown), |_| true);
        let forgetting = async {
            tokio::time::sleep(GONE / 2).await;
            shown.forget();
        };
        tokio::join!(looking, forgetting, let_go(Weak::new(), |_| true));
    }

    #[test]
    fn a_small_guest_is_worth_few_hints_and_a_large_one_no_more_than_there_may_be() {
        assert_eq!(worth(Amount::mib(1)), 4 * 256);
        assert_eq!(worth(Amount(u64::MAX)), MOST_PAGES);
    }
}
