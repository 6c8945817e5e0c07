//! Certificates of a test's own authority, and clients and files that use them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context as _;
use pointsman_gateway::config::Tls;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, SanType,
    date_time_ymd,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    /// Its certificate.
    pub pem: String,
}

/// Fields of a certificate.
#[derive(Clone, Debug, Default)]
pub struct Leaf {
    /// DNS names and IP addresses.
    pub names: Vec<&'static str>,
    /// A URI.
    pub uri: Option<&'static str>,
    /// Whether its time is over.
    pub expired: bool,
    /// Whether it has no common name.
    pub unnamed: bool,
}

/// A certificate with its key.
pub struct Issued {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// File with the certificate.
    pub certificate_pem: String,
    /// The key as a file.
    pub key_pem: String,
    key: PrivatePkcs8KeyDer<'static>,
}

impl Authority {
    /// Creates an authority.
    ///
    /// # Errors
    /// A key cannot be made.
    pub fn new() -> anyhow::Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        let key = KeyPair::generate()?;
        // Without a name of its own, one authority would be mistaken for another.
        let name = format!("root {:x?}", key.public_key_raw().get(..8));
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key)?;
        Ok(Self { pem: root.pem(), certificate: root.der().clone(), issuer: Issuer::new(params, key) })
    }

    /// Signs a certificate.
    ///
    /// # Errors
    /// A name is not valid.
    pub fn issue(&self, leaf: &Leaf) -> anyhow::Result<Issued> {
        let names: Vec<String> = leaf.names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        if let Some(uri) = leaf.uri {
            params.subject_alt_names.push(SanType::URI(uri.try_into()?));
        }
        if leaf.unnamed {
            params.distinguished_name = DistinguishedName::new();
        }
        if leaf.expired {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Issued {
            certificate: certificate.der().clone(),
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()),
        })
    }

    /// Signs a certificate for 127.0.0.1 and localhost.
    ///
    /// # Errors
    /// Same as [`Authority::issue`].
    pub fn server(&self) -> anyhow::Result<Issued> {
        self.issue(&Leaf { names: vec!["127.0.0.1", "localhost"], ..Leaf::default() })
    }

    /// Returns the configuration of a client that trusts this authority.
    ///
    /// # Errors
    /// A certificate cannot be used.
    pub fn client(&self, own: Option<&Issued>, protocols: &[&str]) -> anyhow::Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone())?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let mut config = match own {
            Some(own) => {
                let key = PrivateKeyDer::Pkcs8(own.key.clone_key());
                builder.with_client_auth_cert(vec![own.certificate.clone()], key)?
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Ok(Arc::new(config))
    }
}

/// Connects with TLS to a loopback address.
///
/// # Errors
/// The handshake failed.
pub async fn connect(
    address: SocketAddr,
    config: &Arc<ClientConfig>,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::IpAddress(address.ip().into());
    Ok(TlsConnector::from(config.clone()).connect(name, stream).await?)
}

/// Files of a listener.
pub struct TlsFiles {
    dir: TempDir,
}

impl TlsFiles {
    /// Writes a certificate with its key, and the authority of clients.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn new(issued: &Issued, clients: Option<&Authority>) -> anyhow::Result<Self> {
        let files = Self { dir: TempDir::new()? };
        files.write("cert.pem", &issued.certificate_pem)?;
        files.write("key.pem", &issued.key_pem)?;
        if let Some(authority) = clients {
            files.write("ca.pem", &authority.pem)?;
        }
        Ok(files)
    }

    /// Writes one of the files `cert.pem`, `key.pem` and `ca.pem`.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        std::fs::write(self.path(name), text).with_context(|| format!("writing {name}"))
    }

    /// Path of a file.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the configuration of a listener with these files.
    #[must_use]
    pub fn tls(&self) -> Tls {
        let ca = self.path("ca.pem");
        Tls {
            cert_file: self.path("cert.pem"),
            key_file: self.path("key.pem"),
            client_ca_file: ca.exists().then_some(ca),
            ..Tls::default()
        }
    }
}
