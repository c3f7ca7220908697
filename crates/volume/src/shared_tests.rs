use super::*;
use crate::BLOCK;
use std::path::PathBuf;

const SIZE: u64 = 8 << 20;
const FIRST: Lineage = Lineage::FIRST;

struct World(tempfile::TempDir);

impl World {
    fn new() -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        Replica::create_shared(&world.place(), VolumeId(1), Bytes(SIZE)).unwrap();
        world
    }

    fn place(&self) -> PathBuf {
        self.0.path().join("shared")
    }

    fn host(&self, who: &str) -> Replica {
        Replica::shared(&self.place(), &self.0.path().join(who), VolumeId(1), Bytes(SIZE), who).unwrap()
    }

    /// As a node opens it.
    fn open(replica: &Replica, lineage: Lineage, generation: u64) -> Result<(), VolumeError> {
        replica.attach(lineage, Generation(generation))?;
        replica.become_primary(lineage, Generation(generation))
    }

    /// What lies there, by nobody's leave.
    fn lies(&self, block: u64) -> Vec<u8> {
        std::fs::read(self.place().join("data")).unwrap()[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize]
            .to_vec()
    }

    fn all(&self) -> Vec<(String, Vec<u8>)> {
        let entries = std::fs::read_dir(self.place()).unwrap().map(|e| e.unwrap().path());
        let mut all: Vec<_> = entries.map(|p| (p.display().to_string(), std::fs::read(p).unwrap())).collect();
        all.sort();
        all
    }
}

fn block(replica: &Replica, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    replica.read(at * BLOCK, &mut bytes).unwrap();
    bytes
}

#[test]
fn what_one_host_wrote_the_next_one_reads_and_its_stamps_go_on() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    World::open(&a, FIRST, 1).unwrap();
    a.write(3 * BLOCK, &[1; BLOCK as usize]).unwrap();
    let stamp = a.stamp(3).unwrap();
    assert!(a.stamp(3).unwrap().is_some());
    a.detach().unwrap();
    World::open(&b, FIRST, 2).unwrap();
    assert_eq!(block(&b, 3), [1; BLOCK as usize]);
    assert_eq!(b.stamp(3).unwrap(), stamp, "they lie with the blocks");
    b.write(4 * BLOCK, &[2; BLOCK as usize]).unwrap();
    b.detach().unwrap();
    // And back, as a later owner.
    World::open(&a, FIRST, 3).unwrap();
    assert_eq!((block(&a, 3), block(&a, 4)), (vec![1; BLOCK as usize], vec![2; BLOCK as usize]));
    assert_eq!(a.stamp(4).unwrap().unwrap().generation, Generation(2));
    a.close().unwrap();
}

#[test]
fn a_detached_replica_reads_nothing_and_writes_nothing_whatever_is_asked_of_it() {
    let world = World::new();
    let a = world.host("a");
    World::open(&a, FIRST, 1).unwrap();
    a.write(0, &[1; BLOCK as usize]).unwrap();
    a.detach().unwrap();
    let before = world.all();
    let stamp = crate::Stamp { lineage: FIRST, generation: Generation(9), epoch: godwit_units::Epoch(9) };
    assert!(matches!(a.write(0, &[2; BLOCK as usize]), Err(VolumeError::Frozen)));
    assert!(matches!(a.zero(0, BLOCK), Err(VolumeError::Frozen)));
    assert!(a.apply(0, stamp, crate::Contents::Data(&[3; BLOCK as usize])).is_err());
    assert!(a.forget(0..1).is_err());
    assert!(matches!(a.become_primary(FIRST, Generation(9)), Err(VolumeError::Frozen)), "without having attached");
    assert!(a.resume().is_err());
    let _ = (a.settle(), a.commit(), a.flush(), a.become_secondary(), a.roll(), a.set_complete(None));
    assert!(matches!(a.read(0, &mut [0; 8]), Err(VolumeError::Frozen)), "who reads waits");
    assert!(matches!(a.extents(0, BLOCK), Err(VolumeError::Frozen)), "no hole is claimed where nobody looks");
    assert_eq!((a.read_now(0, &mut [0; 8]), a.file_of(0, 8).is_none()), (0, true));
    a.read_blank();
    assert_eq!(block(&a, 0), [0; BLOCK as usize], "for a QEMU that looks at what it does not run");
    drop(a);
    assert!(world.all() == before, "not a byte was touched");
    // One that is born so, as when a host is started again, does not even look.
    let born = world.host("b");
    assert!(born.is_detached() && born.write(0, &[2; BLOCK as usize]).is_err() && born.read(0, &mut [0; 8]).is_err());
    drop(born);
    assert!(world.all() == before, "nor by one that was just started");
}

