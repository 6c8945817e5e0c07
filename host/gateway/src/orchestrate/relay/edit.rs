//! The closed list of edits to an engine's bytes: removes what a client must not see, adds what only the
//! gateway knows.

use std::{borrow::Cow, ops::Range};

use bytes::Bytes;
use memchr::memmem;

use crate::{connectors::RequestToken, openai::sse::Seen, upstream::CallError};

/// Applies the closed list of edits to an event or a whole body; `None` when there are none.
pub(crate) fn edit(bytes: &[u8], seen: &Seen, cached_tokens: Option<u32>) -> Option<Vec<u8>> {
    let mut changes: Vec<(Range<usize>, Cow<'static, str>)> = Vec::new();
    if let Some(place) = &seen.handoff_at {
        changes.push((place.clone(), Cow::Borrowed("null")));
    }
    if let (Some(place), Some(cached)) = (&seen.cached_at, cached_tokens) {
        changes.push((place.clone(), Cow::Owned(cached.to_string())));
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

/// Replaces the workers' addresses in a P2pNccl response id by the attempt's own id (A5). `None` when there
/// are none.
pub(crate) fn hide_ids(bytes: &[u8], token: RequestToken) -> Option<Vec<u8>> {
    const MARK: &[u8] = b"___prefill_addr_";
    let (mut out, mut from) = (Vec::new(), 0);
    while let Some(at) = bytes.get(from..).and_then(|rest| memmem::find(rest, MARK)) {
        let start = from + at;
        let length = bytes.get(start..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest));
        out.extend_from_slice(bytes.get(from..start).unwrap_or_default());
        out.extend_from_slice(token.to_string().as_bytes());
        from = length.map_or(bytes.len(), |length| start + length);
    }
    if from == 0 {
        return None;
    }
    out.extend_from_slice(bytes.get(from..).unwrap_or_default());
    Some(out)
}

/// Removes the workers' addresses from an engine's error text.
pub(crate) fn hide_ids_in_error(error: CallError, token: RequestToken) -> CallError {
    match error {
        CallError::Status { status, content_type, retry_after, body, in_body } => {
            let body = hide_ids(&body, token).map_or(body, Bytes::from);
            CallError::Status { status, content_type, retry_after, body, in_body }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a5_an_engine_s_refusal_does_not_name_the_workers_of_a_p2p_nccl_pair() {
        let token = RequestToken::fresh();
        let body = r#"{"id":"cmpl-___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_ab-0","error":{"message":"bad \"___prefill_addr_10.0.0.1:1\""}}"#;
        let error = CallError::Status {
            status: http::StatusCode::BAD_REQUEST,
            content_type: None,
            retry_after: None,
            body: Bytes::from_static(body.as_bytes()),
            in_body: false,
        };
        let CallError::Status { body, .. } = hide_ids_in_error(error, token) else { panic!("another error") };
        let expected = format!(r#"{{"id":"cmpl-{token}","error":{{"message":"bad \"{token}\""}}}}"#);
        // A5.6: in errors
        assert_eq!(body, expected);
        assert_eq!(hide_ids(b"{}", token), None);
    }
}
