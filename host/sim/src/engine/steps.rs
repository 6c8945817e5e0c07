//! Runs the engine step after step, and gives the sequences their tokens.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Engine, Progress};
use crate::core::{JobId, Token};

/// A submitted sequence. Dropping it frees its resources at once.
pub(crate) struct Ticket {
    pub(super) engine: Arc<Engine>,
    pub(crate) id: JobId,
    pub(super) progress: watch::Receiver<Progress>,
}

impl Engine {
    /// Records that the KV which a sequence awaited has arrived, with or without the first token.
    fn receive(&self, id: JobId, first_token: bool) {
        let mut scheduler = self.scheduler.lock();
        if let Some(token) = scheduler.core.receive(id, first_token) {
            self.counters.token();
            scheduler.deliver(&token);
        }
        drop(scheduler);
        self.work.notify_one();
    }

    /// Computes step after step until `stop` is cancelled.
    pub(crate) async fn run(&self, stop: CancellationToken) {
        // End of the previous step, if the next one follows directly. Late wake-ups then do not accumulate.
        let mut previous = None;
        let mut tokens = Vec::new();
        loop {
            let Some(duration) = self.begin_step() else {
                previous = None;
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = self.work.notified() => continue,
                }
            };
            let end = previous.unwrap_or_else(|| self.clock.now()) + duration;
            previous = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.clock.sleep_until(end) => Some(end),
                () = self.abandoned() => None,
            };
            self.end_step(&mut tokens);
            // A step may have a duration of zero.
            tokio::task::yield_now().await;
        }
    }

    fn begin_step(&self) -> Option<Duration> {
        let mut scheduler = self.scheduler.lock();
        scheduler.core.advance(self.clock.now());
        let duration = scheduler.core.begin_step();
        for (id, cached) in scheduler.core.take_admitted() {
            if let Some(progress) = scheduler.sequences.get(&id) {
                progress.send_modify(|progress| progress.admitted = Some(cached));
            }
        }
        if duration.is_none() {
            scheduler.publish();
        }
        duration
    }

    fn end_step(&self, tokens: &mut Vec<Token>) {
        tokens.clear();
        let mut scheduler = self.scheduler.lock();
        scheduler.core.end_step(tokens);
        scheduler.publish();
        for token in tokens {
            self.counters.token();
            scheduler.deliver(token);
        }
    }

    /// Waits until every sequence of the current step has left.
    async fn abandoned(&self) {
        while !self.scheduler.lock().core.steps_for_none() {
            self.work.notified().await;
        }
    }
}

impl Ticket {
    /// Waits for admission. Returns the cached prompt tokens.
    pub(crate) async fn admitted(&mut self) -> Option<u32> {
        self.progress.wait_for(|progress| progress.admitted.is_some()).await.ok()?.admitted
    }

    /// Waits for the sequence's token of this number.
    pub(crate) async fn token(&mut self, number: u32) -> Option<()> {
        self.progress.wait_for(|progress| progress.produced >= number).await.ok().map(|_| ())
    }

    /// Records that the KV which the sequence awaited has arrived.
    pub(crate) fn receive(&self, first_token: bool) {
        self.engine.receive(self.id, first_token);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut scheduler = self.engine.scheduler.lock();
        scheduler.sequences.remove(&self.id);
        scheduler.core.leave(self.id);
        drop(scheduler);
        self.engine.work.notify_one();
    }
}
