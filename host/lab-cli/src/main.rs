//! `pointsman-lab`: `pointsman compare`, `calibrate`, `observe`, `trace` and `sim`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use pointsman_cli::{
    DEFAULT_LOG, LogArgs, ToolCommand, exit_code, parse, start_log,
    version::{VERSION, check_caller},
};
use pointsman_lab::cli::{CompareArgs, TraceCommand};
use pointsman_sim::cli::SimArgs;

use self::{calibrate::CalibrateArgs, demo::DemoArgs, observe::ObserveArgs};

mod calibrate;
mod demo;
mod observe;

/// Compare policies in simulations, fit those to your engines, and simulate engines.
#[derive(Debug, Parser)]
#[command(name = "pointsman-lab", version = VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// See the gateway at work: engines, a recorded trace, a policy swap, a bad policy, a killed worker.
    Demo(DemoArgs),
    /// Compare policies on a request trace, in a simulation with the gateway's own router.
    Compare(Box<CompareArgs>),
    /// Fit the engine model of `compare` to your engines: step time, transfer, capacity.
    Calibrate(Box<CalibrateArgs>),
    /// Watch the router in place through copies of its traffic, and say what each policy would have done.
    Observe(Box<ObserveArgs>),
    /// Convert and generate request traces.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Simulate an inference engine with the HTTP interface of vLLM, SGLang or a plain OpenAI server.
    Sim(Box<SimArgs>),
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
    // This is the default of `pointsman-sim`.
    let log = if matches!(cli.command, Command::Sim(_)) { "warn" } else { DEFAULT_LOG };
    let log = start_log(cli.log.log_json, log);
    let outcome = match cli.command {
        Command::Demo(args) => args.run(),
        Command::Compare(args) => args.run(),
        Command::Calibrate(args) => args.run(),
        Command::Observe(args) => args.run(),
        Command::Trace(command) => command.run(),
        Command::Sim(args) => args.run().map(|()| ExitCode::SUCCESS),
        Command::Tool(command) => command.run(Cli::command(), "pointsman"),
    };
    drop(log);
    exit_code(outcome)
}
