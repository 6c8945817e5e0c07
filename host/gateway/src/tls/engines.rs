//! TLS to engines: from files to what connections use.

use std::{path::Path, sync::Arc};

use arc_swap::ArcSwapOption;
use pointsman_certificates::{client_config, pem, provider::PROVIDER, system_roots};
use pointsman_workers::{EngineTls, TlsClient};

use super::{changes, changes::Seen};
use crate::{
    config::{Problem, UpstreamTls},
    telemetry::tls_metrics::TlsMetrics,
};

/// The label in metrics.
const LABEL: &str = "engines";
/// The table in the configuration.
const PATH: &str = "upstream.tls";

/// The files of `[upstream.tls]`, and what connections use.
#[derive(Debug)]
pub(super) struct EngineFiles {
    in_use: Arc<EngineTls>,
    current: ArcSwapOption<InForce>,
}

#[derive(Debug)]
struct InForce {
    settings: UpstreamTls,
    /// Digest of the files' content.
    digest: [u8; 32],
}

/// Content of files that is not in force yet.
#[derive(Debug)]
pub(super) struct LoadedEngines {
    in_force: Arc<InForce>,
    client: TlsClient,
    /// When the gateway's own certificate expires, seconds since 1970.
    expires: Option<i64>,
}

/// Contents of the files.
struct Contents {
    authorities: Option<Vec<u8>>,
    /// Certificate and key.
    own: Option<(Vec<u8>, Vec<u8>)>,
}

impl EngineFiles {
    pub(super) fn new() -> Self {
        Self { in_use: Arc::default(), current: ArcSwapOption::empty() }
    }

    pub(super) fn in_use(&self) -> &Arc<EngineTls> {
        &self.in_use
    }

    pub(super) fn load(&self, settings: &UpstreamTls) -> Result<LoadedEngines, Vec<Problem>> {
        Contents::read(settings)?.load(settings)
    }

    pub(super) fn install(&self, loaded: LoadedEngines, metrics: &TlsMetrics) {
        metrics.expires(LABEL, loaded.expires);
        self.in_use.install(loaded.client);
        self.current.store(Some(loaded.in_force));
    }

    /// Reads the files, and puts a changed content in force that is valid.
    pub(super) fn look(&self, seen: &mut Seen, metrics: &TlsMetrics) {
        let Some(current) = self.current.load_full() else { return };
        let contents = Contents::read(&current.settings);
        let found = contents.as_ref().map(Contents::digest).map_err(Clone::clone);
        if !seen.is_due(found, current.digest) {
            return;
        }
        match contents.and_then(|contents| contents.load(&current.settings)) {
            Ok(loaded) => {
                let replaced =
                    self.current.compare_and_swap(&Some(current.clone()), Some(loaded.in_force.clone()));
                // A reload of the configuration was faster.
                if !replaced.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
                    return;
                }
                self.in_use.install(loaded.client);
                changes::applied(LABEL, loaded.expires, metrics);
            }
            Err(problems) => changes::refused(LABEL, &problems, metrics),
        }
    }
}

impl Contents {
    fn read(settings: &UpstreamTls) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut read = |key: &str, file: Option<&Path>| {
            let read = pem::read(file?);
            read.map_err(|message| problems.push(Problem::new(format!("{PATH}.{key}"), message))).ok()
        };
        let authorities = read("ca_file", settings.ca_file.as_deref());
        let certificate = read("cert_file", settings.cert_file.as_deref());
        let key = read("key_file", settings.key_file.as_deref());
        if problems.is_empty() { Ok(Self { authorities, own: certificate.zip(key) }) } else { Err(problems) }
    }

    fn digest(&self) -> [u8; 32] {
        let (certificate, key) = self.own.as_ref().map(|(certificate, key)| (certificate, key)).unzip();
        pem::digest([self.authorities.as_ref(), certificate, key].into_iter().flatten())
    }

    /// Checks the contents. The authorities of the system are read when the first connection needs them, or
    /// now if the gateway has a certificate.
    fn load(self, settings: &UpstreamTls) -> Result<LoadedEngines, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut note = |key: &str, message| problems.push(Problem::new(format!("{PATH}.{key}"), message));
        let in_force = Arc::new(InForce { settings: settings.clone(), digest: self.digest() });
        let roots = match (&settings.ca_file, &self.authorities) {
            (Some(file), Some(bytes)) => {
                pem::authorities(file, bytes).map(Some).map_err(|message| note("ca_file", message))
            }
            _ => Ok(None),
        };
        let own = match (&settings.cert_file, &settings.key_file, &self.own) {
            (Some(cert_file), Some(key_file), Some((certificate, key))) => {
                let (cert, key) = ((cert_file.as_path(), &**certificate), (key_file.as_path(), &**key));
                pem::certified_key(cert, key, &PROVIDER, &mut note)
            }
            _ => None,
        };
        let expires = own.as_ref().map(|(_, expires)| *expires);
        let own = own.map(|(own, _)| Arc::new(own));
        let (Ok(roots), true) = (roots, problems.is_empty()) else { return Err(problems) };
        let (roots, only_tls13) = (roots.map(Arc::new), settings.only_tls13());
        let client = TlsClient::new(move || {
            let roots = roots.clone().map_or_else(system_roots, Ok)?;
            let built = client_config(roots, own.clone(), only_tls13);
            built.map_err(|error| format!("TLS to engines cannot be set up: {error}"))
        });
        Ok(LoadedEngines { in_force, client, expires })
    }
}
