//! Owners of the certificates of clients and operators.

use std::{collections::HashMap, sync::Arc};

use super::caller::{Caller, CallerId, Operator, Tenant};
use crate::{
    config::{CertificateEntry, NameKind},
    tls::CertificateNames,
};

/// Owners of certificates, by a name in them. The time of a look-up depends on the names in the certificate,
/// which are bounded where they are read, and not on the number of owners.
#[derive(Clone, Debug)]
pub(crate) struct Certificates<T> {
    uris: HashMap<Box<str>, T>,
    emails: HashMap<Box<str>, T>,
    dns: HashMap<Box<str>, T>,
}

impl<T> Certificates<T> {
    fn new<N: AsRef<str>>(entries: impl IntoIterator<Item = (N, T)>) -> Self {
        let mut all = Self { uris: HashMap::new(), emails: HashMap::new(), dns: HashMap::new() };
        for (name, owner) in entries {
            let name = name.as_ref();
            let owners = match NameKind::of(name) {
                NameKind::Uri => &mut all.uris,
                NameKind::Email => &mut all.emails,
                NameKind::Dns => &mut all.dns,
            };
            owners.insert(name.into(), owner);
        }
        all
    }

    /// Returns the owner of a certificate: that of its first known URI, else of its first known e-mail
    /// address, else of its first known DNS name.
    #[must_use]
    pub(crate) fn find(&self, names: &CertificateNames) -> Option<&T> {
        let uri = names.uris.iter().find_map(|name| self.uris.get(&**name));
        let email = || names.emails.iter().find_map(|name| self.emails.get(&**name));
        let dns = || names.dns.iter().find_map(|name| self.dns.get(&**name));
        uri.or_else(email).or_else(dns)
    }

    /// Returns every owner.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &T> {
        self.uris.values().chain(self.emails.values()).chain(self.dns.values())
    }
}

impl Certificates<Caller> {
    /// Returns the certificates of clients. `salt` is the salt of the tenant hashes.
    #[must_use]
    pub(crate) fn of_clients(entries: &[CertificateEntry], salt: u64) -> Self {
        let clients = entries.iter().filter(|entry| entry.role.is_none());
        Self::new(clients.map(|entry| {
            let name = entry.matched_name();
            let tenant = (!entry.tenant.is_empty()).then(|| Tenant::new(entry.tenant.as_str(), salt));
            let caller = Caller { id: CallerId::Configured(Arc::from(&*name)), tenant };
            (name, caller)
        }))
    }
}

impl Certificates<Operator> {
    /// Returns the certificates of operators.
    #[must_use]
    pub(crate) fn of_operators(entries: &[CertificateEntry]) -> Self {
        Self::new(entries.iter().filter_map(|entry| {
            let (name, role) = (entry.matched_name(), entry.role?);
            let owner = Operator { id: Arc::from(&*name), role };
            Some((name, owner))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_counts_as_the_kind_that_its_form_says() {
        let owners = Certificates::new([("spiffe://a/b", 1), ("bot@a", 2), ("a.example", 3)]);
        let names = |uris: &[&str], emails: &[&str], dns: &[&str]| {
            let [uris, emails, dns] =
                [uris, emails, dns].map(|list| list.iter().map(|&n| n.into()).collect());
            CertificateNames { dns, uris, emails }
        };
        assert_eq!(owners.find(&names(&["spiffe://x", "spiffe://a/b"], &["bot@a"], &[])), Some(&1));
        assert_eq!(owners.find(&names(&[], &["bot@a"], &["a.example"])), Some(&2));
        assert_eq!(owners.find(&names(&[], &[], &["b.example", "a.example"])), Some(&3));
        // An authority that lets clients choose a DNS name does not let them take a URI.
        assert_eq!(owners.find(&names(&["a.example"], &["spiffe://a/b"], &["bot@a", "spiffe://a/b"])), None);
    }
}
