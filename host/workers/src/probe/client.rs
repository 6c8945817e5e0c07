//! The HTTP client of probes, with or without TLS.
//!
//! It is hyper's and not that of `host/http-client`: the certificate of a worker may have another name than
//! the host of its URL, for which reqwest has no setting.

use std::{
    error::Error,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
    vec,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, ResolveServerName};
use hyper_util::{
    client::legacy::{
        Client, ResponseFuture,
        connect::{HttpConnector, HttpInfo, capture_connection, dns::Name},
    },
    rt::TokioExecutor,
};
use parking_lot::Mutex;
use rustls::ClientConfig;
use tower_service::Service;

use crate::{
    os_errors::{causes, is_local_shortage, is_refused},
    probe::speaks_tls,
    resolver::{MAX_TRIED, Resolver, Unresolved},
    spec::WorkerSpec,
    tls::{EngineTls, server_name, tls_problem},
};

/// Idle connections that are kept for an address. A connection takes about 20 KB, and the first probes of all
/// workers open many at once.
const MAX_IDLE: usize = 2;
/// Name of the gateway's program for engines and proxies before them.
const USER_AGENT: &str = concat!("pointsman/", env!("CARGO_PKG_VERSION"));
/// Idle time after which a connection is probed by TCP.
const KEEPALIVE: Duration = Duration::from_secs(90);

type Plain = Client<HttpConnector<WorkerNames>, Full<Bytes>>;
type Secure = Client<HttpsConnector<HttpConnector<WorkerNames>>, Full<Bytes>>;

/// The names of workers, as connections of hyper look them up.
#[derive(Clone)]
pub(super) struct WorkerNames(Resolver);

/// Makes the clients of workers.
#[derive(Clone)]
pub(super) struct Clients {
    plain: Plain,
    tls: Arc<EngineTls>,
    names: WorkerNames,
}

/// The client of one worker.
pub(super) enum ProbeClient {
    /// The shared client of all workers without TLS.
    Plain(Plain, WorkerNames),
    /// Each worker with TLS has its own: the name that the certificate must have is the worker's.
    Tls {
        tls: Arc<EngineTls>,
        names: WorkerNames,
        server_name: Option<Arc<str>>,
        current: Mutex<Option<Current>>,
    },
}

/// A client, and the TLS that it was made for.
pub(super) struct Current(Arc<ClientConfig>, Secure);

/// Result of a probe request.
pub(super) enum Response {
    Ok(Bytes),
    /// Status 404, 405 or 501: the engine does not support the request.
    Absent,
    /// The engine cannot be verified.
    Untrusted(String),
    /// Any other status, with its description. The request may be repeated.
    Status(StatusCode, String),
    /// No process listens at the address.
    Refused(String),
    /// No whole answer came in time.
    TimedOut(String),
    /// Any other error, with its description. The request may be repeated.
    Failed(String),
    /// This host has no descriptor or port left, which says nothing about the worker.
    Shortage(String),
}

/// An answer of any status.
struct Answered {
    status: StatusCode,
    body: Bytes,
    /// Local address of the connection.
    connection: Option<SocketAddr>,
}

/// Result of a request that makes the engine work.
pub(super) enum Posted {
    Ok,
    /// Status 404, 405 or 501.
    Absent,
    /// Any other status below 500.
    Refused,
    /// Another status, an error, or no answer.
    Failed,
}

impl Response {
    /// Returns the body; `None` if the engine does not support the request.
    ///
    /// # Errors
    /// Reason why there is no answer.
    pub(super) fn body(self) -> Result<Option<Bytes>, String> {
        match self {
            Self::Ok(body) => Ok(Some(body)),
            Self::Absent => Ok(None),
            Self::Untrusted(problem)
            | Self::Status(_, problem)
            | Self::Refused(problem)
            | Self::TimedOut(problem)
            | Self::Failed(problem)
            | Self::Shortage(problem) => Err(problem),
        }
    }

    /// Returns whether the gateway does not trust the engine, or the engine the gateway's key.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Self::Untrusted(_)) || self.refuses_key()
    }

    /// Returns whether the engine refuses the gateway's key, or asks for one.
    pub(super) fn refuses_key(&self) -> bool {
        matches!(self, Self::Status(status, _) if is_key_refused(*status))
    }

    /// Returns whether an engine with TLS would answer so to a request without it.
    pub(super) fn may_need_tls(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Status(StatusCode::BAD_REQUEST, _))
    }
}

