//! `[policies]`: where policies come from, which files are trusted, and the limits of a policy.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use pointsman_policy_runtime::{CompileLimits, TrustRules};
use pointsman_routing::{Digest, OnFailure, SlotKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration, settings::PolicySettings, slots::SlotEntry};

/// Where policies come from, which files are trusted, and their limits.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Policies {
    /// Directory that is watched.
    pub dir: Option<PathBuf>,
    /// CPU time limit of a call.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub deadline: Duration,
    /// CPU time limit of instantiation, `describe` and `configure` together.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub configure_deadline: Duration,
    /// CPU time limit of one batch of outcomes, off the request path.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub observe_deadline: Duration,
    /// Memory limit of an instance in bytes.
    pub memory_bytes: usize,
    /// Reaction of the router to a failure of a policy.
    pub on_failure: OnFailure,
    /// Number of calls during which a new generation is on probation.
    pub probation_calls: u64,
    /// Share of failed calls above which a generation on probation is rolled back.
    pub probation_failure_share: f64,
    /// Quiet time after a change of the directory before it is read.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub debounce: Duration,
    /// Interval of unconditional scans of the directory.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub rescan: Duration,
    /// Refuse files without a signature by a trusted key.
    pub require_signed: bool,
    /// Trusted minisign public keys.
    pub trusted_keys: Vec<String>,
    /// Files with trusted minisign public keys.
    pub trusted_key_files: Vec<PathBuf>,
    /// Refuse signatures that do not name the file's path and a version that is not older.
    pub signatures_bind: bool,
    /// Smallest version that a signature may name, by the file's path in the directory without `.wasm`.
    pub min_versions: BTreeMap<String, u64>,
    /// Digest (`sha256:…`) that a file must have, by its path in the directory without `.wasm`.
    pub pins: BTreeMap<String, String>,
    /// Directory in which compiled policies are cached between starts.
    pub compile_cache: Option<PathBuf>,
    /// Address space limit of the process that compiles a file, in bytes.
    pub compile_memory_bytes: u64,
    /// CPU time limit of that process.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub compile_cpu: Duration,
    /// Time limit of that process.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub compile_timeout: Duration,
    /// Program that compiles files: the daemon's own binary. `None` if this process compiles them.
    #[serde(skip)]
    pub compiler: Option<PathBuf>,
    /// Content of the slots, by slot.
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// Least address space of the process that compiles: what the binary and its stacks take.
const MIN_COMPILE_BYTES: u64 = 512 << 20;

/// Trusted keys, and pinned digests by file.
type Signatures = (Vec<String>, BTreeMap<String, Digest>);

impl Default for Policies {
    fn default() -> Self {
        let compile = CompileLimits::default();
        Self {
            dir: None,
            deadline: Duration::from_millis(2),
            configure_deadline: Duration::from_millis(50),
            observe_deadline: Duration::from_millis(20),
            memory_bytes: 16 * 1024 * 1024,
            on_failure: OnFailure::Fallback,
            probation_calls: 1_000,
            probation_failure_share: 0.05,
            debounce: Duration::from_millis(20),
            rescan: Duration::from_secs(5),
            require_signed: false,
            trusted_keys: Vec::new(),
            trusted_key_files: Vec::new(),
            signatures_bind: false,
            min_versions: BTreeMap::new(),
            pins: BTreeMap::new(),
            compile_cache: None,
            compile_memory_bytes: compile.memory_bytes,
            compile_cpu: compile.cpu,
            compile_timeout: compile.timeout,
            compiler: None,
            slots: BTreeMap::new(),
        }
    }
}

