//! Sessions of a trace file: their ids, and the rules for forks.

use std::{collections::HashMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{TraceRequest, json::whole_number};

/// Maximum length of a session's id, bytes.
const MAX_ID: usize = 256;
/// Maximum number of sessions in a file.
const MAX_SESSIONS: usize = 10_000_000;
/// Maximum number of turns in a session.
pub const MAX_TURNS: u32 = 100_000;

/// A session's id in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a text or a whole number")]
pub(super) enum SessionId {
    Text(String),
    #[serde(deserialize_with = "whole_number")]
    Number(u64),
}

impl SessionId {
    pub(super) fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Number(number) => number.to_string(),
        }
    }
}

/// What the lines of later turns have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnForm {
    /// The whole prompt.
    Whole,
    /// Only what the turn adds to the prompt and the answer before it.
    Addition,
    /// The lengths are those of additions; nothing else shows what they are.
    Unclear,
}

/// The sessions of the lines read so far.
#[derive(Default)]
pub(super) struct Sessions {
    by_id: HashMap<String, Session>,
    later: LaterTurns,
    /// Number of turns that got the time of an earlier turn, because theirs was before it.
    moved: u64,
}

struct Session {
    /// Arrival of its first request.
    first: Duration,
    /// Latest arrival of its requests.
    last: Duration,
    /// Latest arrival of the requests of the sessions that were forked from it.
    last_of_forks: Duration,
    /// Session from which it was forked.
    parent: Option<String>,
    turns: u32,
    /// Number of tokens of its longest prompt so far and the answer to it.
    longest: u32,
    /// First block of its newest prompt.
    first_block: Option<u64>,
}

/// Numbers of later turns with a `delay`, without those that are known to be whole prompts.
#[derive(Clone, Copy, Default)]
struct LaterTurns {
    all: u64,
    /// Turns that begin with the block with which the turn before them begins, as whole prompts do.
    continue_prompt: u64,
    /// Turns that are shorter than a prompt and its answer before them in the session.
    shorter: u64,
    /// Those of the shorter turns that begin with another block, and have no time of their own.
    add: u64,
}

impl Sessions {
    /// Checks the session fields of a request, and counts the request. `is_timed`: its line has a
    /// `timestamp`. Without one, the request gets the arrival of the newest request that it waits for, so
    /// that a stable sort by arrival leaves it behind that request, and a later turn without a `delay` gets
    /// one of 0. A turn whose time is before that of an earlier turn gets the time of that turn. `is_whole`:
    /// its line says that it has the whole prompt.
    pub(super) fn check(
        &mut self,
        request: &mut TraceRequest,
        is_timed: bool,
        is_whole: bool,
    ) -> Result<(), String> {
        let Some(name) = request.session.as_deref() else {
            return match (&request.parent, request.join) {
                (Some(_), _) => Err("`parent_session_id` needs a `session_id` beside it".to_owned()),
                (None, true) => Err("`join` needs a `session_id` beside it".to_owned()),
                (None, false) => Ok(()),
            };
        };
        check_id("session_id", name)?;
        if let Some(session) = self.by_id.get_mut(name) {
            session.turns = next_turn(session.turns)?;
            if !is_timed {
                let forks = if request.join { session.last_of_forks } else { Duration::ZERO };
                request.at = session.last.max(forks);
                request.delay.get_or_insert_default();
            }
            self.moved += u64::from(request.at < session.last);
            request.at = request.at.max(session.last);
            if request.delay.is_some() && !is_whole {
                self.later.count(session, request, is_timed);
            }
            session.add(request);
            let parent = session.parent.clone();
            self.note_fork(parent.as_deref(), request.at);
            return Ok(());
        }
        if let Some(parent) = request.parent.as_deref() {
            let problem = match self.by_id.get(parent) {
                Some(parent) => {
                    if !is_timed {
                        request.at = parent.last;
                    }
                    (parent.first > request.at).then_some("begins later")
                }
                None => Some("no earlier line has"),
            };
            if let Some(problem) = problem {
                check_id("parent_session_id", parent)?;
                return Err(format!("`parent_session_id` is \"{parent}\", which {problem}"));
            }
        }
        check_count(self.by_id.len())?;
        self.by_id.insert(name.to_owned(), Session::new(request));
        self.note_fork(request.parent.as_deref(), request.at);
        Ok(())
    }

    /// Notes the arrival of a request in the session from which its own session was forked.
    fn note_fork(&mut self, parent: Option<&str>, at: Duration) {
        if let Some(parent) = parent.and_then(|parent| self.by_id.get_mut(parent)) {
            parent.last_of_forks = parent.last_of_forks.max(at);
        }
    }

    /// Returns the number of turns that got the time of an earlier turn, because theirs was before it.
    pub(super) fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns what most later turns with a `delay` have.
    pub(super) fn turn_form(&self) -> TurnForm {
        let LaterTurns { all, continue_prompt, shorter, add } = self.later;
        if add * 2 > all {
            TurnForm::Addition
        } else if shorter * 2 > all && continue_prompt * 2 <= all {
            TurnForm::Unclear
        } else {
            TurnForm::Whole
        }
    }
}

impl Session {
    fn new(first: &TraceRequest) -> Self {
        let mut session = Self {
            first: first.at,
            last: first.at,
            last_of_forks: Duration::ZERO,
            parent: first.parent.clone(),
            turns: 1,
            longest: 0,
            first_block: None,
        };
        session.add(first);
        session
    }

    fn add(&mut self, request: &TraceRequest) {
        self.last = self.last.max(request.at);
        let length = request.input_tokens.saturating_add(request.output_tokens);
        self.longest = self.longest.max(length);
        self.first_block = request.blocks.first().copied();
    }
}

impl LaterTurns {
    /// Counts a turn; `session` has the turns before it.
    fn count(&mut self, session: &Session, request: &TraceRequest, is_timed: bool) {
        let blocks = session.first_block.zip(request.blocks.first());
        let begins_alike = blocks.map(|(before, first)| before == *first);
        let is_shorter = request.input_tokens < session.longest;
        self.all += 1;
        self.continue_prompt += u64::from(begins_alike == Some(true));
        self.shorter += u64::from(is_shorter);
        self.add += u64::from(is_shorter && !is_timed && begins_alike == Some(false));
    }
}

/// Checks the length of a session's id.
pub(super) fn check_id(field: &str, id: &str) -> Result<(), String> {
    let length = id.len();
    if length > MAX_ID {
        return Err(format!("`{field}` has {length} bytes; expected at most {MAX_ID}"));
    }
    Ok(())
}

/// Checks that the file may contain another session.
pub(super) fn check_count(sessions: usize) -> Result<(), String> {
    if sessions >= MAX_SESSIONS {
        return Err(format!(
            "`session_id` is that of session {}; expected at most {MAX_SESSIONS}",
            sessions + 1
        ));
    }
    Ok(())
}

/// Returns the number of turns after one more.
pub(super) fn next_turn(turns: u32) -> Result<u32, String> {
    if turns >= MAX_TURNS {
        return Err(format!("`session_id` has more than {MAX_TURNS} requests; split the session"));
    }
    Ok(turns + 1)
}

#[cfg(test)]
mod tests;
