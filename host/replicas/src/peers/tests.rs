use std::sync::mpsc::Receiver;

use pointsman_orchestration::{BindingKey, SessionChange, Stamp};
use pointsman_workers::{
    BlockHash, Booking, BookingRequest, Candidate, EngineFacts, Journal, JournalEntry, Leg, ModelName,
    Registry, WorkerKey, WorkerSpec,
};
use proptest::prelude::*;

use super::*;
use crate::outbox::Outbox;

mod bindings;
mod hostile;
mod two_versions;

const LEASE: Duration = Duration::from_secs(3);
const LIMITS: PeerLimits = PeerLimits { peers: 3, bookings: 50, hashes: 10_000 };

/// A gateway with two workers of two ranks, and its messages to others.
struct Sender {
    registry: Registry,
    outbox: Outbox,
    journal: Arc<Journal>,
}

/// A gateway that listens.
struct Reader {
    registry: Registry,
    peers: Peers,
    counters: Arc<Counters>,
    now: Instant,
}

fn spec(worker: u64) -> WorkerSpec {
    let json = format!(
        r#"{{"id": {worker}, "url": "http://w{worker}", "engine": "vllm", "role": "aggregated", "dp_size": 2, "models": ["m"]}}"#
    );
    serde_json::from_str(&json).unwrap()
}

fn candidates(registry: &Registry) -> Vec<Candidate> {
    registry.snapshot().pool(&ModelName::new("m"), Leg::Aggregated).to_vec()
}

impl Sender {
    fn new(incarnation: u64, journal_length: usize) -> Self {
        let (journal, changed): (_, Receiver<Arc<JournalEntry>>) = Journal::new(journal_length);
        let registry = Registry::with_journal(Some(journal.clone()));
        registry.apply(vec![spec(1), spec(2)], &[]);
        let mut outbox = Outbox::new(changed, incarnation, LEASE.as_millis() as u64, 16);
        outbox.set_limit(4_096);
        Self { registry, outbox, journal }
    }

    fn book(&self, which: usize, blocks: &[u64], reuse: bool) -> Booking {
        let candidates = candidates(&self.registry);
        let prefix: Vec<_> = blocks.iter().map(|block| BlockHash(*block)).collect();
        candidates[which % candidates.len()].book(&BookingRequest {
            new_prefill_tokens: 80,
            total_prompt_blocks: blocks.len() as u32 + 1,
            assume_kv_reuse: reuse,
            ..BookingRequest::new(Leg::Aggregated, prefix.into(), 100, 16)
        })
    }

    fn loads(&self) -> Vec<(u32, u32, u32)> {
        candidates(&self.registry)
            .iter()
            .map(|candidate| {
                let load = candidate.load();
                (load.own_requests(), load.active_prefill_tokens(), load.decode_blocks())
            })
            .collect()
    }
}

impl Reader {
    fn new(workers: &[u64]) -> Self {
        let (registry, counters) = (Registry::default(), Arc::<Counters>::default());
        registry.apply(workers.iter().map(|worker| spec(*worker)).collect(), &[]);
        let mut peers = Peers::new(("me".into(), 1), 16, LIMITS, counters.clone());
        peers.set_workers(&registry.snapshot());
        Self { registry, peers, counters, now: Instant::now() }
    }

    fn receive(&mut self, messages: Vec<bytes::Bytes>) -> Vec<Effect> {
        self.receive_from("a", messages)
    }

    fn receive_from(&mut self, from: &str, messages: Vec<bytes::Bytes>) -> Vec<Effect> {
        messages.iter().flat_map(|bytes| self.peers.receive(from, bytes, self.now).unwrap()).collect()
    }

    fn loads(&self) -> Vec<(u32, u32, u32)> {
        candidates(&self.registry)
            .iter()
            .map(|candidate| {
                let load = candidate.load().remote();
                (load.active_requests, load.active_prefill_tokens, load.decode_blocks)
            })
            .collect()
    }
}

