//! The configuration of a TLS client.

use std::sync::Arc;

use rustls::{
    ClientConfig, Error, RootCertStore,
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::provider::{PROVIDER, versions};

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
