//! `[server.tls]` and `[server.admin_tls]`: the certificate of a listener, and which clients may connect.

use std::{path::PathBuf, time::Duration};

use pointsman_config_file::{Report, duration::secs, section};

/// The values of `min_version`.
pub(super) const TLS_1_2: &str = "1.2";
pub(super) const TLS_1_3: &str = "1.3";

/// TLS of a listener; no table: plain HTTP. See "TLS".
#[section(rules)]
#[derive(Eq)]
pub struct Tls {
    /// PEM file with the certificate of the listener, followed by its intermediates.
    #[key(example = "\"/etc/pointsman/tls.crt\"")]
    pub cert_file: PathBuf,
    /// PEM file with the private key of the certificate.
    #[key(example = "\"/etc/pointsman/tls.key\"")]
    pub key_file: PathBuf,
    /// PEM file with the authorities that sign certificates of clients; default: no certificate is requested.
    #[key(example = "\"/etc/pointsman/clients.crt\"")]
    pub client_ca_file: Option<PathBuf>,
    /// Whether a client without a certificate is refused.
    pub require_client_cert: bool,
    /// Names of clients that may connect: "a.example", "spiffe://…", "bot@example"; empty: every certificate
    /// of the authority.
    pub client_names: Vec<String>,
    /// Oldest accepted version of TLS: "1.2" or "1.3".
    #[key(default = TLS_1_2.to_owned())]
    pub min_version: String,
    /// How long a handshake may take.
    #[key(default = secs(10), positive, reason = "would end every handshake")]
    pub handshake_timeout: Duration,
}

impl Tls {
    /// The contents of the files are checked where they are read.
    fn rules(&self, report: &mut Report<'_>) {
        let Self { cert_file, key_file, client_ca_file, require_client_cert, client_names, .. } = self;
        for (key, file, content) in
            [("cert_file", cert_file, "certificate"), ("key_file", key_file, "private key")]
        {
            if file.as_os_str().is_empty() {
                report.add(key, format!("is missing: name the PEM file with the {content}"));
            }
        }
        if client_ca_file.is_none() {
            let needs = "needs an authority that signs the certificates: add `client_ca_file`";
            if *require_client_cert {
                report.add("require_client_cert", format!("`true` {needs}"));
            }
            if !client_names.is_empty() {
                report.add("client_names", format!("a list {needs}"));
            }
        }
        for (index, name) in client_names.iter().enumerate() {
            if name.is_empty() || name.contains(char::is_whitespace) {
                let message = format!(
                    "`{name}` is not a name: expected a DNS name, a URI such as spiffe://…, or an e-mail address"
                );
                report.add(&format!("client_names[{index}]"), message);
            }
        }
        if let Some(message) = bad_version(&self.min_version) {
            report.add("min_version", message);
        }
    }

    /// Returns whether TLS 1.2 is refused.
    pub(crate) fn only_tls13(&self) -> bool {
        self.min_version == TLS_1_3
    }
}

/// Problem of a `min_version`.
pub(super) fn bad_version(version: &str) -> Option<String> {
    let is_known = [TLS_1_2, TLS_1_3].contains(&version);
    (!is_known).then(|| format!("`{version}` is not a supported version: expected \"1.2\" or \"1.3\""))
}