#[test]
fn q1_load_of_another_gateway_counts_in_the_facts_of_a_rank() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let mut booking = sender.book(1, &[1, 2, 3], true);
    assert_eq!(reader.receive(sender.outbox.batch(Vec::new()))[0], Effect::Joined("a".into()));
    let load = candidates(&reader.registry)[1].load().remote();
    assert_eq!((load.active_requests, load.active_prefill_tokens, load.decode_blocks), (1, 80, 4));
    let (candidate, own) = (candidates(&reader.registry)[1].clone(), sender.book(1, &[], false));
    // Q1.1
    assert_eq!((candidate.load().active_requests(), candidate.load().own_requests()), (1, 0));
    assert_eq!((candidate.load().active_prefill_tokens(), candidate.load().decode_blocks()), (80, 4));
    // A prompt that shares two blocks adds the others.
    let prefix: Prefix = [1, 2, 9].map(BlockHash).to_vec().into();
    assert_eq!(candidate.load().blocks_after_admission(&prefix, 4, true), 4 + 2);
    drop(own);
    booking.prefill_done();
    booking.output_tokens(40);
    reader.receive(sender.outbox.batch(Vec::new()));
    // 140 tokens are 9 blocks.
    assert_eq!(reader.loads()[1], (1, 0, 9));
    drop(booking);
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!(reader.loads(), [(0, 0, 0); 4]);
}

#[test]
fn q1_a_worker_is_found_by_its_url_and_otherwise_by_its_id() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[]));
    let renamed = WorkerSpec { id: WorkerId(77), ..spec(1) };
    let moved = WorkerSpec { url: "http://elsewhere".into(), ..spec(2) };
    reader.registry.apply(vec![renamed, moved], &[]);
    reader.peers.set_workers(&reader.registry.snapshot());
    let _bookings = [sender.book(0, &[], false), sender.book(2, &[], false)];
    reader.receive(sender.outbox.batch(Vec::new()));
    // Q1.4
    assert_eq!(reader.loads(), [(1, 80, 1), (0, 0, 0), (1, 80, 1), (0, 0, 0)]);
}

#[test]
fn q1_the_url_of_a_worker_counts_more_than_its_id() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[]));
    // Here 2 has the URL that 1 has there, and 1 that of 2.
    let swapped = |id: u64, url: u64| WorkerSpec { id: WorkerId(id), ..spec(url) };
    reader.registry.apply(vec![swapped(2, 1), swapped(1, 2)], &[]);
    reader.peers.set_workers(&reader.registry.snapshot());
    let _booking = sender.book(0, &[], false);
    reader.receive(sender.outbox.batch(Vec::new()));
    for candidate in candidates(&reader.registry) {
        let is_it = (candidate.worker_id(), candidate.rank) == (WorkerId(2), DpRank(0));
        // Q1.4
        assert_eq!(candidate.load().remote().active_requests, u32::from(is_it), "{candidate:?}");
    }
}

#[test]
fn q1_bookings_of_an_unknown_worker_wait_until_it_is_registered() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1]));
    let _booking = sender.book(2, &[1], true);
    reader.receive(sender.outbox.batch(Vec::new()));
    // Q1.3
    assert_eq!((reader.loads(), reader.peers.status(reader.now)[0].unknown_worker), (vec![(0, 0, 0); 2], 1));
    reader.registry.apply(vec![spec(2)], &[]);
    reader.peers.set_workers(&reader.registry.snapshot());
    // Q1.3
    assert_eq!(reader.loads(), [(0, 0, 0), (0, 0, 0), (1, 80, 2), (0, 0, 0)]);
    reader.registry.apply(vec![], &[WorkerId(2)]);
    reader.peers.set_workers(&reader.registry.snapshot());
    assert_eq!(reader.peers.status(reader.now)[0].unknown_worker, 1);
}

