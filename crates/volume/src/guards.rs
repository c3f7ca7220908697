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
}

#[cfg_attr(not(feature = "sabotage"), allow(dead_code))]
impl Guard {
    /// All of them.
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
