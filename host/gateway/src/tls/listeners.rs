//! The TLS in force on a listener. New handshakes use the newest; connections keep theirs.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use pointsman_certificates::pem::Expired;
use rustls::ServerConfig;

use super::{
    changes::{OwnCertificate, WatchedFiles},
    server::{Built, Contents},
};
use crate::{
    config::{Problem, Tls},
    telemetry::tls_metrics::TlsMetrics,
};

/// TLS of one listener.
#[derive(Debug)]
pub(crate) struct ListenerTls {
    files: WatchedFiles,
    /// Settings in force; `None` for plain HTTP.
    current: ArcSwapOption<InForce>,
}

/// Settings in force on a listener.
#[derive(Debug)]
pub(crate) struct InForce {
    settings: Tls,
    /// Protocols that it offers (ALPN).
    protocols: &'static [&'static [u8]],
    /// Digest of the files' content.
    digest: [u8; 32],
    built: Built,
}

/// TLS of a listener, read from files and not in force yet; nothing: plain HTTP.
pub(crate) type LoadedListener = Option<Arc<InForce>>;

/// Settings of one handshake.
#[derive(Clone, Debug)]
pub(crate) struct Handshake {
    /// Certificate, versions and protocols.
    pub(crate) config: Arc<ServerConfig>,
    /// The same for a connection that is only refused.
    pub(crate) refusing: Arc<ServerConfig>,
    /// How long it may take.
    pub(crate) timeout: Duration,
}

impl ListenerTls {
    /// Returns a listener with plain HTTP. `path` is its table in the configuration, `label` its name in
    /// metrics.
    pub(super) fn new(path: &'static str, label: &'static str) -> Self {
        Self { files: WatchedFiles::new(path, label), current: ArcSwapOption::empty() }
    }

    /// Returns what a handshake uses now; `None`: the listener speaks plain HTTP.
    pub(crate) fn handshake(&self) -> Option<Handshake> {
        let current = self.current.load();
        let InForce { settings, built, .. } = current.as_deref()?;
        Some(Handshake {
            config: built.config.clone(),
            refusing: built.refusing.clone(),
            timeout: settings.handshake_timeout,
        })
    }

    /// Reads and checks the files. `expired` is for a certificate that is not in force already.
    pub(super) fn load(
        &self,
        settings: Option<&Tls>,
        protocols: &'static [&'static [u8]],
        expired: Expired,
    ) -> Result<LoadedListener, Vec<Problem>> {
        let Some(settings) = settings else { return Ok(None) };
        let contents = Contents::read(settings, self.files.path)?;
        let current = self.current.load();
        let in_force = current.as_ref().is_some_and(|current| current.digest == contents.digest());
        let expired = if in_force { Expired::Accepted } else { expired };
        self.build(settings, protocols, &contents, expired).map(Some)
    }

    fn build(
        &self,
        settings: &Tls,
        protocols: &'static [&'static [u8]],
        contents: &Contents,
        expired: Expired,
    ) -> Result<Arc<InForce>, Vec<Problem>> {
        let built = contents.build(settings, self.files.path, protocols, expired)?;
        Ok(Arc::new(InForce { settings: settings.clone(), protocols, digest: contents.digest(), built }))
    }

    pub(super) fn install(&self, loaded: LoadedListener, metrics: &TlsMetrics) {
        let certificate = loaded.as_ref().map(|loaded| loaded.certificate());
        self.current.store(loaded);
        self.files.installed(certificate, metrics);
    }

    /// Reads the files, and puts a changed content in force that is valid.
    pub(super) fn look(&self, metrics: &TlsMetrics) {
        let Some(current) = self.current.load_full() else { return };
        let contents = Contents::read(&current.settings, self.files.path);
        let found = contents.as_ref().map(Contents::digest).map_err(Clone::clone);
        if !self.files.is_due(found, current.digest, metrics) {
            return;
        }
        let InForce { settings, protocols, .. } = &*current;
        match contents.and_then(|contents| self.build(settings, protocols, &contents, Expired::Refused)) {
            Ok(new) => {
                let certificate = new.certificate();
                let replaced = self.current.compare_and_swap(&Some(current.clone()), Some(new));
                // A reload of the configuration was faster.
                if !replaced.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
                    return;
                }
                self.files.applied(Some(certificate), metrics);
            }
            Err(problems) => self.files.refused(&problems, metrics),
        }
    }

    /// Returns what operators should know of the files.
    pub(super) fn problems(&self) -> Vec<String> {
        self.files.problems()
    }
}

impl InForce {
    fn certificate(&self) -> OwnCertificate {
        OwnCertificate::new(&self.settings.cert_file, self.built.expires)
    }
}
