//! TLS to engines: from files to what connections use.

use std::{path::Path, sync::Arc};

use arc_swap::ArcSwapOption;
use pointsman_workers::{EngineTls, TlsClient};
use rustls::{
    ClientConfig, Error, RootCertStore,
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::{changes, changes::Seen, pem, provider::PROVIDER, provider::versions};
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

/// What was read and is not in force yet.
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
        let (roots, settings) = (roots.map(Arc::new), settings.clone());
        let client = TlsClient::new(move || {
            let roots = roots.clone().map_or_else(system_roots, Ok)?;
            let built = client_config(roots, own.clone(), &settings);
            built.map_err(|error| format!("TLS to engines cannot be set up: {error}"))
        });
        Ok(LoadedEngines { in_force, client, expires })
    }
}

/// Returns what a command uses to connect with the files of `settings`.
///
/// # Errors
/// All problems of the files.
pub(crate) fn engine_client(settings: &UpstreamTls) -> Result<Arc<ClientConfig>, String> {
    let loaded = Contents::read(settings).and_then(|contents| contents.load(settings));
    let loaded = loaded.map_err(|problems| {
        let messages: Vec<String> = problems.into_iter().map(|problem| problem.message).collect();
        messages.join("; ")
    })?;
    let tls = EngineTls::default();
    tls.install(loaded.client);
    tls.config()
}

/// Returns what a command uses that connects without TLS only.
///
/// # Errors
/// TLS cannot be set up.
pub(crate) fn no_trust() -> Result<Arc<ClientConfig>, Error> {
    client_config(Arc::new(RootCertStore::empty()), None, &UpstreamTls::default())
}

fn client_config(
    roots: Arc<RootCertStore>,
    own: Option<Arc<CertifiedKey>>,
    settings: &UpstreamTls,
) -> Result<Arc<ClientConfig>, Error> {
    let builder = ClientConfig::builder_with_provider(PROVIDER.clone());
    let builder = builder.with_protocol_versions(versions(settings.only_tls13()))?;
    let builder = builder.with_root_certificates(roots);
    let mut config = match own {
        Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Returns the authorities that this machine trusts.
fn system_roots() -> Result<Arc<RootCertStore>, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map_or_else(String::new, |error| format!(" ({error})"));
        return Err(format!(
            "this machine trusts no authority{why}: install its root certificates (ca-certificates), or set \
             upstream.tls.ca_file"
        ));
    }
    Ok(Arc::new(roots))
}
