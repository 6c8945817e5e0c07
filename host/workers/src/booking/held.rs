//! KV that a rank is expected to hold for agent programs between their requests.

use std::sync::{Arc, atomic::Ordering};

use super::RankLoad;
use crate::columns::PROGRAM_UNIT;

/// Maximum number of units that one program counts: about a million tokens.
const MAX_UNITS: u32 = 1 << 16;

/// Tokens of one agent program on one rank. They count in [`crate::RankView::program_tokens`] until this is
/// dropped.
#[derive(Debug)]
pub struct HeldTokens {
    load: Arc<RankLoad>,
    units: u32,
}

impl HeldTokens {
    pub(crate) fn new(load: Arc<RankLoad>, tokens: u32) -> Self {
        let units = tokens.div_ceil(PROGRAM_UNIT).min(MAX_UNITS);
        load.position.cell().program_units.fetch_add(units, Ordering::Relaxed);
        Self { load, units }
    }

    /// Returns whether the tokens count on this rank.
    #[must_use]
    pub fn is_on(&self, load: &RankLoad) -> bool {
        std::ptr::eq(&*self.load, load)
    }
}

impl Drop for HeldTokens {
    fn drop(&mut self) {
        self.load.position.cell().program_units.fetch_sub(self.units, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Registry, WorkerSpec};

    #[test]
    fn held_tokens_count_until_they_are_dropped() {
        let registry = Registry::default();
        let spec = "role=decode,engine=vllm,url=http://a:1,model=m,dp_size=2";
        let worker = registry.upsert(WorkerSpec::parse_flag(spec).unwrap());
        let candidates = worker.candidates();
        let tokens = |rank: usize| candidates[rank].load().view().program_tokens();
        let held = [candidates[0].hold(100), candidates[0].hold(1), candidates[1].hold(u32::MAX)];
        // Whole units of 16, and at most a million for one program.
        assert_eq!((tokens(0), tokens(1)), (112 + 16, 1 << 20));
        assert!(held[0].is_on(candidates[0].load()) && !held[0].is_on(candidates[1].load()));
        drop(held);
        assert_eq!((tokens(0), tokens(1)), (0, 0));
    }
}
