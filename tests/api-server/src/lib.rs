//! A double of the Kubernetes API server: pods and EndpointSlices in memory, with list in pages, watch,
//! bookmarks, 410 Gone after a compaction, 403 for what a role does not grant, and disconnects.
//!
//! Versions rise with each change of any object, as those of etcd do. The shapes follow the API reference.
//! The double demands a label selector and does not apply it.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use futures_util::stream;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Interval of bookmarks.
const BOOKMARKS: Duration = Duration::from_millis(500);

/// A running double.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    /// The version after the last change, or the count of disconnects.
    changed: watch::Sender<u64>,
    cut: Mutex<CancellationToken>,
    hung: Mutex<CancellationToken>,
}

#[derive(Debug, Default)]
struct Store {
    version: u64,
    /// Changes up to this version are forgotten.
    compacted: u64,
    objects: BTreeMap<(String, String), Value>,
    log: Vec<(u64, String, Value)>,
    /// Answer of all requests, if not a real one.
    failure: Option<StatusCode>,
    token: Option<String>,
    /// Resources and verbs that the caller's role grants; `None`: all.
    granted: Option<Vec<(String, String)>>,
    counts: Counts,
    /// Whether watches bring no events.
    withholds_events: bool,
    /// Whether watches bring no bookmarks.
    withholds_bookmarks: bool,
}

/// Numbers of requests to the test double.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages of lists.
    pub lists: u64,
    /// Watches.
    pub watches: u64,
    /// Answers 410, and lines that say so.
    pub gone: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    watch: Option<String>,
    limit: Option<usize>,
    #[serde(rename = "continue")]
    page: Option<String>,
    resource_version: Option<String>,
    timeout_seconds: Option<u64>,
    label_selector: Option<String>,
}

impl ApiServer {
    /// Starts a double on a free port.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, stop) = (listener.local_addr()?, CancellationToken::new());
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            changed: watch::Sender::new(0),
            cut: Mutex::new(CancellationToken::new()),
            hung: Mutex::new(CancellationToken::new()),
        });
        let routes = Router::new()
            .route("/api/v1/namespaces/{namespace}/{kind}", get(answer))
            .route("/apis/discovery.k8s.io/v1/namespaces/{namespace}/{kind}", get(answer))
            .with_state(shared.clone());
        let until = stop.clone();
        TaskTracker::new().spawn(async move {
            let serve = axum::serve(listener, routes);
            let _ = until.run_until_cancelled(serve.into_future()).await;
        });
        Ok(Self { address, shared, stop })
    }

    /// Base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Creates or changes an object; its name is in its metadata.
    pub fn put(&self, kind: &str, mut object: Value) {
        let mut store = self.shared.store.lock();
        store.version += 1;
        let (version, name) = (store.version, name_of(&object));
        if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            meta.insert("resourceVersion".to_owned(), json!(version.to_string()));
        }
        let before = store.objects.insert((kind.to_owned(), name), object.clone());
        let event = if before.is_some() { "MODIFIED" } else { "ADDED" };
        store.log.push((version, kind.to_owned(), json!({ "type": event, "object": object })));
        drop(store);
        self.shared.changed.send_modify(|changes| *changes += 1);
    }

    /// Deletes an object.
    pub fn delete(&self, kind: &str, name: &str) {
        let mut store = self.shared.store.lock();
        let Some(mut object) = store.objects.remove(&(kind.to_owned(), name.to_owned())) else { return };
        store.version += 1;
        let version = store.version;
        if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            meta.insert("resourceVersion".to_owned(), json!(version.to_string()));
        }
        store.log.push((version, kind.to_owned(), json!({ "type": "DELETED", "object": object })));
        drop(store);
        self.shared.changed.send_modify(|changes| *changes += 1);
    }

    /// Forgets the changes so far: a watch from an older version is answered with 410.
    pub fn compact(&self) {
        let mut store = self.shared.store.lock();
        // The version of the last change is too old, too: later changes of other objects raised it.
        store.version += 1;
        store.compacted = store.version;
        store.log.clear();
    }

    /// Ends all watches in the middle of their streams.
    pub fn disconnect(&self) {
        std::mem::take(&mut *self.shared.cut.lock()).cancel();
    }

    /// Lets watches stand, and withholds what they would bring, as a stale cache of a real server does.
    pub fn withhold(&self, events: bool, bookmarks: bool) {
        let mut store = self.shared.store.lock();
        (store.withholds_events, store.withholds_bookmarks) = (events, bookmarks);
    }

    /// Lets all watches hang for good, as those behind a load balancer that lost them. Later ones do not.
    pub fn hang(&self) {
        std::mem::take(&mut *self.shared.hung.lock()).cancel();
    }

    /// Answers everything with a status, or as usual again.
    pub fn fail_with(&self, status: Option<u16>) {
        self.shared.store.lock().failure = status.and_then(|status| StatusCode::from_u16(status).ok());
    }

    /// Asks for a bearer token.
    pub fn need_token(&self, token: &str) {
        self.shared.store.lock().token = Some(token.to_owned());
    }

    /// Answers 403 unless the role grants the resource and the verb, such as `("pods", "list")`.
    pub fn grant_only(&self, granted: &[(&str, &str)]) {
        let granted = granted.iter().map(|(kind, verb)| ((*kind).to_owned(), (*verb).to_owned()));
        self.shared.store.lock().granted = Some(granted.collect());
    }

    /// Returns the numbers of requests so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.store.lock().counts
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.cancel();
        self.disconnect();
    }
}

