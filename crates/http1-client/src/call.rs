//! A call over a connection of a pool.

use http::Response;

use crate::{
    CallError,
    body::Body,
    connection::{Connection, Failed, Observer, Transport},
    pool::Pool,
};

impl<S: Transport, O: Observer> Pool<S, O> {
    /// Sends a request and waits for the head of its answer, over an idle connection to `origin` if one is
    /// there and `is_current`; otherwise over one that `connect` opens. The server may have closed an idle
    /// connection: then nothing was sent, and the call is made over another one.
    ///
    /// # Errors
    /// [`CallError`]. An error status is not one.
    pub async fn call<E, F: Future<Output = Result<Box<Connection<S, O>>, E>>>(
        &self,
        origin: &str,
        (head, body): (&[u8], &[u8]),
        is_current: impl Fn(&S) -> bool,
        connect: impl Fn() -> F,
    ) -> Result<Response<Body<S, O>>, CallError<E>> {
        loop {
            let idle = self.take_idle(origin, &is_current);
            let fresh = idle.is_none();
            let mut connection = match idle {
                Some(connection) => connection,
                // Boxed, as all that few calls need: each call has room for the largest of its steps.
                None => Box::pin(connect()).await.map_err(CallError::Connect)?,
            };
            match connection.call(head, body, self.kept()).await {
                Ok(mut answered) => {
                    let mut response = Response::new(());
                    *response.status_mut() = answered.head.status;
                    *response.headers_mut() = std::mem::take(&mut answered.head.headers);
                    let wrap = |()| Body::new(answered, connection, self.clone());
                    return Ok(response.map(wrap));
                }
                Err(Failed::Unsent) if !fresh => {}
                Err(Failed::Unsent) => return Err(CallError::Unsent),
                Err(Failed::Refused(problem)) => return Err(CallError::Refused(problem)),
                Err(Failed::Broken(error)) => return Err(error.into()),
            }
        }
    }
}
