//! Refuses connections above the limit: an answer that says so, then the end of the connection.

use std::{fmt::Write as _, sync::Arc};

use axum::http::StatusCode;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    time::{Duration, Instant, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{audience::Audience, request_id::fresh_id};
use crate::{budget::Budget, openai::error, tls::Handshake};

/// Number of refusals that are written at the same time; further connections are closed without an answer.
const MAX_REFUSALS: usize = 64;
/// How long one refusal may take.
const REFUSAL_TIME: Duration = Duration::from_millis(500);
/// Shortest time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The limit that a connection exceeds.
#[derive(Clone, Copy, Debug)]
pub(super) enum TooMany {
    /// Maximum number of connections, all clients together.
    InAll(usize),
    /// Maximum number of connections of one address.
    OfAddress(usize),
}

impl TooMany {
    /// Returns the label of the limit.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::InAll(_) => "too_many",
            Self::OfAddress(_) => "too_many_of_address",
        }
    }
}

/// Refusals of one listener.
#[derive(Debug)]
pub(super) struct Refusals {
    audience: Audience,
    at_once: Arc<Budget>,
    logged: Option<Instant>,
    suppressed: u64,
}

impl Refusals {
    pub(super) fn new(audience: Audience) -> Self {
        Self { audience, at_once: Budget::new(MAX_REFUSALS), logged: None, suppressed: 0 }
    }

    /// Returns the future that refuses a connection, over TLS with a `handshake`; `None` when too many run
    /// already.
    pub(super) fn of(
        &mut self,
        stream: TcpStream,
        handshake: Option<Handshake>,
        limit: TooMany,
    ) -> Option<impl Future<Output = ()> + use<>> {
        self.log(limit);
        let share = self.at_once.reserve(1)?;
        let answer = answer(self.audience, limit);
        Some(async move {
            let refused = async {
                match handshake {
                    None => refuse(stream, answer).await,
                    Some(handshake) => {
                        let acceptor = TlsAcceptor::from(handshake.refusing);
                        refuse(acceptor.accept(stream).await?, answer).await
                    }
                }
            };
            let _ = timeout(REFUSAL_TIME, refused).await;
            drop(share);
        })
    }

    fn log(&mut self, limit: TooMany) {
        if self.logged.is_some_and(|logged| logged.elapsed() < LOG_INTERVAL) {
            self.suppressed += 1;
            return;
        }
        self.logged = Some(Instant::now());
        let suppressed = std::mem::take(&mut self.suppressed);
        let (audience, limit) = (&self.audience, &limit);
        tracing::warn!(?audience, ?limit, suppressed, "connection refused: too many are open");
    }
}

async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, answer: String) -> std::io::Result<()> {
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    // Unread bytes of the client would turn the answer into a reset.
    let mut discarded = [0; 1024];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}

fn answer(audience: Audience, limit: TooMany) -> String {
    let limit = match (audience, limit) {
        (Audience::Operators, TooMany::InAll(limit)) => {
            format!("{limit} connections of operators are open or kept for this machine, the limit")
        }
        (Audience::Operators, TooMany::OfAddress(limit)) => {
            format!("this address has {limit} connections of operators open, the limit")
        }
        #[cfg(feature = "ext-proc")]
        (Audience::Proxies, TooMany::InAll(limit) | TooMany::OfAddress(limit)) => {
            format!("{limit} connections of proxies are open to this thread, the limit")
        }
        (Audience::Clients, TooMany::InAll(limit)) => {
            format!("{limit} connections are open, the limit of limits.connections")
        }
        (Audience::Clients, TooMany::OfAddress(limit)) => {
            format!("this address has {limit} open, the limit of limits.connections_per_address")
        }
    };
    let message = format!("accepting the connection: {limit}; retry after the time in `retry-after`");
    written(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", &message, "retry-after: 1\r\n")
}

/// The answer to a plain HTTP request on a listener with TLS.
pub(super) fn plain_text() -> String {
    let message = "reading the request: this port speaks TLS, and the request came without it; use https://";
    written(StatusCode::BAD_REQUEST, "tls_required", message, "")
}

/// An answer as it is sent, the last one of its connection.
fn written(status: StatusCode, code: &'static str, message: &str, headers: &str) -> String {
    let id = fresh_id();
    let body = error::body(status, code, message, &id).to_string();
    let mut answer = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{headers}");
    let _ = write!(answer, "x-request-id: {id}\r\n");
    let _ = write!(answer, "content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    answer
}
