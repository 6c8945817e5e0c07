//! Configuration: one file, resolved once. All problems are reported together, each with its dotted path.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use pointsman_routing::{Decisions as Ring, RouterConfig, SlotKind, facts::UnknownFact};
use pointsman_workers::WorkerSpec;
use serde::Deserialize;

use crate::orchestrate::legs::Order;

mod policies;
pub mod reload;
mod slots;

pub use policies::Policies;
pub use slots::{PartEntry, ScorerEntry, SlotEntry, TrialEntry};

/// What the record of decisions takes at least.
const LEAST_DECISION_BYTES: usize = 65_536;

/// The whole configuration, as in the file. Every field has a default, which is written here and nowhere else.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The listeners.
    pub server: Server,
    /// How requests are routed.
    pub routing: Routing,
    /// Where policies come from and what they may use.
    pub policies: Policies,
    /// The prefix index.
    pub index: Index,
    /// Where requests wait when every eligible worker is busy.
    pub queue: Queue,
    /// The record of decisions.
    pub decisions: Decisions,
    /// Time limits.
    pub timeouts: Timeouts,
    /// How workers are probed.
    pub probe: Probe,
    /// What is known of models besides what engines tell, by name.
    pub models: BTreeMap<String, Model>,
    /// The workers.
    pub workers: Vec<WorkerSpec>,
}

/// What is known of a model, and the slots it has of its own.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Where its prompts' tokens come from; not given: they are measured in bytes.
    pub tokenizer: Option<TokenSource>,
    /// How long a request waits for an engine's tokens.
    #[serde(default = "tokenizer_timeout", with = "humantime_serde")]
    pub tokenizer_timeout: Duration,
    /// Bytes that remembered pieces of prompts may take; 0: none are remembered.
    #[serde(default = "tokenizer_cache_bytes")]
    pub tokenizer_cache_bytes: usize,
    /// Slots of this model alone; the others are those of all models.
    #[serde(default)]
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// Where a model's tokens come from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "PathBuf")]
pub enum TokenSource {
    /// `engine`: an engine of the model is asked.
    Engine,
    /// A Hugging Face model folder with `tokenizer.json` and `tokenizer_config.json`.
    Folder(PathBuf),
}

impl From<PathBuf> for TokenSource {
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "engine" { Self::Engine } else { Self::Folder(path) }
    }
}

fn tokenizer_timeout() -> Duration {
    Duration::from_millis(200)
}

fn tokenizer_cache_bytes() -> usize {
    32 * 1024 * 1024
}

/// The listeners.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where operators connect.
    pub admin_listen: SocketAddr,
    /// Threads that serve clients; 0: one for every two cores.
    pub threads: usize,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Whether clients' routing hints are taken.
    pub trust_hints: bool,
    /// Whether clients that ask are told why a worker was chosen.
    pub tell_decisions: bool,
    /// Requests a second that a key (or, without keys, everybody together) may make; 0: no limit.
    pub requests_per_second: u32,
    /// Keys that clients must give as bearer token; none: everybody may.
    pub api_keys: Vec<String>,
    /// What operators must give as bearer token to change anything; none: everybody who can connect may.
    pub admin_token: Option<String>,
    /// The same, read from a file.
    pub admin_token_file: Option<PathBuf>,
    /// Whether reading needs the token too; health and readiness never do.
    pub admin_token_reads: bool,
}

/// How requests are routed.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Routing {
    /// Refuse requests when there is no prefill worker, instead of prefilling locally.
    pub enforce_disagg: bool,
    /// Tokens in a block of the index.
    pub block_size: u32,
    /// Bytes taken for a token when there are no tokens.
    pub bytes_per_token: u32,
    /// Which leg is routed first.
    pub order: Order,
    /// Further tries of a request, all legs together.
    pub retries: u32,
    /// Prefill locally when remote prefill failed for good; never under `enforce_disagg`.
    pub local_fallback: bool,
    /// How long every session stays bound to its workers; 0: only sessions with a session control.
    #[serde(with = "humantime_serde")]
    pub session_affinity: Duration,
    /// HTTP status when every eligible worker is busy.
    pub busy_status: u16,
    /// Salt of the session, LoRA and tenant hashes that policies see.
    pub hash_salt: u64,
    /// Parameters of the cost.
    pub cost: RouterConfig,
}

/// The prefix index.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Index {
    /// Bytes it may hold.
    pub byte_budget: usize,
    /// How long a decision is taken to stay cached.
    #[serde(with = "humantime_serde")]
    pub ttl: Duration,
}

/// Where requests wait when every eligible worker is busy.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Queue {
    /// Requests that may wait; 0: none does.
    pub limit: usize,
    /// How long one may wait.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

/// The record of decisions.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decisions {
    /// The last so many are kept; 0: none.
    pub keep: usize,
    /// Bytes that their inputs may take.
    pub bytes: usize,
    /// Facts that are recorded for every leg's decision, whatever its policy wants.
    pub facts: Vec<String>,
}

