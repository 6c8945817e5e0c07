//! Scanner of event streams: finds the same events in pieces of any size, and strings cannot imitate a
//! key.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

#[derive(Arbitrary, Debug)]
struct Chunk {
    text: String,
    key: String,
    finish: Option<String>,
    usage: Option<(u32, u32, Option<u32>)>,
    kv_transfer: Option<String>,
    spaced: bool,
}

fuzz_target!(|data: &[u8]| {
    let Some((step, bytes)) = data.split_first() else { return };
    any_stream(bytes, usize::from(*step));
    if let Ok(chunk) = Chunk::arbitrary(&mut Unstructured::new(bytes)) {
        known_event(&chunk);
    }
});

fn any_stream(bytes: &[u8], step: usize) {
    let (whole, whole_rest) = split(bytes, bytes.len().max(1));
    let (pieces, rest) = split(bytes, step.max(1));
    // A line feed after a CR may remain; a complete event never does.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    assert_eq!(pieces, &bytes[..bytes.len() - rest]);
    assert!(rest.abs_diff(whole_rest) <= 2);
    assert_eq!(whole, &bytes[..bytes.len() - whole_rest]);
    let mut at = 0;
    for place in sse::events(&whole) {
        assert!(place.start == at && place.end > at);
        at = place.end;
        let event = &whole[place];
        let _ = sse::is_event(event);
        look(event);
    }
    assert_eq!(at, whole.len());
    look(bytes);
}

fn split(bytes: &[u8], step: usize) -> (Vec<u8>, usize) {
    let (mut splitter, mut out) = (sse::Splitter::default(), Vec::new());
    for piece in bytes.chunks(step) {
        splitter.room().extend_from_slice(piece);
        let whole = splitter.whole().expect("small");
        let events = splitter.first(whole);
        assert!(events.is_empty() || events.ends_with(b"\n") || events.ends_with(b"\r"));
        out.extend_from_slice(events);
        splitter.discard(whole);
    }
    (out, splitter.rest())
}

fn look(event: &[u8]) -> sse::Seen {
    let seen = sse::look(event);
    if let Some(place) = seen.cached_at.clone() {
        assert!(event[place].iter().all(u8::is_ascii_digit));
    }
    seen
}

/// Checks an event in an engine's format with arbitrary strings.
fn known_event(chunk: &Chunk) {
    let mut event = json!({
        "id": chunk.key,
        "choices": [{"index": 0, "delta": {"content": chunk.text}, "finish_reason": chunk.finish}],
    });
    if let Some((prompt_tokens, completion_tokens, cached)) = chunk.usage {
        let details = cached.map(|cached| json!({"cached_tokens": cached}));
        event["usage"] = json!({"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "prompt_tokens_details": details});
    }
    if let Some(id) = &chunk.kv_transfer {
        event["kv_transfer_params"] = json!({"remote_engine_id": id, "more": [id]});
    }
    let text =
        if chunk.spaced { serde_json::to_string_pretty(&event) } else { serde_json::to_string(&event) };
    // A line without `data:` would not belong to the event.
    let bytes = format!("data: {}\n\n", text.expect("json").replace('\n', " ")).into_bytes();
    let seen = look(&bytes);
    assert!(!seen.done && !seen.error);
    // Some servers write an empty reason into every event.
    let finish = chunk.finish.as_ref().is_some_and(|reason| !reason.is_empty());
    assert_eq!((seen.token, seen.finish), (!chunk.text.is_empty(), finish), "{event}");
    let usage = chunk.usage.map(|(prompt_tokens, completion_tokens, cached_tokens)| sse::Usage {
        prompt_tokens,
        completion_tokens: Some(completion_tokens),
        cached_tokens,
    });
    assert_eq!(seen.usage, usage);
    assert_eq!(seen.may_have_private_fields, chunk.kv_transfer.is_some());
}
