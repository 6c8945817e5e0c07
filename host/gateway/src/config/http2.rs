//! `[server.http2]`: HTTP/2 for clients.

use std::time::Duration;

use pointsman_config_file::{duration::secs, section};

/// Upper limit of the configured number of streams per connection: each may hold its buffers.
const MAX_STREAMS: u32 = 10_000;

/// HTTP/2 on the clients' listener, for clients that ask for it in the TLS handshake. See "HTTP/2".
#[section]
#[derive(Copy, Eq)]
pub struct Http2 {
    /// Whether HTTP/2 is offered. Without TLS it never is.
    #[key(default = true)]
    pub enabled: bool,
    /// Requests of a connection at the same time.
    #[key(default = 100, range = 1..=MAX_STREAMS, reason = "is out of range")]
    pub max_concurrent_streams: u32,
    /// Requests that a client may abandon on a connection in 10 s; one more ends it.
    #[key(default = 200, range = 1.., reason = "would end a connection with the first abandoned request")]
    pub max_resets: u32,
    /// Time between two pings.
    #[key(default = secs(30), positive, reason = "would end every connection")]
    pub keep_alive_interval: Duration,
    /// How long the answer to a ping may take.
    #[key(default = secs(20), positive, reason = "would end every connection")]
    pub keep_alive_timeout: Duration,
}

#[cfg(test)]
mod tests {
    use pointsman_config_file::{Report, Section as _};

    use super::*;

    #[test]
    fn values_that_would_end_every_connection_are_named() {
        let mut zero = Http2 {
            enabled: true,
            max_concurrent_streams: 0,
            max_resets: 0,
            keep_alive_interval: Duration::ZERO,
            keep_alive_timeout: Duration::ZERO,
        };
        let mut problems = Vec::new();
        zero.check(&mut Report::new(&mut problems).at("server.http2"));
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let keys = ["max_concurrent_streams", "max_resets", "keep_alive_interval", "keep_alive_timeout"];
        assert_eq!(paths, keys.map(|key| format!("server.http2.{key}")));
        // Later checks use the defaults.
        assert_eq!(zero, Http2::default());
        let mut problems = Vec::new();
        zero.check(&mut Report::new(&mut problems));
        assert!(problems.is_empty());
    }
}
