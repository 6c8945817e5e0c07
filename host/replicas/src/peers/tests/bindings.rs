//! Bindings of sessions and responses.

use super::*;
use crate::bindings::Bindings;

/// A gateway with the worker 1, which has the id 77 here.
fn reader() -> Reader {
    let mut reader = Reader::new(&[]);
    reader.registry.apply(vec![WorkerSpec { id: WorkerId(77), ..spec(1) }], &[]);
    reader.peers.set_workers(&reader.registry.snapshot());
    reader
}

#[test]
fn q6_bindings_reach_other_gateways_with_the_names_of_their_workers() {
    let (mut sender, mut reader) = (Sender::new(5, 100), reader());
    let stamp = Stamp { at_us: 12, writer: 99 };
    let ttl = Duration::from_secs(60);
    let of_session = |session| BindingKey::Session(session, Leg::Decode);
    let of = |key, candidate| SessionChange { key, candidate, ttl, stamp };
    let change = |session, candidate| of(of_session(session), candidate);
    let named = |worker| Some((WorkerKey::of(&spec(worker)), DpRank(1)));
    let told = vec![
        (change(1, Some((WorkerId(1), DpRank(1)))), named(1)),
        (change(2, Some((WorkerId(2), DpRank(1)))), named(2)),
        (change(3, None), None),
        (of(BindingKey::Response(1), Some((WorkerId(1), DpRank(1)))), named(1)),
    ];
    let mut effects = reader.receive(sender.outbox.batch(told.clone()));
    effects.remove(0);
    let stamp = Stamp { at_us: 12, writer: writer_of("a") };
    let bound = |session| SessionChange { stamp, ..change(session, None) };
    let stored = SessionChange { key: BindingKey::Response(1), ..bound(1) };
    let expected = [(bound(1), named(1)), (bound(2), named(2)), (bound(3), None), (stored, named(1))];
    // Q6.1, Q6.5
    assert_eq!(effects, expected.map(Effect::Session));
    // Q6.1: the worker has another id here, and the other worker is unknown
    let id = |worker| reader.peers.worker_id(WorkerKey::of(&spec(worker)));
    assert_eq!((id(1), id(2)), (Some(WorkerId(77)), None));
    assert_eq!(reader.receive(sender.outbox.snapshot(told)).len(), 4);
    assert_eq!(reader.receive(sender.outbox.snapshot(Vec::new())), []);
}

#[test]
fn q6_a_binding_that_is_sent_on_is_as_old_as_before() {
    let (mut sender, mut reader, now) = (Sender::new(5, 100), reader(), Instant::now());
    let (at_us, key) = (1_700_000_000_000_000, BindingKey::Session(1, Leg::Decode));
    let made = |at_us, writer| SessionChange {
        key,
        candidate: None,
        ttl: Duration::from_secs(60),
        stamp: Stamp { at_us, writer },
    };
    let worker = Some((WorkerKey::of(&spec(1)), DpRank(1)));
    let (mut known, mut here) = (Bindings::new(writer_of("a")), Bindings::new(writer_of("me")));
    known.note((made(at_us, writer_of("gone")), worker), true, now);
    // This gateway has a later one.
    here.note((made(at_us + 1, writer_of("me")), worker), true, now);
    let effects = reader.receive(sender.outbox.snapshot(known.held(None, now)));
    let [_, Effect::Session(sent)] = &effects[..] else { panic!("{effects:?}") };
    // Q6.2, Q6.6
    assert_eq!(sent.0.stamp.at_us, at_us);
    assert!(!here.note(*sent, true, now));
}

#[test]
fn q6_the_two_gateways_that_run_longest_send_the_bindings_of_all() {
    let heartbeat = |incarnation| vec![Sender::new(incarnation, 10).outbox.heartbeat()];
    let counters = Arc::<Counters>::default();
    let mut reader = Reader::new(&[]);
    reader.peers = Peers::new(("me".into(), 100), 16, LIMITS, counters);
    // Q6.6: alone with the gateway that joins
    reader.receive_from("young", heartbeat(200));
    assert!(reader.peers.sends_all_bindings());
    reader.receive_from("old", heartbeat(50));
    assert!(reader.peers.sends_all_bindings());
    reader.receive_from("older", heartbeat(40));
    // Q6.6
    assert!(!reader.peers.sends_all_bindings());
    reader.receive_from("old", heartbeat(300));
    assert!(reader.peers.sends_all_bindings());
}
