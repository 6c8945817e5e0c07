//! The daemon's entry point.

use std::process::ExitCode;

use pointsman_gateway::cli;

fn main() -> ExitCode {
    // A policy file that makes the compiler panic is refused and logged, without a backtrace.
    std::panic::set_hook(pointsman_policy_runtime::panic_hook(std::panic::take_hook()));
    cli::run()
}
