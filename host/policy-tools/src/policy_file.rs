//! Reads, compiles and loads a policy file for a command, with the limits from the command line.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use pointsman_embedded_policies::{FORMULA, FORMULA_FILTER};
use pointsman_policy_runtime::{
    Access, Capacity, CompiledPolicy, FORMULA_SUFFIX, FormulaSettings, Limits, LoadedPolicy,
    MAX_FORMULA_FILE_BYTES, PolicyEngine, Refusal, digest, with_hashed_tenants,
};
use pointsman_routing::{Origin, Policy as _};

use crate::{output::spinner, user_cache};

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

    /// Returns the arguments that give another command these limits.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let bytes = self.memory_bytes.map(|bytes| format!("--memory-bytes={bytes}"));
        bytes.into_iter().chain(self.deadline_ms.map(|ms| format!("--deadline-ms={ms}"))).collect()
    }
}

/// Salt of the hashes by which policies know names.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct SaltArgs {
    /// Salt of the hashes of names in formulas, settings and cases, as `routing.hash_salt` of the gateway.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) hash_salt: u64,
}

/// A policy file after it was read, checked and compiled.
pub(crate) struct PolicyFile {
    path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    limits: Limits,
    /// Salt of the hashes of tenants in its settings.
    salt: u64,
    compiled: CompiledPolicy,
    /// Settings of a formula file, and the filter of its `keep` when it ranks, too.
    formulas: Option<(String, Option<LoadedPolicy>)>,
    /// All grants. The commands judge the policy itself; `inspect` lists what an operator must grant.
    pub(crate) access: Access,
}

impl PolicyFile {
    /// Reads and compiles a file. The code of an interpreter is compiled once and kept for later commands.
    pub(crate) fn read(path: &Path, limits: &LimitArgs) -> anyhow::Result<Self> {
        Self::read_hashing(path, limits, 0)
    }

    /// Like [`Self::read`], but hashes the names in a formula file and in settings with this salt.
    pub(crate) fn read_hashing(path: &Path, limits: &LimitArgs, salt: u64) -> anyhow::Result<Self> {
        Self::read_on(&keeping_engine(limits.limits())?, path, limits, salt)
    }

    /// Like [`Self::read`], but compiles everything again, so that the time can be measured.
    pub(crate) fn read_anew(path: &Path, limits: &LimitArgs) -> anyhow::Result<Self> {
        Self::read_on(&engine(limits.limits())?, path, limits, 0)
    }

    fn read_on(engine: &PolicyEngine, path: &Path, limits: &LimitArgs, salt: u64) -> anyhow::Result<Self> {
        let bytes = read_or_built_in(path)?;
        if !is_formula(path) {
            let access = Access::new(&Access::ALL);
            let compiled = compiled(engine, path, &bytes, &access)
                .map_err(|refusal| hinted(refused(path, &refusal), hint(&bytes, &limits.limits())))?;
            let (path, limits) = (path.to_owned(), limits.limits());
            return Ok(Self { path, bytes, limits, salt, compiled, formulas: None, access });
        }
        let settings = formulas(&bytes, salt).map_err(|refusal| refused(path, &refusal))?;
        Self::of_formulas(path, settings, &bytes, limits)
    }

    /// Returns the facts of requests and of workers that it asks for, with those of the filter before it.
    pub(crate) fn facts(&self, policy: &LoadedPolicy) -> (BTreeSet<String>, BTreeSet<String>) {
        let wants = [Some(policy), self.filter()].into_iter().flatten().map(|policy| &policy.info().wants);
        let (mut request, mut worker) = (BTreeSet::new(), BTreeSet::new());
        for wants in wants {
            request.extend(wants.request.iter().map(|fact| fact.name().to_owned()));
            worker.extend(wants.worker.iter().map(ToString::to_string));
        }
        (request, worker)
    }

