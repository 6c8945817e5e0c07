//! PEM files: read within a size, taken apart, and checked.

use std::{
    fs::File,
    io::Read as _,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustls::{
    Error as TlsError, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{Error, PemObject as _},
    },
    sign::CertifiedKey,
};
use sha2::{Digest as _, Sha256};
use x509_cert::der::DateTime;

use crate::x509::Certificate;

/// Largest file that is read, bytes. A bundle of all public authorities has a quarter of a megabyte.
const MAX_FILE: u64 = 4 * 1024 * 1024;

/// Whether an expired certificate is a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expired {
    /// A problem.
    Refused,
    /// As good as another one: peers refuse it by themselves.
    Accepted,
}

/// Reads a file.
///
/// # Errors
/// The text says what is wrong with the file, and what to do.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
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
pub fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
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
pub(crate) fn private_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
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
pub fn authorities(path: &Path, bytes: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for (index, certificate) in certificates(path, bytes)?.into_iter().enumerate() {
        roots.add(certificate).map_err(|error| {
            format!("certificate {index} of `{}` cannot be an authority: {error}", path.display())
        })?;
    }
    Ok(roots)
}

/// Returns a digest that differs when one of the files does.
pub fn digest<'a>(files: impl Iterator<Item = &'a Vec<u8>>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for file in files {
        hash.update(file.len().to_le_bytes());
        hash.update(file);
    }
    hash.finalize().into()
}

/// Returns a certificate with its key, each from a path with its content, and when the certificate expires,
/// in seconds since 1970. `note` receives each problem with its key, `cert_file` or `key_file`.
pub fn certified_key(
    (cert_file, certificate): (&Path, &[u8]),
    (key_file, key): (&Path, &[u8]),
    expired: Expired,
    provider: &CryptoProvider,
    note: &mut impl FnMut(&str, String),
) -> Option<(CertifiedKey, i64)> {
    let chain = certificates(cert_file, certificate).map_err(|message| note("cert_file", message)).ok();
    let key = private_key(key_file, key).map_err(|message| note("key_file", message)).ok();
    let (chain, key) = (chain?, key?);
    let expires =
        expiry(chain.first()?, cert_file, expired).map_err(|message| note("cert_file", message)).ok();
    let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        let (key, cert) = (key_file.display(), cert_file.display());
        let message = match error {
            TlsError::InconsistentKeys(_) => {
                format!("`{key}` is not the key of the certificate in `{cert}`: name the files of one pair")
            }
            error => format!("`{key}` cannot be used: {error}"),
        };
        note("key_file", message);
    });
    Some((certified.ok()?, expires?))
}

/// Returns whether the first certificate of a file is that of an authority; `false` if it cannot be read.
#[must_use]
pub fn is_of_authority(path: &Path) -> bool {
    let chain = read(path).and_then(|bytes| certificates(path, &bytes)).unwrap_or_default();
    chain.first().and_then(|first| Certificate::parse(first)).is_some_and(|first| first.is_authority)
}

/// Returns when a certificate expires, in seconds since 1970.
///
/// # Errors
/// It is malformed, is not valid yet, or has expired and is refused for that.
fn expiry(certificate: &CertificateDer<'_>, file: &Path, expired: Expired) -> Result<i64, String> {
    let shown = file.display();
    let Certificate { not_before, not_after, .. } = Certificate::parse(certificate)
        .ok_or_else(|| format!("the first certificate of `{shown}` is malformed: issue another one"))?;
    if not_before.unix_duration() > since_1970() {
        return Err(format!(
            "the certificate in `{shown}` is not valid before {}: check the clock of this machine",
            time_text(not_before)
        ));
    }
    let expires = i64::try_from(not_after.unix_duration().as_secs()).unwrap_or(i64::MAX);
    match expiry_problem(file, expires) {
        Some(message) if expired == Expired::Refused => Err(message),
        _ => Ok(expires),
    }
}

/// Says that a certificate has expired, once it has. `expires` is in seconds since 1970.
#[must_use]
pub fn expiry_problem(file: &Path, expires: i64) -> Option<String> {
    let expires = Duration::from_secs(u64::try_from(expires).unwrap_or(0));
    if expires >= since_1970() {
        return None;
    }
    let time = DateTime::from_unix_duration(expires).map(time_text).unwrap_or_default();
    Some(format!("the certificate in `{}` expired on {time}: renew it", file.display()))
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A time as `2024-02-29 00:00:00 UTC`.
fn time_text(time: DateTime) -> String {
    time.to_string().replace('T', " ").replace('Z', " UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_as_people_write_it() {
        let time = DateTime::new(2024, 2, 29, 0, 0, 0).unwrap();
        assert_eq!(time_text(time), "2024-02-29 00:00:00 UTC");
    }
}
