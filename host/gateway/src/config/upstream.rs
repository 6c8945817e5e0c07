//! `[upstream]`: calls to workers.

use std::{path::PathBuf, time::Duration};

use pointsman_config_file::{Report, duration::secs, section};

use super::tls;

/// Calls to workers.
#[section]
pub struct Upstream {
    /// How long a connection that no request uses is kept.
    #[key(default = secs(30), positive)]
    pub idle_timeout: Duration,
    /// Idle connections that each data thread keeps for a worker; 0: none.
    #[key(default = 256)]
    pub idle_connections: usize,
    /// Whether engines get the client's key as authorization header. A worker's own api_key takes its place.
    pub forward_authorization: bool,
    /// TLS to workers with https:// in their url. See "TLS to engines".
    #[key(nested)]
    pub tls: UpstreamTls,
}

/// TLS to workers whose URL begins with `https://`.
#[section(rules)]
#[derive(Eq)]
pub struct UpstreamTls {
    /// PEM file with the authorities that sign the certificates of engines; default: those of this machine.
    #[key(example = "\"/etc/pointsman/engines.crt\"")]
    pub ca_file: Option<PathBuf>,
    /// PEM file with the certificate that the gateway shows to engines, followed by its intermediates;
    /// default: none.
    #[key(example = "\"/etc/pointsman/gateway.crt\"")]
    pub cert_file: Option<PathBuf>,
    /// PEM file with the private key of the certificate.
    #[key(example = "\"/etc/pointsman/gateway.key\"")]
    pub key_file: Option<PathBuf>,
    /// Oldest accepted version of TLS: "1.2" or "1.3".
    #[key(default = tls::TLS_1_2.to_owned())]
    pub min_version: String,
}

impl UpstreamTls {
    /// The contents of the files are checked where they are read.
    fn rules(&self, report: &mut Report<'_>) {
        match (&self.cert_file, &self.key_file) {
            (Some(_), None) => {
                report.add("key_file", "is missing: name the PEM file with the private key of cert_file");
            }
            (None, Some(_)) => {
                report.add("cert_file", "is missing: name the PEM file with the certificate of key_file");
            }
            _ => {}
        }
        if let Some(message) = tls::bad_version(&self.min_version) {
            report.add("min_version", message);
        }
    }

    /// Returns whether TLS 1.2 is refused.
    pub(crate) fn only_tls13(&self) -> bool {
        self.min_version == tls::TLS_1_3
    }
}

#[cfg(test)]
mod tests {
    use pointsman_config_file::Section as _;

    use super::*;

    #[test]
    fn a_certificate_needs_its_key_and_a_version_is_one_that_is_spoken() {
        let paths = |mut tls: UpstreamTls| {
            let mut problems = Vec::new();
            tls.check(&mut Report::new(&mut problems).at("upstream.tls"));
            problems.into_iter().map(|problem| problem.path).collect::<Vec<_>>()
        };
        let file = Some(PathBuf::from("x"));
        let without_key = UpstreamTls { cert_file: file.clone(), ..UpstreamTls::default() };
        assert_eq!(paths(without_key), ["upstream.tls.key_file"]);
        let without_certificate = UpstreamTls { key_file: file.clone(), ..UpstreamTls::default() };
        assert_eq!(paths(without_certificate), ["upstream.tls.cert_file"]);
        let old = UpstreamTls { min_version: "1.1".to_owned(), ..UpstreamTls::default() };
        assert_eq!(paths(old), ["upstream.tls.min_version"]);
        assert!(paths(UpstreamTls { ca_file: file, ..UpstreamTls::default() }).is_empty());
    }
}
