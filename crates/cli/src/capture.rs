//! Frames of each wire of a trace, recorded on the hosts of its ends, as files that tcpdump and Wireshark read.

use crate::failure::Failure;
use godwit_api::capture::{Capture, CaptureWire, HostCapture};
use godwit_api::{ApiError, Name, PublicClient, hex};
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most wires that are recorded at once: what one host of theirs takes.
const MOST_WIRES: usize = 8;
/// The endpoint of a host that no end came to.
const NONE_CAME: u32 = 0;
/// The longest frame that there is.
const LONGEST_FRAME: u32 = 1 << 18;

/// Records all of these wires at the same time, and at hosts that ends of theirs come to meanwhile; gives the files that were written,
/// none of which was there before.
///
/// # Errors
/// The controller's; that the folder has such files, or cannot be written.
pub async fn record(
    api: &PublicClient,
    wires: &BTreeSet<u32>,
    lasting: Duration,
    also: &[Name],
    folder: &Path,
) -> Result<Vec<PathBuf>, Failure> {
    if wires.len() > MOST_WIRES {
        let message = format!("{} wires are in that trace; at most {MOST_WIRES} are recorded at once", wires.len());
        return Err(Failure::usage(message));
    }
    let failed = |e: std::io::Error| Failure::usage(format!("{}: {e}", folder.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    let for_ms = u64::try_from(lasting.as_millis()).unwrap_or(u64::MAX);
    let mut asking = tokio::task::JoinSet::new();
    for wire in wires.iter().copied() {
        let (api, asked) = (api.clone(), CaptureWire { for_ms, also: also.to_vec() });
        asking.spawn(async move { Ok::<_, ApiError>((wire, api.capture_wire(wire, &asked).await?)) });
    }
    let mut files = vec![];
    while let Some(answer) = asking.join_next().await {
        let (wire, captures) = answer.map_err(|e| Failure::usage(format!("a recording ended in a bug: {e}")))??;
        for HostCapture { host, capture } in captures.into_iter().filter(|there| there.capture.endpoint != NONE_CAME) {
            let path = folder.join(format!("wire-{wire}-{host}.pcap"));
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(|e| {
                    Failure::usage(format!("{}: {e}; name a folder without recordings", path.display()))
                })?;
            file.write_all(&pcap(&capture)).map_err(failed)?;
            if capture.not_kept > 0 {
                eprintln!("{}: {} more frames were not kept", path.display(), capture.not_kept);
            }
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The file: a header, and each frame behind one of its own (pcap, version 2.4, Ethernet, microseconds).
fn pcap(capture: &Capture) -> Vec<u8> {
    let mut out = vec![];
    out.extend(0xa1b2_c3d4_u32.to_le_bytes());
    out.extend(2_u16.to_le_bytes());
    out.extend(4_u16.to_le_bytes());
    for word in [0, 0, LONGEST_FRAME, 1] {
        out.extend(word.to_le_bytes());
    }
    for frame in &capture.frames {
        // What a host says that is no bytes is left out.
        let Some(head) = hex::bytes(&frame.head) else { continue };
        let (seconds, us) = (frame.at_us / 1_000_000, frame.at_us % 1_000_000);
        for word in [seconds as u32, us as u32, head.len() as u32, frame.length.max(head.len() as u32)] {
            out.extend(word.to_le_bytes());
        }
        out.extend(head);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::capture::CapturedFrame;

    #[test]
    fn a_file_has_a_header_and_each_frame_with_its_time_and_both_lengths() {
        let frame = CapturedFrame { at_us: 5_000_007, length: 1500, head: "0102ff".into() };
        let bad = CapturedFrame { head: "zz".into(), ..frame.clone() };
        let file = pcap(&Capture { endpoint: 1, frames: vec![frame, bad], not_kept: 0 });
        assert_eq!(file.len(), 24 + 16 + 3);
        let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(20)), (0xa1b2_c3d4, 1));
        assert_eq!((word(24), word(28), word(32), word(36)), (5, 7, 3, 1500));
        assert_eq!(file[40..], [1, 2, 255]);
    }
}
