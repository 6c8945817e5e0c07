use proptest::prelude::*;
use serde_json::{Value, json};

use xxhash_rust::xxh3::xxh3_64;

use super::*;

const VLLM_FIRST: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/vllm-000.bin");
const VLLM_CHILD: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/vllm-001.bin");
const VLLM_SALT: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/vllm-005.bin");
const VLLM_CLEARED: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/vllm-P-012.bin");
const VLLM_EVICT: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/vllm-evict-002.bin");
const DYNAMO: &[u8] = include_bytes!("../../../tests/fixtures/kvevents/dynamo-mocker-2-000.bin");
const ALL: [&[u8]; 6] = [VLLM_FIRST, VLLM_CHILD, VLLM_SALT, VLLM_CLEARED, VLLM_EVICT, DYNAMO];

fn stored(payload: &[u8]) -> Stored {
    match decode_batch(payload).expect("batch").events.pop() {
        Some(KvEvent::Stored(stored)) => stored,
        other => panic!("not a store: {other:?}"),
    }
}

/// One event in a batch, as bytes.
fn bytes(event: &Value) -> Vec<u8> {
    rmp_serde::to_vec(&json!([1.5, [event], 3])).expect("msgpack")
}

fn one(event: &Value) -> Result<KvEvent, DecodeError> {
    decode_batch(&bytes(event)).map(|mut batch| batch.events.pop().expect("an event"))
}

/// A batch of one `BlockRemoved`, whose one hash is `hash` in msgpack.
fn removal_of(hash: &[u8]) -> Result<Vec<u64>, DecodeError> {
    let mut payload = vec![0x92, 0x01, 0x91, 0x92, 0xac];
    payload.extend_from_slice(b"BlockRemoved");
    payload.push(0x91);
    payload.extend_from_slice(hash);
    decode_batch(&payload).map(|mut batch| match batch.events.pop() {
        Some(KvEvent::Removed { hashes, .. }) => hashes,
        other => panic!("not a removal: {other:?}"),
    })
}

#[test]
fn h6_real_stores_are_read() {
    // (capture, blocks, first hash, parent, tokens, first token, block size, extra keys of the first block)
    let none: &[&str] = &[];
    #[rustfmt::skip]
    let table = [
        (VLLM_FIRST, 4, 11_151_763_832_581_553_918, None, 128, 386, 32, none),
        (VLLM_CHILD, 1, 2_443_395_063_282_544_188, Some(3_738_376_988_747_684_940), 32, 1049, 32, none),
        (VLLM_SALT, 4, 1_946_775_224_780_330_284, None, 128, 386, 32, &["tenantA"]),
        (DYNAMO, 11, 14_918_379_683_798_413_696, None, 176, 613, 16, none),
    ];
    for (payload, blocks, first, parent, tokens, token, block_size, extra) in table {
        let batch = decode_batch(payload).expect("batch");
        assert_eq!((batch.dp_rank, batch.events.len()), (Some(0), 1));
        assert!(batch.ts > 1.7e9, "{}", batch.ts);
        let stored = stored(payload);
        // H6.1, H6.3
        assert_eq!((stored.hashes.len(), stored.hashes[0], stored.parent), (blocks, first, parent));
        assert_eq!(
            (stored.token_ids.len(), stored.token_ids[0], stored.block_size),
            (tokens, token, block_size)
        );
        assert_eq!((stored.tier, stored.group, stored.lora), (Tier::Device, Some(0), None));
        let first = stored.extra_keys.first().into_iter().flatten();
        assert_eq!(first.filter_map(ExtraKey::text).collect::<Vec<_>>(), extra);
    }
}

#[test]
fn h6_an_unknown_event_that_removes_is_an_error() {
    for name in ["PrefixCacheCleared", "BlockEvicted", "BlocksRemovedByPrefix"] {
        let event = json!({"type": name, "block_hashes": [9]});
        // H6.18
        assert!(one(&event).is_err() && one(&json!([name, [9]])).is_err(), "{name}");
    }
    assert_eq!(one(&json!(["BlockPinned"])).expect("skipped"), KvEvent::Unknown("BlockPinned".to_owned()));
}

