//! The content coding of an engine's answer.

use http::{HeaderMap, header};

use super::CallError;

/// Refuses an answer with a content coding, because the gateway asked for an answer without one.
pub(super) fn refuse(headers: &HeaderMap) -> Result<(), CallError> {
    let Some(coding) = content_coding(headers) else { return Ok(()) };
    let problem = format!("the answer has the content coding `{coding}`, which was not asked for");
    Err(CallError::Protocol(problem))
}

/// Returns the beginning of the name of an answer's content coding. `identity` and an empty value mean no
/// coding (I3.26).
pub(crate) fn content_coding(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let is_none = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    let coding = codings.find(|coding| !is_none(coding.trim_ascii()))?;
    Some(String::from_utf8_lossy(coding.trim_ascii()).chars().take(60).collect())
}
