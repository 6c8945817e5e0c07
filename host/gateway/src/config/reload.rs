//! The configuration read again while the daemon runs: what can change does, what cannot is named.
//!
//! A file with anything wrong changes nothing. Slots change as files of the policy folder do, each wholly or not at all; workers of
//! the file join, leave and are replaced; those that joined on the admin port stay.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use pointsman_policy_runtime::{Command, CommandError, Report};
use pointsman_workers::{Registry, WorkerId, WorkerSpec};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{config::Config, daemon::slots::specs, state::State};

/// Between two looks at the file. A change is taken when two looks find the same.
const LOOK: Duration = Duration::from_secs(1);

/// Reads the configuration as it was read at the start: the file, and the flags that win over it.
pub type ReadConfig = Arc<dyn Fn() -> anyhow::Result<Config> + Send + Sync>;

/// Where the configuration comes from.
#[derive(Clone)]
pub struct ConfigSource {
    /// The file that is looked at for changes.
    pub path: Option<PathBuf>,
    /// Reads it.
    pub read: ReadConfig,
}

/// The configuration in force.
#[derive(Debug)]
pub struct ConfigReloader {
    source: Option<ConfigSource>,
    /// What the daemon was started with: what cannot change is compared with it.
    started: Config,
    /// The workers of the file as they were read last. Its lock makes reloads take turns.
    workers: tokio::sync::Mutex<Vec<WorkerSpec>>,
}

/// What a reload did.
#[derive(Clone, Debug, Serialize)]
pub struct Reloaded {
    /// What became of slots.
    #[serde(flatten)]
    pub policies: Report,
    /// What became of workers.
    pub workers: Moves,
    /// Keys that are not what they were at the start, and do nothing before the next.
    pub needs_restart: Vec<String>,
}

/// Workers of the file that joined, left, and were replaced by one that is described otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moves {
    /// Joined.
    pub added: Vec<WorkerId>,
    /// Left.
    pub removed: Vec<WorkerId>,
    /// Replaced.
    pub changed: Vec<WorkerId>,
}

/// Why nothing was reloaded.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The daemon was started without a file.
    #[error("this daemon was started without a configuration file")]
    NoFile,
    /// The file is not a sound configuration; all that is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The policy manager's word.
    #[error(transparent)]
    Policies(#[from] CommandError),
}

impl ConfigReloader {
    /// Keeps `started`, which came from `source`.
    #[must_use]
    pub fn new(started: Config, source: Option<ConfigSource>) -> Self {
        let workers = tokio::sync::Mutex::new(started.workers.clone());
        Self { source, started, workers }
    }

    /// Reads the configuration again and applies what can change.
    ///
    /// # Errors
    /// [`ReloadError`]; then nothing changed.
    pub async fn reload(&self, app: &State) -> Result<Reloaded, ReloadError> {
        let mut workers = self.workers.lock().await;
        let source = self.source.as_ref().ok_or(ReloadError::NoFile)?;
        let config = (source.read)().map_err(|error| ReloadError::Invalid(format!("{error:#}")))?;
        let trust = config.policies.trust().map_err(|errors| ReloadError::Invalid(errors.join("\n")))?;
        let command = Command::Configure { specs: specs(&config), trust };
        let policies = app.policies.execute(command).await?;
        let moves = move_workers(&app.registry, &workers, &config.workers);
        let needs_restart = needs_restart(&self.started, &config);
        *workers = config.workers;
        tracing::info!(
            slots = policies.changed.len(),
            refused = policies.refused.len(),
            workers = ?moves,
            ?needs_restart,
            "configuration read again"
        );
        Ok(Reloaded { policies, workers: moves, needs_restart })
    }

    /// Looks at the file until told to stop, and reloads when it changed.
    pub(crate) async fn watch(app: Arc<State>, stop: CancellationToken) {
        let Some(path) = app.config.source.as_ref().and_then(|source| source.path.clone()) else { return };
        let mut applied = read(&path).await;
        let mut before = applied.clone();
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            let now = read(&path).await;
            // Half a file is not read, unless somebody writes it very slowly; then it is refused, and read again when whole.
            if now.is_some() && now == before && now != applied {
                applied.clone_from(&now);
                if let Err(error) = app.config.reload(&app).await {
                    tracing::warn!(path = %path.display(), %error, "the configuration stays as it is");
                }
            }
            before = now;
        }
    }
}

async fn read(path: &Path) -> Option<Vec<u8>> {
    tokio::fs::read(path).await.ok()
}

/// Makes the registry follow the file: only what differs between two readings moves.
fn move_workers(registry: &Registry, before: &[WorkerSpec], after: &[WorkerSpec]) -> Moves {
    let known: BTreeMap<WorkerId, &WorkerSpec> = before.iter().map(|spec| (spec.id, spec)).collect();
    let mut moves = Moves::default();
    for spec in after {
        let list = match known.get(&spec.id) {
            Some(same) if *same == spec => continue,
            Some(_) => &mut moves.changed,
            None => &mut moves.added,
        };
        list.push(spec.id);
        registry.upsert(spec.clone());
    }
    for id in known.keys().filter(|id| !after.iter().any(|spec| spec.id == **id)) {
        registry.remove(*id);
        moves.removed.push(*id);
    }
    moves
}