#[test]
fn q1_blocks_of_another_size_are_counted_without_hashes() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    reader.peers = Peers::new(("me".into(), 1), 64, LIMITS, reader.counters.clone());
    reader.peers.set_workers(&reader.registry.snapshot());
    let _bookings = [sender.book(0, &[1, 2, 3, 4, 5, 6, 7], true), sender.book(0, &[1, 2, 3], false)];
    let effects = reader.receive(sender.outbox.batch(Vec::new()));
    // 12 blocks of 16 tokens are 3 of 64.
    // Q1.6
    assert_eq!(reader.loads()[0], (2, 160, 3));
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Sent { .. })), "{effects:?}");
}

#[test]
fn q5_a_reader_learns_what_a_worker_was_sent_once() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let _booking = sender.book(3, &[1, 2], false);
    let effects = reader.receive(sender.outbox.batch(Vec::new()));
    let prefix: Prefix = [1, 2].map(BlockHash).to_vec().into();
    // Q5.1
    assert_eq!(effects[1], Effect::Sent { worker: WorkerId(2), rank: DpRank(1), prefix });
    assert_eq!(reader.receive(sender.outbox.snapshot(Vec::new())), []);
}

#[test]
fn f5_a_worker_without_a_prefix_cache_keeps_nothing_of_what_other_gateways_sent() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let facts = EngineFacts { prefix_cache: Some(false), ..EngineFacts::default() };
    reader.registry.snapshot().get(WorkerId(2)).unwrap().set_facts(facts);
    let _bookings = [sender.book(3, &[1, 2], false), sender.book(0, &[1, 2], false)];
    let effects = reader.receive(sender.outbox.batch(Vec::new()));
    let sent = effects.iter().filter_map(|effect| match effect {
        Effect::Sent { worker, .. } => Some(*worker),
        _ => None,
    });
    // F5.5
    assert_eq!(sent.collect::<Vec<_>>(), [WorkerId(1)]);
    assert_eq!(reader.loads()[3].0, 1, "its load counts");
}

#[test]
fn q2_a_lost_message_is_repaired_by_the_next_snapshot() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    reader.receive(sender.outbox.snapshot(Vec::new()));
    assert_eq!(reader.peers.to_ask(reader.now), []);
    let (kept, ended) = (sender.book(0, &[1], true), sender.book(0, &[2], true));
    reader.receive(sender.outbox.batch(Vec::new()));
    drop(ended);
    let hidden = sender.book(3, &[3], true);
    drop(sender.outbox.batch(Vec::new()));
    reader.receive(vec![sender.outbox.heartbeat()]);
    // The free was lost, and the new booking.
    assert_eq!((reader.loads()[0].0, reader.loads()[3].0), (2, 0));
    // Q2.1
    assert_eq!(reader.peers.to_ask(reader.now), ["a".into()]);
    assert_eq!(reader.peers.to_ask(reader.now), []);
    reader.receive(sender.outbox.snapshot(Vec::new()));
    // Q2.1
    assert_eq!((reader.loads(), reader.peers.to_ask(reader.now + LEASE)), (sender.loads(), vec![]));
    assert_eq!(reader.counters.lost.load(Relaxed), 1);
    drop((kept, hidden));
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!(reader.loads(), [(0, 0, 0); 4]);
}

#[test]
fn q2_a_silent_gateway_is_forgotten_within_its_lease() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let _booking = sender.book(0, &[1], true);
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!(reader.peers.expire(reader.now + LEASE - Duration::from_millis(1)), []);
    assert_eq!(reader.loads()[0].0, 1);
    // Q2.2
    assert_eq!(reader.peers.expire(reader.now + LEASE), [Effect::Silent("a".into())]);
    assert_eq!((reader.loads(), reader.peers.hashes), (vec![(0, 0, 0); 4], 0));
}

