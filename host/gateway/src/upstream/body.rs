//! The body of an engine's answer, read by whoever wants it.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    connection::{Answered, Connection},
    pool::Pool,
    wire::{Framing, WireError},
};

/// The body of an answer. At its end the connection goes back to the pool; dropped before, it is closed, which is how an
/// engine is told that nobody waits.
#[derive(Debug)]
pub struct Body {
    framing: Framing,
    /// What came with the head.
    early: Vec<u8>,
    connection: Option<Box<Connection>>,
    keep: bool,
    pool: Arc<Pool>,
}

impl Body {
    pub(super) fn new(answered: Answered, connection: Box<Connection>, pool: Arc<Pool>) -> Self {
        let Answered { head, early } = answered;
        let (framing, keep) = (head.framing, head.keep);
        Self { framing, early, connection: Some(connection), keep, pool }
    }

    /// Whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.framing.is_done()
    }

    /// Appends what has come to `out`; `false` once the body is over.
    pub(crate) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<u8>,
    ) -> Poll<Result<bool, WireError>> {
        let before = out.len();
        if !self.early.is_empty() {
            let early = std::mem::take(&mut self.early);
            self.decode(&early, out)?;
        }
        while out.len() == before {
            if self.framing.is_done() {
                self.give_back();
                return Poll::Ready(Ok(false));
            }
            let Some(mut connection) = self.connection.take() else {
                return Poll::Ready(Err(WireError::Cut));
            };
            let read = connection.poll_read(cx, |bytes| self.decode(bytes, out));
            let Poll::Ready(taken) = read else {
                self.connection = Some(connection);
                return Poll::Pending;
            };
            taken.and_then(|decoded| decoded)?;
            self.connection = Some(connection);
        }
        Poll::Ready(Ok(true))
    }

    /// As [`Body::poll_read`].
    pub(crate) async fn read(&mut self, out: &mut Vec<u8>) -> Result<bool, WireError> {
        std::future::poll_fn(|cx| self.poll_read(cx, out)).await
    }

    /// Takes what has come; nothing stands for the connection's end.
    fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
        if bytes.is_empty() {
            return self.framing.cut();
        }
        if self.framing.decode(bytes, out)? > 0 {
            // Nobody asked for more than one answer.
            self.keep = false;
        }
        Ok(())
    }

    fn give_back(&mut self) {
        if let Some(connection) = self.connection.take().filter(|_| self.keep) {
            self.pool.put(connection);
        }
    }
}
