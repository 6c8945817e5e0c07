//! The client of a gateway's admin listener.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use pointsman_http_client::{BodyError, Pem, Roots, Setup, SetupError, whole};
use reqwest::{
    Client, Method, Response, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue},
};

use crate::answer::{Answer, GatewayError};

/// Longest time for a whole answer.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest answer that is read, bytes: a thousand decisions on a thousand workers fit.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Variable with the operator's token.
const TOKEN_VARIABLE: &str = "POINTSMAN_ADMIN_TOKEN";
/// Characters of a path segment or query value that are escaped.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Address of a running gateway, and access to it.
#[derive(Clone, Debug, Args)]
pub struct GatewayArgs {
    /// URL of the gateway's admin listener.
    #[arg(
        long = "gateway",
        alias = "admin",
        value_name = "URL",
        env = "POINTSMAN_ADMIN_URL",
        default_value = "http://127.0.0.1:9090"
    )]
    url: String,
    /// File with the operator's token.
    #[arg(long, value_name = "FILE", env = "POINTSMAN_ADMIN_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// PEM file with the roots of the gateway's certificate, besides those of the system.
    #[arg(long, value_name = "FILE", env = "POINTSMAN_ADMIN_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// PEM file with the operator's certificate for the gateway.
    #[arg(long, value_name = "FILE", env = "POINTSMAN_ADMIN_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of --tls-cert.
    #[arg(long, value_name = "FILE", env = "POINTSMAN_ADMIN_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// A client of one gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    client: Client,
    base: String,
    token: Option<HeaderValue>,
    timeout: Duration,
}

impl GatewayArgs {
    /// Returns a client of the gateway. It does not connect yet.
    ///
    /// # Errors
    /// The URL, the token or the roots are not valid.
    pub fn client(&self) -> anyhow::Result<Gateway> {
        let url: Url = self.url.parse().with_context(|| {
            format!(
                "--gateway `{}` is not a URL: write http://HOST:PORT of the operators' listener",
                self.url
            )
        })?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            bail!("--gateway `{}`: expected http://HOST:PORT or https://HOST:PORT", self.url);
        }
        if !url.username().is_empty() || url.password().is_some() {
            bail!("--gateway: the URL has a user; give the operator's token with --token-file");
        }
        Ok(Gateway {
            client: self.http(&url)?,
            base: url.as_str().trim_end_matches('/').to_owned(),
            token: self.token()?,
            timeout: ANSWER_TIMEOUT,
        })
    }

    fn token(&self) -> anyhow::Result<Option<HeaderValue>> {
        let (token, source) = match &self.token_file {
            Some(file) => {
                let source = format!("--token-file {}", file.display());
                (fs::read_to_string(file).with_context(|| format!("reading {source}"))?, source)
            }
            None => match std::env::var(TOKEN_VARIABLE) {
                Ok(token) if !token.trim().is_empty() => (token, TOKEN_VARIABLE.to_owned()),
                _ => return Ok(None),
            },
        };
        let token = token.trim();
        if token.is_empty() {
            bail!("{source}: the token is empty");
        }
        let value = HeaderValue::try_from(format!("Bearer {token}"));
        let mut value =
            value.map_err(|_| anyhow!("{source}: the token has characters that no header may have"))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// An HTTP client: the token is for the gateway only.
    fn http(&self, url: &Url) -> anyhow::Result<Client> {
        let roots = match &self.tls_ca {
            Some(file) => Roots::SystemAnd(read("--tls-ca", file)?),
            None => Roots::of(url.as_str()),
        };
        let identity = match (&self.tls_cert, &self.tls_key) {
            (Some(_), Some(_)) if url.scheme() == "http" => {
                bail!("--tls-cert: {url} has no TLS; give the https:// URL of the listener")
            }
            (Some(cert), Some(key)) => Some((read("--tls-cert", cert)?, read("--tls-key", key)?)),
            _ => None,
        };
        Ok(Setup { roots, identity, ..Setup::default() }.build()?)
    }
}

fn read(flag: &str, file: &Path) -> Result<Pem, SetupError> {
    Pem::read(format!("{flag} {}", file.display()), file)
}

impl Gateway {
    /// Returns the URL of the admin listener.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Changes the longest time for a whole answer.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sends GET.
    ///
    /// # Errors There is no whole answer; [`Answer::read`] says whether it is a good one.
    pub async fn get(&self, path: &str) -> Result<Answer, GatewayError> {
        self.call(Method::GET, path).await
    }

    /// Sends POST.
    ///
    /// # Errors
    /// Same as [`Self::get`].
    pub async fn post(&self, path: &str) -> Result<Answer, GatewayError> {
        self.call(Method::POST, path).await
    }

    /// Sends DELETE.
    ///
    /// # Errors
    /// Same as [`Self::get`].
    pub async fn delete(&self, path: &str) -> Result<Answer, GatewayError> {
        self.call(Method::DELETE, path).await
    }

