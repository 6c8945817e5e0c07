//! Sessions of a trace file: their ids, and the rules for forks.

use std::{collections::HashMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::TraceRequest;

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

/// The sessions of the lines read so far.
#[derive(Default)]
pub(super) struct Sessions(HashMap<String, Session>);

struct Session {
    /// Arrival of its first request.
    first: Duration,
    turns: u32,
}

impl Sessions {
    /// Checks the session fields of a request, and counts the request.
    pub(super) fn check(&mut self, request: &TraceRequest) -> Result<(), String> {
        let Some(name) = request.session.as_deref() else {
            return match (&request.parent, request.join) {
                (Some(_), _) => Err("`parent_session_id` needs a `session_id` beside it".to_owned()),
                (None, true) => Err("`join` needs a `session_id` beside it".to_owned()),
                (None, false) => Ok(()),
            };
        };
        check_id("session_id", name)?;
        if let Some(session) = self.0.get_mut(name) {
            session.turns = next_turn(session.turns)?;
            return Ok(());
        }
        if let Some(parent) = request.parent.as_deref() {
            let before = self.0.get(parent).map(|parent| parent.first <= request.at);
            let problem = match before {
                Some(true) => None,
                Some(false) => Some("begins later"),
                None => Some("no earlier line has"),
            };
            if let Some(problem) = problem {
                check_id("parent_session_id", parent)?;
                return Err(format!("`parent_session_id` is \"{parent}\", which {problem}"));
            }
        }
        check_count(self.0.len())?;
        self.0.insert(name.to_owned(), Session { first: request.at, turns: 1 });
        Ok(())
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
