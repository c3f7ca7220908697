//! What a sender and a receiver of named blocks say to each other.

use crate::{MIB, Target};
use godwit_content::{BLOCK, Block, Key, Sender, Store, reply, take};
use godwit_units::Bytes;

fn key() -> Key {
    Key::new([7; 32])
}

fn block(n: u8) -> Block {
    std::array::from_fn(|i| (i as u8).wrapping_mul(n) ^ n)
}

fn store() -> Store {
    let mut store = Store::new(key(), Bytes::kib(64));
    (1..8).for_each(|n| store.keep(&block(n)));
    store
}

/// A sender that has heard of what the receiver holds.
fn sender() -> Sender {
    let mut sender = Sender::new(Bytes::kib(16));
    for greeting in store().dictionary().greetings(100) {
        sender.greet(&greeting).expect("the receiver keeps to the protocol");
    }
    sender
}

/// A receiver's reading of frames; what it has taken is what a frame's length allows, and blocks are what they are named.
pub const FRAME: Target = Target {
    name: "content-frame",
    corpus: || {
        let blocks =
            |ns: &[u8]| ns.iter().flat_map(|n| if *n == 0 { [0; BLOCK] } else { block(*n) }).collect::<Vec<_>>();
        let all = [&[1, 2, 3][..], &[0, 0, 1, 0], &[20, 1, 21], &[5; 64]].map(|ns| sender().name(0, &blocks(ns)));
        all.map(|frame| frame.expect("a block of it is known")).into()
    },
    run: |input| {
        let store = store();
        let Ok(taken) = take(input, &key(), &store) else { return };
        let present: usize = taken.present.iter().map(|(_, run)| run.len() / BLOCK).sum();
        assert_eq!(present + taken.missing.len(), taken.blocks, "a block is neither here nor missing");
        assert!(reply(&taken.missing).len() <= 2 * taken.blocks);
    },
    bound: |length| 2 * MIB + 4 * length,
};

/// A sender's reading of greetings (each with its length, in two bytes, before it) and of a reply.
pub const REPLY: Target = Target {
    name: "content-reply",
    corpus: || {
        let greetings = store().dictionary().greetings(100);
        let framed = |m: &Vec<u8>| [&(m.len() as u16).to_le_bytes()[..], m].concat();
        let all: Vec<u8> = greetings.iter().flat_map(framed).collect();
        vec![[&all[..], &[0, 0], &reply(&[0, 2])].concat(), [&all[..], &[0, 0]].concat()]
    },
    run: |input| {
        let (mut sender, mut rest) = (Sender::new(Bytes::kib(16)), input);
        while let Some((length, behind)) = rest.split_first_chunk::<2>() {
            let (message, behind) = behind.split_at(usize::from(u16::from_le_bytes(*length)).min(behind.len()));
            rest = behind;
            if message.is_empty() || sender.greet(message).is_err() {
                break;
            }
        }
        let blocks: Vec<u8> = (1..6).flat_map(block).collect();
        let named = sender.name(100, &blocks);
        if let Ok(again) = sender.handle(rest) {
            assert!(named.is_some(), "a reply to nothing");
            assert!(again.is_sorted() && again.iter().all(|at| (100..105).contains(at)), "{again:?}");
        }
    },
    bound: |length| 2 * MIB + 4 * length,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_understood() {
        let taken: Vec<_> = (FRAME.corpus)().iter().map(|f| take(f, &key(), &store()).expect("is a frame")).collect();
        assert!(taken.iter().all(|t| t.missing.is_empty()));
        assert_eq!(taken.iter().map(|t| t.blocks).collect::<Vec<_>>(), [3, 4, 3, 64]);
    }
}
