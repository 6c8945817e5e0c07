//! Builds the settings of handshakes from the contents of files.

use std::{path::Path, sync::Arc};

use pointsman_certificates::{
    pem::{self, Expired},
    provider::{PROVIDER, versions},
    x509::{Certificate, GeneralName},
};
use rustls::{
    Error, ServerConfig,
    crypto::ring,
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::names::NamedClients;
use crate::config::{Problem, Tls};

/// Contents of a listener's files.
pub(super) struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authorities: Option<Vec<u8>>,
}

/// Settings of a listener's handshakes.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) config: Arc<ServerConfig>,
    /// The same for connections that are only refused: they speak HTTP/1.1.
    pub(super) refusing: Arc<ServerConfig>,
    /// When the certificate expires, seconds since 1970.
    pub(super) expires: i64,
}

impl Contents {
    /// Reads the files of the table at `path`.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(super) fn read(settings: &Tls, path: &str) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut read = |key: &str, file: &Path| {
            pem::read(file).unwrap_or_else(|message| {
                problems.push(Problem::new(format!("{path}.{key}"), message));
                Vec::new()
            })
        };
        let contents = Self {
            certificate: read("cert_file", &settings.cert_file),
            key: read("key_file", &settings.key_file),
            authorities: settings.client_ca_file.as_deref().map(|file| read("client_ca_file", file)),
        };
        if problems.is_empty() { Ok(contents) } else { Err(problems) }
    }

    /// Returns a digest that differs when a file does.
    pub(super) fn digest(&self) -> [u8; 32] {
        let files = [Some(&self.certificate), Some(&self.key), self.authorities.as_ref()];
        pem::digest(files.into_iter().flatten())
    }

    /// Checks the contents, and builds what handshakes use. `protocols` are those of the listener (ALPN).
    ///
    /// # Errors
    /// All problems of the table at `path`.
    pub(super) fn build(
        &self,
        settings: &Tls,
        path: &str,
        protocols: &[&[u8]],
        expired: Expired,
    ) -> Result<Built, Vec<Problem>> {
        let mut problems = Vec::new();
        let certified = self.certified_key(settings, path, expired, &mut problems);
        let verifier = self.verifier(settings).map_err(|message| {
            problems.push(Problem::new(format!("{path}.client_ca_file"), message));
        });
        let (Some((certified, expires)), Ok(verifier), true) = (certified, verifier, problems.is_empty())
        else {
            return Err(problems);
        };
        let failed = |error: Error| vec![Problem::new(path, format!("TLS cannot be set up: {error}"))];
        let builder = ServerConfig::builder_with_provider(PROVIDER.clone());
        let builder = builder.with_protocol_versions(versions(settings.only_tls13())).map_err(failed)?;
        let resumes = verifier.is_none();
        let builder = match verifier {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
        // A resumed session would not check the client's certificate again: it may have expired, or its
        // authority may have changed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        if resumes {
            config.ticketer = ring::Ticketer::new().map_err(failed)?;
        } else {
            config.send_tls13_tickets = 0;
        }
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let refusing = Arc::new(config.clone());
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(Built { config: Arc::new(config), refusing, expires })
    }

    /// Returns the certificate with its key, and when it expires.
    fn certified_key(
        &self,
        settings: &Tls,
        path: &str,
        expired: Expired,
        problems: &mut Vec<Problem>,
    ) -> Option<(CertifiedKey, i64)> {
        let mut note = |key: &str, message| problems.push(Problem::new(format!("{path}.{key}"), message));
        let cert = (settings.cert_file.as_path(), &*self.certificate);
        let key = (settings.key_file.as_path(), &*self.key);
        let (certified, expires) = pem::certified_key(cert, key, expired, &PROVIDER, &mut note)?;
        let names =
            certified.cert.first().and_then(|first| Certificate::parse(first)).map(|first| first.names);
        let is_address = |name: &_| matches!(name, GeneralName::DnsName(_) | GeneralName::IpAddress(_));
        if !names.is_some_and(|names| names.iter().any(is_address)) {
            let message = format!(
                "the certificate in `{}` has no subject alternative name with a DNS name or an IP address, so \
                 clients refuse it: issue one with the names of this listener",
                settings.cert_file.display()
            );
            note("cert_file", message);
            return None;
        }
        Some((certified, expires))
    }

    /// Returns what checks the certificates of clients; `None`: none are asked for.
    fn verifier(&self, settings: &Tls) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
        let (Some(file), Some(bytes)) = (&settings.client_ca_file, &self.authorities) else {
            return Ok(None);
        };
        let roots = Arc::new(pem::authorities(file, bytes)?);
        let mut builder = WebPkiClientVerifier::builder_with_provider(roots, PROVIDER.clone());
        if !settings.require_client_cert {
            builder = builder.allow_unauthenticated();
        }
        let verifier = builder.build();
        let authorities =
            verifier.map_err(|error| format!("`{}` cannot be used: {error}", file.display()))?;
        if settings.client_names.is_empty() {
            return Ok(Some(authorities));
        }
        Ok(Some(Arc::new(NamedClients { authorities, names: settings.client_names.clone() })))
    }
}
