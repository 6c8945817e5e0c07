//! The daemon's entry point.

use std::process::ExitCode;

use clap::Parser;
use pointsman_gateway::cli::Cli;

fn main() -> ExitCode {
    Cli::parse().run()
}
