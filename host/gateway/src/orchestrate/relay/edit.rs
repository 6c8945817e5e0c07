//! Edits of an engine's bytes: removes ids that a client must not see, and adds cached tokens that only the
//! gateway knows.

use std::ops::Range;

use bytes::Bytes;
use json_splice::JsonBody;
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

/// The cached tokens that a client is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachedTokens {
    /// Those that the answer says.
    OfAnswer,
    /// Those that the prefill engine says, and those that it wrote into its cache, if it says that.
    OfPrefill(u32, Option<u32>),
    /// The answer is wrong, and the prefill engine says nothing.
    Unknown,
}

/// An event or a whole answer with its usage.
#[derive(Deserialize)]
struct WithUsage<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, alias = "response")]
    message: Option<Inner<'a>>,
}

/// The message of the first event, or the response of the last one.
#[derive(Deserialize)]
struct Inner<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

/// Gives an event or a whole body these cached tokens; `None` when nothing changes.
pub(crate) fn edit(bytes: &[u8], seen: &Seen, cached: CachedTokens, format: Format) -> Option<Vec<u8>> {
    if cached == CachedTokens::OfAnswer {
        return None;
    }
    if let Some(place) = seen.cached_at.clone() {
        match cached {
            CachedTokens::OfPrefill(cached, None) => {
                return spliced(bytes, place, cached.to_string().as_bytes());
            }
            CachedTokens::OfPrefill(..) => {}
            _ => return spliced(bytes, place, b"null"),
        }
    }
    seen.usage?;
    let answer: WithUsage<'_> = serde_json::from_slice(sse::object(bytes)).ok()?;
    let usage = answer.usage.or(answer.message.and_then(|message| message.usage))?.get();
    let from = usage.as_ptr().addr() - bytes.as_ptr().addr();
    spliced(bytes, from..from + usage.len(), &counts(usage, cached, format)?)
}

/// Returns a usage with other cached tokens. A usage that does not count them gets those that prefill had
/// [B8.11].
fn counts(usage: &str, cached: CachedTokens, format: Format) -> Option<Bytes> {
    let usage = JsonBody::parse(Bytes::copy_from_slice(usage.as_bytes())).ok()?;
    let number = |json: &JsonBody, key: &str| json.get(key)?.parse::<u32>().ok();
    // Where it is not known, the number may not be null.
    let (cached, created) =
        if let CachedTokens::OfPrefill(cached, created) = cached { (cached, created) } else { (0, None) };
    let (prompt, details, written) = match format {
        Format::OpenAi => ("prompt_tokens", "prompt_tokens_details", "created_cache_tokens"),
        Format::Responses => ("input_tokens", "input_tokens_details", "cache_write_tokens"),
        Format::Anthropic => return counts_of_message(&usage, number, cached, created),
        _ => return None,
    };
    let prompt = number(&usage, prompt)?;
    let inner = usage.object(details).unwrap_or_else(|| Ok(JsonBody::empty())).ok()?;
    if cached == 0 && number(&inner, "cached_tokens").is_none() {
        return None;
    }
    let mut edit = inner.edit().set("cached_tokens", cached.min(prompt).to_string());
    if let Some(created) = created.filter(|_| number(&inner, written).is_some()) {
        edit = edit.set(written, created.min(prompt).to_string());
    }
    let inner = edit.finish();
    Some(usage.edit().set(details, std::str::from_utf8(&inner).ok()?).finish())
}

/// The same for a message. Tokens that were cached, or written into the cache, are not among its input
/// tokens, so the sum of all stays.
fn counts_of_message(
    usage: &JsonBody,
    number: impl Fn(&JsonBody, &str) -> Option<u32>,
    cached: u32,
    created: Option<u32>,
) -> Option<Bytes> {
    const READ: &str = "cache_read_input_tokens";
    const WRITTEN: &str = "cache_creation_input_tokens";
    let (read, written) = (number(usage, READ), number(usage, WRITTEN));
    let read = read.or_else(|| (cached > 0).then_some(0))?;
    let sum = number(usage, "input_tokens")?.checked_add(read)?.checked_add(written.unwrap_or(0))?;
    let cached = cached.min(sum);
    let created = created.or(written).filter(|created| written.is_some() || *created > 0);
    let created = created.map(|created| created.min(sum - cached));
    let rest = sum - cached - created.unwrap_or(0);
    let mut edit = usage.edit().set("input_tokens", rest.to_string()).set(READ, cached.to_string());
    if let Some(created) = created {
        edit = edit.set(WRITTEN, created.to_string());
    }
    Some(edit.finish())
}

