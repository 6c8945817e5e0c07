//! Requests from a trace: lengths scaled down, prefixes as in the trace.

use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::json;

/// One line of the Mooncake traces; a block is 512 tokens, and an equal id is an equal block.
#[derive(Deserialize)]
struct Line {
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Bytes that stand for a block: 32 tokens of about 4 bytes, a 16th of the trace's.
const BLOCK_BYTES: usize = 128;

/// Chat completions of the first `count` lines.
pub(crate) fn bodies(path: &Path, count: usize) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text.lines().filter(|line| !line.trim().is_empty()).take(count);
    lines
        .map(|line| {
            let line: Line = serde_json::from_str(line).with_context(|| line.to_owned())?;
            let prompt: String = line.hash_ids.iter().map(|id| block(*id)).collect();
            let tokens = (line.output_length / 16).clamp(4, 40);
            Ok(json!({
                "model": "tiny", "stream": true, "max_tokens": tokens, "ignore_eos": true,
                "stream_options": { "include_usage": true },
                "messages": [{ "role": "user", "content": prompt }],
            })
            .to_string())
        })
        .collect()
}

fn block(id: u64) -> String {
    let mut text = String::with_capacity(BLOCK_BYTES + 16);
    while text.len() < BLOCK_BYTES {
        text.push_str(&format!("block{id:06} "));
    }
    text.truncate(BLOCK_BYTES);
    text
}
