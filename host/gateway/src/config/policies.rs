//! `[policies]`: where policies come from, which files are trusted, and the limits of a policy.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use pointsman_config_file::{
    Report,
    duration::{millis, secs},
    section,
};
use pointsman_policy_runtime::TrustRules;
use pointsman_routing::{Digest, OnFailure, SlotKind};

use super::slots::SlotEntry;

/// Where policies come from, which files are trusted, and what a policy may use.
#[section(rules)]
pub struct Policies {
    /// Directory that is watched; FILE.wasm fills the slot of that name.
    #[key(example = "\"/etc/pointsman/policies.d\"", restart)]
    pub dir: Option<PathBuf>,
    /// CPU time of a call.
    #[key(default = millis(2), positive, restart)]
    pub deadline: Duration,
    /// CPU time until an instance is configured.
    #[key(default = millis(50), positive, restart)]
    pub configure_deadline: Duration,
    /// CPU time of a batch of outcomes, for policies that learn.
    #[key(default = millis(20), positive, restart)]
    pub observe_deadline: Duration,
    /// Memory of an instance in bytes; JavaScript and Python: 67108864, and deadline = "20ms".
    #[key(default = 16 * 1024 * 1024, restart)]
    pub memory_bytes: usize,
    /// Effect of a policy's failure: "fallback", "shed" (429) or "reject" (503).
    pub on_failure: OnFailure,
    /// Calls during which a new generation is on probation.
    #[key(default = 1_000, restart)]
    pub probation_calls: u64,
    /// Share of failed calls above which a generation on probation is rolled back, after three failures. One
    /// call beyond its deadline is enough.
    #[key(default = 0.05, range = 0.0..=1.0, reason = "is not a share", restart)]
    pub probation_failure_share: f64,
    /// Quiet time after a change of the directory before it is read.
    #[key(default = millis(20), restart)]
    pub debounce: Duration,
    /// Interval of unconditional scans of the directory.
    #[key(default = secs(5), positive, restart)]
    pub rescan: Duration,
    /// Whether files need a signature NAME.wasm.minisig by a trusted key.
    pub require_signed: bool,
    /// Trusted minisign public keys, or { file = "PATH" } with one.
    pub trusted_keys: Vec<String>,
    /// Whether a signature must name the file's path and a version that is not older. See "Signatures and
    /// pins".
    pub signatures_bind: bool,
    /// Smallest version that a signature may name, by the file's path in the directory without .wasm: {
    /// prefill = 7 }; needs signatures_bind.
    pub min_versions: BTreeMap<String, u64>,
    /// Digest that a file must have, by its path in the directory without .wasm: { prefill = "sha256:…" }, as
    /// `pointsman policy inspect` prints it.
    pub pins: BTreeMap<String, String>,
    /// Directory of compiled policies; default: compile at every start.
    #[key(example = "\"/var/cache/pointsman\"", restart)]
    pub compile_cache: Option<PathBuf>,
    /// Address space in bytes of the process that compiles a file.
    #[key(
        default = 2 << 30,
        range = MIN_COMPILE_BYTES..,
        reason = "is too little for any policy",
        restart
    )]
    pub compile_memory_bytes: u64,
    /// CPU time of that process; a file that exceeds either is quarantined.
    #[key(default = secs(60), positive, restart)]
    pub compile_cpu: Duration,
    /// Program that compiles files: the daemon's own binary. `None` if this process compiles them.
    #[serde(skip)]
    pub compiler: Option<PathBuf>,
    /// Content of a slot: prefill, decode, aggregated or decode-override. See "Slots".
    #[key(example = "prefill", nested)]
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// Least address space of the process that compiles: what the binary and its stacks take.
const MIN_COMPILE_BYTES: u64 = 512 << 20;

impl Policies {
    fn rules(&self, report: &mut Report<'_>) {
        if let Some(dir) = self.dir.as_ref().filter(|dir| !dir.is_dir()) {
            let message = match dir.try_exists() {
                Ok(false) => format!("`{}` does not exist; create it", dir.display()),
                _ => format!("`{}` is not a directory; name one", dir.display()),
            };
            report.add("dir", message);
        }
        let keys = !self.trusted_keys.is_empty();
        if self.require_signed && !keys {
            let message = "`true` without `trusted_keys` would refuse every file: add a key";
            report.add("require_signed", message);
        }
        if keys && !self.require_signed {
            let message = "keys have no effect without `require_signed = true`: add it or remove the keys";
            report.add("trusted_keys", message);
        }
        if self.signatures_bind && !self.require_signed {
            let message = "`true` has no effect without `require_signed = true`: add it or remove this key";
            report.add("signatures_bind", message);
        }
        if !self.min_versions.is_empty() && !self.signatures_bind {
            let message = "versions have no effect without `signatures_bind = true`: add it or remove them";
            report.add("min_versions", message);
        }
        for (index, key) in self.trusted_keys.iter().enumerate() {
            if let Err(error) = TrustRules::new(Some(std::slice::from_ref(key)), BTreeMap::new()) {
                report.add(&format!("trusted_keys[{index}]"), error);
            }
        }
        for (name, pin) in self.pins.iter().filter(|(_, pin)| digest(pin).is_none()) {
            let message = format!("`{pin}` is not a digest: expected `sha256:` and 64 hex digits");
            report.add(&format!("pins.{name}"), message);
        }
        for (kind, entry) in &self.slots {
            let mut slots = report.at("slots");
            entry.check_content(*kind, self.dir.is_some(), &mut slots.at(&kind.to_string()));
        }
    }

    /// Returns the check that files have to pass.
    ///
    /// # Errors
    /// A trusted key is not a minisign public key; validation rules this out.
    pub(crate) fn trust(&self) -> Result<TrustRules, String> {
        let pins = self.pins.iter().filter_map(|(name, pin)| Some((name.clone(), digest(pin)?)));
        let rules =
            TrustRules::new(self.require_signed.then_some(self.trusted_keys.as_slice()), pins.collect())?;
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
