//! The TLS in force on each listener. New handshakes use the newest; connections keep theirs.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;
use tokio_util::sync::CancellationToken;

use super::server::{Built, Contents};
use crate::{
    config::{Problem, Tls, settings::ServerSettings},
    telemetry::{metrics::Metrics, tls_metrics::TlsMetrics},
};

/// Interval of reading the files. A change is applied when two reads in a row find the same content.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// TLS of both listeners.
#[derive(Debug)]
pub(crate) struct TlsListeners {
    /// The clients' listener.
    pub(crate) clients: ListenerTls,
    /// The operators' listener.
    pub(crate) operators: ListenerTls,
}

/// TLS of one listener.
#[derive(Debug)]
pub(crate) struct ListenerTls {
    /// Its table in the configuration.
    path: &'static str,
    /// Its label in metrics.
    label: &'static str,
    /// Protocols that it offers (ALPN).
    protocols: &'static [&'static [u8]],
    /// What is in force; nothing: plain HTTP.
    current: ArcSwapOption<InForce>,
}

/// What is in force on a listener.
#[derive(Debug)]
struct InForce {
    settings: Tls,
    /// Digest of the files' content.
    digest: [u8; 32],
    built: Built,
}

/// TLS of both listeners, read from files and not in force yet.
#[derive(Debug)]
pub(crate) struct Loaded {
    clients: Option<Arc<InForce>>,
    operators: Option<Arc<InForce>>,
}

/// What one handshake uses.
#[derive(Clone, Debug)]
pub(crate) struct Handshake {
    /// Certificate, versions and protocols.
    pub(crate) config: Arc<ServerConfig>,
    /// The same for a connection that is only refused.
    pub(crate) refusing: Arc<ServerConfig>,
    /// How long it may take.
    pub(crate) timeout: Duration,
}

impl TlsListeners {
    /// Returns listeners with plain HTTP.
    pub(crate) fn new() -> Self {
        let listener = |path, label| ListenerTls {
            path,
            label,
            protocols: &[b"http/1.1"],
            current: ArcSwapOption::empty(),
        };
        Self {
            clients: listener("server.tls", "clients"),
            operators: listener("server.admin_tls", "operators"),
        }
    }

    /// Reads and checks the files of both listeners. Nothing changes.
    ///
    /// # Errors
    /// All problems.
    pub(crate) fn load(&self, server: &ServerSettings) -> Result<Loaded, Vec<Problem>> {
        let clients = self.clients.load(server.tls.as_ref());
        let operators = self.operators.load(server.admin_tls.as_ref());
        match (clients, operators) {
            (Ok(clients), Ok(operators)) => Ok(Loaded { clients, operators }),
            (clients, operators) => {
                Err([clients.err().unwrap_or_default(), operators.err().unwrap_or_default()].concat())
            }
        }
    }

    /// Puts what was loaded in force, for new handshakes.
    pub(crate) fn install(&self, loaded: Loaded, metrics: &Metrics) {
        self.clients.install(loaded.clients, &metrics.tls);
        self.operators.install(loaded.operators, &metrics.tls);
    }

    /// Reads the files again until `stop`, and puts changed ones in force.
    pub(crate) async fn watch(self: Arc<Self>, metrics: Arc<Metrics>, stop: CancellationToken) {
        let mut seen = [Seen::default(), Seen::default()];
        while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            let (listeners, metrics) = (self.clone(), metrics.clone());
            let looked = tokio::task::spawn_blocking(move || {
                let [clients, operators] = &mut seen;
                listeners.clients.look(clients, &metrics.tls);
                listeners.operators.look(operators, &metrics.tls);
                seen
            });
            let Ok(now) = looked.await else { return };
            seen = now;
        }
    }
}

/// What the last reading of a listener's files found: a digest, or problems.
#[derive(Debug, Default)]
struct Seen {
    last: Option<Result<[u8; 32], Vec<Problem>>>,
    /// The content was judged: it is in force, or was refused.
    judged: bool,
}

impl ListenerTls {
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

    fn load(&self, settings: Option<&Tls>) -> Result<Option<Arc<InForce>>, Vec<Problem>> {
        let Some(settings) = settings else { return Ok(None) };
        let contents = Contents::read(settings, self.path)?;
        self.build(settings, &contents).map(Some)
    }

    fn build(&self, settings: &Tls, contents: &Contents) -> Result<Arc<InForce>, Vec<Problem>> {
        let built = contents.build(settings, self.path, self.protocols)?;
        Ok(Arc::new(InForce { settings: settings.clone(), digest: contents.digest(), built }))
    }

    fn install(&self, loaded: Option<Arc<InForce>>, metrics: &TlsMetrics) {
        metrics.expires(self.label, loaded.as_ref().map(|loaded| loaded.built.expires));
        self.current.store(loaded);
    }

    /// Reads the files, and puts a changed content in force that is valid.
    fn look(&self, seen: &mut Seen, metrics: &TlsMetrics) {
        let Some(current) = self.current.load_full() else { return };
        let contents = Contents::read(&current.settings, self.path);
        let found = contents.as_ref().map(Contents::digest).map_err(Clone::clone);
        if found.as_ref().is_ok_and(|digest| *digest == current.digest) {
            *seen = Seen::default();
            return;
        }
        if seen.last.as_ref() != Some(&found) {
            // Files that are being written differ between two reads.
            *seen = Seen { last: Some(found), judged: false };
            return;
        }
        if std::mem::replace(&mut seen.judged, true) {
            return;
        }
        match contents.and_then(|contents| self.build(&current.settings, &contents)) {
            Ok(new) => {
                let expires = new.built.expires;
                let replaced = self.current.compare_and_swap(&Some(current.clone()), Some(new));
                // A reload of the configuration was faster.
                if !replaced.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
                    return;
                }
                metrics.reloaded(self.label, "applied");
                metrics.expires(self.label, Some(expires));
                tracing::info!(listener = self.label, expires, "certificate reloaded");
            }
            Err(problems) => {
                metrics.reloaded(self.label, "refused");
                let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
                let problems = problems.join("; ");
                tracing::error!(listener = self.label, problems, "certificate not reloaded");
            }
        }
    }
}