/// Returns whether a status says that the engine asks for a key, or for another one.
fn is_key_refused(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// Returns what caused an error: the client itself only says which step failed.
fn first_cause(error: &(dyn Error + 'static)) -> String {
    causes(error).last().unwrap_or(error).to_string()
}

impl Service<Name> for WorkerNames {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = Unresolved;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Unresolved>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Unresolved>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.0.clone();
        Box::pin(async move {
            let addresses = resolver.resolve(name.as_str()).await?;
            let tried: Vec<SocketAddr> = addresses.iter().take(MAX_TRIED).copied().collect();
            Ok(tried.into_iter())
        })
    }
}

impl Clients {
    pub(super) fn new(tls: Arc<EngineTls>, resolver: Resolver) -> Self {
        let names = WorkerNames(resolver);
        let mut http = HttpConnector::new_with_resolver(names.clone());
        http.set_keepalive(Some(KEEPALIVE));
        let plain = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(MAX_IDLE).build(http);
        Self { plain, tls, names }
    }

    pub(super) fn of(&self, spec: &WorkerSpec) -> ProbeClient {
        if !spec.has_tls() {
            return ProbeClient::Plain(self.plain.clone(), self.names.clone());
        }
        let (tls, names) = (self.tls.clone(), self.names.clone());
        ProbeClient::Tls { tls, names, server_name: spec.tls_server_name.clone(), current: Mutex::default() }
    }
}

impl ProbeClient {
    /// Sends GET with the worker's key, and reads an answer of at most `max_body` bytes within `limit`. Also
    /// returns the local address of its connection.
    pub(super) async fn get(
        &self,
        url: &str,
        key: Option<&str>,
        max_body: usize,
        limit: Duration,
    ) -> (Response, Option<SocketAddr>) {
        let call = self.call((Method::GET, url), key, Bytes::new(), max_body);
        let Answered { status, body, connection } = match tokio::time::timeout(limit, call).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(response)) => return (response, None),
            Err(_) => return (Response::TimedOut(format!("GET {url}: timed out after {limit:?}")), None),
        };
        let response = match status {
            status if status.is_success() => Response::Ok(body),
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                Response::Absent
            }
            status => {
                let is_key = is_key_refused(status);
                let advice = if is_key { "; set api_key of the worker to a key of the engine" } else { "" };
                Response::Status(status, format!("GET {url}: status {status}{advice}"))
            }
        };
        (response, connection)
    }

    /// Returns whether the engine speaks TLS although its URL says otherwise.
    pub(super) async fn needs_tls(&self, url: &str) -> bool {
        match self {
            Self::Plain(_, WorkerNames(names)) => speaks_tls::speaks_tls(url, names).await,
            Self::Tls { .. } => false,
        }
    }

    /// Sends POST with a JSON body and the worker's key, and reads an answer of at most `max_body` bytes
    /// within `limit`.
    pub(super) async fn post(
        &self,
        url: &str,
        key: Option<&str>,
        body: Bytes,
        (max_body, limit): (usize, Duration),
    ) -> Posted {
        match tokio::time::timeout(limit, self.call((Method::POST, url), key, body, max_body)).await {
            Ok(Ok(Answered { status, .. })) => match status {
                status if status.is_success() => Posted::Ok,
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                    Posted::Absent
                }
                status if !status.is_server_error() => Posted::Refused,
                _ => Posted::Failed,
            },
            Ok(_) | Err(_) => Posted::Failed,
        }
    }

    async fn call(
        &self,
        (method, url): (Method, &str),
        key: Option<&str>,
        body: Bytes,
        max_body: usize,
    ) -> Result<Answered, Response> {
        let at = format!("{method} {url}");
        let failed = |problem: String| Response::Failed(format!("{at}: {problem}"));
        let mut request = Request::builder().uri(url).header(http::header::USER_AGENT, USER_AGENT);
        if method == Method::POST {
            request = request.header(http::header::CONTENT_TYPE, "application/json");
        }
        request = request.method(method);
        if let Some(key) = key {
            request = request.header(http::header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body)).map_err(|error| Response::Failed(error.to_string()));
        let mut request = request?;
        let (Self::Plain(_, WorkerNames(names)) | Self::Tls { names: WorkerNames(names), .. }) = self;
        let host = request.uri().host().unwrap_or_default().to_owned();
        names.follow(&host);
        let used = capture_connection(&mut request);
        let response = self.request(request).map_err(failed)?.await.map_err(|error| {
            if is_local_shortage(&error) {
                return Response::Shortage(format!("{at}: {error}"));
            }
            if is_refused(&error) {
                return Response::Refused(format!("{at}: connection refused"));
            }
            let unresolved = causes(&error).find_map(<dyn Error>::downcast_ref::<Unresolved>);
            match tls_problem(&error) {
                Some(problem) => Response::Untrusted(format!("{at}: {problem}")),
                None => failed(unresolved.map_or_else(|| first_cause(&error), ToString::to_string)),
            }
        })?;
        let status = response.status();
        let info = response.extensions().get::<HttpInfo>();
        if info.is_some_and(|info| !names.has(&host, info.remote_addr().ip())) {
            // It is closed after this answer: the name leads elsewhere now.
            if let Some(connection) = &*used.connection_metadata() {
                connection.poison();
            }
        }
        let connection = info.map(HttpInfo::local_addr);
        let body = Limited::new(response.into_body(), max_body).collect().await;
        let body = body.map_err(|error| failed(error.to_string()))?.to_bytes();
        Ok(Answered { status, body, connection })
    }

    fn request(&self, request: Request<Full<Bytes>>) -> Result<ResponseFuture, String> {
        match self {
            Self::Plain(client, _) => Ok(client.request(request)),
            Self::Tls { tls, names, server_name, current } => {
                let config = tls.config()?;
                let mut current = current.lock();
                let kept = current.take().filter(|Current(made_for, _)| Arc::ptr_eq(made_for, &config));
                let used = current
                    .insert(kept.unwrap_or_else(|| Current::new(config, server_name.clone(), names.clone())));
                Ok(used.1.request(request))
            }
        }
    }
}

