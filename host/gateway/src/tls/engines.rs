//! TLS to engines: from files to what connections use.

use std::{path::Path, sync::Arc};

use arc_swap::ArcSwapOption;
use pointsman_certificates::{
    client_config,
    pem::{self, Expired},
    provider::PROVIDER,
    system_roots,
};
use pointsman_workers::{EngineTls, TlsClient};

use super::changes::{OwnCertificate, WatchedFiles};
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
    files: WatchedFiles,
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
    /// The gateway's own.
    certificate: Option<OwnCertificate>,
}

/// Contents of the files.
struct Contents {
    authorities: Option<Vec<u8>>,
    /// Certificate and key.
    own: Option<(Vec<u8>, Vec<u8>)>,
}

impl EngineFiles {
    pub(super) fn new() -> Self {
        let files = WatchedFiles::new(PATH, LABEL);
        Self { files, in_use: Arc::default(), current: ArcSwapOption::empty() }
    }

    pub(super) fn in_use(&self) -> &Arc<EngineTls> {
        &self.in_use
    }

    /// Reads and checks the files. `expired` is for a certificate that is not in force already.
    pub(super) fn load(
        &self,
        settings: &UpstreamTls,
        expired: Expired,
    ) -> Result<LoadedEngines, Vec<Problem>> {
        let contents = Contents::read(settings)?;
        let current = self.current.load();
        let in_force = current.as_ref().is_some_and(|current| current.digest == contents.digest());
        contents.load(settings, if in_force { Expired::Accepted } else { expired })
    }

    pub(super) fn install(&self, loaded: LoadedEngines, metrics: &TlsMetrics) {
        self.files.installed(loaded.certificate, metrics);
        self.in_use.install(loaded.client);
        self.current.store(Some(loaded.in_force));
    }

    /// Reads the files, and puts a changed content in force that is valid.
    pub(super) fn look(&self, metrics: &TlsMetrics) {
        let Some(current) = self.current.load_full() else { return };
        let contents = Contents::read(&current.settings);
        let found = contents.as_ref().map(Contents::digest).map_err(Clone::clone);
        if !self.files.is_due(found, current.digest, metrics) {
            return;
        }
        match contents.and_then(|contents| contents.load(&current.settings, Expired::Refused)) {
            Ok(loaded) => {
                let replaced =
                    self.current.compare_and_swap(&Some(current.clone()), Some(loaded.in_force.clone()));
                // A reload of the configuration was faster.
                if !replaced.as_ref().is_some_and(|before| Arc::ptr_eq(before, &current)) {
                    return;
                }
                self.in_use.install(loaded.client);
                self.files.applied(loaded.certificate, metrics);
            }
            Err(problems) => self.files.refused(&problems, metrics),
        }
    }

    /// Returns what operators should know of the files.
    pub(super) fn problems(&self) -> Vec<String> {
        self.files.problems()
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
    fn load(self, settings: &UpstreamTls, expired: Expired) -> Result<LoadedEngines, Vec<Problem>> {
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
                pem::certified_key(cert, key, expired, &PROVIDER, &mut note)
            }
            _ => None,
        };
        let expires = own.as_ref().map(|(_, expires)| *expires);
        let certificate = settings.cert_file.as_deref().zip(expires);
        let certificate = certificate.map(|(file, expires)| OwnCertificate::new(file, expires));
        let own = own.map(|(own, _)| Arc::new(own));
        let (Ok(roots), true) = (roots, problems.is_empty()) else { return Err(problems) };
        let (roots, only_tls13) = (roots.map(Arc::new), settings.only_tls13());
        let client = TlsClient::new(move || {
            let roots = roots.clone().map_or_else(system_roots, Ok)?;
            let built = client_config(roots, own.clone(), only_tls13);
            built.map_err(|error| format!("TLS to engines cannot be set up: {error}"))
        });
        Ok(LoadedEngines { in_force, client, certificate })
    }
}
