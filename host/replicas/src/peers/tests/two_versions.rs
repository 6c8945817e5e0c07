//! Gateways of this version and of the one before in one fleet, as in a rolling update.

use super::*;
use crate::wire::{Entry, Kind, Message};

/// A heartbeat and a snapshot of one empty part, as the version before writes them.
fn of_version_before(incarnation: u64, sequence: u64) -> [Vec<u8>; 2] {
    let message = |kind: u8, sequence: u64, more: &[u8]| {
        let head = [&[1, kind][..], &incarnation.to_le_bytes(), &sequence.to_le_bytes()].concat();
        // The lease is 3,000 ms, and a block has 16 tokens.
        [&head, &[0xb8, 0x17, 16][..], more].concat()
    };
    [message(0, sequence, &[]), message(1, sequence + 1, &[1, 0, 1])]
}

/// Reads what follows the header of a heartbeat as the version before does: entries whose first byte is 3 end
/// the booking with an id, and one that it does not know has no effect.
fn ended_bookings(heartbeat: &[u8]) -> Vec<u64> {
    let (entries, mut ended) = (&heartbeat[of_version_before(5, 1)[0].len()..], Vec::new());
    let mut bytes = entries.iter().copied();
    while let Some(tag) = bytes.next() {
        assert_eq!(tag, 3);
        let (mut id, mut shift) = (0_u128, 0);
        loop {
            let byte = bytes.next().unwrap();
            id |= u128::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        ended.push(u64::try_from(id).unwrap());
    }
    ended
}

#[test]
fn q8_a_gateway_of_the_version_before_is_read_without_its_clock() {
    let mut reader = Reader::new(&[1, 2]);
    let messages = of_version_before(5, 1).map(bytes::Bytes::from).to_vec();
    reader.receive(messages);
    let status = &reader.peers.status(reader.now)[0];
    // Q8.2
    assert_eq!((status.in_sync, status.clock_ahead_ms, status.lost_messages), (true, None, 0));
    // Q6.6: it is older, and sends its own bindings only
    assert!(reader.peers.sends_all_bindings());
}

#[test]
fn q8_the_version_before_reads_a_heartbeat_as_the_end_of_an_unknown_booking() {
    let heartbeat = Sender::new(5, 10).outbox.heartbeat();
    let old = &of_version_before(5, 1)[0];
    // Q8.2
    assert_eq!(heartbeat[..old.len()], old[..]);
    let ended = ended_bookings(&heartbeat);
    assert!(ended.len() == 1 && ended[0] > u64::MAX / 2, "{ended:?}");
}

#[test]
fn q8_the_clock_of_another_gateway_is_compared_with_the_one_here() {
    let (mut sender, mut reader) = (Sender::new(5, 100), Reader::new(&[]));
    let ahead = |reader: &Reader| reader.peers.status(reader.now)[0].clock_ahead_ms.unwrap();
    reader.receive(sender.outbox.snapshot(Vec::new()));
    // Q8.1
    assert!(ahead(&reader).abs() < 1_000, "{}", ahead(&reader));
    for (difference_s, sequence) in [(300, 10), (-130, 11)] {
        let header = crate::wire::Header { incarnation: 5, sequence, lease_ms: 3_000, block_size: 16 };
        let mut writer = crate::wire::MessageWriter::new(header, &Kind::Batch);
        writer.clock(pointsman_workers::unix_us().saturating_add_signed(difference_s * 1_000_000));
        let message = writer.finish();
        assert!(matches!(Message::decode(&message).unwrap().entries[..], [Entry::Clock { .. }]));
        reader.receive(vec![message]);
        // Q8.1
        assert!((ahead(&reader) - difference_s * 1_000).abs() < 1_000, "{}", ahead(&reader));
    }
}

#[test]
fn q4_a_gateway_that_hears_two_processes_with_one_name_names_the_conflict() {
    let (mut old, mut new, mut reader) = (Sender::new(5, 100), Sender::new(6, 100), Reader::new(&[]));
    reader.receive(vec![old.outbox.heartbeat()]);
    reader.receive(vec![new.outbox.heartbeat()]);
    let mut refused = |after| reader.peers.receive("a", &old.outbox.heartbeat(), reader.now + after);
    // A process that was restarted may have sent its last messages a moment ago.
    assert_eq!(refused(LEASE / 2), Err(Refused::OldProcess));
    // Q4.6
    assert_eq!(refused(LEASE), Err(Refused::NameOfTwo));
}
