//! How long a guest stands still for what is told of its disk, by how much of the disk follows it: `cargo run --release --example last_word [FOLDER]`.
//!
//! Volumes that were written whole, as zeroes, which take no room on the disk and as many stamps as anything.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::fet::{Source, State, Target};
use godwit_volume::{BLOCK, Holder, Replica};
use std::time::Instant;

const GIB: u64 = 1 << 30;

fn main() {
    let parent = std::env::args().nth(1).unwrap_or_else(|| "/var/tmp".into());
    println!("{:>6} {:>12} {:>12} {:>12}", "GiB", "told in s", "stop, ms", "absent, GiB");
    for gib in [1, 16, 128] {
        let folder = tempfile::tempdir_in(&parent).unwrap();
        let [from, to] = ["from", "to"]
            .map(|name| Replica::create(&folder.path().join(name), VolumeId(1), Bytes(gib * GIB)).unwrap());
        from.become_primary(Lineage::FIRST, Generation(1)).unwrap();
        for piece in 0..gib * 16 {
            from.zero(piece * (GIB / 16), GIB / 16).unwrap();
        }
        from.commit().unwrap();
        let began = Instant::now();
        let (mut target, first) = Target::new(&to).unwrap();
        let mut source = Source::new(Holder("from".into()), Lineage::FIRST, &[]);
        first.all(&to).unwrap().iter().for_each(|message| source.handle(message, &from).unwrap());
        let mut pump = |source: &mut Source, until: &dyn Fn(&Source) -> bool| {
            while !until(source) {
                for message in source.poll(&from).unwrap() {
                    if let Some(answer) = target.handle(&message, &to).unwrap() {
                        source.handle(&answer, &from).unwrap();
                    }
                }
            }
        };
        pump(&mut source, &|source| source.is_level());
        let told = began.elapsed();
        // What a guest has written since.
        for block in 0..100 {
            let written = from.write(block * (gib * GIB / 100) / BLOCK * BLOCK, &[7; BLOCK as usize]).unwrap();
            source.guest_wrote(written.blocks, &from);
        }
        let began = Instant::now();
        from.freeze();
        source.stop(&from).unwrap();
        pump(&mut source, &|source| source.state() == State::Complete);
        let stop = began.elapsed();
        to.become_primary(Lineage::FIRST, Generation(2)).unwrap();
        let absent = to.absent().0 / GIB;
        println!("{gib:>6} {:>12.2} {:>12.1} {absent:>12}", told.as_secs_f64(), stop.as_secs_f64() * 1e3);
    }
}
