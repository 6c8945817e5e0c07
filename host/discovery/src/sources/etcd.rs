//! Workers of keys of etcd, over its JSON gateway.
//!
//! Each key below a prefix has the description of one worker as JSON. A worker writes its key with a lease
//! and keeps the lease alive; etcd removes the key when that ends.
//!
//! ```text
//! read the whole prefix at revision R --> watch from R + 1 --> changes
//!        ^                                      |
//!        +-- the stream ended, was compacted, or is due for a whole reading
//! ```
//! A watch that is silent says nothing about its member, which may hang or have lost its leader. So the
//! member is also asked for a count of keys, which it answers only together with the others.

use std::{path::PathBuf, pin::pin, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use pointsman_workers::WorkerSpec;
use reqwest::{Client, RequestBuilder};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    blocking::FileReader,
    http::{self, Clients, Failure, Lines, MAX_TOKEN, Pauses, TlsFiles},
    table::{Invalid, Table},
};
use crate::{
    fleet::Reporter,
    found::{Found, Read},
    source::Source,
};

mod refusal;

use refusal::refusal;

/// Maximum size of the answer with a whole prefix, bytes.
const MAX_WHOLE: usize = 64 * 1024 * 1024;
/// Maximum size of one message of a watch, bytes.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// How often the member of a watch is asked whether it still serves.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Keys that end within this time of each other end together.
const SEVERAL_WITHIN: Duration = Duration::from_secs(10);
/// Header for a watch that ends when its member has lost the leader.
const HAS_LEADER: (&str, &str) = ("grpc-metadata-hasleader", "true");
/// What etcd says about a token whose time is over, and about a JWT from before a change of users or roles.
const OLD_TOKEN: [&str; 2] = ["invalid auth token", "revision of auth store is old"];
/// Largest description in bytes.
const MAX_VALUE: usize = 64 * 1024;

/// Cluster and prefix of the keys.
#[derive(Clone, Debug, PartialEq)]
pub struct EtcdSourceConfig {
    /// Base URLs of the members, tried in turn.
    pub endpoints: Vec<String>,
    /// Beginning of the keys.
    pub prefix: String,
    /// Time limit of one request.
    pub timeout: Duration,
    /// How often the whole prefix is read, besides after each failure.
    pub resync: Duration,
    /// TLS.
    pub tls: TlsFiles,
    /// User, and the file with the password.
    pub user: Option<(String, PathBuf)>,
}

/// Reads keys of etcd.
#[derive(Debug)]
pub struct EtcdSource {
    config: EtcdSourceConfig,
    password: Option<FileReader>,
    clients: Clients,
    table: Table,
    /// Whether the last watch failed. What is read then is reported when a watch stands.
    watch_failed: bool,
    /// Cluster and revision that were read last.
    seen: Option<(String, u64)>,
    /// Whether the cluster may have lost its data, which was not reported yet.
    lost: bool,
    /// When a key ended last.
    ended: Option<Instant>,
    /// Whether the cluster had no users when it was asked for a token last.
    lacks_users: bool,
}

/// The answer to a range request. Numbers are texts.
#[derive(Deserialize)]
struct Whole {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Default, Deserialize)]
struct Header {
    #[serde(default)]
    cluster_id: String,
    #[serde(default)]
    revision: String,
}

#[derive(Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
    /// Revision at which the key was created.
    #[serde(default)]
    create_revision: String,
}

/// One message of a watch.
#[derive(Deserialize)]
struct Message {
    result: Option<Watched>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Watched {
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    cancel_reason: String,
    /// Given when the revisions that were asked for are gone.
    compact_revision: Option<String>,
    #[serde(default)]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    /// `DELETE`, or missing for a key that was written.
    #[serde(default, rename = "type")]
    kind: String,
    kv: KeyValue,
}

/// A connection to one member.
struct Member<'a> {
    client: &'a Client,
    endpoint: &'a str,
    token: Option<String>,
    timeout: Duration,
}

impl EtcdSource {
    /// Creates the source; nothing is read yet.
    #[must_use]
    pub fn new(config: EtcdSourceConfig) -> Self {
        let password = config.user.clone().map(|(_, file)| FileReader::new(file, MAX_TOKEN));
        let (clients, table) = (Clients::default(), Table::default());
        Self {
            config,
            password,
            clients,
            table,
            watch_failed: false,
            seen: None,
            lost: false,
            ended: None,
            lacks_users: false,
        }
    }

