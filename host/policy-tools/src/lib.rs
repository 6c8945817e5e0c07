//! The commands of policy authors (`pointsman policy …`), and the replay of recorded decisions.
//!
//! The commands load a policy with the same runtime as the gateway, so a policy that passes here is admitted
//! there. This crate contains no HTTP server and does not know the gateway: commands for a running gateway
//! use its admin port.

use std::process::ExitCode;

use clap::Subcommand;
use pointsman_policy_admin::PolicyAdminCommand;

mod bench;
mod build;
mod dev;
mod facts;
mod inspect;
mod new;
mod oci;
mod one_row;
mod output;
mod place;
mod policy_file;
pub mod replay;
mod run;
mod staged;
mod test;
mod transfer;
mod user_cache;

/// Commands for policy files and for the policies of a running gateway.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Describe a policy file and check whether this host would load it.
    Inspect(inspect::InspectArgs),
    /// Run the cases of a cases.toml against a compiled policy.
    Test(test::TestArgs),
    /// Replay recorded decisions with a compiled policy and report differences.
    Run(run::RunArgs),
    /// Measure a compiled policy: time per call, time to load, file size.
    Bench(bench::BenchArgs),
    /// Create a project directory for a new policy, with all that it needs.
    New(new::NewArgs),
    /// After each save of a policy: build it, run its cases, replay decisions, and run it as a shadow.
    Dev(dev::DevArgs),
    /// List the facts that a policy can ask for: type, unit, range, and when they are absent.
    Facts(facts::FactsArgs),
    /// Build a policy project in Rust, Python, JavaScript or TypeScript into a component.
    Build(build::BuildArgs),
    /// Copy a policy file and its signature to a registry, an OCI image layout or a directory.
    Push(transfer::PushArgs),
    /// Copy a policy file and its signature from a registry, an OCI image layout or a directory.
    Pull(transfer::PullArgs),
    /// Commands for the policies of a gateway.
    #[command(flatten)]
    Admin(PolicyAdminCommand),
}

impl PolicyCommand {
    /// Runs the command and returns the exit code of the process.
    ///
    /// # Errors
    /// Returns an error when the command cannot do its work; the caller prints it and exits with code 2.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Inspect(args) => args.run(),
            Self::Test(args) => args.run(),
            Self::Run(args) => args.run(),
            Self::Bench(args) => args.run(),
            Self::New(args) => args.run(),
            Self::Dev(args) => args.run(),
            Self::Facts(args) => args.run(),
            Self::Build(args) => args.run(),
            Self::Push(args) => args.run(),
            Self::Pull(args) => args.run(),
            Self::Admin(command) => command.run(),
        }
    }
}
