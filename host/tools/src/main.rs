//! `pointsman-tools`: `pointsman import` and `pointsman top`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use pointsman_cli::{
    DEFAULT_LOG, LogArgs, ToolCommand, exit_code, parse, start_log,
    version::{VERSION, check_caller},
};
use pointsman_import::ImportCommand;

mod top;

/// Import the configuration of another router, and watch a running gateway.
#[derive(Debug, Parser)]
#[command(name = "pointsman-tools", version = VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Turn the configuration of another router into one of Pointsman, with a report of what differs.
    #[command(subcommand)]
    Import(ImportCommand),
    /// Watch a running gateway in the terminal: load, latencies, workers, slots.
    Top(top::TopArgs),
    #[command(flatten)]
    Tool(ToolCommand),
}

fn main() -> ExitCode {
    if let Err(error) = check_caller() {
        return exit_code(Err(error));
    }
    let cli: Cli = parse();
    let log = start_log(cli.log.log_json, DEFAULT_LOG);
    let outcome = match cli.command {
        Command::Import(command) => command.run(),
        Command::Top(args) => args.run(),
        Command::Tool(command) => command.run(Cli::command(), "pointsman"),
    };
    drop(log);
    exit_code(outcome)
}
