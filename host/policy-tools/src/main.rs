//! `pointsman-policy`: `pointsman policy …`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use pointsman_cli::{
    DEFAULT_LOG, LogArgs, ToolCommand, exit_code, parse, start_log,
    version::{VERSION, check_caller},
};
use pointsman_policy_tools::PolicyCommand;

/// Write, test, measure and inspect policies, and replay recorded decisions with them.
#[derive(Debug, Parser)]
#[command(name = "pointsman-policy", version = VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[expect(clippy::large_enum_variant, reason = "there is one value in a process")]
#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Policy(PolicyCommand),
    #[command(flatten)]
    Tool(ToolCommand),
}

fn main() -> ExitCode {
    // A policy file that makes the compiler panic is refused and logged, without a backtrace.
    std::panic::set_hook(pointsman_policy_runtime::panic_hook(std::panic::take_hook()));
    if let Err(error) = check_caller() {
        return exit_code(Err(error));
    }
    let cli: Cli = parse();
    let log = start_log(cli.log.log_json, DEFAULT_LOG);
    let outcome = match cli.command {
        Command::Policy(command) => command.run(),
        Command::Tool(command) => command.run(Cli::command(), "pointsman policy"),
    };
    drop(log);
    exit_code(outcome)
}
