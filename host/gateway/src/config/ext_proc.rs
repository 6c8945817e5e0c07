//! `[ext_proc]`: the endpoint picker for Envoy.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, Tls};

/// Most requests that can be configured: each holds its body and its state.
const MAX_STREAMS: usize = 1_000_000;

/// `[ext_proc]`: picks endpoints for Envoy, which carries the requests.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExtProc {
    /// Address that Envoy's `ext_proc` filter calls; `None` if no such listener.
    pub listen: Option<SocketAddr>,
    /// Requests that Envoy may ask about at the same time.
    pub max_streams: usize,
    /// TLS of this listener; `None`: plain HTTP/2.
    pub tls: Option<Tls>,
}

impl Default for ExtProc {
    fn default() -> Self {
        Self { listen: None, max_streams: 10_000, tls: None }
    }
}

impl ExtProc {
    /// Validates the table. `others`: the addresses of the other listeners with their keys.
    pub(super) fn problems(&self, others: [(&str, SocketAddr); 2]) -> Vec<Problem> {
        let Self { listen, max_streams, tls } = self;
        let mut problems = Vec::new();
        if listen.is_some() && cfg!(not(feature = "ext-proc")) {
            let message =
                "this binary was built without the endpoint picker: build it with the feature `ext-proc`";
            problems.push(Problem::new("ext_proc.listen", message));
        }
        for (key, address) in others {
            if let Some(listen) = listen.filter(|listen| *listen == address && listen.port() != 0) {
                let message = format!("`{listen}` is also the address of {key}: use another port");
                problems.push(Problem::new("ext_proc.listen", message));
            }
        }
        if !(1..=MAX_STREAMS).contains(max_streams) {
            let message = format!("`{max_streams}` is out of range: expected 1 to {MAX_STREAMS}");
            problems.push(Problem::new("ext_proc.max_streams", message));
        }
        if let Some(tls) = tls {
            tls.check("ext_proc.tls", &mut problems);
        }
        problems
    }

    /// Appends the dotted path of each key whose value differs in `new`.
    pub(super) fn changed_keys(&self, new: &Self, paths: &mut Vec<String>) {
        let Self { listen, max_streams, tls } = self;
        let keys = [
            ("listen", *listen != new.listen),
            ("max_streams", *max_streams != new.max_streams),
            ("tls", *tls != new.tls),
        ];
        paths.extend(
            keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| format!("ext_proc.{key}")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_serve_are_named() {
        let taken: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        let wrong = ExtProc { listen: Some(taken), max_streams: 0, tls: Some(Tls::default()) };
        let others = [("server.listen", taken), ("server.admin_listen", "127.0.0.1:9090".parse().unwrap())];
        let problems = wrong.problems(others);
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let expected =
            ["ext_proc.listen", "ext_proc.max_streams", "ext_proc.tls.cert_file", "ext_proc.tls.key_file"];
        assert_eq!(paths, expected);
        assert!(ExtProc::default().problems(others).is_empty());
    }
}
