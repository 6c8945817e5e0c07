//! Workers of Kubernetes: pods with a label, or the endpoints of a service.
//!
//! ```text
//! list, in pages --> watch from its version --> changes, bookmarks --> the watch ends
//!   ^                  ^                                                    |
//!   |                  +----------- from the version of the last change ----+
//!   +------------------------------ 410 Gone: that version is too old ------+
//!   +------------------------------ it was silent all the time -------------+
//!   +------------------------------ the last list is old -------------------+
//! ```

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::{
    blocking::FileReader,
    http::{self, Clients, Failure, Lines, MAX_TOKEN, Pauses, TlsFiles},
    scheme::Scheme,
    table::{Invalid, Table},
};
use crate::{
    fleet::Reporter,
    found::{Found, Read},
    source::Source,
};

mod objects;
mod port;
mod role_labels;

use objects::{Meta, Object};
pub use port::PortOfWorker;
use role_labels::RoleLabels;

/// Objects of one page of a list.
const PAGE: &str = "500";
/// Maximum number of pages of a list.
const MAX_PAGES: usize = 100;
/// Maximum size of a page, bytes.
const MAX_PAGE_BYTES: usize = 64 * 1024 * 1024;
/// Maximum size of one event of a watch, bytes.
const MAX_EVENT: usize = 4 * 1024 * 1024;
/// A watch may stand for its own duration and this long.
const SILENCE: Duration = Duration::from_secs(5);
/// A watch may end this much before its time and counts as whole.
const EARLY: Duration = Duration::from_secs(1);
/// Longest time between two lists. The shortest is half of it: gateways that start together do not list
/// together.
const RELIST: Duration = Duration::from_mins(10);

/// Kind of the listed objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Pods.
    Pods,
    /// EndpointSlices.
    EndpointSlices,
}

/// Objects that are read, and their place.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesSourceConfig {
    /// Base URL of the API server.
    pub api: String,
    /// Namespace.
    pub namespace: String,
    /// Kind of the listed objects.
    pub resource: Resource,
    /// Label selector.
    pub selector: String,
    /// Ports of the workers of a pod, unless an annotation names others. Each is a worker.
    pub ports: Vec<PortOfWorker>,
    /// Scheme of the workers' URLs, unless an annotation names the other.
    pub scheme: Scheme,
    /// Values of keys that neither labels nor annotations give.
    pub defaults: BTreeMap<String, String>,
    /// File with the bearer token, read for each request: such tokens are replaced every hour.
    pub token_file: Option<PathBuf>,
    /// TLS.
    pub tls: TlsFiles,
    /// Time limit of a list, and of the head of a watch.
    pub timeout: Duration,
    /// How long one watch runs.
    pub watch: Duration,
}

/// Lists and watches objects.
#[derive(Debug)]
pub struct KubernetesSource {
    config: KubernetesSourceConfig,
    token: Option<FileReader>,
    clients: Clients,
    table: Table,
    /// Objects that had a role of llm-d.
    role_labels: RoleLabels,
    /// Whether the last watch failed. What is listed then is reported when a watch stands.
    watch_failed: bool,
    /// Longest time between two lists.
    relist: Duration,
    /// When everything is listed again.
    relist_at: Instant,
}

/// A page of a list.
#[derive(Deserialize)]
struct List {
    metadata: Meta,
    #[serde(default)]
    items: Option<Vec<Box<RawValue>>>,
}

/// A line of a watch.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Box<RawValue>,
}

/// The object of a line of type `ERROR`.
#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

/// Why a watch ended.
enum Ended {
    /// Watch again from the last version.
    Resume,
    /// List again.
    Relist,
    /// List again, because the last list is old. The watch would go on.
    Refresh,
}

impl KubernetesSource {
    /// Creates the source; nothing is read yet.
    #[must_use]
    pub fn new(config: KubernetesSourceConfig) -> Self {
        let token = config.token_file.clone().map(|file| FileReader::new(file, MAX_TOKEN));
        Self {
            config,
            token,
            clients: Clients::default(),
            table: Table::default(),
            role_labels: RoleLabels::default(),
            watch_failed: false,
            relist: RELIST,
            relist_at: Instant::now(),
        }
    }

