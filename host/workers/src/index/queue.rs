//! The writer's queue: what it is told, and how it waits.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvError, Sender, TryRecvError},
    },
    thread,
    time::Duration,
};

use tokio::time::Instant;

use super::Candidate;
use crate::{
    events::Batch,
    id::{BlockHash, WorkerId},
};

/// What the writer is told.
pub(super) enum Message {
    /// What an engine says of its cache.
    Events {
        candidate: Candidate,
        batch: Batch,
    },
    /// Nothing that an engine said is true any more.
    Forget(Candidate),
    /// Whether an engine's own word is there: decisions are recorded only without it.
    Live {
        candidate: Candidate,
        live: bool,
    },
    Record {
        candidate: Candidate,
        blocks: Arc<[BlockHash]>,
        at: Instant,
    },
    Remove(WorkerId),
    Expire(Instant),
    Flush(Sender<()>),
}

/// The messages, taken in such a way that senders rarely have to wake this thread: to be woken for every decision costs
/// the decision a system call, and both threads a switch.
pub(super) struct Queue<'a> {
    messages: &'a Receiver<Message>,
    /// Messages since the queue was last waited for.
    in_a_row: u32,
    /// When it was last found empty.
    emptied: Instant,
}

impl<'a> Queue<'a> {
    /// While messages come closely, the thread sleeps this long instead of waiting for the next: then all are there at once.
    const NAP: Duration = Duration::from_millis(1);

    pub(super) fn new(messages: &'a Receiver<Message>) -> Self {
        Self { messages, in_a_row: 0, emptied: Instant::now() }
    }

    /// The next message; an error when no sender is left.
    pub(super) fn next(&mut self) -> Result<Message, RecvError> {
        loop {
            match self.messages.try_recv() {
                Ok(message) => {
                    self.in_a_row = self.in_a_row.saturating_add(1);
                    return Ok(message);
                }
                Err(TryRecvError::Disconnected) => return Err(RecvError),
                Err(TryRecvError::Empty) => {}
            }
            let now = Instant::now();
            let close = self.in_a_row > 0 && now.saturating_duration_since(self.emptied) < 4 * Self::NAP;
            (self.in_a_row, self.emptied) = (0, now);
            if !close {
                let message = self.messages.recv()?;
                self.in_a_row = 1;
                return Ok(message);
            }
            thread::sleep(Self::NAP);
        }
    }
}
