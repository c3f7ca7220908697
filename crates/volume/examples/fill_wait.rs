//! How long a guest's write waits for a fill whose blocks are found here by name: `cargo run --release -p godwit-volume --example fill_wait`.
//!
//! A guest writes 4 KiB every 200 µs under the lock that its writes take, while 64 MiB arrive by name, all of which another volume of the trust
//! domain has here: in memory, and on a disk. *Under the lock*: names are looked up and learnt while the lock is held. *Outside*: only
//! their taking holds it, as a node does it. The two in turn, several times; compare within a run.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be had is none")]

use godwit_content::Key;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::fetch::{Lane, Requester, Server};
use godwit_volume::{BLOCK, Holder, Library, Replica, fet};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What arrives; the guest writes behind it.
const BLOCKS: u64 = 16 << 10;
const ROUNDS: usize = 15;
const NOW: Duration = Duration::from_secs(100);
const LANES: [Lane; 2] = [Lane::Demand, Lane::Fill];

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    UnderTheLock,
    Outside,
}

fn replica(folder: &Path, name: &str, volume: u64) -> Replica {
    Replica::create(&folder.join(name), VolumeId(volume), Bytes(2 * BLOCKS * BLOCK)).unwrap()
}

/// The same noise in each volume.
fn filled(folder: &Path, name: &str, volume: u64) -> Replica {
    let (replica, mut rng) = (replica(folder, name, volume), SmallRng::seed_from_u64(7));
    replica.become_primary(Lineage(0), Generation(1)).unwrap();
    let mut piece = vec![0; 1 << 20];
    for at in (0..BLOCKS * BLOCK).step_by(piece.len()) {
        rng.fill_bytes(&mut piece);
        replica.write(at, &piece).unwrap();
    }
    replica.commit().unwrap();
    replica
}

fn hand_off(from: &Replica, to: &Replica) {
    to.become_secondary().unwrap();
    let mut source = fet::Source::new(Holder("source".into()), Lineage(0), &[]);
    let (mut target, first) = fet::Target::new(to).unwrap();
    first.all(to).unwrap().iter().for_each(|message| source.handle(message, from).unwrap());
    let mut pump = |source: &mut fet::Source| {
        loop {
            let messages = source.poll(from).unwrap();
            if messages.is_empty() && !source.is_comparing() {
                break;
            }
            for message in messages {
                if let Some(answer) = target.handle(&message, to).unwrap() {
                    source.handle(&answer, from).unwrap();
                }
            }
        }
    };
    pump(&mut source);
    from.freeze();
    source.stop(from).unwrap();
    pump(&mut source);
    to.become_primary(Lineage(0), Generation(2)).unwrap();
}

/// How long each of the guest's writes took, and how long all took to arrive.
fn run(how: How, cold: bool) -> (Vec<Duration>, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let library = Arc::new(Library::new(Key::new([9; 32]), Bytes::mib(16)));
    let neighbour = filled(folder.path(), "neighbour", 2);
    let mut at = 0;
    while let Some((next, _)) = library.look(&neighbour, at, Bytes::mib(1)).unwrap() {
        at = next;
    }
    let from = filled(folder.path(), "from", 1);
    let to = replica(folder.path(), "to", 1);
    hand_off(&from, &to);
    if cold {
        let file = File::open(folder.path().join("neighbour/data")).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
    let order = Mutex::new(());
    let (filled, mut waits) = (AtomicBool::new(false), vec![]);
    let began = Instant::now();
    let mut took = Duration::ZERO;
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let (mut waits, mut rng) = (vec![], SmallRng::seed_from_u64(1));
            while !filled.load(Ordering::Relaxed) {
                let block = rng.random_range(BLOCKS..2 * BLOCKS);
                let asked = Instant::now();
                {
                    let _order = order.lock().unwrap();
                    to.write(block * BLOCK, &[1; BLOCK as usize]).unwrap();
                }
                waits.push(asked.elapsed());
                std::thread::sleep(Duration::from_micros(200));
            }
            waits
        });
        let holder = Holder("source".into());
        let mut requester = Requester::with_library(vec![], &to, library.clone());
        requester.connected(holder.clone());
        let (mut server, opener) = (Server::new(), requester.opener());
        while to.absent() > Bytes(0) {
            while let Some(question) = requester.poll(Duration::ZERO, &to).unwrap() {
                server.handle(&question.message).unwrap();
            }
            let Some(answer) = server.poll(&from, &LANES).unwrap() else { break };
            match how {
                How::UnderTheLock => {
                    let _order = order.lock().unwrap();
                    requester.handle(&holder, &answer.message, NOW, &to).unwrap();
                }
                How::Outside => {
                    let arrival = opener.open(&answer.message, &to).unwrap();
                    {
                        let _order = order.lock().unwrap();
                        requester.take(&holder, &arrival, NOW, &to).unwrap();
                    }
                    arrival.learn();
                }
            }
        }
        took = began.elapsed();
        filled.store(true, Ordering::Relaxed);
        waits = guest.join().unwrap();
        assert!(requester.named().0 > BLOCKS * BLOCK / 2, "most of it is found by name");
    });
    (waits, took)
}

fn main() {
    println!(
        "{:26} {:>8} {:>10} {:>8} {:>8} {:>8} {:>8}",
        "", "writes", "median µs", "mean µs", "90 % µs", "99 % µs", "fill ms"
    );
    for cold in [false, true] {
        let mut all = [(vec![], vec![]), (vec![], vec![])];
        for _ in 0..ROUNDS {
            for (n, how) in [How::UnderTheLock, How::Outside].into_iter().enumerate() {
                let (waits, took) = run(how, cold);
                all[n].0.extend(waits.iter().map(|wait| wait.as_secs_f64() * 1e6));
                all[n].1.push(took.as_secs_f64() * 1e3);
            }
        }
        let mut figures = vec![];
        for ((waits, took), how) in all.iter_mut().zip(["under the lock", "outside"]) {
            waits.sort_by(f64::total_cmp);
            took.sort_by(f64::total_cmp);
            let at = |percent: usize| waits[waits.len() * percent / 100];
            let mean = waits.iter().sum::<f64>() / waits.len() as f64;
            let name = format!("{}, {how}", if cold { "on a disk" } else { "in memory" });
            let (fill, n) = (took[took.len() / 2], waits.len());
            println!("{name:26} {n:8} {:10.0} {mean:8.0} {:8.0} {:8.0} {fill:8.0}", at(50), at(90), at(99));
            figures.push([at(50), mean, at(90), at(99), fill]);
        }
        let of = |n: usize| figures[1][n] / figures[0][n];
        println!("{:26} {:>8} {:10.2} {:8.2} {:8.2} {:8.2} {:8.2}", "  of it", "", of(0), of(1), of(2), of(3), of(4));
    }
}
