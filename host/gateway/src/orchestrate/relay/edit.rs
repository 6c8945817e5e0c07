//! The closed list of edits to an engine's bytes: removes what a client must not see, adds what only the
//! gateway knows.

use std::{borrow::Cow, ops::Range};

use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    connectors::{IdDetail, RequestToken},
    openai::{
        endpoint::Format,
        sse::{self, Seen},
    },
};

/// A place in an event or a body, and the text that takes it.
type Change = (Range<usize>, Cow<'static, str>);

/// The cached tokens that a client is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachedTokens {
    /// Those that the answer says.
    OfAnswer,
    /// Those that the prefill engine says.
    OfPrefill(u32),
    /// The answer is wrong, and the prefill engine says nothing.
    Unknown,
}

/// An event or a whole answer of the Messages or the Responses API, with its usage.
#[derive(Deserialize)]
struct WithUsage<'a> {
    #[serde(borrow)]
    usage: Option<NamedUsage<'a>>,
    #[serde(borrow, alias = "response")]
    message: Option<Inner<'a>>,
}

/// The message of the first event, or the response of the last one.
#[derive(Deserialize)]
struct Inner<'a> {
    #[serde(borrow)]
    usage: Option<NamedUsage<'a>>,
}

#[derive(Deserialize)]
struct NamedUsage<'a> {
    #[serde(borrow)]
    input_tokens: &'a RawValue,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<Details<'a>>,
}

#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    cached_tokens: &'a RawValue,
}

/// Applies the closed list of edits to an event or a whole body; `None` when there are none.
pub(crate) fn edit(bytes: &[u8], seen: &Seen, cached: CachedTokens, format: Format) -> Option<Vec<u8>> {
    let mut changes: Vec<Change> = Vec::new();
    if let Some(place) = &seen.kv_transfer_at {
        changes.push((place.clone(), Cow::Borrowed("null")));
    }
    if let Some(place) = &seen.cached_at {
        let text = match cached {
            CachedTokens::OfAnswer => None,
            CachedTokens::OfPrefill(cached) => Some(Cow::Owned(cached.to_string())),
            CachedTokens::Unknown => Some(Cow::Borrowed("null")),
        };
        changes.extend(text.map(|text| (place.clone(), text)));
    }
    if format.is_named() && seen.usage.is_some() && cached != CachedTokens::OfAnswer {
        // Their number may not be null.
        let cached = if let CachedTokens::OfPrefill(cached) = cached { cached } else { 0 };
        changes.extend(named_counts(bytes, cached).unwrap_or_default());
    }
    if changes.is_empty() {
        return None;
    }
    changes.sort_by_key(|(place, _)| place.start);
    let (mut out, mut from) = (Vec::with_capacity(bytes.len() + 16), 0);
    for (place, text) in changes {
        out.extend_from_slice(bytes.get(from..place.start).unwrap_or_default());
        out.extend_from_slice(text.as_bytes());
        from = place.end;
    }
    out.extend_from_slice(bytes.get(from..).unwrap_or_default());
    Some(out)
}

/// Returns the changes that give the usage of a message or a response this number of cached tokens. Those of
/// a message are not among its input tokens, so the sum of both stays [B8.11].
fn named_counts(bytes: &[u8], cached: u32) -> Option<Vec<Change>> {
    let answer: WithUsage<'_> = serde_json::from_slice(sse::object(bytes)).ok()?;
    let usage = answer.usage.or(answer.message.and_then(|message| message.usage))?;
    let number = |count: &RawValue| count.get().parse::<u32>().ok();
    let input = number(usage.input_tokens)?;
    let change = |count: &RawValue, number: u32| {
        let from = count.get().as_ptr().addr() - bytes.as_ptr().addr();
        (from..from + count.get().len(), Cow::Owned(number.to_string()))
    };
    if let Some(details) = usage.input_tokens_details {
        return Some(vec![change(details.cached_tokens, cached.min(input))]);
    }
    let read = usage.cache_read_input_tokens?;
    let sum = input.checked_add(number(read)?)?;
    let cached = cached.min(sum);
    Some(vec![change(usage.input_tokens, sum - cached), change(read, cached)])
}

