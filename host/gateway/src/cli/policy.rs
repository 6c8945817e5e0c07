//! `pointsman policy …`: the policy author's commands, on the same runtime as the daemon's.
//!
//! Each command has a file. What they share is here: how a file is read, loaded and refused.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Subcommand;
use pointsman_policy_runtime::{Limits, LoadedPolicy, PolicyEngine, Refusal};
use pointsman_routing::Origin;

mod bench;
mod cases;
mod inspect;
mod new;
mod run;
mod test;

/// What can be done with a policy.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Tell what a policy file is, and whether this host would admit it.
    Inspect(inspect::InspectArgs),
    /// Run the cases of a cases.toml against a compiled policy, loaded as the daemon loads it.
    Test(test::TestArgs),
    /// Decide recorded decisions again with a compiled policy, and tell where it differs.
    Run(run::RunArgs),
    /// Measure a compiled policy: microseconds a call, milliseconds to load, bytes of the file.
    Bench(bench::BenchArgs),
    /// Write a Rust project folder for a new policy, which builds outside this repository.
    New(new::NewArgs),
}

impl PolicyCommand {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Inspect(args) => args.run(),
            Self::Test(args) => args.run(),
            Self::Run(args) => args.run(),
            Self::Bench(args) => args.run(),
            Self::New(args) => args.run(),
        }
    }
}

/// A policy file that was read, and the engine it is loaded into.
struct PolicyFile {
    path: PathBuf,
    bytes: Vec<u8>,
    engine: PolicyEngine,
}

impl PolicyFile {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = read(path)?;
        let engine = PolicyEngine::new(Limits::default())
            .map_err(|error| anyhow::anyhow!("the policy engine: {error:#}"))?;
        Ok(Self { path: path.to_owned(), bytes, engine })
    }

    /// Admission, configure, probe and warm instances, as in the daemon.
    fn load(&self, settings: &str) -> Result<LoadedPolicy, Refusal> {
        pointsman_policy_runtime::load(&self.engine, &self.bytes, Origin::File(self.path.clone()), settings)
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn refused(path: &Path, refusal: &Refusal) -> anyhow::Error {
    anyhow::anyhow!("{}: refused ({}): {refusal}", path.display(), refusal.kind())
}
