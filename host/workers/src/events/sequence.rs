//! The order of one source's messages: what may be applied, what is missing, what began anew.
//!
//! A state machine without clocks or sockets. Its promise: what it hands out is one unbroken run of numbers, or a step
//! that says "forget first" stands between.

use std::collections::VecDeque;

/// Orders the messages of one connection to one source. `M` is a message's payload.
#[derive(Debug)]
pub struct Sequencer<M> {
    /// The last message that was handed out.
    applied: Option<u64>,
    /// The last message that came live. A replay runs ahead of it.
    seen: Option<u64>,
    /// Live messages that wait for the end of a replay; `None` when no replay is open.
    kept: Option<Kept<M>>,
    max_messages: usize,
    max_bytes: usize,
}

/// What to do with a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<M> {
    /// Apply it.
    Apply(M),
    /// Known already: drop it.
    Duplicate,
    /// `from..=to` are missing. The message is kept and a replay is open: feed [`Sequencer::replayed`], then call
    /// [`Sequencer::finish`].
    Gap {
        /// The first missing number.
        from: u64,
        /// The last missing number.
        to: u64,
    },
    /// A replay is open: the message is kept for its end.
    Kept,
    /// Numbers went back: the source began anew. Forget it, then apply this. An open replay is over.
    Restarted(M),
    /// Numbers before it are lost for good. Forget the source, then apply this.
    Lost(M),
}

#[derive(Debug)]
struct Kept<M> {
    messages: VecDeque<(u64, M)>,
    bytes: usize,
}

impl<M: AsRef<[u8]>> Sequencer<M> {
    /// A sequencer that has seen nothing. While a replay is open it keeps at most this many live messages and bytes; the
    /// oldest go first.
    #[must_use]
    pub fn new(max_messages: usize, max_bytes: usize) -> Self {
        Self { applied: None, seen: None, kept: None, max_messages, max_bytes }
    }

    /// Takes a live message.
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

    /// Opens a replay without a gap, to learn what happened before the first live message.
    pub fn open(&mut self) {
        self.kept.get_or_insert_with(|| Kept { messages: VecDeque::new(), bytes: 0 });
    }

    /// Whether a replay is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.kept.is_some()
    }

    /// Takes a message of the open replay. With no replay open it is dropped as a duplicate.
    pub fn replayed(&mut self, seq: u64, message: M) -> Step<M> {
        if self.kept.is_some() { self.order(seq, message) } else { Step::Duplicate }
    }

    /// Closes the replay, filled or not, and orders what was kept.
    pub fn finish(&mut self) -> Vec<Step<M>> {
        let kept = self.kept.take().map(|kept| kept.messages).unwrap_or_default();
        kept.into_iter().map(|(seq, message)| self.order(seq, message)).collect()
    }

    /// Forgets every number: the connection is another one. The last live number is handed back.
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
    /// Keeps a message and drops the oldest over the limits: the hole shows when the replay ends.
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
