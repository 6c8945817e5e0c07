//! Clients of the demo. Each sends the next request of the trace.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use indicatif::ProgressBar;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use pointsman_rig::client::{Client, Streamed};

/// Number of concurrent clients.
const CLIENTS: usize = 12;

/// Outcomes of the clients' requests.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) outcomes: Vec<Streamed>,
    /// Number of streams that ended with the killed worker, because the gateway could not continue them.
    pub(super) cut: usize,
}

/// Running clients.
pub(super) struct Clients {
    shared: Arc<Shared>,
    tasks: JoinSet<Seen>,
}

struct Shared {
    client: Client,
    bodies: Vec<String>,
    next: AtomicUsize,
    answered: AtomicUsize,
    kill_begun: AtomicBool,
    kill_done: AtomicBool,
    /// Whether events are still to come. Until then, clients repeat the trace.
    repeat: AtomicBool,
}

impl Clients {
    pub(super) fn start(client: &Client, bodies: Vec<String>, bar: &ProgressBar) -> Self {
        let shared = Arc::new(Shared {
            client: client.clone(),
            bodies,
            next: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            kill_begun: AtomicBool::new(false),
            kill_done: AtomicBool::new(false),
            repeat: AtomicBool::new(true),
        });
        let mut tasks = JoinSet::new();
        for _ in 0..CLIENTS {
            tasks.spawn(send(shared.clone(), bar.clone()));
        }
        Self { shared, tasks }
    }

    /// Waits until this number of requests was answered, at most 50 s.
    pub(super) async fn until_answered(&self, requests: usize) {
        let started = Instant::now();
        while self.shared.answered.load(Ordering::SeqCst) < requests
            && started.elapsed() < Duration::from_secs(50)
        {
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Kills a worker. Requests that run at that time may be cut.
    pub(super) fn during_kill(&self, kill: impl FnOnce()) {
        self.shared.kill_begun.store(true, Ordering::SeqCst);
        kill();
        self.shared.kill_done.store(true, Ordering::SeqCst);
    }

    /// Ends the clients after the whole trace was sent.
    pub(super) async fn finish(&mut self) -> Seen {
        self.shared.repeat.store(false, Ordering::SeqCst);
        let mut seen = Seen::default();
        while let Some(ended) = self.tasks.join_next().await {
            if let Ok(one) = ended {
                seen.outcomes.extend(one.outcomes);
                seen.cut += one.cut;
            }
        }
        seen
    }
}

async fn send(shared: Arc<Shared>, bar: ProgressBar) -> Seen {
    let mut seen = Seen::default();
    loop {
        let turn = shared.next.fetch_add(1, Ordering::SeqCst);
        if turn >= shared.bodies.len() && !shared.repeat.load(Ordering::SeqCst) {
            return seen;
        }
        let Some(body) = shared.bodies.get(turn % shared.bodies.len().max(1)) else { return seen };
        let after_kill = shared.kill_done.load(Ordering::SeqCst);
        let outcome = shared.client.stream_chat(&[], body.clone()).await;
        let during_kill = !after_kill && shared.kill_begun.load(Ordering::SeqCst);
        seen.cut += usize::from(during_kill && outcome.problem.is_some() && outcome.events > 0);
        seen.outcomes.push(outcome);
        let answered = shared.answered.fetch_add(1, Ordering::SeqCst) + 1;
        // The clients repeat the trace while events are still to come.
        bar.set_length(answered.max(shared.bodies.len()) as u64);
        bar.inc(1);
    }
}
