//! Clients that send a request again and again, and judge each answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::client::{CHAT, Client, Outcome};

/// Time between two requests of a gateway's clients.
const GAP: Duration = Duration::from_millis(80);
/// Longest time of a request. Longer means that it hangs.
const HANGS: Duration = Duration::from_secs(60);
const BODY: &str = r#"{"model":"tiny","stream":true,"max_tokens":30,"ignore_eos":true,"messages":[{"role":"user","content":"a question of some length, as clients ask it"}]}"#;

/// Clients of one gateway.
pub(crate) struct Clients {
    pub(crate) tally: Arc<Tally>,
    task: JoinSet<()>,
}

/// How their requests ended.
#[derive(Default)]
pub(crate) struct Tally {
    stop: AtomicBool,
    pub(crate) whole: AtomicU64,
    pub(crate) one_error: AtomicU64,
    pub(crate) neither: AtomicU64,
    pub(crate) problem: Mutex<Option<String>>,
}

impl Clients {
    pub(crate) fn start(client: Client) -> Self {
        let (tally, mut task) = (Arc::<Tally>::default(), JoinSet::new());
        task.spawn(send(client, tally.clone()));
        Self { tally, task }
    }

    /// Stops, and waits for the answers.
    pub(crate) async fn end(mut self) -> Arc<Tally> {
        self.tally.stop.store(true, Relaxed);
        while self.task.join_next().await.is_some() {}
        self.tally
    }
}

async fn send(client: Client, tally: Arc<Tally>) {
    let mut requests = JoinSet::new();
    while !tally.stop.load(Relaxed) {
        let (client, tally) = (client.clone(), tally.clone());
        requests.spawn(async move {
            let outcome = timeout(HANGS, client.outcome(CHAT, BODY, true)).await;
            match outcome.unwrap_or_else(|_| Outcome::Neither(format!("no end within {HANGS:?}"))) {
                Outcome::Whole | Outcome::Streamed => tally.whole.fetch_add(1, Relaxed),
                Outcome::OneError => tally.one_error.fetch_add(1, Relaxed),
                Outcome::Neither(problem) => {
                    tally.problem.lock().get_or_insert(problem);
                    tally.neither.fetch_add(1, Relaxed)
                }
            };
        });
        while requests.try_join_next().is_some() {}
        sleep(GAP).await;
    }
    while requests.join_next().await.is_some() {}
}
