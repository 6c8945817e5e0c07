//! Order of one source's messages: detects gaps, duplicates and restarts by sequence numbers.
//!
//! A state machine without clocks or sockets. It guarantees that the messages it hands out are consecutive,
//! except where a step says to forget the source first.

use std::collections::VecDeque;

/// Orders the messages of one connection. `M` is a message's payload.
#[derive(Debug)]
pub struct Sequencer<M> {
    /// Number of the last message handed out.
    applied: Option<u64>,
    /// Number of the last live message. Replayed messages may be newer.
    seen: Option<u64>,
    /// Live messages that wait for the end of a replay; `None` if no replay is open.
    kept: Option<Kept<M>>,
    max_messages: usize,
    max_bytes: usize,
}

/// Action of the caller on a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<M> {
    /// Apply the message.
    Apply(M),
    /// The message was seen before; nothing to do.
    Duplicate,
    /// Messages `from..=to` are missing. The message is kept and a replay is open: pass replies to
    /// [`Sequencer::replayed`], take messages from [`Sequencer::advance`], then call [`Sequencer::finish`].
    Gap {
        /// First missing number.
        from: u64,
        /// Last missing number.
        to: u64,
    },
    /// A replay is open; the message is kept until its end.
    Kept,
    /// The source restarted its numbers: forget it, then apply the message. An open replay is closed.
    Restarted(M),
    /// Earlier messages are lost: forget the source, then apply the message.
    Lost(M),
}

#[derive(Debug)]
struct Kept<M> {
    messages: VecDeque<(u64, M)>,
    bytes: usize,
}

impl<M: AsRef<[u8]>> Sequencer<M> {
    /// Creates a sequencer. While a replay is open it keeps at most this many live messages and bytes, and
    /// drops the oldest ones above that.
    #[must_use]
    pub fn new(max_messages: usize, max_bytes: usize) -> Self {
        Self { applied: None, seen: None, kept: None, max_messages, max_bytes }
    }

    /// Handles a live message.
    pub fn on(&mut self, seq: u64, message: M) -> Step<M> {
        match self.seen.replace(seq) {
            Some(before) if seq < before => {
                self.applied = Some(seq);
                self.kept = None;
                return Step::Restarted(message);
            }
            Some(before) if seq == before => return Step::Duplicate,
            _ => {}
        }
        if let Some(kept) = &mut self.kept {
            kept.push(seq, message, self.max_messages, self.max_bytes);
            return Step::Kept;
        }
        match self.applied {
            Some(applied) if seq > applied && seq - applied > 1 => {
                self.open();
                if let Some(kept) = &mut self.kept {
                    kept.push(seq, message, self.max_messages, self.max_bytes);
                }
                Step::Gap { from: applied + 1, to: seq - 1 }
            }
            _ => self.order(seq, message),
        }
    }

    /// Opens a replay without a gap, to receive what happened before the first live message.
    pub fn open(&mut self) {
        self.kept.get_or_insert_with(|| Kept { messages: VecDeque::new(), bytes: 0 });
    }

    /// Returns whether a replay is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.kept.is_some()
    }

    /// Handles a message of the open replay. Without an open replay it is a duplicate.
    pub fn replayed(&mut self, seq: u64, message: M) -> Step<M> {
        if self.kept.is_some() { self.order(seq, message) } else { Step::Duplicate }
    }

    /// Returns the number after the last message handed out; `None` before the first one.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        self.applied.map(|applied| applied.saturating_add(1))
    }

    /// Returns the step of the first kept message; `None` if messages before it are missing, or nothing is
    /// kept ([`Sequencer::is_caught_up`] tells which). The replay stays open.
    pub fn advance(&mut self) -> Option<Step<M>> {
        let next = self.next();
        let kept = self.kept.as_mut()?;
        let (seq, message) = kept.messages.pop_front_if(|(seq, _)| next.is_none_or(|next| *seq <= next))?;
        kept.bytes -= message.as_ref().len();
        Some(self.order(seq, message))
    }

    /// Returns whether no message is kept.
    #[must_use]
    pub fn is_caught_up(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.messages.is_empty())
    }

    /// Closes the replay, complete or not, and returns the steps of the kept messages.
    pub fn finish(&mut self) -> Vec<Step<M>> {
        let kept = self.kept.take().map(|kept| kept.messages).unwrap_or_default();
        kept.into_iter().map(|(seq, message)| self.order(seq, message)).collect()
    }

    /// Resets the sequencer for a new connection. Returns the number of the last live message.
    pub fn reset(&mut self) -> Option<u64> {
        self.applied = None;
        self.kept = None;
        self.seen.take()
    }

    fn order(&mut self, seq: u64, message: M) -> Step<M> {
        match self.applied {
            Some(applied) if seq <= applied => return Step::Duplicate,
            Some(applied) if seq - applied > 1 => {
                self.applied = Some(seq);
                return Step::Lost(message);
            }
            _ => self.applied = Some(seq),
        }
        Step::Apply(message)
    }
}

impl<M: AsRef<[u8]>> Kept<M> {
    /// Keeps a message and drops the oldest ones above the limits. The gap shows when the replay ends.
    fn push(&mut self, seq: u64, message: M, max_messages: usize, max_bytes: usize) {
        self.bytes += message.as_ref().len();
        self.messages.push_back((seq, message));
        while self.messages.len() > max_messages || self.bytes > max_bytes {
            let Some((_, oldest)) = self.messages.pop_front() else { break };
            self.bytes -= oldest.as_ref().len();
        }
    }
}

#[cfg(test)]
mod tests;
