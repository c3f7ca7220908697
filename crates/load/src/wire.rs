//! Lines of JSON, bounded before believed.
//!
//! A peer that sends no newline must not make us buffer without end: [`read_line`] stops after
//! [`MAX_LINE_BYTES`] whatever arrives. After an oversize line the connection has to be closed, since what follows
//! is the middle of a line.

use std::io::{self, BufRead, Read, Write};

use serde::{Serialize, de::DeserializeOwned};

use crate::protocol::{MAX_LINE_BYTES, MAX_TEXT_BYTES, Refusal, Reply};

/// Why a line could not be read, understood or written.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection failed.
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    /// More bytes than a line may have, and no newline among them.
    #[error("line is longer than {MAX_LINE_BYTES} bytes; send one JSON object per line, nothing larger")]
    TooLong,
    /// The connection ended within a line.
    #[error("connection ended in the middle of a line, after {0} bytes of it")]
    Cut(usize),
    /// Not the JSON that was expected here.
    #[error("line is not a message of this protocol: {0}")]
    Malformed(serde_json::Error),
}

/// Reads one line into `line` (replaced; without its newline). `false` when the peer closed between lines.
///
/// # Errors
/// Those of the connection, an oversize line, a line cut off by the end.
pub fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool, WireError> {
    line.clear();
    let read = reader.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', line)?;
    match line.last() {
        None => Ok(false),
        Some(b'\n') => {
            line.pop();
            Ok(true)
        }
        Some(_) if read == MAX_LINE_BYTES => Err(WireError::TooLong),
        Some(_) => Err(WireError::Cut(read)),
    }
}

/// Understands one line.
///
/// # Errors
/// [`WireError::Malformed`], [`WireError::TooLong`].
pub fn decode<T: DeserializeOwned>(line: &[u8]) -> Result<T, WireError> {
    if line.len() >= MAX_LINE_BYTES {
        return Err(WireError::TooLong);
    }
    serde_json::from_slice(line).map_err(WireError::Malformed)
}

/// Writes one message as one line, in one write.
///
/// # Errors
/// Those of the connection; [`WireError::TooLong`] for a message that the peer would refuse.
pub fn write_line<T: Serialize>(writer: &mut impl Write, message: &T) -> Result<(), WireError> {
    let mut line = serde_json::to_vec(message).map_err(WireError::Malformed)?;
    line.push(b'\n');
    if line.len() > MAX_LINE_BYTES {
        return Err(WireError::TooLong);
    }
    writer.write_all(&line)?;
    Ok(writer.flush()?)
}

/// A refusal that fits into a line, whatever the error behind it says.
pub fn refuse(why: impl std::fmt::Display) -> Reply {
    Reply::Error(refusal(why))
}

/// See [`refuse`].
pub fn refusal(why: impl std::fmt::Display) -> Refusal {
    Refusal { message: bounded(why.to_string()) }
}

/// Cuts a text to [`MAX_TEXT_BYTES`].
pub fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let fits = |&at: &usize| text.is_char_boundary(at);
        let end = (0..=MAX_TEXT_BYTES - '…'.len_utf8()).rev().find(fits).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{Answer, Request};
    use crate::protocol::{BadPage, BadRecord, CheckReport, DiskCheck, MAX_LISTED, MemoryCheck, PagePlace, Problem};

    #[test]
    fn a_line_without_end_is_refused_after_the_limit() {
        let endless = vec![b'x'; 4 * MAX_LINE_BYTES];
        let mut line = Vec::new();
        assert!(matches!(read_line(&mut &endless[..], &mut line), Err(WireError::TooLong)));
        assert!(line.len() <= MAX_LINE_BYTES);
    }

    #[test]
    fn the_end_between_lines_differs_from_the_end_within_one() {
        let mut line = Vec::new();
        let mut input = &b"{}\nrest"[..];
        assert!(read_line(&mut input, &mut line).unwrap());
        assert_eq!(line, b"{}");
        assert!(matches!(read_line(&mut input, &mut line), Err(WireError::Cut(4))));
        assert!(!read_line(&mut input, &mut line).unwrap());
    }

    #[test]
    fn the_largest_check_report_fits_into_a_line() {
        // Control characters are the worst case: JSON writes six bytes for each, but descriptions hold none.
        let text = bounded("\"".repeat(4 * MAX_TEXT_BYTES));
        let page = BadPage {
            kind: Problem::Foreign,
            place: PagePlace::Arena { load: usize::MAX },
            page: u64::MAX,
            expected: text.clone(),
            found: text.clone(),
        };
        let record =
            BadRecord { kind: Problem::Foreign, disk: usize::MAX, slot: u64::MAX, expected: text.clone(), found: text };
        let report = CheckReport {
            memory: MemoryCheck { bad: vec![page; MAX_LISTED], ..MemoryCheck::default() },
            disk: DiskCheck { bad: vec![record; MAX_LISTED], ..DiskCheck::default() },
            work: vec![],
            seconds: 1.0 / 3.0,
        };
        let mut out = Vec::new();
        let reply = Reply::Ok(Answer::Check(Box::new(report)));
        write_line(&mut out, &reply).unwrap();
        out.pop();
        assert_eq!(decode::<Reply>(&out).unwrap(), reply);
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let cut = bounded("é".repeat(MAX_TEXT_BYTES));
        assert!(cut.len() <= MAX_TEXT_BYTES && cut.ends_with('…'));
        assert_eq!(bounded("short".into()), "short");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let mut line = Vec::new();
            let mut input = &bytes[..];
            while let Ok(true) = read_line(&mut input, &mut line) {
                let _ = decode::<Request>(&line);
                let _ = decode::<Reply>(&line);
            }
        }

        #[test]
        fn almost_right_requests_never_panic(
            request in "(hello|warm|start|status|check|stop|corrupt|x)",
            key in "(loads|seed|what|free_percent_max|y)",
            value in "(-1|1|1e99|null|\\[\\]|\"\"|\\{\\}|\\[\\{\"kind\":\"(memory|disk|echo)\"\\}\\])",
        ) {
            let _ = decode::<Request>(format!("{{\"request\":\"{request}\",\"{key}\":{value}}}").as_bytes());
        }
    }
}
