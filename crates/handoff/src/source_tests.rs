use super::*;
use crate::Generation;

const VM: VmId = VmId(7);
const MOVE: MoveId = MoveId(3);

fn actions(source: &mut Source) -> Vec<Action> {
    std::iter::from_fn(|| source.poll_action()).collect()
}

fn owner() -> Owner {
    Owner::first(VM)
}

fn heard(ticket: Ticket, body: Body) -> Event {
    Event::Message(Message { ticket, body })
}

/// Passes the events, and gives the actions of the last one.
fn after(source: &mut Source, events: Vec<Event>) -> Vec<Action> {
    let mut last = actions(source);
    for event in events {
        assert_eq!(source.handle(event.clone()), Verdict::Taken, "{event:?} in {:?}", source.state());
        last = actions(source);
    }
    last
}

fn running() -> Source {
    let mut source = Source::recover(Record::Owned(owner()), Seen::Running).unwrap();
    after(&mut source, vec![Event::Opened, Event::Ran]);
    source
}

fn stopped() -> (Source, Ticket) {
    let mut source = running();
    let ticket = source.begin(MOVE).unwrap();
    let burned = Record::Owned(Owner { last: Some(MOVE), ..owner() });
    assert_eq!(actions(&mut source), [Action::Persist(burned)]);
    assert_eq!(after(&mut source, vec![Event::Persisted(burned)]), [Action::Migrate(ticket)]);
    after(&mut source, vec![Event::VcpusStopped]);
    (source, ticket)
}

fn sealed() -> (Source, Ticket) {
    let (mut source, ticket) = stopped();
    let asked = after(&mut source, vec![Event::Closed, heard(ticket, Body::Verified), Event::Postmigrate]);
    assert_eq!(asked, [Action::Persist(Record::Sealed(ticket))]);
    after(&mut source, vec![Event::Persisted(Record::Sealed(ticket))]);
    (source, ticket)
}

#[test]
fn a_move_uses_up_its_ticket_before_anything_is_sent_under_it() {
    let (source, ticket) = stopped();
    assert_eq!(ticket, Ticket { vm: VM, lineage: Lineage::FIRST, generation: Generation(2), mv: MOVE });
    assert!(matches!(source.state(), SourceState::Stopped { .. }));
}

#[test]
fn a_vm_that_is_off_answers_whoever_waits_for_it_and_does_nothing() {
    let (_, ticket) = stopped();
    for (asked, answer) in [(Body::Pending, Body::Recall), (Body::Verified, Body::Recall), (Body::Prepared, Body::Over)]
    {
        let mut source = Source::at_rest(owner());
        let _ = source.handle(heard(ticket, asked));
        assert_eq!(actions(&mut source), [Action::Send(Message { ticket, body: answer })], "{asked:?}");
    }
    let mut source = Source::at_rest(owner());
    let _ = source.handle(heard(ticket, Body::Granted));
    assert_eq!(actions(&mut source), []);
}

#[test]
fn a_used_ticket_cannot_begin_again() {
    let (mut source, _) = stopped();
    after(&mut source, vec![Event::Cancel, Event::Opened, Event::Ran]);
    assert_eq!(source.begin(MOVE), Err(CannotBegin::UsedTicket { mv: MOVE }));
    assert!(source.begin(MoveId(4)).is_ok());
}

#[test]
fn the_seal_waits_for_all_three_facts_in_any_order() {
    let facts = |t| [Event::Closed, heard(t, Body::Verified), Event::Postmigrate];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let (mut source, ticket) = stopped();
        for (n, fact) in order.into_iter().enumerate() {
            let done = after(&mut source, vec![facts(ticket)[fact].clone()]);
            assert_eq!(done.contains(&Action::Persist(Record::Sealed(ticket))), n == 2, "{order:?}");
        }
    }
}

