//! All that TLS uses here: the certificates of both listeners, and what is used towards engines.

use std::{sync::Arc, time::Duration};

use pointsman_certificates::pem::Expired;
use pointsman_workers::EngineTls;
use tokio_util::sync::CancellationToken;

use super::{
    engines::{EngineFiles, LoadedEngines},
    listeners::{ListenerTls, LoadedListener},
};
use crate::{
    config::{Problem, Server, Tls, Upstream},
    telemetry::metrics::Metrics,
};

/// Interval of reading the files. A change is applied when two reads in a row find the same content.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Protocols that a listener offers (ALPN), in the order of preference.
static HTTP1: [&[u8]; 1] = [b"http/1.1"];
static HTTP2: [&[u8]; 1] = [b"h2"];
static HTTP2_OR_1: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// What TLS uses. New handshakes use the newest; connections keep theirs.
#[derive(Debug)]
pub(crate) struct TlsContext {
    /// The clients' listener.
    pub(crate) clients: ListenerTls,
    /// The operators' listener.
    pub(crate) operators: ListenerTls,
    /// The listener of the endpoint picker.
    pub(crate) proxies: ListenerTls,
    engines: EngineFiles,
}

/// Content of files that is not in force yet.
#[derive(Debug)]
pub(crate) struct Loaded {
    clients: LoadedListener,
    operators: LoadedListener,
    engines: LoadedEngines,
}

impl TlsContext {
    /// Returns listeners with plain HTTP, and trust in no engine.
    pub(crate) fn new() -> Self {
        Self {
            clients: ListenerTls::new("server.tls", "clients"),
            operators: ListenerTls::new("server.admin_tls", "operators"),
            proxies: ListenerTls::new("ext_proc.tls", "ext_proc"),
            engines: EngineFiles::new(),
        }
    }

    /// Returns what connections to engines use.
    pub(crate) fn engines(&self) -> &Arc<EngineTls> {
        self.engines.in_use()
    }

    /// Reads and checks all files. Nothing changes. `expired` is for certificates that are not in force
    /// already.
    ///
    /// # Errors
    /// All problems.
    pub(crate) fn load(
        &self,
        server: &Server,
        upstream: &Upstream,
        expired: Expired,
    ) -> Result<Loaded, Vec<Problem>> {
        let protocols = if server.http2.enabled { &HTTP2_OR_1[..] } else { &HTTP1[..] };
        let clients = self.clients.load(server.tls.as_ref(), protocols, expired);
        let operators = self.operators.load(server.admin_tls.as_ref(), &HTTP1, expired);
        let engines = self.engines.load(&upstream.tls, expired);
        match (clients, operators, engines) {
            (Ok(clients), Ok(operators), Ok(engines)) => Ok(Loaded { clients, operators, engines }),
            (clients, operators, engines) => {
                let problems = [clients.err(), operators.err(), engines.err()];
                Err(problems.into_iter().flatten().flatten().collect())
            }
        }
    }

    /// Reads and checks the files of the endpoint picker's listener, whose settings only a restart changes.
    ///
    /// # Errors
    /// All problems.
    pub(crate) fn load_proxies(
        &self,
        settings: Option<&Tls>,
        expired: Expired,
    ) -> Result<LoadedListener, Vec<Problem>> {
        self.proxies.load(settings, &HTTP2, expired)
    }

    /// Puts them in force, for new handshakes.
    pub(crate) fn install_proxies(&self, loaded: LoadedListener, metrics: &Metrics) {
        self.proxies.install(loaded, &metrics.tls);
    }

    /// Puts what was loaded in force, for new handshakes.
    pub(crate) fn install(&self, loaded: Loaded, metrics: &Metrics) {
        self.clients.install(loaded.clients, &metrics.tls);
        self.operators.install(loaded.operators, &metrics.tls);
        self.engines.install(loaded.engines, &metrics.tls);
    }

    /// Reads the files again until `stop`, and puts changed ones in force.
    pub(crate) async fn watch(self: Arc<Self>, metrics: Arc<Metrics>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            let (context, metrics) = (self.clone(), metrics.clone());
            let looked = tokio::task::spawn_blocking(move || {
                context.clients.look(&metrics.tls);
                context.operators.look(&metrics.tls);
                context.proxies.look(&metrics.tls);
                context.engines.look(&metrics.tls);
            });
            if looked.await.is_err() {
                return;
            }
        }
    }

    /// Returns which changed files are not in force, and which certificates in force have expired.
    pub(crate) fn problems(&self) -> Vec<String> {
        let listeners = [&self.clients, &self.operators, &self.proxies].map(ListenerTls::problems);
        [listeners.concat(), self.engines.problems()].concat()
    }
}
