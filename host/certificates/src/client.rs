//! The configuration of a TLS client.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, Error, RootCertStore,
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::{
    pem,
    provider::{PROVIDER, versions},
};

/// Returns what a command uses to connect: the authorities of a file or those that this machine trusts, and a
/// certificate with its key.
///
/// # Errors
/// All problems of the files.
pub fn client(authorities: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, String> {
    let mut problems = Vec::new();
    let read = |file: &Path, problems: &mut Vec<String>| {
        pem::read(file).map_err(|message| problems.push(message)).ok()
    };
    let roots = authorities.and_then(|file| {
        let roots = pem::authorities(file, &read(file, &mut problems)?);
        roots.map_err(|message| problems.push(message)).ok()
    });
    let own = own.and_then(|(cert_file, key_file)| {
        let (cert, key) = (read(cert_file, &mut problems), read(key_file, &mut problems));
        let (cert, key) = (cert?, key?);
        let mut note = |_: &str, message| problems.push(message);
        pem::certified_key((cert_file, &cert), (key_file, &key), &PROVIDER, &mut note)
    });
    if !problems.is_empty() {
        return Err(problems.join("; "));
    }
    let roots = roots.map_or_else(system_roots, |roots| Ok(Arc::new(roots)))?;
    let own = own.map(|(own, _)| Arc::new(own));
    client_config(roots, own, false).map_err(|error| format!("TLS to engines cannot be set up: {error}"))
}

/// Returns what a command uses that connects without TLS only.
///
/// # Errors
/// TLS cannot be set up.
pub fn no_trust() -> Result<Arc<ClientConfig>, Error> {
    client_config(Arc::new(RootCertStore::empty()), None, false)
}

/// Returns the configuration of a client for HTTP/1.1 that trusts `roots` and shows `own`.
///
/// # Errors
/// TLS cannot be set up.
pub fn client_config(
    roots: Arc<RootCertStore>,
    own: Option<Arc<CertifiedKey>>,
    only_tls13: bool,
) -> Result<Arc<ClientConfig>, Error> {
    let builder = ClientConfig::builder_with_provider(PROVIDER.clone());
    let builder = builder.with_protocol_versions(versions(only_tls13))?;
    let builder = builder.with_root_certificates(roots);
    let mut config = match own {
        Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Returns the authorities that this machine trusts.
///
/// # Errors
/// It trusts none.
pub fn system_roots() -> Result<Arc<RootCertStore>, String> {
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
