//! The public keys of an identity server (JWKS).

use serde::Deserialize;

use super::public_key::{Jwk, PublicKey};
use crate::config::JwtAlgorithm;

/// Maximum size of a set, bytes.
pub(crate) const MAX_BYTES: usize = 256 * 1024;
/// Maximum number of keys in a set.
const MAX_KEYS: usize = 64;
/// Maximum number of keys that are tried for a token.
const MAX_FITTING: usize = 8;

/// The keys that may verify tokens.
#[derive(Debug, Default)]
pub(crate) struct KeySet(Vec<PublicKey>);

#[derive(Deserialize)]
struct KeySetJson {
    keys: Vec<serde_json::Value>,
}

impl KeySet {
    /// Reads a set. Keys that cannot verify a signature are left out.
    ///
    /// # Errors
    /// The text says what is wrong with the set.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("the set has more than {MAX_BYTES} bytes"));
        }
        let set: KeySetJson = serde_json::from_slice(bytes)
            .map_err(|error| format!("the set is not JSON of the form {{\"keys\": […]}}: {error}"))?;
        if set.keys.len() > MAX_KEYS {
            return Err(format!("the set has {} keys; the limit is {MAX_KEYS}", set.keys.len()));
        }
        let keys: Vec<PublicKey> = set.keys.into_iter().filter_map(read).collect();
        if keys.is_empty() {
            return Err("the set has no key for RS256, PS256, ES256, EdDSA or the like".to_owned());
        }
        Ok(Self(keys))
    }

    /// Returns the first keys that may verify a token with this `kid` and algorithm. Without `kid`, each key
    /// of the algorithm may.
    pub(super) fn fitting(
        &self,
        id: Option<&str>,
        algorithm: JwtAlgorithm,
    ) -> impl Iterator<Item = &PublicKey> {
        let fits = move |key: &&PublicKey| (id.is_none() || key.id.as_deref() == id) && key.allows(algorithm);
        self.0.iter().filter(fits).take(MAX_FITTING)
    }
}

fn read(value: serde_json::Value) -> Option<PublicKey> {
    PublicKey::of(serde_json::from_value::<Jwk>(value).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_set_of_public_keys_is_refused() {
        let key = r#"{"kty":"oct","k":"AAAA","kid":"a"}"#;
        let many = format!(r#"{{"keys":[{}]}}"#, vec![key; 65].join(","));
        let huge = format!(r#"{{"keys":[],"x":"{}"}}"#, "x".repeat(MAX_BYTES));
        for text in ["", "{}", "[]", r#"{"keys":[]}"#, r#"{"keys":[1]}"#, &many, &huge] {
            assert!(KeySet::parse(text.as_bytes()).is_err(), "{}", &text[..text.len().min(60)]);
        }
        let only_secret = format!(r#"{{"keys":[{key}]}}"#);
        assert!(KeySet::parse(only_secret.as_bytes()).is_err());
    }
}
