//! Where in a Ceph cluster objects lie.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// The longest name.
const LONGEST: usize = 128;

/// A pool of a Ceph cluster, a namespace in it, and the user that asks: `[USER@]POOL[/NAMESPACE]`.
///
/// Names are 1 to 128 letters, digits and `-_.`, and do not begin with `-`: none can be taken for an option or a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RadosPool {
    user: Option<String>,
    pool: String,
    namespace: Option<String>,
}

impl RadosPool {
    /// The pool's name.
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// The namespace; empty: the pool's own.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or_default()
    }

    /// The user, without `client.` in front; `admin` when nobody says, as Ceph has it.
    #[must_use]
    pub fn user(&self) -> &str {
        self.user.as_deref().unwrap_or("admin")
    }
}

impl fmt::Display for RadosPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        f.write_str(&self.pool)?;
        self.namespace.as_ref().map_or(Ok(()), |namespace| write!(f, "/{namespace}"))
    }
}

impl FromStr for RadosPool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = |part: &str| {
            let fine = (1..=LONGEST).contains(&part.len())
                && !part.starts_with('-')
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
            fine.then(|| part.to_owned()).ok_or_else(|| {
                let text: String = text.chars().take(200).collect();
                format!("`{text}` is no pool of a Ceph cluster: write [USER@]POOL[/NAMESPACE], such as godwit@volumes")
            })
        };
        let (user, rest) = text.split_once('@').map_or((None, text), |(user, rest)| (Some(user), rest));
        let (pool, namespace) = rest.split_once('/').map_or((rest, None), |(pool, rest)| (pool, Some(rest)));
        Ok(Self { user: user.map(name).transpose()?, pool: name(pool)?, namespace: namespace.map(name).transpose()? })
    }
}

impl TryFrom<String> for RadosPool {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RadosPool> for String {
    fn from(pool: RadosPool) -> Self {
        pool.to_string()
    }
}

impl JsonSchema for RadosPool {
    fn schema_name() -> Cow<'static, str> {
        "RadosPool".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A pool of a Ceph cluster: [USER@]POOL[/NAMESPACE].",
            "pattern": "^([A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}@)?[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127})?$",
            "examples": ["volumes", "godwit@volumes/acme"],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_read_as_it_is_written_and_nothing_else_is_one() {
        for (text, parts) in [
            ("volumes", ("admin", "volumes", "")),
            ("godwit@volumes", ("godwit", "volumes", "")),
            ("godwit@a.b-c_d/acme", ("godwit", "a.b-c_d", "acme")),
        ] {
            let pool: RadosPool = text.parse().unwrap();
            assert_eq!((pool.user(), pool.pool(), pool.namespace()), parts);
            assert_eq!(pool.to_string(), text);
        }
        let long = "a".repeat(LONGEST + 1);
        for text in ["", "@volumes", "a@", "a/", "/a", "a b", "a/b/c", "a@b@c", "--id@x", "-x", "a\0", "ä", &long] {
            assert!(text.parse::<RadosPool>().is_err(), "{text}");
        }
    }
}
