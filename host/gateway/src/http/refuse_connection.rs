//! Refuses connections above the limit: an answer that says so, then the end of the connection.

use std::{fmt::Write as _, sync::Arc};

use axum::http::StatusCode;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Duration, Instant, timeout},
};

use super::audience::Audience;
use crate::{budget::Budget, openai::error};

/// Number of refusals that are written at the same time; further connections are closed without an answer.
const MAX_REFUSALS: usize = 64;
/// How long one refusal may take.
const REFUSAL_TIME: Duration = Duration::from_millis(500);
/// Shortest time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Which limit a connection is above.
#[derive(Clone, Copy, Debug)]
pub(super) enum TooMany {
    /// That of all connections.
    InAll(usize),
    /// That of the connections of one address.
    OfAddress(usize),
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

    /// Returns the future that refuses a connection; `None` when too many run already.
    pub(super) fn of(
        &mut self,
        stream: TcpStream,
        limit: TooMany,
    ) -> Option<impl Future<Output = ()> + use<>> {
        self.log(limit);
        let share = self.at_once.take(1)?;
        let answer = answer(self.audience, limit);
        Some(async move {
            let _ = timeout(REFUSAL_TIME, refuse(stream, answer)).await;
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
        tracing::warn!(audience = ?self.audience, ?limit, suppressed, "connection refused: too many are open");
    }
}

async fn refuse(mut stream: TcpStream, answer: String) -> std::io::Result<()> {
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    // Unread bytes of the client would turn the answer into a reset.
    let mut discarded = [0; 1024];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}

fn answer(audience: Audience, limit: TooMany) -> String {
    let limit = match (audience, limit) {
        (Audience::Operators, TooMany::InAll(limit) | TooMany::OfAddress(limit)) => {
            format!("{limit} connections of operators are open, the limit")
        }
        (_, TooMany::InAll(limit)) => {
            format!("{limit} connections are open, the limit of limits.connections")
        }
        (_, TooMany::OfAddress(limit)) => {
            format!("this address has {limit} open, the limit of limits.connections_per_address")
        }
    };
    let message = format!("accepting the connection: {limit}; retry after the time in `retry-after`");
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let body = error::body(status, "too_many_connections", &message, "").to_string();
    let mut answer = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n");
    let _ =
        write!(answer, "content-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n{body}", body.len());
    answer
}