    /// Makes the built-in policy `formula` with these settings. `content` identifies them.
    pub(crate) fn of_formulas(
        path: &Path,
        settings: FormulaSettings,
        content: &[u8],
        limits: &LimitArgs,
    ) -> anyhow::Result<Self> {
        let (engine, access) = (keeping_engine(limits.limits())?, Access::new(&Access::ALL));
        let part = |bytes: &[u8]| -> anyhow::Result<_> {
            let compiled = compiled(&engine, path, bytes, &access);
            Ok(compiled.map_err(|refusal| refused(path, &refusal))?.identified_by(digest(content)))
        };
        let FormulaSettings { keep, rank } = settings;
        let (bytes, settings, keep) = match (keep, rank) {
            (Some(keep), None) => (FORMULA_FILTER, keep, None),
            (keep, rank) => (FORMULA, rank.unwrap_or_else(|| "{}".to_owned()), keep),
        };
        let load = |keep: String| {
            let loaded = part(FORMULA_FILTER)?.configure(Origin::File(path.to_owned()), &keep);
            loaded.map_err(|refusal| refused(path, &refusal))
        };
        let formulas = Some((settings, keep.map(load).transpose()?));
        let (compiled, limits) = (part(bytes)?, limits.limits());
        Ok(Self { path: path.to_owned(), bytes: bytes.to_vec(), limits, salt: 0, compiled, formulas, access })
    }

    /// Returns the filter in front of the policy: `keep` of a formula file.
    pub(crate) fn filter(&self) -> Option<&LoadedPolicy> {
        self.formulas.as_ref()?.1.as_ref()
    }

    /// Configures and probes the policy and warms instances, as the gateway does.
    pub(crate) fn load(&self, settings: &str) -> Result<LoadedPolicy, Refusal> {
        self.compiled.configure(Origin::File(self.path.clone()), &self.settings(settings))
    }

    /// Returns the settings of a formula file, or these with hashes in the place of tenants.
    fn settings(&self, given: &str) -> String {
        let own = self.formulas.as_ref().map(|(own, _)| own.clone());
        own.unwrap_or_else(|| with_hashed_tenants(given, self.salt))
    }

    /// Returns the error of a command whose policy was refused.
    pub(crate) fn refused(&self, refusal: &Refusal) -> anyhow::Error {
        hinted(refused(&self.path, refusal), self.hint())
    }

    /// Returns what to try when the policy exceeds a limit; empty when a limit is not a likely reason.
    pub(crate) fn hint(&self) -> &'static str {
        hint(&self.bytes, &self.limits)
    }

    /// Loads the policy on an engine that counts instructions. Counting slows a call down, so each call may
    /// take ten times the deadline.
    pub(crate) fn counting(&self, settings: &str) -> anyhow::Result<LoadedPolicy> {
        let Limits { deadline, configure_deadline, .. } = self.limits;
        let limits =
            Limits { deadline: deadline * 10, configure_deadline: configure_deadline * 10, ..self.limits };
        let _spinner = spinner(format!("compiling {} to count instructions", self.path.display()));
        let engine = PolicyEngine::counting(limits, Capacity::detect())
            .map_err(|error| anyhow::anyhow!("cannot create the counting policy engine: {error:#}"))?;
        let settings = self.settings(settings);
        let policy = pointsman_policy_runtime::compile(&engine, &self.bytes, &self.access)
            .and_then(|compiled| compiled.configure(Origin::File(self.path.clone()), &settings));
        policy.map_err(|refusal| self.refused(&refusal))
    }
}

/// Returns whether a file has the name of a formula file.
pub(crate) fn is_formula(path: &Path) -> bool {
    path.to_string_lossy().ends_with(FORMULA_SUFFIX)
}

/// Checks the content of a formula file as the gateway does.
pub(crate) fn formulas(bytes: &[u8], salt: u64) -> Result<FormulaSettings, Refusal> {
    if bytes.len() > MAX_FORMULA_FILE_BYTES {
        return Err(Refusal::TooLarge { size: bytes.len(), limit: MAX_FORMULA_FILE_BYTES });
    }
    let text = std::str::from_utf8(bytes);
    let text = text.map_err(|_| Refusal::Formula("the file is not UTF-8; write it as text".to_owned()))?;
    FormulaSettings::of_file(text, salt).map_err(Refusal::Formula)
}

