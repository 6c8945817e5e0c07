//! The list in which a whole answer has its results. An answer without it has failed, although its status is
//! 200: proxies and broken servers answer `{}`, or `{"detail": …}`.

use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

use super::endpoint::Endpoint;

/// The lists of the endpoints whose answers have one in every engine.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Lists<'a> {
    #[serde(borrow)]
    choices: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    output: Option<&'a RawValue>,
}

/// Returns the key of the list that every whole answer of an endpoint has, if it does.
pub(crate) fn list_of(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Completions => Some("choices"),
        Endpoint::Embeddings => Some("data"),
        Endpoint::Messages => Some("content"),
        Endpoint::Responses => Some("output"),
        _ => None,
    }
}

/// Returns the list that a whole answer lacks, if it does.
///
/// # Errors
/// The answer is not JSON.
pub(crate) fn missing_list(endpoint: Endpoint, body: &[u8]) -> serde_json::Result<Option<&'static str>> {
    let Some(name) = list_of(endpoint) else {
        return serde_json::from_slice(body).map(|_: IgnoredAny| None);
    };
    let Lists { choices, data, content, output } = serde_json::from_slice(body)?;
    let list = match name {
        "choices" => choices,
        "data" => data,
        "content" => content,
        _ => output,
    };
    Ok(list.is_none_or(|list| !list.get().starts_with('[')).then_some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i3_an_answer_without_its_list_is_none() {
        let lacks = |endpoint, body: &str| missing_list(endpoint, body.as_bytes()).unwrap();
        let chat = Endpoint::ChatCompletions;
        // I3.20
        for body in ["{}", r#"{"choices":null}"#, r#"{"detail":"x"}"#, r#"{"message":{"choices":[]}}"#] {
            assert_eq!(lacks(chat, body), Some("choices"), "{body}");
        }
        assert_eq!(lacks(chat, r#"{"choices":[],"usage":{"prompt_tokens":1}}"#), None);
        assert_eq!(lacks(Endpoint::Messages, r#"{"choices":[]}"#), Some("content"));
        assert_eq!(lacks(Endpoint::Responses, r#"{"status":"queued","output":[]}"#), None);
        assert_eq!(lacks(Endpoint::Embeddings, r#"{"embeddings":[]}"#), Some("data"));
        for unknown in [Endpoint::Generate, Endpoint::Rerank("/rerank"), Endpoint::Pooling] {
            assert_eq!(lacks(unknown, "{}"), None, "its answers have several shapes");
        }
        assert!(missing_list(chat, b"{").is_err() && missing_list(Endpoint::Pooling, b"{").is_err());
    }
}
