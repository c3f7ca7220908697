//! What the four sides of a volume that is handed off before its blocks do with each other's words.

use crate::mirror::{framed, messages, replica, written};
use crate::{MIB, Target};
use godwit_units::Lineage;
use godwit_volume::Library;
use godwit_volume::fetch::{Lane, Requester, Server};
use godwit_volume::{BLOCK, Holder, Replica, fet};
use std::time::Duration;

fn holder() -> Holder {
    Holder("a".into())
}

fn source() -> fet::Source {
    fet::Source::new(holder(), Lineage(0), &[0..3, 200..210])
}

/// What a source says and what its target answers, to the end; the two replicas, the second a shadow of the first.
fn told() -> ([Vec<Vec<u8>>; 2], Replica, Replica) {
    let (here, there) = (written(), replica());
    let (mut source, (mut target, has)) = (source(), fet::Target::new(&there).expect("it can be read"));
    let mut answers = has.all(&there).expect("it can be read");
    for answer in &answers {
        source.handle(answer, &here).expect("the target keeps to the protocol");
    }
    let mut said = vec![];
    for stopped in [false, true] {
        if stopped {
            here.freeze();
            source.stop(&here).expect("memory is durable enough");
        }
        loop {
            let fresh = source.poll(&here).expect("it can be read");
            if fresh.is_empty() && !source.is_comparing() {
                break;
            }
            for message in &fresh {
                let answer = target.handle(message, &there).expect("the source keeps to the protocol");
                answers.extend(answer);
            }
            said.extend(fresh);
        }
    }
    there.become_primary(Lineage(0), godwit_units::Generation(2)).expect("it was told all");
    ([said, answers], here, there)
}

/// A fetch from its beginning to its end; what the owner asked and what the holder answered.
fn fetched() -> [Vec<Vec<u8>>; 2] {
    let (_, here, there) = told();
    let (mut requester, mut server) = (asking(&there), Server::new());
    let (mut asked, mut answered) = (vec![], vec![]);
    loop {
        while let Some(question) = requester.poll(Duration::ZERO, &there).expect("it can be read") {
            server.handle(&question.message).expect("the owner keeps to the protocol");
            asked.push(question.message);
        }
        let Some(answer) = server.poll(&here, &[Lane::Demand, Lane::Fill]).expect("it can be read") else { break };
        requester.handle(&holder(), &answer.message, Duration::ZERO, &there).expect("the holder keeps to it");
        answered.push(answer.message);
    }
    for report in requester.report(&there).expect("it can be read") {
        asked.push(report.message);
    }
    [asked, answered]
}

/// A requester that has asked for two blocks on demand, and may ask for all.
fn asking(there: &Replica) -> Requester {
    let library = Library::new(godwit_content::Key::new([5; 32]), godwit_units::Bytes::kib(64));
    let mut requester = Requester::with_library(vec![0..3, 200..210], there, library.into());
    requester.connected(holder());
    requester.demand(70..72, Duration::ZERO, there).expect("it can be read");
    requester
}

/// What a target does with what it is told.
pub const TELL_TARGET: Target = Target {
    name: "tell-target",
    corpus: || {
        let [said, _] = told().0;
        vec![framed(&said), framed(&said[..1])]
    },
    run: |input| {
        let there = replica();
        let Ok((mut target, _)) = fet::Target::new(&there) else { return };
        for message in messages(input) {
            if target.handle(message, &there).is_err() {
                return;
            }
        }
        let _ = target.order();
    },
    // A run may touch two regions: their stamps and their words, here and on the medium.
    bound: |length| 2 * MIB + 8 * length + 160 * 1024 * (length / 36 + 1),
};

/// What a source does with a target's words.
pub const TELL_SOURCE: Target = Target {
    name: "tell-source",
    corpus: || {
        let [_, answers] = told().0;
        vec![framed(&answers)]
    },
    run: |input| {
        let (here, mut source) = (written(), source());
        for message in messages(input) {
            if source.handle(message, &here).is_err() || source.poll(&here).is_err() {
                return;
            }
        }
    },
    bound: |length| 24 * MIB + 16 * length,
};

/// What a holder does with an owner's questions.
pub const HOLDER: Target = Target {
    name: "fetch-holder",
    corpus: || {
        let [asked, _] = fetched();
        vec![framed(&asked), framed(&asked[..2])]
    },
    run: |input| {
        let (here, mut server) = (written(), Server::new());
        for message in messages(input) {
            if server.handle(message).is_err() {
                return;
            }
            let Ok(answer) = server.poll(&here, &[Lane::Demand, Lane::Fill]) else { return };
            assert!(answer.is_none_or(|a| a.message.len() <= godwit_volume::fetch::MAX_MESSAGE));
        }
    },
    bound: |length| 24 * MIB + 16 * length,
};

/// What an owner does with a holder's answers.
pub const OWNER: Target = Target {
    name: "fetch-owner",
    corpus: || {
        let [_, answered] = fetched();
        vec![framed(&answered), framed(&answered[..1])]
    },
    run: |input| {
        let (_, _, there) = told();
        let mut requester = asking(&there);
        while requester.poll(Duration::ZERO, &there).is_ok_and(|question| question.is_some()) {}
        let absent = there.absent();
        for message in messages(input) {
            match requester.handle(&holder(), message, Duration::ZERO, &there) {
                Ok(_) => while requester.poll(Duration::ZERO, &there).is_ok_and(|question| question.is_some()) {},
                Err(_) => break,
            }
        }
        assert!(there.absent() <= absent && there.absent().0.is_multiple_of(BLOCK));
    },
    bound: |length| 24 * MIB + 16 * length,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_a_hand_off_and_a_fetch_to_their_ends() {
        let ([said, answers], _, there) = told();
        assert!(said.len() > 2 && answers.len() >= 2 && there.absent().0 > 0, "{} {}", said.len(), answers.len());
        let [asked, answered] = fetched();
        assert!(asked.len() > 3 && answered.len() > 3, "{} {}", asked.len(), answered.len());
        let mut requester = asking(&there);
        while requester.poll(Duration::ZERO, &there).unwrap().is_some() {}
        for message in messages(&framed(&answered)) {
            requester.handle(&holder(), message, Duration::ZERO, &there).unwrap();
            while requester.poll(Duration::ZERO, &there).unwrap().is_some() {}
        }
        assert_eq!(there.absent().0, 0);
    }
}
