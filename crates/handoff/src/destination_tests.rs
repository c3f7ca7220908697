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
