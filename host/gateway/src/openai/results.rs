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

/// Returns the list that a whole answer lacks, if it does.
///
/// # Errors
/// The answer is not JSON.
pub(crate) fn missing_list(endpoint: Endpoint, body: &[u8]) -> serde_json::Result<Option<&'static str>> {
    let (name, of): (_, fn(Lists<'_>) -> Option<&RawValue>) = match endpoint {
        Endpoint::ChatCompletions | Endpoint::Completions => ("choices", |lists| lists.choices),
        Endpoint::Embeddings => ("data", |lists| lists.data),
        Endpoint::Messages => ("content", |lists| lists.content),
        Endpoint::Responses => ("output", |lists| lists.output),
        _ => return serde_json::from_slice(body).map(|_: IgnoredAny| None),
    };
    let list = of(serde_json::from_slice(body)?);
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
