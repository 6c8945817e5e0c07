//! Load that an engine reports, as decisions read it: of each rank, without figures that cannot be true.
//! Tells of figures that are missing.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    MAX_LOAD_FAILURES, Probe,
    figures::Figures,
    load_figures::{LOAD_NAMES, LoadFigures},
};
use crate::{columns::EngineLoad, id::DpRank, log_limit::LogLimit, worker::Health};

/// Figures that stand still for longer than this are older than any usual step of an engine.
const MAX_STANDSTILL: Duration = Duration::from_secs(10);

/// The figures of one rank since they last changed.
#[derive(Debug)]
pub(super) struct Standstill {
    figures: LoadFigures,
    since: Instant,
    /// Whether the last reading could not be true.
    frozen: bool,
}

/// Which load figures an engine reports.
#[derive(Debug, Default)]
pub(super) struct Reported {
    /// Whether the last reading had the figure, in the order of [`LOAD_NAMES`].
    known: [bool; 3],
    /// Readings of a healthy engine without any figure, in a row.
    without: u32,
}

impl Standstill {
    fn new(now: Instant) -> Self {
        Self { figures: LoadFigures::default(), since: now, frozen: false }
    }

    /// Notes a reading. Returns whether it cannot be true, and whether that is new.
    ///
    /// An engine that has running or waiting requests makes steps, and each moves a gauge or a counter. One
    /// that had all its requests aborted may publish no figures until its next step, so that the last ones
    /// stay (vllm#22545). A request that is `booked` makes it step, or the engine hangs and the figures are
    /// true.
    fn note(&mut self, figures: LoadFigures, booked: bool, now: Instant) -> (bool, bool) {
        if figures != self.figures {
            (self.figures, self.since) = (figures, now);
        }
        let still = now.saturating_duration_since(self.since) >= MAX_STANDSTILL;
        let frozen = still && !booked && figures.claims_work() && figures.progress.is_known();
        let before = std::mem::replace(&mut self.frozen, frozen);
        (frozen, frozen && !before)
    }
}

impl Probe {
    /// Stores the load of every rank.
    pub(super) fn store_load(&mut self, figures: &Figures) {
        let (now, ranks) = (Instant::now(), self.worker.spec().dp_size.max(1));
        let first = self.worker.facts().first_rank.unwrap_or(self.worker.spec().first_rank);
        // Labels say nothing where the engine itself chooses the rank.
        let by_rank = ranks > 1 && !figures.ranks.is_empty();
        self.standstill.resize_with(ranks as usize, || Standstill::new(now));
        let mut loads = Vec::with_capacity(ranks as usize);
        for (rank, standstill) in (0..ranks).zip(&mut self.standstill) {
            let of_rank = if by_rank { figures.of_rank(rank, first) } else { figures.whole };
            let of_worker = || self.worker.active_requests();
            let booked = if by_rank {
                self.worker.load(DpRank(rank)).map_or_else(of_worker, |load| load.active_requests())
            } else {
                of_worker()
            };
            let (frozen, begins) = standstill.note(of_rank, booked > 0, now);
            if begins {
                let (worker, url) = (self.worker.id(), &*self.worker.spec().url);
                tracing::info!(%worker, url, rank, "load figures stand still: unknown until they move");
            }
            let LoadFigures { running, waiting, kv_usage, .. } = of_rank;
            let load = EngineLoad { running, waiting, kv_usage, read_at: now };
            loads.push((of_rank.has_load() && !frozen).then_some(load));
        }
        match loads.first() {
            Some(load) if !by_rank => self.worker.set_engine_load(*load),
            _ => self.worker.set_rank_loads(&loads),
        }
    }

    /// Notes which load figures a reading at `path` had, and tells of those that are gone.
    pub(super) fn note_reported(&mut self, path: &str, known: [bool; 3]) {
        if known.contains(&true) {
            let before = std::mem::replace(&mut self.reported, Reported { known, without: 0 });
            self.worker.set_reports_load(known == [true; 3]);
            let mut lost = before.known;
            lost.iter_mut().zip(known).for_each(|(lost, known)| *lost &= !known);
            return self.warn_of_unknown(path, lost);
        }
        if self.worker.health() != Health::Healthy {
            return;
        }
        self.reported.without = self.reported.without.saturating_add(1);
        if self.reported.without == MAX_LOAD_FAILURES {
            let before = std::mem::take(&mut self.reported.known);
            self.warn_of_unknown(path, if before.contains(&true) { before } else { [true; 3] });
        }
    }

    /// Writes at most one line a second for all workers together.
    fn warn_of_unknown(&self, path: &str, lost: [bool; 3]) {
        static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
        let missing = LOAD_NAMES.into_iter().zip(lost).filter(|(_, lost)| *lost);
        let missing: Vec<&str> = missing.map(|(name, _)| name).collect();
        if missing.is_empty() {
            return;
        }
        if let Some(suppressed) = LINES.due() {
            let (worker, url, missing) = (self.worker.id(), &*self.worker.spec().url, missing.join(", "));
            tracing::warn!(
                %worker, url, path, missing, suppressed,
                "load figures of a worker are unknown: compare the names at this path with docs/engine-metrics.md"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activity::EngineProgress;

    #[test]
    fn b8_figures_that_claim_work_and_stand_still_cannot_be_true() {
        let begin = Instant::now();
        let load = |waiting, kv_usage, tokens| LoadFigures {
            waiting: Some(waiting),
            kv_usage: Some(kv_usage),
            progress: EngineProgress { generation_tokens: tokens, ..EngineProgress::default() },
            ..LoadFigures::default()
        };
        let busy = load(24, 0.97, Some(9));
        // Whether the last of these readings counts as frozen.
        let frozen = |readings: &[(u64, LoadFigures, bool)]| {
            let mut rank = Standstill::new(begin);
            let note = |(second, figures, booked): &(u64, LoadFigures, bool)| {
                rank.note(*figures, *booked, begin + Duration::from_secs(*second))
            };
            readings.iter().map(note).last()
        };
        // B8.14
        assert_eq!(frozen(&[(3, busy, false), (12, busy, false)]), Some((false, false)));
        assert_eq!(frozen(&[(3, busy, false), (13, busy, false)]), Some((true, true)));
        assert_eq!(frozen(&[(3, busy, false), (13, busy, false), (14, busy, false)]), Some((true, false)));
        assert_eq!(
            frozen(&[(3, busy, false), (30, busy, true)]),
            Some((false, false)),
            "a request runs there"
        );
        assert_eq!(frozen(&[(3, busy, false), (13, busy, true), (14, busy, false)]), Some((true, true)));
        for moved in [load(23, 0.97, Some(9)), load(24, 0.96, Some(9)), load(24, 0.97, Some(10))] {
            assert_eq!(
                frozen(&[(3, busy, false), (9, moved, false), (18, moved, false)]),
                Some((false, false))
            );
        }
        for never in [load(0, 0.97, Some(9)), load(24, 0.97, None), LoadFigures::default()] {
            assert_eq!(frozen(&[(3, never, false), (99, never, false)]), Some((false, false)), "{never:?}");
        }
    }
}
