//! The connection to NATS over time: a pause, an attempt, a connection.

use std::pin::Pin;

use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::Instant;

use super::{
    connect::{ConnectError, Connection},
    denials::Denial,
};

/// Maximum number of messages that are read before timers are checked.
const READ_AT_ONCE: usize = 64;

type Connecting = Pin<Box<dyn Future<Output = Result<Connection, ConnectError>> + Send>>;

/// The connection to NATS.
pub(super) enum Link {
    /// The next attempt waits until then.
    Waiting(Instant),
    Connecting(Connecting),
    Up(Box<Connection>),
}

/// Change of the connection.
pub(super) enum Event {
    /// It is time to connect.
    Due,
    Connected(Box<Connection>),
    Messages(Vec<async_nats::Message>),
    /// The server refuses a subject, and keeps the connection.
    Denied(Denial),
    Lost(String),
}

impl Link {
    /// Waits for what happens next.
    pub(super) async fn event(&mut self) -> Event {
        match self {
            Self::Waiting(until) => {
                tokio::time::sleep_until(*until).await;
                Event::Due
            }
            Self::Connecting(connecting) => match connecting.await {
                Ok(connection) => Event::Connected(Box::new(connection)),
                Err(error) => Event::Lost(error.to_string()),
            },
            Self::Up(connection) => {
                let Connection { messages, lost, denied, .. } = &mut **connection;
                tokio::select! {
                    biased;
                    error = lost.recv() => Event::Lost(error.unwrap_or_else(|| "connection closed".to_owned())),
                    Some(denial) = denied.recv() => Event::Denied(denial),
                    first = messages.next() => match first {
                        None => Event::Lost("subscription ended".to_owned()),
                        Some(first) => {
                            let mut all = vec![first];
                            while all.len() < READ_AT_ONCE {
                                let Some(Some(next)) = messages.next().now_or_never() else { break };
                                all.push(next);
                            }
                            Event::Messages(all)
                        }
                    },
                }
            }
        }
    }
}
