//! `[server.http2]`: HTTP/2 for clients.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration};

/// Most streams of a connection that can be configured: each may hold its buffers.
const MAX_STREAMS: u32 = 10_000;

/// `[server.http2]`: HTTP/2 on the clients' listener, for clients that ask for it in the TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Http2 {
    /// Whether HTTP/2 is offered. Without TLS it never is.
    pub enabled: bool,
    /// Requests of a connection that are served at the same time.
    pub max_concurrent_streams: u32,
    /// Requests that a client may abandon on a connection within ten seconds.
    pub max_resets: u32,
    /// Time between two pings.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub keep_alive_interval: Duration,
    /// How long the answer to a ping may take.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub keep_alive_timeout: Duration,
}

impl Default for Http2 {
    fn default() -> Self {
        Self {
            enabled: true,
            max_concurrent_streams: 100,
            max_resets: 200,
            keep_alive_interval: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(20),
        }
    }
}

impl Http2 {
    /// Validates the table.
    pub(super) fn check(&self, problems: &mut Vec<Problem>) {
        let Self { enabled: _, max_concurrent_streams, max_resets, keep_alive_interval, keep_alive_timeout } =
            *self;
        let mut add = |key: &str, message: String| {
            problems.push(Problem::new(format!("server.http2.{key}"), message));
        };
        if !(1..=MAX_STREAMS).contains(&max_concurrent_streams) {
            let message = format!("`{max_concurrent_streams}` is out of range: expected 1 to {MAX_STREAMS}");
            add("max_concurrent_streams", message);
        }
        if max_resets == 0 {
            let message = "`0` would end a connection with the first abandoned request: expected 1 or more";
            add("max_resets", message.to_owned());
        }
        for (key, time) in
            [("keep_alive_interval", keep_alive_interval), ("keep_alive_timeout", keep_alive_timeout)]
        {
            if time.is_zero() {
                add(key, "`0s` would end every connection: expected more than 0".to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_would_end_every_connection_are_named() {
        let zero = Http2 {
            enabled: true,
            max_concurrent_streams: 0,
            max_resets: 0,
            keep_alive_interval: Duration::ZERO,
            keep_alive_timeout: Duration::ZERO,
        };
        let mut problems = Vec::new();
        zero.check(&mut problems);
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let keys = ["max_concurrent_streams", "max_resets", "keep_alive_interval", "keep_alive_timeout"];
        assert_eq!(paths, keys.map(|key| format!("server.http2.{key}")));
        let mut problems = Vec::new();
        Http2::default().check(&mut problems);
        assert!(problems.is_empty());
    }
}
