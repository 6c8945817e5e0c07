//! The state of policies in a bucket of JetStream, for as long as one connection lasts.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use async_nats::{
    Client,
    jetstream::{self, kv, stream},
};
use futures_util::{StreamExt as _, future::join_all};
use pointsman_routing::{SharedContent, Stamp, StateChange};
use pointsman_workers::{LogLimit, unix_ms};
use tokio::{
    task::JoinSet,
    time::{Instant, interval, timeout},
};

use crate::{
    config::ReplicasConfig,
    shared_states::{SharedStates, from_entry, to_entry},
    status::{StateView, Status},
};

/// Time between two batches of own changes. A number of the fleet is behind by that, and the way through
/// NATS.
const INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of changes of one slot in a batch.
const BATCH: usize = 512;
/// Longest time that the server may take for one answer.
const ANSWER: Duration = Duration::from_secs(5);
/// First pause before another attempt to use the bucket. It doubles while attempts fail at once: a cluster of
/// NATS elects a leader within seconds. Also the time between two looks for a slot that shares its state.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Time between two rounds that remove expired entries from the bucket, and the most of one round.
const REMOVE: (Duration, usize) = (Duration::from_secs(10), 256);
/// How long entries stay after they expired: own ones, and those of other gateways, which may be gone.
const GRACE_MS: (u64, u64) = (60_000, 300_000);
/// Maximum number of entries that this gateway tracks in order to remove them when they expire.
const MAX_KNOWN: usize = 262_144;
/// How long the removal of a key is sent to gateways that join.
const REMOVED_MS: u64 = 300_000;
/// Maximum number of a key's characters in the log. A key has the slot, the policy's key in base64, and the
/// gateway.
const SHOWN_KEY: usize = 200;
/// First part of the key of an entry that tests whether the server takes writes. No slot has this name.
const PROBE: &str = "probe";
/// Maximum size of a bucket that this gateway creates, bytes.
const MAX_BYTES: i64 = 64 * 1024 * 1024;

/// Keeps the states and the bucket equal until it is dropped.
pub(super) struct StateLink {
    client: Client,
    fleet: String,
    gateway: String,
    states: SharedStates,
    status: Arc<Status>,
}

/// The bucket and its known content.
struct Bucket<'a> {
    link: &'a StateLink,
    store: kv::Store,
    /// When entries expire, to remove them.
    expires: HashMap<String, u64>,
    refusals: LogLimit,
    /// Slots that shared their state when the bucket was read.
    slots: Vec<String>,
}

impl StateLink {
    /// Starts on the present runtime. Dropping the set ends it.
    pub(super) fn start(
        config: &ReplicasConfig,
        client: &Client,
        states: &SharedStates,
        status: &Arc<Status>,
    ) -> JoinSet<()> {
        let link = Self {
            client: client.clone(),
            fleet: config.fleet.clone(),
            gateway: config.name.clone(),
            states: states.clone(),
            status: status.clone(),
        };
        let mut task = JoinSet::new();
        task.spawn(link.run());
        task
    }