    async fn call(&self, method: Method, path: &str) -> Result<Answer, GatewayError> {
        let url = format!("{}{path}", self.base);
        let exchange = async {
            let response = self.send(method, path).await?;
            self.answer(&url, response).await
        };
        let answer = tokio::time::timeout(self.timeout, exchange).await;
        answer.unwrap_or_else(|_| Err(GatewayError::Late { url: url.clone(), limit: self.timeout }))
    }

    /// Sends GET and returns an answer without an end, to be read chunk by chunk.
    ///
    /// # Errors
    /// The gateway refused or cannot be reached.
    pub async fn stream(&self, path: &str) -> Result<Response, GatewayError> {
        let url = format!("{}{path}", self.base);
        let opened = async {
            let response = self.send(Method::GET, path).await?;
            if response.status().is_success() {
                return Ok(response);
            }
            Err(self.answer(&url, response).await?.refusal())
        };
        let late = GatewayError::Late { url: url.clone(), limit: self.timeout };
        tokio::time::timeout(self.timeout, opened).await.unwrap_or(Err(late))
    }

    /// Reads an answer to its end.
    async fn answer(&self, url: &str, response: Response) -> Result<Answer, GatewayError> {
        let status = response.status().as_u16();
        let body = whole(response, MAX_ANSWER_BYTES).await.map_err(|error| match error {
            BodyError::Broken(error) => unreachable(url, &error),
            BodyError::TooLarge(limit) => GatewayError::TooLarge { url: url.to_owned(), limit },
        })?;
        Ok(Answer { url: url.to_owned(), status, body })
    }

    /// Sends a request and returns the head of its answer.
    async fn send(&self, method: Method, path: &str) -> Result<Response, GatewayError> {
        let url = format!("{}{path}", self.base);
        let mut request = self.client.request(method, &url).header(CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token.clone());
        }
        request.send().await.map_err(|error| unreachable(&url, &error))
    }
}

/// The error of a connection, with its last cause only: those before it repeat the URL.
#[must_use]
pub fn unreachable(url: &str, error: &reqwest::Error) -> GatewayError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let (url, problem) = (url.to_owned(), cause.to_string());
    // The HTTP client hides the type of this error, and rustls has no text for it.
    if problem.contains("CaUsedAsEndEntity") {
        return GatewayError::OfAuthority { url };
    }
    GatewayError::Unreachable { url, problem }
}

/// Builds a query string from the values that are given.
#[must_use]
pub fn query(pairs: &[(&str, Option<&str>)]) -> String {
    let given = pairs.iter().filter_map(|(key, value)| Some(format!("{key}={}", segment((*value)?))));
    let given: Vec<String> = given.collect();
    if given.is_empty() { String::new() } else { format!("?{}", given.join("&")) }
}

/// Escapes a segment of a path.
#[must_use]
pub fn segment(value: &str) -> String {
    utf8_percent_encode(value, RESERVED).to_string()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        thread,
    };

    use super::*;

    /// Answers the first connection with these bytes, again and again when `forever`, and then keeps it open.
    fn server(bytes: &'static [u8], forever: bool) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            let mut written = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n");
            while written.is_ok() && forever {
                written = stream.write_all(bytes);
            }
            thread::sleep(Duration::from_secs(20));
        });
        url
    }

    #[tokio::test]
    async fn a_silent_gateway_an_endless_answer_and_a_closed_port_are_told_apart() {
        let gateway = |url: &str, limit| args(url).client().unwrap().with_timeout(limit);
        let silent = gateway(&server(b"", false), Duration::from_millis(300));
        // O2.2
        assert!(matches!(silent.get("/status").await, Err(GatewayError::Late { .. })));
        let endless = gateway(&server(&[b' '; 1 << 16], true), Duration::from_secs(60));
        // O2.2
        assert!(matches!(endless.get("/status").await, Err(GatewayError::TooLarge { .. })));
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = gateway(&format!("http://{closed}"), Duration::from_secs(5)).get("/x").await.unwrap_err();
        // O2.1
        assert!(error.to_string().contains("Connection refused"), "{error}");
        assert!(error.to_string().contains("check that the gateway runs"), "{error}");
    }

    fn args(url: &str) -> GatewayArgs {
        GatewayArgs { url: url.to_owned(), token_file: None, tls_ca: None, tls_cert: None, tls_key: None }
    }

    #[test]
    fn a_query_escapes_values_and_omits_absent_keys() {
        assert_eq!(query(&[("from", None), ("model", Some("org/na me"))]), "?model=org%2Fna%20me");
        assert_eq!(query(&[("from", None)]), "");
    }

    #[test]
    fn a_url_of_no_listener_is_refused_and_a_password_is_not_repeated() {
        for wrong in ["127.0.0.1:9090", "ftp://127.0.0.1", "nonsense", "http://"] {
            assert!(args(wrong).client().is_err(), "{wrong}");
        }
        let error = args("http://user:s3cret@127.0.0.1:9090").client().unwrap_err().to_string();
        assert!(error.contains("--token-file") && !error.contains("s3cret"), "{error}");
        assert_eq!(args("http://127.0.0.1:9090/").client().unwrap().url(), "http://127.0.0.1:9090");
    }
}
