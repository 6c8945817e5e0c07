//! Counts of the copies that arrived, and of those that were not kept, by reason.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use pointsman_cli::{escaped, print};
use tokio::time::Duration;

/// Time without a copy after which the observer warns.
const FIRST_COPY_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of other paths whose requests are counted, and the length of one, characters.
const MAX_PATHS: usize = 64;
const MAX_PATH: usize = 80;
/// Number of other paths that a message names.
const NAMED_PATHS: usize = 3;

/// Reason for which a copy was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missed {
    /// The body is longer than `--max-body`.
    TooLarge,
    /// The prompt has more tokens or blocks than a line of a trace may have.
    TooLong,
    /// The bodies that are being read or wait to be measured fill `--max-memory`.
    Memory,
    /// Requests wait to be written, and the queue is full.
    Busy,
    /// The body did not arrive in time, or the connection ended before.
    Incomplete,
    /// The body is compressed, is not JSON, or has no prompt.
    Unreadable,
    /// The body has several prompts, each of which is a request for the engine.
    SeveralPrompts,
    /// The trace has its largest size, or cannot be written.
    Full,
    /// Envoy shows the request and would wait for answers.
    Waited,
}

impl Missed {
    pub(super) const ALL: [(Self, &'static str); 9] = [
        (Self::TooLarge, "body above --max-body"),
        (Self::TooLong, "prompt too long for a line of the trace (try a larger --block-tokens)"),
        (Self::Memory, "bodies above --max-memory together with those that wait to be measured"),
        (Self::Busy, "queue full"),
        (Self::Incomplete, "body incomplete"),
        (Self::Unreadable, "compressed, not JSON, or no prompt"),
        (Self::SeveralPrompts, "several prompts in one body"),
        (Self::Full, "trace above --max-trace, or not writable"),
        (
            Self::Waited,
            "shown by Envoy without observability_mode: true (see deploy/envoy/observe-answers.yaml)",
        ),
    ];
}

/// Counts of copies.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Copies of requests to the two endpoints.
    arrived: AtomicU64,
    /// Connections that were closed at once, because too many were open.
    refused: AtomicU64,
    missed: [AtomicU64; Missed::ALL.len()],
    /// POST requests to other paths, all of them and by path.
    elsewhere: AtomicU64,
    other_paths: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    /// Counts a copy, and returns its number.
    pub(super) fn arrive(&self) -> u64 {
        self.arrived.fetch_add(1, Relaxed)
    }

    pub(super) fn refuse_connection(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    pub(super) fn miss(&self, why: Missed) {
        if let Some(count) = self.missed.get(why as usize) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Counts a POST request to another path, which has no query.
    pub(super) fn pass_by(&self, path: &str) {
        self.elsewhere.fetch_add(1, Relaxed);
        let path: String = path.chars().take(MAX_PATH).collect();
        let mut paths = self.other_paths.lock();
        if paths.len() < MAX_PATHS || paths.contains_key(&path) {
            *paths.entry(path).or_default() += 1;
        }
    }

    /// Says how many requests came to other paths, and to which; `None` when there were none.
    pub(super) fn elsewhere(&self) -> Option<String> {
        let all = self.elsewhere.load(Relaxed);
        let paths = self.other_paths.lock();
        let mut most: Vec<(&String, &u64)> = paths.iter().collect();
        most.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let named: Vec<String> = most
            .iter()
            .take(NAMED_PATHS)
            .map(|(path, count)| format!("{} ({count})", escaped(path).replace(['\n', '\t'], " ")))
            .collect();
        (all > 0).then(|| {
            format!(
                "{all} requests came to other paths than /v1/chat/completions and /v1/completions and were not recorded, \
                 e.g. {}: a copy keeps the path of its request (nginx: proxy_pass with $request_uri)",
                named.join(", ")
            )
        })
    }

    pub(super) fn arrived(&self) -> u64 {
        self.arrived.load(Relaxed)
    }

    pub(super) fn refused_connections(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Returns the reasons that occurred, each with its count.
    pub(super) fn missed(&self) -> Vec<(&'static str, u64)> {
        let counts = Missed::ALL.iter().zip(&self.missed);
        counts.map(|((_, why), count)| (*why, count.load(Relaxed))).filter(|(_, count)| *count > 0).collect()
    }
}

/// Says after a while that no copy came.
pub(super) async fn tell_of_no_copy(counts: Arc<Counts>, address: SocketAddr) {
    tokio::time::sleep(FIRST_COPY_TIMEOUT).await;
    if counts.arrived() == 0 {
        let seconds = FIRST_COPY_TIMEOUT.as_secs();
        let why =
            counts.elsewhere().unwrap_or_else(|| format!("does the router send them to http://{address}?"));
        let _ = print(&format!("warning: no copy of a request came in {seconds} s: {why}\n"));
    }
}