/// Removes from ids what they contain besides the attempt's id (A5): the workers' addresses of P2pNccl, or
/// the item's number of SGLang's batches. `None` when there is nothing to remove.
pub(crate) fn hide_ids(bytes: &[u8], token: RequestToken, detail: IdDetail) -> Option<Vec<u8>> {
    let token = token.to_string();
    let mark = match detail {
        IdDetail::Addresses => "___prefill_addr_".to_owned(),
        IdDetail::ItemNumber => format!("{token}_"),
    };
    let (mut out, mut from) = (Vec::new(), 0);
    while let Some(at) = bytes.get(from..).and_then(|rest| memmem::find(rest, mark.as_bytes())) {
        let start = from + at;
        out.extend_from_slice(bytes.get(from..start).unwrap_or_default());
        out.extend_from_slice(token.as_bytes());
        let behind = start + mark.len();
        let rest = bytes.get(behind..).unwrap_or_default();
        let length = match detail {
            IdDetail::Addresses => memchr::memchr2(b'"', b'\\', rest),
            IdDetail::ItemNumber => rest.iter().position(|byte| !byte.is_ascii_digit()),
        };
        from = length.map_or(bytes.len(), |length| behind + length);
    }
    if from == 0 {
        return None;
    }
    out.extend_from_slice(bytes.get(from..).unwrap_or_default());
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::seen;

    #[test]
    fn b8_a_response_gets_the_cached_tokens_of_prefill() {
        let response = r#"{"object":"response","metadata":{"usage":{"cached_tokens":1}},"usage":{"input_tokens":291,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":12}}"#;
        let event = format!(
            "event: response.completed\ndata: {{\"response\":{response},\"type\":\"response.completed\"}}\n\n"
        );
        let whole = seen::in_whole_answer(false, response.as_bytes());
        let last = seen::event(Format::Responses, event.as_bytes());
        for (text, seen) in [(response, whole), (&event, last)] {
            let edited =
                edit(text.as_bytes(), &seen, CachedTokens::OfPrefill(288), Format::Responses).unwrap();
            // B8.11
            assert_eq!(
                String::from_utf8(edited).unwrap(),
                text.replace("\"cached_tokens\":0", "\"cached_tokens\":288")
            );
        }
    }

    #[test]
    fn a5_an_engine_s_refusal_does_not_name_the_workers_of_a_p2p_nccl_pair() {
        let token = RequestToken::fresh();
        let body = r#"{"id":"cmpl-___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_ab-0","error":{"message":"bad \"___prefill_addr_10.0.0.1:1\""}}"#;
        let hidden = hide_ids(body.as_bytes(), token, IdDetail::Addresses).unwrap();
        let expected = format!(r#"{{"id":"cmpl-{token}","error":{{"message":"bad \"{token}\""}}}}"#);
        // A5.6: in errors
        assert_eq!(String::from_utf8(hidden).unwrap(), expected);
        assert_eq!(hide_ids(b"{}", token, IdDetail::Addresses), None);
    }

    #[test]
    fn a5_ids_of_a_batch_lose_the_item_s_number_and_nothing_else() {
        let token = RequestToken::fresh();
        let hidden = |text: &str| {
            let hidden = hide_ids(text.as_bytes(), token, IdDetail::ItemNumber);
            hidden.map(|bytes| String::from_utf8(bytes).unwrap())
        };
        let events =
            format!("data: {{\"id\":\"{token}_0\",\"text\":\"_1\"}}\n\ndata: {{\"id\":\"{token}_12\"}}\n\n");
        let expected =
            format!("data: {{\"id\":\"{token}\",\"text\":\"_1\"}}\n\ndata: {{\"id\":\"{token}\"}}\n\n");
        // A5.17
        assert_eq!(hidden(&events), Some(expected));
        assert_eq!(hidden(&format!("{{\"id\":\"{token}\"}}")), None);
        assert_eq!(hidden(&format!("{token}_")), Some(token.to_string()), "cut off behind the mark");
    }
}
