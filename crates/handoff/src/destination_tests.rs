use super::*;
use crate::{Generation, MoveId};

const TICKET: Ticket = Ticket { vm: VmId(7), lineage: Lineage::FIRST, generation: Generation(2), mv: MoveId(3) };

fn actions(destination: &mut Destination) -> Vec<Action> {
    std::iter::from_fn(|| destination.poll_action()).collect()
}

fn heard(body: Body) -> Event {
    Event::Message(Message { ticket: TICKET, body })
}

fn says(body: Body) -> Action {
    Action::Send(Message { ticket: TICKET, body })
}

/// Passes the events, and gives the actions of the last one.
fn after(destination: &mut Destination, events: Vec<Event>) -> Vec<Action> {
    let mut last = actions(destination);
    for event in events {
        assert_eq!(destination.handle(event.clone()), Verdict::Taken, "{event:?} in {:?}", destination.state());
        last = actions(destination);
    }
    last
}

fn loaded() -> Destination {
    let mut it = Destination::stage(None, TICKET).unwrap();
    after(&mut it, vec![Event::Persisted(Record::Staged(TICKET)), Event::Loaded]);
    it
}

fn granted() -> Destination {
    let mut it = loaded();
    after(&mut it, vec![heard(Body::Commit), Event::Persisted(Record::Granted(TICKET))]);
    it
}

fn started() -> Destination {
    let mut it = granted();
    after(&mut it, vec![Event::Opened, Event::Persisted(Record::Started(TICKET)), Event::Ran]);
    it
}

#[test]
fn every_effect_comes_after_the_record_that_licenses_it() {
    let mut it = loaded();
    assert_eq!(after(&mut it, vec![heard(Body::Commit)]), [Action::Persist(Record::Granted(TICKET))]);
    let open = Action::Open(Lineage::FIRST, Generation(2));
    assert_eq!(after(&mut it, vec![Event::Persisted(Record::Granted(TICKET))]), [says(Body::Granted), open]);
    assert_eq!(after(&mut it, vec![Event::Opened]), [Action::Persist(Record::Started(TICKET))]);
    let run = after(&mut it, vec![Event::Persisted(Record::Started(TICKET))]);
    assert_eq!(run, [says(Body::Started), Action::SetTimer, Action::Run(Run::Cont)]);
}

#[test]
fn a_recall_before_the_grant_is_refused_for_ever() {
    let mut it = loaded();
    assert_eq!(after(&mut it, vec![heard(Body::Recall)]), [Action::Persist(Record::Refused(TICKET))]);
    let told = after(&mut it, vec![Event::Persisted(Record::Refused(TICKET))]);
    assert_eq!(told, [Action::Quit, says(Body::Refused)]);
    assert_eq!(after(&mut it, vec![heard(Body::Commit)]), [says(Body::Refused)]);
    let mut it = Destination::recover(Record::Refused(TICKET), Seen::Loaded).unwrap();
    assert_eq!(after(&mut it, vec![heard(Body::Commit)]), [says(Body::Refused)]);
}

#[test]
fn a_recall_after_the_grant_is_answered_granted() {
    assert_eq!(after(&mut granted(), vec![heard(Body::Recall)]), [says(Body::Granted)]);
}

#[test]
fn an_undo_writes_refused_first() {
    for undo in [Event::Cancel, Event::QemuDied] {
        assert_eq!(after(&mut loaded(), vec![undo]), [Action::Persist(Record::Refused(TICKET))]);
    }
}

#[test]
fn a_commit_to_a_destination_without_the_whole_vm_is_refused() {
    let mut it = Destination::stage(None, TICKET).unwrap();
    after(&mut it, vec![Event::Persisted(Record::Staged(TICKET))]);
    assert_eq!(after(&mut it, vec![heard(Body::Commit)]), [Action::Persist(Record::Refused(TICKET))]);
    let mut it = Destination::recover(Record::Staged(TICKET), Seen::Gone).unwrap();
    assert_eq!(actions(&mut it), [Action::Persist(Record::Refused(TICKET))]);
}

#[test]
fn ram_lost_between_grant_and_start_is_returned_after_closing() {
    let mut it = granted();
    assert_eq!(after(&mut it, vec![Event::QemuDied]), [Action::Close]);
    assert_eq!(after(&mut it, vec![Event::Closed]), [Action::Persist(Record::Returned(TICKET))]);
    let told = after(&mut it, vec![Event::Persisted(Record::Returned(TICKET))]);
    assert_eq!(told, [Action::Quit, says(Body::Returned)]);
    assert_eq!(actions(&mut Destination::recover(Record::Granted(TICKET), Seen::Gone).unwrap()), [Action::Close]);
}

#[test]
fn ram_lost_after_started_is_a_boot_here() {
    let mut it = started();
    assert_eq!(after(&mut it, vec![Event::QemuDied, Event::Opened]), [Action::Run(Run::Boot)]);
    let mut it = Destination::recover(Record::Started(TICKET), Seen::Gone).unwrap();
    assert_eq!(after(&mut it, vec![Event::Opened]), [Action::Run(Run::Boot)]);
}

#[test]
fn started_is_told_until_it_is_acknowledged() {
    let mut it = started();
    assert_eq!(after(&mut it, vec![Event::Timer]), [says(Body::Started), Action::SetTimer]);
    let owned = Record::Owned(Owner::after(TICKET));
    assert_eq!(after(&mut it, vec![heard(Body::Ack)]), [Action::Persist(owned)]);
    after(&mut it, vec![Event::Persisted(owned)]);
    assert_eq!(*it.state(), DestinationState::Settled { owner: Owner::after(TICKET) });
}