#[test]
fn h6_real_removals_come_before_the_store() {
    let batch = decode_batch(VLLM_EVICT).expect("batch");
    let (last, before) = batch.events.split_last().expect("events");
    // H6.11
    assert!(matches!(last, KvEvent::Stored(_)), "{last:?}");
    assert!(before.len() > 5);
    for event in before {
        assert!(matches!(
            event,
            KvEvent::Removed { hashes, tier: Tier::Device, group: Some(0) } if hashes.len() == 1
        ));
    }
    assert_eq!(decode_batch(VLLM_CLEARED).expect("batch").events, [KvEvent::Cleared]);
}

#[test]
fn h6_tagged_extra_keys_are_those_without_a_tag() {
    let store = |keys: Value| {
        one(
            &json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1, 2],
            "block_size": 2, "lora_name": "fr", "extra_keys": [keys]}),
        )
    };
    let untagged = store(json!(["fr", ["img", 3], "tenantA"])).expect("a store");
    // H6.12
    let tagged = json!([["lora", "fr"], ["mm", "img", 3], ["cache_salt", "tenantA"]]);
    assert_eq!(store(tagged).expect("a store"), untagged);
}

#[test]
fn h6_both_forms_say_the_same() {
    let expected = KvEvent::Stored(Stored {
        hashes: vec![7, u64::MAX],
        parent: Some(u64::MAX - 1),
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        lora: Some(String::from("fr")),
        tier: Tier::Host,
        extra_keys: vec![
            vec![ExtraKey::Text("fr".to_owned()), ExtraKey::Object { hash: xxh3_64(b"img"), offset: 3 }],
            vec![],
        ],
        group: Some(1),
        kind: Some(GroupKind::Full),
        locals: None,
        lacks_tokens: false,
        reused: false,
    });
    let extra = json!([["fr", ["img", 3]], null]);
    let positional = json!(["BlockStored", [7, -1], -2, [1, 2, 3, 4], 2, 5, "CPU", "fr", extra, 1, "full_attention", {"x": [1]}]);
    let named = json!({"zzz": {"deep": [[1]]}, "kv_cache_spec_kind": "mla_attention",
        "token_ids": [1, 2, 3, 4], "group_idx": 1, "lora_name": "fr", "lora_id": 5,
        "extra_keys": extra, "parent_block_hash": -2, "medium": "cpu", "block_hashes": [7, -1], "block_size": 2,
        "type": "BlockStored"});
    // H6.2, H6.3, H6.5
    assert_eq!(one(&positional).expect("positional"), expected);
    // H6.2, H6.5
    assert_eq!(one(&named).expect("named"), expected);
    let removed = KvEvent::Removed { hashes: vec![9], tier: Tier::Disk, group: Some(2) };
    assert_eq!(one(&json!(["BlockRemoved", [9], "DISK", 2, "more"])).expect("positional"), removed);
    let named = json!({"type": "BlockRemoved", "block_hashes": [9], "medium": "nvme", "group_idx": 2});
    assert_eq!(one(&named).expect("named"), removed);
    assert_eq!(one(&json!(["AllBlocksCleared"])).expect("positional"), KvEvent::Cleared);
}

#[test]
fn h6_the_kind_of_a_group_is_read() {
    let kind = |name: Value, window: Value| {
        let named = json!({"type": "BlockStored", "block_hashes": [1], "kv_cache_spec_kind": name,
            "kv_cache_spec_sliding_window": window});
        let none = Value::Null;
        let positional =
            json!(["BlockStored", [1], none, [], 16, none, none, none, none, 2, name, window, "more"]);
        let [named, positional] = [named, positional].map(|event| match one(&event) {
            Ok(KvEvent::Stored(stored)) => stored.kind,
            other => panic!("not a store: {other:?}"),
        });
        assert_eq!(named, positional);
        named
    };
    let table = [
        (json!("full_attention"), json!(null), Some(GroupKind::Full)),
        (json!("mla_attention"), json!(128), Some(GroupKind::Full)),
        (json!("sink_full_attention"), json!(null), Some(GroupKind::Full)),
        (json!("sliding_window"), json!(128), Some(GroupKind::Window(128))),
        (json!("sliding_window_mla"), json!(1), Some(GroupKind::Window(1))),
        (json!("sliding_window"), json!(null), Some(GroupKind::Other)),
        (json!("sliding_window"), json!(0), Some(GroupKind::Other)),
        (json!("sliding_window"), json!(-1), Some(GroupKind::Other)),
        (json!("mamba"), json!(null), Some(GroupKind::State)),
        (json!("chunked_local_attention"), json!({"chunk": [1]}), Some(GroupKind::Other)),
        (json!("unknown"), json!(null), None),
        (json!(null), json!(128), None),
        (json!([1, {"a": 2.5}]), json!(true), None),
        (json!(7), json!("x"), None),
    ];
    for (name, window, expected) in table {
        // H6.3, H6.5
        assert_eq!(kind(name.clone(), window), expected, "{name}");
    }
}

