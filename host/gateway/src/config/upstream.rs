//! `[upstream]`: calls to workers.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration, tls};

/// `[upstream]`: calls to workers.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Upstream {
    /// How long an idle connection is kept.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub idle_timeout: Duration,
    /// Number of idle connections that each data thread keeps for a worker; 0: none.
    pub idle_connections: usize,
    /// Whether engines get the client's `authorization` header. A worker's own key takes its place.
    pub forward_authorization: bool,
    /// TLS to workers whose URL begins with `https://`.
    pub tls: UpstreamTls,
}

/// `[upstream.tls]`: TLS to workers whose URL begins with `https://`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamTls {
    /// PEM file with the authorities that sign the certificates of engines; `None`: those that this machine
    /// trusts.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the certificate that the gateway shows to engines, followed by its intermediates;
    /// `None`: none is shown.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the private key of the certificate.
    pub key_file: Option<PathBuf>,
    /// Oldest version of TLS that is spoken: `1.2` or `1.3`.
    pub min_version: String,
}

impl Default for Upstream {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(30),
            idle_connections: 256,
            forward_authorization: false,
            tls: UpstreamTls::default(),
        }
    }
}

impl Default for UpstreamTls {
    fn default() -> Self {
        Self { ca_file: None, cert_file: None, key_file: None, min_version: tls::TLS_1_2.to_owned() }
    }
}

impl UpstreamTls {
    /// Validates the table. The contents of the files are checked where they are read.
    pub(super) fn check(&self, problems: &mut Vec<Problem>) {
        let Self { ca_file: _, cert_file, key_file, min_version } = self;
        let mut add = |key: &str, message: String| {
            problems.push(Problem::new(format!("upstream.tls.{key}"), message));
        };
        match (cert_file, key_file) {
            (Some(_), None) => {
                add("key_file", "is missing: name the PEM file with the private key of cert_file".to_owned());
            }
            (None, Some(_)) => {
                add("cert_file", "is missing: name the PEM file with the certificate of key_file".to_owned());
            }
            _ => {}
        }
        if let Some(message) = tls::bad_version(min_version) {
            add("min_version", message);
        }
    }

    /// Whether TLS 1.2 is refused.
    pub(crate) fn only_tls13(&self) -> bool {
        self.min_version == tls::TLS_1_3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_needs_its_key_and_a_version_is_one_that_is_spoken() {
        let paths = |tls: UpstreamTls| {
            let mut problems = Vec::new();
            tls.check(&mut problems);
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
