//! `[auth]`: who may call, and as whom. Keys are known by their digests.

use std::{path::PathBuf, time::Duration};

use ipnet::IpNet;
use pointsman_config_file::{Report, duration::secs, section};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Secret;

/// Maximum length of a name in a certificate, bytes. A DNS name has 253, a SPIFFE id 2,048.
const MAX_NAME: usize = 2_048;
/// Maximum length of the name of a tenant, bytes.
pub(super) const MAX_TENANT: usize = 128;

/// Who may call, and as whom. See "Who may call".
#[section(rules)]
pub struct Auth {
    /// Addresses and networks of the proxies that may name the tenant in server.tenant_header:
    /// ["10.0.0.0/8"].
    pub trusted_proxies: Vec<String>,
    /// Directory of files with further [[auth.keys]].
    #[key(example = "\"/etc/pointsman/keys.d\"", read)]
    pub key_dir: Option<PathBuf>,
    /// API keys of clients: `pointsman key new --id team-a-1 --tenant team-a` prints an entry.
    #[key(nested, read)]
    pub keys: Vec<KeyEntry>,
    /// Tokens of operators: `pointsman key new --id grafana --role viewer` prints an entry.
    #[key(nested, read)]
    pub operators: Vec<OperatorEntry>,
    /// Names in certificates of clients and operators; needs client_ca_file of the listener.
    #[key(nested)]
    pub certificates: Vec<CertificateEntry>,
    /// Tokens of an identity server.
    #[key(nested, read)]
    pub jwt: Option<Jwt>,
}

/// An API key.
#[section]
pub struct KeyEntry {
    /// Name of the key in logs and limits.
    #[key(example = "\"team-a-1\"")]
    pub id: String,
    /// Tenant that its requests count for; empty: none.
    #[key(example = "\"team-a\"")]
    pub tenant: String,
    /// Digest of the key.
    #[key(example = "\"sha256:…\"")]
    pub digest: Option<Secret>,
}

/// A token of an operator.
#[section]
pub struct OperatorEntry {
    /// Name of the operator in the audit log.
    #[key(example = "\"grafana\"")]
    pub id: String,
    /// "viewer": reads; "operator": changes.
    pub role: Role,
    /// Digest of the token.
    #[key(example = "\"sha256:…\"")]
    pub digest: Option<Secret>,
}

/// A name in the certificate of a client or operator.
#[section(rules)]
pub struct CertificateEntry {
    /// A subject alternative name: a URI (with ://), an e-mail address (with @), or a DNS name.
    #[key(example = "\"spiffe://prod/team-a\"")]
    pub name: String,
    /// Tenant that a client's requests count for; empty: none.
    #[key(example = "\"team-a\"")]
    pub tenant: String,
    /// "viewer" or "operator": the certificate belongs to an operator, not to a client.
    #[key(example = "\"viewer\"")]
    pub role: Option<Role>,
}

/// Tokens of an identity server.
#[section(rules)]
pub struct Jwt {
    /// "iss" of every token.
    #[key(example = "\"https://identity.example\"")]
    pub issuer: String,
    /// "aud" of every token: one of these.
    #[key(example = "[\"pointsman\"]")]
    pub audience: Vec<String>,
    /// Address of the public keys.
    #[key(example = "\"https://identity.example/jwks\"")]
    pub jwks_url: Option<String>,
    /// PEM file with the certificates that its server may have, besides those of the system.
    #[key(example = "\"/etc/ssl/internal.pem\"")]
    pub jwks_ca: Option<PathBuf>,
    /// File with the public keys, instead of jwks_url.
    #[key(example = "\"/etc/pointsman/jwks.json\"")]
    pub jwks_file: Option<PathBuf>,
    /// Algorithms of signatures; also RS384, RS512, PS256, PS384, PS512 and ES384. None is symmetric.
    #[key(default = ["RS256", "ES256", "EdDSA"].map(str::to_owned).to_vec())]
    pub algorithms: Vec<String>,
    /// Largest difference of the clocks.
    #[key(default = secs(60))]
    pub clock_skew: Duration,
    /// Claim with the name of the tenant, which must be there; empty: tokens name none.
    #[key(example = "\"tenant\"")]
    pub tenant_claim: String,
    /// Claim with the roles of operators, a string or a list; empty: tokens are not for operators.
    #[key(example = "\"groups\"")]
    pub role_claim: String,
    /// Values of that claim for operators that read.
    #[key(example = "[\"gateway-readers\"]")]
    pub viewers: Vec<String>,
    /// Values of that claim for operators that change.
    #[key(example = "[\"gateway-admins\"]")]
    pub operators: Vec<String>,
    /// Interval of fetching the public keys.
    #[key(default = secs(300), positive)]
    pub refresh: Duration,
    /// Smallest time between two fetches, also when tokens name unknown keys.
    #[key(default = secs(10), positive)]
    pub unknown_key_pause: Duration,
    /// How long the public keys serve while the identity server is away.
    #[key(default = secs(24 * 3_600), positive)]
    pub max_stale: Duration,
}