macro_rules! differing {
    ($old:expr, $new:expr, $($section:ident: $($key:ident)*;)*) => {{
        let mut keys = Vec::new();
        $($(
            if format!("{:?}", $old.$section.$key) != format!("{:?}", $new.$section.$key) {
                keys.push(concat!(stringify!($section), ".", stringify!($key)).to_owned());
            }
        )*)*
        keys
    }};
}

/// Keys that are not what they were at the start, and cannot change while the daemon runs.
fn needs_restart(old: &Config, new: &Config) -> Vec<String> {
    let mut keys = differing!(old, new,
        server: listen admin_listen threads max_body_bytes trust_hints requests_per_second api_keys admin_token
            admin_token_file admin_token_reads;
        routing: enforce_disagg block_size bytes_per_token order retries local_fallback session_affinity busy_status
            hash_salt cost;
        policies: dir deadline configure_deadline observe_deadline memory_bytes on_failure probation_calls
            probation_failure_share debounce rescan compile_cache;
        index: byte_budget ttl;
        queue: limit timeout;
        timeouts: connect request booking drain;
        probe: interval timeout load_interval;
    );
    let tokenizers = |config: &Config| -> BTreeMap<String, String> {
        let one =
            |model: &crate::config::Model| format!("{:?} {}", model.tokenizer, model.tokenizer_cache_bytes);
        config.models.iter().map(|(name, model)| (name.clone(), one(model))).collect()
    };
    let (before, after) = (tokenizers(old), tokenizers(new));
    for name in before.keys().chain(after.keys()).collect::<std::collections::BTreeSet<_>>() {
        let without = "None 33554432".to_owned();
        if before.get(name).unwrap_or(&without) != after.get(name).unwrap_or(&without) {
            keys.push(format!("models.{name}.tokenizer"));
        }
        let slots = |config: &Config| -> Vec<_> {
            config.models.get(name).map(|model| model.slots.keys().copied().collect()).unwrap_or_default()
        };
        let (before, after) = (slots(old), slots(new));
        // Slots are made at the start; what is in them may change.
        for kind in pointsman_routing::SlotKind::ALL {
            if before.contains(&kind) != after.contains(&kind) {
                keys.push(format!("models.{name}.slots.{kind}"));
            }
        }
    }
    keys
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSource").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(flag: &str) -> WorkerSpec {
        WorkerSpec::parse_flag(flag).unwrap()
    }

    #[test]
    fn workers_of_the_file_move_and_those_that_joined_otherwise_stay() {
        let registry = Registry::default();
        let [one, two] =
            [1, 2].map(|id| spec(&format!("id={id},role=prefill,engine=vllm,url=http://a:{id}")));
        let joined = spec("id=9,role=decode,engine=vllm,url=http://a:9");
        for worker in [&one, &two, &joined] {
            registry.upsert(worker.clone());
        }
        let kept = registry.snapshot().get(WorkerId(1)).unwrap().clone();
        let two_otherwise = spec("id=2,role=decode,engine=vllm,url=http://a:2");
        let three = spec("id=3,role=prefill,engine=vllm,url=http://a:3");
        let before = [one.clone(), two];
        let moves = move_workers(&registry, &before, &[one.clone(), two_otherwise, three.clone()]);
        let expected = Moves { added: vec![WorkerId(3)], removed: vec![], changed: vec![WorkerId(2)] };
        assert_eq!(moves, expected);
        assert!(
            Arc::ptr_eq(registry.snapshot().get(WorkerId(1)).unwrap(), &kept),
            "its health and bookings stay"
        );
        let moves = move_workers(&registry, &[one, three.clone()], &[three]);
        assert_eq!(moves.removed, [WorkerId(1)]);
        let left: Vec<u64> = registry.snapshot().workers().iter().map(|worker| worker.id().0).collect();
        assert_eq!(left, [9, 2, 3]);
    }

    #[test]
    fn keys_that_need_a_restart_are_named_and_others_are_not() {
        let config = |text: &str| toml::from_str::<Config>(text).unwrap();
        let keys = |text: &str| needs_restart(&Config::default(), &config(text));
        let none: [String; 0] = [];
        assert_eq!(keys("[policies.slots.prefill]\nnative = \"kv\"\n[policies.pins]\n"), none);
        let text = "[server]\nlisten = \"127.0.0.1:1\"\n[timeouts]\ndrain = \"1s\"\n[routing.cost]\ntemperature = 1.0";
        assert_eq!(keys(text), ["server.listen", "routing.cost", "timeouts.drain"]);
        let text = "[models.m]\ntokenizer = \"/t\"\n[models.n.slots.decode]\n";
        assert_eq!(keys(text), ["models.m.tokenizer", "models.n.slots.decode"]);
    }
}
