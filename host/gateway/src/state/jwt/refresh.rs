//! Fetches the public keys of an identity server, in the background and when a token names an unknown key.
//!
//! Whatever the tokens say, the server gets one request in the configured pause at most, and no request of a
//! client waits for longer than one fetch. While the server is away, the last set stays in use.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use pointsman_http_client::{whole, with_causes};
use pointsman_workers::url_without_secrets;
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::key_set::{KeySet, MAX_BYTES};
use crate::telemetry::metrics::Metrics;

/// Time limit of one fetch.
const DEADLINE: Duration = Duration::from_secs(5);
/// Requests that wait for a fetch because their key is unknown.
const MAX_WAITING: usize = 256;

/// The newest set, and how to get a newer one.
#[derive(Debug)]
pub(super) struct Refresh {
    set: ArcSwapOption<Fetched>,
    /// Number of fetches that ended, and when the last one began.
    ended: watch::Sender<Ended>,
    wanted: Notify,
    waiting: Semaphore,
    /// Smallest time between the begins of two fetches.
    pause: Duration,
}

/// A set, and when it arrived.
#[derive(Debug)]
pub(super) struct Fetched {
    pub(super) keys: KeySet,
    pub(super) version: u64,
    pub(super) at: Instant,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    fetches: u64,
    began: Option<Instant>,
}

impl Refresh {
    /// `set`: the newest set until the first fetch.
    pub(super) fn new(pause: Duration, set: Option<Arc<Fetched>>) -> Self {
        Self {
            set: ArcSwapOption::new(set),
            ended: watch::Sender::default(),
            wanted: Notify::new(),
            waiting: Semaphore::new(MAX_WAITING),
            pause,
        }
    }

    /// Returns the newest set.
    pub(super) fn current(&self) -> Option<Arc<Fetched>> {
        self.set.load_full()
    }

    /// Waits for a fetch that may bring an unknown key. Returns whether one ended; `false` at once when the
    /// last one is too young, or too many requests wait.
    pub(super) async fn again(&self) -> bool {
        let mut ended = self.ended.subscribe();
        let before = *ended.borrow_and_update();
        if before.began.is_some_and(|began| began.elapsed() < self.pause) {
            return false;
        }
        let Ok(_place) = self.waiting.try_acquire() else { return false };
        self.wanted.notify_one();
        let newer = ended.wait_for(|now| now.fetches > before.fetches);
        matches!(tokio::time::timeout(DEADLINE + Duration::from_secs(1), newer).await, Ok(Ok(_)))
    }

    /// Fetches the set from `url` every `interval`, and when it is wanted, until `stop`.
    pub(super) async fn run(
        self: Arc<Self>,
        (client, url): (reqwest::Client, reqwest::Url),
        interval: Duration,
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) {
        loop {
            let began = Instant::now();
            let fetch = tokio::time::timeout(DEADLINE, fetch(&client, &url));
            let Some(fetched) = stop.run_until_cancelled(fetch).await else { return };
            let fetched = fetched.unwrap_or_else(|_| Err(format!("no answer within {DEADLINE:?}")));
            let outcome = if fetched.is_ok() { "ok" } else { "failed" };
            metrics.key_set_fetch(outcome);
            match fetched {
                Ok((keys, bytes)) => self.put(keys, bytes),
                Err(error) => {
                    let url = url_without_secrets(url.as_str());
                    tracing::warn!(url, error, "public keys of the identity server not fetched");
                }
            }
            self.ended.send_modify(|ended| {
                ended.fetches += 1;
                ended.began = Some(began);
            });
            let pause = async {
                let next = if self.current().is_some() { interval } else { self.pause };
                let _ = tokio::time::timeout(next, self.wanted.notified()).await;
                tokio::time::sleep_until(began + self.pause).await;
            };
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Puts a set in force. An equal one keeps its version, and so the tokens that it verified.
    fn put(&self, keys: KeySet, bytes: Vec<u8>) {
        let before = self.current();
        let same = before.as_ref().is_some_and(|before| before.bytes == bytes);
        let version = before.map_or(0, |before| before.version) + u64::from(!same);
        self.set.store(Some(Arc::new(Fetched { keys, version, at: Instant::now(), bytes })));
    }
}

/// Fetches the set once.
async fn fetch(client: &reqwest::Client, url: &reqwest::Url) -> Result<(KeySet, Vec<u8>), String> {
    let failed = |error: reqwest::Error| with_causes(&error.without_url());
    let response = client.get(url.clone()).send().await.map_err(failed)?;
    if response.status() != reqwest::StatusCode::OK {
        return Err(format!("status {}", response.status().as_u16()));
    }
    let bytes = whole(response, MAX_BYTES).await.map_err(|error| error.to_string())?;
    let keys = KeySet::parse(&bytes)?;
    Ok((keys, bytes))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn k2_only_so_many_requests_wait_for_a_fetch() {
        let refresh = Refresh::new(Duration::from_secs(10), None);
        let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| Box::pin(refresh.again())).collect();
        for waits in &mut waiting {
            assert_eq!(waits.as_mut().now_or_never(), None);
        }
        // K2.4: too many wait
        assert_eq!(refresh.again().now_or_never(), Some(false));
        let ended = |fetches| Ended { fetches, began: Some(Instant::now()) };
        refresh.ended.send_replace(ended(1));
        for waits in waiting {
            // K2.4: the request waits for the fetch
            assert!(waits.await);
        }
        // K2.4: the last fetch began a moment ago
        assert_eq!(refresh.again().now_or_never(), Some(false));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(refresh.again().now_or_never(), None, "it waits");
    }
}