#[test]
fn what_another_host_has_is_looked_at_as_it_lies_until_it_is_ones_own_and_nothing_is_touched() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    World::open(&a, FIRST, 1).unwrap();
    a.write(3 * BLOCK, &[[1; BLOCK as usize], [2; BLOCK as usize]].concat()).unwrap();
    let before = world.all();
    let look = |replica: &Replica, at: u64, blocks: usize| {
        let mut bytes = vec![9; blocks * BLOCK as usize];
        replica.glance(at, &mut bytes).map(|()| bytes)
    };
    assert_eq!(look(&b, 3 * BLOCK, 2).unwrap(), [[1; BLOCK as usize], [2; BLOCK as usize]].concat());
    assert_eq!(look(&b, SIZE - BLOCK, 1).unwrap(), [0; BLOCK as usize]);
    assert!(b.glance_rate().unwrap() > 0);
    assert!(matches!(b.read(0, &mut [0; 8]), Err(VolumeError::Frozen)), "a guest would wait all the same");
    for (at, blocks) in [(1, 1), (SIZE, 1), (SIZE - BLOCK, 2), (u64::MAX - BLOCK + 1, 1)] {
        assert!(look(&b, at, blocks).is_err(), "{blocks} blocks at {at}");
    }
    assert!(b.glance(0, &mut [0; 8]).is_err(), "a part of a block");
    assert!(look(&a, 0, 1).is_err(), "its own it reads otherwise");
    assert!(world.all() == before, "nothing was touched");
    // As it lies at the moment.
    a.write(3 * BLOCK, &[3; BLOCK as usize]).unwrap();
    assert_eq!(look(&b, 3 * BLOCK, 1).unwrap(), [3; BLOCK as usize]);
    a.detach().unwrap();
    World::open(&b, FIRST, 2).unwrap();
    assert!(look(&b, 0, 1).is_err(), "its own now");
    assert_eq!(look(&a, 3 * BLOCK, 1).unwrap(), [3; BLOCK as usize], "and the former owner looks at another's");
    let own = Replica::create(&world.0.path().join("own"), VolumeId(2), Bytes(SIZE)).unwrap();
    assert!(own.glance(0, &mut [0; BLOCK as usize]).is_err() && own.glance_rate().is_err(), "it is not shared");
}

#[test]
fn a_write_that_comes_after_the_detaching_is_never_made_also_when_another_host_has_it() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    World::open(&a, FIRST, 1).unwrap();
    let begun = std::sync::Barrier::new(5);
    std::thread::scope(|scope| {
        // Writers that know nothing of what happens to them.
        let writers: Vec<_> = (0..4_u64)
            .map(|n| {
                let (a, begun) = (&a, &begun);
                scope.spawn(move || {
                    a.write((n + 1) * BLOCK, &0_u64.to_le_bytes()).unwrap();
                    begun.wait();
                    let mut made = 1_u64;
                    while a.write((n + 1) * BLOCK, &made.to_le_bytes()).is_ok() {
                        made += 1;
                    }
                    made
                })
            })
            .collect();
        begun.wait();
        a.detach().unwrap();
        let after = world.all();
        World::open(&b, FIRST, 2).unwrap();
        let made: Vec<u64> = writers.into_iter().map(|w| w.join().unwrap()).collect();
        for (n, made) in (1..).zip(made) {
            assert_eq!(
                block(&b, n)[..8],
                (made - 1).to_le_bytes(),
                "the last one that was answered, and none after it"
            );
        }
        let data = |all: &[(String, Vec<u8>)]| all.iter().find(|(name, _)| name.ends_with("data")).unwrap().1.clone();
        assert!(data(&after) == data(&world.all()));
    });
}

fn refused(replica: &Replica, lineage: Lineage, generation: u64) {
    let error = replica.attach(lineage, Generation(generation)).unwrap_err();
    assert!(matches!(error, VolumeError::Outranked { .. }), "{error}");
    assert!(replica.is_detached());
}

#[test]
fn an_older_owner_or_the_same_at_another_host_gets_nothing_and_a_later_one_after_a_crash_does() {
    let world = World::new();
    let (a, b, c) = (world.host("a"), world.host("b"), world.host("c"));
    World::open(&a, FIRST, 2).unwrap();
    a.detach().unwrap();
    refused(&b, FIRST, 1);
    refused(&b, FIRST, 2);
    // The same owner at the same host: a node that was started again.
    World::open(&a, FIRST, 2).unwrap();
    a.write(7 * BLOCK, &[7; BLOCK as usize]).unwrap();
    // It crashes; what was hot is restamped by whoever has it next.
    let stamp = a.stamp(7).unwrap().unwrap();
    drop(a);
    World::open(&b, FIRST, 3).unwrap();
    assert_eq!(block(&b, 7), [7; BLOCK as usize]);
    assert_ne!(b.stamp(7).unwrap().unwrap(), stamp);
    b.detach().unwrap();
    // A claim begins a lineage: greater than each generation of the one before.
    World::open(&c, Lineage(FIRST.0 + 1), 1).unwrap();
    c.detach().unwrap();
    refused(&b, FIRST, 99);
    assert_eq!(having(&world.place()).unwrap().unwrap().who, "c");
}

