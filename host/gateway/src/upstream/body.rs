//! The body of an engine's answer, read where it is needed.

use std::task::{Context, Poll};

use super::{
    connection::{Answered, Connection},
    pool::ConnectionPool,
    wire::Framing,
    wire_error::WireError,
};

/// The body of an answer. At its end the connection goes back to the pool. Dropping it earlier closes the
/// connection, which stops the engine's work.
#[derive(Debug)]
pub(crate) struct Body {
    framing: Framing,
    /// Bytes that arrived with the head.
    early: Vec<u8>,
    connection: Option<Box<Connection>>,
    keep: bool,
    pool: ConnectionPool,
}

impl Body {
    pub(super) fn new(answered: Answered, connection: Box<Connection>, pool: ConnectionPool) -> Self {
        let Answered { head, early } = answered;
        let (framing, keep) = (head.framing, head.keep);
        Self { framing, early, connection: Some(connection), keep, pool }
    }

    /// Appends the bytes that have arrived to `out`; `false` at the end of the body.
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

    /// Waits for more bytes and appends them to `out`; `false` at the end of the body.
    pub(crate) async fn read(&mut self, out: &mut Vec<u8>) -> Result<bool, WireError> {
        std::future::poll_fn(|cx| self.poll_read(cx, out)).await
    }

    /// Decodes bytes of the connection; an empty slice means that the engine closed it.
    fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
        if bytes.is_empty() {
            return self.framing.cut();
        }
        if self.framing.decode(bytes, out)? > 0 {
            // The engine sent more than one answer: the connection is out of step.
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
