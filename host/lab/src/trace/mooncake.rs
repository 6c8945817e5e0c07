//! Mooncake's JSONL, with the further keys that our export writes.

use std::{io::Write, time::Duration};

use serde::{Deserialize, Serialize};

use super::{MAX_S, Trace, TraceRequest, parse_line, tokens};

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(default)]
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    delay: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant_hash: Option<u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    priority: f32,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a text or a whole number")]
enum SessionId {
    Text(String),
    Number(u64),
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(priority: &f32) -> bool {
    *priority == 0.0
}

pub(super) fn line(text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
    let line: Line = parse_line(text.as_bytes())?;
    let input_tokens = tokens("input_length", line.input_length, 1)?;
    let expected = input_tokens.div_ceil(block_tokens.max(1)) as usize;
    if !line.hash_ids.is_empty() && line.hash_ids.len() != expected {
        let found = line.hash_ids.len();
        return Err(format!(
            "`hash_ids` has {found} ids; {input_tokens} tokens in blocks of {block_tokens} have {expected}; give the \
             size of the trace's blocks with --trace-block"
        ));
    }
    Ok(Some(TraceRequest {
        at: milliseconds("timestamp", line.timestamp)?,
        input_tokens,
        // An answer has at least one token.
        output_tokens: tokens("output_length", line.output_length, 0)?.max(1),
        blocks: line.hash_ids,
        session: line.session_id.map(|session| match session {
            SessionId::Text(text) => text,
            SessionId::Number(number) => number.to_string(),
        }),
        delay: line.delay.map(|delay| milliseconds("delay", delay)).transpose()?,
        model: line.model,
        tenant_hash: line.tenant_hash,
        priority: line.priority,
    }))
}

fn milliseconds(field: &str, value: f64) -> Result<Duration, String> {
    let limit = MAX_S * 1e3;
    if (0.0..=limit).contains(&value) {
        Ok(Duration::from_nanos((value * 1e6).round() as u64))
    } else {
        Err(format!("`{field}` is {value}; expected milliseconds from 0 to {limit}"))
    }
}

pub(super) fn write(trace: &Trace, mut out: impl Write) -> std::io::Result<()> {
    for request in &trace.requests {
        let line = Line {
            timestamp: request.at.as_secs_f64() * 1e3,
            input_length: request.input_tokens.into(),
            output_length: request.output_tokens.into(),
            hash_ids: request.blocks.clone(),
            session_id: request.session.clone().map(SessionId::Text),
            delay: request.delay.map(|delay| delay.as_secs_f64() * 1e3),
            model: request.model.clone(),
            tenant_hash: request.tenant_hash,
            priority: request.priority,
        };
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}
