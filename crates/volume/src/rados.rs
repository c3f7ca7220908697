//! A pool of a Ceph cluster that a replica's blocks lie in, as objects of a region each. Stamps and all else lie in the replica's folder, which
//! names the pool and what its objects' names begin with.
//!
//! # What an object store does not know, and how it is made up for
//!
//! *Holes.* An object that does not exist reads as zeroes, and so does what lies behind an object's end; a region that is punched whole
//! loses its object. Within an object nobody can tell what was written, so the replica's stamps do.
//!
//! *Whose it is.* The names of a replica's objects begin with what nobody else has: it is drawn when the replica is made. So a folder that was
//! made and given up leaves no object that another one could take for its own, and whoever has the folder has the volume.
//!
//! *When it is durable.* A write that has been answered is on every replica that the pool demands. There is nothing to flush.
//!
//! *What belongs to it.* A folder is removed after its objects ([`remove`]). Which there may be the replica knows: a region is marked hot before it
//! is first written, and has stamps later.

use crate::error::{VolumeError, io_error};
use crate::file::{Description, DescriptionFile, Disk, Medium, SlottedFile};
use crate::meta::Meta;
use crate::stamps::REGION;
use crate::{BLOCK, Replica};
use godwit_rados::Pool;
use godwit_units::{Bytes, RadosPool, VolumeId};
use serde::{Deserialize, Serialize};
use std::fs::DirBuilder;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Where a replica's pool is named, in its folder.
const NAMED: &str = "rados";
/// Bytes of an object: a region, so that what the replica knows of regions it knows of objects. Ceph's own block devices have the same.
const OBJECT: u64 = REGION * BLOCK;

/// What is kept of where the objects are.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    pool: RadosPool,
    prefix: String,
}

/// Blocks in objects.
#[derive(Debug)]
struct Objects {
    pool: Pool,
    prefix: String,
}

/// The parts of a range that lie in one object each: (object, offset in it, length).
fn parts(at: u64, length: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let end = at + length;
    std::iter::successors(Some(at), |here| Some((here / OBJECT + 1) * OBJECT))
        .take_while(move |here| *here < end)
        .map(move |here| (here / OBJECT, here % OBJECT, (OBJECT - here % OBJECT).min(end - here)))
}

fn object(prefix: &str, index: u64) -> String {
    format!("{prefix}.{index:012x}")
}

impl Objects {
    fn open(named: Named) -> Result<Self, VolumeError> {
        let pool = Pool::open(&named.pool).map_err(|e| VolumeError::Rados(e.to_string()))?;
        Ok(Self { pool, prefix: named.prefix })
    }
}

impl Medium for Objects {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut rest = into;
        for (index, offset, length) in parts(at, rest.len() as u64) {
            let (here, behind) = rest.split_at_mut(length as usize);
            let got = self.pool.read(&object(&self.prefix, index), offset, here)?;
            here[got..].fill(0);
            rest = behind;
        }
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut rest = from;
        for (index, offset, length) in parts(at, from.len() as u64) {
            let (here, behind) = rest.split_at(length as usize);
            self.pool.write(&object(&self.prefix, index), offset, here)?;
            rest = behind;
        }
        Ok(())
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        parts(at, length).try_for_each(|(index, offset, length)| {
            let name = object(&self.prefix, index);
            if length == OBJECT { self.pool.remove(&name) } else { self.pool.zero(&name, offset, length) }
        })
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn extents(&self, _: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, false)])
    }

    fn knows_holes(&self) -> bool {
        false
    }

    fn allocated(&self) -> u64 {
        0
    }
}

impl Replica {
    /// Makes a replica whose blocks lie in a pool of a Ceph cluster. It holds zeroes, and belongs to nobody.
    ///
    /// # Errors
    /// When the cluster cannot be reached, has no such pool, or the folder cannot be made.
    pub fn create_in_pool(folder: &Path, pool: &RadosPool, volume: VolumeId, size: Bytes) -> Result<(), VolumeError> {
        let meta = Meta::fresh(volume, size)?;
        let mut drawn = [0; 8];
        let random = Path::new("/dev/urandom");
        let read = std::fs::File::open(random).and_then(|mut file| file.read_exact(&mut drawn));
        read.map_err(io_error("read", random))?;
        let named =
            Named { pool: pool.clone(), prefix: format!("godwit.{:x}.{:016x}", volume.0, u64::from_le_bytes(drawn)) };
        // Before anything is made: whether it can be reached, and written to.
        let objects = Objects::open(named.clone())?;
        let probe = format!("{}.probe", named.prefix);
        let tried = objects.pool.write(&probe, 0, b"godwit").and_then(|()| objects.pool.remove(&probe));
        tried.map_err(|e| VolumeError::Rados(e.to_string()))?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
        crate::replica::clear(folder, &crate::replica::TABLES)?;
        let text = serde_json::to_vec_pretty(&named).map_err(|e| io_error("describe", folder)(io::Error::other(e)))?;
        DescriptionFile(folder.join(NAMED)).store(&text).map_err(io_error("describe", folder))?;
        // Last, because a folder with a description is a replica.
        meta.store(&SlottedFile::new(folder.join("meta")), folder)
    }
}

