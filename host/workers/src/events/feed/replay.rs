//! Replays of missed messages, while live messages wait.
//!
//! An engine may cut a replay short: its socket drops messages that a slow reader has not taken. What arrived
//! stays applied, and the feed asks for the rest.

use std::{pin::pin, sync::atomic::Ordering::Relaxed};

use prefix_index::events::Step;
use tokio::{
    select,
    sync::mpsc,
    time::{Instant, timeout_at},
};

use super::{
    Feed, Origin,
    wire::{NOT_FRAMES, Reply, Subscription, ask},
};

/// Capacity of the channel from the replay's socket to the sink. Each reply may be as large as a message.
const REPLY_QUEUE: usize = 4;
/// Maximum number of requests for one gap.
const MAX_REQUESTS: u32 = 32;

impl Feed {
    /// Requests the messages from `from` on, applies them in order, and then applies the live messages that
    /// arrived in between. Requests the rest of a replay that was cut short.
    pub(super) async fn fill(
        &mut self,
        subscription: &mut Subscription,
        from: u64,
    ) -> Result<(), zmtp::Error> {
        let mut from = from;
        if let Some(endpoint) = self.config.replay.clone() {
            let end = Instant::now() + self.config.replay_limit;
            let mut requests = 0;
            let filled = loop {
                requests += 1;
                let complete = self.replay(subscription, &endpoint, from, end).await?;
                while let Some(step) = self.sequencer.advance() {
                    self.apply_step(step, Origin::Live);
                }
                if complete && self.sequencer.is_caught_up() {
                    break true;
                }
                let next = self.sequencer.next().filter(|next| *next > from);
                let Some(next) = next.filter(|_| requests < MAX_REQUESTS && Instant::now() < end) else {
                    break false;
                };
                from = next;
            };
            self.note_replay(&endpoint, from, filled);
        }
        for step in self.sequencer.finish() {
            self.apply_step(step, Origin::Live);
        }
        Ok(())
    }

    /// Requests one replay. Returns whether it came to its end without a gap within it.
    async fn replay(
        &mut self,
        subscription: &mut Subscription,
        endpoint: &str,
        from: u64,
        end: Instant,
    ) -> Result<bool, zmtp::Error> {
        let config = self.config.clone();
        let (sender, mut replies) = mpsc::channel(REPLY_QUEUE);
        let mut asking = pin!(timeout_at(end, ask(&config, endpoint, from, sender)));
        let (mut asked, mut complete, mut begun) = (false, false, false);
        while self.sequencer.is_open() {
            select! {
                biased;
                reply = replies.recv() => match reply {
                    // The engine has the messages that are missing within a replay.
                    Some(Reply::Message(seq, _)) if begun && self.sequencer.next().is_some_and(|next| seq > next) => {
                        return Ok(false);
                    }
                    Some(reply) => begun |= self.on_reply(reply),
                    None => return Ok(complete),
                },
                result = &mut asking, if !asked => {
                    asked = true;
                    match result {
                        Ok(Ok(())) => complete = true,
                        Ok(Err(lost)) => self.count(&lost),
                        Err(_) => tracing::debug!(endpoint, from, "kv event replay timed out"),
                    }
                    replies.close();
                }
                message = subscription.next() => {
                    // While a replay is open, live messages are kept and report no gap.
                    _ = self.on_live(&message?);
                }
            }
        }
        // A restart closed the replay.
        Ok(true)
    }

    /// Applies a reply. Returns whether it was new.
    fn on_reply(&mut self, reply: Reply) -> bool {
        let Reply::Message(seq, payload) = reply else {
            self.note_unreadable(NOT_FRAMES);
            return false;
        };
        let step = self.sequencer.replayed(seq, payload);
        let is_new = !matches!(step, Step::Duplicate);
        self.apply_step(step, Origin::Replay);
        is_new
    }

    /// Counts a replay that was given up, and warns of the first one until another succeeds.
    fn note_replay(&mut self, endpoint: &str, from: u64, filled: bool) {
        let gave_up = std::mem::replace(&mut self.gave_up, !filled);
        if filled {
            return;
        }
        self.config.counters.failed_replays.fetch_add(1, Relaxed);
        if !gave_up {
            tracing::warn!(
                endpoint,
                from,
                "kv event replay given up: the gateway does not know what the engine cached before"
            );
        }
    }
}
