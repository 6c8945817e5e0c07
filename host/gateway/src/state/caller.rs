//! Senders of requests.

use std::{num::NonZeroU64, sync::Arc};

use pointsman_workers::name_hash;

use crate::config::Role;

/// Sender of a client's request, after its credentials were checked. A clone copies pointers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// What the requests of the sender are counted by.
    pub(crate) id: CallerId,
    /// Group of clients that the request counts for; `None`: none is known.
    pub(crate) tenant: Option<Tenant>,
}

/// Name of the credentials of a sender. It is as small as a name alone, because every request holds one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallerId {
    /// Id of a key, or name in a certificate, as configured.
    Configured(Arc<str>),
    /// Hash of the subject of a token, salted, so that no sender can choose a subject with the hash of
    /// another. `None`: the sender has no credentials.
    Subject(Option<NonZeroU64>),
}

impl CallerId {
    /// Name of the senders without credentials.
    pub(crate) const ANONYMOUS: Self = Self::Subject(None);
}

impl Default for CallerId {
    fn default() -> Self {
        Self::ANONYMOUS
    }
}

/// A group of clients. A clone copies a pointer and a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    /// Name as configured, or as a trusted proxy or identity server gave it. It may be a label of a metric
    /// only when the configuration names it: clients of a proxy may invent others.
    pub(crate) name: Arc<str>,
    /// Salted hash of the name, by which policies know the tenant.
    pub(crate) hash: u64,
}

/// Sender of a request to the operators' listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operator {
    /// Name in the audit log.
    pub(crate) id: Arc<str>,
    /// Role of the operator.
    pub(crate) role: Role,
}

impl Caller {
    /// Returns the name of the tenant.
    #[must_use]
    pub(crate) fn tenant_name(&self) -> Option<&str> {
        self.tenant.as_ref().map(|tenant| &*tenant.name)
    }

    /// Returns the hash of the tenant's name.
    #[must_use]
    pub(crate) fn tenant_hash(&self) -> Option<u64> {
        self.tenant.as_ref().map(|tenant| tenant.hash)
    }
}

impl Tenant {
    /// Returns the tenant of this name. `salt` is `routing.hash_salt`.
    #[must_use]
    pub(crate) fn new(name: impl Into<Arc<str>>, salt: u64) -> Self {
        let name = name.into();
        let hash = name_hash(name.as_bytes(), salt);
        Self { name, hash }
    }
}
