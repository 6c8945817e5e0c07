//! `[server.tls]` and `[server.admin_tls]`: the certificate of a listener, and which clients may connect.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration};

/// The values of `min_version`.
pub(super) const TLS_1_2: &str = "1.2";
pub(super) const TLS_1_3: &str = "1.3";

/// `[server.tls]`, `[server.admin_tls]`: TLS of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tls {
    /// PEM file with the certificate of the listener, followed by its intermediates.
    pub cert_file: PathBuf,
    /// PEM file with the private key of the certificate.
    pub key_file: PathBuf,
    /// PEM file with the authorities that sign certificates of clients; `None` if clients need none.
    pub client_ca_file: Option<PathBuf>,
    /// Whether a client without a certificate is refused.
    pub require_client_cert: bool,
    /// Names of clients that may connect: DNS names, URIs or e-mail addresses; empty: every certificate of
    /// the authority.
    pub client_names: Vec<String>,
    /// Oldest version of TLS that is spoken: `1.2` or `1.3`.
    pub min_version: String,
    /// How long a handshake may take.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub handshake_timeout: Duration,
}

impl Default for Tls {
    fn default() -> Self {
        Self {
            cert_file: PathBuf::new(),
            key_file: PathBuf::new(),
            client_ca_file: None,
            require_client_cert: false,
            client_names: Vec::new(),
            min_version: TLS_1_2.to_owned(),
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

impl Tls {
    /// Validates the table at `path`. The contents of the files are checked where they are read.
    pub(super) fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        let Self {
            cert_file,
            key_file,
            client_ca_file,
            require_client_cert,
            client_names,
            min_version,
            handshake_timeout,
        } = self;
        let mut add =
            |key: &str, message: String| problems.push(Problem::new(format!("{path}.{key}"), message));
        for (key, file, content) in
            [("cert_file", cert_file, "certificate"), ("key_file", key_file, "private key")]
        {
            if file.as_os_str().is_empty() {
                add(key, format!("is missing: name the PEM file with the {content}"));
            }
        }
        if client_ca_file.is_none() {
            let needs = "needs an authority that signs the certificates: add `client_ca_file`";
            if *require_client_cert {
                add("require_client_cert", format!("`true` {needs}"));
            }
            if !client_names.is_empty() {
                add("client_names", format!("a list {needs}"));
            }
        }
        for (index, name) in client_names.iter().enumerate() {
            if name.is_empty() || name.contains(char::is_whitespace) {
                let message = format!(
                    "`{name}` is not a name: expected a DNS name, a URI such as spiffe://…, or an e-mail address"
                );
                add(&format!("client_names[{index}]"), message);
            }
        }
        if let Some(message) = bad_version(min_version) {
            add("min_version", message);
        }
        if handshake_timeout.is_zero() {
            add("handshake_timeout", "`0s` would end every handshake: expected more than 0".to_owned());
        }
    }

    /// Whether TLS 1.2 is refused.
    pub(crate) fn only_tls13(&self) -> bool {
        self.min_version == TLS_1_3
    }
}

/// Problem of a `min_version`.
pub(super) fn bad_version(version: &str) -> Option<String> {
    let is_known = [TLS_1_2, TLS_1_3].contains(&version);
    (!is_known).then(|| format!("`{version}` is not a version that is spoken: expected \"1.2\" or \"1.3\""))
}
