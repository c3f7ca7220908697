//! Names that people give to sites, hosts, VMs, volumes and components.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// Longest name. Short enough to stand in a table and in a certificate.
pub const LONGEST_NAME: usize = 48;

/// A name: 1 to [`LONGEST_NAME`] of `a-z`, `0-9` and `-`, beginning with a letter and not ending with `-`. So it can stand in a
/// URL, a file name and a DNS label as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Why a text is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no name: use 1 to {LONGEST_NAME} letters a-z, digits and `-`, beginning with a letter, not ending with `-`"
)]
pub struct NotAName(pub String);

impl Name {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Self, NotAName> {
        let good = (1..=LONGEST_NAME).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_lowercase())
            && !text.ends_with('-')
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        // What was refused is quoted, so it must not be of any length.
        if good { Ok(Self(text.to_owned())) } else { Err(NotAName(text.chars().take(80).collect())) }
    }
}

impl JsonSchema for Name {
    fn schema_name() -> Cow<'static, str> {
        "Name".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A name: letters a-z, digits and `-`, beginning with a letter and not ending with `-`.",
            "minLength": 1,
            "maxLength": LONGEST_NAME,
            "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$",
        })
    }
}

impl TryFrom<String> for Name {
    type Error = NotAName;

    fn try_from(text: String) -> Result<Self, NotAName> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_dns_label() {
        for good in ["a", "web", "web-1", "x86-64"] {
            assert_eq!(good.parse::<Name>().map(String::from), Ok(good.to_owned()));
        }
        for bad in ["", "1a", "-a", "a-", "A", "a_b", "a/b", "../a", "ä", &"a".repeat(49)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }
}
