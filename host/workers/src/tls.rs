//! TLS to engines: what new connections use, and why a connection failed.
//!
//! The gateway reads the files and installs what they contain. Its client and the prober connect with it.

use std::{
    error::Error,
    fmt,
    sync::{Arc, OnceLock},
};

use arc_swap::ArcSwap;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as TlsError,
    pki_types::{InvalidDnsNameError, ServerName},
};

use crate::os_errors::causes;

/// TLS of connections to engines. A change applies to new connections.
#[derive(Debug, Default)]
pub struct EngineTls(ArcSwap<TlsClient>);

type Build = dyn Fn() -> Result<Arc<ClientConfig>, String> + Send + Sync;

/// The TLS configuration of connections. The first connection builds it, so that a gateway whose engines have
/// no TLS does not read the authorities of the system.
pub struct TlsClient {
    build: Box<Build>,
    built: OnceLock<Arc<ClientConfig>>,
}

impl EngineTls {
    /// Uses `client` for new connections.
    pub fn install(&self, client: TlsClient) {
        self.0.store(Arc::new(client));
    }

    /// Returns what a new connection uses.
    ///
    /// # Errors
    /// It cannot be built. A later call tries again.
    pub fn config(&self) -> Result<Arc<ClientConfig>, String> {
        let client = self.0.load();
        if let Some(built) = client.built.get() {
            return Ok(built.clone());
        }
        let built = (client.build)()?;
        Ok(client.built.get_or_init(|| built).clone())
    }

    /// Returns whether a new connection would use `config`.
    #[must_use]
    pub fn is_current(&self, config: &Arc<ClientConfig>) -> bool {
        self.0.load().built.get().is_some_and(|built| Arc::ptr_eq(built, config))
    }
}

impl TlsClient {
    /// Returns a client that `build` makes when it is needed.
    pub fn new(build: impl Fn() -> Result<Arc<ClientConfig>, String> + Send + Sync + 'static) -> Self {
        Self { build: Box::new(build), built: OnceLock::new() }
    }
}

impl Default for TlsClient {
    /// Returns a client that cannot connect.
    fn default() -> Self {
        Self::new(|| Err("TLS to engines is not configured".to_owned()))
    }
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("is_built", &self.built.get().is_some()).finish_non_exhaustive()
    }
}

/// Returns the name that an engine's certificate must have: `configured`, else the host of its URL.
///
/// # Errors
/// It is neither a DNS name nor an address.
pub fn server_name(host: &str, configured: Option<&str>) -> Result<ServerName<'static>, InvalidDnsNameError> {
    let name = configured.unwrap_or(host);
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    ServerName::try_from(name.to_owned())
}

