//! Load that an engine reports, as decisions read it: of each rank.
//! Tells of figures that are missing.

use tokio::time::Instant;

use super::{
    Probe,
    figures::{Figures, LoadFigures},
};
use crate::{columns::EngineLoad};

impl Probe {
    /// Stores the load of every rank.
    pub(super) fn store_load(&mut self, figures: &Figures) {
        let (now, ranks) = (Instant::now(), self.worker.spec().dp_size.max(1));
        let first = self.worker.facts().first_rank.unwrap_or(self.worker.spec().first_rank);
        // Labels say nothing where the engine itself chooses the rank.
        let by_rank = ranks > 1 && !figures.ranks.is_empty();
        let mut loads = Vec::with_capacity(ranks as usize);
        for rank in 0..ranks {
            let of_rank = if by_rank { figures.of_rank(rank, first) } else { figures.whole };
            let LoadFigures { running, waiting, kv_usage, .. } = of_rank;
            let load = EngineLoad { running, waiting, kv_usage, read_at: now };
            loads.push((of_rank.has_load()).then_some(load));
        }
        match loads.first() {
            Some(load) if !by_rank => self.worker.set_engine_load(*load),
            _ => self.worker.set_rank_loads(&loads),
        }
    }
}
