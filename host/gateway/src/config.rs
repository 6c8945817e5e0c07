//! Configuration: one file, resolved once. All problems are reported together, each with its dotted path.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use pointsman_routing::{
    Decisions as Ring, NativeMode, OnFailure, RouterConfig, SlotKind, facts::UnknownFact,
};
use pointsman_workers::WorkerSpec;
use serde::Deserialize;

use crate::legs::Order;

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

/// What is known of a model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A Hugging Face model folder with `tokenizer.json` and `tokenizer_config.json`.
    pub tokenizer: PathBuf,
    /// Bytes that remembered pieces of prompts may take; 0: none are remembered.
    #[serde(default = "tokenizer_cache_bytes")]
    pub tokenizer_cache_bytes: usize,
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
    /// Threads that serve clients; 0: one for each core.
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

/// Where policies come from and what they may use.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policies {
    /// The folder that is watched.
    pub dir: Option<PathBuf>,
    /// CPU time of a call.
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
    /// Memory of an instance, bytes.
    pub memory_bytes: usize,
    /// What a failing policy leads to.
    pub on_failure: OnFailure,
    /// Calls in which a fresh generation is on probation.
    pub probation_calls: u64,
    /// Share of failed calls above which it is rolled back.
    pub probation_failure_share: f64,
    /// Quiet time after a change of the folder before it is read.
    #[serde(with = "humantime_serde")]
    pub debounce: Duration,
    /// How often the folder is read whatever the watch says.
    #[serde(with = "humantime_serde")]
    pub rescan: Duration,
    /// Entries of slots.
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

/// What a slot runs while its file is not there, and what its policy is told.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlotEntry {
    /// A native selector.
    pub native: Option<NativeMode>,
    /// A policy that is built in: `kv-aware`, `least-loaded` or `conditional-disagg`.
    pub builtin: Option<String>,
    /// Handed to the policy's `configure`.
    pub settings: toml::Table,
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

impl Server {
    /// Threads that serve clients.
    #[must_use]
    pub fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
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

impl Default for Policies {
    fn default() -> Self {
        Self {
            dir: None,
            deadline: Duration::from_millis(2),
            memory_bytes: 16 * 1024 * 1024,
            on_failure: OnFailure::Fallback,
            probation_calls: 1_000,
            probation_failure_share: 0.05,
            debounce: Duration::from_millis(20),
            rescan: Duration::from_secs(5),
            slots: BTreeMap::new(),
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
        let share = policies.probation_failure_share;
        say(
            !(0.0..=1.0).contains(&share),
            format!("policies.probation_failure_share: `{share}` is not within 0 to 1"),
        );
        let busy = routing.busy_status;
        say(!(400..600).contains(&busy), format!("routing.busy_status: `{busy}` is not an error status"));
        self.decisions.problems().into_iter().for_each(|problem| say(true, problem));
        let limits = [
            ("timeouts.booking", self.timeouts.booking),
            ("policies.deadline", policies.deadline),
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
        for (kind, entry) in &policies.slots {
            let path = format!("policies.slots.{kind}");
            say(
                entry.native.is_some() && entry.builtin.is_some(),
                format!("{path}: both `native` and `builtin` are given"),
            );
            let unknown =
                entry.builtin.as_deref().filter(|name| pointsman_embedded_policies::by_name(name).is_none());
            say(
                unknown.is_some(),
                format!("{path}.builtin: `{}` is not built in", unknown.unwrap_or_default()),
            );
            let native = entry.native.is_some() && *kind == SlotKind::DecodeOverride;
            say(
                native,
                format!("{path}.native: this slot takes no selector; leave it out for the native override"),
            );
        }
        if let Some(dir) = &policies.dir {
            say(!dir.is_dir(), format!("policies.dir: `{}` is no folder", dir.display()));
        }
        for (place, worker) in self.workers.iter().enumerate() {
            let twin = self.workers.iter().take(place).position(|other| other.id == worker.id);
            say(
                twin.is_some(),
                format!("workers[{place}].id: `{}` is that of workers[{}] too", worker.id, twin.unwrap_or(0)),
            );
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
                "policies.slots.prefill: both `native` and `builtin` are given",
                "policies.slots.prefill.builtin: `kv-awar` is not built in",
                "policies.dir: `/no/such` is no folder",
                &format!(
                    "workers[1].id: `{}` is that of workers[0] too",
                    pointsman_workers::WorkerId::of_url("http://a:1")
                ),
            ],
        );
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