/// Returns the bytes with this text in a place of them.
fn spliced(bytes: &[u8], place: Range<usize>, text: &[u8]) -> Option<Vec<u8>> {
    Some([bytes.get(..place.start)?, text, bytes.get(place.end..)?].concat())
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
                edit(text.as_bytes(), &seen, CachedTokens::OfPrefill(288, None), Format::Responses).unwrap();
            // B8.11
            assert_eq!(
                String::from_utf8(edited).unwrap(),
                text.replace("\"cached_tokens\":0", "\"cached_tokens\":288")
            );
        }
    }

    #[test]
    fn c7_a_usage_without_cached_tokens_gets_those_of_prefill() {
        let openai = [
            (
                r#"{"prompt_tokens":7,"prompt_tokens_details":null,"x":1}"#,
                r#"{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4},"x":1}"#,
            ),
            (r#"{"prompt_tokens":7}"#, r#"{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}"#),
            (
                r#"{"prompt_tokens":3,"prompt_tokens_details":{}}"#,
                r#"{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":3}}"#,
            ),
            (
                r#"{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":null,"a":3}}"#,
                r#"{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4,"a":3}}"#,
            ),
        ];
        let named =
            openai.map(|(usage, expected)| [usage, expected].map(|text| text.replace("prompt_", "input_")));
        let anthropic = [
            (
                r#"{"input_tokens":7,"output_tokens":2}"#,
                r#"{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4}"#,
            ),
            (
                r#"{"input_tokens":7,"cache_read_input_tokens":null}"#,
                r#"{"input_tokens":3,"cache_read_input_tokens":4}"#,
            ),
            (
                r#"{"input_tokens":2,"cache_read_input_tokens":1}"#,
                r#"{"input_tokens":0,"cache_read_input_tokens":3}"#,
            ),
        ];
        let text = |usage: &str, cached, format| {
            counts(usage, cached, format).map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
        };
        let cases = openai.map(|(usage, expected)| (Format::OpenAi, usage.to_owned(), expected.to_owned()));
        let cases =
            cases.into_iter().chain(named.map(|[usage, expected]| (Format::Responses, usage, expected)));
        let anthropic =
            anthropic.map(|(usage, expected)| (Format::Anthropic, usage.to_owned(), expected.to_owned()));
        for (format, usage, expected) in cases.chain(anthropic) {
            // C7.4, B8.11
            assert_eq!(text(&usage, CachedTokens::OfPrefill(4, None), format), Some(expected), "{format:?}");
            let has_number = usage.contains("_tokens\":1");
            for nothing in [CachedTokens::OfPrefill(0, None), CachedTokens::Unknown] {
                assert_eq!(text(&usage, nothing, format).is_some(), has_number, "{format:?} {usage}");
            }
        }
    }

    #[test]
    fn b8_a_usage_has_the_tokens_that_prefill_wrote_into_its_cache() {
        let openai =
            r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":0}}"#;
        let event = format!("data: {{\"choices\":[],\"usage\":{openai}}}\n\n");
        let seen = seen::event(Format::OpenAi, event.as_bytes());
        let edited = edit(event.as_bytes(), &seen, CachedTokens::OfPrefill(2, Some(6)), Format::OpenAi);
        let expected = event.replace("tokens\":8", "tokens\":2").replace("tokens\":0", "tokens\":6");
        // B8.11
        assert_eq!(String::from_utf8(edited.unwrap()).unwrap(), expected);
        for (format, usage, expected) in [
            (
                Format::Responses,
                r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":8,"cache_write_tokens":0}}"#,
                r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":6}}"#,
            ),
            (
                Format::Anthropic,
                r#"{"input_tokens":1,"cache_read_input_tokens":8,"cache_creation_input_tokens":0}"#,
                r#"{"input_tokens":1,"cache_read_input_tokens":2,"cache_creation_input_tokens":6}"#,
            ),
            (
                Format::OpenAi,
                r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":null}}"#,
                r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":2,"created_cache_tokens":null}}"#,
            ),
        ] {
            let edited = counts(usage, CachedTokens::OfPrefill(2, Some(6)), format).unwrap();
            // B8.11
            assert_eq!(String::from_utf8(edited.to_vec()).unwrap(), expected);
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
