//! Mooncake's JSONL, with the further keys that `trace export` writes.

use std::{io::Write, time::Duration};

use serde::{Deserialize, Serialize, de::IgnoredAny};

use super::{
    ReadLines, Targets, Trace, TraceRequest, check_block_count,
    json::{milliseconds_or_null, or_null, whole_number},
    milliseconds, parse_line,
    sessions::{SessionId, Sessions, TurnForm},
    timestamp_ms, tokens,
};

/// Fields of a line.
pub(super) const FIELDS: [&str; 15] = [
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "session_id",
    "delay",
    "parent_session_id",
    "join",
    "whole_prompt",
    "model",
    "tenant_hash",
    "priority",
    "ttft_target_ms",
    "itl_target_ms",
    "group_id",
];

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(default, deserialize_with = "milliseconds_or_null")]
    timestamp: Option<f64>,
    #[serde(deserialize_with = "whole_number")]
    input_length: u64,
    #[serde(deserialize_with = "whole_number")]
    output_length: u64,
    #[serde(default, deserialize_with = "or_null")]
    hash_ids: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    delay: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent_session_id: Option<SessionId>,
    #[serde(default, deserialize_with = "or_null", skip_serializing_if = "is_false")]
    join: bool,
    /// In a later turn that is not only what it adds to its session. Files of `pointsman trace` have it.
    #[serde(default, deserialize_with = "or_null", skip_serializing_if = "is_false")]
    whole_prompt: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant_hash: Option<u64>,
    #[serde(default, deserialize_with = "or_null", skip_serializing_if = "is_zero")]
    priority: f32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttft_target_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    itl_target_ms: Option<f64>,
    /// In AIPerf's datasets, in which a later turn has only what it adds.
    #[serde(default, skip_serializing)]
    group_id: Option<IgnoredAny>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(priority: &f32) -> bool {
    *priority == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !*value
}

/// Reads lines, and checks each against the sessions of the earlier lines.
#[derive(Default)]
pub(super) struct Reader {
    sessions: Sessions,
    /// Whether a line has a `group_id`.
    has_group: bool,
    /// Whether each line must be of a session.
    needs_session: bool,
}

impl Reader {
    /// Returns a reader of lines that must all be of sessions.
    pub(super) fn of_sessions() -> Self {
        Self { needs_session: true, ..Self::default() }
    }
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        let line: Line = parse_line(text.as_bytes())?;
        if self.needs_session && line.session_id.is_none() {
            return Err("missing field `session_id`".to_owned());
        }
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        check_block_count(&line.hash_ids, input_tokens, block_tokens)?;
        // A turn of a session begins after the turn before it.
        if line.timestamp.is_none() && line.session_id.is_none() {
            return Err("`timestamp` is missing; only a request with a `session_id` needs none".to_owned());
        }
        let mut request = TraceRequest {
            at: timestamp_ms("timestamp", line.timestamp.unwrap_or_default())?,
            input_tokens,
            output_tokens: tokens("output_length", line.output_length, 0)?,
            blocks: line.hash_ids.into(),
            session: line.session_id.map(SessionId::text),
            delay: line.delay.map(|delay| milliseconds("delay", delay)).transpose()?,
            parent: line.parent_session_id.map(SessionId::text),
            join: line.join,
            model: line.model,
            tenant_hash: line.tenant_hash,
            priority: line.priority,
            targets: Targets {
                ttft: line.ttft_target_ms.map(|target| milliseconds("ttft_target_ms", target)).transpose()?,
                itl: line.itl_target_ms.map(|target| milliseconds("itl_target_ms", target)).transpose()?,
            },
        };
        self.sessions.check(&mut request, line.timestamp.is_some(), line.whole_prompt)?;
        self.has_group |= line.group_id.is_some();
        Ok(Some(request))
    }

    fn moved(&self) -> u64 {
        self.sessions.moved()
    }

    fn turn_form(&self) -> TurnForm {
        if self.has_group { TurnForm::Addition } else { self.sessions.turn_form() }
    }
}

pub(super) fn write(trace: &Trace, mut out: impl Write) -> std::io::Result<()> {
    for request in &trace.requests {
        let line = Line {
            timestamp: Some(in_milliseconds(request.at)),
            input_length: request.input_tokens.into(),
            output_length: request.output_tokens.into(),
            hash_ids: request.blocks.to_vec(),
            session_id: request.session.clone().map(SessionId::Text),
            delay: request.delay.map(in_milliseconds),
            parent_session_id: request.parent.clone().map(SessionId::Text),
            join: request.join,
            whole_prompt: request.delay.is_some(),
            model: request.model.clone(),
            tenant_hash: request.tenant_hash,
            priority: request.priority,
            ttft_target_ms: request.targets.ttft.map(in_milliseconds),
            itl_target_ms: request.targets.itl.map(in_milliseconds),
            group_id: None,
        };
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn in_milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
