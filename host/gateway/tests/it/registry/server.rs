//! A registry on a real socket that follows the OCI distribution specification, except where a test breaks
//! it.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{io::AsyncWrite, net::TcpListener};

use crate::authority::Authority;

type Body = StreamBody<Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, std::io::Error>> + Send>>>;

/// How the registry authenticates its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    Open,
    Basic,
    /// With tokens of a token server at this URL, or of the registry's own.
    Token(Option<String>),
}

/// Fault of the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The registry serves another manifest or blob than the requested one.
    Changed(&'static str),
    /// A body never ends.
    Endless(&'static str),
    /// A blob ends before its announced length.
    Cut,
    /// A blob is announced with this length.
    Announced(u64),
    /// Blobs lie at this URL.
    Redirected(String),
    /// Every request is answered with this status and body.
    Status(u16, &'static str),
    /// So many requests whose line contains a text are answered with a status and a header.
    First(u32, &'static str, u16, (&'static str, String)),
    /// Every request is answered with this status and a body without an end.
    EndlessStatus(u16),
    /// A request whose path contains this is never answered.
    Hang(&'static str),
    /// A body stops after its first bytes.
    Stalled(&'static str),
    /// Uploads continue at this URL.
    Location(&'static str),
    /// Answer of the token server.
    Token(&'static str),
}

/// The user that the registry knows.
pub(crate) const USER: (&str, &str) = ("ann", "p:w");
/// Her identity token.
pub(crate) const IDENTITY: &str = "refresh-token";

struct Shared {
    auth: Auth,
    address: SocketAddr,
    fault: Mutex<Fault>,
    /// Manifests and blobs by the end of their path.
    content: Mutex<HashMap<String, Bytes>>,
    /// Requests, as `METHOD path?query auth-scheme`.
    log: Mutex<Vec<String>>,
    sent: AtomicU64,
}

/// A running registry. It stops when it is dropped.
pub(crate) struct Registry {
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Registry {
    pub(crate) fn start(auth: Auth) -> Self {
        Self::serve(auth, None)
    }

    /// Starts a registry with TLS; `Authority::pem` is its root.
    pub(crate) fn start_tls(auth: Auth, authority: &Authority) -> Self {
        Self::serve(auth, Some(authority.acceptor()))
    }

    fn serve(auth: Auth, tls: Option<tokio_rustls::TlsAcceptor>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let shared = Arc::new(Shared {
            auth,
            address: listener.local_addr().expect("an address"),
            fault: Mutex::new(Fault::None),
            content: Mutex::default(),
            log: Mutex::default(),
            sent: AtomicU64::new(0),
        });
        runtime.spawn(accept(listener, tls, shared.clone()));
        Self { shared, runtime: Some(runtime) }
    }

    /// Host and port.
    pub(crate) fn host(&self) -> String {
        self.shared.address.to_string()
    }

    /// Makes the registry misbehave, and forgets the log.
    pub(crate) fn break_with(&self, fault: Fault) {
        *self.shared.fault.lock() = fault;
        self.shared.sent.store(0, Ordering::Relaxed);
        self.take_log();
    }

    pub(crate) fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.log.lock())
    }

    /// Bytes of bodies that were handed to connections.
    pub(crate) fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Stores a manifest under a tag.
    pub(crate) fn store(&self, tag: &str, manifest: String) {
        self.shared.content.lock().insert(tag.to_owned(), manifest.into());
    }

    /// Copies all content of another registry.
    pub(crate) fn copy_content(&self, other: &Self) {
        *self.shared.content.lock() = other.shared.content.lock().clone();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, tls: Option<tokio_rustls::TlsAcceptor>, shared: Arc<Shared>) {
    let handle = tokio::runtime::Handle::current();
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, shared) = (tls.clone(), shared.clone());
        handle.spawn(async move {
            match tls {
                None => connection(stream, shared).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        connection(stream, shared).await;
                    }
                }
            }
        });
    }
}

async fn connection(
    stream: impl tokio::io::AsyncRead + AsyncWrite + Unpin + Send + 'static,
    shared: Arc<Shared>,
) {
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(&shared, request).await) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let authorization = text(&parts.headers, "authorization");
    let scheme = authorization.split(' ').next().unwrap_or_default();
    let line = format!("{} {} {scheme}", parts.method, parts.uri);
    shared.log.lock().push(line.trim_end().to_owned());
    let fault = shared.fault.lock().clone();
    match fault.clone() {
        Fault::Hang(part) if path.contains(part) => std::future::pending().await,
        Fault::Status(status, text) => return full(status, text.into()),
        Fault::EndlessStatus(status) => return endless(shared, status),
        Fault::First(times, part, status, header) if times > 0 && line.contains(part) => {
            *shared.fault.lock() = Fault::First(times - 1, part, status, header.clone());
            return reply(status).header(header.0, header.1).body(empty()).expect("an answer");
        }
        _ => {}
    }
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    if path == "/token" {
        return token(shared, &parts.method, &parts.uri.to_string(), &authorization, &body, &fault);
    }
    if let Some(refusal) = shared.refuse(&authorization) {
        return refusal;
    }
    let key = path.rsplit('/').next().unwrap_or_default().to_owned();
    if parts.method == Method::POST && path.ends_with("/blobs/uploads/") {
        let location = match fault {
            Fault::Location(location) => location.to_owned(),
            _ => path.replace("uploads/", "uploads/1?state=x"),
        };
        return reply(202).header("Location", location).body(chunks(shared, vec![])).expect("an answer");
    }
    if parts.method == Method::PUT {
        let digest = format!("sha256:{}", pointsman_policy_runtime::digest(&body));
        let mut content = shared.content.lock();
        if let Some((_, wanted)) = parts.uri.query().unwrap_or_default().split_once("digest=") {
            let wanted = wanted.replace("%3A", ":");
            assert_eq!(wanted, digest, "the upload has the digest that it names");
            content.insert(wanted, body);
        } else {
            content.insert(digest.clone(), body.clone());
            content.insert(key, body);
        }
        return reply(201).header("Docker-Content-Digest", digest).body(empty()).expect("an answer");
    }
    let found = shared.content.lock().get(&key).cloned();
    let Some(content) = found else {
        return full(404, r#"{"errors":[{"code":"NOT_FOUND","message":"no such content"}]}"#.into());
    };
    if parts.method == Method::HEAD {
        return reply(200).header("Content-Length", content.len()).body(empty()).expect("an answer");
    }
    download(shared, &fault, &path, content)
}

fn download(shared: &Arc<Shared>, fault: &Fault, path: &str, content: Bytes) -> Response<Body> {
    let blob = path.contains("/blobs/");
    let whole = |content: Bytes| {
        let length = content.len();
        let body = chunks(shared, vec![content]);
        reply(200).header("Content-Length", length).body(body).expect("an answer")
    };
    match fault {
        Fault::Changed(part) if path.contains(part) => {
            let mut changed = content.to_vec();
            changed.reverse();
            whole(changed.into())
        }
        Fault::Endless(part) if path.contains(part) => endless(shared, 200),
        Fault::Stalled(part) if path.contains(part) => {
            let stalled = stream::iter([Ok(Frame::data(content.slice(..1)))]).chain(stream::pending());
            reply(200).body(StreamBody::new(Box::pin(stalled) as Pin<Box<_>>)).expect("an answer")
        }
        Fault::Cut if blob => {
            let first = content.slice(..content.len() / 2);
            let cut = stream::iter([Ok(Frame::data(first)), Err(std::io::Error::other("cut"))]);
            let body = StreamBody::new(Box::pin(cut) as Pin<Box<_>>);
            reply(200).header("Content-Length", content.len()).body(body).expect("an answer")
        }
        Fault::Announced(length) if blob => {
            let body = StreamBody::new(Box::pin(stream::pending()) as Pin<Box<_>>);
            reply(200).header("Content-Length", *length).body(body).expect("an answer")
        }
        Fault::Redirected(target) if blob => {
            let target =
                if target == "loop" { path.to_owned() } else { format!("{target}{path}?signature=s") };
            reply(307).header("Location", target).body(empty()).expect("an answer")
        }
        _ => whole(content),
    }
}

impl Shared {
    /// Returns the challenge for a client that has not authenticated as the registry asks.
    fn refuse(&self, authorization: &str) -> Option<Response<Body>> {
        let challenge = match &self.auth {
            Auth::Open => return None,
            Auth::Basic if authorization == basic() => return None,
            Auth::Basic => "Basic realm=\"registry\"".to_owned(),
            Auth::Token(_) if authorization.starts_with("Bearer issued:repository:") => return None,
            Auth::Token(server) => {
                let own = format!("http://{}/token", self.address);
                format!("Bearer realm=\"{}\",service=\"reg\"", server.as_ref().unwrap_or(&own))
            }
        };
        let body = r#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}"#;
        let mut refused = full(401, body.into());
        refused.headers_mut().insert(header::WWW_AUTHENTICATE, challenge.parse().expect("a header"));
        Some(refused)
    }
}

/// Issues a token for the scope in the query or form, to the known user or her identity token.
fn token(
    shared: &Arc<Shared>,
    method: &Method,
    uri: &str,
    authorization: &str,
    form: &Bytes,
    fault: &Fault,
) -> Response<Body> {
    let form = String::from_utf8_lossy(form);
    let (query, known) = match *method {
        Method::POST => (
            &*form,
            form.contains(&format!("grant_type=refresh_token&client_id=pointsman&refresh_token={IDENTITY}")),
        ),
        _ => (uri.split_once('?').unwrap_or_default().1, authorization == basic()),
    };
    match fault {
        Fault::Endless("/token") => return endless(shared, 200),
        Fault::Token(answer) => return full(200, (*answer).into()),
        _ if !known => return full(401, "wrong user or password".into()),
        _ => {}
    }
    let scope = query.split('&').find_map(|pair| pair.strip_prefix("scope=")).unwrap_or_default();
    let scope = scope.replace("%3A", ":").replace("%2F", "/").replace("%2C", ",");
    assert!(query.contains("service=reg"), "{query}");
    full(200, format!(r#"{{"access_token":"issued:{scope}","expires_in":60}}"#))
}

fn basic() -> String {
    // base64 of `ann:p:w`.
    "Basic YW5uOnA6dw==".to_owned()
}

fn text(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

fn reply(status: u16) -> http::response::Builder {
    Response::builder().status(StatusCode::from_u16(status).expect("a status"))
}

fn full(status: u16, text: String) -> Response<Body> {
    let body = stream::iter([Ok(Frame::data(Bytes::from(text)))]);
    reply(status).body(StreamBody::new(Box::pin(body) as Pin<Box<_>>)).expect("an answer")
}

fn empty() -> Body {
    StreamBody::new(Box::pin(stream::empty()))
}

fn chunks(shared: &Arc<Shared>, chunks: Vec<Bytes>) -> Body {
    shared.sent.fetch_add(chunks.iter().map(|chunk| chunk.len() as u64).sum(), Ordering::Relaxed);
    StreamBody::new(Box::pin(stream::iter(chunks).map(|chunk| Ok(Frame::data(chunk)))))
}

fn endless(shared: &Arc<Shared>, status: u16) -> Response<Body> {
    let chunk = Bytes::from(vec![b' '; 64 << 10]);
    let shared = shared.clone();
    let body = stream::repeat(chunk).then(move |chunk| {
        shared.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        async move {
            tokio::time::sleep(Duration::ZERO).await;
            Ok(Frame::data(chunk))
        }
    });
    reply(status).body(StreamBody::new(Box::pin(body) as Pin<Box<_>>)).expect("an answer")
}

/// A directory with Docker's configuration.
pub(crate) fn docker_config(directory: &std::path::Path, config: &str) -> PathBuf {
    let path = directory.join("docker");
    std::fs::create_dir_all(&path).expect("a directory");
    std::fs::write(path.join("config.json"), config).expect("written");
    path
}
