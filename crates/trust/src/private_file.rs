//! Files and folders that only their owner may read.

use crate::TrustError;
use std::fs::{self, DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// No PEM file of ours comes near this; a larger one is a mistake in a path.
const MAX_PEM: u64 = 1 << 20;

/// Makes a folder with mode 0700, and its parents; one that exists is narrowed to 0700.
pub fn make_dir(dir: &Path) -> Result<(), TrustError> {
    let failed = |source| TrustError::File { doing: "creating folder", path: dir.into(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(failed)
}

/// Writes a whole file, durably, or leaves what was there: a key that is half written locks a node out.
pub fn replace(path: &Path, mode: u32, contents: &str) -> Result<(), TrustError> {
    let failed = |source| TrustError::File { doing: "writing", path: path.into(), source };
    godwit_durable::replace_as(path, mode, contents.as_bytes()).map_err(failed)
}

/// Keeps a file beside a certificate, for its owner's eyes only, durably and whole. The folder is made where there is none.
///
/// # Errors
/// The folder cannot be made, or the file not be written.
pub fn keep_beside(dir: &Path, name: &str, contents: &str) -> Result<(), TrustError> {
    make_dir(dir)?;
    replace(&dir.join(name), 0o600, contents)
}

/// Reads a PEM file.
pub fn read(path: &Path) -> Result<String, TrustError> {
    read_with(path, |_| Ok(()))
}

/// Reads a key, unless group or world have any right to it.
pub fn read_key(path: &Path) -> Result<String, TrustError> {
    read_with(path, |file| {
        let failed = |source| TrustError::File { doing: "reading the mode of", path: path.into(), source };
        // Of the open file: the path could be another one by now.
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o077 == 0 { Ok(()) } else { Err(TrustError::KeyReadable { path: path.into(), mode }) }
    })
}

fn read_with(path: &Path, check: impl FnOnce(&File) -> Result<(), TrustError>) -> Result<String, TrustError> {
    let failed = |source| TrustError::File { doing: "reading", path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    check(&file)?;
    let mut text = String::new();
    file.take(MAX_PEM).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}