    /// Reads everything from one member and follows its changes until they end.
    ///
    /// # Errors
    /// The member could not be read.
    async fn follow(
        &mut self,
        client: &Client,
        endpoint: &str,
        reporter: &Reporter,
        pauses: &mut Pauses,
    ) -> Result<(), Failure> {
        let token = self.token(client, endpoint).await?;
        let member = Member { client, endpoint, token, timeout: self.config.timeout };
        let (key, range_end) = range(&self.config.prefix);
        let whole: Whole =
            member.call("/v3/kv/range", &json!({ "key": key, "range_end": range_end })).await?;
        let revision: u64 = whole.header.revision.parse().map_err(|_| {
            format!(
                "{endpoint}/v3/kv/range: the answer has no revision: is this the address of etcd's clients?"
            )
        })?;
        self.note_loss(whole.header.cluster_id, revision, whole.kvs.is_empty());
        self.table.replace(whole.kvs.iter().filter_map(entry).collect());
        if !self.watch_failed {
            self.present(reporter, Read::Whole);
        }
        let start = revision + 1;
        let create = json!({ "key": key, "range_end": range_end, "start_revision": start.to_string() });
        let request = member.request("/v3/watch", &json!({ "create_request": create }));
        let request = request.header(HAS_LEADER.0, HAS_LEADER.1);
        // Until the watch stands.
        let failed_before = std::mem::replace(&mut self.watch_failed, true);
        let response = http::send(request, self.config.timeout).await?;
        if !response.status().is_success() {
            return Err(refusal(response, self.config.timeout).await);
        }
        if failed_before {
            self.present(reporter, Read::Whole);
        }
        let begun = Instant::now();
        let ended = self.watch(&member, Lines::new(response, MAX_MESSAGE), reporter, pauses).await;
        pauses.watched(begun, false);
        self.watch_failed = ended.is_err();
        ended
    }

    /// Notes whether this reading is of other data than the one before: of another cluster, of an earlier
    /// revision, or of no key at all.
    fn note_loss(&mut self, cluster: String, revision: u64, is_empty: bool) {
        let is_other = self.seen.as_ref().is_some_and(|(seen, last)| *seen != cluster || revision < *last);
        self.lost |= is_other || (is_empty && !self.table.is_empty());
        self.seen = Some((cluster, revision));
    }

    fn present(&mut self, reporter: &Reporter, read: Read) {
        let read = if std::mem::take(&mut self.lost) { Read::Replaced } else { read };
        reporter.present(self.table.snapshot_newest(read));
    }

    /// Applies changes until the stream ends or everything has to be read again.
    async fn watch(
        &mut self,
        member: &Member<'_>,
        mut lines: Lines,
        reporter: &Reporter,
        pauses: &mut Pauses,
    ) -> Result<(), Failure> {
        let resync = Instant::now() + self.config.resync;
        let (key, range_end) = range(&self.config.prefix);
        let mut check = pin!(member.check(&key, &range_end, reporter));
        loop {
            let mut changed = false;
            while let Some(line) = lines.next() {
                let message: Message = serde_json::from_slice(line)
                    .map_err(|error| format!("a message of the watch: {error}"))?;
                if let Some(error) = message.error {
                    return Err(format!("the watch ended: {error}").into());
                }
                let Some(watched) = message.result else { continue };
                if let Some(compacted) = watched.compact_revision.filter(|revision| revision != "0") {
                    tracing::info!(compacted, "watch of etcd was compacted: everything is read again");
                    return Ok(());
                }
                if watched.canceled {
                    return Err(format!("the watch was cancelled: {}", watched.cancel_reason).into());
                }
                changed |= !watched.events.is_empty();
                watched.events.iter().for_each(|event| self.apply(event));
            }
            if changed {
                self.present(reporter, Read::Changes);
                *pauses = Pauses::default();
            }
            tokio::select! {
                more = lines.read_more() => if !more? { return Ok(()) },
                failure = &mut check => {
                    // Another token is issued for the next reading.
                    let ended = OLD_TOKEN.iter().any(|text| failure.problem.contains(text));
                    return if ended { Ok(()) } else { Err(failure) };
                }
                () = reporter.recheck() => return Ok(()),
                () = tokio::time::sleep_until(resync) => return Ok(()),
            }
        }
    }

    fn apply(&mut self, event: &Event) {
        let Some((key, described)) = entry(&event.kv) else { return };
        if event.kind == "DELETE" {
            self.table.remove(&key);
            // Leases that end together, down to the last key, may be those of engines that are well.
            let ended = self.ended.replace(Instant::now());
            let several = ended.is_some_and(|ended| ended.elapsed() < SEVERAL_WITHIN);
            self.lost = self.table.is_empty() && (several || self.lost);
        } else {
            self.lost = false;
            self.table.set(&key, described);
        }
    }