fn named(folder: &Path) -> Result<Option<Named>, VolumeError> {
    let path = folder.join(NAMED);
    match std::fs::read(&path) {
        Ok(bytes) => {
            let why = |e: serde_json::Error| VolumeError::Damaged { path: path.clone(), why: e.to_string() };
            serde_json::from_slice(&bytes).map(Some).map_err(why)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error("read", &path)(e)),
    }
}

/// Opens what a replica's blocks lie in, if that is a pool.
pub(crate) fn open(folder: &Path) -> Result<Option<Box<dyn Medium>>, VolumeError> {
    let Some(named) = named(folder)? else { return Ok(None) };
    Ok(Some(Box::new(Objects::open(named)?)))
}

/// Removes a replica's objects, if its blocks lie in a pool: before its folder goes. May be repeated. Nobody has it open.
///
/// # Errors
/// When the cluster cannot be reached, or refuses, or the folder does not say which objects there are: then it has to stay, since nothing else knows.
pub fn remove(folder: &Path) -> Result<(), VolumeError> {
    let Some(named) = named(folder)? else { return Ok(()) };
    let touched = touched_regions(folder).map_err(io_error("read the stamps in", folder))?;
    if touched.is_empty() {
        return Ok(());
    }
    let objects = Objects::open(named)?;
    for index in touched {
        let name = object(&objects.prefix, index);
        objects.pool.remove(&name).map_err(|e| VolumeError::Rados(e.to_string()))?;
    }
    Ok(())
}

/// The regions that may have an object: those that are hot, or have a stamp. The tables are as long as the volume: no need of the description, which
/// may be damaged.
fn touched_regions(folder: &Path) -> io::Result<std::collections::BTreeSet<u64>> {
    let mut found = std::collections::BTreeSet::new();
    // Bytes of each table for a region.
    for (table, each) in [("stamps", REGION * 8), ("hot", 1)] {
        let file = match std::fs::File::open(folder.join(table)) {
            Ok(file) => Disk::new(file, 0),
            // It was never opened, and so never written.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        let mut at = 0;
        for (length, is_hole) in file.extents(0, file.as_file().metadata()?.len())? {
            let (first, last) = (at / each, (at + length).div_ceil(each));
            at += length;
            for region in (first..last).filter(|_| !is_hole) {
                let mut entry = vec![0; each as usize];
                file.read(region * each, &mut entry)?;
                if entry.iter().any(|byte| *byte != 0) {
                    found.insert(region);
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_of_a_range_are_it_and_none_crosses_an_object(at in 0..5 * OBJECT, length in 0..5 * OBJECT) {
            let mut here = at;
            for (index, offset, length) in parts(at, length) {
                prop_assert_eq!(index * OBJECT + offset, here);
                prop_assert!(length > 0 && offset + length <= OBJECT);
                here += length;
            }
            prop_assert_eq!(here, at + length);
        }
    }

    #[test]
    fn what_was_written_or_may_have_been_is_what_has_objects() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        let size = Bytes(REGION * BLOCK * 9);
        drop(Replica::create(&path, VolumeId(7), size).unwrap());
        assert!(touched_regions(&path).unwrap().is_empty());
        // A stamp in region 3, and region 8 hot without one.
        Disk::open(&path.join("stamps"), 0).unwrap().write((3 * REGION + 17) * 8, &[1; 8]).unwrap();
        Disk::open(&path.join("hot"), 0).unwrap().write(8, &[1]).unwrap();
        assert_eq!(touched_regions(&path).unwrap().into_iter().collect::<Vec<_>>(), [3, 8]);
    }

    #[test]
    fn objects_are_known_whatever_the_description_says_and_are_not_left_behind_in_silence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        drop(Replica::create(&path, VolumeId(7), Bytes(REGION * BLOCK * 9)).unwrap());
        let named = Named { pool: "nobody@there-is-no-such-pool".parse().unwrap(), prefix: "godwit.7.0".into() };
        std::fs::write(path.join(NAMED), serde_json::to_vec(&named).unwrap()).unwrap();
        // Nothing was written: nobody has to be asked.
        remove(&path).unwrap();
        Disk::open(&path.join("stamps"), 0).unwrap().write(3 * REGION * 8, &[1; 8]).unwrap();
        std::fs::write(path.join("meta"), b"{\"format\": 99").unwrap();
        assert_eq!(touched_regions(&path).unwrap().into_iter().collect::<Vec<_>>(), [3]);
        let refused = remove(&path);
        assert!(matches!(refused, Err(VolumeError::Rados(_))), "{refused:?}");
    }

    #[test]
    fn a_folder_that_names_no_pool_is_none_and_one_that_names_it_badly_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(open(folder.path()).unwrap().is_none());
        remove(folder.path()).unwrap();
        std::fs::write(folder.path().join(NAMED), b"{\"pool\": 1}").unwrap();
        assert!(matches!(open(folder.path()), Err(VolumeError::Damaged { .. })));
    }
}