fn name_of(object: &Value) -> String {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned()
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    Path((_, kind)): Path<(String, String)>,
    Query(asked): Query<Asked>,
    headers: HeaderMap,
) -> Response {
    let mut store = shared.store.lock();
    let bearer = headers.get("authorization").and_then(|value| value.to_str().ok());
    if let Some(token) = &store.token
        && bearer != Some(&format!("Bearer {token}"))
    {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    if let Some(failure) = store.failure {
        return status(failure, "the double was told to fail");
    }
    let verb = if asked.watch.is_some() { "watch" } else { "list" };
    if let Some(granted) = &store.granted
        && !granted.iter().any(|(resource, own)| *resource == kind && own == verb)
    {
        return status(StatusCode::FORBIDDEN, &format!("{kind} is forbidden: the user cannot {verb} it"));
    }
    if asked.label_selector.is_none() {
        return status(StatusCode::BAD_REQUEST, "the source sends a selector");
    }
    if asked.watch.is_none() {
        return list(&mut store, &kind, &asked);
    }
    store.counts.watches += 1;
    let from: u64 = asked.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
    if from < store.compacted {
        store.counts.gone += 1;
        return status(StatusCode::GONE, "too old resource version");
    }
    drop(store);
    let ends = Instant::now() + Duration::from_secs(asked.timeout_seconds.unwrap_or(300));
    let (cut, hung) = (shared.cut.lock().clone(), shared.hung.lock().clone());
    let watcher = Watcher { changed: shared.changed.subscribe(), shared, kind, from, ends, cut, hung };
    Body::from_stream(stream::unfold(watcher, Watcher::next)).into_response()
}

fn status(code: StatusCode, message: &str) -> Response {
    let body = json!({ "kind": "Status", "status": "Failure", "code": code.as_u16(), "message": message });
    (code, Json(body)).into_response()
}

fn list(store: &mut Store, kind: &str, asked: &Asked) -> Response {
    store.counts.lists += 1;
    let from = asked.page.as_deref().and_then(|page| page.parse::<usize>().ok()).unwrap_or(0);
    let limit = asked.limit.unwrap_or(usize::MAX);
    let of_kind: Vec<&Value> =
        store.objects.iter().filter(|((other, _), _)| other == kind).map(|(_, object)| object).collect();
    let items: Vec<&Value> = of_kind.iter().skip(from).take(limit).copied().collect();
    let next = from + items.len();
    let more = if next < of_kind.len() { next.to_string() } else { String::new() };
    let metadata = json!({ "resourceVersion": store.version.to_string(), "continue": more });
    Json(json!({ "kind": "List", "metadata": metadata, "items": items })).into_response()
}

/// One watch.
struct Watcher {
    shared: Arc<Shared>,
    changed: watch::Receiver<u64>,
    kind: String,
    from: u64,
    ends: Instant,
    cut: CancellationToken,
    hung: CancellationToken,
}

impl Watcher {
    async fn next(mut self) -> Option<(Result<Bytes, std::io::Error>, Self)> {
        let mut bookmark_at = Instant::now() + BOOKMARKS;
        loop {
            if self.hung.is_cancelled() {
                return std::future::pending().await;
            }
            self.changed.mark_unchanged();
            if let Some(lines) = self.lines() {
                return Some((Ok(lines), self));
            }
            tokio::select! {
                _ = self.changed.changed() => {}
                () = self.hung.cancelled() => {}
                () = tokio::time::sleep_until(bookmark_at) => {
                    bookmark_at += BOOKMARKS;
                    if !self.shared.store.lock().withholds_bookmarks {
                        return Some((Ok(self.bookmark()), self));
                    }
                }
                () = tokio::time::sleep_until(self.ends) => return None,
                () = self.cut.cancelled() => {
                    return Some((Err(std::io::Error::other("cut")), self));
                }
            }
        }
    }

    /// The changes since the last ones, or that they are forgotten.
    fn lines(&mut self) -> Option<Bytes> {
        let mut store = self.shared.store.lock();
        if store.withholds_events {
            return None;
        }
        if self.from < store.compacted {
            store.counts.gone += 1;
            self.from = u64::MAX;
            let status = json!({ "kind": "Status", "code": 410, "message": "too old resource version" });
            return Some(format!("{}\n", json!({ "type": "ERROR", "object": status })).into());
        }
        let new = store.log.iter().filter(|(version, kind, _)| *version > self.from && *kind == self.kind);
        let text: String = new.map(|(_, _, event)| format!("{event}\n")).collect();
        self.from = self.from.max(store.version);
        (!text.is_empty()).then(|| text.into())
    }

    fn bookmark(&self) -> Bytes {
        let version = self.shared.store.lock().version.to_string();
        let object = json!({ "kind": "Pod", "metadata": { "resourceVersion": version } });
        format!("{}\n", json!({ "type": "BOOKMARK", "object": object })).into()
    }
}
