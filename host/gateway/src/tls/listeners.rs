//! The TLS in force on a listener. New handshakes use the newest; connections keep theirs.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;

use super::{
    changes,
    changes::Seen,
    server::{Built, Contents},
};
use crate::{
    config::{Problem, Tls},
    telemetry::tls_metrics::TlsMetrics,
};

/// TLS of one listener.
#[derive(Debug)]
pub(crate) struct ListenerTls {
    /// Its table in the configuration.
    path: &'static str,
    /// Its label in metrics.
    label: &'static str,
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
        Self { path, label, current: ArcSwapOption::empty() }
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

    pub(super) fn load(
        &self,
        settings: Option<&Tls>,
        protocols: &'static [&'static [u8]],
    ) -> Result<LoadedListener, Vec<Problem>> {
        let Some(settings) = settings else { return Ok(None) };
        let contents = Contents::read(settings, self.path)?;
        self.build(settings, protocols, &contents).map(Some)
    }

    fn build(
        &self,
        settings: &Tls,
        protocols: &'static [&'static [u8]],
        contents: &Contents,
    ) -> Result<Arc<InForce>, Vec<Problem>> {
        let built = contents.build(settings, self.path, protocols)?;
        Ok(Arc::new(InForce { settings: settings.clone(), protocols, digest: contents.digest(), built }))
    }

    pub(super) fn install(&self, loaded: LoadedListener, metrics: &TlsMetrics) {
        metrics.expires(self.label, loaded.as_ref().map(|loaded| loaded.built.expires));
        self.current.store(loaded);
    }

    /// Reads the files, and puts a changed content in force that is valid.
    pub(super) fn look(&self, seen: &mut Seen, metrics: &TlsMetrics) {
        let Some(current) = self.current.load_full() else { return };
        let contents = Contents::read(&current.settings, self.path);
        let found = contents.as_ref().map(Contents::digest).map_err(Clone::clone);
        if !seen.is_due(found, current.digest) {
            return;
        }
        match contents.and_then(|contents| self.build(&current.settings, current.protocols, &contents)) {
            Ok(new) => {
                let expires = new.built.expires;
                let replaced = self.current.compare_and_swap(&Some(current.clone()), Some(new));
                // A reload of the configuration was faster.
                if !replaced.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
                    return;
                }
                changes::applied(self.label, Some(expires), metrics);
            }
            Err(problems) => changes::refused(self.label, &problems, metrics),
        }
    }
}
