use proptest::prelude::*;

use super::*;

const HEADER: Header = Header { incarnation: 7, sequence: 9, lease_ms: 3_000, block_size: 16 };

fn message(kind: Kind, write: impl FnOnce(&mut MessageWriter)) -> Message {
    let mut writer = MessageWriter::new(HEADER, &kind);
    write(&mut writer);
    Message::decode(&writer.finish()).unwrap()
}

#[test]
fn what_is_written_is_read() {
    let values = LoadValues { prefill_tokens: 300, unnamed_millis: 1_500 };
    let read = message(Kind::Batch, |writer| {
        writer.update(1_000_000, values);
        writer.free(3);
    });
    let expected = Message {
        incarnation: 7,
        sequence: 9,
        lease_ms: 3_000,
        block_size: 16,
        kind: Kind::Batch,
        entries: vec![Entry::Update { id: 1_000_000, values }, Entry::Free { id: 3 }],
    };
    assert_eq!(read, expected);
    for kind in
        [Kind::Snapshot { number: 4, part: 1, parts: 300 }, Kind::Ask("gateway-2".to_owned()), Kind::Bye]
    {
        assert_eq!(message(kind.clone(), |_| {}).kind, kind);
    }
}

#[test]
fn load_that_no_booking_has_is_limited() {
    let values = LoadValues { prefill_tokens: u32::MAX, unnamed_millis: -5 };
    let read = message(Kind::Batch, |writer| writer.update(1, values));
    let limited = LoadValues { prefill_tokens: MAX_TOKENS, unnamed_millis: 0 };
    assert_eq!(read.entries, [Entry::Update { id: 1, values: limited }]);
}

#[test]
fn q4_bytes_that_are_no_message_are_refused_with_the_reason() {
    let good = MessageWriter::new(HEADER, &Kind::Batch).finish();
    let with = |more: &[u8]| Message::decode(&[&good, more].concat());
    // Q4.1
    assert_eq!(Message::decode(&[]), Err(WireError::Short));
    assert_eq!(Message::decode(&[2]), Err(WireError::Version(2)));
    assert_eq!(Message::decode(&vec![1; MAX_MESSAGE + 1]), Err(WireError::TooLong(MAX_MESSAGE + 1)));
    assert_eq!(with(&[99]), Err(WireError::Unknown { what: "entry", value: 99 }));
    assert_eq!(with(&[UPDATE, 1, 1]), Err(WireError::Short));
    assert_eq!(
        with(&[FREE, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
        Err(WireError::Range("number"))
    );
    assert_eq!(with(&[UPDATE, 1, 0xff, 0xff, 0xff, 0xff, 0x0f, 0]), Err(WireError::Range("load")));
    let many = [FREE, 0].repeat(MAX_ENTRIES + 1);
    assert_eq!(with(&many), Err(WireError::Range("number of entries")));
    let mut hashes = vec![ADD, 1, 0];
    hashes.extend([0; 8]);
    hashes.extend([0, 0, 0, 0xff, 0xff, 0x7f]);
    assert_eq!(with(&hashes), Err(WireError::Range("number of hashes")));
}

proptest! {
    #[test]
    fn q4_no_bytes_make_the_reader_panic(
        start in prop::sample::select(vec![0_u8, 1, 2, 3]),
        rest in proptest::collection::vec(any::<u8>(), 0..400),
        tags in any::<bool>(),
    ) {
        let mut bytes = vec![VERSION, start];
        // Half of the cases get far into the entries.
        if tags {
            bytes = MessageWriter::new(HEADER, &Kind::Batch).finish().to_vec();
            bytes.extend(rest.iter().map(|byte| byte % 5));
        } else {
            bytes.extend(&rest);
        }
        // Q4.1
        let _ = Message::decode(&bytes);
    }
}