    fn url(&self, query: &[(&str, &str)]) -> Result<Url, String> {
        let KubernetesSourceConfig { api, namespace, resource, selector, .. } = &self.config;
        let api = api.trim_end_matches('/');
        let url = match resource {
            Resource::Pods => format!("{api}/api/v1/namespaces/{namespace}/pods"),
            Resource::EndpointSlices => {
                format!("{api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")
            }
        };
        let mut url: Url = url.parse().map_err(|error| format!("{url}: {error}"))?;
        url.query_pairs_mut().append_pair("labelSelector", selector).extend_pairs(query);
        Ok(url)
    }

    async fn request(&self, client: &Client, query: &[(&str, &str)]) -> Result<RequestBuilder, String> {
        let request = client.get(self.url(query)?).header("accept", "application/json");
        let Some(file) = &self.token else { return Ok(request) };
        Ok(request.bearer_auth(file.read_text(self.config.timeout).await?.trim_end()))
    }

    /// Reads all objects. Returns a client for the watch, and the version of the list. The client has the
    /// certificates that the files have now.
    async fn list_anew(&mut self) -> Result<(Client, String), Failure> {
        // Also after a failure: the next try must not follow at once.
        self.relist_at = Instant::now() + self.relist.mul_f64(rand::random_range(0.5..1.0));
        let client = self.clients.make(&self.config.tls, &self.config.api, self.config.timeout).await?;
        let version = self.list(&client).await?;
        Ok((client, version))
    }

    /// Reads all objects. Returns the version of the list.
    async fn list(&mut self, client: &Client) -> Result<String, Failure> {
        let limit = self.config.timeout;
        let (mut all, mut more) = (Vec::new(), String::new());
        for _ in 0..MAX_PAGES {
            let mut query = vec![("limit", PAGE)];
            if !more.is_empty() {
                query.push(("continue", more.as_str()));
            }
            let response = http::send(self.request(client, &query).await?, limit).await?;
            if response.status() == StatusCode::GONE && !more.is_empty() {
                // The rest of the list is too old: from the beginning.
                all.clear();
                more.clear();
                continue;
            }
            if !response.status().is_success() {
                return Err(http::refusal(response, limit).await);
            }
            let bytes = http::body(response, MAX_PAGE_BYTES, limit).await?;
            let page: List = serde_json::from_slice(&bytes).map_err(|error| format!("the list: {error}"))?;
            all.extend(page.items.iter().flatten().filter_map(|object| self.entry(object)));
            if page.metadata.more.is_empty() {
                self.role_labels.keep(all.iter().map(|(name, _)| name.as_str()));
                self.table.replace(all);
                return Ok(page.metadata.resource_version);
            }
            more = page.metadata.more;
        }
        Err(format!("the list has more than {MAX_PAGES} pages of {PAGE} objects: narrow the selector").into())
    }

    /// Reads one object: its name, and the workers that it describes.
    fn entry(&mut self, object: &RawValue) -> Option<(String, Result<Vec<Found>, Invalid>)> {
        match Object::parse(object.get(), self.config.resource) {
            Ok(object) => {
                let checked = self.role_labels.check(object.meta());
                let described = checked.and_then(|()| object.workers(&self.config));
                Some((object.meta().name.clone(), described))
            }
            Err(problem) => {
                let meta = objects::meta(object.get()).ok()?;
                let pods = (self.config.resource == Resource::Pods).then(|| meta.pods());
                let problem = format!("the object cannot be read: {problem}");
                Some((meta.name, Err(Invalid { problem, pods, has_none: false })))
            }
        }
    }

    /// Opens a watch from `version`; `None`: that version is too old.
    async fn open_watch(&self, client: &Client, version: &str) -> Result<Option<Response>, Failure> {
        let seconds = self.config.watch.as_secs().max(1).to_string();
        let query = [
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", seconds.as_str()),
            ("resourceVersion", version),
        ];
        let response = http::send(self.request(client, &query).await?, self.config.timeout).await?;
        match response.status() {
            StatusCode::GONE => Ok(None),
            status if status.is_success() => Ok(Some(response)),
            _ => Err(http::refusal(response, self.config.timeout).await),
        }
    }