#[test]
fn a_stopped_guest_waits_while_its_memory_flows_and_is_resumed_when_that_ends() {
    let (mut source, _) = stopped();
    for _ in 0..10 * usize::from(PATIENCE) {
        after(&mut source, vec![Event::Timer, Event::Timer, Event::Flowing]);
    }
    assert!(matches!(source.state(), SourceState::Stopped { .. }), "{:?}", source.state());
    for _ in 0..PATIENCE {
        assert_eq!(after(&mut source, vec![Event::Timer]), [Action::SetTimer]);
    }
    let undone = after(&mut source, vec![Event::Timer]);
    assert!(undone.contains(&Action::Open(Lineage::FIRST, Generation(1))), "{undone:?}");
}

#[test]
fn commit_follows_the_durable_seal_and_is_repeated() {
    let (mut source, ticket) = sealed();
    let commit = Action::Send(Message { ticket, body: Body::Commit });
    for _ in 0..100 {
        assert_eq!(after(&mut source, vec![Event::Timer]), [commit, Action::SetTimer]);
    }
}

#[test]
fn a_cancel_before_the_seal_resumes_and_after_it_asks() {
    let (mut source, ticket) = stopped();
    assert!(after(&mut source, vec![Event::Cancel]).contains(&Action::Open(Lineage::FIRST, Generation(1))));
    assert_eq!(after(&mut source, vec![Event::Opened]), [Action::Run(Run::Cont)]);
    let (mut source, again) = sealed();
    assert_eq!(ticket, again);
    let recall = Action::Send(Message { ticket, body: Body::Recall });
    assert_eq!(after(&mut source, vec![Event::Cancel]), [recall, Action::SetTimer]);
}

#[test]
fn a_stopped_guest_resumes_when_the_destination_is_not_heard() {
    let (mut source, _) = stopped();
    after(&mut source, vec![Event::Timer; usize::from(PATIENCE) + 1]);
    assert!(matches!(source.state(), SourceState::Owning { upkeep: Upkeep::Opening(Run::Cont), .. }));
}

#[test]
fn refused_and_returned_bring_the_vm_back_two_generations_on() {
    for word in [Body::Refused, Body::Returned] {
        let (mut source, ticket) = sealed();
        let owned = Record::Owned(Owner { generation: Generation(3), ..owner() });
        assert_eq!(after(&mut source, vec![heard(ticket, word)]), [Action::Persist(owned)]);
        let opened = after(&mut source, vec![Event::Persisted(owned)]);
        assert_eq!(opened, [Action::Open(Lineage::FIRST, Generation(3))]);
        assert_eq!(after(&mut source, vec![Event::Opened]), [Action::Run(Run::Cont)]);
    }
}

#[test]
fn the_answer_to_another_attempt_is_no_answer() {
    let (mut source, ticket) = sealed();
    for stale in [
        Ticket { mv: MoveId(2), ..ticket },
        Ticket { generation: Generation(1), ..ticket },
        Ticket { lineage: Lineage(9), ..ticket },
        Ticket { vm: VmId(8), ..ticket },
    ] {
        for word in [Body::Refused, Body::Returned, Body::Started, Body::Granted] {
            assert_eq!(source.handle(heard(stale, word)), Verdict::Ignored(Why::OtherTicket));
        }
    }
    assert_eq!(actions(&mut source), []);
}

#[test]
fn the_qemu_is_kept_until_started_and_started_is_acknowledged_after_released() {
    let (mut source, ticket) = sealed();
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Granted)]), []);
    let released = Record::Released(ticket);
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Started)]), [Action::Persist(released)]);
    let ack = Action::Send(Message { ticket, body: Body::Ack });
    assert_eq!(after(&mut source, vec![Event::Persisted(released)]), [Action::Quit, ack]);
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Started)]), [ack]);
}

#[test]
fn a_sealed_source_stays_sealed_over_a_restart() {
    let (_, ticket) = sealed();
    for seen in [Seen::Stopped, Seen::Gone] {
        let mut source = Source::recover(Record::Sealed(ticket), seen).unwrap();
        assert!(!actions(&mut source).iter().any(|a| matches!(a, Action::Run(_) | Action::Open(..))));
        assert_eq!(source.status(), Status::WaitsForPeer);
    }
}

