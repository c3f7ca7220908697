//! Guest images: where they are, and what the lab adds to them for a run.
//!
//! `scripts/setup.sh` makes the images; a run only reads them. Two things are made for each run: the guest's disks
//! (the image's file system, then bytes drawn fresh, then room for the load program's records), and an initrd with
//! today's load program appended, since the kernel unpacks any number of archives one after the other.
//!
//! ```text
//! disk 0:  | ext4: files, records, noise | fresh random | the load program's records ... |
//!          0                        fs_end         records_at                         size
//! ```

use crate::scenario::{Image, Vm};
use anyhow::{Context, Result, bail};
use godwit_load::protocol::LoadSpec;
use godwit_units::Bytes;
use serde::Deserialize;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes drawn fresh for each VM, which therefore no cache, dictionary or earlier run can know: they have to show up
/// on the WAN when the disk moves.
pub const FRESH_RANDOM: Bytes = Bytes::mib(16);

/// One image, as its manifest describes it.
#[derive(Clone, Debug)]
pub struct GuestImage {
    folder: PathBuf,
    kind: Image,
    /// Kernel release.
    pub kernel: String,
    data: Vec<DataSet>,
}

#[derive(Deserialize)]
struct Manifest {
    kernel: String,
    data: Vec<DataSet>,
}

#[derive(Clone, Debug, Deserialize)]
struct DataSet {
    file: String,
    #[serde(default)]
    content_mib: u32,
    fs_bytes: u64,
}

/// Where everything is on a VM's first disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskLayout {
    /// End of the file system, rounded up to 1 MiB; the fresh random bytes begin here.
    pub fs_end: Bytes,
    /// Where the load program's records begin.
    pub records_at: Bytes,
    /// What no lossless codec can make smaller: the data set's noise and the fresh random bytes.
    pub incompressible: Bytes,
}

/// The folder of images: `$GODWIT_IMAGES`, or below `/var/cache`.
#[must_use]
pub fn folder() -> PathBuf {
    std::env::var_os("GODWIT_IMAGES").map_or_else(|| "/var/cache/godwit-lab/images".into(), PathBuf::from)
}

impl GuestImage {
    /// Finds an image.
    ///
    /// # Errors
    /// When it was not made yet, saying how to make it.
    pub fn find(kind: Image) -> Result<Self> {
        let link = folder().join(kind.to_string());
        // The set-up may replace the image during a run; the folder that the link names now stays until then.
        let folder = std::fs::canonicalize(&link).with_context(|| {
            format!("there is no `{kind}` guest image at {}: run `scripts/setup.sh {kind}`", link.display())
        })?;
        let text = std::fs::read_to_string(folder.join("manifest.json")).with_context(|| {
            format!("the image {} has no manifest: run `scripts/setup.sh {kind}`", folder.display())
        })?;
        let manifest: Manifest = serde_json::from_str(&text)
            .with_context(|| format!("the manifest of {} is not understood", folder.display()))?;
        Ok(Self { folder, kind, kernel: manifest.kernel, data: manifest.data })
    }

    /// Which image it is.
    #[must_use]
    pub fn kind(&self) -> Image {
        self.kind
    }

    /// The kernel.
    #[must_use]
    pub fn kernel_file(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// The folder inside the guest whose files fill its page cache.
    #[must_use]
    pub fn content_folder(&self) -> &'static str {
        match self.kind {
            Image::Tiny => "/data",
            Image::Debian => "/usr",
        }
    }

