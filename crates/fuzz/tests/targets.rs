//! Each target, for a few seconds with the same inputs each time; `make soak` gives it minutes and another seed.
//!
//! `GODWIT_FUZZ_SECONDS` is how long each target runs, `GODWIT_FUZZ_SEED` which inputs it gets, `GODWIT_FUZZ_TARGET` the only one
//! that runs, `GODWIT_FUZZ_INPUT` the only input of the seed: a failure names all of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_fuzz::mutate::{self, Dice};
use godwit_fuzz::{Meter, TARGETS, Target, measured};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

#[global_allocator]
static METER: Meter = Meter;

/// No input takes so long: one that does is a loop, or work out of all proportion to its length.
const LONGEST: Duration = Duration::from_secs(20);
/// How many inputs each target gets at the least, however slow the machine.
const LEAST: u64 = 100;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// One input. Its figures, or what is wrong.
fn feed(target: &Target, input: &[u8]) -> Result<usize, String> {
    let begin = Instant::now();
    let taken = catch_unwind(AssertUnwindSafe(|| measured(|| (target.run)(input)))).map_err(|_| "panics".to_owned())?;
    let bound = (target.bound)(input.len());
    if taken > bound {
        return Err(format!("takes {taken} bytes of memory for {} bytes of input; {bound} are its bound", input.len()));
    }
    if begin.elapsed() > LONGEST {
        return Err(format!("takes {:?} for {} bytes of input", begin.elapsed(), input.len()));
    }
    Ok(taken)
}

#[test]
fn no_input_makes_a_reader_panic_loop_or_take_more_memory_than_its_bound() {
    let seed = number("GODWIT_FUZZ_SEED").unwrap_or(1);
    let time = Duration::from_secs(number("GODWIT_FUZZ_SECONDS").unwrap_or(1));
    let only = std::env::var("GODWIT_FUZZ_TARGET").ok();
    let mut failures = vec![];
    for target in TARGETS.iter().filter(|t| only.as_deref().is_none_or(|name| name == t.name)) {
        let corpus = (target.corpus)();
        let begin = Instant::now();
        let (mut n, mut most) = (number("GODWIT_FUZZ_INPUT").unwrap_or(0), 0);
        let last = number("GODWIT_FUZZ_INPUT").map(|n| n + 1);
        let first = n;
        while last.map_or(n < LEAST || begin.elapsed() < time, |last| n < last) {
            let input = mutate::input(&corpus, &mut Dice::new(seed, n));
            match feed(target, &input) {
                Ok(taken) => most = most.max(taken),
                Err(what) => {
                    failures.push(format!(
                        "{} {what}: GODWIT_FUZZ_TARGET={} GODWIT_FUZZ_SEED={seed} GODWIT_FUZZ_INPUT={n} cargo test \
                         -p godwit-fuzz --test targets",
                        target.name, target.name
                    ));
                    break;
                }
            }
            n += 1;
        }
        println!("fuzz: {}: {} inputs, at most {} KiB of memory", target.name, n - first, most >> 10);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn inputs_that_are_in_order_are_understood_so_that_mutations_begin_near_the_truth() {
    for target in TARGETS {
        for input in (target.corpus)() {
            feed(target, &input).unwrap_or_else(|what| panic!("{}: an input of its corpus {what}", target.name));
        }
    }
}

#[test]
fn a_reader_that_believes_a_length_is_found_out_by_the_meter() {
    let believes = Target {
        name: "believes",
        corpus: Vec::new,
        run: |input| drop(std::hint::black_box(Vec::<u8>::with_capacity(usize::from(input[0]) << 20))),
        bound: |_| 1 << 20,
    };
    assert!(feed(&believes, &[200]).unwrap_err().contains("of memory"));
    feed(&believes, &[0]).unwrap();
}

#[test]
fn a_dictionary_takes_the_memory_that_it_was_given_and_no_more_however_much_it_is_told() {
    use godwit_content::{BLOCK, Dictionary, Key, Place, Sender, Store};
    use godwit_units::Bytes;
    let contents = |n: u32| {
        let mut block = [1; BLOCK];
        block[..4].copy_from_slice(&n.to_le_bytes());
        block
    };
    let given = Bytes::kib(64);
    let allowed = |what: &str, taken: usize| {
        assert!((given.0 as usize / 2..=given.0 as usize + 256).contains(&taken), "{what} takes {taken} bytes");
    };
    // 4096 entries of 16 bytes, 8192 of 8.
    let mut dictionary = None;
    let taken = measured(|| {
        let mut new = Dictionary::new(Key::new([1; 32]), given);
        (0..20_000).for_each(|n| new.learn(&contents(n), Place(u64::from(n))));
        dictionary = Some(new);
    });
    let dictionary = dictionary.unwrap();
    allowed("a dictionary", taken);
    assert_eq!((dictionary.places(), Dictionary::COST), (4096, 16));
    assert!(dictionary.len() > 4000, "{}", dictionary.len());
    let greetings = dictionary.greetings(8192);
    let mut sender = Sender::new(given);
    let taken = measured(|| {
        sender.greet(&greetings[0]).unwrap();
        for n in 0..20_000 {
            sender.name(0, &contents(n));
        }
    });
    // And while one block is looked at, that block's frame.
    assert!(taken <= given.0 as usize + 2 * BLOCK, "a sender takes {taken} bytes");
    let taken = measured(|| {
        let mut store = Store::new(Key::new([1; 32]), Bytes::mib(1));
        (0..2000).for_each(|n| store.keep(&contents(n)));
    });
    // What it grows by is there beside what it was, for as long as it takes to copy.
    assert!(taken <= 2 << 20, "a store of 1 MiB takes {taken} bytes");
}