#[test]
fn who_had_it_last_is_written_in_its_place_and_read_as_earlier_versions_wrote_it() {
    use std::os::unix::fs::MetadataExt;
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let path = world.place().join("holder");
    let earlier = Having { who: "c".into(), lineage: FIRST, generation: Generation(4) };
    std::fs::write(&path, serde_json::to_vec(&earlier).unwrap()).unwrap();
    assert_eq!(having(&world.place()).unwrap(), Some(earlier));
    refused(&a, FIRST, 3);
    World::open(&a, FIRST, 5).unwrap();
    a.detach().unwrap();
    let file = std::fs::metadata(&path).unwrap().ino();
    World::open(&b, FIRST, 6).unwrap();
    b.detach().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), file, "another file has taken its place");
    let now = Having { who: "b".into(), lineage: FIRST, generation: Generation(6) };
    assert_eq!(having(&world.place()).unwrap(), Some(now));
    refused(&a, FIRST, 5);
}

#[test]
fn two_hosts_never_have_it_at_once_where_the_file_system_carries_locks() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    World::open(&a, FIRST, 1).unwrap();
    let error = b.attach(FIRST, Generation(2)).unwrap_err();
    assert!(matches!(error, VolumeError::Locked(_)), "{error}");
    a.write(0, &[1; 16]).unwrap();
    a.detach().unwrap();
    World::open(&b, FIRST, 2).unwrap();
    assert_eq!(block(&b, 0)[..16], [1; 16]);
}

#[test]
fn what_cannot_be_made_durable_is_not_detached() {
    let world = World::new();
    let a = world.host("a");
    World::open(&a, FIRST, 1).unwrap();
    a.write(0, &[1; BLOCK as usize]).unwrap();
    // Its description cannot be written any more.
    let (meta, aside) = (world.place().join("meta"), world.place().join("aside"));
    std::fs::rename(&meta, &aside).unwrap();
    std::fs::create_dir(&meta).unwrap();
    assert!(a.detach().is_err());
    std::fs::remove_dir(&meta).unwrap();
    std::fs::rename(&aside, &meta).unwrap();
    assert!(!a.is_detached() && matches!(a.write(0, &[2; 8]), Err(VolumeError::Frozen)), "and takes no writes");
    let b = world.host("b");
    assert!(matches!(b.attach(FIRST, Generation(2)), Err(VolumeError::Locked(_))));
    // The move was undone.
    a.become_primary(FIRST, Generation(1)).unwrap();
    a.write(0, &[2; BLOCK as usize]).unwrap();
    a.detach().unwrap();
    assert_eq!(world.lies(0), [2; BLOCK as usize]);
}

#[test]
fn what_ended_with_its_process_is_not_attached_again_by_it_and_the_next_one_finds_it_closed() {
    let world = World::new();
    let a = world.host("a");
    World::open(&a, FIRST, 1).unwrap();
    a.write(0, &[1; BLOCK as usize]).unwrap();
    a.end().unwrap();
    assert!(matches!(a.write(0, &[2; BLOCK as usize]), Err(VolumeError::Frozen)));
    // A hand-off that goes on, and one that is taken back.
    a.detach().unwrap();
    assert!(matches!(World::open(&a, FIRST, 1), Err(VolumeError::Frozen)) && a.is_detached());
    a.end().unwrap();
    assert!(matches!(World::open(&a, FIRST, 1), Err(VolumeError::Frozen)) && a.is_detached());
    let (_, opened) = Replica::open(&world.place()).unwrap();
    assert_eq!((opened.clean, opened.doubted), (true, 0));
    assert_eq!(world.lies(0), [1; BLOCK as usize]);
}

#[test]
fn a_mark_is_seen_where_the_storage_is_the_same_and_nowhere_else() {
    let world = World::new();
    leave_mark(&world.place(), 5, "a").unwrap();
    assert_eq!(see_mark(&world.place(), 5).unwrap(), "a");
    assert!(see_mark(&world.place(), 6).is_err() && see_mark(world.0.path(), 5).is_err());
    remove_mark(&world.place(), 5);
    assert!(see_mark(&world.place(), 5).is_err());
}
