//! A certificate for listeners on this machine, made for one run.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// Files of a certificate for 127.0.0.1 and localhost, and of the certificate authority that signed it.
#[derive(Debug)]
pub(crate) struct Certificates {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Certificates {
    /// Writes the files into a directory.
    pub(crate) fn write(dir: &Path) -> anyhow::Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, "Pointsman test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_key = KeyPair::generate()?;
        let root = params.self_signed(&root_key)?;
        let files = Self {
            authority: dir.join("authority.pem"),
            certificate: dir.join("certificate.pem"),
            key: dir.join("key.pem"),
            issuer: Issuer::new(params, root_key),
        };
        write(&files.authority, &root.pem())?;
        files.renew()?;
        Ok(files)
    }

    /// Replaces the certificate and its key by new ones from the same authority.
    pub(crate) fn renew(&self) -> anyhow::Result<()> {
        let mut leaf = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        leaf.distinguished_name.push(DnType::CommonName, "localhost");
        let key = KeyPair::generate()?;
        let certificate = leaf.signed_by(&key, &self.issuer)?;
        write(&self.certificate, &certificate.pem())?;
        write(&self.key, &key.serialize_pem())
    }

    /// Returns the keys of a `[server.tls]` table.
    pub(crate) fn table(&self) -> String {
        format!("cert_file = {:?}\nkey_file = {:?}\n", self.certificate, self.key)
    }
}

fn write(file: &Path, pem: &str) -> anyhow::Result<()> {
    std::fs::write(file, pem).with_context(|| file.display().to_string())
}
