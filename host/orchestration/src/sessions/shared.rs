//! Bindings that gateways of a fleet tell each other.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc::{Receiver, SyncSender, sync_channel},
};

use pointsman_routing::CandidateId;
use pointsman_workers::unix_us;
use tokio::time::{Duration, Instant};

use super::{Binding, BindingKey, Promise, Sessions, Stamp, eviction::limit};

/// How long the end of a session keeps older bindings away.
pub const CLOSED_FOR: Duration = Duration::from_secs(60);
/// How far the clock of another gateway may be ahead: a later stamp would win for ever.
const MAX_AHEAD: Duration = Duration::from_secs(10);
/// Longest time that another gateway may bind a session for.
const MAX_TTL: Duration = Duration::from_secs(24 * 3_600);

/// A binding that was made, or its end: of a session or a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionChange {
    /// The session or response.
    pub key: BindingKey,
    /// The worker; `None` if the session was closed, or the response deleted.
    pub candidate: Option<CandidateId>,
    /// How long its writer needs the binding.
    pub ttl: Duration,
    /// When and by whom it was made.
    pub stamp: Stamp,
}

impl SessionChange {
    /// Limits how far the clock of another gateway may be ahead, and how long its binding holds.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let ahead = u64::try_from(MAX_AHEAD.as_micros()).unwrap_or(u64::MAX);
        self.stamp.at_us = self.stamp.at_us.min(unix_us().saturating_add(ahead));
        self.ttl = self.ttl.min(MAX_TTL);
        self
    }
}

/// Queue of changes for other gateways.
#[derive(Debug)]
pub(super) struct Sharing {
    queue: SyncSender<SessionChange>,
    writer: Arc<AtomicU64>,
    lost: AtomicU64,
}

impl Sharing {
    /// Returns a stamp for a change now. It wins over the known one.
    pub(super) fn stamp(&self, known: Stamp) -> Stamp {
        let after = known.at_us.saturating_add(1);
        Stamp { at_us: unix_us().max(after), writer: self.writer.load(Relaxed) }
    }

    /// Hands a change over. When the queue is full, the others do not learn of it before the next one.
    pub(super) fn queue_change(&self, change: SessionChange) {
        if self.queue.try_send(change).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

impl Sessions {
    /// Creates bindings whose changes are put into a queue of this length.
    #[must_use]
    pub fn shared(length: usize) -> (Self, Receiver<SessionChange>) {
        let (queue, changes) = sync_channel(length);
        let sharing = Sharing { queue, writer: Arc::default(), lost: AtomicU64::new(0) };
        (Self { sharing: Some(sharing), ..Self::default() }, changes)
    }

    /// Sets the author of this gateway's changes, a hash of its name.
    pub fn set_writer(&self, writer: u64) {
        if let Some(sharing) = &self.sharing {
            sharing.writer.store(writer, Relaxed);
        }
    }

    /// Returns the number of changes that were not sent to the others, because the queue was full.
    #[must_use]
    pub fn untold(&self) -> u64 {
        self.sharing.as_ref().map_or(0, |sharing| sharing.lost.load(Relaxed))
    }

    /// Applies a change of another gateway. If a newer one is known, and binds to the same worker, only the
    /// promise of that gateway is noted.
    pub fn apply(&self, change: SessionChange) {
        let SessionChange { key, candidate, ttl, stamp } = change.bounded();
        let now = Instant::now();
        let promise = Promise { stamp, until: now + ttl };
        let mut bound = self.table(key).lock();
        let binding = bound.entry(key).or_insert_with(|| Binding::new(None, now));
        let stays = candidate.is_some() && candidate == binding.candidate;
        if binding.end() > now && binding.stamp >= stamp {
            let is_own = binding.told.is_some_and(|told| told.stamp.writer == stamp.writer);
            if stays && !is_own {
                binding.others.note(promise, now);
            }
            return;
        }
        // Requests here keep it. Otherwise, the time of another worker here is over.
        let here = if stays || binding.holders > 0 { binding.until } else { now };
        binding.change(candidate, here, stamp);
        if candidate.is_some() {
            binding.others.note(promise, now);
        } else {
            binding.until = here.max(promise.until);
        }
        limit(&mut bound, now);
    }
}

#[cfg(test)]
mod tests;
