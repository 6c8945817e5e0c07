//! Load: when clients send requests, and clients that judge each answer.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future::join_all, stream};
use serde::Deserialize;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

mod recorder;

pub use recorder::{Answer, End, Kind, Load, Prompt, Recorder, Target, latency_ms};

/// Requests that one load has open at most. More means that answers do not come.
pub const MAX_OPEN: usize = 2_000;

/// When requests are sent.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// So many a second, whatever happens to them (open loop).
    Rate(f64),
    /// So many a second by so many clients. A slow answer delays the requests of its own client only.
    Paced(f64, u32),
    /// By so many clients, each of which sends its next request after an answer (closed loop).
    Clients(u32),
    /// As `Clients`, but the clients begin one after the other, spread evenly over this time.
    Ramped(u32, #[serde(with = "humantime_serde")] Duration),
}

/// A request that is due.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Number of the request.
    pub number: u64,
    /// Number of the client; with [`Arrivals::Rate`] each request has its own.
    pub client: u64,
    /// Number among the requests of the client.
    pub own: u64,
    /// When it is due.
    pub due: Instant,
    /// Whether [`MAX_OPEN`] requests are open: it must not be sent.
    pub is_too_many: bool,
}

/// A running load. Dropping it ends its requests.
#[derive(Debug)]
pub struct Running {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

/// Calls `send` for each of so many requests when it is due.
pub fn start<F>(
    arrivals: Arrivals,
    requests: u64,
    send: impl Fn(Turn) -> F + Send + Sync + 'static,
) -> Running
where
    F: Future<Output = ()> + Send + 'static,
{
    let (stop, mut tasks, send, began) =
        (CancellationToken::new(), JoinSet::new(), Arc::new(send), Instant::now());
    let clients = match arrivals {
        Arrivals::Rate(rate) => {
            tasks.spawn(at_rate(rate, requests, send, stop.clone()));
            return Running { stop, tasks };
        }
        Arrivals::Paced(_, clients) | Arrivals::Clients(clients) | Arrivals::Ramped(clients, _) => clients,
    };
    let turns = Arc::new(AtomicU64::new(0));
    for client in 0..clients {
        let (first, gap) = match arrivals {
            Arrivals::Paced(rate, _) => {
                let gap = Duration::from_secs_f64(1.0 / rate);
                (began + gap * client, Some(gap * clients))
            }
            Arrivals::Ramped(_, over) => (began + over * client / clients.max(1), None),
            _ => (began, None),
        };
        let (send, turns, stop) = (send.clone(), turns.clone(), stop.clone());
        tasks.spawn(async move {
            let mut due = first;
            for own in 0.. {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = sleep_until(due) => {}
                }
                let number = turns.fetch_add(1, Relaxed);
                if number >= requests {
                    return;
                }
                send(Turn { number, client: client.into(), own, due, is_too_many: false }).await;
                due = gap.map_or_else(Instant::now, |gap| due + gap);
            }
        });
    }
    Running { stop, tasks }
}

async fn at_rate<F>(
    rate: f64,
    requests: u64,
    send: Arc<impl Fn(Turn) -> F + Send + Sync + 'static>,
    stop: CancellationToken,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let (began, mut open) = (Instant::now(), JoinSet::new());
    for number in 0..requests {
        #[expect(clippy::cast_precision_loss, reason = "a count")]
        let due = began + Duration::from_secs_f64(number as f64 / rate);
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = sleep_until(due) => {}
        }
        while open.try_join_next().is_some() {}
        let is_too_many = open.len() >= MAX_OPEN;
        let sent = send(Turn { number, client: number, own: 0, due, is_too_many });
        if is_too_many {
            sent.await;
        } else {
            open.spawn(sent);
        }
    }
    open.join_all().await;
}

impl Running {
    /// Whether every request of the load was answered.
    pub fn is_over(&mut self) -> bool {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.is_empty()
    }

    /// Waits until every request was answered.
    ///
    /// # Errors
    /// A client panicked.
    pub async fn end(&mut self) -> anyhow::Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended?;
        }
        Ok(())
    }

    /// Ends the load, and waits for the open requests.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Runs `work` for each turn below `count`, at most `clients` at once, in the task of the caller.
pub async fn closed_loop<F: Future<Output = ()>>(count: u64, clients: usize, work: impl FnMut(u64) -> F) {
    stream::iter(0..count).map(work).buffer_unordered(clients).for_each(|()| std::future::ready(())).await;
}

/// Calls `send` with the place of each of these times when it has come, counted from now. Returns the
/// results in the order of the places.
pub async fn at_times<T, F: Future<Output = T>>(
    times: impl IntoIterator<Item = Duration>,
    send: impl Fn(usize) -> F,
) -> Vec<T> {
    let (began, send) = (Instant::now(), &send);
    let each = times.into_iter().enumerate().map(|(place, at)| async move {
        sleep_until(began + at).await;
        send(place).await
    });
    join_all(each).await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use parking_lot::Mutex;

    use super::*;

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

    /// When requests of 100 ms each begin, milliseconds.
    async fn begins(arrivals: Arrivals, requests: u64) -> Vec<u128> {
        let (begins, started) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
        let noted = begins.clone();
        let mut running = start(arrivals, requests, move |turn| {
            let noted = noted.clone();
            async move {
                noted.lock().push((turn.number, started.elapsed().as_millis()));
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        running.end().await.unwrap();
        let mut begins = std::mem::take(&mut *begins.lock());
        begins.sort_unstable();
        begins.into_iter().map(|(_, at)| at).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn each_kind_of_arrivals_has_its_times() {
        assert_eq!(begins(Arrivals::Rate(100.0), 4).await, [0, 10, 20, 30]);
        assert_eq!(begins(Arrivals::Clients(2), 4).await, [0, 0, 100, 100]);
        let ramp = Duration::from_millis(40);
        assert_eq!(begins(Arrivals::Ramped(2, ramp), 4).await, [0, 20, 100, 120]);
        // The second request of each client is late, because its first one took longer than its time.
        assert_eq!(begins(Arrivals::Paced(50.0, 2), 4).await, [0, 20, 100, 120]);
    }

    #[tokio::test(start_paused = true)]
    async fn planned_requests_are_sent_at_their_times() {
        let started = Instant::now();
        let send = |place| async move { (place, started.elapsed().as_millis()) };
        let times = [30, 0, 10].map(Duration::from_millis);
        assert_eq!(at_times(times, send).await, [(0, 30), (1, 0), (2, 10)]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_loop_says_when_too_many_requests_are_open() {
        let (sent, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let counts = (sent.clone(), refused.clone());
        let mut running = start(Arrivals::Rate(1e6), MAX_OPEN as u64 + 5, move |turn| {
            let (sent, refused) = counts.clone();
            async move {
                if turn.is_too_many {
                    refused.fetch_add(1, Relaxed);
                    return;
                }
                sent.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
        });
        running.end().await.unwrap();
        assert_eq!((sent.load(Relaxed), refused.load(Relaxed)), (MAX_OPEN as u64, 5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_load_that_is_stopped_finishes_what_it_began() {
        let done = Arc::new(AtomicU64::new(0));
        let counted = done.clone();
        let running = start(Arrivals::Clients(3), u64::MAX, move |_| {
            let counted = counted.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(70)).await;
                counted.fetch_add(1, Relaxed);
            }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        running.stop().await;
        assert_eq!(done.load(Relaxed), 6);
    }
}
