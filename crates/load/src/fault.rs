//! What is wrong with a page or a record, in the form that both checks share.

use crate::{protocol::Problem, wire::bounded};

/// One thing found wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: expected {expected}, found {found}")]
pub struct Fault {
    /// How it is wrong.
    pub kind: Problem,
    /// What was expected, in words.
    pub expected: String,
    /// What was found, in words.
    pub found: String,
}

impl Fault {
    pub(crate) fn new(kind: Problem, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { kind, expected: bounded(expected.into()), found: bounded(found.into()) }
    }

    /// For a place that holds nothing of ours.
    pub(crate) fn lost(expected: impl Into<String>, bytes: &[u8]) -> Self {
        let found = if bytes.iter().all(|&byte| byte == 0) {
            "only zeros".to_owned()
        } else {
            format!("unknown bytes, starting with {:02x?}", &bytes[..bytes.len().min(16)])
        };
        Self::new(Problem::Lost, expected, found)
    }
}

/// Little-endian number at `at` of a page or a record, whose layouts are fixed.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of eight bytes"))
}

/// The reverse of [`u64_at`].
pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}
