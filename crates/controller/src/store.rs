//! What the controller has to remember: behind a trait, so that another engine can stand in for the embedded one.
//!
//! A store holds JSON by kind and key. A [`Change`] list is carried out whole or not at all, and is durable when
//! [`StateStore::commit`] returns. Numbers are given out by [`StateStore::next`], each once for ever: a number is
//! durable before it is used, so a crash wastes numbers and never repeats one.

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What is kept, each in its own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// By name.
    Site,
    /// By name.
    Host,
    /// By name.
    Component,
    /// By number.
    Vm,
    /// By number.
    Volume,
    /// By number.
    Move,
    /// Tokens for hosts, by their secret's hash.
    Enrolment,
    /// One list.
    Revocation,
    /// Tokens for people, by their secret's hash.
    ApiToken,
    /// By volume and host.
    Precache,
    /// By number.
    ComponentObject,
    /// Between ports, by number.
    Wire,
    /// By number.
    Extender,
    /// How many moves were forgotten, by outcome.
    Forgotten,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Site,
        Self::Host,
        Self::Component,
        Self::Vm,
        Self::Volume,
        Self::Move,
        Self::Enrolment,
        Self::Revocation,
        Self::ApiToken,
        Self::Precache,
        Self::ComponentObject,
        Self::Wire,
        Self::Extender,
        Self::Forgotten,
    ];

    const fn table(self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        TableDefinition::new(match self {
            Self::Site => "sites",
            Self::Host => "hosts",
            Self::Component => "components",
            Self::Vm => "vms",
            Self::Volume => "volumes",
            Self::Move => "moves",
            Self::Enrolment => "enrolments",
            Self::Revocation => "revocations",
            Self::ApiToken => "api-tokens",
            Self::Precache => "precaches",
            Self::ComponentObject => "component-objects",
            Self::Wire => "wires",
            Self::Extender => "extenders",
            Self::Forgotten => "forgotten",
        })
    }
}

/// Numbers that are never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counter {
    /// `VmId`.
    Vm,
    /// `VolumeId`.
    Volume,
    /// Wires.
    Wire,
    /// `MoveId`.
    Move,
    /// Extenders and their tunnels.
    Extender,
}

impl Counter {
    const fn key(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Volume => "volume",
            Self::Wire => "wire",
            Self::Move => "move",
            Self::Extender => "extender",
        }
    }
}

const COUNTERS: TableDefinition<'static, &'static str, u64> = TableDefinition::new("counters");

/// One change of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Writes, whether it is there or not.
    Put(Kind, String, Vec<u8>),
    /// Removes, whether it is there or not.
    Remove(Kind, String),
}

impl Change {
    /// Writes `value` as JSON.
    pub fn put(kind: Kind, key: impl ToString, value: &impl Serialize) -> Self {
        Self::Put(
            kind,
            key.to_string(),
            serde_json::to_vec(value).expect("records have string keys and no failing types"),
        )
    }

    /// Removes `key`.
    pub fn remove(kind: Kind, key: impl ToString) -> Self {
        Self::Remove(kind, key.to_string())
    }
}

/// Why the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder.
    #[error("cannot use {path} as the controller's state: {source}; give it a folder that it may write, with --state")]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The database.
    #[error("the controller's store failed: {0}; see that its disk is not full, and that no other controller uses it")]
    Database(#[from] Box<redb::Error>),
    /// A record of another version, or a damaged one.
    #[error("the record `{key}` of {kind:?} cannot be read: {source}; run the version of godwit that wrote it")]
    Record {
        /// What it is.
        kind: Kind,
        /// Which.
        key: String,
        /// Why not.
        source: serde_json::Error,
    },
}

fn failed(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}

/// Durable memory.
pub trait StateStore: Send + Sync + 'static {
    /// One record.
    ///
    /// # Errors
    /// The medium's.
    fn get(&self, kind: Kind, key: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// All of a kind.
    ///
    /// # Errors
    /// The medium's.
    fn list(&self, kind: Kind) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// Carries out all changes, or none; durable on return.
    ///
    /// # Errors
    /// The medium's.
    fn commit(&self, changes: &[Change]) -> Result<(), StoreError>;

    /// The last number that this counter gave; 0 if none.
    ///
    /// # Errors
    /// The medium's.
    fn last(&self, counter: Counter) -> Result<u64, StoreError>;

    /// A number greater than any that this counter gave before; the first is 1.
    ///
    /// # Errors
    /// The medium's.
    fn next(&self, counter: Counter) -> Result<u64, StoreError>;
}

impl dyn StateStore {
    /// One record, read.
    ///
    /// # Errors
    /// The medium's, or a record that makes no sense.
    pub fn read<T: DeserializeOwned>(&self, kind: Kind, key: impl ToString) -> Result<Option<T>, StoreError> {
        let key = key.to_string();
        self.get(kind, &key)?.map(|bytes| parse(kind, &key, &bytes)).transpose()
    }

