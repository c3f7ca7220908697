//! Violations of many seeds, by kind: to see what a change of the world did.
use godwit_sim::{Rules, run};
use std::collections::BTreeMap;
fn main() {
    let n: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1000);
    let mut kinds: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let start = std::time::Instant::now();
    let mut events = 0;
    for seed in 0..n {
        match run(seed, Rules::ALL) {
            Ok(e) => events += e,
            Err(f) => {
                let kind: String = format!("{:?}", f.violation).chars().take(60).collect();
                let kind = kind.split(|c: char| c.is_ascii_digit()).next().unwrap_or("").to_owned();
                kinds.entry(kind).or_insert((0, seed)).0 += 1;
            }
        }
    }
    println!("{kinds:#?} {events} events {:?}", start.elapsed());
}
