//! Frames of wires, recorded while things move: the step `capture`.
//!
//! It is what a user does: `godwit net trace OBJECT --capture DIR`, with every site's host named as a place that an end may come to. So
//! there is a file for each wire and each host that an end of it was at, bounded as the command bounds it: a minute, 1 MiB a file.
//!
//! The script goes on meanwhile; at its end the pass waits for what is still recorded. Files are in the run's work folder first,
//! and are taken from there when there is a report that names them: a run that fails leaves none.

use crate::godwit::{Installation, host_of};
use crate::pass::Pass;
use crate::report::{CaptureFile, CaptureReport};
use crate::scenario::CaptureStep;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The folder in a run's work folder that recordings are in, until somebody takes them.
pub const FOLDER: &str = "recordings";

/// What is being recorded in a pass, and where that goes.
#[derive(Debug)]
pub(crate) struct Recordings {
    folder: PathBuf,
    running: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    report: CaptureReport,
    folder: PathBuf,
    thread: JoinHandle<Result<()>>,
}

impl Recordings {
    /// None yet; files go into `folder`, which is made when there are some.
    pub(crate) const fn into(folder: PathBuf) -> Self {
        Self { folder, running: vec![] }
    }
}

impl Pass {
    /// Begins to record, and goes on.
    ///
    /// # Errors
    /// When the folder or the thread cannot be made. A recording that fails is a warning.
    pub(crate) fn capture(&mut self, step: &CaptureStep) -> Result<()> {
        let Some(installation) = self.installation.clone() else {
            self.leave_out("capture");
            return Ok(());
        };
        let (name, of) = (step.name().get_ref().clone(), step.of.get_ref().clone());
        self.progress.note(&format!("recording frames of {of} for {} s", step.s));
        let folder = self.recordings.folder.join(&name);
        std::fs::create_dir_all(&self.recordings.folder).context("cannot make the folder of recordings")?;
        let words = command(&installation, &of, step.s, &folder);
        let report = CaptureReport { name, of, at_s: self.seconds(Instant::now()), s: step.s, files: vec![] };
        let thread = std::thread::Builder::new()
            .name("recording".into())
            .spawn(move || installation.command(words).map(drop))
            .context("cannot start recording")?;
        self.recordings.running.push(Running { report, folder, thread });
        Ok(())
    }

    /// Waits for what is still recorded, and looks at the files.
    pub(crate) fn end_captures(&mut self) -> Vec<CaptureReport> {
        let zero = unix_s(SystemTime::now()) - self.zero.elapsed().as_secs_f64();
        let mut ended = vec![];
        for Running { mut report, folder, thread } in std::mem::take(&mut self.recordings.running) {
            let done = thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a bug of the lab (a panic; see above)")));
            match done.and_then(|()| files(&folder, zero)) {
                Ok(files) => {
                    report.files = files;
                    ended.push(report);
                }
                Err(e) => self.warnings.push(format!("the recording `{}`: {e:#}", report.name)),
            }
        }
        ended
    }
}

fn command(installation: &Arc<Installation>, of: &str, seconds: u32, folder: &Path) -> Vec<String> {
    let words = ["net", "trace", of, "--capture"].map(str::to_owned).into_iter();
    let rest = [folder.display().to_string(), "--for".into(), format!("{seconds}s")];
    let hosts = installation.fabric().sites.iter().flat_map(|site| ["--also".to_owned(), host_of(&site.name)]);
    words.chain(rest).chain(hosts).collect()
}

fn unix_s(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The files that were written, in order. `zero` is the first step, seconds since 1970.
fn files(folder: &Path, zero: f64) -> Result<Vec<CaptureFile>> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).with_context(|| format!("there is no {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let named = name.strip_prefix("wire-").and_then(|rest| rest.split_once('-'));
        let named = named.and_then(|(wire, host)| Some((wire.parse().ok()?, host.to_owned())));
        let (wire, host) = named.with_context(|| format!("{} is no recording of a wire's", path.display()))?;
        let frames = read_pcap(&std::fs::read(&path)?).with_context(|| path.display().to_string())?;
        let seen = frames.first().zip(frames.last());
        found.push(CaptureFile {
            file: path.display().to_string(),
            wire,
            host,
            frames: frames.len() as u64,
            bytes: frames.iter().map(|frame| u64::from(frame.length)).sum(),
            seen_s: seen.map(|(first, last)| [first.at_unix_s - zero, last.at_unix_s - zero]),
        });
    }
    found.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(found)
}

/// A frame of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// When it passed, seconds since 1970.
    pub at_unix_s: f64,
    /// How long it was, bytes.
    pub length: u32,
    /// Its beginning.
    pub head: Vec<u8>,
}

/// The frames of a pcap file (version 2.4, Ethernet, microseconds, the writer's byte order little-endian).
///
/// # Errors
/// When it is none, or is cut short.
pub fn read_pcap(file: &[u8]) -> Result<Vec<Frame>> {
    let word = |at: usize| -> Result<u32> {
        let bytes = file.get(at..at + 4).context("the file is cut short")?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    };
    if word(0)? != 0xa1b2_c3d4 || word(4)? != 2 | 4 << 16 || word(20)? != 1 {
        bail!("that is no pcap file of Ethernet frames");
    }
    let (mut at, mut frames) = (24, vec![]);
    while at < file.len() {
        let (seconds, us, kept, length) = (word(at)?, word(at + 4)?, word(at + 8)? as usize, word(at + 12)?);
        let head = file.get(at + 16..at + 16 + kept).context("the file is cut short")?.to_vec();
        frames.push(Frame { at_unix_s: f64::from(seconds) + f64::from(us) / 1e6, length, head });
        at += 16 + kept;
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let words = [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 1 << 18, 1, 5, 250_000, 3, 1500];
        words.into_iter().flat_map(u32::to_le_bytes).chain([1, 2, 3]).collect()
    }

    #[test]
    fn a_recording_is_read_and_what_is_none_or_is_cut_short_is_refused() {
        let frames = read_pcap(&file()).unwrap();
        assert_eq!(frames, [Frame { at_unix_s: 5.25, length: 1500, head: vec![1, 2, 3] }]);
        for length in (0..24).chain(25..file().len()) {
            assert!(read_pcap(&file()[..length]).is_err(), "{length} bytes");
        }
        assert_eq!(read_pcap(&file()[..24]).unwrap(), []);
        let mut other = file();
        other[0] = 0;
        assert!(read_pcap(&other).is_err());
    }

    #[test]
    fn files_are_told_by_wire_and_host_with_times_from_the_first_step() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("wire-7-host-a-b.pcap"), file()).unwrap();
        let found = files(folder.path(), 5.0).unwrap();
        assert_eq!((found[0].wire, found[0].host.as_str(), found[0].frames, found[0].bytes), (7, "host-a-b", 1, 1500));
        assert_eq!(found[0].seen_s, Some([0.25, 0.25]));
        std::fs::write(folder.path().join("other.pcap"), file()).unwrap();
        assert!(files(folder.path(), 5.0).is_err());
    }
}
