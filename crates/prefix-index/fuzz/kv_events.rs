//! Batches of KV events: arbitrary bytes, and events in both forms, which have to be decoded to the same
//! value.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use prefix_index::events::{KvEvent, decode_batch};
use serde_json::{Value, json};

#[derive(Arbitrary, Debug)]
struct Event {
    stored: bool,
    hashes: Vec<i64>,
    parent: Option<u64>,
    tokens: Vec<u32>,
    block_size: u32,
    lora_id: Option<u8>,
    medium: Option<String>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<Option<Vec<String>>>>,
    group: Option<u32>,
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, rest)) = data.split_first() else { return };
    if mode & 1 == 0 {
        any_bytes(rest);
    } else if let Ok(events) = Vec::<Event>::arbitrary(&mut Unstructured::new(rest)) {
        both_forms(&events, mode & 2 == 0);
    }
});

fn any_bytes(payload: &[u8]) {
    let Ok(batch) = decode_batch(payload) else { return };
    // Each value takes at least one byte, so the output is bounded by the input.
    let values = |event: &KvEvent| match event {
        KvEvent::Stored(stored) => {
            stored.hashes.len()
                + stored.token_ids.len()
                + stored.extra_keys.iter().map(Vec::len).sum::<usize>()
        }
        KvEvent::Removed { hashes, .. } => hashes.len(),
        KvEvent::Cleared | KvEvent::Unknown(_) => 1,
    };
    assert!(batch.events.iter().map(values).sum::<usize>() <= payload.len());
}

fn both_forms(events: &[Event], cut: bool) {
    let read = |form: fn(&Event) -> Value| {
        let batch = json!([1.5, events.iter().map(form).collect::<Vec<_>>(), 3]);
        let payload = rmp_serde::to_vec(&batch).expect("msgpack");
        let batch = decode_batch(&payload).expect("a batch of ours");
        assert_eq!((batch.ts, batch.dp_rank, batch.events.len()), (1.5, Some(3), events.len()));
        if cut && !payload.is_empty() {
            assert!(decode_batch(&payload[..payload.len() - 1]).is_err());
            assert!(decode_batch(&[payload.as_slice(), b"\0"].concat()).is_err());
        }
        batch.events
    };
    let (maps, arrays) = (read(as_map), read(as_array));
    assert_eq!(maps, arrays);
    for (event, read) in events.iter().zip(&maps) {
        let told: Vec<u64> = event.hashes.iter().map(|hash| hash.cast_unsigned()).collect();
        match read {
            KvEvent::Stored(stored) => {
                assert!(event.stored);
                assert_eq!(
                    (&stored.hashes, stored.parent, &stored.token_ids),
                    (&told, event.parent, &event.tokens)
                );
            }
            KvEvent::Removed { hashes, .. } => assert!(!event.stored && *hashes == told),
            other => panic!("not ours: {other:?}"),
        }
    }
}

fn as_map(event: &Event) -> Value {
    let Event { hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys, group, .. } =
        event;
    if event.stored {
        json!({"block_hashes": hashes, "type": "BlockStored", "parent_block_hash": parent, "token_ids": tokens,
            "block_size": block_size, "lora_id": lora_id, "medium": medium, "lora_name": lora_name,
            "extra_keys": extra_keys, "group_idx": group})
    } else {
        json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group, "new": [1]})
    }
}

fn as_array(event: &Event) -> Value {
    let Event { hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys, group, .. } =
        event;
    if event.stored {
        json!([
            "BlockStored",
            hashes,
            parent,
            tokens,
            block_size,
            lora_id,
            medium,
            lora_name,
            extra_keys,
            group
        ])
    } else {
        json!(["BlockRemoved", hashes, medium, group, "more"])
    }
}
