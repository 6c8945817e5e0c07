//! The content coding of an engine's answer.

use http::{HeaderMap, header};

use super::CallError;

/// Refuses an answer with a content coding, because the gateway asked for an answer without one. `identity`
/// and an empty value mean no coding (I3.26).
pub(super) fn refuse(headers: &HeaderMap) -> Result<(), CallError> {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let is_none = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    let Some(coding) = codings.find(|coding| !is_none(coding.trim_ascii())) else { return Ok(()) };
    let coding: String = String::from_utf8_lossy(coding.trim_ascii()).chars().take(60).collect();
    let problem = format!("the answer has the content coding `{coding}`, which was not asked for");
    Err(CallError::Protocol(problem))
}
