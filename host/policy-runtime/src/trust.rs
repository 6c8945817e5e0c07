//! Which policy files are trusted: signatures by trusted keys, and pinned digests. Both are checked before
//! any byte of a file is parsed.

use std::{collections::BTreeMap, path::Path};

use minisign_verify::{Error, PublicKey, Signature};
use pointsman_routing::Digest;

use crate::refusal::Refusal;

/// Conditions that a policy file must meet before it is parsed.
#[derive(Clone, Default)]
pub struct TrustRules {
    /// Every file must be signed with one of these keys. `None`: signatures are not required.
    keys: Option<Vec<PublicKey>>,
    /// Pinned digests, by path in the policy directory without `.wasm`.
    pins: BTreeMap<String, Digest>,
}

impl TrustRules {
    /// Makes rules that require signatures when there are `keys`, and the digests in `pins`.
    ///
    /// # Errors
    /// The first key that is not a minisign public key.
    pub fn new(keys: Option<&[String]>, pins: BTreeMap<String, Digest>) -> Result<Self, String> {
        let key = |text: &String| {
            // A key as `minisign -G` prints it, or the content of its `.pub` file.
            let text = text.trim();
            let line = text.lines().last().unwrap_or(text);
            PublicKey::from_base64(line)
                .map_err(|error| format!("`{line}` is not a minisign public key: {error}"))
        };
        let keys = keys.map(|keys| keys.iter().map(key).collect::<Result<Vec<_>, _>>()).transpose()?;
        Ok(Self { keys, pins })
    }

    /// Checks the signature and the pin of `file`. `signature` reads the text of its signature file.
    pub(crate) fn check(
        &self,
        file: &Path,
        bytes: &[u8],
        digest: Digest,
        signature: impl FnOnce() -> Option<String>,
    ) -> Result<(), Refusal> {
        if let Some(keys) = &self.keys {
            let text = signature().ok_or(Refusal::Unsigned)?;
            check_signature(keys, bytes, &text)?;
        }
        self.check_pin(file, digest)
    }

    /// Checks that the digest is the pinned one, when `file` has a pin.
    pub(crate) fn check_pin(&self, file: &Path, digest: Digest) -> Result<(), Refusal> {
        let name = file.with_extension("");
        match self.pins.get(&*name.to_string_lossy()) {
            Some(wanted) if *wanted != digest => Err(Refusal::PinMismatch { found: digest, pinned: *wanted }),
            _ => Ok(()),
        }
    }
}

fn check_signature(keys: &[PublicKey], bytes: &[u8], text: &str) -> Result<(), Refusal> {
    let signature = Signature::decode(text).map_err(|error| Refusal::BadSignature(error.to_string()))?;
    let mut refusal = Refusal::UntrustedKey;
    for key in keys {
        match key.verify(bytes, &signature, false) {
            Ok(()) => return Ok(()),
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
        f.debug_struct("TrustRules").field("keys", &keys).field("pins", &self.pins).finish()
    }
}
