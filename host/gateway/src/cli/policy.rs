//! `pointsman policy …`: the policy author's commands, on the same runtime as the daemon's.
//!
//! Each command has a file. What they share is here: how a file is read, loaded and refused.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use pointsman_policy_runtime::{Access, CompiledPolicy, Limits, LoadedPolicy, PolicyEngine, Refusal};
use pointsman_routing::Origin;

mod bench;
mod build;
mod cases;
mod inspect;
mod new;
mod oci;
mod remote;
mod run;
mod test;
mod transfer;

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
    /// Write a project folder for a new policy, which builds outside this repository.
    New(new::NewArgs),
    /// Build a policy's folder, in Rust, Python or JavaScript, into a component.
    Build(build::BuildArgs),
    /// Put a policy file, and its signature when there is one, into an OCI image layout or a folder.
    Push(transfer::PushArgs),
    /// Take a policy file, and its signature when there is one, out of an OCI image layout or a folder; digests are checked.
    Pull(transfer::PullArgs),
    /// Have a running daemon read its policy folder now.
    Reload(remote::Daemon),
    /// Have a running daemon roll a slot back to the content before, or end its canary or shadow.
    Rollback(remote::RollbackArgs),
    /// Have a running daemon make a slot's canary or shadow the active one.
    Promote(remote::PromoteArgs),
}

impl PolicyCommand {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Inspect(args) => args.run(),
            Self::Test(args) => args.run(),
            Self::Run(args) => args.run(),
            Self::Bench(args) => args.run(),
            Self::New(args) => args.run(),
            Self::Build(args) => args.run(),
            Self::Push(args) => args.run(),
            Self::Pull(args) => args.run(),
            Self::Reload(args) => args.reload(),
            Self::Rollback(args) => args.run(),
            Self::Promote(args) => args.run(),
        }
    }
}

/// What a policy may use, as far as it is asked for; the rest is the daemon's default.
#[derive(Debug, Args)]
struct LimitArgs {
    /// Linear memory of an instance, bytes [default: 16777216]; `policies.memory_bytes` of the daemon.
    #[arg(long, value_name = "BYTES")]
    memory_bytes: Option<usize>,
    /// CPU time of a call, milliseconds [default: 2]; `policies.deadline` of the daemon.
    #[arg(long, value_name = "MS")]
    deadline_ms: Option<u64>,
}

impl LimitArgs {
    fn limits(&self) -> Limits {
        let limits = Limits::default();
        Limits {
            memory_bytes: self.memory_bytes.unwrap_or(limits.memory_bytes),
            deadline: self.deadline_ms.map_or(limits.deadline, Duration::from_millis),
            ..limits
        }
    }
}

/// A policy file that was read, admitted and compiled.
struct PolicyFile {
    path: PathBuf,
    bytes: Vec<u8>,
    limits: Limits,
    compiled: CompiledPolicy,
    /// Everything is granted: here the policy itself is the question, and `inspect` tells what a slot has to grant.
    access: Access,
}

impl PolicyFile {
    fn read(path: &Path, limits: &LimitArgs) -> anyhow::Result<Self> {
        let bytes = read(path)?;
        let engine = PolicyEngine::new(limits.limits())
            .map_err(|error| anyhow::anyhow!("the policy engine: {error:#}"))?;
        let access = Access::new(&Access::ALL);
        let compiled = pointsman_policy_runtime::compile(&engine, &bytes, &access)
            .map_err(|refusal| refused(path, &refusal))?;
        Ok(Self { path: path.to_owned(), bytes, limits: limits.limits(), compiled, access })
    }

    /// Configure, probe and warm instances, as in the daemon.
    fn load(&self, settings: &str) -> Result<LoadedPolicy, Refusal> {
        self.compiled.configure(Origin::File(self.path.clone()), settings)
    }

    /// The same, compiled anew to count its instructions. Counting takes time: its calls may take ten times as long.
    fn counting(&self, settings: &str) -> anyhow::Result<LoadedPolicy> {
        let Limits { deadline, configure_deadline, .. } = self.limits;
        let limits =
            Limits { deadline: deadline * 10, configure_deadline: configure_deadline * 10, ..self.limits };
        let engine = PolicyEngine::counting(limits).map_err(|error| anyhow::anyhow!("{error:#}"))?;
        let policy = pointsman_policy_runtime::compile(&engine, &self.bytes, &self.access)
            .and_then(|compiled| compiled.configure(Origin::File(self.path.clone()), settings));
        policy.map_err(|refusal| refused(&self.path, &refusal))
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn refused(path: &Path, refusal: &Refusal) -> anyhow::Error {
    anyhow::anyhow!("{}: refused ({}): {refusal}", path.display(), refusal.kind())
}
