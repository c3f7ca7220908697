use super::*;

const SIZE: u64 = 1 << 20;

struct World {
    disk: Arc<Disk>,
    later: mpsc::UnboundedSender<(Cookie, Reply)>,
    answers: mpsc::UnboundedReceiver<(Cookie, Reply)>,
    _folder: tempfile::TempDir,
}

fn world() -> World {
    let folder = tempfile::tempdir().expect("a folder");
    let (replica, socket) = (folder.path().join("replica"), folder.path().join("disk.sock"));
    let disk = Disk::open_or_create(&replica, None, socket, VolumeId(1), "root", Amount(SIZE)).expect("opens");
    let (later, answers) = mpsc::unbounded_channel();
    World { disk, later, answers, _folder: folder }
}

impl World {
    /// A write by a client that is there now.
    fn write(&self, cookie: u64, fill: u8) -> Option<Reply> {
        self.write_of(&self.client(), cookie, fill)
    }

    fn client(&self) -> CancellationToken {
        lock(&self.disk.clients).child_token()
    }

    fn write_of(&self, over: &CancellationToken, cookie: u64, fill: u8) -> Option<Reply> {
        let change = Change { offset: 4096, what: What::Data(Bytes::from(vec![fill; 4096])), fua: false };
        self.disk.attempt(Cookie(cookie), Job::Change(change), &self.later, over)
    }

    /// A mirror is in step with another replica, made in a folder: that, its machine, and what it is sent.
    fn mirrored(&self, folder: &Path) -> (Replica, mirror::Target, mpsc::UnboundedReceiver<Vec<u8>>) {
        let other = Replica::create(folder, VolumeId(1), Amount(SIZE)).expect("creates");
        let (target, has) = mirror::Target::new(&other).expect("reads");
        let mut machine = Leaving::Mirror(Box::default());
        for message in &has.all(&other).expect("reads") {
            machine.handle(message, &self.disk.replica).expect("takes");
        }
        machine.poll(&self.disk.replica).expect("reads");
        let (out, sent) = mpsc::unbounded_channel();
        *lock(&self.disk.order) = Some(Outgoing { attempt: 0, machine, out });
        (other, target, sent)
    }

    fn first_byte(&self) -> u8 {
        let mut block = [0; 4096];
        self.disk.replica.read(4096, &mut block).expect("reads");
        block[0]
    }
}