impl Auth {
    fn rules(&self, report: &mut Report<'_>) {
        for (index, text) in self.trusted_proxies.iter().enumerate() {
            if network(text).is_none() {
                let message =
                    format!("`{text}` is not an address or network: expected `10.0.0.1` or `10.0.0.0/8`");
                report.add(&format!("trusted_proxies[{index}]"), message);
            }
        }
    }

    /// Returns whether operators can authenticate with something other than `server.admin_token`.
    #[must_use]
    pub(crate) fn knows_operators(&self) -> bool {
        let by_token = |jwt: &Jwt| !(jwt.viewers.is_empty() && jwt.operators.is_empty());
        !self.operators.is_empty()
            || self.jwt.as_ref().is_some_and(by_token)
            || self.certificates.iter().any(|entry| entry.role.is_some())
    }

    /// Returns the networks of the proxies that may name the tenant.
    pub(crate) fn networks(&self) -> Vec<IpNet> {
        self.trusted_proxies.iter().filter_map(|text| network(text)).collect()
    }
}

impl CertificateEntry {
    fn rules(&self, report: &mut Report<'_>) {
        let Self { name, tenant, role } = self;
        if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_whitespace) {
            let message = format!(
                "`{name}` is not a name: expected a DNS name, a URI such as spiffe://…, or an e-mail address, at most \
                 {MAX_NAME} bytes"
            );
            report.add("name", message);
        }
        if tenant.len() > MAX_TENANT {
            let message = format!("{} bytes are more than the limit of {MAX_TENANT}", tenant.len());
            report.add("tenant", message);
        }
        if role.is_some() && !tenant.is_empty() {
            let message = "an operator has no tenant: give the client an entry of its own, without `role`";
            report.add("tenant", message);
        }
    }

    /// Returns the name as certificates have it: a DNS name in lower case.
    #[must_use]
    pub(crate) fn matched_name(&self) -> String {
        match NameKind::of(&self.name) {
            NameKind::Dns => self.name.to_ascii_lowercase(),
            NameKind::Uri | NameKind::Email => self.name.clone(),
        }
    }
}

fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from))
}

impl Jwt {
    fn rules(&self, report: &mut Report<'_>) {
        let Self { issuer, audience, algorithms, role_claim, viewers, operators, .. } = self;
        if issuer.is_empty() {
            report.add("issuer", "it is missing: give the `iss` of the identity server's tokens");
        }
        if audience.is_empty() || audience.iter().any(String::is_empty) {
            let advice =
                "it is missing: give the `aud` that the identity server puts into tokens for this gateway";
            report.add("audience", advice);
        }
        if role_claim.is_empty() && !(viewers.is_empty() && operators.is_empty()) {
            report.add("role_claim", "it is missing: `viewers` and `operators` are values of this claim");
        }
        if algorithms.is_empty() {
            report.add("algorithms", "the list is empty: no token would be accepted");
        }
        for (index, name) in algorithms.iter().enumerate() {
            if JwtAlgorithm::of(name).is_none() {
                let message = format!(
                    "`{name}` is not supported: expected RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384 or \
                     EdDSA"
                );
                report.add(&format!("algorithms[{index}]"), message);
            }
        }
    }
}

/// Signature algorithm. None is symmetric: with a symmetric one, the secret that verifies tokens could sign
/// them, too.
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
