//! A call over a connection of a pool.

use std::time::Duration;

use http::Response;
use tokio::time::Instant;

use crate::{
    CallError, WireError,
    body::Body,
    connection::{Answered, Connection, Failed, Observer, Transport},
    pool::Pool,
};

/// Time within which the end of a reused connection arrives that its server closed, because it was idle,
/// while the request was on its way.
const MAX_CLOSE_DELAY: Duration = Duration::from_millis(500);
/// Servers wait for longer than this before they close a connection because it is idle.
const SHORTEST_KEEP_ALIVE: Duration = Duration::from_secs(1);

/// How often a request may reach its server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// A request is sent again, over a new connection, when its server closed one that was idle for a second
    /// or more, at once and without a byte of an answer: it did not read the request.
    #[default]
    Repeatable,
    /// A request is not sent again, and only over connections that were idle for less than a second.
    AtMostOnce,
    /// A request is sent over a new connection: its server cannot have closed it as idle.
    NewConnection,
}

impl<S: Transport, O: Observer> Pool<S, O> {
    /// Sends a request and waits for the head of its answer, over an idle connection to `origin` if one is
    /// there and `is_current`; otherwise over one that `connect` opens. The server may have closed an idle
    /// connection: then nothing was sent, and the call is made over another one. `delivery` decides whether
    /// it is made again when the request was sent at the same time.
    ///
    /// # Errors
    /// [`CallError`]. An error status is not one.
    pub async fn call<E, F: Future<Output = Result<Box<Connection<S, O>>, E>>>(
        &self,
        origin: &str,
        (head, body): (&[u8], &[u8]),
        delivery: Delivery,
        is_current: impl Fn(&S) -> bool,
        connect: impl Fn() -> F,
    ) -> Result<Response<Body<S, O>>, CallError<E>> {
        let max_idle = match delivery {
            Delivery::Repeatable => Duration::MAX,
            Delivery::AtMostOnce => SHORTEST_KEEP_ALIVE,
            Delivery::NewConnection => Duration::ZERO,
        };
        loop {
            let (mut connection, idle) = match self.take_idle(origin, max_idle, &is_current) {
                Some((connection, idle)) => (connection, Some(idle)),
                // Boxed, as all that few calls need: each call has room for the largest of its steps.
                None => (Box::pin(connect()).await.map_err(CallError::Connect)?, None),
            };
            let (fresh, was_idle) = (idle.is_none(), idle >= Some(SHORTEST_KEEP_ALIVE));
            let sent = Instant::now();
            let closed = match connection.call(head, body, self.kept()).await {
                Ok(answered) => return Ok(self.response(answered, connection)),
                Err(Failed::Unsent) if !fresh => continue,
                Err(Failed::Closed(error)) if !fresh && sent.elapsed() < MAX_CLOSE_DELAY => error,
                Err(failed) => return Err(failed.into()),
            };
            drop(connection);
            if !was_idle || delivery != Delivery::Repeatable {
                return Err(CallError::Closed(closed));
            }
            return Box::pin(self.call_again((head, body), connect(), closed)).await;
        }
    }

    /// Sends a request over a new connection. `closed` is why a reused one ended.
    async fn call_again<E>(
        &self,
        (head, body): (&[u8], &[u8]),
        connect: impl Future<Output = Result<Box<Connection<S, O>>, E>>,
        closed: WireError,
    ) -> Result<Response<Body<S, O>>, CallError<E>> {
        let mut connection = match connect.await {
            Ok(connection) => connection,
            Err(connect) => return Err(CallError::NotAgain { closed, connect }),
        };
        let answered = connection.call(head, body, self.kept()).await?;
        Ok(self.response(answered, connection))
    }

    fn response(&self, mut answered: Answered, connection: Box<Connection<S, O>>) -> Response<Body<S, O>> {
        let mut response = Response::new(());
        *response.status_mut() = answered.head.status;
        *response.headers_mut() = std::mem::take(&mut answered.head.headers);
        response.map(|()| Body::new(answered, connection, self.clone()))
    }
}

impl<E> From<Failed> for CallError<E> {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Unsent => Self::Unsent,
            Failed::Refused(problem) => Self::Refused(problem),
            Failed::Closed(error) | Failed::Broken(error) => Self::Wire(error),
        }
    }
}