/// Returns what TLS has to say about a failed connection, with advice; `None` when TLS is not the cause.
#[must_use]
pub fn tls_problem(error: &(dyn Error + 'static)) -> Option<String> {
    cause(error).map(described)
}

/// Returns whether the engine itself ended the connection with an alert.
#[must_use]
pub fn is_tls_alert(error: &(dyn Error + 'static)) -> bool {
    matches!(cause(error), Some(TlsError::AlertReceived(_)))
}

/// Finds the error of TLS among the causes of an error.
fn cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TlsError> {
    causes(error).find_map(<dyn Error>::downcast_ref)
}

fn described(error: &TlsError) -> String {
    match error {
        TlsError::InvalidCertificate(problem) => match problem {
            CertificateError::UnknownIssuer => "no trusted authority signed the engine's certificate: name the \
                                                file of its authority (upstream.tls.ca_file, or --tls-ca)"
                .to_owned(),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the engine's certificate has expired: renew it".to_owned()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the engine's certificate is not valid yet: check the clocks".to_owned()
            }
            problem if is_of_authority(problem) => {
                format!("the engine's certificate is that of an authority: {OF_AUTHORITY}")
            }
            CertificateError::NotValidForName => wrong_name(&[]),
            CertificateError::NotValidForNameContext { presented, .. } => wrong_name(presented),
            problem => format!("the engine's certificate cannot be used: {problem}"),
        },
        TlsError::AlertReceived(AlertDescription::CertificateRequired) => {
            "the engine wants a certificate of its clients: name its files (upstream.tls.cert_file and key_file, \
             or --tls-cert and --tls-key)"
                .to_owned()
        }
        TlsError::AlertReceived(AlertDescription::ProtocolVersion) => {
            "the engine refuses TLS 1.2 and 1.3, or upstream.tls.min_version is too high for it".to_owned()
        }
        TlsError::AlertReceived(alert) => format!(
            "the engine ended the TLS connection with the alert {alert:?}: if it checks certificates of \
             clients, check upstream.tls.cert_file"
        ),
        TlsError::InvalidMessage(_) => {
            "the engine does not speak TLS here: use another port, or http://".to_owned()
        }
        error => format!("TLS to the engine failed: {error}"),
    }
}

/// What to do about a certificate whose `basicConstraints` say `CA:TRUE`.
const OF_AUTHORITY: &str = "make it with `openssl req -x509 -addext basicConstraints=critical,CA:FALSE`, or use \
                                one that the authority signed";

/// Returns whether the problem is that an engine showed the certificate of an authority, as
/// `openssl req -x509` makes it without further flags.
fn is_of_authority(problem: &CertificateError) -> bool {
    // rustls has no variant of its own for this error of webpki, and hides its type.
    matches!(problem, CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity"))
}

fn wrong_name(presented: &[String]) -> String {
    let names =
        if presented.is_empty() { String::new() } else { format!(" (it is for {})", presented.join(", ")) };
    format!(
        "the engine's certificate is not for this name{names}: use a name of the certificate in the worker's url, \
         or set its tls_server_name"
    )
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_problem_of_tls_is_found_behind_other_errors_and_says_what_to_do() {
        let wrapped = |error: TlsError| io::Error::other(io::Error::new(io::ErrorKind::InvalidData, error));
        let of = |error: TlsError| tls_problem(&wrapped(error)).unwrap_or_default();
        #[derive(Debug, thiserror::Error)]
        #[error("of webpki")]
        struct CaUsedAsEndEntity;
        let of_authority = CertificateError::Other(rustls::OtherError(Arc::new(CaUsedAsEndEntity)));
        for (error, advice) in [
            (TlsError::InvalidCertificate(CertificateError::UnknownIssuer), "upstream.tls.ca_file"),
            (TlsError::InvalidCertificate(CertificateError::Expired), "has expired"),
            (TlsError::InvalidCertificate(CertificateError::NotValidForName), "tls_server_name"),
            (TlsError::InvalidCertificate(of_authority.clone()), "basicConstraints=critical,CA:FALSE"),
            (TlsError::AlertReceived(AlertDescription::CertificateRequired), "upstream.tls.cert_file"),
            (TlsError::AlertReceived(AlertDescription::UnknownCA), "UnknownCA"),
            (TlsError::InvalidMessage(rustls::InvalidMessage::InvalidContentType), "http://"),
        ] {
            let problem = of(error);
            assert!(problem.contains(advice), "{advice}: {problem}");
        }
        assert_eq!(tls_problem(&io::Error::from_raw_os_error(104)), None);
        assert!(is_tls_alert(&wrapped(TlsError::AlertReceived(AlertDescription::UnknownCA))));
        assert!(!is_tls_alert(&wrapped(TlsError::InvalidCertificate(CertificateError::Expired))));
    }

    #[test]
    fn names_are_dns_names_or_addresses_and_the_configured_one_comes_first() {
        let of = |host, configured| server_name(host, configured).map(|name| name.to_str().into_owned()).ok();
        assert_eq!(of("a.example", None).as_deref(), Some("a.example"));
        assert_eq!(of("10.0.0.1", Some("a.example")).as_deref(), Some("a.example"));
        assert_eq!(of("[::1]", None).as_deref(), Some("::1"));
        assert_eq!(of("a b", None), None);
    }

    #[test]
    fn what_cannot_be_built_is_tried_again_and_what_is_built_is_kept() {
        let tls = EngineTls::default();
        assert!(tls.config().is_err());
        let tries = std::sync::atomic::AtomicUsize::new(0);
        tls.install(TlsClient::new(move || {
            if tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 {
                return Err("not yet".to_owned());
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let builder = builder.map_err(|error| error.to_string())?;
            let roots = rustls::RootCertStore::empty();
            Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
        }));
        assert_eq!(tls.config().unwrap_err(), "not yet");
        let built = tls.config().unwrap();
        assert!(Arc::ptr_eq(&built, &tls.config().unwrap()) && tls.is_current(&built));
        tls.install(TlsClient::default());
        assert!(!tls.is_current(&built));
    }
}
