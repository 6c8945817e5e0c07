//! State of the fleet, as operators see it.

use std::{collections::HashMap, sync::Arc};

use pointsman_workers::WorkerId;
use serde::Serialize;
use tokio::time::Instant;

use super::{Dismissed, members::Members, source_entry::SourceEntry};
use crate::found::Refusal;

/// State of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceState {
    /// The source was not read yet.
    Starting,
    /// The source was read.
    Present,
    /// The source cannot be read; its last workers stay.
    Away,
}

/// State of a source: its workers, and the removals that wait.
#[derive(Clone, Debug, Serialize)]
pub struct SourceStatus {
    /// Name, for example `etcd:main`.
    pub name: Arc<str>,
    /// State.
    pub state: SourceState,
    /// Time since the source was last read, in milliseconds; `None`: never.
    pub age_ms: Option<u64>,
    /// Why it is away.
    pub problem: Option<String>,
    /// Number of times that it went away.
    pub times_away: u64,
    /// Number of its workers in force, those whose removal waits included.
    pub workers: usize,
    /// Number of workers that it says are not ready, also of those that never were and do not count above.
    pub unready: usize,
    /// Number of workers whose removal waits for a second confirmation.
    pub held: usize,
    /// How long they have waited, in milliseconds.
    pub held_ms: Option<u64>,
    /// Number of entries that are not used.
    pub refused_count: usize,
    /// The first of these entries.
    pub refused: Vec<Refusal>,
}

/// State of all sources.
#[derive(Clone, Debug, Serialize)]
pub struct FleetStatus {
    /// The sources in the order of their precedence.
    pub sources: Vec<SourceStatus>,
    /// Number of workers that leave when their requests have ended.
    pub leaving: usize,
    /// Workers that operators removed and a source still lists.
    pub dismissed: Vec<DismissedWorker>,
}

/// A worker that an operator removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DismissedWorker {
    /// Id as text: not every JSON reader keeps 64 bits.
    pub id_text: String,
    /// URL.
    pub url: Arc<str>,
}

impl FleetStatus {
    pub(super) fn of(
        sources: &[SourceEntry],
        members: &Members,
        dismissed: &HashMap<WorkerId, Dismissed>,
    ) -> Self {
        let mut dismissed: Vec<DismissedWorker> = dismissed
            .iter()
            .map(|(id, dismissed)| DismissedWorker {
                id_text: id.to_string(),
                url: dismissed.spec.url.clone(),
            })
            .collect();
        dismissed.sort_unstable_by(|one, other| one.url.cmp(&other.url));
        let sources = sources.iter().map(SourceStatus::of).collect();
        Self { sources, leaving: members.leaving(), dismissed }
    }
}

impl SourceStatus {
    fn of(source: &SourceEntry) -> Self {
        let millis = |since: Instant| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let state = match (&source.problem, source.last_good) {
            (Some(_), _) => SourceState::Away,
            (None, Some(_)) => SourceState::Present,
            (None, None) => SourceState::Starting,
        };
        Self {
            name: source.name.clone(),
            state,
            age_ms: source.last_good.map(millis),
            problem: source.problem.clone(),
            times_away: source.times_away,
            workers: source.workers.len(),
            unready: source.workers.iter().filter(|found| found.unready).count() + source.never_ready,
            held: source.held,
            held_ms: source.guard.held_since().map(millis),
            refused_count: source.refused_count + source.conflicts.len(),
            refused: source
                .refused
                .iter()
                .chain(&source.conflicts)
                .take(crate::found::MAX_REFUSALS)
                .cloned()
                .collect(),
        }
    }
}
