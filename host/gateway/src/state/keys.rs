//! Keys by their digests: the API keys of clients, and the tokens of operators.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    sync::Arc,
};

use subtle::ConstantTimeEq;

use super::caller::{Caller, CallerId, Operator, Tenant};
use crate::config::{Credentials, KeyDigest, KeySettings, Role, Secret, sha256};

/// Maximum length of a key, bytes. A longer one is unknown.
const MAX_KEY: usize = 1024;

/// Keys, and who each belongs to.
///
/// A key is looked up by its SHA-256 digest, so the time depends neither on the number of keys nor on what a
/// wrong key has in common with a right one. A key with an argon2id digest begins with `ID.`: a wrong key
/// costs one verification at most, and none without the id of a key.
#[derive(Clone, Debug)]
pub(crate) struct Keys<T> {
    by_digest: HashMap<Sha256, T>,
    by_id: HashMap<Box<str>, SlowKey<T>>,
}

/// A key whose digest is slow to verify.
#[derive(Clone, Debug)]
pub(crate) struct SlowKey<T> {
    /// The argon2id digest.
    pub(crate) phc: Arc<str>,
    /// Owner of the key.
    pub(crate) owner: T,
}

/// Result of looking up a text among the keys.
pub(crate) enum Found<'a, T> {
    /// A key of this owner.
    Known(&'a T),
    /// A key of this owner, if it has this digest.
    Unverified(&'a SlowKey<T>),
    /// No key.
    Unknown,
}

/// A digest that is compared in constant time.
#[derive(Clone, Copy, Eq)]
struct Sha256([u8; 32]);

impl<T> Keys<T> {
    /// Returns keys with these digests. The first owner of a digest or id stays.
    fn new(keys: impl IntoIterator<Item = (Box<str>, KeyDigest, T)>) -> Self {
        let mut all = Self { by_digest: HashMap::new(), by_id: HashMap::new() };
        for (id, digest, owner) in keys {
            match digest {
                KeyDigest::Sha256(digest) => drop(all.by_digest.entry(Sha256(digest)).or_insert(owner)),
                KeyDigest::Argon2id(phc) => drop(all.by_id.entry(id).or_insert(SlowKey { phc, owner })),
            }
        }
        all
    }

    /// Returns the owner of each key.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &T> {
        self.by_digest.values().chain(self.by_id.values().map(|key| &key.owner))
    }

    /// Looks a key up.
    #[must_use]
    pub(crate) fn find(&self, given: &str) -> Found<'_, T> {
        if given.len() > MAX_KEY {
            return Found::Unknown;
        }
        if let Some(owner) = self.by_digest.get(&Sha256(sha256(given))) {
            return Found::Known(owner);
        }
        let slow = given.split_once('.').and_then(|(id, _)| self.by_id.get(id));
        slow.map_or(Found::Unknown, Found::Unverified)
    }

    /// Returns every digest and its owner, for tests of what a reload applied.
    #[cfg(test)]
    pub(crate) fn exposed(&self) -> std::collections::BTreeMap<String, &T> {
        let fast = self.by_digest.iter();
        let fast = fast.map(|(digest, owner)| (KeyDigest::Sha256(digest.0).to_string(), owner));
        fast.chain(self.by_id.values().map(|key| (key.phc.to_string(), &key.owner))).collect()
    }
}

impl Keys<Caller> {
    /// Returns the keys of clients. `salt` is the salt of the tenant hashes.
    #[must_use]
    pub(crate) fn of_clients(credentials: &Credentials, salt: u64) -> Self {
        let tenant = |name: &str| Tenant::new(name, salt);
        let of_entry = |key: &KeySettings| {
            let tenant = key.tenant.as_deref().map(tenant);
            (
                Box::from(&*key.id),
                key.digest.clone(),
                Caller { id: CallerId::Configured(Arc::from(&*key.id)), tenant },
            )
        };
        Self::new(credentials.keys.iter().chain(&credentials.dir_keys).map(of_entry))
    }
}

impl Keys<Operator> {
    /// Returns the tokens of operators.
    #[must_use]
    pub(crate) fn of_operators(credentials: &Credentials, admin_token: Option<&Secret>) -> Self {
        let one = admin_token.map(|token| {
            let id = "admin_token";
            let owner = Operator { id: Arc::from(id), role: Role::Operator };
            (Box::from(id), KeyDigest::sha256(token.expose()), owner)
        });
        let entries = credentials.operators.iter().map(|operator| {
            let owner = Operator { id: Arc::from(&*operator.id), role: operator.role };
            (Box::from(&*operator.id), operator.digest.clone(), owner)
        });
        Self::new(one.into_iter().chain(entries))
    }
}

impl PartialEq for Sha256 {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Hash for Sha256 {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

impl std::fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[sha256]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys<u8> {
        let slow = KeyDigest::argon2id("slow.secret").unwrap();
        Keys::new([("a".into(), KeyDigest::sha256("alpha"), 1), ("slow".into(), slow, 2)])
    }

    #[test]
    fn a_key_is_found_by_its_digest_and_a_slow_one_by_its_id() {
        let keys = keys();
        assert!(matches!(keys.find("alpha"), Found::Known(1)));
        assert!(matches!(keys.find("slow.anything"), Found::Unverified(SlowKey { owner: 2, .. })));
        for wrong in ["", "alph", "alphaa", "slow", "a.alpha", "other.secret", &"x".repeat(2_000)] {
            assert!(matches!(keys.find(wrong), Found::Unknown), "{wrong}");
        }
    }

    #[test]
    fn many_wrong_keys_are_unknown_and_verify_nothing() {
        let keys = keys();
        for number in 0..200_000_u32 {
            assert!(matches!(keys.find(&format!("{number}.x")), Found::Unknown));
        }
    }
}
