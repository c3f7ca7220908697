//! A mirror's messages once they are unpacked: blocks for a replica, from another node; and that node's answers.

use crate::{MIB, Target};
use godwit_content::Key;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::mirror::{Source, Target as Receiver};
use godwit_volume::{BLOCK, Description, Library, Media, Medium, REGION, Replica};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A volume's size: large, so that what takes memory for all of it is seen.
const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;

/// What a replica lies on: memory, for what was written.
#[derive(Clone, Debug, Default)]
struct Sparse(Arc<Mutex<BTreeMap<u64, Vec<u8>>>>);

impl Sparse {
    fn pages(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with each part of a range that lies in one page.
    fn parts(at: u64, length: usize, mut with: impl FnMut(u64, usize, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < length {
            let (page, within) = ((at + done as u64) / PAGE, ((at + done as u64) % PAGE) as usize);
            let count = (PAGE as usize - within).min(length - done);
            with(page, within, done..done + count);
            done += count;
        }
    }
}

impl Medium for Sparse {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let pages = self.pages();
        Self::parts(at, into.len(), |page, within, part| match pages.get(&page) {
            Some(bytes) => into[part.clone()].copy_from_slice(&bytes[within..within + part.len()]),
            None => into[part].fill(0),
        });
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut pages = self.pages();
        Self::parts(at, from.len(), |page, within, part| {
            let bytes = pages.entry(page).or_insert_with(|| vec![0; PAGE as usize]);
            bytes[within..within + part.len()].copy_from_slice(&from[part]);
        });
        Ok(())
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        let whole = at.div_ceil(PAGE)..(at + length) / PAGE;
        if whole.is_empty() {
            return self.write(at, &vec![0; length as usize]);
        }
        self.pages().retain(|page, _| !whole.contains(page));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        let (mut found, mut next, end) = (vec![], at, at + length);
        for page in self.pages().range(at / PAGE..end.div_ceil(PAGE)).map(|(page, _)| page * PAGE) {
            let (begin, behind) = (page.max(at), (page + PAGE).min(end));
            if begin > next {
                found.push((begin - next, true));
            }
            found.push((behind - begin, false));
            next = behind;
        }
        if next < end {
            found.push((end - next, true));
        }
        Ok(found)
    }

    fn allocated(&self) -> u64 {
        self.pages().len() as u64 * PAGE
    }
}

#[derive(Clone, Debug, Default)]
struct Words(Arc<Mutex<Vec<u8>>>);

impl Description for Words {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bytes.to_vec();
        Ok(())
    }
}

pub(crate) fn replica() -> Replica {
    let words = Words::default();
    Replica::format(&words, VolumeId(1), Bytes(SIZE)).expect("the size is whole blocks");
    let medium = || Box::new(Sparse::default());
    let media = Media {
        data: medium(),
        stamps: medium(),
        hot: medium(),
        words: medium(),
        power: String::new(),
        description: Box::new(words),
        region: REGION,
    };
    Replica::open_on(Path::new("fuzz"), media).expect("it was formatted").0
}

/// A replica that a guest has written to.
pub(crate) fn written() -> Replica {
    let replica = replica();
    replica.become_primary(Lineage(0), Generation(1)).expect("it is nobody's");
    for block in [0, 1, 2, 70, 5000, SIZE / BLOCK - 1] {
        replica.write(block * BLOCK, &[7; BLOCK as usize]).expect("memory takes all");
    }
    replica.zero(200 * BLOCK, 100 * BLOCK).expect("memory takes all");
    // Enough that some of it is copied before the last blocks are, by name.
    for block in 1000..1400 {
        replica.write(block * BLOCK, &[block as u8 % 4 + 1; BLOCK as usize]).expect("memory takes all");
    }
    replica
}

/// A target that looks names up.
fn receiver(there: &Replica) -> (Receiver, Vec<Vec<u8>>) {
    let library = Arc::new(Library::new(Key::new([7; 32]), Bytes::kib(64)));
    let (target, has) = Receiver::with_library(there, library).expect("it can be read");
    (target, has.all(there).expect("it can be read"))
}

/// Each message with its length in front.
pub(crate) fn framed(messages: &[Vec<u8>]) -> Vec<u8> {
    messages.iter().flat_map(|m| [&(m.len() as u32).to_le_bytes()[..], m].concat()).collect()
}

pub(crate) fn messages(mut input: &[u8]) -> Vec<&[u8]> {
    let mut found = vec![];
    while let Some((length, rest)) = input.split_first_chunk::<4>() {
        let (message, behind) = rest.split_at((u32::from_le_bytes(*length) as usize).min(rest.len()));
        found.push(message);
        input = behind;
    }
    found
}

/// A mirror from its beginning to its end; what the source and what the target said.
fn exchange() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (here, there) = (written(), replica());
    let order: Vec<_> = (0..8).map(|n| n * 5..n * 5 + 2).collect();
    let mut source = Source::with_order(&order);
    let (mut target, mut answers) = receiver(&there);
    let (mut said, mut heard) = (vec![], 0);
    for round in 0..200 {
        for answer in answers.split_off(heard).drain(..).collect::<Vec<_>>() {
            source.handle(&answer, &here).expect("the target keeps to the protocol");
            answers.push(answer);
        }
        heard = answers.len();
        let fresh = source.poll(&here).expect("it can be read");
        for message in &fresh {
            answers.push(target.handle(message, &there).expect("the source keeps to the protocol"));
        }
        said.extend(fresh);
        source.tick(Duration::from_millis(round));
        if round == 50 {
            here.freeze();
        }
        if round > 50 {
            source.stop();
        }
    }
    (said, answers)
}

/// What a target does with the source's words.
pub const TO_TARGET: Target = Target {
    name: "mirror-to-target",
    corpus: || {
        let said = exchange().0;
        // Short ones, too: the head of what carries no data is most of the input then.
        let bare: Vec<_> = said.iter().filter(|message| message.len() < 64).cloned().collect();
        vec![framed(&said), framed(&bare), framed(&bare[..1])]
    },
    run: |input| {
        let there = replica();
        let mut target = receiver(&there).0;
        for message in messages(input) {
            if target.handle(message, &there).is_err() {
                return;
            }
        }
    },
    // A message may touch two regions, whose tables are 16 KiB here and 16 KiB on the medium.
    bound: |length| 2 * MIB + 4 * length + 64 * 1024 * (length / 37),
};

/// What a source does with the target's.
pub const TO_SOURCE: Target = Target {
    name: "mirror-to-source",
    corpus: || vec![framed(&exchange().1)],
    run: |input| {
        let (here, mut source) = (written(), Source::new());
        for message in messages(input) {
            if source.handle(message, &here).is_err() || source.poll(&here).is_err() {
                return;
            }
        }
    },
    // It may be sent some megabytes before it waits for the first answer.
    bound: |length| 24 * MIB + 16 * length,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_a_mirror_from_its_beginning_to_its_end() {
        let (said, answers) = exchange();
        assert!(said.len() > 4 && answers.len() > said.len(), "{} {}", said.len(), answers.len());
        assert!(said.iter().any(|message| message[0] == 9), "nothing went by name");
        assert!(said.iter().any(|message| message[0] == 10), "no order went ahead");
        let there = replica();
        let (mut target, _) = receiver(&there);
        for message in messages(&framed(&said)) {
            target.handle(message, &there).unwrap();
        }
        assert!(target.is_complete());
    }
}
