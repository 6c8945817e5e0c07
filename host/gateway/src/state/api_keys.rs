//! The API keys of clients, and the tenant that each belongs to.

use std::{collections::BTreeMap, sync::Arc};

use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::config::Secret;

/// The configured keys, each with the name of its tenant.
#[derive(Clone, Debug, Default)]
pub(crate) struct ApiKeys(Vec<ApiKey>);

#[derive(Clone, Debug)]
struct ApiKey {
    key: Secret,
    tenant: Option<Arc<str>>,
}

impl ApiKeys {
    /// Returns the keys without a tenant and those of each tenant.
    #[must_use]
    pub(crate) fn new(keys: &[Secret], tenants: &BTreeMap<String, Vec<Secret>>) -> Self {
        let without = keys.iter().map(|key| ApiKey { key: key.clone(), tenant: None });
        let with = tenants.iter().flat_map(|(tenant, keys)| {
            let tenant: Arc<str> = Arc::from(tenant.as_str());
            keys.iter().map(move |key| ApiKey { key: key.clone(), tenant: Some(tenant.clone()) })
        });
        Self(without.chain(with).collect())
    }

    /// Whether no key is configured, so that requests need none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text of every key and the name of its tenant, for tests of what a reload applied.
    #[cfg(test)]
    pub(crate) fn exposed(&self) -> Vec<(&str, Option<&str>)> {
        self.0.iter().map(|key| (key.key.expose(), key.tenant.as_deref())).collect()
    }

    /// Returns the tenant of a key, `Some(None)` for a key without a tenant, `None` for an unknown key.
    ///
    /// All keys are compared, so that the time does not depend on which of them matches.
    #[must_use]
    pub(crate) fn find(&self, given: &str) -> Option<Option<&Arc<str>>> {
        let mut found = u32::MAX;
        for (position, candidate) in (0..).zip(&self.0) {
            let equal = candidate.key.expose().as_bytes().ct_eq(given.as_bytes());
            found.conditional_assign(&position, equal);
        }
        self.0.get(usize::try_from(found).ok()?).map(|key| key.tenant.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_tenant() {
        let tenants = BTreeMap::from([("team-a".to_owned(), vec!["a1".into(), "a2".into()])]);
        let keys = ApiKeys::new(&["plain".into()], &tenants);
        assert_eq!(keys.find("plain"), Some(None));
        assert_eq!(keys.find("a2").flatten().map(AsRef::as_ref), Some("team-a"));
        for wrong in ["", "a", "a11", "plai", "plainn"] {
            assert_eq!(keys.find(wrong), None, "{wrong}");
        }
        assert!(!keys.is_empty() && ApiKeys::default().is_empty());
        assert!(!format!("{keys:?}").contains("a1"), "keys are not printed");
    }
}