impl Policies {
    /// Returns what is wrong here.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let share = self.probation_failure_share;
        if !(0.0..=1.0).contains(&share) {
            let message = format!("`{share}` is not a share: expected 0 to 1");
            problems.push(Problem::new("policies.probation_failure_share", message));
        }
        if self.compile_memory_bytes < MIN_COMPILE_BYTES {
            let message = format!(
                "`{}` is too little for any policy: expected {MIN_COMPILE_BYTES} or more",
                self.compile_memory_bytes
            );
            problems.push(Problem::new("policies.compile_memory_bytes", message));
        }
        if let Some(dir) = self.dir.as_ref().filter(|dir| !dir.is_dir()) {
            let message = match dir.try_exists() {
                Ok(false) => format!("`{}` does not exist; create it", dir.display()),
                _ => format!("`{}` is not a directory; name one", dir.display()),
            };
            problems.push(Problem::new("policies.dir", message));
        }
        let keys = !self.trusted_keys.is_empty() || !self.trusted_key_files.is_empty();
        if self.require_signed && !keys {
            let message = "`true` without `trusted_keys` would refuse every file: add a key";
            problems.push(Problem::new("policies.require_signed", message));
        }
        if keys && !self.require_signed {
            let message = "keys have no effect without `require_signed = true`: add it or remove the keys";
            problems.push(Problem::new("policies.trusted_keys", message));
        }
        if self.signatures_bind && !self.require_signed {
            let message = "`true` has no effect without `require_signed = true`: add it or remove this key";
            problems.push(Problem::new("policies.signatures_bind", message));
        }
        if !self.min_versions.is_empty() && !self.signatures_bind {
            let message = "versions have no effect without `signatures_bind = true`: add it or remove them";
            problems.push(Problem::new("policies.min_versions", message));
        }
        problems.extend(self.signatures().err().unwrap_or_default());
        for (kind, entry) in &self.slots {
            problems.extend(entry.problems(&format!("policies.slots.{kind}"), *kind, self.dir.is_some()));
        }
        problems
    }

    /// Returns the trusted keys, those from files included, and the pinned digests.
    ///
    /// # Errors
    /// All keys and pins that are not valid.
    pub(super) fn signatures(&self) -> Result<Signatures, Vec<Problem>> {
        let (mut problems, mut keys, mut pins) = (Vec::new(), Vec::new(), BTreeMap::new());
        let valid = |key: &String| {
            TrustRules::new(Some(std::slice::from_ref(key)), BTreeMap::new()).map(|_| key.clone())
        };
        for (index, key) in self.trusted_keys.iter().enumerate() {
            match valid(key) {
                Ok(key) => keys.push(key),
                Err(error) => problems.push(Problem::new(format!("policies.trusted_keys[{index}]"), error)),
            }
        }
        for (index, file) in self.trusted_key_files.iter().enumerate() {
            let text = std::fs::read_to_string(file).map_err(|error| error.to_string());
            match text.and_then(|text| valid(&text)) {
                Ok(key) => keys.push(key),
                Err(error) => problems.push(Problem::new(
                    format!("policies.trusted_key_files[{index}]"),
                    format!("cannot use `{}`: {error}", file.display()),
                )),
            }
        }
        for (name, pin) in &self.pins {
            match digest(pin) {
                Some(digest) => drop(pins.insert(name.clone(), digest)),
                None => problems.push(Problem::new(
                    format!("policies.pins.{name}"),
                    format!("`{pin}` is not a digest: expected `sha256:` and 64 hex digits"),
                )),
            }
        }
        if problems.is_empty() { Ok((keys, pins)) } else { Err(problems) }
    }
}

impl PolicySettings {
    /// Returns the check that files have to pass.
    ///
    /// # Errors
    /// A trusted key is not a minisign public key; validation rules this out.
    pub fn trust(&self) -> Result<TrustRules, String> {
        let keys = self.require_signed.then_some(self.trusted_keys.as_slice());
        let rules = TrustRules::new(keys, self.pins.clone())?;
        Ok(if self.signatures_bind { rules.binding(self.min_versions.clone()) } else { rules })
    }
}

fn digest(pin: &str) -> Option<Digest> {
    let hex = pin.strip_prefix("sha256:").filter(|hex| hex.len() == 64 && hex.is_ascii())?;
    let mut bytes = [0_u8; 32];
    for (byte, place) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(hex.get(place..place + 2)?, 16).ok()?;
    }
    Some(Digest(bytes))
}
