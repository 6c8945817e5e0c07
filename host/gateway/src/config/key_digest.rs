//! Digests of keys: the gateway does not know the keys themselves.

use std::{fmt, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use sha2::{Digest, Sha256};

/// Limits of an argon2id digest: each verification takes this memory and these passes at most.
const MAX_MEMORY_KIB: u32 = 64 * 1024;
const MAX_PASSES: u32 = 8;
const MAX_LANES: u32 = 4;
/// Maximum length of a digest's text, bytes.
pub(super) const MAX_TEXT: usize = 512;
/// Keys whose digests stood in this project's documentation. Everyone knows them.
const PUBLISHED_KEYS: [&str; 2] = ["abc", "def"];
/// A digest that stood there, too.
const PUBLISHED_ARGON2ID: &str =
    "$argon2id$v=19$m=19456,t=2,p=1$c2FsdHNhbHRzYWx0$Pk5YwVfvZq2xCzqVbXwV0m3b3Q5v2X0n5V8mZc0X1yM";

/// The digest of a key.
#[derive(Clone, PartialEq, Eq)]
pub enum KeyDigest {
    /// SHA-256: for keys that were made at random.
    Sha256([u8; 32]),
    /// Argon2id in the PHC format: for keys that people made up.
    Argon2id(Arc<str>),
}

impl KeyDigest {
    /// Returns the SHA-256 digest of a key.
    #[must_use]
    pub fn sha256(key: &str) -> Self {
        Self::Sha256(sha256(key))
    }

    /// Returns an argon2id digest of a key with a random salt.
    ///
    /// # Errors
    /// The key is too long for argon2.
    pub fn argon2id(key: &str) -> anyhow::Result<Self> {
        // OWASP's smallest parameters: 19 MiB, 2 passes.
        let salt = rand::random::<[u8; 16]>();
        let phc = argon2::hash_encoded(key.as_bytes(), &salt, &argon2::Config::owasp2());
        let phc = phc.map_err(|error| anyhow::anyhow!("cannot compute the argon2id digest: {error}"))?;
        Ok(Self::Argon2id(phc.into()))
    }

    /// Parses `sha256:HEX` or `$argon2id$…`.
    ///
    /// # Errors
    /// The message says what is wrong. It does not show the text, which may be a key.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(hex) = text.strip_prefix("sha256:") {
            let digest = from_hex(hex);
            return digest
                .map(Self::Sha256)
                .ok_or_else(|| "`sha256:` needs 64 hexadecimal digits".to_owned());
        }
        if !text.starts_with("$argon2") || text.len() > MAX_TEXT {
            return Err("the value is not a digest: expected `sha256:HEX` or `$argon2id$…`".to_owned());
        }
        let cost = Cost::of(text).ok_or_else(|| {
            "not an argon2id digest: expected `$argon2id$v=19$m=…,t=…,p=…$SALT$HASH`".to_owned()
        })?;
        let Cost { memory, passes, lanes } = cost;
        if memory > MAX_MEMORY_KIB || passes > MAX_PASSES || lanes > MAX_LANES {
            return Err(format!(
                "argon2id with m={memory},t={passes},p={lanes} is too slow: at most m={MAX_MEMORY_KIB},\
                 t={MAX_PASSES},p={MAX_LANES}"
            ));
        }
        Ok(Self::Argon2id(text.into()))
    }

    /// Returns the reason for refusing this digest, if the documentation once showed it.
    #[must_use]
    pub(super) fn published(&self) -> Option<String> {
        let advice = "`pointsman key new` makes a key that only you know";
        match self {
            Self::Sha256(digest) => {
                let key = PUBLISHED_KEYS.iter().find(|key| sha256(key) == *digest)?;
                Some(format!(
                    "the key `{key}` was an example in the documentation, so everyone knows it: {advice}"
                ))
            }
            Self::Argon2id(phc) => (**phc == *PUBLISHED_ARGON2ID)
                .then(|| format!("this digest was an example in the documentation: {advice}")),
        }
    }
}

/// The text that [`KeyDigest::parse`] reads.
impl fmt::Display for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(digest) => {
                f.write_str("sha256:")?;
                digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            Self::Argon2id(phc) => f.write_str(phc),
        }
    }
}

/// Hides the digest: a weak key could be guessed from it.
impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha256(_) => "[sha256]",
            Self::Argon2id(_) => "[argon2id]",
        })
    }
}

/// Returns the SHA-256 digest of a text.
#[must_use]
pub(crate) fn sha256(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Returns whether `key` is the key of an argon2id digest. This is slow by design.
#[must_use]
pub(crate) fn is_key_of(key: &str, phc: &str) -> bool {
    argon2::verify_encoded(phc, key.as_bytes()).unwrap_or(false)
}

/// The parameters of an argon2id digest.
struct Cost {
    memory: u32,
    passes: u32,
    lanes: u32,
}

impl Cost {
    /// Reads the parameters of a digest that is complete; `None` when it is not.
    fn of(phc: &str) -> Option<Self> {
        let mut parts = phc.strip_prefix("$argon2id$v=19$")?.split('$');
        let (costs, salt, hash) = (parts.next()?, parts.next()?, parts.next()?);
        let bytes = |text| BASE64_STANDARD_NO_PAD.decode(text).ok().map(|bytes| bytes.len());
        if parts.next().is_some() || bytes(salt)? < 8 || !(16..=64).contains(&bytes(hash)?) {
            return None;
        }
        let mut costs = costs.split(',');
        let mut cost = |name: &str| costs.next()?.strip_prefix(name)?.parse().ok().filter(|cost| *cost > 0);
        let cost = Self { memory: cost("m=")?, passes: cost("t=")?, lanes: cost("p=")? };
        costs.next().is_none().then_some(cost)
    }
}

fn from_hex(hex: &str) -> Option<[u8; 32]> {
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut digest = [0; 32];
    for (index, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_printed_as_it_is_parsed_and_hidden_in_debug() {
        let slow = KeyDigest::argon2id("a.secret").unwrap();
        for digest in [KeyDigest::sha256("k"), slow.clone()] {
            assert_eq!(KeyDigest::parse(&digest.to_string()), Ok(digest.clone()));
            assert!(!format!("{digest:?}").contains(&digest.to_string()[8..]), "{digest:?}");
        }
        let phc = slow.to_string();
        assert!(is_key_of("a.secret", &phc) && !is_key_of("a.secre", &phc) && !is_key_of("", &phc));
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(KeyDigest::sha256("abc").to_string(), abc);
    }

    #[test]
    fn what_is_no_digest_or_too_slow_is_refused_without_the_text() {
        let phc = KeyDigest::argon2id("k").unwrap().to_string();
        let slow = phc.replace("m=19456", "m=4000000");
        let other = phc.replace("argon2id", "argon2i");
        for text in ["", "sk-SECRET", "sha256:SECRET", "$argon2id$SECRET", &slow, &other, &phc[..40]] {
            let error = KeyDigest::parse(text).unwrap_err();
            assert!(!error.contains("SECRET"), "{error}");
        }
    }
}