#[test]
fn h6_trailing_fields_may_be_missing() {
    let short = Stored { hashes: vec![1], ..Stored::default() };
    for event in [
        json!(["BlockStored", [1]]),
        json!(["BlockStored", [1], null, null, null, null, null, null, null, null]),
        json!({"type": "BlockStored", "block_hashes": [1]}),
        json!(["BlockStored", [1], null, [], 0, 0]),
    ] {
        assert_eq!(one(&event).expect("store"), KvEvent::Stored(short.clone()), "{event}");
    }
    let by_number = one(&json!(["BlockStored", [1], null, [], 0, 12])).expect("store");
    assert_eq!(by_number, KvEvent::Stored(Stored { lora: Some(String::from("12")), ..short }));
    let batch = decode_batch(&rmp_serde::to_vec(&json!([1, []])).expect("msgpack")).expect("batch");
    assert_eq!(batch, Batch { ts: 1.0, dp_rank: None, events: vec![] });
    let batch =
        decode_batch(&rmp_serde::to_vec(&json!([1.0, [], null, "more"])).expect("msgpack")).expect("batch");
    assert_eq!(batch.dp_rank, None);
}

#[test]
fn h6_unknown_events_are_skipped_and_named() {
    for event in [json!(["Moved", [1, [2]], {"a": 1}]), json!({"type": "Moved", "a": [{"b": 1.5}]})] {
        // H6.5
        assert_eq!(one(&event).expect("unknown"), KvEvent::Unknown(String::from("Moved")), "{event}");
    }
    // {"type": "Moved", "token_ids": "x"}: once the type is known to be unknown, our names mean nothing.
    let head = [0x92, 0x01, 0x91, 0x82].as_slice();
    let odd = [head, b"\xa4type\xa5Moved\xa9token_ids\xa1x".as_slice()].concat();
    assert_eq!(decode_batch(&odd).expect("batch").events, [KvEvent::Unknown(String::from("Moved"))]);
    let KvEvent::Unknown(name) = one(&json!(["é".repeat(1000)])).expect("unknown") else { panic!("known") };
    assert_eq!(name.chars().count(), 64);
}

#[test]
fn h6_hashes_are_integers_or_the_last_eight_bytes() {
    let long = [&[0xc4, 10, 0xaa, 0xbb], &[1, 2, 3, 4, 5, 6, 7, 8][..]].concat();
    // H6.4
    assert_eq!(removal_of(&long).expect("bytes"), [0x0102_0304_0506_0708]);
    assert_eq!(removal_of(&[0xc4, 2, 1, 2]).expect("short bytes"), [0x0102]);
    assert_eq!(removal_of(&[0xff]).expect("negative"), [u64::MAX]);
    assert_eq!(removal_of(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0]).expect("least"), [1 << 63]);
    assert_eq!(removal_of(&[[0xcf].as_slice(), &[0xff; 8]].concat()).expect("greatest"), [u64::MAX]);
    removal_of(&[0xc4, 0]).expect_err("no bytes");
    removal_of(&[0xc0]).expect_err("nil");
}

#[test]
fn h6_mediums_are_tiers() {
    for (medium, tier) in [
        ("GPU", Tier::Device),
        ("", Tier::Device),
        ("CPU", Tier::Host),
        ("CPU_PINNED", Tier::Host),
        ("disk", Tier::Disk),
        ("SSD", Tier::Disk),
        ("STORAGE", Tier::Disk),
        ("é", Tier::Disk),
    ] {
        assert_eq!(Tier::of_medium(medium), tier, "{medium}");
    }
}

