//! The HTTP client of a registry: TLS, proxies, and which addresses it may reach.

use std::{path::Path, time::Duration};

use pointsman_http_client::{Pem, Roots, Setup, SetupError};
use reqwest::{Client, Url};

use super::error::{RegistryError, clean};
use crate::place::Reference;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// HTTP client for one registry.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) client: Client,
    /// Scheme, host and port of the registry.
    pub(super) origin: Url,
    /// The operator allows requests without TLS.
    plain_http: bool,
}

impl Connection {
    pub(super) fn new(
        reference: &Reference,
        plain_http: bool,
        tls_ca: Option<&Path>,
    ) -> Result<Self, RegistryError> {
        let host = reference.api_host();
        let url = |scheme: &str| {
            Url::parse(&format!("{scheme}://{host}/")).map_err(|error| {
                RegistryError::new(format!("\"{host}\" is not a host: {error}"), "check the reference")
            })
        };
        let origin = url("https")?;
        let local = is_loopback(&origin);
        let without_tls = plain_http || (local && tls_ca.is_none());
        let origin = if without_tls { url("http")? } else { origin };
        let client = client(without_tls, local, tls_ca)?;
        Ok(Self { client, origin, plain_http })
    }

    /// Returns whether a URL is one of the registry itself, which may see the credentials.
    pub(super) fn is_registry(&self, url: &Url) -> bool {
        url.origin() == self.origin.origin()
    }

    /// Checks a URL that the registry names. It must not lead from TLS to plain text.
    pub(super) fn check(&self, url: Url) -> Result<Url, RegistryError> {
        let plain = self.origin.scheme() == "http"
            && (self.plain_http || self.is_registry(&url) || is_loopback(&url));
        let allowed = match url.scheme() {
            "https" => true,
            "http" => plain,
            _ => false,
        };
        if allowed && url.has_host() {
            return Ok(url);
        }
        Err(RegistryError::new(
            format!("the registry sends its client to {}, which has no TLS", clean(&shown(&url))),
            "fix the registry's external URL, or use --plain-http if the network is trusted",
        ))
    }
}

/// Returns a URL without its query and user, which may contain secrets.
pub(super) fn shown(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path())
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn client(without_tls: bool, local: bool, tls_ca: Option<&Path>) -> Result<Client, RegistryError> {
    let build = |roots| {
        Setup { roots, connect_timeout: CONNECT_TIMEOUT, proxies: !local, ..Setup::default() }.build()
    };
    let built = match tls_ca {
        Some(file) => Pem::read(format!("--tls-ca {}", file.display()), file)
            .and_then(|pem| build(Roots::SystemAnd(pem))),
        // A machine without root certificates can still reach a registry without TLS.
        None if without_tls => build(Roots::System).or_else(|_| build(Roots::None)),
        None => build(Roots::System),
    };
    built.map_err(|error| match error {
        SetupError::File(..) => RegistryError::new(
            clean(&error.to_string()),
            "give a PEM file with the certificates of trusted roots",
        ),
        SetupError::Start(why) => RegistryError::new(
            format!("the HTTP client cannot start: {}", clean(&why)),
            "install the system's root certificates (ca-certificates), or give a file with --tls-ca",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(reference: &str, plain_http: bool) -> Connection {
        Connection::new(&reference.parse().unwrap(), plain_http, None).unwrap()
    }

    #[test]
    fn only_loopback_and_the_flag_leave_out_tls() {
        for (reference, plain_http, origin) in [
            ("127.0.0.1:5000/p", false, "http://127.0.0.1:5000/"),
            ("localhost/p", false, "http://localhost/"),
            ("[::1]:5000/p", false, "http://[::1]:5000/"),
            ("r.example/p", false, "https://r.example/"),
            ("r.example:5000/p", true, "http://r.example:5000/"),
            ("docker.io/a/p", false, "https://registry-1.docker.io/"),
        ] {
            assert_eq!(connection(reference, plain_http).origin.as_str(), origin);
        }
    }

    #[test]
    fn a_registry_cannot_lead_its_client_out_of_tls() {
        let allowed = |connection: &Connection, url: &str| connection.check(url.parse().unwrap()).is_ok();
        let secure = connection("r.example/p", false);
        assert!(allowed(&secure, "https://storage.example/x?sig=1"));
        for url in ["http://r.example/x", "http://127.0.0.1/x", "file:///etc/passwd", "ftp://r.example/x"] {
            assert!(!allowed(&secure, url), "{url}");
        }
        let local = connection("127.0.0.1:5000/p", false);
        assert!(allowed(&local, "http://127.0.0.1:6000/token") && !allowed(&local, "http://r.example/token"));
        assert!(allowed(&connection("r.example/p", true), "http://auth.example/token"));
        let error = secure.check("http://u:secret@r.example/x?sig=secret".parse().unwrap()).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