    /// Returns a token of the configured user; `None` if the cluster needs none, because its users were
    /// disabled.
    async fn token(&mut self, client: &Client, endpoint: &str) -> Result<Option<String>, Failure> {
        let Some(((name, _), file)) = self.config.user.as_ref().zip(self.password.as_ref()) else {
            return Ok(None);
        };
        let password = file.read_text(self.config.timeout).await?;
        let member = Member { client, endpoint, token: None, timeout: self.config.timeout };
        let body = json!({ "name": name, "password": password.trim_end() });
        let answer: Result<Value, Failure> = member.call("/v3/auth/authenticate", &body).await;
        if refusal::lacks_users(&answer, &mut self.lacks_users, endpoint) {
            return Ok(None);
        }
        let answer = answer?;
        let token = answer.get("token").and_then(Value::as_str);
        token
            .map(|token| Some(token.to_owned()))
            .ok_or_else(|| format!("{endpoint}: no token for user `{name}`").into())
    }
}

impl Member<'_> {
    fn request(&self, path: &str, body: &Value) -> RequestBuilder {
        let url = format!("{}{path}", self.endpoint.trim_end_matches('/'));
        let request = self.client.post(url).body(body.to_string());
        match &self.token {
            Some(token) => request.header("authorization", token),
            None => request,
        }
    }

    async fn call<T: for<'de> Deserialize<'de>>(&self, path: &str, body: &Value) -> Result<T, Failure> {
        let response = http::send(self.request(path, body), self.timeout).await?;
        if !response.status().is_success() {
            return Err(refusal(response, self.timeout).await);
        }
        let bytes = http::body(response, MAX_WHOLE, self.timeout).await?;
        serde_json::from_slice(&bytes).map_err(|error| format!("{}{path}: {error}", self.endpoint).into())
    }

    /// Asks for the number of keys again and again. Returns why that failed.
    async fn check(&self, key: &str, range_end: &str, reporter: &Reporter) -> Failure {
        let body = json!({ "key": key, "range_end": range_end, "count_only": true, "limit": "1" });
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match self.call::<IgnoredAny>("/v3/kv/range", &body).await {
                Ok(_) => reporter.alive(),
                Err(failure) => return failure,
            }
        }
    }
}

impl Source for EtcdSource {
    async fn run(mut self, reporter: Reporter) {
        let mut pauses = Pauses::default();
        let endpoints = &self.config.endpoints;
        let secure = endpoints.iter().find(|endpoint| !endpoint.starts_with("http://")).or(endpoints.first());
        let Some(url) = secure.cloned() else { return };
        let mut endpoints = self.config.endpoints.clone().into_iter().cycle();
        let Some(mut endpoint) = endpoints.next() else { return };
        loop {
            // Certificates are renewed while the gateway runs: their files are read again for each reading.
            let followed = match self.clients.make(&self.config.tls, &url, self.config.timeout).await {
                Ok(client) => self.follow(&client, &endpoint, &reporter, &mut pauses).await,
                Err(problem) => Err(problem.into()),
            };
            match followed {
                // A member that ends each watch at once must not keep both busy.
                Ok(()) => pauses.wait(None).await,
                Err(Failure { problem, retry_after }) => {
                    reporter.away(format!("{endpoint}: {problem}"));
                    pauses.wait(retry_after).await;
                    endpoint = endpoints.next().unwrap_or(endpoint);
                }
            }
        }
    }
}

/// Returns the first key of a prefix and the first one after it, as the gateway wants them.
fn range(prefix: &str) -> (String, String) {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    // `\0`: all keys.
    let or_zero = |bytes: &[u8]| BASE64.encode(if bytes.is_empty() { &[0][..] } else { bytes });
    (or_zero(prefix.as_bytes()), or_zero(&end))
}

/// Reads one key. A key that is not base64 does not occur.
fn entry(pair: &KeyValue) -> Option<(String, Result<Vec<Found>, Invalid>)> {
    let key = String::from_utf8_lossy(&BASE64.decode(&pair.key).ok()?).into_owned();
    let described = BASE64.decode(&pair.value).map_err(|error| error.to_string()).and_then(|value| {
        if value.len() > MAX_VALUE {
            return Err(format!("the value has {} bytes: at most {MAX_VALUE} are read", value.len()));
        }
        let spec: WorkerSpec = serde_json::from_slice(&value).map_err(|error| error.to_string())?;
        let created = pair.create_revision.parse().unwrap_or_default();
        Ok(vec![Found { entry: Some(key.as_str().into()), created, ..Found::staying(spec) }])
    });
    Some((key, described.map_err(Invalid::from)))
}

#[cfg(test)]
mod tests;
