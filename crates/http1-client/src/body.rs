//! The body of an answer, read where it is needed.

use std::task::{Context, Poll};

use crate::{
    WireError,
    connection::{Answered, Connection, Observer, Transport},
    pool::Pool,
    wire::Framing,
};

/// Bytes that are looked at before anything is read, at most.
const MAX_PEEKED: usize = 64 * 1024;

/// The body of an answer. At its end the connection goes back to the pool. Dropping it earlier closes the
/// connection, which tells the server to stop.
#[derive(Debug)]
pub struct Body<S, O = ()> {
    framing: Framing,
    /// Bytes that arrived with the head.
    early: Vec<u8>,
    /// Decoded bytes that were looked at before anything was read.
    peeked: Vec<u8>,
    /// Number of the peeked bytes, up to the end of a line, that were not `enough` for [`Self::poll_peek`].
    scanned: u32,
    /// Error that the reader gets after the bytes that came before it.
    failed: Option<WireError>,
    connection: Option<Box<Connection<S, O>>>,
    keep: bool,
    pool: Pool<S, O>,
}

impl<S: Transport, O: Observer> Body<S, O> {
    pub(crate) fn new(answered: Answered, connection: Box<Connection<S, O>>, pool: Pool<S, O>) -> Self {
        let Answered { head, early } = answered;
        let (framing, keep) = (head.framing, head.keep);
        let peeked = Vec::new();
        Self { framing, early, peeked, scanned: 0, failed: None, connection: Some(connection), keep, pool }
    }

    /// Tells `observer` of the bytes that come, until the body has ended.
    pub fn observe(&mut self, observer: O) {
        if let Some(connection) = &mut self.connection {
            connection.observer = Some(observer);
        }
    }

    /// Returns what observes the body.
    #[must_use]
    pub fn observer(&self) -> Option<&O> {
        self.connection.as_ref()?.observer.as_ref()
    }

    /// Returns what observes the body.
    pub fn observer_mut(&mut self) -> Option<&mut O> {
        self.connection.as_mut()?.observer.as_mut()
    }

    /// Returns how many bytes are left to read, if the head names the length.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        match self.framing {
            Framing::Length(left) => Some(left.saturating_add(self.peeked.len() as u64)),
            Framing::Chunked(_) | Framing::ToEnd => None,
        }
    }

    /// Returns the bytes of the body that arrived with the head.
    pub fn peek(&mut self) -> &[u8] {
        let mut peeked = std::mem::take(&mut self.peeked);
        self.take_early(&mut peeked);
        self.peeked = peeked;
        &self.peeked
    }

    /// Waits until lines of the body have come that are `enough`, or too many, or there will be none. No line
    /// is scanned again once it has ended.
    pub fn poll_peek(&mut self, cx: &mut Context<'_>, enough: impl Fn(&[u8]) -> bool) -> Poll<()> {
        loop {
            let is_over = self.failed.is_some() || self.framing.is_done();
            let fresh = self.peeked.get(self.scanned as usize..).unwrap_or_default();
            if is_over || self.peeked.len() >= MAX_PEEKED || enough(fresh) {
                return Poll::Ready(());
            }
            let lines = memchr::memrchr2(b'\n', b'\r', fresh).map_or(0, |end| end + 1);
            self.scanned = self.scanned.saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
            let mut peeked = std::mem::take(&mut self.peeked);
            let polled = self.poll_read(cx, &mut peeked);
            self.peeked = peeked;
            match polled {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => self.failed = Some(error),
            }
        }
    }

    /// Returns why nothing can be read after the bytes that were looked at, when that is known.
    pub fn failed_at_once(&mut self) -> Option<WireError> {
        self.failed.take()
    }

    /// Decodes the bytes that arrived with the head.
    fn take_early(&mut self, out: &mut Vec<u8>) {
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            self.failed = self.decode(&early, out).err();
        }
    }

    /// Appends the bytes that have arrived to `out`; `false` at the end of the body. Bytes that came before
    /// an error are appended first, and the next call returns the error.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn poll_read(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Result<bool, WireError>> {
        if let Some(observer) = self.observer_mut() {
            observer.before_read();
        }
        let before = out.len();
        if !self.peeked.is_empty() {
            self.scanned = 0;
            if out.is_empty() {
                std::mem::swap(out, &mut self.peeked);
            } else {
                out.append(&mut self.peeked);
            }
        }
        self.take_early(out);
        while out.len() == before {
            if let Some(error) = self.failed.take() {
                self.connection = None;
                return Poll::Ready(Err(error));
            }
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
            match taken.and_then(|decoded| decoded) {
                Ok(()) => self.connection = Some(connection),
                Err(error) => self.failed = Some(error),
            }
        }
        if let Some(observer) = self.observer() {
            observer.on_bytes();
        }
        Poll::Ready(Ok(true))
    }

    /// Waits for more bytes and appends them to `out`; `false` at the end of the body.
    ///
    /// # Errors
    /// [`WireError`].
    pub async fn read(&mut self, out: &mut Vec<u8>) -> Result<bool, WireError> {
        std::future::poll_fn(|cx| self.poll_read(cx, out)).await
    }

    /// Decodes bytes of the connection; an empty slice means that the server closed it.
    fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
        if bytes.is_empty() {
            return self.framing.cut();
        }
        if self.framing.decode(bytes, out)? > 0 {
            // The server sent more than one answer: the connection is out of step.
            self.keep = false;
        }
        Ok(())
    }

    fn give_back(&mut self) {
        if let Some(mut connection) = self.connection.take().filter(|_| self.keep) {
            connection.observer = None;
            self.pool.put_idle(connection);
        }
    }
}