#[test]
fn only_a_newer_ticket_is_staged_and_never_over_an_obligation() {
    let used = CannotBegin::UsedTicket { mv: TICKET.mv };
    for over in [Record::Refused(TICKET), Record::Returned(TICKET), Record::Released(TICKET)] {
        assert_eq!(Destination::stage(Some(over), TICKET).unwrap_err(), used);
        assert!(Destination::stage(Some(over), Ticket { mv: MoveId(4), ..TICKET }).is_ok());
    }
    for busy in [Record::Staged(TICKET), Record::Granted(TICKET), Record::Started(TICKET), Record::Sealed(TICKET)] {
        let newer = Ticket { mv: MoveId(4), ..TICKET };
        assert_eq!(Destination::stage(Some(busy), newer).unwrap_err(), CannotBegin::Busy);
    }
}

fn prepared() -> Destination {
    let mut it = Destination::stage(None, TICKET).unwrap();
    let asked = after(&mut it, vec![Event::Persisted(Record::Staged(TICKET)), Event::Listens]);
    assert_eq!(asked, [Action::Persist(Record::Prepared(TICKET))]);
    let told = after(&mut it, vec![Event::Persisted(Record::Prepared(TICKET))]);
    assert_eq!(told, [says(Body::Prepared), Action::SetTimer]);
    it
}

fn draining() -> Destination {
    let mut it = prepared();
    let opens = after(&mut it, vec![heard(Body::Commit)]);
    assert_eq!(opens, [says(Body::Granted), Action::Open(Lineage::FIRST, Generation(2))]);
    assert_eq!(after(&mut it, vec![Event::Opened]), [Action::Persist(Record::Draining(TICKET))]);
    let runs = after(&mut it, vec![Event::Persisted(Record::Draining(TICKET))]);
    assert_eq!(runs, [says(Body::Draining), Action::SetTimer, Action::Run(Run::Cont)]);
    after(&mut it, vec![Event::Ran]);
    it
}

#[test]
fn who_is_prepared_refuses_nothing_but_what_is_over() {
    let mut it = prepared();
    assert_eq!(it.handle(Event::Cancel), Verdict::Ignored(Why::TooLate));
    assert_eq!(after(&mut it, vec![heard(Body::Recall)]), [says(Body::Prepared)]);
    for seen in [Seen::Loaded, Seen::Gone] {
        let mut it = Destination::recover(Record::Prepared(TICKET), seen).unwrap();
        assert_eq!(actions(&mut it), [says(Body::Prepared), Action::SetTimer]);
    }
    assert_eq!(after(&mut it, vec![heard(Body::Over)]), [Action::Persist(Record::Refused(TICKET))]);
}

#[test]
fn who_is_prepared_and_loses_its_qemu_returns_the_vm() {
    let mut it = prepared();
    assert_eq!(after(&mut it, vec![Event::QemuDied, heard(Body::Commit)]), [Action::Close]);
    assert_eq!(after(&mut it, vec![Event::Closed]), [Action::Persist(Record::Returned(TICKET))]);
}

#[test]
fn a_guest_whose_memory_follows_has_started_only_when_the_last_page_is_here() {
    let mut it = draining();
    for asked in [Body::Commit, Body::Recall] {
        assert_eq!(after(&mut it, vec![heard(asked)]), [says(Body::Draining)]);
    }
    assert_eq!(after(&mut it, vec![Event::Timer]), [says(Body::Draining), Action::SetTimer]);
    assert_eq!(after(&mut it, vec![Event::Drained]), [Action::Persist(Record::Started(TICKET))]);
    let told = after(&mut it, vec![Event::Persisted(Record::Started(TICKET))]);
    assert_eq!(told, [says(Body::Started), Action::SetTimer]);
    let mut it = Destination::recover(Record::Draining(TICKET), Seen::Running).unwrap();
    assert_eq!(after(&mut it, vec![Event::Opened]), [Action::Run(Run::Cont)], "it goes on while pages come");
}

#[test]
fn memory_is_given_up_only_when_it_is_lost_and_then_the_vm_boots() {
    let mut it = draining();
    assert_eq!(it.handle(Event::Abandon), Verdict::Ignored(Why::NotNow));
    after(&mut it, vec![heard(Body::Lost)]);
    assert_eq!(it.status(), Status::MemoryLost);
    assert_eq!(after(&mut it, vec![Event::Abandon]), [Action::Persist(Record::Started(TICKET))]);
    let boots = after(&mut it, vec![Event::Persisted(Record::Started(TICKET))]);
    assert!(boots.contains(&says(Body::Started)), "the source may let go: {boots:?}");
    assert_eq!(after(&mut it, vec![Event::Opened]), [Action::Run(Run::Boot)]);
    // As where the guest's own QEMU dies.
    assert_eq!(after(&mut draining(), vec![Event::QemuDied]), [Action::Persist(Record::Started(TICKET))]);
    let mut it = Destination::recover(Record::Draining(TICKET), Seen::Gone).unwrap();
    assert_eq!(actions(&mut it), [Action::Persist(Record::Started(TICKET))]);
}

#[test]
fn a_claim_of_a_vm_that_lacks_pages_boots_it_whatever_the_other_side_did() {
    for mut it in [prepared(), draining()] {
        let fenced = Fenced { statement: "off".into(), peer: PeerHistory::DidNotRun, newest: Lineage::FIRST };
        let owned = Record::Owned(Owner::claimed(VmId(7), Lineage::FIRST, Ram::Stale));
        assert_eq!(after(&mut it, vec![Event::Claim(fenced)]), [Action::Persist(owned)]);
    }
}
