//! How a source gets its guest back after its post-copy has begun.
//!
//! QEMU 7.2 has no command for it. What looks like one, `migrate_cancel`, is a race: it shuts the migration's socket down before it marks
//! the migration as given up. Where the migrating thread writes in between, it takes that for a cut and waits for another stream; it is then
//! marked as given up, and neither ends nor can be resumed. One that waits for another stream already is spoilt by it for certain.
//!
//! What it does have is an end. A post-copy whose destination says that it lacks no page, and that all is well, ends as it should: in
//! `postmigrate`, from which `cont` goes on with the guest. It has all of its memory, since a source drops nothing that it sends. So:
//!
//! 1. **`migrate-pause`** breaks the stream off, whoever holds its other end.
//! 2. **`migrate` with `resume`** gives it another: a pair of sockets, whose other end is here.
//! 3. **We are the destination** ([`LacksNothing`]): each RECV_BITMAP is answered with all ones, RESUME with its acknowledgement, and the end
//!    of the stream with SHUT.
//!
//! Two things have no way back in QEMU 7.2. *A stream that breaks off after the last page*: the migrating thread waits for the one that reads
//! the return path, and that one for another stream, which only the first could take. So nobody may let the last page go before the guest
//! has gone for good ([`Qemu::follow`]). *A stream that breaks off between `resume` and its acknowledgement*: here some milliseconds, in which
//! this process would have to die.

use crate::error::{VmmError, io_error};
use crate::qemu::{MigrationStatus, Qemu};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long all of it may take, tries included.
const GIVE_UP: Duration = Duration::from_secs(20);
/// How long a stream that has just broken off may take to be seen as such. `migrate-pause` must not meet QEMU while it lets go of one.
const BREAKS_OFF: Duration = Duration::from_millis(500);
/// How long QEMU may take to say what comes next.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Between RESUME and its answer: QEMU first begins to wait for that. Else it would count one answer more than questions, for ever.
const SETTLES: Duration = Duration::from_millis(50);
/// How the descriptor is called by which QEMU resumes.
const BACK: &str = "godwit-back";