    /// Watches from `version`, and raises it with each event.
    async fn watch(
        &mut self,
        client: &Client,
        version: &mut String,
        reporter: &Reporter,
    ) -> Result<Ended, Failure> {
        let Some(response) = self.open_watch(client, version).await? else { return Ok(Ended::Relist) };
        if std::mem::take(&mut self.watch_failed) {
            reporter.present(self.table.snapshot_once(Read::Whole));
        } else {
            reporter.alive();
        }
        let mut lines = Lines::new(response, MAX_EVENT);
        let (begun, mut heard) = (Instant::now(), false);
        loop {
            let mut changed = false;
            while let Some(line) = lines.next() {
                let event: Event = serde_json::from_slice(line)
                    .map_err(|error| format!("an event of the watch: {error}"))?;
                match self.apply(&event, version)? {
                    Some(ended) => return Ok(ended),
                    None => {
                        heard = true;
                        changed |= event.kind != "BOOKMARK";
                    }
                }
            }
            if changed {
                reporter.present(self.table.snapshot_once(Read::Changes));
            }
            tokio::select! {
                more = tokio::time::timeout_at(begun + self.config.watch + SILENCE, lines.read_more()) => {
                    match more {
                        Ok(Ok(true)) => {}
                        // Servers send a bookmark before the end, unless what they watch is stale.
                        Ok(Ok(false)) if !heard && begun.elapsed() + EARLY >= self.config.watch => {
                            return Ok(Ended::Relist);
                        }
                        Err(_) if !heard => {
                            return Err("the watch is silent although its time is over".to_owned().into());
                        }
                        Ok(Ok(false)) | Err(_) => return Ok(Ended::Resume),
                        Ok(Err(problem)) => {
                            tracing::debug!(problem, "watch of Kubernetes broke");
                            return Ok(Ended::Resume);
                        }
                    }
                }
                () = reporter.recheck() => return Ok(Ended::Relist),
                () = tokio::time::sleep_until(self.relist_at) => return Ok(Ended::Refresh),
            }
        }
    }

    /// Applies one event.
    fn apply(&mut self, event: &Event, version: &mut String) -> Result<Option<Ended>, String> {
        if event.kind == "ERROR" {
            let status: Status =
                serde_json::from_str(event.object.get()).map_err(|error| error.to_string())?;
            if status.code == StatusCode::GONE.as_u16() {
                return Ok(Some(Ended::Relist));
            }
            return Err(format!("the watch ended: status {}: {}", status.code, status.message));
        }
        let meta = objects::meta(event.object.get())?;
        if !meta.resource_version.is_empty() {
            version.clone_from(&meta.resource_version);
        }
        match event.kind.as_str() {
            "ADDED" | "MODIFIED" => {
                if let Some((name, described)) = self.entry(&event.object) {
                    self.table.set(&name, described);
                }
            }
            "DELETED" => {
                self.table.remove(&meta.name);
                self.role_labels.forget(&meta.name);
            }
            _ => {}
        }
        Ok(None)
    }
}

impl Source for KubernetesSource {
    async fn run(mut self, reporter: Reporter) {
        let mut pauses = Pauses::default();
        let mut following: Option<(Client, String)> = None;
        loop {
            let outcome = match &mut following {
                None => match self.list_anew().await {
                    Ok(listed) => {
                        if !self.watch_failed {
                            reporter.present(self.table.snapshot_once(Read::Whole));
                        }
                        following = Some(listed);
                        continue;
                    }
                    Err(failure) => Err(failure),
                },
                Some((client, version)) => {
                    let (begun, before) = (Instant::now(), version.clone());
                    let ended = self.watch(client, version, &reporter).await;
                    self.watch_failed = ended.is_err();
                    pauses.watched(begun, *version != before);
                    ended
                }
            };
            let retry_after = match outcome {
                Ok(Ended::Resume) => None,
                Ok(Ended::Refresh) => {
                    match self.list_anew().await {
                        Ok(listed) => {
                            reporter.present(self.table.snapshot_once(Read::Whole));
                            following = Some(listed);
                        }
                        // The watch has what the last list lacks.
                        Err(Failure { problem, .. }) => tracing::debug!(problem, "periodic list failed"),
                    }
                    None
                }
                Ok(Ended::Relist) => {
                    following = None;
                    None
                }
                Err(Failure { problem, retry_after }) => {
                    // The server may no longer have the changes since this version.
                    following = None;
                    reporter.away(format!("{}: {problem}", self.config.api));
                    retry_after
                }
            };
            // A server that ends each watch at once must not keep both busy.
            pauses.wait(retry_after).await;
        }
    }
}

#[cfg(test)]
mod tests;