#[test]
fn h6_the_first_token_of_a_pair_counts() {
    let pairs = json!(["BlockStored", [1], null, [[5, 6], [6, 7], [7, 8]], 3]);
    let Ok(KvEvent::Stored(stored)) = one(&pairs) else { panic!("not stored") };
    assert_eq!(stored.token_ids, [5, 6, 7]);
    for other in [json!([[]]), json!([["5", 6]]), json!([[[5], 6]])] {
        let skipped = one(&json!(["BlockStored", [1], null, other, 1]));
        assert!(matches!(skipped, Ok(KvEvent::Unknown(_))), "{skipped:?}");
    }
}

#[test]
fn h6_malformed_batches_are_errors() {
    for event in [json!([]), json!({}), json!(3), json!(null), json!([3]), json!({"type": "BlockRemoved"})] {
        assert!(matches!(one(&event), Err(DecodeError::Malformed(_))), "{event}");
    }
    let trailing = [VLLM_CLEARED, &[0xc0, 0xc0]].concat();
    assert!(matches!(decode_batch(&trailing), Err(DecodeError::Trailing)));
    let large = decode_batch(&vec![0; MAX_PAYLOAD + 1]);
    assert!(matches!(large, Err(DecodeError::TooLarge(size)) if size == MAX_PAYLOAD + 1), "{large:?}");
}

#[test]
fn h6_every_cut_is_an_error() {
    for payload in ALL {
        for end in 0..payload.len() {
            decode_batch(&payload[..end]).expect_err("cut short");
        }
    }
}

#[test]
fn h6_a_hostile_length_or_depth_is_an_error() {
    let head = [0x92, 0x01];
    for lie in [
        // Four thousand million events, hashes, tokens, entries, bytes.
        [0xdd, 0xff, 0xff, 0xff, 0xff].as_slice(),
        &[0x91, 0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0x91, 0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0x91, 0x92, 0xdb, 0xff, 0xff, 0xff, 0xff, b'B'],
        &[&[0x91, 0x92, 0xac], b"BlockRemoved".as_slice(), &[0xdd, 0xff, 0xff, 0xff, 0xff, 1]].concat(),
        &[&[0x91, 0x92, 0xac], b"BlockRemoved".as_slice(), &[0x91, 0xc6, 0xff, 0xff, 0xff, 0xff, 1]].concat(),
    ] {
        decode_batch(&[&head, lie].concat()).expect_err("a lie");
    }
    let mut deep = vec![0x92, 0x01, 0x91, 0x92, 0xa1, b'x'];
    deep.extend(std::iter::repeat_n(0x91, 100_000));
    deep.push(0xc0);
    decode_batch(&deep).expect_err("too deep");
}

proptest! {
    #[test]
    fn h6_no_bytes_panic(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        _ = decode_batch(&payload);
    }

    #[test]
    fn h6_no_flipped_byte_panics(
        which in 0..ALL.len(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut payload = ALL[which].to_vec();
        let at = at.index(payload.len());
        payload[at] = byte;
        _ = decode_batch(&payload);
    }
}

#[test]
fn h6_extra_keys_of_vllm_are_told_apart() {
    let digest = "00000000000000ff".repeat(4);
    let extra = json!([["adapter", [digest, -3], digest, "tenant", ["my-image", 0], [1, 2, 3]]]);
    let event = json!(["BlockStored", [7], null, [1, 2], 2, null, "GPU", "adapter", extra]);
    let KvEvent::Stored(stored) = one(&event).expect("stored") else { panic!("not stored") };
    let object = |hash, offset| ExtraKey::Object { hash, offset };
    let want = [
        ExtraKey::Text("adapter".to_owned()),
        object(255, -3),
        object(255, 0),
        ExtraKey::Text("tenant".to_owned()),
        object(xxh3_64(b"my-image"), 0),
        object(xxh3_64(b"1\x002\x003"), 0),
    ];
    assert_eq!(stored.extra_keys, [want]);
}

mod shapes;