impl Current {
    fn new(config: Arc<ClientConfig>, configured: Option<Arc<str>>, names: WorkerNames) -> Self {
        let mut http = HttpConnector::new_with_resolver(names);
        http.enforce_http(false);
        let certified: Arc<dyn ResolveServerName + Send + Sync> = Arc::new(move |uri: &http::Uri| {
            server_name(uri.host().unwrap_or_default(), configured.as_deref())
        });
        // The bootstrap server of a worker has no TLS.
        let connector = HttpsConnector::new(http, config.clone(), false, certified);
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(MAX_IDLE).build(connector);
        Self(config, client)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };
    use tokio_util::task::TaskTracker;

    use super::*;

    #[tokio::test]
    async fn i18_5_a_health_check_does_not_use_a_connection_to_an_address_that_its_name_no_longer_has() {
        let old = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = old.local_addr().unwrap().port();
        let new = TcpListener::bind(("127.0.0.3", port)).await.unwrap();
        let counts: [Arc<AtomicUsize>; 2] = Default::default();
        for (engine, count) in [old, new].into_iter().zip(counts.clone()) {
            TaskTracker::new().spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok((mut stream, _)) = engine.accept().await {
                    while matches!(stream.read(&mut buffer).await, Ok(1..)) {
                        count.fetch_add(1, Relaxed);
                        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                    }
                }
            });
        }
        let last = Arc::new(AtomicUsize::new(2));
        let address = last.clone();
        let answer = move |_: &str| Ok(vec![format!("127.0.0.{}:0", address.load(Relaxed)).parse().unwrap()]);
        let resolver = Resolver::with_stay(Duration::ZERO, answer);
        let url = format!("http://engine:{port}");
        let spec = WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url={url}")).unwrap();
        let client = Clients::new(Arc::default(), resolver.clone()).of(&spec);
        let get = async || {
            let answer = client.get(&format!("{url}/health"), None, 64, Duration::from_secs(5)).await.0;
            assert!(matches!(answer, Response::Ok(_)));
            counts.each_ref().map(|count| count.load(Relaxed))
        };
        assert_eq!((get().await, get().await), ([1, 0], [2, 0]));
        last.store(3, Relaxed);
        let begin = tokio::time::Instant::now();
        while resolver.addresses("engine:1").await.unwrap() != [([127, 0, 0, 3], 1).into()] {
            assert!(begin.elapsed() < Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // I18.5: after its present request
        assert_eq!((get().await, get().await, get().await), ([3, 0], [3, 1], [3, 2]));
    }
}
