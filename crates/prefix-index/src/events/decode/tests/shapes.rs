//! Shapes that newer engines, or other engines, publish.

use super::*;

/// Two blocks of two tokens, with these fields changed.
fn store(changes: &Value) -> Value {
    let mut event = json!({"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null});
    for (name, value) in changes.as_object().expect("fields") {
        event[name] = value.clone();
    }
    event
}

fn stored_with(changes: &Value) -> Stored {
    match one(&store(changes)) {
        Ok(KvEvent::Stored(stored)) => stored,
        other => panic!("{changes}: {other:?}"),
    }
}

fn plain() -> Stored {
    Stored { hashes: vec![1, 2], token_ids: vec![1, 2, 3, 4], block_size: 2, ..Stored::default() }
}

#[test]
fn h6_a_batch_may_be_a_map() {
    let event = json!(["BlockRemoved", [9]]);
    let removed = KvEvent::Removed { hashes: vec![9], tier: Tier::Device, group: None };
    for rank in ["data_parallel_rank", "attn_dp_rank", "dp_rank"] {
        let batch = json!({"new": {"a": [1]}, "ts": 1.5, "events": [event], rank: 3});
        let read = decode_batch(&rmp_serde::to_vec(&batch).expect("msgpack")).expect(rank);
        // H6.1
        assert_eq!(read, Batch { ts: 1.5, dp_rank: Some(3), events: vec![removed.clone()] });
    }
    for batch in
        [json!({"ts": 1.5}), json!({}), json!([1.5]), json!([1.5, null]), json!("batch"), json!(null)]
    {
        decode_batch(&rmp_serde::to_vec(&batch).expect("msgpack")).expect_err("no events");
    }
    for rank in [json!(null), json!(-1), json!("a"), json!([{"a": 1}]), json!(1.5)] {
        let batch = json!([null, [event], rank, {"new": 1}]);
        let read = decode_batch(&rmp_serde::to_vec(&batch).expect("msgpack")).expect("batch");
        assert_eq!((read.dp_rank, read.events), (None, vec![removed.clone()]), "{rank}");
    }
}

#[test]
fn h6_what_vllm_and_sglang_add_changes_nothing() {
    for added in [
        json!({}),
        // vLLM 0.33: who asked, where the blocks are, and tokens behind each block.
        json!({"locality": "LOCAL", "ownership": "tier-1", "session_id": "s", "lookahead_token_ids": [[5], [6]]}),
        json!({"event_version": 1, "extra_keys": null, "group_idx": null, "kv_cache_spec_kind": null}),
        // SGLang 0.5.23.
        json!({"cache_salt": null, "session_id": "s"}),
        json!({"cache_salt": ""}),
        json!({"block_size": 2, "lora_id": 0}),
    ] {
        // H6.5
        assert_eq!(stored_with(&added), plain(), "{added}");
    }
}

#[test]
fn h6_the_cache_salt_of_sglang_is_the_first_block_s() {
    let salted = |keys: Vec<Vec<ExtraKey>>| Stored { extra_keys: keys, ..plain() };
    let salt = || ExtraKey::Text("tenant".to_owned());
    // H6.12
    assert_eq!(stored_with(&json!({"cache_salt": "tenant"})), salted(vec![vec![salt()]]));
    let both = json!({"cache_salt": "tenant", "extra_keys": [["tenant"], null]});
    assert_eq!(stored_with(&both), salted(vec![vec![salt()], vec![]]));
    // A salt of 64 hex digits is no image.
    let digits = "0a".repeat(32);
    let stored = stored_with(&json!({"cache_salt": digits}));
    assert_eq!(stored.extra_keys, [[ExtraKey::Text(digits)]]);
}

#[test]
fn h6_extra_keys_of_an_unknown_form_are_keys_that_no_prompt_has() {
    for (keys, blocks) in [
        (json!([[{"type": "CacheSaltKey", "salt": "tenant"}], null]), 2),
        (json!([{"type": "CacheSaltKey", "salt": "tenant"}, null]), 2),
        (json!([[["image", 1, {"deep": [1.5, null, true]}]], [7]]), 2),
        (json!([[[["nested"], -1]]]), 1),
    ] {
        let stored = stored_with(&json!({"extra_keys": keys}));
        // H6.12
        assert_eq!(stored.extra_keys.len(), blocks, "{keys}");
        assert!(stored.extra_keys[0][0].object().is_some(), "{keys}");
    }
    let other = |salt: &str| stored_with(&json!({"extra_keys": [[{"salt": salt}]]})).extra_keys;
    assert_ne!(other("a"), other("b"));
}

#[test]
fn h6_a_store_with_a_part_of_an_unknown_form_is_skipped() {
    for (part, value) in [
        ("block_hashes", json!([1, null])),
        ("block_hashes", json!([[1], [2]])),
        ("block_hashes", json!(null)),
        ("block_hashes", json!({"1": 2})),
        ("parent_block_hash", json!({"hash": 1})),
        ("parent_block_hash", json!(1.5)),
        ("token_ids", json!("AAEC")),
        ("token_ids", json!([1, 2, 3, -1])),
        ("token_ids", json!([1, 2, 3, null])),
        ("token_ids", json!([{"token_id": 1, "token_extra_id": 0}])),
        ("block_size", json!("16")),
        ("block_size", json!([16])),
        ("medium", json!({"tier": "GPU"})),
        ("medium", json!(1)),
        ("lora_name", json!(["fr"])),
        ("lora_id", json!({"a": 1})),
        ("extra_keys", json!({"0": ["tenant"]})),
        ("extra_keys", json!("tenant")),
        ("group_idx", json!("full")),
        ("cache_salt", json!(["tenant"])),
    ] {
        let event = one(&store(&json!({part: value}))).expect("no error");
        // H6.18
        assert_eq!(event, KvEvent::Unknown(format!("BlockStored with an unknown form of {part}")), "{value}");
    }
    assert_eq!(
        one(&json!({"type": "BlockStored"})).expect("no error"),
        KvEvent::Unknown(String::from("BlockStored with an unknown form of block_hashes"))
    );
}

#[test]
fn h6_only_a_removal_that_cannot_be_read_is_an_error() {
    let removal = |changes: Value| {
        let mut event = json!({"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"});
        for (name, value) in changes.as_object().expect("fields") {
            event[name] = value.clone();
        }
        one(&event)
    };
    for readable in [
        json!({"locality": "REMOTE", "ownership": "tier-1"}),
        json!({"medium": null, "group_idx": null}),
        json!({"token_ids": "AAEC", "parent_block_hash": {"a": 1}, "extra_keys": 7, "cause": [{"a": 1}]}),
    ] {
        let removed = KvEvent::Removed { hashes: vec![9], tier: Tier::Device, group: None };
        // H6.5
        assert_eq!(removal(readable.clone()).expect("read"), removed, "{readable}");
    }
    for unreadable in [
        json!({"block_hashes": [9, null]}),
        json!({"block_hashes": null}),
        json!({"block_hashes": 9}),
        json!({"block_hashes": [[9]]}),
        json!({"medium": {"tier": "GPU"}}),
        json!({"group_idx": "full"}),
    ] {
        // H6.18
        assert!(matches!(removal(unreadable.clone()), Err(DecodeError::Malformed(_))), "{unreadable}");
    }
}

#[test]
fn h6_an_event_of_an_unknown_type_may_have_any_fields() {
    for event in [
        json!({"type": "BlockMoved", "block_hashes": {"from": [1]}, "token_ids": "x"}),
        json!({"a": 1, "block_hashes": {"from": [1]}, "medium": [1], "type": "BlockMoved"}),
        json!(["BlockMoved", {"from": [1]}, "x"]),
    ] {
        // H6.5
        assert_eq!(one(&event).expect("skipped"), KvEvent::Unknown(String::from("BlockMoved")), "{event}");
    }
    // {1: 2, nil: 3, [4]: 5, bin "type": "AllBlocksCleared"}, in a batch.
    let odd = [0x92, 0x01, 0x91, 0x84, 0x01, 0x02, 0xc0, 0x03, 0x91, 0x04, 0x05, 0xc4, 4].as_slice();
    let odd = [odd, b"type\xb0AllBlocksCleared".as_slice()].concat();
    assert_eq!(decode_batch(&odd).expect("batch").events, [KvEvent::Cleared]);
    // An extension type, which msgspec writes for times: {"type": "AllBlocksCleared", "at": ext 5 bytes}.
    let at = [&[0x92, 0x01, 0x91, 0x82], b"\xa2at\xd6\xff\0\0\0\x01\xa4type\xb0AllBlocksCleared".as_slice()];
    assert_eq!(decode_batch(&at.concat()).expect("batch").events, [KvEvent::Cleared]);
    for field in ["token_ids", "extra_keys", "lora_id", "kv_cache_spec_kind", "medium"] {
        let head = [0x92, 0x01, 0x91, 0x83, 0xa4].as_slice();
        let name = [&[0xa0 + u8::try_from(field.len()).expect("short")], field.as_bytes()].concat();
        let ext =
            [head, b"type\xacBlockRemoved\xacblock_hashes\x91\x09", &name, b"\xd6\xff\0\0\0\x01"].concat();
        let read = decode_batch(&ext);
        assert_eq!(read.is_ok(), field != "medium", "{field}: {read:?}");
    }
}

#[test]
fn h6_a_hash_may_be_text() {
    let named = stored_with(&json!({"block_hashes": ["a", "b"], "parent_block_hash": "p"}));
    assert_eq!((named.hashes, named.parent), (vec![xxh3_64(b"a"), xxh3_64(b"b")], Some(xxh3_64(b"p"))));
    // H6.4
    assert_eq!(removal_of(&[0xa1, b'a']).expect("text"), [xxh3_64(b"a")]);
    removal_of(&[0xa0]).expect_err("empty");
}

#[test]
fn h6_a_missing_block_size_is_that_of_the_tokens_of_a_hash() {
    let size = |changes: Value| stored_with(&changes).block_size;
    // H6.25
    assert_eq!([size(json!({"block_size": 0})), size(json!({"block_size": null}))], [2, 2]);
    assert_eq!(size(json!({"block_size": 4})), 4);
    // Which tokens belong to which hash is not known.
    assert_eq!(size(json!({"block_size": 0, "token_ids": [1, 2, 3]})), 0);
    assert_eq!(size(json!({"block_size": 0, "token_ids": []})), 0);
    assert_eq!(size(json!({"block_size": 0, "block_hashes": []})), 0);
    let simulated = json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 0, null, "GPU", null, null]);
    let expected = Stored { hashes: vec![7, 8], ..plain() };
    // H6.25
    assert_eq!(one(&simulated).expect("a store"), KvEvent::Stored(expected));
}

#[test]
fn h6_an_empty_parent_is_a_parent_of_0() {
    // H6.24
    assert_eq!(stored_with(&json!({"parent_block_hash": ""})).parent, Some(0));
    let (before, after) = (
        b"\x92\x01\x91\x84\xa4type\xabBlockStored\xacblock_hashes\x91\x07\xa9token_ids\x90",
        b"\xb1parent_block_hash\xc4\x00",
    );
    let batch = decode_batch(&[before.as_slice(), after].concat()).expect("a batch");
    let expected = Stored { hashes: vec![7], parent: Some(0), ..Stored::default() };
    assert_eq!(batch.events, [KvEvent::Stored(expected)]);
}
