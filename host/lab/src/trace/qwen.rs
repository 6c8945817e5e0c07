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

/// A conversation: the requests with the same root.
struct Conversation {
    /// Id of its first request.
    root: i64,
    turns: u32,
    /// Number of tokens of the newest prompt and its answer.
    tokens: u32,
    /// Arrival of the newest request, and the time at which its answer ends if no other load delays it.
    newest: (Duration, Duration),
}

/// Reads lines, and finds the conversation of each in the earlier lines.
#[derive(Default)]
pub(super) struct Reader {
    /// For each request, the position of its conversation in `conversations`.
    chats: HashMap<i64, usize>,
    conversations: Vec<Conversation>,
    /// Parents that are not in the file. Their conversations began before the trace.
    missing: HashSet<i64>,
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        let line: Line = parse_line(text.as_bytes())?;
        let (chat, parent) = (line.chat_id, line.parent_chat_id.unwrap_or(NO_PARENT));
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        let output_tokens = tokens("output_length", line.output_length, 0)?;
        check_block_count(&line.hash_ids, input_tokens, block_tokens)?;
        let at = timestamp_ms("timestamp", line.timestamp * 1e3)
            .map_err(|_| format!("`timestamp` is {}; expected seconds", line.timestamp))?;
        if let Some(turn) = line.turn.filter(|turn| !(1..=MAX_TURNS).contains(turn)) {
            return Err(format!("`turn` is {turn}; expected 1 to {MAX_TURNS}"));
        }
        let place = self.conversation(chat, parent, at)?;
        let mut request = TraceRequest { at, input_tokens, output_tokens, ..TraceRequest::default() };
        request.blocks = line.hash_ids.into();
        let mut new_tokens = input_tokens;
        if let Some(before) = place.and_then(|place| self.conversations.get(place)) {
            request.delay = Some(at.saturating_sub(before.newest.1));
            new_tokens = input_tokens.saturating_sub(before.tokens);
        }
        let place = place.unwrap_or(self.conversations.len());
        if place == self.conversations.len() {
            self.conversations.push(Conversation { root: chat, turns: 0, tokens: 0, newest: (at, at) });
        }
        self.chats.insert(chat, place);
        if let Some(conversation) = self.conversations.get_mut(place) {
            conversation.turns = next_turn(conversation.turns)?;
            let answered = output_tokens.max(1);
            conversation.tokens = input_tokens.saturating_add(answered);
            conversation.newest = (at, at + nominal_time(new_tokens, answered));
            request.session = Some(conversation.root.to_string());
        }
        Ok(Some(request))
    }
}

impl Reader {
    /// Returns the position of the conversation that a request continues, or `None` if it begins one.
    fn conversation(&mut self, chat: i64, parent: i64, at: Duration) -> Result<Option<usize>, String> {
        if chat < 0 {
            return Err(format!("`chat_id` is {chat}; expected 0 or more"));
        }
        if self.chats.contains_key(&chat) {
            return Err(format!("`chat_id` is {chat}, which an earlier line has"));
        }
        if self.missing.contains(&chat) {
            return Err(format!("`chat_id` is {chat}, which an earlier line names as its `parent_chat_id`"));
        }
        if parent == chat {
            return Err(format!("`parent_chat_id` is {parent}, the `chat_id` itself"));
        }
        if let Some(place) = self.chats.get(&parent).copied() {
            let begun = self.conversations.get(place).map_or(Duration::ZERO, |before| before.newest.0);
            if at < begun {
                return Err(format!(
                    "`timestamp` is {} s, before that of the conversation's line before it ({} s)",
                    at.as_secs_f64(),
                    begun.as_secs_f64()
                ));
            }
            return Ok(Some(place));
        }
        check_count(self.conversations.len())?;
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
