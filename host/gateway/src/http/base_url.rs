//! Recognizes mistakes in a client's base URL: `/v1` is missing or twice, or the URL names an endpoint.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use crate::openai::endpoint::Endpoint;

/// Other paths that clients append to their base URL.
const OTHERS: [&str; 2] = ["/v1/models", "/v1/realtime"];

/// Returns the path that a client means whose path does not exist.
pub(super) fn intended_path(path: &str) -> Option<&'static str> {
    let decoded = percent_decode_str(path).decode_utf8().unwrap_or(Cow::Borrowed(path));
    let path = decoded.trim_end_matches('/');
    let ends = |known: &&str| {
        let base_url = known.strip_prefix("/v1").and_then(|appended| path.strip_suffix(appended));
        base_url.is_some_and(is_base_url)
    };
    // `/v1/messages/count_tokens` rather than `/v1/messages`, and so on.
    of_clients().filter(ends).max_by_key(|known| known.len())
}

/// Returns whether a client may have been given this path as its base URL. One below `/v1` is the path of
/// something else, such as `/v1/threads/1` of `/v1/threads/1/messages`.
fn is_base_url(path: &str) -> bool {
    path.split_once("/v1/").is_none_or(|(_, rest)| {
        rest == "v1" || of_clients().any(|known| known.strip_prefix("/v1/") == Some(rest))
    })
}

/// Paths that clients append to their base URL.
fn of_clients() -> impl Iterator<Item = &'static str> {
    let posted = Endpoint::POSTED.into_iter().map(Endpoint::path);
    posted.chain(OTHERS).filter(|known| known.starts_with("/v1/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_wrong_base_url_is_recognised_by_what_the_client_appends() {
        for (path, expected) in [
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("/openai/v1/chat/completions/", "/v1/chat/completions"),
            ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("//v1/completions", "/v1/completions"),
            ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/v1/v1/messages", "/v1/messages"),
            ("/models", "/v1/models"),
            ("/v1/v1/embeddings", "/v1/embeddings"),
            ("/audio/transcriptions", "/v1/audio/transcriptions"),
            ("/v1/%63hat/completions", "/v1/chat/completions"),
        ] {
            // I7.4
            assert_eq!(intended_path(path), Some(expected), "{path}");
        }
        for path in ["/", "", "/v1", "/v1/nothing", "/xmodels/x", "/mychat", "/chat/completionsx"] {
            assert_eq!(intended_path(path), None, "{path}");
        }
        for path in ["/v1/audio/completions", "/v1/threads/1/messages", "/openai/v1/a/models", "/%ff/v1/x"] {
            // I7.4
            assert_eq!(intended_path(path), None, "{path}");
        }
    }
}
