//! Load generators: a fixed request rate, and a fixed number of clients.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};

use crate::client::{CHAT, Client, Outcome};

const BODY: &str =
    r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a small question"}]}"#;

/// Clients that send small requests on a schedule (open loop). A slow answer delays no other client's
/// request.
pub(crate) struct FixedRate {
    shared: Arc<Shared>,
    clients: JoinSet<Vec<Duration>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    sent: AtomicU64,
    failed: AtomicU64,
    problem: Mutex<Option<String>>,
    /// Latencies since the last [`FixedRate::take_p99`].
    recent: Mutex<Vec<Duration>>,
}

/// Result of a load.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) sent: u64,
    pub(crate) failed: u64,
    /// First failure.
    pub(crate) problem: Option<String>,
    /// Time from when each request was due to its answer. The timer adds up to a millisecond.
    pub(crate) latencies: Vec<Duration>,
}

impl FixedRate {
    /// Starts `clients` tasks that send `rate` requests a second in total.
    pub(crate) fn start(client: &Client, rate: u32, clients: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let gap = Duration::from_secs(1) * clients / rate;
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for place in 0..clients {
            tasks.spawn(send(shared.clone(), client.clone(), start + gap * place / clients, gap));
        }
        Self { shared, clients: tasks }
    }

    /// Number of requests that failed so far.
    pub(crate) fn failed(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Returns the 99th percentile of the latencies since the last call. `None`: no request was answered.
    pub(crate) fn take_p99(&self) -> Option<Duration> {
        let mut recent = std::mem::take(&mut *self.shared.recent.lock());
        recent.sort_unstable();
        recent.get(recent.len() * 99 / 100).copied()
    }

    /// Stops the clients after their current request.
    pub(crate) async fn stop(self) -> Summary {
        self.shared.stop.store(true, Ordering::Relaxed);
        let latencies = self.clients.join_all().await.into_iter().flatten().collect();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Summary {
            sent: get(&self.shared.sent),
            failed: get(&self.shared.failed),
            problem: self.shared.problem.lock().take(),
            latencies,
        }
    }
}

impl Summary {
    /// Returns an error when a request failed.
    pub(crate) fn all_served(&self) -> anyhow::Result<()> {
        let problem = self.problem.as_deref().unwrap_or_default();
        anyhow::ensure!(self.failed == 0, "{} requests failed, the first: {problem}", self.failed);
        Ok(())
    }
}

async fn send(shared: Arc<Shared>, client: Client, mut due: Instant, gap: Duration) -> Vec<Duration> {
    let mut latencies = Vec::new();
    while !shared.stop.load(Ordering::Relaxed) {
        sleep_until(due).await;
        shared.sent.fetch_add(1, Ordering::Relaxed);
        match client.outcome(CHAT, BODY, false).await {
            Outcome::Whole => {
                latencies.push(due.elapsed());
                shared.recent.lock().push(due.elapsed());
            }
            other => {
                shared.failed.fetch_add(1, Ordering::Relaxed);
                shared.problem.lock().get_or_insert_with(|| format!("{other:?}"));
            }
        }
        due += gap;
    }
    latencies
}

/// Runs `work` for each turn below `count`, at most `clients` at once (closed loop).
pub(crate) async fn closed_loop<F: Future<Output = ()>>(
    count: u64,
    clients: usize,
    work: impl FnMut(u64) -> F,
) {
    stream::iter(0..count).map(work).buffer_unordered(clients).for_each(|()| std::future::ready(())).await;
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, time::Duration};

    use tokio::time::Instant;

    use super::{FixedRate, closed_loop};
    use crate::client::Client;

    #[tokio::test(start_paused = true)]
    async fn a_closed_loop_runs_every_turn_with_so_many_at_once() {
        let (turns, now, most) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let (turns, now, most) = (&turns, &now, &most);
        let started = Instant::now();
        closed_loop(100, 10, |turn| async move {
            now.set(now.get() + 1);
            most.set(most.get().max(now.get()));
            tokio::time::sleep(Duration::from_secs(1)).await;
            now.set(now.get() - 1);
            turns.set(turns.get() + turn);
        })
        .await;
        assert_eq!((turns.get(), most.get()), (4_950, 10));
        assert_eq!(started.elapsed().as_secs(), 10);
    }

    #[tokio::test]
    async fn requests_that_cannot_be_sent_are_failures() {
        let port = crate::fleet::free_port().unwrap();
        let load = FixedRate::start(&Client::new(&format!("127.0.0.1:{port}")), 1_000, 4);
        while load.failed() < 8 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let summary = load.stop().await;
        assert_eq!(summary.failed, summary.sent);
        assert!(summary.all_served().unwrap_err().to_string().contains("could not send a request"));
    }
}
