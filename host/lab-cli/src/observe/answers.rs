//! What answers told of their requests.

use std::{collections::HashMap, net::SocketAddr};

use parking_lot::Mutex;

/// Answers that are remembered: as many as a trace has requests.
const MAX_ANSWERS: usize = 4_000_000;

/// What the answer to a request told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// The engine, by its position in `--workers`.
    pub(super) engine: Option<u32>,
    pub(super) output_tokens: Option<u32>,
    /// Whether its status is an error's.
    pub(super) has_failed: bool,
}

/// What answers told, by the numbers of their requests.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Positions of the engines by the addresses that Envoy knows them by.
    engines: HashMap<SocketAddr, u32>,
    found: Mutex<HashMap<u64, Answer>>,
}

impl Answers {
    /// Looks the addresses of the engines up. An engine whose name is not known now is not recognised.
    pub(super) async fn of(workers: &[String]) -> Self {
        let mut engines = HashMap::new();
        for (place, url) in (0_u32..).zip(workers) {
            let Ok(url) = url.parse::<reqwest::Url>() else { continue };
            let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else { continue };
            let host = host.trim_matches(['[', ']']);
            match tokio::net::lookup_host((host, port)).await {
                Ok(found) => engines.extend(found.map(|address| (address, place))),
                Err(error) => tracing::warn!(host, %error, "engine not recognised in answers: unknown name"),
            }
        }
        Self { engines, found: Mutex::default() }
    }

    /// Returns what is known, and forgets it.
    pub(super) fn take(&self) -> HashMap<u64, Answer> {
        std::mem::take(&mut self.found.lock())
    }

    /// Returns the engine with an address, by its position.
    pub(super) fn engine(&self, address: SocketAddr) -> Option<u32> {
        self.engines.get(&address).copied()
    }

    pub(super) fn add(&self, number: u64, answer: Answer) {
        let mut found = self.found.lock();
        if found.len() < MAX_ANSWERS {
            found.insert(number, answer);
        }
    }
}
