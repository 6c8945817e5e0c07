//! The commands `pointsman policy reload`, `rollback`, `promote` and `quarantine`, for the policies of a
//! gateway. The daemon's own program has them, and so has that of policy authors.

use std::process::ExitCode;

use clap::Subcommand;

mod lanes;
mod quarantine;
mod report;

pub use lanes::{PromoteArgs, ReloadArgs, RollbackArgs};
pub use quarantine::{Cache, QuarantineCommand};
pub use report::Report;

/// Commands for the policies of a gateway.
#[derive(Debug, Subcommand)]
pub enum PolicyAdminCommand {
    /// List or clear the policy files that ended their compiler process.
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// Make a running gateway read its policy directory now.
    Reload(ReloadArgs),
    /// Make a running gateway roll a slot back to its previous policy, or end its canary or shadow.
    Rollback(RollbackArgs),
    /// Make a running gateway promote a slot's canary or shadow to active.
    Promote(PromoteArgs),
}

impl PolicyAdminCommand {
    /// Runs the command and returns the exit code of the process.
    ///
    /// # Errors
    /// Returns an error when the command cannot do its work; the caller prints it and exits with code 2.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Quarantine(command) => command.run(),
            Self::Reload(args) => args.run(),
            Self::Rollback(args) => args.run(),
            Self::Promote(args) => args.run(),
        }
    }
}
