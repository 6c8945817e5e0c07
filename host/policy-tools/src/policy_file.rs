//! Reads, compiles and loads a policy file for a command, with the limits from the command line.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER};
use pointsman_policy_runtime::{
    Access, Capacity, CompiledPolicy, FORMULA_SUFFIX, FormulaSettings, Limits, LoadedPolicy, PolicyEngine,
    Refusal, digest,
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
    /// Settings of a formula file, and the filter of its `keep` when it ranks, too.
    formulas: Option<(String, Option<LoadedPolicy>)>,
    /// All grants. The commands judge the policy itself; `inspect` lists what an operator must grant.
    pub(crate) access: Access,
}

impl PolicyFile {
    pub(crate) fn read(path: &Path, limits: &LimitArgs) -> anyhow::Result<Self> {
        Self::read_hashing(path, limits, 0)
    }

    /// As [`Self::read`]; the names in a formula file are hashed with this salt.
    pub(crate) fn read_hashing(path: &Path, limits: &LimitArgs, salt: u64) -> anyhow::Result<Self> {
        let bytes = read(path)?;
        if !path.to_string_lossy().ends_with(FORMULA_SUFFIX) {
            let access = Access::new(&Access::ALL);
            let (limits, compiled) = compiled(path, &bytes, limits, &access)?;
            return Ok(Self { path: path.to_owned(), bytes, limits, compiled, formulas: None, access });
        }
        let text = std::str::from_utf8(&bytes).with_context(|| path.display().to_string())?;
        let settings = FormulaSettings::of_file(text, salt);
        let settings = settings.map_err(|why| refused(path, &Refusal::Formula(why)))?;
        Self::of_formulas(path, settings, &bytes, limits)
    }

    /// Makes the built-in policy `formula` with these settings. `content` identifies them.
    pub(crate) fn of_formulas(
        path: &Path,
        settings: FormulaSettings,
        content: &[u8],
        limits: &LimitArgs,
    ) -> anyhow::Result<Self> {
        let access = Access::new(&Access::ALL);
        let part = |bytes: &[u8]| -> anyhow::Result<_> {
            let (limits, compiled) = compiled(path, bytes, limits, &access)?;
            Ok((limits, compiled.identified_by(digest(content))))
        };
        let FormulaSettings { keep, rank } = settings;
        let (bytes, settings, keep) = match (keep, rank) {
            (Some(keep), None) => (FORMULA_FILTER, keep, None),
            (keep, rank) => (FORMULA, rank.unwrap_or_else(|| "{}".to_owned()), keep),
        };
        let load = |keep: String| {
            let loaded = part(FORMULA_FILTER)?.1.configure(Origin::File(path.to_owned()), &keep);
            loaded.map_err(|refusal| refused(path, &refusal))
        };
        let formulas = Some((settings, keep.map(load).transpose()?));
        let (limits, compiled) = part(bytes)?;
        Ok(Self { path: path.to_owned(), bytes: bytes.to_vec(), limits, compiled, formulas, access })
    }

    /// Returns the filter in front of the policy: `keep` of a formula file.
    pub(crate) fn filter(&self) -> Option<&LoadedPolicy> {
        self.formulas.as_ref()?.1.as_ref()
    }

    /// Configures and probes the policy and warms instances, as the gateway does.
    pub(crate) fn load(&self, settings: &str) -> Result<LoadedPolicy, Refusal> {
        let settings = self.formulas.as_ref().map_or(settings, |(own, _)| own);
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
        let settings = self.formulas.as_ref().map_or(settings, |(own, _)| own);
        let policy = pointsman_policy_runtime::compile(&engine, &self.bytes, &self.access)
            .and_then(|compiled| compiled.configure(Origin::File(self.path.clone()), settings));
        policy.map_err(|refusal| refused(&self.path, &refusal))
    }
}

fn compiled(
    path: &Path,
    bytes: &[u8],
    limits: &LimitArgs,
    access: &Access,
) -> anyhow::Result<(Limits, CompiledPolicy)> {
    let engine = PolicyEngine::new(limits.limits(), Capacity::detect())
        .map_err(|error| anyhow::anyhow!("cannot create the policy engine: {error:#}"))?;
    let _spinner = spinner(format!("compiling {}", path.display()));
    let compiled = pointsman_policy_runtime::compile(&engine, bytes, access);
    Ok((limits.limits(), compiled.map_err(|refusal| refused(path, &refusal))?))
}

pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

pub(crate) fn refused(path: &Path, refusal: &Refusal) -> anyhow::Error {
    anyhow::anyhow!("{}: refused ({}): {refusal}", path.display(), refusal.kind())
}
