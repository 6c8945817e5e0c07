//! Calls that change the protocol of their connection: a WebSocket at an engine.

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Incoming, client::conn::http1, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use tokio_util::task::TaskTracker;

use super::{CallError, Destination, MAX_ERROR_BODY, RetryAdvice, USER_AGENT, Upstream};

/// Largest head of an answer, bytes.
const MAX_HEAD: usize = 64 * 1024;

/// A connection whose protocol changed, and the head of the answer that said so.
pub(crate) struct UpgradedCall {
    pub(crate) io: TokioIo<Upgraded>,
    pub(crate) headers: HeaderMap,
}

impl Upstream {
    /// Sends GET with an upgrade over a connection of its own. `tasks` runs the connection until then.
    ///
    /// # Errors
    /// [`CallError`], also when the engine answers with anything but 101.
    pub(crate) async fn upgrade(
        &self,
        to: &Destination,
        headers: HeaderMap,
        tasks: &TaskTracker,
    ) -> Result<UpgradedCall, CallError> {
        let parts = to.parts();
        let mut request =
            Request::get(parts.path).header(header::HOST, parts.authority).body(Empty::<Bytes>::new());
        if let Ok(request) = &mut request {
            request.headers_mut().extend(headers);
            for (name, value) in [self.via(), &USER_AGENT] {
                request.headers_mut().insert(name, value.clone());
            }
        }
        let request = request.map_err(|error| CallError::Protocol(format!("invalid request: {error}")))?;
        let stream = TokioIo::new(self.connect(to, parts).await?.into_stream());
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_HEAD)
            .handshake(stream)
            .await
            .map_err(|error| broken(&error))?;
        tasks.spawn(connection.with_upgrades());
        let response = sender.send_request(request).await.map_err(|error| broken(&error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refusal(response).await);
        }
        let headers = response.headers().clone();
        let io = hyper::upgrade::on(response).await.map_err(|error| broken(&error))?;
        Ok(UpgradedCall { io: TokioIo::new(io), headers })
    }
}

/// Answer of an engine that does not upgrade the connection.
async fn refusal(response: Response<Incoming>) -> CallError {
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        return CallError::Protocol(format!("expected an upgrade, got status {}", status.as_u16()));
    }
    let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
    let retry = RetryAdvice::of(response.headers());
    let body = Limited::new(response.into_body(), MAX_ERROR_BODY).collect().await;
    let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    CallError::Status { status, content_type, retry, body, in_body: false }
}

/// The text contains no address, so a client may see it (A5).
fn broken(error: &hyper::Error) -> CallError {
    if error.is_parse() {
        CallError::Protocol("the head of the answer cannot be parsed".to_owned())
    } else {
        CallError::Broken(error.to_string())
    }
}