#[test]
fn a_claim_where_the_peer_may_have_run_boots_even_after_a_restart() {
    let (mut source, _) = sealed();
    let fenced = Fenced { statement: "off".into(), peer: PeerHistory::MayHaveRun, newest: Lineage(4) };
    let owned = Owner { lineage: Lineage(5), ram: Ram::Stale, ..owner() };
    assert_eq!(after(&mut source, vec![Event::Claim(fenced)]), [Action::Persist(Record::Owned(owned))]);
    let mut source = Source::recover(Record::Owned(owned), Seen::Stopped).unwrap();
    assert_eq!(after(&mut source, vec![Event::Opened]), [Action::Run(Run::Boot)]);
}

#[test]
fn a_claim_that_was_decided_before_the_newest_one_is_not_obeyed() {
    let (mut source, _) = sealed();
    let fenced = |newest| Fenced { statement: "off".into(), peer: PeerHistory::MayHaveRun, newest: Lineage(newest) };
    let lost = Record::Outranked { vm: owner().vm, lineage: Lineage(5) };
    let mut outranked = Source::recover(lost, Seen::Gone).unwrap();
    assert_eq!(outranked.handle(Event::Claim(fenced(4))), Verdict::Ignored(Why::ClaimTooOld));
    assert_eq!(outranked.handle(Event::Claim(fenced(5))), Verdict::Taken);
    assert_eq!(source.handle(Event::Claim(fenced(4))), Verdict::Taken, "it knows more than this node does");
}

/// Sealed by a destination that is prepared.
fn sealed_behind() -> (Source, Ticket) {
    let (mut source, ticket) = stopped();
    let asked = after(&mut source, vec![Event::Closed, Event::Postmigrate, heard(ticket, Body::Prepared)]);
    assert_eq!(asked, [Action::Persist(Record::Sealed(ticket))], "QEMU is needed yet, and gets no SHUT");
    after(&mut source, vec![Event::Persisted(Record::Sealed(ticket))]);
    (source, ticket)
}

#[test]
fn a_source_whose_memory_follows_keeps_its_qemu_until_the_last_page_has_gone() {
    let (mut source, ticket) = sealed_behind();
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Draining)]), [Action::SetTimer]);
    assert_eq!(source.status(), Status::Lends);
    assert_eq!(source.handle(Event::Cancel), Verdict::Ignored(Why::TooLate));
    let commit = Action::Send(Message { ticket, body: Body::Commit });
    assert_eq!(after(&mut source, vec![Event::Timer]), [commit, Action::SetTimer]);
    let released = Record::Released(ticket);
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Started)]), [Action::Persist(released)]);
    let ack = Action::Send(Message { ticket, body: Body::Ack });
    assert_eq!(after(&mut source, vec![Event::Persisted(released)]), [Action::Quit, ack]);
}

#[test]
fn a_source_that_has_lost_what_follows_says_so_also_after_a_restart() {
    let lost = |ticket| Action::Send(Message { ticket, body: Body::Lost });
    let (mut source, ticket) = sealed_behind();
    after(&mut source, vec![heard(ticket, Body::Draining)]);
    assert_eq!(after(&mut source, vec![Event::QemuDied]), [lost(ticket)]);
    assert_eq!(after(&mut source, vec![heard(ticket, Body::Draining)]), [lost(ticket)]);
    let mut source = Source::recover(Record::Sealed(ticket), Seen::Gone).unwrap();
    assert!(after(&mut source, vec![heard(ticket, Body::Draining)]).contains(&lost(ticket)));
}

#[test]
fn a_cancel_after_the_seal_is_forgotten_when_the_destination_is_prepared() {
    let (mut source, ticket) = sealed_behind();
    after(&mut source, vec![Event::Cancel, heard(ticket, Body::Prepared)]);
    assert_eq!(*source.state(), SourceState::Sealed { ticket, asking: Asking::Commit });
}

#[test]
fn who_is_prepared_for_an_attempt_that_was_undone_hears_that_it_is_over() {
    let (mut source, ticket) = stopped();
    after(&mut source, vec![Event::Cancel, Event::Opened, Event::Ran]);
    assert_eq!(source.handle(heard(ticket, Body::Prepared)), Verdict::Ignored(Why::OtherTicket));
    assert_eq!(actions(&mut source), [Action::Send(Message { ticket, body: Body::Over })]);
}
