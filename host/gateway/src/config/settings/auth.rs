//! Validated settings of authentication.

use std::{sync::Arc, time::Duration};

use ipnet::IpNet;

use crate::config::{JwtAlgorithm, KeyDigest, Role};

settings! {
    /// Who may call.
    #[allow(unreachable_pub, reason = "the macro makes all settings public")]
    AuthSettings {
        /// Whether keys may be given as they are.
        "auth.plain_api_keys" plain_api_keys: bool,
        /// API keys of clients.
        "auth.keys" keys: Vec<KeySettings>,
        /// API keys from the directory of key files.
        "auth.key_dir" dir_keys: Vec<KeySettings>,
        /// Tokens of operators.
        "auth.operators" operators: Vec<OperatorSettings>,
        /// Networks of the proxies that may name the tenant.
        "auth.trusted_proxies" trusted_proxies: Vec<IpNet>,
        /// Names in certificates of clients and operators.
        "auth.certificates" certificates: Vec<CertificateSettings>,
        /// Tokens of an identity server.
        "auth.jwt" jwt: Option<JwtSettings>,
    }
}

impl AuthSettings {
    /// Whether operators can prove who they are by something else than `server.admin_token`.
    #[must_use]
    pub(crate) fn knows_operators(&self) -> bool {
        let by_token = |jwt: &JwtSettings| !(jwt.viewers.is_empty() && jwt.operators.is_empty());
        !self.operators.is_empty()
            || self.jwt.as_ref().is_some_and(by_token)
            || self.certificates.iter().any(|entry| entry.role.is_some())
    }
}

/// A name in the certificate of a client or operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateSettings {
    /// The name; a DNS name is in lower case.
    pub name: String,
    /// Tenant that a client's requests count for.
    pub tenant: Option<String>,
    /// Role of an operator; `None` for the certificate of a client.
    pub role: Option<Role>,
}

/// An API key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySettings {
    /// Name of the key.
    pub id: String,
    /// Tenant that its requests count for.
    pub tenant: Option<String>,
    /// Digest of the key.
    pub digest: KeyDigest,
}

/// A token of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OperatorSettings {
    /// Name of the operator.
    pub id: String,
    /// Role of the operator.
    pub role: Role,
    /// Digest of the token.
    pub digest: KeyDigest,
}

/// Tokens of an identity server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JwtSettings {
    /// `iss` of every token.
    pub issuer: String,
    /// `aud` of every token: one of these.
    pub audience: Vec<String>,
    /// Where the public keys are.
    pub keys: KeySource,
    /// Algorithms of signatures; none of them is symmetric.
    pub algorithms: Vec<JwtAlgorithm>,
    /// Largest difference of the clocks.
    pub clock_skew: Duration,
    /// Claim with the name of the tenant.
    pub tenant_claim: Option<String>,
    /// Claim with the roles of operators.
    pub role_claim: Option<String>,
    /// Values of that claim for operators that may read.
    pub viewers: Vec<String>,
    /// Values of that claim for operators that may change.
    pub operators: Vec<String>,
    /// Interval of fetching the public keys.
    pub refresh: Duration,
    /// Smallest time between two fetches.
    pub unknown_key_pause: Duration,
    /// How long the public keys serve while the identity server is away.
    pub max_stale: Duration,
}

/// Where public keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeySource {
    /// Behind a URL.
    Url {
        /// The address.
        url: String,
        /// Certificates (PEM) that the server may have, besides those of the system.
        ca: Option<Arc<str>>,
    },
    /// The content of a file.
    File(Arc<str>),
}