    /// The kernel's first file system, without a load program.
    #[must_use]
    pub fn initrd_file(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    fn data_set(&self, vm: &Vm) -> Result<Option<&DataSet>> {
        match (self.kind, vm.data_set_mib()) {
            (Image::Debian, _) => Ok(Some(self.data.first().context("the debian image has no root file system")?)),
            (Image::Tiny, None) => Ok(None),
            (Image::Tiny, Some(mib)) => {
                let found = self.data.iter().find(|d| d.content_mib == mib);
                found
                    .map(Some)
                    .with_context(|| format!("no data set of {mib} MiB was made: run `scripts/setup.sh tiny`"))
            }
        }
    }

    /// Where things are on the first disk of `vm`, once it is known that all of them fit.
    ///
    /// # Errors
    /// When the file system and the loads' records do not fit the disks.
    pub fn layout(&self, vm: &Vm) -> Result<DiskLayout> {
        let set = self.data_set(vm)?;
        let fs_end = Bytes(set.map_or(0, |d| d.fs_bytes).next_multiple_of(1 << 20));
        let records_at = fs_end + FRESH_RANDOM;
        let name = vm.name.get_ref();
        for load in &vm.load {
            let (disk, wanted) = match load.get_ref() {
                LoadSpec::Disk { working_set_mib, disk, .. } => (disk, Bytes::mib(u64::from(*working_set_mib))),
                LoadSpec::Tier { commits_to: Some(disk), .. } => (disk, Bytes(godwit_load::tier::COMMIT_BYTES)),
                _ => continue,
            };
            let Some(size) = vm.disks().get(*disk).copied() else {
                bail!("VM `{name}`: a load is for disk {disk}, but there are {}", vm.disks().len());
            };
            let at = if *disk == 0 { records_at } else { Bytes::ZERO };
            let end = at + wanted;
            if end > size {
                bail!(
                    "VM `{name}`: a load needs {end} on disk {disk}, which has {size}; make the disk larger, or the data or the working set smaller"
                );
            }
        }
        if records_at > vm.disks()[0] {
            bail!(
                "VM `{name}`: the image takes {records_at} of a first disk of {}; make the disk larger",
                vm.disks()[0]
            );
        }
        // An eighth of a data set is noise (images/data.sh); of a debian's files nobody knows.
        let noise = match self.kind {
            Image::Tiny => Bytes::mib(u64::from(set.map_or(0, |d| d.content_mib)) / 8),
            Image::Debian => Bytes::ZERO,
        };
        Ok(DiskLayout { fs_end, records_at, incompressible: noise + FRESH_RANDOM })
    }

    /// Makes the disks of `vm` as sparse files; `file(i)` names the i-th.
    ///
    /// # Errors
    /// When the disk is full or the image is gone.
    pub fn make_disks(&self, vm: &Vm, file: impl Fn(usize) -> PathBuf) -> Result<()> {
        let layout = self.layout(vm)?;
        for (index, size) in vm.disks().into_iter().enumerate() {
            let target = file(index);
            if let (0, Some(set)) = (index, self.data_set(vm)?) {
                let template = self.folder.join(&set.file);
                // cp keeps holes and copies within the kernel.
                let copied = Command::new("cp").arg("--sparse=auto").arg(&template).arg(&target).status();
                if !copied.context("cannot run cp")?.success() {
                    bail!("cannot copy {} to {}; is the disk full?", template.display(), target.display());
                }
            }
            let mut disk = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&target)?;
            disk.set_len(size.0)?;
            if index == 0 {
                disk.seek(SeekFrom::Start(layout.fs_end.0))?;
                std::io::copy(&mut File::open("/dev/urandom")?.take(FRESH_RANDOM.0), &mut disk)
                    .with_context(|| format!("cannot write {}", target.display()))?;
            }
        }
        Ok(())
    }

    /// Writes the initrd with the load program in it to `target`.
    ///
    /// # Errors
    /// When the load program was not built.
    pub fn make_initrd(&self, target: &Path) -> Result<()> {
        let program = load_program()?;
        let mut out = File::create(target)?;
        std::io::copy(&mut File::open(self.initrd_file())?, &mut out)?;
        let at = out.stream_position()?;
        // The kernel looks for the next archive at a multiple of four.
        out.write_all(&vec![0; (at.next_multiple_of(4) - at) as usize])?;
        let body = std::fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
        out.write_all(&cpio_newc("bin/godwit-load", 0o100_755, &body))?;
        Ok(())
    }
}

/// The load program: `$GODWIT_LOAD`, or the static one that `make build` puts beside `godwit-lab`'s own folder.
fn load_program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("GODWIT_LOAD") {
        return Ok(path.into());
    }
    let here = std::env::current_exe()?;
    let mut tried = vec![];
    for above in here.ancestors().skip(1).take(3) {
        for name in ["static/x86_64-unknown-linux-gnu/release/godwit-load", "godwit-load"] {
            let path = above.join(name);
            if path.is_file() {
                return Ok(path);
            }
            tried.push(path.display().to_string());
        }
    }
    bail!(
        "the guests' load program is not built: run `make build`, or set GODWIT_LOAD (looked at {})",
        tried.join(", ")
    )
}

/// One file as a cpio archive in the kernel's `newc` format (Documentation/driver-api/early-userspace/buffer-format).
fn cpio_newc(name: &str, mode: u32, body: &[u8]) -> Vec<u8> {
    let mut archive = vec![];
    for (name, mode, body) in [(name, mode, body), ("TRAILER!!!", 0, &[][..])] {
        let size = u32::try_from(body.len()).expect("a program of less than 4 GiB");
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), length of the name, checksum
        let fields = [1, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        archive.extend_from_slice(b"070701");
        fields.iter().for_each(|f| archive.extend_from_slice(format!("{f:08x}").as_bytes()));
        archive.extend_from_slice(name.as_bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend_from_slice(body);
        archive.resize(archive.len().next_multiple_of(4), 0);
    }
    archive
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_cpio_unpacks() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        let body = vec![7; 4097];
        let mut child = Command::new("cpio")
            .args(["-i", "--quiet"])
            .current_dir(&folder)
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("cpio is a package that the set-up installs");
        child.stdin.take().unwrap().write_all(&cpio_newc("bin/godwit-load", 0o100_755, &body)).unwrap();
        assert!(child.wait().unwrap().success());
        let unpacked = folder.path().join("bin/godwit-load");
        assert_eq!(std::fs::read(&unpacked).unwrap(), body);
        let mode = std::os::unix::fs::PermissionsExt::mode(&unpacked.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o755);
    }
}
