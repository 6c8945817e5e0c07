//! Reads, compiles and loads a policy file for a command, with the limits from the command line.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use pointsman_policy_runtime::{
    Access, Capacity, CompiledPolicy, Limits, LoadedPolicy, PolicyEngine, Refusal,
};
use pointsman_routing::Origin;

use crate::output::spinner;

/// Limits of a policy instance. A limit that is not given has the gateway's default.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Linear memory of an instance in bytes, as `policies.memory_bytes` of the gateway [default: 16777216].
    #[arg(long, value_name = "BYTES")]
    memory_bytes: Option<usize>,
    /// CPU time of a call in milliseconds, as `policies.deadline` of the gateway [default: 2].
    #[arg(long, value_name = "MS")]
    deadline_ms: Option<u64>,
}

impl LimitArgs {
    pub(crate) fn limits(&self) -> Limits {
        let limits = Limits::default();
        Limits {
            memory_bytes: self.memory_bytes.unwrap_or(limits.memory_bytes),
            deadline: self.deadline_ms.map_or(limits.deadline, Duration::from_millis),
            ..limits
        }
    }
}

/// A policy file after it was read, checked and compiled.
pub(crate) struct PolicyFile {
    path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    limits: Limits,
    compiled: CompiledPolicy,
    /// All grants. The commands judge the policy itself; `inspect` lists what an operator must grant.
    pub(crate) access: Access,
}

impl PolicyFile {
    pub(crate) fn read(path: &Path, limits: &LimitArgs) -> anyhow::Result<Self> {
        let bytes = read(path)?;
        let engine = PolicyEngine::new(limits.limits(), Capacity::detect())
            .map_err(|error| anyhow::anyhow!("cannot create the policy engine: {error:#}"))?;
        let access = Access::new(&Access::ALL);
        let _spinner = spinner(format!("compiling {}", path.display()));
        let compiled = pointsman_policy_runtime::compile(&engine, &bytes, &access)
            .map_err(|refusal| refused(path, &refusal))?;
        Ok(Self { path: path.to_owned(), bytes, limits: limits.limits(), compiled, access })
    }

    /// Configures and probes the policy and warms instances, as the gateway does.
    pub(crate) fn load(&self, settings: &str) -> Result<LoadedPolicy, Refusal> {
        self.compiled.configure(Origin::File(self.path.clone()), settings)
    }

    /// Loads the policy on an engine that counts instructions. Counting slows a call down, so each call may
    /// take ten times the deadline.
    pub(crate) fn counting(&self, settings: &str) -> anyhow::Result<LoadedPolicy> {
        let Limits { deadline, configure_deadline, .. } = self.limits;
        let limits =
            Limits { deadline: deadline * 10, configure_deadline: configure_deadline * 10, ..self.limits };
        let engine = PolicyEngine::counting(limits, Capacity::detect())
            .map_err(|error| anyhow::anyhow!("cannot create the counting policy engine: {error:#}"))?;
        let policy = pointsman_policy_runtime::compile(&engine, &self.bytes, &self.access)
            .and_then(|compiled| compiled.configure(Origin::File(self.path.clone()), settings));
        policy.map_err(|refusal| refused(&self.path, &refusal))
    }
}

pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

pub(crate) fn refused(path: &Path, refusal: &Refusal) -> anyhow::Error {
    anyhow::anyhow!("{}: refused ({}): {refusal}", path.display(), refusal.kind())
}
