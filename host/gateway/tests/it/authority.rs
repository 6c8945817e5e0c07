//! A certificate authority of a test, and a server certificate for loopback addresses.

#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    },
};

pub(crate) struct Authority {
    /// The root certificate.
    pub(crate) pem: String,
    config: Arc<ServerConfig>,
}

impl Authority {
    /// Creates an authority that certifies `host`.
    pub(crate) fn new(host: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        // Without a name of their own, two roots would be mistaken for one another.
        let name = format!("root {:?}", std::time::SystemTime::now());
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let root = params.self_signed(&key).expect("a root");
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate().expect("a key");
        let leaf = CertificateParams::new(vec![host.to_owned()]).expect("parameters");
        let leaf = leaf.signed_by(&key, &issuer).expect("a certificate");
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)
            .expect("a server");
        Self { pem: root.pem(), config: Arc::new(config) }
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.clone())
    }
}