/// Time limits.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Connecting to a worker.
    #[serde(with = "humantime_serde")]
    pub connect: Duration,
    /// A whole request.
    #[serde(with = "humantime_serde")]
    pub request: Duration,
    /// A booking without a token for this long is load no more.
    #[serde(with = "humantime_serde")]
    pub booking: Duration,
    /// Requests under way when the daemon is told to end.
    #[serde(with = "humantime_serde")]
    pub drain: Duration,
}

/// How workers are probed.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    /// Between health checks.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// A health check.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Between reads of a worker's own load figures; 0: never.
    #[serde(with = "humantime_serde")]
    pub load_interval: Duration,
}

impl Model {
    fn problems(&self, name: &str, dir: bool) -> Vec<String> {
        let mut problems = Vec::new();
        if !self.slots.is_empty() && !slots::is_folder_name(name) {
            problems
                .push(format!("models.{name}.slots: `{name}` cannot be the name of a folder of policies"));
        }
        for (kind, entry) in &self.slots {
            problems.extend(entry.problems(&format!("models.{name}.slots.{kind}"), *kind, dir));
        }
        problems
    }
}

impl Server {
    /// What operators must give.
    ///
    /// # Errors
    /// What is wrong with it, with its dotted path.
    pub fn operators_token(&self) -> Result<Option<String>, String> {
        let token = match (&self.admin_token, &self.admin_token_file) {
            (Some(_), Some(_)) => {
                return Err(
                    "server: `admin_token` and `admin_token_file` are given, one of them is enough".into()
                );
            }
            (Some(token), None) => Some(token.clone()),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file);
                let text =
                    text.map_err(|error| format!("server.admin_token_file: {}: {error}", file.display()))?;
                Some(text.trim().to_owned())
            }
            (None, None) => None,
        };
        if token.as_ref().is_some_and(String::is_empty) {
            return Err("server.admin_token: it is empty".into());
        }
        if token.is_none() && self.admin_token_reads {
            return Err("server.admin_token_reads: there is no `admin_token`".into());
        }
        Ok(token)
    }

    /// Threads that serve clients: by default one for every two cores. The kernel's part of their work, KV events, the index
    /// and compiles take the others, and a thread that seldom sleeps is cheaper than two that do.
    #[must_use]
    pub fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }
}

impl Decisions {
    /// An empty record.
    ///
    /// # Errors
    /// Names a fact that does not exist.
    pub fn ring(&self) -> Result<Ring, UnknownFact> {
        Ok(Ring::new(self.keep, self.bytes, Ring::facts(&self.facts)?))
    }

    fn problems(&self) -> Vec<String> {
        let unknown = Ring::facts(&self.facts).err().map(|unknown| format!("decisions.facts: {unknown}"));
        let bytes = self.bytes;
        let few = (self.keep > 0 && bytes < LEAST_DECISION_BYTES).then(|| {
            format!("decisions.bytes: `{bytes}` is less than {LEAST_DECISION_BYTES}; `keep = 0` keeps none")
        });
        unknown.into_iter().chain(few).collect()
    }
}

impl Default for Server {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 9090)),
            threads: 0,
            max_body_bytes: 32 * 1024 * 1024,
            trust_hints: true,
            tell_decisions: true,
            requests_per_second: 0,
            api_keys: Vec::new(),
            admin_token: None,
            admin_token_file: None,
            admin_token_reads: false,
        }
    }
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            enforce_disagg: false,
            block_size: 16,
            bytes_per_token: 4,
            order: Order::PrefillFirst,
            retries: 2,
            local_fallback: false,
            session_affinity: Duration::ZERO,
            busy_status: 529,
            hash_salt: 0,
            cost: RouterConfig::default(),
        }
    }
}

impl Default for Index {
    fn default() -> Self {
        Self { byte_budget: 256 * 1024 * 1024, ttl: Duration::from_secs(120) }
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self { limit: 0, timeout: Duration::from_secs(30) }
    }
}

impl Default for Decisions {
    fn default() -> Self {
        Self { keep: 10_000, bytes: 32 * 1024 * 1024, facts: Vec::new() }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            request: Duration::from_secs(600),
            booking: Duration::from_secs(300),
            drain: Duration::from_secs(30),
        }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(1),
            load_interval: Duration::from_secs(5),
        }
    }
}

/// Everything that is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigErrors(pub Vec<String>);