impl Qemu {
    /// Source: ends whatever migration there is, so that `cont` goes on with the guest. Nothing of its memory is lost.
    ///
    /// # Errors
    /// [`VmmError::Stuck`] where QEMU cannot; else when its monitor does not answer.
    pub fn go_back(&self) -> Result<(), VmmError> {
        let began = Instant::now();
        loop {
            let breaks_off = began.elapsed() < BREAKS_OFF;
            match self.migration()?.status {
                MigrationStatus::None
                | MigrationStatus::Completed
                | MigrationStatus::Failed
                | MigrationStatus::Cancelled => return Ok(()),
                MigrationStatus::Active | MigrationStatus::Postcopy if breaks_off => {}
                MigrationStatus::Active => drop(self.execute("migrate_cancel", Value::Null)?),
                // It refuses where it is about to be resumed.
                MigrationStatus::Postcopy => drop(self.execute("migrate-pause", Value::Null)),
                MigrationStatus::Paused => {
                    if let Err(error) = self.end_here() {
                        tracing::warn!(pid = self.pid(), %error, "QEMU does not go back yet");
                    }
                }
            }
            if began.elapsed() > GIVE_UP {
                return Err(VmmError::Stuck);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Resumes a post-copy that is paused into a socket of our own, and brings it to its end there.
    fn end_here(&self) -> Result<(), VmmError> {
        let failed = || io_error("go back by", Path::new("a socket to QEMU"));
        let mut destination = LacksNothing::new(self.blocks()?);
        let (mut ours, theirs) = UnixStream::pair().map_err(failed())?;
        let bounded = ours.set_read_timeout(Some(ANSWER)).and_then(|()| ours.set_write_timeout(Some(ANSWER)));
        bounded.map_err(failed())?;
        self.pass(BACK, theirs.as_fd())?;
        drop(theirs);
        self.execute("migrate", json!({"uri": format!("fd:{BACK}"), "resume": true}))?;
        let mut buffer = [0; 4096];
        while !destination.has_ended() {
            let n = ours.read(&mut buffer).map_err(failed())?;
            if n == 0 {
                return Err(VmmError::State { what: "go back", state: "closing its stream".into() });
            }
            destination.push(&buffer[..n]);
            while let Some(answer) = destination.poll()? {
                if answer == RESUME_ACK {
                    std::thread::sleep(SETTLES);
                }
                ours.write_all(&answer).map_err(failed())?;
            }
        }
        let deadline = Instant::now() + ANSWER;
        while self.migration()?.status == MigrationStatus::Postcopy && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The blocks of its memory, and how much of each is used, in bytes.
    fn blocks(&self) -> Result<HashMap<String, u64>, VmmError> {
        let table = self.execute("human-monitor-command", json!({"command-line": "info ramblock"}))?;
        let found = used(table.as_str().unwrap_or_default());
        if found.is_empty() {
            return Err(VmmError::Answer { command: "info ramblock", missing: "blocks" });
        }
        Ok(found)
    }
}

/// Reads `info ramblock`: name, page size (`4 KiB`), offset, used, total, address.
fn used(table: &str) -> HashMap<String, u64> {
    let line = |line: &str| {
        let name = line.split_whitespace().next()?;
        let mut numbers = line.split_whitespace().filter_map(|word| word.strip_prefix("0x"));
        Some((name.to_owned(), u64::from_str_radix(numbers.nth(1)?, 16).ok()?))
    };
    table.lines().filter_map(line).collect()
}

/// QEMU's stream: a command; its kinds.
const COMMAND: u8 = 8;
const RESUME: u16 = 9;
const RECV_BITMAP: u16 = 10;
/// QEMU's stream: a section's end, and all that comes of one that has nothing to say: identity, EOS, footer, and the stream's end.
const SECTION_END: u8 = 3;
const REST: usize = 19;
/// The return path's messages.
const RECEIVED_BITMAP: u16 = 5;
const BITMAP_ENDS: u64 = 0x0123_4567_89ab_cdef;
const RESUME_ACK: [u8; 8] = [0, 6, 0, 4, 0, 0, 0, 1];
const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
/// Of the guests that run here.
const PAGE: u64 = 4096;

/// A destination of a resumed post-copy that has every page already. Bytes in, answers out.
struct LacksNothing {
    /// How many bytes of each block are used.
    blocks: HashMap<String, u64>,
    said: Vec<u8>,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It asks what has come.
    Asks,
    /// It was told to go on, and comes to its end.
    GoesOn,
    /// It was told that all is well.
    Ended,
}

impl LacksNothing {
    fn new(blocks: HashMap<String, u64>) -> Self {
        Self { blocks, said: vec![], stage: Stage::Asks }
    }

    fn has_ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// Takes what QEMU says, cut anywhere. To be polled dry after each.
    fn push(&mut self, bytes: &[u8]) {
        self.said.extend_from_slice(bytes);
    }

    /// The next answer, if one is due.
    fn poll(&mut self) -> Result<Option<Vec<u8>>, VmmError> {
        match (self.stage, self.said.first()) {
            (Stage::Asks, Some(&COMMAND)) => self.command(),
            (Stage::GoesOn, Some(&SECTION_END)) if self.said.len() < REST => Ok(None),
            (Stage::GoesOn, Some(&SECTION_END)) if self.said.len() == REST && self.said.ends_with(&[0]) => {
                self.stage = Stage::Ended;
                Ok(Some(SHUT.to_vec()))
            }
            (Stage::Ended, _) | (_, None) => Ok(None),
            _ => Err(self.nonsense()),
        }
    }

    fn command(&mut self) -> Result<Option<Vec<u8>>, VmmError> {
        let Some(&[_, k0, k1, l0, l1]) = self.said.first_chunk() else { return Ok(None) };
        let (kind, len) = (u16::from_be_bytes([k0, k1]), usize::from(u16::from_be_bytes([l0, l1])));
        let Some(payload) = self.said.get(5..5 + len) else { return Ok(None) };
        let answer = match kind {
            RESUME => {
                self.stage = Stage::GoesOn;
                RESUME_ACK.to_vec()
            }
            RECV_BITMAP => {
                let name = payload.get(1..).and_then(|name| std::str::from_utf8(name).ok());
                let used = name.and_then(|name| self.blocks.get(name)).ok_or_else(|| self.nonsense())?;
                all_of(payload, *used)
            }
            _ => return Err(self.nonsense()),
        };
        self.said.drain(..5 + len);
        Ok(Some(answer))
    }

    fn nonsense(&self) -> VmmError {
        let said = &self.said[..self.said.len().min(32)];
        VmmError::State { what: "go back", state: format!("saying {said:02x?}") }
    }
}

/// Every page of a block has come. `name`: its length in front.
fn all_of(name: &[u8], used: u64) -> Vec<u8> {
    let bytes = used.div_ceil(PAGE).div_ceil(8).next_multiple_of(8);
    let mut out = RECEIVED_BITMAP.to_be_bytes().to_vec();
    out.extend((name.len() as u16).to_be_bytes());
    out.extend(name);
    out.extend(bytes.to_be_bytes());
    out.resize(out.len() + bytes as usize, 0xff);
    out.extend(BITMAP_ENDS.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
                 pc.ram    4 KiB  0x0000000000000000 0x0000000004002000 0x0000000004002000 0x00007f2c33e00000  rw\n\
   /rom@etc/acpi/tables    4 KiB  0x0000000004100000 0x0000000000021000 0x0000000000200000 0x00007f2c32000000  ro\n";

    fn told(said: &[u8], cut: usize) -> Result<Vec<Vec<u8>>, VmmError> {
        let mut it = LacksNothing::new(used(TABLE));
        let mut answers = vec![];
        for piece in said.chunks(cut) {
            it.push(piece);
            while let Some(answer) = it.poll()? {
                answers.push(answer);
            }
        }
        assert_eq!(it.has_ended(), answers.last().is_some_and(|last| *last == SHUT));
        Ok(answers)
    }

    fn asks_for(name: &str) -> Vec<u8> {
        let len = name.len() as u8;
        [&[8, 0, 10, 0, len + 1, len], name.as_bytes()].concat()
    }

    #[test]
    fn the_table_of_blocks_is_read_by_what_is_used_of_each() {
        let blocks = used(TABLE);
        assert_eq!(blocks.get("pc.ram"), Some(&0x0400_2000));
        assert_eq!(blocks.get("/rom@etc/acpi/tables"), Some(&0x2_1000));
        assert_eq!(blocks.len(), 2);
    }

    #[test]
    fn who_lacks_nothing_answers_each_question_and_ends_when_qemu_has() {
        let resume = [8, 0, 9, 0, 0];
        let end = [&[3, 0, 0, 0, 2][..], &16u64.to_be_bytes(), &[0x7e, 0, 0, 0, 2, 0]].concat();
        let said = [&asks_for("pc.ram")[..], &asks_for("/rom@etc/acpi/tables"), &resume, &end].concat();
        for cut in 1..said.len() {
            let answers = told(&said, cut).unwrap();
            assert_eq!(answers.len(), 4);
            // 0x4002 pages: as many bits, in words of eight bytes.
            let bitmap = &answers[0][4 + 7..];
            assert_eq!(answers[0][..4], [0, 5, 0, 7]);
            assert_eq!(bitmap[..8], 0x808u64.to_be_bytes());
            assert_eq!(bitmap.len(), 8 + 0x808 + 8);
            assert!(bitmap[8..8 + 0x808].iter().all(|byte| *byte == 0xff));
            assert_eq!(bitmap[8 + 0x808..], BITMAP_ENDS.to_be_bytes());
            assert_eq!(answers[2..], [RESUME_ACK.to_vec(), SHUT.to_vec()]);
        }
    }

    #[test]
    fn a_block_that_is_not_there_and_a_page_that_nobody_lacks_are_errors() {
        assert!(told(&asks_for("pc.rom"), 99).is_err());
        assert!(told(&[8, 0, 9, 0, 0, 2, 0, 0, 0, 2], 99).is_err());
        assert!(told(&[8, 0, 7, 0, 0], 99).is_err());
    }
}
