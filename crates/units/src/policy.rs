//! What a move is to spare: CloudNet, section 3.2.1, has one answer, and operators have several.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What a move is to spare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Policy {
    /// The guest's pause: Smart Stop as the paper has it.
    #[default]
    LeastDowntime,
    /// The whole move's time: stops at the crossover, where another round promises nothing.
    LeastTotal,
    /// Bytes on the link: stops after the first round, because each further one only sends pages again, or after another where that is seen to cost
    /// next to nothing; and is packed as hard as pays at any price.
    LeastBytes,
    /// The pause, up to here: stops as soon as it is predicted to be no longer, and gives up where it never is.
    MaxDowntime(Duration),
    /// As least downtime, but so that the guest runs at its destination within this time of the order, as far as that can be foreseen; where that
    /// time is over before its memory begins to go, as soon as possible from then on.
    Deadline(Duration),
}

impl Policy {
    /// With so much of a deadline used up, or needed for something else; any other as it is.
    #[must_use]
    pub const fn sooner(self, by: Duration) -> Self {
        match self {
            Self::Deadline(most) => Self::Deadline(most.saturating_sub(by)),
            other => other,
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeastDowntime => f.write_str("least-downtime"),
            Self::LeastTotal => f.write_str("least-total"),
            Self::LeastBytes => f.write_str("least-bytes"),
            Self::MaxDowntime(most) => write!(f, "max-downtime={}ms", most.as_millis()),
            Self::Deadline(most) => write!(f, "deadline={}ms", most.as_millis()),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is no policy: write least-downtime, least-total, least-bytes, max-downtime=TIME or deadline=TIME, with a TIME \
                 such as 300ms or 90s"
            )
        };
        let time = |text: &str| time(text).ok_or_else(bad);
        match text.split_once('=') {
            None if text == "least-downtime" => Ok(Self::LeastDowntime),
            None if text == "least-total" => Ok(Self::LeastTotal),
            None if text == "least-bytes" => Ok(Self::LeastBytes),
            Some(("max-downtime", most)) => Ok(Self::MaxDowntime(time(most)?)),
            Some(("deadline", most)) => Ok(Self::Deadline(time(most)?)),
            _ => Err(bad()),
        }
    }
}

/// `300ms` or `90s`; more than nothing.
fn time(text: &str) -> Option<Duration> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s')?, 1.0),
    };
    let seconds = number.parse::<f64>().ok()? * unit;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero())
}

/// For how long at most memory may follow its guest (post-copy), as far as that can be foreseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MaxDrain(pub Duration);

impl MaxDrain {
    /// Where nobody says how long: as long as a guest that waits for a page now and then may be put up with.
    pub const DEFAULT: Self = Self(Duration::from_secs(30));
}

impl fmt::Display for MaxDrain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ms", self.0.as_millis())
    }
}

impl FromStr for MaxDrain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is no time: write it such as 500ms or 30s");
        time(text).filter(|time| time.as_millis() > 0).map(Self).ok_or_else(bad)
    }
}

impl TryFrom<String> for MaxDrain {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MaxDrain> for String {
    fn from(most: MaxDrain) -> Self {
        most.to_string()
    }
}

impl JsonSchema for MaxDrain {
    fn schema_name() -> Cow<'static, str> {
        "MaxDrain".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "For how long at most memory may follow its guest.",
            "pattern": "^[1-9][0-9]{0,8}(ms|s)$",
            "examples": ["30s", "500ms"],
        })
    }
}

impl TryFrom<String> for Policy {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> Self {
        policy.to_string()
    }
}

impl JsonSchema for Policy {
    fn schema_name() -> Cow<'static, str> {
        "Policy".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "What a move is to spare.",
            "pattern": "^(least-downtime|least-total|least-bytes|(max-downtime|deadline)=[1-9][0-9]{0,8}(ms|s))$",
            "examples": ["least-downtime", "max-downtime=300ms", "deadline=90s"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_read_as_it_is_written_and_nothing_else_is_one() {
        for text in ["least-downtime", "least-total", "least-bytes", "max-downtime=300ms", "deadline=90000ms"] {
            assert_eq!(text.parse::<Policy>().map(|policy| policy.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("deadline=1.5s".parse(), Ok(Policy::Deadline(Duration::from_millis(1500))));
        let none = ["", "fast", "least-downtime=3s", "max-downtime", "max-downtime=0ms", "max-downtime=0s", "deadline"];
        assert_eq!("1.5s".parse::<MaxDrain>().map(|most| most.to_string()), Ok("1500ms".into()));
        for text in ["", "0s", "0.1ms", "9", "s"] {
            assert!(text.parse::<MaxDrain>().is_err(), "{text}");
        }
        for text in
            none.into_iter().chain(["deadline=", "deadline=9", "deadline=-1s", "deadline=1e99s", "deadline=NaNs"])
        {
            assert!(text.parse::<Policy>().is_err(), "{text}");
        }
    }
}
