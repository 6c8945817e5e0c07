//! `churn`: what the index costs in memory, with ten million blocks and with thousands of workers that come and go.

use crate::sh;

/// Runs the memory tests with optimisation; they print their figures.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut test = sh::cargo();
    test.args(["test", "--release", "--locked", "--package", "pointsman-workers", "--test", "memory", "--"]);
    sh::run(test.args(["--include-ignored", "--nocapture", "--test-threads", "1"]))
}
