//! The rules that can be taken away, one at a time, so that the simulator can show what each of them prevents.

/// One rule of the protocol. Its comment says what is done when it holds; the simulator's tests say what happens when
/// it does not.
#[cfg_attr(not(feature = "sabotage"), allow(dead_code))] // only the simulator lists them, or uses some
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Guard {
    /// The seal waits until the source's QEMU is in `postmigrate`, from which it cannot resume by itself.
    SealAfterPostmigrate,
    /// The seal waits until the destination has said that everything arrived and was verified.
    SealAfterVerified,
    /// The seal waits until the source's export refuses writes and its endpoints are isolated.
    SealAfterClosed,
    /// A stopped guest whose seal does not come resumes at the source after a bounded wait.
    StoppedGivesUp,
    /// COMMIT waits until SEALED is durable.
    CommitAfterSealed,
    /// COMMIT is repeated for ever.
    CommitRepeats,
    /// A cancel that comes after the seal asks the destination (RECALL) and does not simply resume.
    CancelAfterSealAsks,
    /// A source that is rebuilt from SEALED stays sealed.
    SealedSurvivesRestart,
    /// A source that is rebuilt before the seal issues `cont`.
    RestartUndoes,
    /// A source that takes its VM back writes its new ownership before it runs.
    OwnedBeforeRun,
    /// A ticket is used up durably before anything is sent under it.
    TicketBurned,
    /// A destination stages only tickets greater than any it has seen.
    StageOnlyNewer,
    /// Messages of another lineage are not taken for this one's.
    CheckLineage,
    /// Messages of another generation are not taken for this one's.
    CheckGeneration,
    /// Messages of another move are not taken for this one's.
    CheckMove,
    /// The source's QEMU is kept until STARTED; GRANTED is not enough.
    KeepUntilStarted,
    /// STARTED is acknowledged only when RELEASED is durable.
    AckAfterReleased,
    /// STARTED is repeated until it is acknowledged.
    StartedRepeats,
    /// Only a destination that holds the whole VM grants.
    GrantOnlyLoaded,
    /// The destination opens nothing before GRANTED is durable.
    OpenAfterGranted,
    /// `cont` waits until STARTED is durable.
    ContAfterStarted,
    /// REFUSED is durable before it is answered to a RECALL.
    RefusedBeforeAnswer,
    /// An undo at the destination writes REFUSED before anything else.
    UndoWritesRefused,
    /// A destination that refused goes on refusing.
    RefusedStays,
    /// A destination closes its export and isolates its endpoints before it writes RETURNED.
    CloseBeforeReturn,
    /// After STARTED nothing is returned.
    NoReturnAfterStarted,
    /// A destination still staged asks the source now and then whether it means it.
    StagedAsks,
    /// A claim that cannot exclude that the other side ran boots from the volumes and drops the RAM.
    ClaimDropsStaleRam,
    /// That RAM is stale stands in the record, not only in the memory of the node that decided it.
    StaleRamRecorded,
    /// The fence around a node that lost to a claim is lifted only after its record was overwritten.
    FenceOverwrites,
    /// A claim is somebody's word about what keeps the other side from running the VM.
    ClaimNeedsStatement,
    /// A node that hears the other side does not take its VM, whatever is said about it.
    ClaimNeedsSilence,
    /// A claim that does not know of the newest lineage is not obeyed: it may be one that was obeyed before.
    ClaimKnowsNewest,
    /// Who owns a VM in a newer lineage says so to whoever still speaks of an older one.
    OlderLineageIsTold,
    /// A destination that is prepared refuses nothing by itself, nor because it is asked whether it has taken the VM.
    PreparedKeeps,
    /// STARTED is told, and the source lets go, only when every page of memory is here.
    StartedAfterDrained,
    /// Memory is given up only where a part of it is known to be lost.
    AbandonOnlyLost,
}

#[cfg_attr(not(feature = "sabotage"), allow(dead_code))]
impl Guard {
    /// All of them.
    pub const ALL: [Self; 37] = [
        Self::SealAfterPostmigrate,
        Self::SealAfterVerified,
        Self::SealAfterClosed,
        Self::StoppedGivesUp,
        Self::CommitAfterSealed,
        Self::CommitRepeats,
        Self::CancelAfterSealAsks,
        Self::SealedSurvivesRestart,
        Self::RestartUndoes,
        Self::OwnedBeforeRun,
        Self::TicketBurned,
        Self::StageOnlyNewer,
        Self::CheckLineage,
        Self::CheckGeneration,
        Self::CheckMove,
        Self::KeepUntilStarted,
        Self::AckAfterReleased,
        Self::StartedRepeats,
        Self::GrantOnlyLoaded,
        Self::OpenAfterGranted,
        Self::ContAfterStarted,
        Self::RefusedBeforeAnswer,
        Self::UndoWritesRefused,
        Self::RefusedStays,
        Self::CloseBeforeReturn,
        Self::NoReturnAfterStarted,
        Self::StagedAsks,
        Self::ClaimDropsStaleRam,
        Self::StaleRamRecorded,
        Self::FenceOverwrites,
        Self::ClaimNeedsStatement,
        Self::ClaimNeedsSilence,
        Self::ClaimKnowsNewest,
        Self::OlderLineageIsTold,
        Self::PreparedKeeps,
        Self::StartedAfterDrained,
        Self::AbandonOnlyLost,
    ];
}

/// The guards in force. All of them, but in the simulator's mutation tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guards {
    removed: Option<Guard>,
}

impl Guards {
    /// Every guard holds.
    pub const ALL: Self = Self { removed: None };

    /// Every guard but one.
    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    #[must_use]
    pub const fn without(guard: Guard) -> Self {
        Self { removed: Some(guard) }
    }

    /// Whether `guard` is in force.
    #[must_use]
    pub fn hold(self, guard: Guard) -> bool {
        self.removed != Some(guard)
    }
}