/// Makes one instance of a policy that was just built, and has it describe and configure itself. It may use
/// half of the default time for that, so that it starts on a busy machine, too.
pub(crate) fn try_start(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let limits = Limits::default();
    let engine = keeping_engine(Limits { configure_deadline: limits.configure_deadline / 2, ..limits })?;
    let policy = compiled(&engine, path, bytes, &Access::new(&Access::ALL));
    policy.and_then(|policy| policy.try_start()).map_err(|refusal| refused(path, &refusal))
}

/// An engine that keeps the code of interpreters for later commands, where it can. No answer of its policies
/// depends on real time.
fn keeping_engine(limits: Limits) -> anyhow::Result<PolicyEngine> {
    let limits = Limits { rebuild_in_call: true, ..limits };
    let kept = user_cache::dir("compiled").and_then(|dir| {
        PolicyEngine::with_cache(limits, Capacity::detect(), dir)
            .inspect_err(|error| tracing::debug!(%error, "compiled code is not kept"))
            .ok()
    });
    kept.map_or_else(|| engine(limits), Ok)
}

fn engine(limits: Limits) -> anyhow::Result<PolicyEngine> {
    PolicyEngine::new(limits, Capacity::detect())
        .map_err(|error| anyhow::anyhow!("cannot create the policy engine: {error:#}"))
}

fn compiled(
    engine: &PolicyEngine,
    path: &Path,
    bytes: &[u8],
    access: &Access,
) -> Result<CompiledPolicy, Refusal> {
    let _spinner = spinner(format!("compiling {}", path.display()));
    pointsman_policy_runtime::compile(engine, bytes, access)
}

/// Reads a file that is not larger than a policy may be.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path.is_dir() {
        let folder = path.display();
        bail!("{folder} is a folder: name the .wasm file that `pointsman policy build {folder}` makes");
    }
    let limit = Limits::default().file_bytes;
    let read = || {
        let (file, mut bytes) = (File::open(path)?, Vec::new());
        let size = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        // A pipe and a device have no size, and may never end.
        file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
        std::io::Result::Ok((size.max(bytes.len()), bytes))
    };
    match read().with_context(|| format!("cannot read {}", path.display()))? {
        (size, _) if size > limit => Err(refused(path, &Refusal::TooLarge { size, limit })),
        (_, bytes) => Ok(bytes),
    }
}

/// Least size of a file that has an interpreter in it, bytes.
const INTERPRETER_BYTES: usize = 4 << 20;
/// Limits that suffice for interpreters: bytes of memory, and CPU time of a call.
const INTERPRETER_LIMITS: (usize, Duration) = (64 << 20, Duration::from_millis(20));

fn hint(bytes: &[u8], limits: &Limits) -> &'static str {
    let (memory, deadline) = INTERPRETER_LIMITS;
    if bytes.len() >= INTERPRETER_BYTES && (limits.memory_bytes < memory || limits.deadline < deadline) {
        "; a policy in Python or JavaScript needs `--memory-bytes 67108864 --deadline-ms 20`"
    } else {
        ""
    }
}

fn hinted(error: anyhow::Error, hint: &str) -> anyhow::Error {
    anyhow::anyhow!("{error:#}{hint}")
}

/// Reads a file, or returns the built-in policy of that name where there is no such file.
pub(crate) fn read_or_built_in(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path.exists() {
        return read(path);
    }
    match path.to_str().and_then(pointsman_embedded_policies::by_name) {
        Some(bytes) => Ok(bytes.to_vec()),
        None => {
            let (file, names) = (path.display(), pointsman_embedded_policies::NAMES);
            bail!(
                "{file}: no such file; build it with `pointsman policy build`, or name a built-in policy ({names})"
            )
        }
    }
}

pub(crate) fn refused(path: &Path, refusal: &Refusal) -> anyhow::Error {
    anyhow::anyhow!("{}: refused ({}): {refusal}", path.display(), refusal.kind())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t4_a_file_larger_than_a_policy_is_not_read_to_its_end() {
        // T4.14
        let error = read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(
            error,
            "/dev/zero: refused (too_large): the file has 33554433 bytes; the limit is 33554432"
        );
    }
}
