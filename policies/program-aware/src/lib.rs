//! Selector: keeps the KV of running agent programs where it is, and admits programs that fit.

mod cost;

pub use cost::Settings;

use cost::{Columns, Prompt, full, least};
use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, Policy, Rng, Selector, Shed, Slot, Wants, facts,
};

/// The configured policy.
#[derive(Debug)]
pub struct ProgramAware {
    settings: Settings,
    prompt_tokens: Slot<u32>,
    block_size: Slot<u32>,
    program: Slot<u64>,
    turn: Slot<u32>,
    other_worker: Slot<u64>,
    explain: Slot<u32>,
    waiting: Column<u32>,
    context: Column<u32>,
    requests: Column<u32>,
    capacity: Column<u32>,
    cached: [Column<u32>; 3],
    running: Column<u32>,
}

impl ProgramAware {
    /// Returns whether the request begins a program. One that has a worker for a leg, or had one that failed
    /// it, began its program before.
    fn begins_program(&self, call: &Call, facts: &Facts<'_>) -> bool {
        let is_admitted = call.attempt > 0 || self.other_worker.get(facts) != 0;
        !is_admitted && self.program.get(facts) != 0 && self.turn.get(facts) == 0
    }
}

impl Policy for ProgramAware {
    const NAME: &'static str = "program-aware";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        settings.check()?;
        Ok(Self {
            settings,
            prompt_tokens: wants.request(facts::PROMPT_TOKENS),
            block_size: wants.request(facts::BLOCK_SIZE),
            program: wants.request(facts::PROGRAM_HASH),
            turn: wants.request(facts::PROGRAM_TURN),
            other_worker: wants.request(facts::OTHER_LEG_WORKER_ID),
            explain: wants.request(facts::EXPLAIN),
            waiting: wants.worker(facts::ACTIVE_PREFILL_TOKENS),
            context: wants.worker(facts::DECODE_BLOCKS),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
            capacity: wants.worker(facts::TOTAL_BLOCKS),
            cached: [
                wants.worker(facts::CACHED_BLOCKS_DEVICE),
                wants.worker(facts::CACHED_BLOCKS_HOST),
                wants.worker(facts::CACHED_BLOCKS_DISK),
            ],
            running: wants.worker(facts::RUNNING_PROGRAM_TOKENS),
        })
    }
}

impl Selector for ProgramAware {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let prompt =
            Prompt { tokens: self.prompt_tokens.get(facts), block: self.block_size.get(facts).max(1) };
        let columns = Columns {
            waiting: self.waiting.slice(facts),
            context: self.context.slice(facts),
            requests: self.requests.slice(facts),
            capacity: self.capacity.slice(facts),
            cached: self.cached.map(|column| column.slice(facts)),
            running: self.running.slice(facts),
        };
        if self.begins_program(call, facts) && full(&self.settings, &prompt, &columns) {
            let reason = "running programs fill the caches of all workers; retry later".to_owned();
            return Ok(Decision::Shed(Shed { status: 529, reason }));
        }
        let costs = self.settings.costs(&prompt, &columns);
        let Some(row) = least(&costs, &mut Rng::new(call.seed)) else { return Ok(Decision::Abstain) };
        if self.explain.get(facts) != 1 {
            return Ok(Decision::row(row));
        }
        Ok(Decision::Choose { row: u32::try_from(row).unwrap_or(u32::MAX), costs, reason: None })
    }
}

pointsman_policy_sdk::export!(selector ProgramAware);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<ProgramAware>(include_str!("../cases.toml")).unwrap();
    }
}
