//! Headers that carry routing hints [A2].

use http::{HeaderMap, HeaderName};

use super::MAX_TEXT_BYTES;
use crate::openai::{limits::text_within, request_error::RequestError, short_text::shortened};

/// Names are made once: a lookup by text would check the text each time.
const fn named(name: &'static str) -> HeaderName {
    HeaderName::from_static(name)
}

pub(super) static INSTANCE: [HeaderName; 2] =
    [named("x-worker-instance-id"), named("x-dynamo-worker-instance-id")];
pub(super) static PREFILL_INSTANCE: [HeaderName; 2] =
    [named("x-prefill-instance-id"), named("x-dynamo-prefill-instance-id")];
pub(super) static RANK: [HeaderName; 3] =
    [named("x-dp-rank"), named("x-dynamo-dp-rank"), named("x-data-parallel-rank")];
pub(super) static PREFILL_RANK: [HeaderName; 2] =
    [named("x-prefill-dp-rank"), named("x-dynamo-prefill-dp-rank")];
/// The session and its parent by Dynamo's names.
static SESSION: [HeaderName; 1] = [named("x-dynamo-session-id")];
static PARENT_SESSION: [HeaderName; 1] = [named("x-dynamo-parent-session-id")];
/// Those that OpenCode sends.
static OPENCODE: [HeaderName; 1] = [named("x-session-id")];
static OPENCODE_PARENT: [HeaderName; 2] = [named("x-dynamo-parent-session-id"), named("x-parent-session-id")];
/// Those that Claude Code sends: the user's session, a sub-agent, and the sub-agent that began that one.
static CLAUDE_CODE: [HeaderName; 1] = [named("x-claude-code-session-id")];
static CLAUDE_CODE_AGENT: [HeaderName; 1] = [named("x-claude-code-agent-id")];
static CLAUDE_CODE_PARENT: [HeaderName; 1] = [named("x-claude-code-parent-agent-id")];
/// The session that Codex sends, and by its former name.
static CODEX: [HeaderName; 2] = [named("session-id"), named("session_id")];
pub(super) static SESSION_FINAL: [HeaderName; 1] = [named("x-dynamo-session-final")];
pub(super) static PRIORITY: [HeaderName; 1] = [named("x-dynamo-request-priority")];
pub(super) static STRICT_PRIORITY: [HeaderName; 1] = [named("x-dynamo-request-strict-priority")];

pub(super) static TTFT_TARGET: [HeaderName; 1] = [named("x-slo-ttft-ms")];
pub(super) static ITL_TARGET: [HeaderName; 1] = [named("x-slo-tpot-ms")];

/// A header of vLLM, which reaches no engine: its sender gets a warning.
pub(super) static VLLM_PRIORITY: [HeaderName; 1] = [named("x-vllm-priority")];

/// Returns whether a request has one of these headers. Few have.
pub(super) fn are_in(headers: &HeaderMap) -> bool {
    let all: [&[HeaderName]; 17] = [
        &INSTANCE,
        &PREFILL_INSTANCE,
        &RANK,
        &PREFILL_RANK,
        &SESSION,
        &OPENCODE,
        &OPENCODE_PARENT,
        &CLAUDE_CODE,
        &CLAUDE_CODE_AGENT,
        &CLAUDE_CODE_PARENT,
        &CODEX,
        &SESSION_FINAL,
        &PRIORITY,
        &STRICT_PRIORITY,
        &TTFT_TARGET,
        &ITL_TARGET,
        &VLLM_PRIORITY,
    ];
    let is_one = |name: &HeaderName| all.iter().any(|names| names.contains(name));
    let may_be = |name: &str| name.starts_with("x-") || name.starts_with("session");
    headers.keys().any(|name| may_be(name.as_str()) && is_one(name))
}

/// The session of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    pub(super) id: Option<String>,
    /// The session that began it.
    pub(super) parent: Option<String>,
}

/// Returns the session that headers name. Coding agents have names of their own, which Dynamo's replace.
///
/// # Errors
/// [`RequestError`] when a header is too long.
pub(super) fn session(headers: &HeaderMap) -> Result<Session, RequestError> {
    let read = |names: &[HeaderName]| header(headers, names);
    if let id @ Some(_) = read(&SESSION)? {
        return Ok(Session { id, parent: read(&PARENT_SESSION)? });
    }
    let root = read(&CLAUDE_CODE)?;
    if let id @ Some(_) = read(&CLAUDE_CODE_AGENT)? {
        return Ok(Session { id, parent: read(&CLAUDE_CODE_PARENT)?.or(root) });
    }
    Ok(Session { id: read(&OPENCODE)?.or(root).or(read(&CODEX)?), parent: read(&OPENCODE_PARENT)? })
}

/// Returns the target that the first of the headers names, milliseconds.
///
/// # Errors
/// [`RequestError`] when it is not a number above 0.
pub(super) fn target_ms(headers: &HeaderMap, names: &[HeaderName]) -> Result<Option<f64>, RequestError> {
    let target: Option<f64> = header(headers, names)?;
    match target {
        Some(target) if !(target.is_finite() && target > 0.0) => {
            let name = names.first().map_or("", |name| name.as_str());
            Err(RequestError::new(
                name,
                &format!("`{target}` is not a valid time: send a number of milliseconds above 0"),
            ))
        }
        _ => Ok(target),
    }
}

/// Returns the value of the first of the headers that the request has.
///
/// # Errors
/// [`RequestError`] when it is too long, does not parse, or is there with several values: those who add and
/// who read a header may take different ones.
pub(super) fn header<T: std::str::FromStr>(
    headers: &HeaderMap,
    names: &[HeaderName],
) -> Result<Option<T>, RequestError> {
    let given = names.iter().find_map(|name| headers.get(name).map(|value| (name, value)));
    let Some((name, value)) = given else { return Ok(None) };
    let other = headers.get_all(name).iter().find(|other| *other != value);
    let name = name.as_str();
    let text = String::from_utf8_lossy(value.as_bytes());
    text_within(name, &text, MAX_TEXT_BYTES)?;
    if let Some(other) = other {
        let other = shortened(&String::from_utf8_lossy(other.as_bytes()));
        let problem =
            format!("the header has several values, `{}` and `{other}`; send one", shortened(&text));
        return Err(RequestError::new(name, &problem));
    }
    let parsed = text.trim().parse().ok().map(Some);
    parsed.ok_or_else(|| RequestError::new(name, &format!("`{}` does not parse", shortened(&text))))
}
