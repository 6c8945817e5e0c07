//! Who may bring policies: signatures by trusted keys, and digests that are written down. Both are looked at before a byte of a
//! file is parsed.

use std::{collections::BTreeMap, path::Path};

use minisign_verify::{Error, PublicKey, Signature};
use pointsman_routing::Digest;

use crate::refusal::Refusal;

/// What a file must show to be looked at.
#[derive(Clone, Default)]
pub struct TrustRules {
    /// Keys of which one must have signed every file; `None`: files need no signature.
    keys: Option<Vec<PublicKey>>,
    /// The digest that a file must have, by its path in the folder without `.wasm`.
    pins: BTreeMap<String, Digest>,
}

impl TrustRules {
    /// A trust that asks for signatures when there are `keys`, and for the digests in `pins`.
    ///
    /// # Errors
    /// Names the first key that is none.
    pub fn new(keys: Option<&[String]>, pins: BTreeMap<String, Digest>) -> Result<Self, String> {
        let key = |text: &String| {
            // A key as `minisign -G` prints it, or the whole of its `.pub` file.
            let text = text.trim();
            let line = text.lines().last().unwrap_or(text);
            PublicKey::from_base64(line)
                .map_err(|error| format!("`{line}` is no minisign public key: {error}"))
        };
        let keys = keys.map(|keys| keys.iter().map(key).collect::<Result<Vec<_>, _>>()).transpose()?;
        Ok(Self { keys, pins })
    }

    /// Whether `bytes` may be looked at as `file`. `signature` reads the text of its signature file.
    pub(crate) fn check(
        &self,
        file: &Path,
        bytes: &[u8],
        digest: Digest,
        signature: impl FnOnce() -> Option<String>,
    ) -> Result<(), Refusal> {
        if let Some(keys) = &self.keys {
            let text = signature().ok_or(Refusal::Unsigned)?;
            signed(keys, bytes, &text)?;
        }
        self.pinned(file, digest)
    }

    /// Whether the digest is the one that is written down for `file`, when one is.
    pub(crate) fn pinned(&self, file: &Path, digest: Digest) -> Result<(), Refusal> {
        let name = file.with_extension("");
        match self.pins.get(&*name.to_string_lossy()) {
            Some(wanted) if *wanted != digest => Err(Refusal::PinMismatch { found: digest, pinned: *wanted }),
            _ => Ok(()),
        }
    }
}

fn signed(keys: &[PublicKey], bytes: &[u8], text: &str) -> Result<(), Refusal> {
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
