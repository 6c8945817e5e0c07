//! Makes requests from a recorded trace: lengths are scaled down, shared prefixes are kept.

use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::json;

/// One line of a Mooncake trace. A block has 512 tokens; equal ids are equal blocks.
#[derive(Deserialize)]
struct Line {
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Bytes of a block: 32 tokens of about 4 bytes, a sixteenth of the block in the trace.
const BLOCK_BYTES: usize = 128;

/// The first 400 requests of the Mooncake conversation trace.
const EXCERPT: &str = include_str!("../../../tests/fixtures/mooncake_conversation_400.jsonl");

/// Makes chat completions of the first `count` lines of a file, or of the excerpt.
///
/// # Errors
/// The file cannot be read, or one of its lines does not have the form of a Mooncake trace.
pub fn bodies(file: Option<&Path>, count: usize) -> anyhow::Result<Vec<String>> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))
    };
    let text = file.map_or_else(|| Ok(EXCERPT.to_owned()), read)?;
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

#[cfg(test)]
mod tests {
    use super::{BLOCK_BYTES, block, bodies};

    #[test]
    fn equal_ids_are_equal_blocks() {
        assert_eq!(block(7), block(7));
        assert_ne!(block(7), block(8));
        assert_eq!(block(1_234_567).len(), BLOCK_BYTES);
    }

    #[test]
    fn the_excerpt_has_requests_of_every_length() {
        let bodies = bodies(None, 400).unwrap();
        assert_eq!(bodies.len(), 400);
        assert!(bodies.iter().all(|body| body.contains("\"stream\":true")));
    }
}
