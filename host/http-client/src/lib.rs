//! The HTTP client of everything beside the data path: discovery, the keys of an identity server, the export
//! of traces, registries, the admin listener, `pointsman calibrate`.
//!
//! Its credentials are for the configured server only: a client follows no redirect, sends no referer, and
//! uses the proxies of the environment only when [`Setup::proxies`] is set. Each answer needs a limit of its
//! bytes ([`whole`]) and of its time.
//!
//! Requests and probes do not come through here. Requests use the crate `http1-client` (decision 16). Probes
//! use hyper: the certificate of a worker may have another name than the host of its URL, for which reqwest
//! has no setting.

use std::{error::Error, fmt, fs::File, io, io::Read as _, path::Path, time::Duration};

use reqwest::{Certificate, Client, Identity, Response, header::HeaderMap, redirect::Policy};

/// Largest PEM file that is read, bytes. A bundle of all public authorities has a quarter of a megabyte.
const MAX_PEM: u64 = 4 * 1024 * 1024;
/// Interval of TCP keepalive probes, which end a connection whose other end is gone.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// What a client is made of.
#[derive(Debug)]
pub struct Setup {
    /// Whose certificates are trusted.
    pub roots: Roots,
    /// Certificate and private key of this client.
    pub identity: Option<(Pem, Pem)>,
    /// Headers of every request.
    pub headers: HeaderMap,
    /// Longest time to connect.
    pub connect_timeout: Duration,
    /// Whether to use the proxies that the environment names.
    pub proxies: bool,
}

/// Whose certificates are trusted.
#[derive(Debug)]
pub enum Roots {
    /// Those that this machine trusts.
    System,
    /// Those that this machine trusts, and those of a file.
    SystemAnd(Pem),
    /// Those of a file.
    Only(Pem),
    /// None: the server has no TLS. The machine need not have root certificates.
    None,
}

/// A PEM file, and its name in messages.
pub struct Pem {
    name: String,
    bytes: Vec<u8>,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be used: its name and why.
    #[error("{0}: {1}")]
    File(String, String),
    /// The client cannot start: why.
    #[error(
        "the HTTP client cannot start: {0}; if this machine has no root certificates, install them \
         (ca-certificates) or name a file of authorities"
    )]
    Start(String),
}

/// Why there is no whole body.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The connection failed.
    #[error("{}", with_causes(.0))]
    Broken(reqwest::Error),
    /// The body is larger than this limit.
    #[error("the answer has more than {0} bytes")]
    TooLarge(usize),
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            roots: Roots::System,
            identity: None,
            headers: HeaderMap::new(),
            connect_timeout: Duration::from_secs(5),
            proxies: false,
        }
    }
}

impl Setup {
    /// Makes a client.
    ///
    /// # Errors
    /// A file is not PEM, or this machine trusts no authority.
    pub fn build(self) -> Result<Client, SetupError> {
        // Only the first call installs the provider; whichever is installed serves.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = Client::builder()
            .connect_timeout(self.connect_timeout)
            .default_headers(self.headers)
            .tcp_keepalive(KEEPALIVE)
            .redirect(Policy::none())
            .referer(false)
            .user_agent(concat!("pointsman/", env!("CARGO_PKG_VERSION")));
        let builder = if self.proxies { builder } else { builder.no_proxy() };
        let builder = match self.roots {
            Roots::System => builder,
            Roots::SystemAnd(pem) => builder.tls_certs_merge(pem.certificates()?),
            Roots::Only(pem) => builder.tls_certs_only(pem.certificates()?),
            Roots::None => builder.tls_certs_only([]),
        };
        let builder = match self.identity {
            Some((certificate, key)) => builder.identity(identity(&certificate, &key)?),
            None => builder,
        };
        builder.build().map_err(|error| SetupError::Start(with_causes(&error)))
    }
}

impl Roots {
    /// Returns the roots for a URL without a configured authority.
    #[must_use]
    pub fn of(url: &str) -> Self {
        if url.starts_with("http://") { Self::None } else { Self::System }
    }
}

impl Pem {
    /// Takes the content of a file.
    pub fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), bytes: bytes.into() }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is too large.
    pub fn read(name: impl Into<String>, file: &Path) -> Result<Self, SetupError> {
        let name = name.into();
        match read(file) {
            Ok(bytes) => Ok(Self { name, bytes }),
            Err(error) => Err(SetupError::File(name, error.to_string())),
        }
    }

    fn certificates(&self) -> Result<Vec<Certificate>, SetupError> {
        let failed = |problem: String| SetupError::File(self.name.clone(), problem);
        let found = Certificate::from_pem_bundle(&self.bytes);
        let found = found.map_err(|error| failed(with_causes(&error)))?;
        if found.is_empty() {
            return Err(failed("the file has no certificate".to_owned()));
        }
        Ok(found)
    }
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pem").field(&self.name).finish()
    }
}

fn read(file: &Path) -> io::Result<Vec<u8>> {
    // Opening a pipe that has no writer blocks.
    if !std::fs::metadata(file)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(file)?.take(MAX_PEM + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_PEM {
        return Err(io::Error::other(format!("the file has more than {MAX_PEM} bytes")));
    }
    Ok(bytes)
}

fn identity(certificate: &Pem, key: &Pem) -> Result<Identity, SetupError> {
    let pem = [&key.bytes[..], b"\n", &certificate.bytes].concat();
    Identity::from_pem(&pem).map_err(|error| {
        let problem = "expected a certificate and its private key as PEM";
        let files = format!("{}, {}", certificate.name, key.name);
        SetupError::File(files, format!("{problem}: {}", with_causes(&error)))
    })
}

/// Reads a body of at most `limit` bytes.
///
/// # Errors
/// The body is larger, or the connection fails.
pub async fn whole(mut response: Response, limit: usize) -> Result<Vec<u8>, BodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(BodyError::Broken)? {
        if body.len() + chunk.len() > limit {
            return Err(BodyError::TooLarge(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Returns an error with its causes: that of a connection alone does not say what happened.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests;
