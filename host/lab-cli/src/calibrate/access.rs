//! Access to servers: the API key, and TLS.

use std::path::{Path, PathBuf};

use clap::Args;
use pointsman_http_client::{Pem, Roots, Setup, SetupError};

use super::target::Target;

/// Environment variable that holds the API key.
const API_KEY: &str = "OPENAI_API_KEY";

/// Access to servers.
#[derive(Debug, Args)]
pub(super) struct AccessArgs {
    /// PEM file with the certificate authorities for servers with https:// [default: those that this machine
    /// trusts].
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
    /// Returns a client for the server at `url`.
    pub(super) fn target(&self, url: &str) -> anyhow::Result<Target> {
        Target::new(url, API_KEY, self.setup(url)?)
    }

    fn setup(&self, url: &str) -> Result<Setup, SetupError> {
        if url.starts_with("http://") {
            return Ok(Setup { roots: Roots::None, ..Setup::default() });
        }
        let read = |flag: &str, file: &Path| Pem::read(format!("{flag} {}", file.display()), file);
        let roots = match &self.tls_ca {
            Some(file) => Roots::Only(read("--tls-ca", file)?),
            None => Roots::System,
        };
        let identity = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some((read("--tls-cert", cert)?, read("--tls-key", key)?)),
            _ => None,
        };
        Ok(Setup { roots, identity, ..Setup::default() })
    }
}
