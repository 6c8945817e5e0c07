//! Mooncake's JSONL in which a later turn of a session has only what it adds, as in AIPerf's agentic
//! datasets. The prompt of a turn is the previous prompt, the answer to it, and what the line adds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde::Deserialize;

use super::{
    BlockIds, ReadLines, TraceRequest, check_block_count,
    json::{or_null, whole_number},
    milliseconds, nominal_time, parse_line,
    sessions::{SessionId, check_count, check_id, next_turn},
    timestamp_ms, tokens,
};

/// Largest block id that a file may contain. Blocks that the file does not name get larger ids.
const MAX_BLOCK_ID: u64 = 1 << 62;

#[derive(Deserialize)]
struct Line {
    session_id: SessionId,
    #[serde(deserialize_with = "whole_number")]
    input_length: u64,
    #[serde(deserialize_with = "whole_number")]
    output_length: u64,
    #[serde(default, deserialize_with = "or_null")]
    hash_ids: Vec<u64>,
    timestamp: Option<f64>,
    delay: Option<f64>,
    model: Option<String>,
}

/// A session while the file is read.
struct Session {
    /// Blocks of the first prompt. Later blocks contain answers, so no other session shares them.
    first_blocks: Vec<u64>,
    /// Its requests: the position in the trace, and the number of tokens of the whole prompt.
    requests: Vec<(usize, u32)>,
    /// Number of tokens of the newest prompt and its answer.
    tokens: u32,
    /// Number of its requests.
    turns: u32,
    /// Time at which the newest answer ends if no other load delays it.
    end: Duration,
}

/// Reads lines. Requests get their blocks after all lines are read, because the turns of a session share one
/// list.
#[derive(Default)]
pub(super) struct Reader {
    numbers: HashMap<String, usize>,
    sessions: Vec<Session>,
    block_tokens: u32,
    largest_id: u64,
    read: usize,
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        self.block_tokens = block_tokens.max(1);
        let line: Line = parse_line(text.as_bytes())?;
        let added = tokens("input_length", line.input_length, 1)?;
        check_block_count(&line.hash_ids, added, block_tokens)?;
        let mut request = TraceRequest {
            at: timestamp_ms("timestamp", line.timestamp.unwrap_or_default())?,
            input_tokens: added,
            output_tokens: tokens("output_length", line.output_length, 0)?,
            blocks: line.hash_ids.into(),
            session: Some(line.session_id.text()),
            delay: line.delay.map(|delay| milliseconds("delay", delay)).transpose()?,
            model: line.model,
            ..TraceRequest::default()
        };
        self.add(&mut request)?;
        Ok(Some(request))
    }

    fn finish(&mut self, requests: &mut [TraceRequest]) {
        let mut fresh = self.largest_id + 1;
        for session in std::mem::take(&mut self.sessions) {
            let count = |tokens: u32| tokens.div_ceil(self.block_tokens) as usize;
            let longest = session.requests.iter().map(|(_, tokens)| count(*tokens)).max().unwrap_or(0);
            let mut blocks = session.first_blocks;
            let more = longest.saturating_sub(blocks.len()) as u64;
            blocks.extend(fresh..fresh + more);
            fresh += more;
            let blocks: Arc<[u64]> = blocks.into();
            for (place, tokens) in session.requests {
                if let Some(request) = requests.get_mut(place) {
                    request.blocks = BlockIds::first(&blocks, count(tokens));
                }
            }
        }
    }
}

impl Reader {
    /// Takes a request that has the values of its line, and makes its prompt that of the whole turn. A
    /// request without a session stays as it is.
    fn add(&mut self, request: &mut TraceRequest) -> Result<(), String> {
        let largest = request.blocks.iter().copied().max().unwrap_or(0);
        if largest > MAX_BLOCK_ID {
            return Err(format!("`hash_ids` has {largest}; expected at most {MAX_BLOCK_ID}"));
        }
        if let Some(name) = request.session.clone() {
            self.add_turn(name, request)?;
        }
        self.largest_id = self.largest_id.max(largest);
        self.read += 1;
        Ok(())
    }

    fn add_turn(&mut self, name: String, request: &mut TraceRequest) -> Result<(), String> {
        let added = request.input_tokens;
        let number = self.numbers.get(&name).copied();
        let session = match number.and_then(|number| self.sessions.get_mut(number)) {
            Some(session) => {
                let input = u64::from(session.tokens) + u64::from(added);
                request.input_tokens = tokens("input_length", input, 1)
                    .map_err(|error| format!("{error} (with the turns before it)"))?;
                session.turns = next_turn(session.turns)?;
                // A line without a `timestamp` has 0, or the time of the turn before it: the turn follows at
                // once.
                let after_answer = request.at.saturating_sub(session.end);
                let delay = request.delay.unwrap_or(after_answer);
                (request.delay, request.at) = (Some(delay), session.end + delay);
                session
            }
            None => {
                check_id("session_id", &name)?;
                check_count(self.sessions.len())?;
                request.delay = None;
                self.numbers.insert(name, self.sessions.len());
                self.sessions.push(Session::new(request.blocks.to_vec()));
                let Some(session) = self.sessions.last_mut() else { return Ok(()) };
                session
            }
        };
        session.requests.push((self.read, request.input_tokens));
        let answered = request.output_tokens.max(1);
        session.tokens = request.input_tokens.saturating_add(answered);
        session.end = request.at + nominal_time(added, answered);
        Ok(())
    }
}

/// Makes whole prompts of requests of which each has what its line has, in the order of the lines. Removes
/// the requests that cannot have such a prompt, and returns the problem of the first.
pub(super) fn accumulate(requests: &mut Vec<TraceRequest>, block_tokens: u32) -> Option<String> {
    let mut reader = Reader { block_tokens: block_tokens.max(1), ..Reader::default() };
    let mut first_problem = None;
    requests.retain_mut(|request| {
        let result = reader.add(request);
        let is_whole = result.is_ok();
        first_problem = first_problem.take().or(result.err());
        is_whole
    });
    reader.finish(requests);
    first_problem
}

impl Session {
    fn new(first_blocks: Vec<u64>) -> Self {
        Self { first_blocks, requests: Vec::with_capacity(1), tokens: 0, turns: 1, end: Duration::ZERO }
    }
}

#[cfg(test)]
mod tests;