impl Config {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// The file cannot be read or does not parse; toml names line, column and key.
    pub fn read(path: &Path) -> Result<Self, ConfigErrors> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigErrors(vec![format!("{}: {error}", path.display())]))?;
        toml::from_str(&text).map_err(|error| ConfigErrors(vec![format!("{}: {error}", path.display())]))
    }

    /// Checks what types cannot say.
    ///
    /// # Errors
    /// All problems, each with its dotted path and value.
    pub fn check(&self) -> Result<(), ConfigErrors> {
        let mut problems = Vec::new();
        let mut say = |wrong: bool, text: String| {
            if wrong {
                problems.push(text);
            }
        };
        let (routing, policies) = (&self.routing, &self.policies);
        say(routing.block_size == 0, "routing.block_size: `0` tokens make no block".to_owned());
        say(routing.bytes_per_token == 0, "routing.bytes_per_token: `0` bytes make no token".to_owned());
        let busy = routing.busy_status;
        say(!(400..600).contains(&busy), format!("routing.busy_status: `{busy}` is not an error status"));
        self.decisions.problems().into_iter().for_each(|problem| say(true, problem));
        let limits = [
            ("timeouts.booking", self.timeouts.booking),
            ("policies.deadline", policies.deadline),
            ("policies.configure_deadline", policies.configure_deadline),
            ("policies.observe_deadline", policies.observe_deadline),
            ("policies.rescan", policies.rescan),
            ("timeouts.connect", self.timeouts.connect),
            ("timeouts.request", self.timeouts.request),
            ("probe.interval", self.probe.interval),
            ("probe.timeout", self.probe.timeout),
            ("index.ttl", self.index.ttl),
        ];
        for (path, limit) in limits {
            say(limit.is_zero(), format!("{path}: `0s` is no time at all"));
        }
        for (place, worker) in self.workers.iter().enumerate() {
            let twin = self.workers.iter().take(place).position(|other| other.id == worker.id);
            say(
                twin.is_some(),
                format!("workers[{place}].id: `{}` is that of workers[{}] too", worker.id, twin.unwrap_or(0)),
            );
        }
        problems.extend(self.server.operators_token().err());
        problems.extend(policies.problems());
        for (name, model) in &self.models {
            problems.extend(model.problems(name, policies.dir.is_some()));
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigErrors(problems)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let config: Config = toml::from_str(text).unwrap();
        let problems = config.check().map_or_else(|errors| errors.0, |()| Vec::new());
        assert_eq!(problems, expected);
    }

    #[test]
    fn an_empty_file_is_a_sound_configuration_and_b1_enforcing_is_off() {
        check("", &[]);
        assert!(!Config::default().routing.enforce_disagg);
    }

    #[test]
    fn all_problems_are_told_at_once_with_their_paths() {
        check(
            r#"
            [routing]
            block_size = 0
            [policies]
            dir = "/no/such"
            deadline = "0s"
            [policies.slots.prefill]
            native = "kv"
            builtin = "kv-awar"
            [decisions]
            bytes = 1000
            facts = ["active-requests", "prompt-text"]
            [[workers]]
            url = "http://a:1"
            role = "prefill"
            engine = "vllm"
            [[workers]]
            url = "http://a:1/"
            role = "decode"
            engine = "vllm"
            "#,
            &[
                "routing.block_size: `0` tokens make no block",
                "decisions.facts: unknown request or worker fact `prompt-text`",
                "decisions.bytes: `1000` is less than 65536; `keep = 0` keeps none",
                "policies.deadline: `0s` is no time at all",
                &format!(
                    "workers[1].id: `{}` is that of workers[0] too",
                    pointsman_workers::WorkerId::of_url("http://a:1")
                ),
                "policies.dir: `/no/such` is no folder",
                "policies.slots.prefill: `native` and `builtin` are given, one of them is enough",
                "policies.slots.prefill.builtin: `kv-awar` is not built in",
            ],
        );
    }

    #[test]
    fn an_operators_token_that_is_none_is_told() {
        check("[server]\nadmin_token = \"\"", &["server.admin_token: it is empty"]);
        check("[server]\nadmin_token_reads = true", &["server.admin_token_reads: there is no `admin_token`"]);
        let both = "[server]\nadmin_token = \"a\"\nadmin_token_file = \"b\"";
        check(both, &["server: `admin_token` and `admin_token_file` are given, one of them is enough"]);
        let config: Config = toml::from_str("[server]\nadmin_token_file = \"/no/such\"").unwrap();
        let problems = config.check().unwrap_err().0;
        assert!(problems[0].starts_with("server.admin_token_file: /no/such: "), "{problems:?}");
    }

    #[test]
    fn an_unknown_key_or_a_bad_worker_does_not_parse_and_says_where() {
        let error = toml::from_str::<Config>("[server]\nlisten_on = 1").unwrap_err().to_string();
        assert!(error.contains("unknown field `listen_on`") && error.contains("line 2"), "{error}");
        let error =
            toml::from_str::<Config>("[[workers]]\nrole=\"cook\"\nengine=\"vllm\"\nurl=\"http://a:1\"")
                .unwrap_err();
        assert!(error.to_string().contains("role: role `cook` is none of"), "{error}");
    }
}
