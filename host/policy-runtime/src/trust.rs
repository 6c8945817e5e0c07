//! Decides which policy files are trusted: signatures by trusted keys, and pinned digests. Both are checked
//! before any byte of a file is parsed.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use minisign_verify::{Error, PublicKey, Signature};
use parking_lot::Mutex;
use pointsman_routing::Digest;

use crate::{formula::FORMULA_SUFFIX, refusal::Refusal};

/// Conditions that a policy file must meet before it is parsed.
#[derive(Clone, Default)]
pub struct TrustRules {
    /// Every file must be signed with one of these keys. `None` if signatures are not required.
    keys: Option<Vec<PublicKey>>,
    /// Pinned digests, by path in the policy directory without `.wasm`.
    pins: BTreeMap<String, Digest>,
    /// Content that signatures must have; `None` if a signature is valid for every path and version.
    binding: Option<Binding>,
}

/// Signatures name the path and the version of their file in the trusted comment: `slot=prefill version=7`.
#[derive(Clone, Default)]
struct Binding {
    /// Smallest version, by path without `.wasm`.
    min_versions: BTreeMap<String, u64>,
    /// Largest version that was installed since the start, by path.
    installed: Arc<Mutex<BTreeMap<String, u64>>>,
}

/// The path and the version that a signature names.
#[derive(Clone, Debug)]
pub(crate) struct SignedVersion {
    name: String,
    version: u64,
}

impl TrustRules {
    /// Makes rules that require signatures when there are `keys`, and the digests in `pins`.
    ///
    /// # Errors
    /// The text names the first key that is not a minisign public key.
    pub fn new(keys: Option<&[String]>, pins: BTreeMap<String, Digest>) -> Result<Self, String> {
        let key = |text: &String| {
            // A key as `minisign -G` prints it, or the content of its `.pub` file.
            let text = text.trim();
            let line = text.lines().last().unwrap_or(text);
            PublicKey::from_base64(line)
                .map_err(|error| format!("`{line}` is not a minisign public key: {error}"))
        };
        let keys = keys.map(|keys| keys.iter().map(key).collect::<Result<Vec<_>, _>>()).transpose()?;
        Ok(Self { keys, pins, binding: None })
    }

    /// Requires that a signature names the path of its file and a version that is neither smaller than the
    /// one in `min_versions` nor than one installed before: an older signed file cannot take the place of a
    /// newer one.
    #[must_use]
    pub fn binding(mut self, min_versions: BTreeMap<String, u64>) -> Self {
        self.binding = Some(Binding { min_versions, ..Binding::default() });
        self
    }

    /// Takes over which versions were installed under the rules before these.
    #[must_use]
    pub(crate) fn following(mut self, before: &Self) -> Self {
        if let (Some(binding), Some(before)) = (&mut self.binding, &before.binding) {
            binding.installed = before.installed.clone();
        }
        self
    }

    /// Checks the signature and the pin of `file`. `signature` reads the text of its signature file. Returns
    /// what the signature names, if it has to: the caller passes it to [`Self::installed`].
    pub(crate) fn check(
        &self,
        file: &Path,
        bytes: &[u8],
        digest: Digest,
        signature: impl FnOnce() -> Option<String>,
    ) -> Result<Option<SignedVersion>, Refusal> {
        let mut version = None;
        if let Some(keys) = &self.keys {
            let text = signature().ok_or(Refusal::Unsigned)?;
            let comment = check_signature(keys, bytes, &text)?;
            let binding = self.binding.as_ref();
            version = binding.map(|binding| binding.check(&name_of(file), &comment)).transpose()?;
        }
        self.check_pin(file, digest)?;
        Ok(version)
    }

    /// Records that a signed version was installed. Smaller ones are refused from now on.
    pub(crate) fn installed(&self, SignedVersion { name, version }: &SignedVersion) {
        if let Some(binding) = &self.binding {
            let mut installed = binding.installed.lock();
            let largest = installed.entry(name.clone()).or_default();
            *largest = (*largest).max(*version);
        }
    }

    /// Checks that the digest is the pinned one, when `file` has a pin.
    pub(crate) fn check_pin(&self, file: &Path, digest: Digest) -> Result<(), Refusal> {
        match self.pins.get(&name_of(file)) {
            Some(wanted) if *wanted != digest => Err(Refusal::PinMismatch { found: digest, pinned: *wanted }),
            _ => Ok(()),
        }
    }
}

impl Binding {
    /// Checks a trusted comment and returns what it names.
    fn check(&self, name: &str, comment: &str) -> Result<SignedVersion, Refusal> {
        let word = |key: &str| {
            let mut words = comment.split_ascii_whitespace();
            words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let refuse = |problem: String| Err(Refusal::NotBound { name: name.to_owned(), problem });
        match word("slot") {
            None => return refuse("its trusted comment names no slot".to_owned()),
            Some(slot) if slot != name => return refuse(format!("it is for `{slot}`")),
            Some(_) => {}
        }
        let Some(version) = word("version").and_then(|version| version.parse().ok()) else {
            return refuse("its trusted comment names no version".to_owned());
        };
        let installed = self.installed.lock().get(name).copied().unwrap_or(0);
        let configured = self.min_versions.get(name).copied().unwrap_or(0);
        if version < installed.max(configured) {
            let why = if installed >= configured {
                format!("version {installed} was installed")
            } else {
                format!("`min_versions` demands {configured}")
            };
            return refuse(format!("it is for version {version}, and {why}"));
        }
        Ok(SignedVersion { name: name.to_owned(), version })
    }
}

/// Path of a file without `.wasm` or `.formula.toml`, as pins and signatures name it.
pub(crate) fn name_of(file: &Path) -> String {
    let name = file.to_string_lossy();
    match name.strip_suffix(FORMULA_SUFFIX) {
        Some(name) => name.to_owned(),
        None => file.with_extension("").to_string_lossy().into_owned(),
    }
}

/// Returns the signature's trusted comment, which is signed, too.
fn check_signature(keys: &[PublicKey], bytes: &[u8], text: &str) -> Result<String, Refusal> {
    let signature = Signature::decode(text).map_err(|error| Refusal::BadSignature(error.to_string()))?;
    let mut refusal = Refusal::UntrustedKey;
    for key in keys {
        match key.verify(bytes, &signature, false) {
            Ok(()) => return Ok(signature.trusted_comment().to_owned()),
            Err(Error::UnexpectedKeyId) => {}
            Err(Error::InvalidSignature) => refusal = Refusal::Tampered,
            Err(error) => refusal = Refusal::BadSignature(error.to_string()),
        }
    }
    Err(refusal)
}

impl std::fmt::Debug for TrustRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let keys = self.keys.as_ref().map(Vec::len);
        f.debug_struct("TrustRules").field("keys", &keys).field("pins", &self.pins).finish_non_exhaustive()
    }
}
