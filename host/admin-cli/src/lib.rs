//! The commands of operators for a running gateway: `pointsman health`, `status`, `workers`, `drain`,
//! `decisions` and `top`.
//!
//! They use the HTTP API of the admin listener and nothing else: this crate does not know the gateway's code.
//! [`Gateway`] is the only client of that API; the policy commands use it, too.

use std::{io::Write as _, process::ExitCode};

use clap::Subcommand;

mod answer;
mod api;
mod decisions;
mod drain;
mod explain;
mod gateway;
mod health;
mod status;
mod text;
#[cfg(feature = "top")]
mod top;
mod workers;

pub use answer::{Answer, GatewayError};
pub use gateway::{Gateway, GatewayArgs, query, segment};

/// How every command ends; the end of the help of each.
const EXIT_CODES: &str = "\
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
    /// List the last routing decisions of a running gateway, or explain one of them.
    #[command(after_help = EXIT_CODES)]
    Decisions(decisions::DecisionsArgs),
    /// Watch a running gateway in the terminal: load, latencies, workers, slots.
    #[cfg(feature = "top")]
    #[command(after_help = EXIT_CODES)]
    Top(top::TopArgs),
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
            Self::Decisions(args) => args.run(),
            #[cfg(feature = "top")]
            Self::Top(args) => args.run(),
        };
        match outcome {
            Err(error) if error.is::<GatewayError>() => {
                let _ = writeln!(std::io::stderr(), "pointsman: {error:#}");
                Ok(ExitCode::FAILURE)
            }
            outcome => outcome,
        }
    }
}

/// Writes text to standard output. Unlike `print!`, it reports a closed pipe as an error.
///
/// # Errors
/// Standard output does not take the text.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Returns an error with its causes, each once: the text of an error may contain that of its cause.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let next = inner.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = inner.source();
    }
    text
}

/// Runs calls of a command to their end. Ctrl-C ends the process, as the default action of the signal.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
