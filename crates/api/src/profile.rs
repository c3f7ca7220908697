//! Profiles: what a VM's guest does to its memory, watched for a while without moving it.
//!
//! | request | answer |
//! |---|---|
//! | the controller's `POST /v1/vms/{vm}/profiles`, the node's `POST /v1/vms/{id}/profiles` | [`StartProfile`] -> [`Profile`] |
//! | `GET` of the same | [`Profile`]s, the oldest first: of the controller, those of each host that the VM has been on |
//! | `GET .../profiles/{start}` | [`ProfileLog`] |
//! | the node's `GET /v1/activity` | [`Activity`](crate::evacuation::Activity): for each VM the one nearest to a time of day |

use crate::Name;
use godwit_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Watch a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartProfile {
    /// For so long, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub for_s: u32,
    /// Look so often, in milliseconds; less often where looking would take too much of a processor.
    #[serde(default = "second")]
    #[schemars(range(min = 50, max = 60_000))]
    pub interval_ms: u32,
}

/// The longest that a profile takes.
pub const LONGEST_S: u32 = 86_400;
/// The shortest and longest interval.
pub const INTERVAL_MS: std::ops::RangeInclusive<u32> = 50..=60_000;

const fn second() -> u32 {
    1000
}

/// How a profile stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProfileState {
    /// Its guest is being watched.
    Watching,
    /// It was watched for as long as was wanted.
    Done,
    /// It ended before its time; what was seen until then is good.
    Ended,
}

/// What a guest was seen to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// The host that watched.
    pub host: Name,
    /// When it began, milliseconds since 1970: its name.
    pub start_unix_ms: u64,
    /// How long is wanted, in seconds.
    pub for_s: u32,
    /// The interval between two looks, in milliseconds, as it was kept.
    pub interval_ms: u32,
    /// How it stands.
    pub state: ProfileState,
    /// Why it ended before its time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What is seen: `contents`, pages that changed. Pages that were written and stayed as they were are not.
    pub observed: String,
    /// The guest's memory.
    pub memory: Bytes,
    /// Intervals that were watched.
    pub looks: u32,
    /// Intervals that were not, since looking took too long.
    pub missed: u32,
    /// Pages that changed in a second, on average.
    pub changed_per_s: f64,
    /// The most that changed in one interval, as pages a second.
    pub most_changed_per_s: f64,
    /// What changed at all.
    pub working_set: Bytes,
    /// What its memory is made of, and what the codec would make of it.
    pub contents: Contents,
    /// What its log takes.
    pub log_bytes: Bytes,
    /// Seconds of a processor that looking took.
    pub looking_s: f64,
}

impl Profile {
    /// One that begins, and has seen nothing yet.
    #[must_use]
    pub fn begun(host: Name, start_unix_ms: u64, wanted: StartProfile, memory: Bytes) -> Self {
        Self {
            host,
            start_unix_ms,
            for_s: wanted.for_s,
            interval_ms: wanted.interval_ms,
            state: ProfileState::Watching,
            why: None,
            observed: "contents".into(),
            memory,
            looks: 0,
            missed: 0,
            changed_per_s: 0.0,
            most_changed_per_s: 0.0,
            working_set: Bytes(0),
            contents: Contents::default(),
            log_bytes: Bytes(0),
            looking_s: 0.0,
        }
    }
}

/// Profiles within so many seconds of a time of day are as near to it as each other.
const AS_NEAR_S: u64 = 900;

/// How far two times of day are apart, in seconds.
#[must_use]
pub fn apart(a_unix_s: u64, b_unix_s: u64) -> u64 {
    const DAY: u64 = 86_400;
    let distance = (a_unix_s % DAY).abs_diff(b_unix_s % DAY);
    distance.min(DAY - distance)
}

/// The profile that tells most of a time of day: of those that are near to it the newest. One that is still under way, or has seen nothing,
/// tells nothing.
#[must_use]
pub fn nearest(profiles: impl IntoIterator<Item = Profile>, at_unix_s: u64) -> Option<Profile> {
    let good = profiles.into_iter().filter(|p| p.state != ProfileState::Watching && p.looks >= 2);
    good.min_by_key(|p| (apart(p.start_unix_ms / 1000, at_unix_s) / AS_NEAR_S, std::cmp::Reverse(p.start_unix_ms)))
}

/// What a memory is made of. Shares are of 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Contents {
    /// Pages that are all zeroes, of all pages.
    pub zero: f64,
    /// Pages that are equal to another one and not zero, of all pages.
    pub duplicate: f64,
    /// What of the size of the others goes onto the wire when they go for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<f64>,
    /// Pages that became zeroes, of those that changed.
    pub zeroed: f64,
    /// What of the size of a page that changed goes onto the wire when its last version went before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<f64>,
}

/// A profile with its log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileLog {
    /// The profile.
    pub profile: Profile,
    /// Its log of dirtied pages, in hexadecimal.
    #[schemars(regex(pattern = r"^([0-9a-f]{2})*$"))]
    pub log: String,
}

impl ProfileLog {
    /// Of a log's bytes.
    #[must_use]
    pub fn new(profile: Profile, log: &[u8]) -> Self {
        Self { profile, log: crate::hex::text(log) }
    }

    /// The log's bytes; none where they are not hexadecimal.
    #[must_use]
    pub fn bytes(&self) -> Option<Vec<u8>> {
        crate::hex::bytes(&self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_of_the_same_time_of_day_counts_and_of_those_the_newest() {
        let day = 86_400;
        assert_eq!((apart(10, day - 10), apart(5 * day, day / 2), apart(7, 7)), (20, day / 2, 0));
        let at = |start_s: u64, state| {
            let wanted = StartProfile { for_s: 1, interval_ms: 1000 };
            let begun = Profile::begun("a".parse().expect("a name"), start_s * 1000, wanted, Bytes(4096));
            Profile { state, looks: 2, ..begun }
        };
        let all = [
            at(3 * day + 100, ProfileState::Done),
            at(4 * day + 700, ProfileState::Ended),
            at(5 * day + 20_000, ProfileState::Done),
            at(6 * day + 100, ProfileState::Watching),
        ];
        let found = |at: u64| nearest(all.clone(), at).map(|p| p.start_unix_ms / 1000);
        assert_eq!(found(9 * day + 50), Some(4 * day + 700));
        assert_eq!(found(9 * day + 19_000), Some(5 * day + 20_000));
        assert_eq!(nearest([], 1), None);
    }

    #[test]
    fn a_log_comes_back_as_it_was() {
        let wanted = StartProfile { for_s: 1, interval_ms: 1000 };
        let profile = Profile::begun("a".parse().expect("a name"), 1, wanted, Bytes(4096));
        let all: Vec<u8> = (0..=255).collect();
        let log = ProfileLog::new(profile, &all);
        assert_eq!(log.bytes(), Some(all));
        for bad in ["0", "0g", "é0"] {
            assert_eq!(ProfileLog { log: bad.into(), ..log.clone() }.bytes(), None, "{bad}");
        }
    }
}
