//! The end of the fleet that a source holds.

use std::{fmt, sync::Arc};

use tokio::sync::Notify;

use super::Fleet;
use crate::found::SourceSnapshot;

/// Reports what one source knows.
#[derive(Clone, Debug)]
pub struct Reporter {
    fleet: Arc<Fleet>,
    source: usize,
    recheck: Arc<Notify>,
}

impl Reporter {
    pub(super) fn new(fleet: Arc<Fleet>, source: usize, recheck: Arc<Notify>) -> Self {
        Self { fleet, source, recheck }
    }

    /// Reports everything that the source knows. It is in force when this returns.
    pub fn present(&self, snapshot: SourceSnapshot) {
        self.fleet.present(self.source, snapshot);
    }

    /// Reports that the source cannot be read. Its last snapshot stays in force.
    pub fn away(&self, problem: impl fmt::Display) {
        self.fleet.away(self.source, problem.to_string());
    }

    /// Reports that the source was read, and nothing changed.
    pub fn alive(&self) {
        self.fleet.alive(self.source);
    }

    /// Returns why another source owns the worker at `url` that this source describes.
    #[must_use]
    pub(crate) fn conflict_of(&self, url: &str) -> Option<String> {
        self.fleet.conflict_of(self.source, url)
    }

    /// Resolves when the source has to read everything again.
    pub(crate) async fn recheck(&self) {
        self.recheck.notified().await;
    }
}
