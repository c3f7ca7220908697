//! First seeds.
use godwit_sim::{Rules, run};
fn main() {
    let n: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1000);
    let mut all: Vec<(String, Rules)> = vec![];
    for g in godwit_handoff::Guard::ALL { all.push((format!("{g:?}"), godwit_handoff::Guards::without(g).into())); }
    for g in godwit_volume::Guard::ALL { all.push((format!("V{g:?}"), godwit_volume::Guards::without(g).into())); }
    for (name, rules) in all {
        let found = (0..n).find_map(|seed| run(seed, rules).err());
        match found {
            Some(f) => println!("{name} {} {}", f.seed, format!("{:?}", f.violation).chars().take(80).collect::<String>()),
            None => println!("{name} NONE"),
        }
    }
}
