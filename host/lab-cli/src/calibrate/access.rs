//! How servers are reached: the API key, and TLS.

use std::{path::PathBuf, sync::Arc};

use clap::Args;
use rustls::ClientConfig;

use super::target::Target;

/// Environment variable that holds the API key.
const API_KEY: &str = "OPENAI_API_KEY";

/// How servers are reached.
#[derive(Debug, Args)]
pub(super) struct AccessArgs {
    /// PEM file with the authorities of servers with https:// [default: those that this machine trusts].
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// PEM file with the certificate to show to servers.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl AccessArgs {
    /// Returns a client of `url`.
    pub(super) fn target(&self, url: &str) -> anyhow::Result<Target> {
        let tls = if url.starts_with("https://") { Some(self.tls()?) } else { None };
        Target::new(url, API_KEY, tls)
    }

    fn tls(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let own = self.tls_cert.as_deref().zip(self.tls_key.as_deref());
        let client = pointsman_certificates::client(self.tls_ca.as_deref(), own);
        client.map_err(|problem| anyhow::anyhow!(problem))
    }
}
