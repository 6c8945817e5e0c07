//! Gateways that are wrong, or hostile.

use super::*;

#[test]
fn q4_what_one_gateway_and_all_together_may_send_is_bounded() {
    let mut reader = Reader::new(&[1, 2]);
    let mut senders: Vec<Sender> = (0..4).map(|_| Sender::new(5, 1_000)).collect();
    let bookings: Vec<Booking> = (0..80).map(|which| senders[0].book(which, &[1], false)).collect();
    reader.receive_from("a", senders[0].outbox.batch(Vec::new()));
    // Q4.2
    assert_eq!(reader.peers.status(reader.now)[0].bookings, LIMITS.bookings);
    assert_eq!(reader.counters.over_limit.load(Relaxed), 80 - LIMITS.bookings as u64);
    reader.receive_from("b", vec![senders[1].outbox.heartbeat()]);
    reader.receive_from("c", vec![senders[2].outbox.heartbeat()]);
    let fourth = senders[3].outbox.heartbeat();
    // Q4.2
    assert_eq!(reader.peers.receive("d", &fourth, reader.now), Err(Refused::TooMany));
    drop(bookings);
}

#[test]
fn q4_blocks_beyond_the_limit_of_hashes_are_counted_without_them() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    reader.peers.limits.hashes = 500;
    let bookings: Vec<Booking> = (0..3)
        .map(|prompt| sender.book(0, &(prompt * 1_000..prompt * 1_000 + 300).collect::<Vec<_>>(), true))
        .collect();
    reader.receive(sender.outbox.batch(Vec::new()));
    // Q4.2
    assert_eq!((reader.peers.hashes, reader.loads()[0].2), (300, 3 * 301));
    drop(bookings);
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!((reader.peers.hashes, reader.loads()[0].2), (0, 0));
}

#[test]
fn q4_a_prompt_that_fits_into_no_message_is_told_with_fewer_hashes() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let mut booking = sender.book(0, &(0..3_000).collect::<Vec<_>>(), true);
    let messages = sender.outbox.batch(Vec::new());
    assert!(messages.iter().all(|message| message.len() <= 4_096));
    reader.receive(messages);
    assert_eq!(reader.loads()[0].2, 3_001);
    booking.prefill_done();
    reader.receive(sender.outbox.batch(Vec::new()));
    assert_eq!(reader.loads()[0], (1, 0, 3_001));
}

#[test]
fn q4_messages_under_a_wrong_name_are_refused() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[]));
    let message = sender.outbox.heartbeat();
    for name in ["", "a.b", "a b", "*", ">", &"x".repeat(65)] {
        // Q4.1
        assert_eq!(reader.peers.receive(name, &message, reader.now), Err(Refused::Name), "{name}");
    }
    assert_eq!(reader.peers.receive("me", &message, reader.now), Err(Refused::OwnName));
    let own = Sender::new(1, 10).outbox.heartbeat();
    assert_eq!(reader.peers.receive("me", &own, reader.now), Err(Refused::Repeated));
    assert_eq!(
        reader.peers.receive("a", b"\x01garbage", reader.now),
        Err(Refused::Garbage(WireError::Short))
    );
}

#[test]
fn a_message_that_arrives_twice_counts_once() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let _booking = sender.book(0, &[], false);
    let messages = sender.outbox.batch(Vec::new());
    reader.receive(messages.clone());
    assert_eq!(reader.peers.receive("a", &messages[0], reader.now), Err(Refused::Repeated));
    assert_eq!(reader.loads()[0].0, 1);
}

#[test]
fn a_snapshot_with_a_missing_part_ends_no_booking() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
    let blocks: Vec<u64> = (0..300).collect();
    let bookings: Vec<Booking> = (0..6).map(|which| sender.book(which, &blocks, true)).collect();
    reader.receive(sender.outbox.batch(Vec::new()));
    let mut parts = sender.outbox.snapshot(Vec::new());
    assert!(parts.len() >= 3, "{}", parts.len());
    parts.remove(1);
    reader.receive(parts);
    assert_eq!((reader.loads(), reader.peers.to_ask(reader.now).len()), (sender.loads(), 1));
    reader.receive(sender.outbox.snapshot(Vec::new()));
    assert!(reader.peers.status(reader.now)[0].in_sync);
    drop(bookings);
}

proptest! {
    /// Hashes that form no chain break the tree of remote blocks at most until its bookings ended.
    #[test]
    fn q4_wrong_hashes_leave_nothing_behind(
        prompts in proptest::collection::vec(proptest::collection::vec(0_u64..6, 0..8), 1..30),
        order in proptest::collection::vec(any::<prop::sample::Index>(), 30),
    ) {
        let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[1, 2]));
        let own = reader.loads();
        let mut held: Vec<Booking> = prompts.iter().map(|prompt| sender.book(0, prompt, true)).collect();
        reader.receive(sender.outbox.batch(Vec::new()));
        for which in order {
            if held.is_empty() {
                break;
            }
            drop(held.swap_remove(which.index(held.len())));
            reader.receive(sender.outbox.batch(Vec::new()));
        }
        held.clear();
        reader.receive(sender.outbox.batch(Vec::new()));
        // Q4.2
        prop_assert_eq!(reader.loads(), own);
    }
}
