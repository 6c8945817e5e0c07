//! How messages reach the index's writer: through the queue of its thread, or by a call.

use std::{
    fmt,
    sync::mpsc::{SyncSender, TrySendError},
};

use parking_lot::Mutex;

use super::{queue::Message, writer::Writer};

/// How messages reach the writer.
pub(super) enum Inbox {
    /// A writer thread receives them.
    Thread(SyncSender<Message>),
    /// The sender applies them itself.
    Inline(Box<Mutex<Writer>>),
}

impl Inbox {
    /// Sends a message, unless the queue is full; then returns it.
    pub(super) fn try_send(&self, message: Message) -> Result<(), Message> {
        match self {
            Self::Thread(queue) => match queue.try_send(message) {
                Err(TrySendError::Full(message)) => Err(message),
                // The writer ends only when the index is dropped.
                Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            },
            Self::Inline(writer) => {
                writer.lock().handle(message);
                Ok(())
            }
        }
    }

    /// Sends a message; waits while the queue is full.
    pub(super) fn send(&self, message: Message) {
        match self {
            Self::Thread(queue) => drop(queue.send(message)),
            Self::Inline(writer) => writer.lock().handle(message),
        }
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::Thread(_)) { "Thread" } else { "Inline" })
    }
}
