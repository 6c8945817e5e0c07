//! `churn`: what the index costs in memory, with ten million blocks and with thousands of workers that come and go.

use crate::sh;

/// Each in a process of its own: one's memory is not the other's.
const TESTS: [(&str, &str); 6] = [
    ("churn", "h4_workers_that_join_and_leave_leak_nothing"),
    ("churn", "h4_five_thousand_workers_join_and_leave_at_once"),
    ("memory", "h4_evicting_a_block_takes_the_same_time_for_shallow_and_deep_prompts"),
    ("memory", "h4_ten_million_blocks_by_events_stay_within_the_budget"),
    ("memory", "h4_ten_million_blocks_by_one_engine_s_events_stay_within_the_budget"),
    ("memory", "h4_ten_million_blocks_by_decisions_stay_within_the_budget"),
];

/// Runs the memory tests with optimisation; they print their figures.
pub(crate) fn run() -> anyhow::Result<()> {
    for (file, name) in TESTS {
        let mut test = sh::cargo();
        test.args(["test", "--release", "--locked", "--package", "pointsman-workers", "--test", file, name]);
        sh::run(test.args(["--", "--exact", "--include-ignored", "--nocapture"]))?;
    }
    Ok(())
}
