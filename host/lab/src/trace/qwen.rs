//! Qwen's usage traces of Aliyun Bailian, JSONL. A line is a whole request; `parent_chat_id` names the
//! request that it continues.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use serde::Deserialize;

use super::{
    ReadLines, TraceRequest, check_block_count,
    json::{or_null, seconds, whole_number, whole_number_or_null},
    nominal_time, parse_line,
    sessions::{MAX_TURNS, check_count, next_turn},
    timestamp_ms, tokens,
};

/// Value of `parent_chat_id` in the first request of a conversation.
const NO_PARENT: i64 = -1;

/// Fields of a line. The kind of a request (`type`) has no effect.
pub(super) const FIELDS: [&str; 8] =
    ["chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids"];

#[derive(Deserialize)]
struct Line {
    #[serde(deserialize_with = "whole_number")]
    chat_id: i64,
    #[serde(default, deserialize_with = "whole_number_or_null")]
    parent_chat_id: Option<i64>,
    #[serde(deserialize_with = "seconds")]
    timestamp: f64,
    #[serde(deserialize_with = "whole_number")]
    input_length: u64,
    #[serde(deserialize_with = "whole_number")]
    output_length: u64,
    #[serde(default, deserialize_with = "whole_number_or_null")]
    turn: Option<u32>,
    #[serde(default, deserialize_with = "or_null")]
    hash_ids: Vec<u64>,
}

/// A request that was read.
struct Chat {
    id: i64,
    /// Position of the request that it continues.
    parent: Option<usize>,
    /// Number of requests that continue it.
    children: u32,
    /// Number of requests from the first of its conversation to it.
    turns: u32,
    /// Number of tokens of its prompt and its answer.
    tokens: u32,
    at: Duration,
    /// Time at which its answer ends if no other load delays it.
    end: Duration,
}

/// Reads lines, and finds the request that each continues in the earlier lines.
#[derive(Default)]
pub(super) struct Reader {
    /// For each request, its position in `chats`.
    places: HashMap<i64, usize>,
    chats: Vec<Chat>,
    /// Parents that are not in the file. Their conversations began before the trace.
    missing: HashSet<i64>,
    /// Number of sessions so far.
    sessions: usize,
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        let line: Line = parse_line(text.as_bytes())?;
        let (id, parent) = (line.chat_id, line.parent_chat_id.unwrap_or(NO_PARENT));
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        let output_tokens = tokens("output_length", line.output_length, 0)?;
        check_block_count(&line.hash_ids, input_tokens, block_tokens)?;
        let at = timestamp_ms("timestamp", line.timestamp * 1e3)
            .map_err(|_| format!("`timestamp` is {}; expected seconds", line.timestamp))?;
        if let Some(turn) = line.turn.filter(|turn| !(1..=MAX_TURNS).contains(turn)) {
            return Err(format!("`turn` is {turn}; expected 1 to {MAX_TURNS}"));
        }
        let parent = self.parent(id, parent, at)?;
        let answered = output_tokens.max(1);
        let mut request = TraceRequest { at, input_tokens, output_tokens, ..TraceRequest::default() };
        request.blocks = line.hash_ids.into();
        let (mut new_tokens, mut turns, mut begins_session) = (input_tokens, 0, true);
        if let Some(before) = parent.and_then(|place| self.chats.get(place)) {
            turns = before.turns;
            begins_session = before.children > 0;
            request.delay = Some(at.saturating_sub(before.end));
            new_tokens = input_tokens.saturating_sub(before.tokens);
        }
        let turns = next_turn(turns)?;
        if begins_session {
            check_count(self.sessions)?;
            self.sessions += 1;
        }
        if let Some(before) = parent.and_then(|place| self.chats.get_mut(place)) {
            before.children += 1;
        }
        self.places.insert(id, self.chats.len());
        let (end, tokens) = (at + nominal_time(new_tokens, answered), input_tokens.saturating_add(answered));
        self.chats.push(Chat { id, parent, children: 0, turns, tokens, at, end });
        Ok(Some(request))
    }

    /// Finds the sessions. A request continues the session of its parent. Where several requests continue
    /// one, each is a fork, so that none waits for the answer to another.
    fn finish(&mut self, requests: &mut [TraceRequest]) {
        let mut sessions: Vec<i64> = Vec::with_capacity(self.chats.len());
        for (chat, request) in self.chats.iter().zip(requests) {
            let parent = chat.parent.and_then(|place| Some((self.chats.get(place)?, *sessions.get(place)?)));
            let session = match parent {
                Some((before, session)) if before.children == 1 => session,
                Some((_, session)) => {
                    request.parent = Some(session.to_string());
                    chat.id
                }
                None => chat.id,
            };
            request.session = Some(session.to_string());
            sessions.push(session);
        }
    }
}

impl Reader {
    /// Returns the position of the request that a request continues, or `None` if it begins a conversation.
    fn parent(&mut self, chat: i64, parent: i64, at: Duration) -> Result<Option<usize>, String> {
        if chat < 0 {
            return Err(format!("`chat_id` is {chat}; expected 0 or more"));
        }
        if self.places.contains_key(&chat) {
            return Err(format!("`chat_id` is {chat}, which an earlier line has"));
        }
        if self.missing.contains(&chat) {
            return Err(format!("`chat_id` is {chat}, which an earlier line names as its `parent_chat_id`"));
        }
        if parent == chat {
            return Err(format!("`parent_chat_id` is {parent}, the `chat_id` itself"));
        }
        if let Some(place) = self.places.get(&parent).copied() {
            let before = self.chats.get(place).map_or(Duration::ZERO, |before| before.at);
            if at < before {
                return Err(format!(
                    "`timestamp` is {} s, before that of its `parent_chat_id` ({} s)",
                    at.as_secs_f64(),
                    before.as_secs_f64()
                ));
            }
            return Ok(Some(place));
        }
        match parent {
            NO_PARENT => {}
            0.. => {
                self.missing.insert(parent);
            }
            _ => return Err(format!("`parent_chat_id` is {parent}; expected {NO_PARENT} or more")),
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