fn owner(generation: u64) -> (Lineage, Generation) {
    (Lineage::FIRST, Generation(generation))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_comes_while_the_disk_is_closed_waits_and_is_made_when_it_opens() {
    let mut world = world();
    // A node that was started again serves its guests' disks before it knows that it owns them.
    assert!(world.write(1, 1).is_none(), "a write was answered by a disk that takes none");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(world.answers.try_recv().is_err() && world.first_byte() == 0);
    let (lineage, generation) = owner(1);
    world.disk.open(lineage, generation).await.expect("opens");
    let (cookie, reply) = world.answers.recv().await.expect("is answered");
    assert!(cookie == Cookie(1) && matches!(reply, Reply::Done), "{reply:?}");
    assert_eq!(world.first_byte(), 1);
    assert!(matches!(world.write(2, 2), Some(Reply::Done)));
    assert_eq!(world.first_byte(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_of_a_qemu_that_is_gone_is_never_made() {
    let mut world = world();
    let (lineage, generation) = owner(1);
    world.disk.open(lineage, generation).await.expect("opens");
    world.disk.freeze().await.expect("freezes");
    assert!(world.write(1, 1).is_none());
    let gone = world.client();
    world.disk.hang_up();
    let (lineage, generation) = owner(3);
    world.disk.open(lineage, generation).await.expect("opens");
    assert!(matches!(world.write(2, 2), Some(Reply::Done)), "a new QEMU's writes are made");
    assert!(world.write_of(&gone, 3, 3).is_none(), "it is told of a write that was never made");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.first_byte(), 2);
    assert!(world.answers.try_recv().is_err(), "nobody is there to hear the answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirrored_write_is_answered_at_once_until_the_other_side_is_far_behind_and_then_when_it_is_not() {
    let mut world = world();
    let (lineage, generation) = owner(1);
    world.disk.open(lineage, generation).await.expect("opens");
    let folder = tempfile::tempdir().expect("a folder");
    let (other, mut target, mut sent) = world.mirrored(folder.path());

    let last = (1..100).find(|n| world.write(*n, u8::try_from(*n).expect("small")).is_none()).expect("one waits");
    assert!(last > 2, "the guest waits for the other side");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(world.answers.try_recv().is_err(), "the other side has nothing, and the guest goes on");
    while let Ok(message) = sent.try_recv() {
        let answer = target.handle(&message, &other).expect("applies");
        world.disk.advance(0, &[answer], None).expect("goes on");
    }
    // Of a write that fails a part may be stored: the other side is to have the same.
    let full = || Err(std::io::ErrorKind::StorageFull.into());
    let failed = world.disk.make_by(0, 4096, &CancellationToken::new(), || world.disk.replica.write_by(0, 4096, full));
    assert!(matches!(failed, Err(VolumeError::Io { .. })), "{failed:?}");
    let message = sent.try_recv().expect("is passed on all the same");
    world.disk.advance(0, &[target.handle(&message, &other).expect("applies")], None).expect("goes on");
    assert_eq!(other.stamp(0).expect("reads"), world.disk.replica.stamp(0).expect("reads"));
    // What was said to an earlier attempt is not this one's.
    let passed_by = world.disk.advance(1, &[vec![255]], None).expect("is passed by");
    assert_eq!(passed_by, Stands::Over, "there is nothing more to do for it");
    assert!(world.disk.advance(0, &[vec![255]], None).is_err(), "it makes no sense to this one");
    let (cookie, reply) = world.answers.recv().await.expect("is answered");
    assert!(cookie == Cookie(last) && matches!(reply, Reply::Done), "{reply:?}");
    let mut block = [0; 4096];
    other.read(4096, &mut block).expect("reads");
    assert_eq!(u64::from(block[0]), last);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_writes_that_overlap_the_second_waits_until_the_first_was_passed_on_and_both_sides_end_alike() {
    let world = world();
    let (lineage, generation) = owner(1);
    world.disk.open(lineage, generation).await.expect("opens");
    let folder = tempfile::tempdir().expect("a folder");
    let (other, mut target, mut sent) = world.mirrored(folder.path());

    let over = CancellationToken::new();
    let (begun, is_begun) = std::sync::mpsc::channel();
    let (made, is_made) = std::sync::mpsc::channel();
    std::thread::scope(|threads| {
        let (disk, over) = (&world.disk, &over);
        threads.spawn(move || {
            let first = disk.make_by(0, 8192, over, || {
                begun.send(()).expect("somebody waits");
                let second = is_made.recv_timeout(Duration::from_millis(200));
                assert!(second.is_err(), "another write was made in the midst of this one");
                disk.replica.write(0, &[1; 8192])
            });
            first.expect("is made");
        });
        is_begun.recv().expect("begins");
        let second = disk.make_by(4096, 8192, over, || {
            let written = disk.replica.write(4096, &[2; 8192]);
            let _ = made.send(());
            written
        });
        second.expect("is made");
    });
    let (mut ours, mut theirs) = (vec![0; 12288], vec![9; 12288]);
    while let Ok(message) = sent.try_recv() {
        target.handle(&message, &other).expect("applies");
    }
    world.disk.replica.read(0, &mut ours).expect("reads");
    other.read(0, &mut theirs).expect("reads");
    assert!(ours == theirs && ours[0] == 1 && ours[4096] == 2, "the sides differ, or not as they were written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_ends_with_its_node_makes_nothing_more_and_says_nothing_of_what_it_was_asked() {
    let mut world = world();
    let (lineage, generation) = owner(1);
    world.disk.open(lineage, generation).await.expect("opens");
    let client = world.client();
    assert!(matches!(world.write_of(&client, 1, 1), Some(Reply::Done)));
    world.disk.end().expect("closes");
    // A thread that was late; a client that came since; and a hand-off that goes on.
    assert!(world.write_of(&client, 2, 2).is_none() && world.write(3, 3).is_none());
    let (lineage, generation) = owner(2);
    assert!(matches!(world.disk.open(lineage, generation).await, Err(VolumeError::Frozen)));
    let made = world.disk.make_by(0, 4096, &CancellationToken::new(), || world.disk.replica.zero(0, 4096));
    assert!(matches!(made, Err(VolumeError::Frozen)), "{made:?}");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(world.answers.try_recv().is_err(), "its QEMU asks the next process, and was told that all is well");
    assert_eq!(world.first_byte(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_guest_came_to_first_goes_with_a_mirror_and_nothing_takes_the_place_of_what_is_kept() {
    let (here, there) = (world(), world());
    let (lineage, generation) = owner(1);
    here.disk.open(lineage, generation).await.expect("opens");
    for (cookie, block) in (1..).zip([7, 8, 3]) {
        let change = Change { offset: block * 4096, what: What::Data(Bytes::from(vec![1; 4096])), fua: false };
        let made = here.disk.attempt(Cookie(cookie), Job::Change(change), &here.later, &here.client());
        assert!(matches!(made, Some(Reply::Done)), "{made:?}");
    }
    let order = [7..9, 3..4];
    assert_eq!(here.disk.first_accesses(), order);

    let mut source = here.disk.mirror_from_here();
    let (mut target, first) = mirror::Target::new(&there.disk.replica).expect("reads");
    let first = first.all(&there.disk.replica).expect("reads");
    first.iter().for_each(|message| source.handle(message, &here.disk.replica).expect("takes"));
    loop {
        let messages = source.poll(&here.disk.replica).expect("reads");
        if messages.is_empty() {
            break;
        }
        for message in messages {
            let answer = target.handle(&message, &there.disk.replica).expect("takes");
            source.handle(&answer, &here.disk.replica).expect("takes");
        }
    }
    there.disk.take_order(target.order());
    assert_eq!(there.disk.first_accesses(), order);
    // A source that knows of none, or is of an earlier version.
    there.disk.take_order(vec![]);
    assert_eq!(there.disk.first_accesses(), order);
    // It outlives this host's node.
    there.disk.store_order();
    assert_eq!(FirstAccess::load(there.disk.replica.folder()).runs(), order);
}
