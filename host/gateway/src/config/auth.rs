//! `[auth]`: who may call, and as whom. Keys are known by their digests.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Secret, duration};

/// `[auth]`: who may call, and as whom.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Whether API keys may be given as they are, not as digests.
    pub plain_api_keys: bool,
    /// API keys of clients.
    pub keys: Vec<KeyEntry>,
    /// Directory of files with further `[[auth.keys]]`.
    pub key_dir: Option<PathBuf>,
    /// Tokens of operators.
    pub operators: Vec<OperatorEntry>,
    /// Addresses and networks of the proxies that may name the tenant of a request in `server.tenant_header`.
    pub trusted_proxies: Vec<String>,
    /// Names in certificates of clients and operators.
    pub certificates: Vec<CertificateEntry>,
    /// Tokens of an identity server.
    pub jwt: Option<Jwt>,
}

/// `[[auth.keys]]`: an API key.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KeyEntry {
    /// Name of the key in logs and limits.
    pub id: String,
    /// Tenant that its requests count for; empty: none.
    pub tenant: String,
    /// Digest of the key: `sha256:HEX`, or argon2id in the PHC format.
    pub digest: Option<Secret>,
    /// File with the digest.
    pub file: Option<PathBuf>,
}

/// `[[auth.operators]]`: a token of an operator.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OperatorEntry {
    /// Name of the operator in the audit log.
    pub id: String,
    /// Role of the operator.
    pub role: Role,
    /// Digest of the token, as of a key.
    pub digest: Option<Secret>,
    /// File with the digest.
    pub file: Option<PathBuf>,
}

/// `[[auth.certificates]]`: a name in the certificate of a client or operator.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CertificateEntry {
    /// A subject alternative name: a URI (with `://`), an e-mail address (with `@`), or a DNS name.
    pub name: String,
    /// Tenant that a client's requests count for; empty: none.
    pub tenant: String,
    /// Role of an operator; `None` for the certificate of a client.
    pub role: Option<Role>,
}

/// `[auth.jwt]`: tokens of an identity server.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Jwt {
    /// `iss` of every token.
    pub issuer: String,
    /// `aud` of every token: one of these.
    pub audience: Vec<String>,
    /// Address of the public keys.
    pub jwks_url: Option<String>,
    /// File with the certificates (PEM) that the server of `jwks_url` may have, besides those of the system.
    pub jwks_ca: Option<PathBuf>,
    /// File with the public keys, instead of their address.
    pub jwks_file: Option<PathBuf>,
    /// Algorithms of signatures.
    pub algorithms: Vec<String>,
    /// Largest difference of the clocks.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub clock_skew: Duration,
    /// Claim with the name of the tenant; empty: tokens name none.
    pub tenant_claim: String,
    /// Claim with the roles of operators, a string or a list; empty: tokens are not for operators.
    pub role_claim: String,
    /// Values of that claim for operators that may read.
    pub viewers: Vec<String>,
    /// Values of that claim for operators that may change.
    pub operators: Vec<String>,
    /// Interval of fetching the public keys.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub refresh: Duration,
    /// Smallest time between two fetches, also when tokens name unknown keys.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub unknown_key_pause: Duration,
    /// How long the public keys serve while the identity server is away.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub max_stale: Duration,
}

impl Default for Jwt {
    fn default() -> Self {
        Self {
            issuer: String::new(),
            audience: Vec::new(),
            jwks_url: None,
            jwks_ca: None,
            jwks_file: None,
            algorithms: ["RS256", "ES256", "EdDSA"].map(str::to_owned).to_vec(),
            clock_skew: Duration::from_secs(60),
            tenant_claim: String::new(),
            role_claim: String::new(),
            viewers: Vec::new(),
            operators: Vec::new(),
            refresh: Duration::from_secs(300),
            unknown_key_pause: Duration::from_secs(10),
            max_stale: Duration::from_secs(24 * 3600),
        }
    }
}

/// An algorithm of signatures. None of them is symmetric: a secret that verifies also signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JwtAlgorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    EdDsa,
}

impl JwtAlgorithm {
    /// Returns the algorithm with this name in tokens.
    #[must_use]
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "RS256" => Self::Rs256,
            "RS384" => Self::Rs384,
            "RS512" => Self::Rs512,
            "PS256" => Self::Ps256,
            "PS384" => Self::Ps384,
            "PS512" => Self::Ps512,
            "ES256" => Self::Es256,
            "ES384" => Self::Es384,
            "EdDSA" => Self::EdDsa,
            _ => return None,
        })
    }
}

/// Kind of a subject alternative name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameKind {
    Uri,
    Email,
    Dns,
}

impl NameKind {
    /// Returns the kind of a configured name. Its form says it, so that an authority that lets clients choose
    /// a DNS name does not let them take a URI.
    pub(crate) fn of(name: &str) -> Self {
        if name.contains("://") {
            Self::Uri
        } else if name.contains('@') {
            Self::Email
        } else {
            Self::Dns
        }
    }
}

/// Role of an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Read.
    #[default]
    Viewer,
    /// Read and change.
    Operator,
}

/// A file of `key_dir`: what `pointsman key new` prints.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct KeyFile {
    pub(super) auth: KeyFileAuth,
}

/// The table `auth` of such a file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct KeyFileAuth {
    pub(super) keys: Vec<KeyEntry>,
}