    /// Runs for ever. A failure is shown, and the task tried again.
    async fn run(self) {
        let (mut pause, mut logged) = (FIRST_PAUSE, None);
        loop {
            // A slot may begin to share its state at any time.
            if !self.states.any() {
                pause = FIRST_PAUSE;
                tokio::time::sleep(FIRST_PAUSE).await;
                continue;
            }
            let begun = Instant::now();
            self.status.take_state_denial();
            let failed = match self.keep_equal().await {
                Ok(()) => "the watch of the bucket ended".to_owned(),
                Err(problem) => problem,
            };
            // A refused request has no other answer than this, which names another key each time.
            let denial = self.status.take_state_denial();
            let problem = denial.map_or_else(|| failed.clone(), |denial| format!("{failed}: {denial}"));
            let was_shared = self.status.state().shared;
            if was_shared || logged.as_ref() != Some(&failed) {
                tracing::warn!(problem, "state of policies is not shared");
            }
            logged = Some(failed);
            self.status.set_state(StateView::not_shared(&problem));
            if was_shared && begun.elapsed() >= MAX_PAUSE {
                pause = FIRST_PAUSE;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn keep_equal(&self) -> Result<(), String> {
        let store = with_time_limit(self.open()).await?;
        let mut watch = with_time_limit(async { text(store.watch_with_history(">").await) }).await?;
        let mut bucket = Bucket {
            link: self,
            store,
            expires: HashMap::new(),
            refusals: LogLimit::new(Duration::from_secs(60)),
            slots: self.states.shared().map(|(slot, _)| slot.to_owned()).collect(),
        };
        // Reads first what others published, and what this gateway published before a restart. Its new
        // changes build on that.
        let mut is_current =
            with_time_limit(async { text(bucket.store.status().await) }).await?.values() == 0;
        while !is_current {
            let entry =
                timeout(ANSWER, watch.next()).await.map_err(|_| "the bucket does not send its entries")?;
            let Some(entry) = entry else { return Ok(()) };
            let entry = text(entry)?;
            is_current = entry.seen_current || entry.delta == 0;
            bucket.receive(&entry);
        }
        self.states.shared().for_each(|(_, state)| state.note_all());
        // A server that refuses the writes shares nothing. The last problem is shown until it confirms one.
        bucket.probe().await?;
        bucket.send().await?;
        self.status.set_state(StateView { shared: true, problem: None });
        let (mut send, mut remove) = (interval(INTERVAL), interval(REMOVE.0));
        send.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                entry = watch.next() => match entry {
                    Some(entry) => bucket.receive(&text(entry)?),
                    None => return Ok(()),
                },
                _ = send.tick() => bucket.send().await?,
                _ = remove.tick() => bucket.remove_expired().await,
            }
        }
    }

    /// Opens the fleet's bucket, which an operator or another gateway may have created.
    async fn open(&self) -> Result<kv::Store, String> {
        let mut context = jetstream::new(self.client.clone());
        // Longer than the limit here, so that a request without an answer always fails with the same text.
        context.set_timeout(ANSWER * 2);
        let name = format!("pointsman-{}", self.fleet);
        if let Ok(store) = context.get_key_value(&name).await {
            return Ok(store);
        }
        let created = context.create_stream(bucket(&name)).await.err();
        // Another gateway may have created it at this moment.
        context.get_key_value(&name).await.map_err(|error| {
            let error = created.map_or_else(|| error.to_string(), |error| error.to_string());
            format!("JetStream bucket `{name}`: {error}")
        })
    }
}

impl Bucket<'_> {
    /// Applies an entry of any gateway.
    fn receive(&mut self, entry: &kv::Entry) {
        if entry.operation != kv::Operation::Put {
            return;
        }
        let counters = &self.link.status.counters;
        counters.state_received.fetch_add(1, Relaxed);
        let now = unix_ms();
        let problem = match from_entry(&entry.key, &entry.value) {
            Ok((slot, change)) => {
                self.remember(&entry.key, expiry(&change.content, now));
                let state = self.link.states.get(slot);
                state.and_then(|state| state.apply(change, now).err()).map(|refused| refused.to_string())
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem {
            counters.state_refused.fetch_add(1, Relaxed);
            if let Some(suppressed) = self.refusals.due() {
                let key: String = entry.key.chars().take(SHOWN_KEY).collect();
                tracing::warn!(problem, key, suppressed, "entry of a shared state refused");
            }
        }
    }

    /// Writes an entry that changes nothing: of no slot, and expired. The server may refuse all writes, and
    /// without changes nothing else shows that.
    async fn probe(&self) -> Result<(), String> {
        let content = SharedContent::Part { writer: 0, incarnation: 0, sum: 0, expires_ms: unix_ms() };
        let stamp = Stamp { time_us: 0, writer: 0 };
        let change = StateChange { key: String::new(), stamp, content };
        let (key, body) = to_entry(PROBE, &self.link.gateway, &change);
        confirmed(self.store.put(key, body.into())).await
    }

    /// Tells the own changes. A change that the server does not confirm is sent again.
    async fn send(&mut self) -> Result<(), String> {
        let link = self.link;
        // A slot that began to share its state since then has not read the earlier changes of others.
        if !link.states.shared().map(|(slot, _)| slot).eq(self.slots.iter().map(String::as_str)) {
            return Err("the slots that share their state changed: the bucket is read again".to_owned());
        }
        for (slot, state) in link.states.shared() {
            let changes = state.take_changes(BATCH);
            let mut puts = Vec::new();
            for change in &changes {
                let (key, body) = to_entry(slot, &link.gateway, change);
                self.remember(&key, expiry(&change.content, unix_ms()));
                puts.push((key, body));
            }
            let store = &self.store;
            let puts = puts.into_iter().map(|(key, body)| confirmed(store.put(key, body.into())));
            let mut problem = None;
            for (change, put) in changes.iter().zip(join_all(puts).await) {
                let counters = &link.status.counters;
                let failed = put.err();
                let count = if failed.is_some() { &counters.state_unsent } else { &counters.state_sent };
                count.fetch_add(1, Relaxed);
                if failed.is_some() {
                    state.note_again(&change.key);
                    problem = problem.or(failed);
                }
            }
            if let Some(problem) = problem {
                return Err(problem);
            }
        }
        Ok(())
    }

    fn remember(&mut self, key: &str, expires_ms: u64) {
        if let Some(known) = self.expires.get_mut(key) {
            *known = expires_ms;
        } else if expires_ms != u64::MAX && self.expires.len() < MAX_KNOWN {
            self.expires.insert(key.to_owned(), expires_ms);
        }
    }

    /// Removes entries that have expired. Each gateway removes its own first; those of a gateway that stopped
    /// are removed by any other.
    async fn remove_expired(&mut self) {
        let (now, own) = (unix_ms(), format!(".c.{}", self.link.gateway));
        let old = |key: &str, expires: u64| {
            let grace = if key.ends_with(&own) { GRACE_MS.0 } else { GRACE_MS.1 };
            expires.saturating_add(grace) <= now
        };
        let gone =
            self.expires.iter().filter(|(key, expires)| old(key, **expires)).map(|(key, _)| key.clone());
        for key in gone.take(REMOVE.1).collect::<Vec<_>>() {
            let subject = format!("$KV.{}.{key}", self.store.name);
            let purged = timeout(ANSWER, async { self.store.stream.purge().filter(subject).await }).await;
            if !matches!(purged, Ok(Ok(_))) {
                return;
            }
            self.expires.remove(&key);
        }
    }
}

/// The stream of a bucket, as clients of NATS create it. The library's own call asks for figures of the
/// account that servers before 2.10 do not have.
fn bucket(name: &str) -> stream::Config {
    stream::Config {
        name: format!("KV_{name}"),
        description: Some("State that policies of Pointsman share".to_owned()),
        subjects: vec![format!("$KV.{name}.>")],
        max_messages_per_subject: 1,
        max_bytes: MAX_BYTES,
        discard: stream::DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        num_replicas: 1,
        ..stream::Config::default()
    }
}

/// Returns when an entry of the bucket is of no use any more.
fn expiry(content: &SharedContent, now_ms: u64) -> u64 {
    use SharedContent::{Deleted, Part, Value};
    match content {
        Value { expires_ms, .. } | Part { expires_ms, .. } => *expires_ms,
        Deleted => now_ms.saturating_add(REMOVED_MS),
    }
}

async fn with_time_limit<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    timeout(ANSWER, work).await.unwrap_or_else(|_| Err(format!("JetStream did not answer within {ANSWER:?}")))
}

/// Waits until the server confirms a write.
async fn confirmed<T, E: std::fmt::Display>(write: impl Future<Output = Result<T, E>>) -> Result<(), String> {
    let written = timeout(ANSWER, write).await.map_err(|_| format!("no confirmation within {ANSWER:?}"))?;
    text(written).map(drop)
}

fn text<T, E: std::fmt::Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}
