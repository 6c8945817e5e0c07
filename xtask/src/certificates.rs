//! A certificate for listeners on this machine, made for one run.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// Files of a certificate for 127.0.0.1 and localhost, and of the authority that signed it.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Certificates {
    /// Writes the files into a directory.
    pub(crate) fn write(dir: &Path) -> anyhow::Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, "Pointsman test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_key = KeyPair::generate()?;
        let root = params.self_signed(&root_key)?;
        let mut leaf = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        leaf.distinguished_name.push(DnType::CommonName, "localhost");
        let key = KeyPair::generate()?;
        let certificate = leaf.signed_by(&key, &Issuer::new(params, root_key))?;
        let write = |name: &str, pem: String| {
            let file = dir.join(name);
            std::fs::write(&file, pem).with_context(|| file.display().to_string())?;
            anyhow::Ok(file)
        };
        Ok(Self {
            authority: write("authority.pem", root.pem())?,
            certificate: write("certificate.pem", certificate.pem())?,
            key: write("key.pem", key.serialize_pem())?,
        })
    }

    /// Returns the keys of a `[server.tls]` table.
    pub(crate) fn table(&self) -> String {
        format!("cert_file = {:?}\nkey_file = {:?}\n", self.certificate, self.key)
    }
}
