//! The commands of operators for a running gateway: `pointsman health`, `status`, `workers`, `drain`,
//! `undrain`, `policies` and `decisions`.
//!
//! They use the HTTP API of the admin listener and nothing else: this crate does not know the gateway's code.
//! [`Gateway`] is the only client of that API; the policy commands and `pointsman top` use it, too.

use std::{io::Write as _, process::ExitCode};

use clap::Subcommand;

mod answer;
pub mod api;
mod decisions;
mod drain;
mod explain;
mod gateway;
mod health;
mod policies;
mod status;
mod summary;
pub mod text;
pub mod worker_name;
mod workers;

pub use answer::{Answer, GatewayError};
pub use drain::{after_drain, after_undrain};
pub use explain::sentences;
pub use gateway::{Gateway, GatewayArgs, query, segment, unreachable};
pub(crate) use pointsman_cli::{conclude, print};
pub use status::{digests, quantiles, requests, trial_rows};

/// How every command ends; the end of the help of each.
pub const EXIT_CODES: &str = "\
Exit codes: 0 good; 1 not ready, not found, refused or not reachable; 2 wrong use.

The token comes from --token-file, POINTSMAN_ADMIN_TOKEN_FILE or POINTSMAN_ADMIN_TOKEN.";

/// Commands for a running gateway.
#[derive(Debug, Subcommand)]
pub enum AdminCommand {
    /// Check that a running gateway answers, for container runtimes: exit code 0 or 1.
    Health(health::HealthArgs),
    /// Show whether a running gateway is ready, and its load, slots, queue and workers.
    #[command(after_help = EXIT_CODES)]
    Status(status::StatusArgs),
    /// List the workers of a running gateway with their state and load.
    #[command(after_help = EXIT_CODES)]
    Workers(workers::WorkersArgs),
    /// Take a worker out of service: it gets no new request, and those in flight finish.
    #[command(after_help = EXIT_CODES)]
    Drain(drain::DrainArgs),
    /// Send requests to a worker again that was taken out of service.
    #[command(after_help = EXIT_CODES)]
    Undrain(drain::UndrainArgs),
    /// List the slots with their policies, refused files and files that are being compiled.
    #[command(after_help = EXIT_CODES)]
    Policies(policies::PoliciesArgs),
    /// List the last routing decisions of a running gateway, explain one, or sum them up.
    #[command(after_help = EXIT_CODES)]
    Decisions(Box<decisions::DecisionsArgs>),
}

impl AdminCommand {
    /// Runs the command and returns the exit code of the process.
    ///
    /// # Errors
    /// The command was used wrongly; the caller prints the error and exits with code 2.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let outcome = match self {
            Self::Health(args) => args.run(),
            Self::Status(args) => args.run(),
            Self::Workers(args) => args.run(),
            Self::Drain(args) => args.run(),
            Self::Undrain(args) => args.run(),
            Self::Policies(args) => args.run(),
            Self::Decisions(args) => args.run(),
        };
        report_gateway_error(outcome)
    }
}

/// Prints an error of the gateway, which ends a command with code 1. Other errors are the caller's.
///
/// # Errors
/// The command was used wrongly.
pub fn report_gateway_error(outcome: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
    match outcome {
        Err(error) if error.is::<GatewayError>() => {
            let _ = writeln!(std::io::stderr(), "pointsman: {error:#}");
            Ok(ExitCode::FAILURE)
        }
        outcome => outcome,
    }
}

/// Runs calls of a command to their end. Ctrl-C ends the process, as the default action of the signal.
///
/// # Errors
/// The error of the calls.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