#[test]
fn q2_the_bookings_of_a_restarted_gateway_end_with_its_first_message() {
    let (mut old, mut new, mut reader) = (Sender::new(5, 100), Sender::new(6, 100), Reader::new(&[1, 2]));
    let _booking = old.book(0, &[1], true);
    reader.receive(old.outbox.batch(Vec::new()));
    // Q2.3
    assert_eq!(reader.receive(vec![new.outbox.heartbeat()]), [Effect::Restarted("a".into())]);
    assert_eq!((reader.loads(), reader.peers.hashes), (vec![(0, 0, 0); 4], 0));
    let late = old.outbox.heartbeat();
    assert_eq!(reader.peers.receive("a", &late, reader.now), Err(Refused::OldProcess));
}

#[test]
fn q2_a_gateway_that_stops_is_forgotten_at_once() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let _booking = sender.book(0, &[1], true);
    reader.receive(sender.outbox.batch(Vec::new()));
    // Q2.4
    assert_eq!(reader.receive(vec![sender.outbox.stop_message()]), [Effect::Left("a".into())]);
    assert_eq!(reader.loads(), [(0, 0, 0); 4]);
}

#[test]
fn a_question_is_for_all_or_for_the_gateway_that_it_names() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[]));
    reader.receive(vec![sender.outbox.heartbeat()]);
    let mut effects = |name| reader.receive(vec![sender.outbox.ask(name)]);
    assert_eq!(effects(""), [Effect::Asked { all: true }]);
    assert_eq!(effects("me"), [Effect::Asked { all: false }]);
    assert_eq!(effects("b"), []);
}

#[test]
fn q4_a_full_journal_delays_no_booking_and_loses_no_end() {
    let (mut sender, mut reader) = (Sender::new(5, 2), Reader::new(&[1, 2]));
    let mut bookings: Vec<Booking> = (0..4).map(|which| sender.book(which, &[1], true)).collect();
    // Q4.4
    assert_eq!(sender.journal.lost(), 2);
    reader.receive(sender.outbox.batch(Vec::new()));
    // The next change tells a booking that was lost.
    bookings[3].prefill_done();
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!(reader.loads().iter().map(|load| load.0).collect::<Vec<_>>(), [1, 1, 0, 1]);
    bookings.clear();
    reader.receive(sender.outbox.batch(Vec::new()));
    reader.receive(sender.outbox.snapshot(Vec::new()));
    // Q4.4
    assert_eq!((reader.loads(), sender.outbox.bookings()), (vec![(0, 0, 0); 4], 0));
}

proptest! {
    #[test]
    fn q1_a_reader_agrees_with_the_sender_whatever_was_lost(
        steps in proptest::collection::vec((0_u8..6, any::<prop::sample::Index>(), 0_u64..4), 1..120),
        lost in proptest::collection::vec(any::<bool>(), 120),
    ) {
        let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
        let mut held: Vec<Booking> = Vec::new();
        for ((step, which, prompt), lost) in steps.into_iter().zip(lost) {
            let one = if held.is_empty() { 0 } else { which.index(held.len()) };
            let long: Vec<u64> = (0..prompt * 200).map(|block| block + prompt * 1_000).collect();
            match step {
                0 | 1 if held.len() < 40 => held.push(sender.book(which.index(4), &long, prompt % 2 == 0)),
                2 if !held.is_empty() => drop(held.swap_remove(one)),
                3 if !held.is_empty() => held[one].prefill_done(),
                4 if !held.is_empty() => drop(held[one].output_tokens(prompt as u32 * 40)),
                _ => {
                    let messages = sender.outbox.batch(Vec::new());
                    if !lost {
                        reader.receive(messages);
                    }
                }
            }
        }
        reader.receive(sender.outbox.batch(Vec::new()));
        reader.receive(sender.outbox.snapshot(Vec::new()));
        // Q1.2
        prop_assert_eq!(reader.loads(), sender.loads());
        held.clear();
        reader.receive(sender.outbox.batch(Vec::new()));
        prop_assert_eq!(reader.loads(), vec![(0, 0, 0); 4]);
        prop_assert_eq!(reader.peers.hashes, 0);
    }
}
