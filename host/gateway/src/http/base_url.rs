//! Recognizes mistakes in a client's base URL: `/v1` is missing or twice, or the URL names an endpoint.

use crate::openai::endpoint::Endpoint;

/// Other paths that clients append to their base URL.
const OTHERS: [&str; 2] = ["/v1/models", "/v1/realtime"];

/// Returns the path that a client means whose path does not exist.
pub(super) fn intended_path(path: &str) -> Option<&'static str> {
    let path = path.trim_end_matches('/');
    let posted = Endpoint::POSTED.into_iter().map(Endpoint::path);
    let of_clients = posted.chain(OTHERS).filter(|known| known.starts_with("/v1/"));
    let ends = |known: &&str| known.strip_prefix("/v1").is_some_and(|appended| path.ends_with(appended));
    // `/v1/messages/count_tokens` rather than `/v1/messages`, and so on.
    of_clients.filter(ends).max_by_key(|known| known.len())
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
        ] {
            // I7.4
            assert_eq!(intended_path(path), Some(expected), "{path}");
        }
        for path in ["/", "", "/v1", "/v1/nothing", "/xmodels/x", "/mychat", "/chat/completionsx"] {
            assert_eq!(intended_path(path), None, "{path}");
        }
    }
}
