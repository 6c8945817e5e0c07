//! Whether a worker makes progress, and what follows when it does not.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::{Health, Worker};
use crate::{
    activity::{Activity, EngineSigns, Stuck},
    id::WorkerId,
};

impl Worker {
    pub(crate) fn activity(&self) -> &Activity {
        &self.state.activity
    }

    /// Returns whether the worker is healthy and has made progress since then.
    pub(crate) fn works_since(&self, since: Instant) -> bool {
        self.health() == Health::Healthy && self.state.activity.progressed_since(since)
    }

    /// Returns why the worker is stuck and when that began; `None` if it is not.
    #[must_use]
    pub fn stuck(&self) -> Option<Stuck> {
        self.state.activity.stuck()
    }

    /// Returns whether the worker is left out because it is stuck. The last eligible worker of a pool and
    /// more than half of one are not.
    #[must_use]
    pub fn is_ejected(&self) -> bool {
        self.state.ejected.load(Ordering::Acquire)
    }

    /// Leaves the worker out, or takes it back. Returns true if that changed.
    pub(crate) fn set_ejected(&self, ejected: bool) -> bool {
        let changed = self.state.ejected.swap(ejected, Ordering::AcqRel) != ejected;
        if changed {
            self.tell_ranks();
        }
        changed
    }

    /// Returns how often the worker was ejected.
    #[must_use]
    pub fn ejections(&self) -> u64 {
        self.state.activity.ejections()
    }

    /// Returns when the worker last made progress: it sent a byte of an answer or a KV event, or a figure of
    /// its engine moved.
    #[must_use]
    pub fn alive_at(&self) -> Instant {
        self.state.activity.alive_at()
    }

    /// Returns whether the engine reports figures that move while it works.
    #[must_use]
    pub fn counts_its_work(&self) -> bool {
        self.state.activity.counts_its_work()
    }

    /// Like [`Worker::alive_at`]. Where its engine's figures are not known, an answered health check counts,
    /// too, unless the worker is stuck.
    #[must_use]
    pub fn works_at(&self) -> Instant {
        self.state.activity.works_at()
    }

    /// Reports that the worker gave a sign of progress.
    pub fn note_sign_of_life(&self) {
        self.state.activity.note_sign_of_life();
    }

    /// Reports that the deadline of a request passed while the worker owed it an answer.
    pub fn note_deadline(&self, request: u64) {
        self.state.activity.note_deadline(request);
    }

    /// Reports that a handoff to or from `partner` was not finished when a deadline passed.
    pub fn note_handoff_late(&self, request: u64, partner: WorkerId) {
        self.state.activity.note_handoff_late(request, partner);
    }

    /// Reports that a handoff finished.
    pub fn note_handoff_done(&self) {
        self.state.activity.note_handoff_done();
    }

    /// Takes a reading of the engine's figures; `None`: they are not known any more.
    pub(crate) fn note_signs(&self, signs: Option<EngineSigns>) {
        self.state.activity.read(signs);
    }

    /// Lets one request at a time try the worker until one is answered.
    pub(crate) fn put_on_trial(&self) {
        self.state.suspect.store(true, Ordering::Release);
        self.tell_ranks();
    }

    /// Requests an immediate reading of the engine's figures.
    pub fn read_figures(&self) {
        self.state.read_now.notify_one();
    }

    /// Resolves when the engine's figures have to be read at once.
    pub(crate) async fn reading_requested(&self) {
        self.state.read_now.notified().await;
    }
}
