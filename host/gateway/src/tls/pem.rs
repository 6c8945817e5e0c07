//! PEM files: read within a size, and taken apart.

use std::{fs::File, io::Read as _, path::Path};

use rustls::{
    RootCertStore,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{Error, PemObject as _},
    },
};

/// Largest file that is read, bytes. A bundle of all public authorities has a quarter of a megabyte.
const MAX_FILE: u64 = 4 * 1024 * 1024;

/// Reads a file.
///
/// # Errors
/// What is wrong with it, and what to do.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error| format!("cannot read `{shown}`: {error}; check the path and its permissions");
    let file = File::open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("`{shown}` is not a file: name a PEM file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(format!("`{shown}` has more than {MAX_FILE} bytes: name a PEM file"));
    }
    Ok(bytes)
}

/// Returns the certificates of a file.
///
/// # Errors
/// The file has none, or is not PEM.
pub(super) fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => {
            Err(format!("`{}` contains no certificate: expected PEM blocks `CERTIFICATE`", path.display()))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(format!("`{}` is not a PEM file: {error}", path.display())),
    }
}

/// Returns the private key of a file.
///
/// # Errors
/// The file has none.
pub(super) fn private_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
        Error::NoItemsFound => format!(
            "`{}` contains no private key that can be used: expected a PEM block `PRIVATE KEY`, `EC PRIVATE KEY` or \
             `RSA PRIVATE KEY`, not encrypted",
            path.display()
        ),
        error => format!("`{}` is not a PEM file: {error}", path.display()),
    })
}

/// Returns the authorities of a file.
///
/// # Errors
/// The file has none, or one of them cannot be used.
pub(super) fn authorities(path: &Path, bytes: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for (index, certificate) in certificates(path, bytes)?.into_iter().enumerate() {
        roots.add(certificate).map_err(|error| {
            format!("certificate {index} of `{}` cannot be an authority: {error}", path.display())
        })?;
    }
    Ok(roots)
}
