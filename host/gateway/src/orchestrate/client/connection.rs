//! State of the client's connection for its answer: whether the client reads, and whether it read too slowly.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

use super::unread_booking::UnreadBooking;

/// A client's connection. The socket writes it, and the answers on it read it. Both run in the same task.
/// Over HTTP/2 each stream has its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientConnection(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Bytes wait in the gateway because the client does not read.
    blocked: AtomicBool,
    /// The connection was ended because the client did not read in time.
    too_slow: AtomicBool,
    /// A request that was read waits, runs, or streams its answer.
    answering: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    /// First read after the last write: the first byte of a request.
    first_byte: Option<Instant>,
    /// Deadline of the request that is being answered.
    deadline: Option<Instant>,
    /// Booking of the stream that answers it.
    booking: Option<UnreadBooking>,
}

impl ClientConnection {
    /// Records that bytes of a request came from the client.
    pub(crate) fn read(&self) {
        self.0.times.lock().first_byte.get_or_insert_with(Instant::now);
    }

    /// Records that the client's socket took bytes.
    pub(crate) fn written(&self) {
        self.0.times.lock().first_byte = None;
    }

    /// Returns when the first byte of a request arrived whose head is complete. Pipelined requests have no
    /// read of their own and count from now. Nothing is known of the new request's deadline yet.
    pub(crate) fn begin_request(&self) -> Instant {
        self.set_answering(false);
        let mut times = self.0.times.lock();
        times.deadline = None;
        times.first_byte.take().unwrap_or_else(Instant::now)
    }

    /// Records whether a request that was read waits, runs, or streams its answer.
    pub(crate) fn set_answering(&self, answering: bool) {
        self.0.answering.store(answering, Relaxed);
    }

    /// Whether a client that leaves ends the work for its request.
    pub(crate) fn is_answering(&self) -> bool {
        self.0.answering.load(Relaxed)
    }

    /// Sets the deadline of the request that is being answered.
    pub(crate) fn set_deadline(&self, deadline: Instant) {
        self.0.times.lock().deadline = Some(deadline);
    }

    /// Returns the deadline of the request that is being answered.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.times.lock().deadline
    }

    /// Sets the booking of the stream that answers; `None`: the answer has ended.
    pub(crate) fn set_booking(&self, booking: Option<UnreadBooking>) {
        let before = std::mem::replace(&mut self.0.times.lock().booking, booking);
        drop(before);
    }

    /// Waits until `end` for a client that has read nothing since `since`. The booking may expire meanwhile.
    pub(crate) fn poll_unread(
        &self,
        cx: &mut Context<'_>,
        timer: &mut Option<Pin<Box<Sleep>>>,
        since: Instant,
        end: Instant,
    ) -> Poll<()> {
        let booking = &mut self.0.times.lock().booking;
        loop {
            let until = booking.as_ref().map_or(end, |booking| booking.expires(since).min(end));
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
            if timer.deadline() != until {
                timer.as_mut().reset(until);
            }
            ready!(timer.as_mut().poll(cx));
            match booking {
                Some(booking) if until < end => booking.expire(),
                _ => return Poll::Ready(()),
            }
        }
    }

    /// Records whether bytes wait for the client.
    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.0.blocked.store(blocked, Relaxed);
    }

    /// Whether bytes wait for the client: it gets no more before it has read them.
    pub(crate) fn is_blocked(&self) -> bool {
        self.0.blocked.load(Relaxed)
    }

    /// Records that the connection ends because the client did not read in time.
    pub(crate) fn set_too_slow(&self) {
        self.0.too_slow.store(true, Relaxed);
    }

    /// Whether the connection ended because the client did not read in time.
    pub(crate) fn is_too_slow(&self) -> bool {
        self.0.too_slow.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_read_after_a_write_counts() {
        let connection = ClientConnection::default();
        connection.read();
        let first = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        connection.read();
        assert_eq!(connection.begin_request(), first, "bytes of the same head");
        connection.read();
        connection.written();
        tokio::time::advance(Duration::from_secs(1)).await;
        connection.read();
        assert_eq!(
            connection.begin_request(),
            Instant::now(),
            "the body of the request before does not count"
        );
        assert_eq!(connection.begin_request(), Instant::now(), "a pipelined request");
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_belongs_to_one_request() {
        let connection = ClientConnection::default();
        connection.set_deadline(Instant::now());
        assert_eq!(connection.deadline(), Some(Instant::now()));
        connection.begin_request();
        assert_eq!(connection.deadline(), None);
    }
}
