//! The writer's queue: its messages, and how the writer waits for them.

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
    prefix::Prefix,
};

/// A message to the writer. Each variant is a method of [`super::PrefixIndex`].
pub(super) enum Message {
    Events { candidate: Candidate, batch: Batch },
    Forget(Candidate),
    Live { candidate: Candidate, live: bool },
    Record { candidate: Candidate, prefix: Prefix, at: Instant },
    Withdraw { candidate: Candidate, blocks: Arc<[BlockHash]>, at: Instant },
    ForgetRecords(WorkerId),
    Remove(WorkerId),
    Expire(Instant),
    Flush(Sender<()>),
}

/// Receives messages so that senders rarely have to wake this thread. A wake-up per decision would cost the
/// decision a system call, and both threads a context switch.
pub(super) struct Queue<'a> {
    messages: &'a Receiver<Message>,
    /// Messages since the queue was last found empty.
    in_a_row: u32,
    /// When the queue was last found empty.
    emptied: Instant,
}

impl<'a> Queue<'a> {
    /// While messages arrive at short intervals, an empty queue makes the thread sleep this long instead of
    /// waiting for the next message. It then finds several at once.
    const NAP: Duration = Duration::from_millis(1);

    pub(super) fn new(messages: &'a Receiver<Message>) -> Self {
        Self { messages, in_a_row: 0, emptied: Instant::now() }
    }

    /// Returns the next message, or an error when all senders are dropped.
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
            let busy = self.in_a_row > 0 && now.saturating_duration_since(self.emptied) < 4 * Self::NAP;
            (self.in_a_row, self.emptied) = (0, now);
            if !busy {
                let message = self.messages.recv()?;
                self.in_a_row = 1;
                return Ok(message);
            }
            thread::sleep(Self::NAP);
        }
    }
}
