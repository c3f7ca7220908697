//! The rules that can be taken away, one at a time, so that the simulator can show what each of them prevents.

/// One rule of a replica. Its comment says what is done when it holds.
#[cfg_attr(not(feature = "sabotage"), allow(dead_code))] // only the simulator lists them
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Guard {
    /// A region is durably marked hot before its first write.
    HotBeforeWrite,
    /// Data is durable before its stamps are, and both before the region is cold.
    DataBeforeStamps,
    /// A primary restamps what was hot when its process or its power ended.
    DoubtedRestamped,
    /// A secondary forgets what was hot then.
    DoubtedForgotten,
    /// A stamp that a mirror may have passed on for other contents is not compared by the next one.
    ComparedWhenSure,
    /// A primary that claims a volume gives all of it new stamps.
    ClaimRestamps,
    /// What a secondary holds for good cannot become doubtful again: the marks' removal is durable, too.
    VouchedSyncsMarks,
    /// A frozen replica refuses the guest's writes.
    FrozenRefuses,
    /// What a shadow volume has to fetch is durable before its replica says that it knows all of it.
    WantsBeforeComplete,
    /// What was wanted by an attempt that came to nothing is forgotten before the next one says what it wants.
    WantsBeginAfresh,
    /// A block that came or was written counts as here for good only when its contents are durable.
    DataBeforePresent,
    /// After a loss of power a block that was not here for good is absent again.
    DoubtedAbsent,
    /// That a block is here is written down before the guest's write is answered: the process may die.
    PresentBeforeAnswer,
    /// A flush makes durable what blocks are here, too.
    FlushKeepsPresent,
    /// What comes late does not overwrite what the guest has written.
    ArrivalsYield,
    /// What is absent is not read.
    AbsentNotRead,
    /// A block that is absent is not written in part.
    EdgesFirst,
    /// A source that is to be fetched from has everything on its disk first: what a crash makes it doubt, it could not serve.
    SettledBeforeFinal,
    /// A holder is told that it is not needed when what it held is durable here, not when it has come.
    DurableBeforeRelease,
    /// What has come here while the next site is told where things are is told again: its old holder may let go of it.
    ArrivalsToldAgain,
    /// Words that are found when a replica is opened are made durable before they are believed.
    FoundWordsSynced,
}

#[cfg_attr(not(feature = "sabotage"), allow(dead_code))]
impl Guard {
    /// Those of every replica.
    pub const ALL: [Self; 8] = [
        Self::HotBeforeWrite,
        Self::DataBeforeStamps,
        Self::DoubtedRestamped,
        Self::DoubtedForgotten,
        Self::ComparedWhenSure,
        Self::ClaimRestamps,
        Self::VouchedSyncsMarks,
        Self::FrozenRefuses,
    ];
    /// Those of a shadow volume and of the sites that it fetches from.
    pub const SHADOW: [Self; 13] = [
        Self::WantsBeforeComplete,
        Self::WantsBeginAfresh,
        Self::DataBeforePresent,
        Self::DoubtedAbsent,
        Self::PresentBeforeAnswer,
        Self::FlushKeepsPresent,
        Self::ArrivalsYield,
        Self::AbsentNotRead,
        Self::EdgesFirst,
        Self::SettledBeforeFinal,
        Self::DurableBeforeRelease,
        Self::ArrivalsToldAgain,
        Self::FoundWordsSynced,
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