    /// All of a kind, read; in no order.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_all<T: DeserializeOwned>(&self, kind: Kind) -> Result<Vec<T>, StoreError> {
        self.list(kind)?.iter().map(|(key, bytes)| parse(kind, key, bytes)).collect()
    }
}

fn parse<T: DeserializeOwned>(kind: Kind, key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes).map_err(|source| StoreError::Record { kind, key: key.to_owned(), source })
}

/// The embedded store: one redb file in a folder that only its owner may enter.
#[derive(Debug)]
pub struct FileStore {
    database: Database,
}

impl FileStore {
    /// Opens or makes the store in `folder`.
    ///
    /// # Errors
    /// The folder cannot be made or closed to others, or another process has the store open.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        let unusable = |source| StoreError::Folder { path: folder.into(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(unusable)?;
        std::fs::set_permissions(folder, PermissionsExt::from_mode(0o700)).map_err(unusable)?;
        let database = Database::create(folder.join("controller.redb")).map_err(failed)?;
        let setup = database.begin_write().map_err(failed)?;
        for kind in Kind::ALL {
            setup.open_table(kind.table()).map_err(failed)?;
        }
        setup.open_table(COUNTERS).map_err(failed)?;
        setup.commit().map_err(failed)?;
        Ok(Self { database })
    }
}

impl StateStore for FileStore {
    fn get(&self, kind: Kind, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let reading = self.database.begin_read().map_err(failed)?;
        let table = reading.open_table(kind.table()).map_err(failed)?;
        Ok(table.get(key).map_err(failed)?.map(|value| value.value().to_vec()))
    }

    fn list(&self, kind: Kind) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let reading = self.database.begin_read().map_err(failed)?;
        let table = reading.open_table(kind.table()).map_err(failed)?;
        let all = table.iter().map_err(failed)?;
        all.map(|entry| entry.map(|(k, v)| (k.value().to_owned(), v.value().to_vec())).map_err(failed)).collect()
    }

    fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        let writing = self.database.begin_write().map_err(failed)?;
        for change in changes {
            match change {
                Change::Put(kind, key, value) => {
                    let mut table = writing.open_table(kind.table()).map_err(failed)?;
                    table.insert(key.as_str(), value.as_slice()).map_err(failed)?;
                }
                Change::Remove(kind, key) => {
                    writing.open_table(kind.table()).map_err(failed)?.remove(key.as_str()).map_err(failed)?;
                }
            }
        }
        writing.commit().map_err(failed)
    }

    fn last(&self, counter: Counter) -> Result<u64, StoreError> {
        let reading = self.database.begin_read().map_err(failed)?;
        let table = reading.open_table(COUNTERS).map_err(failed)?;
        Ok(table.get(counter.key()).map_err(failed)?.map_or(0, |v| v.value()))
    }

    fn next(&self, counter: Counter) -> Result<u64, StoreError> {
        let writing = self.database.begin_write().map_err(failed)?;
        let number = {
            let mut table = writing.open_table(COUNTERS).map_err(failed)?;
            let last = table.get(counter.key()).map_err(failed)?.map_or(0, |v| v.value());
            table.insert(counter.key(), last + 1).map_err(failed)?;
            last + 1
        };
        writing.commit().map_err(failed)?;
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_numbers_survive_a_reopening_and_numbers_are_never_given_twice() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        {
            let store = FileStore::open(&state).unwrap();
            assert_eq!(store.next(Counter::Move).unwrap(), 1);
            assert_eq!(store.next(Counter::Move).unwrap(), 2);
            store.commit(&[Change::put(Kind::Site, "a", &"A"), Change::put(Kind::Site, "b", &"B")]).unwrap();
            store.commit(&[Change::remove(Kind::Site, "a")]).unwrap();
        }
        let store: Box<dyn StateStore> = Box::new(FileStore::open(&state).unwrap());
        assert_eq!((store.last(Counter::Move).unwrap(), store.last(Counter::Vm).unwrap()), (2, 0));
        assert_eq!(store.next(Counter::Move).unwrap(), 3);
        assert_eq!(store.next(Counter::Wire).unwrap(), 1);
        assert_eq!(store.read_all::<String>(Kind::Site).unwrap(), ["B"]);
        assert_eq!(store.read::<String>(Kind::Site, "a").unwrap(), None);
        let mode = std::fs::metadata(&state).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_store_is_opened_by_one_controller_only() {
        let folder = tempfile::tempdir().unwrap();
        let _first = FileStore::open(folder.path()).unwrap();
        let error = FileStore::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no other controller"), "{error}");
    }

    #[test]
    fn a_record_of_another_version_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let store: Box<dyn StateStore> = Box::new(FileStore::open(folder.path()).unwrap());
        store.commit(&[Change::put(Kind::Vm, 7, &"no VM")]).unwrap();
        let error = store.read::<u64>(Kind::Vm, 7).unwrap_err().to_string();
        assert!(error.contains("`7` of Vm"), "{error}");
    }
}
