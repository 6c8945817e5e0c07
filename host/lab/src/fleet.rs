//! The engines and links of a simulation.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use pointsman_config_file::{ConfigErrors, Lines, Problem, parse};
use pointsman_sim::core::{BatchLimits, StepTime};
use pointsman_workers::Role;
use serde::{Deserialize, Serialize};

mod routing;
mod step_time;

pub use routing::{GatewayGroup, Outage, Probe, Queue, Routing};
pub use step_time::StepTimeSpec;

/// Longest transfer, seconds.
const MAX_TRANSFER_S: f64 = 86_400.0;
/// Longest overhead of a request, milliseconds.
const MAX_OVERHEAD_MS: f64 = 60_000.0;
/// KV tokens of an engine of a fleet file that does not give its blocks: those of Dynamo's replay example.
const ASSUMED_TOKENS: u32 = 1_048_576;
/// Maximum number of engines.
const MAX_ENGINES: u32 = 65_536;

/// Engines, links and delays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fleet {
    /// Tokens in a KV block, for the engines and for routing.
    pub block_tokens: u32,
    /// Groups of equal engines.
    pub engines: Vec<EngineGroup>,
    /// Links between prefill and decode engines.
    pub links: Links,
    /// Delay from an engine's KV event to its arrival at routing, milliseconds.
    pub kv_event_delay_ms: f64,
    /// Interval between two readings of load figures, milliseconds. Between readings, routing uses the last
    /// figures.
    pub scrape_interval_ms: f64,
    /// Whether engines send KV events. Otherwise routing assumes that each engine caches the prompts sent to
    /// it.
    pub kv_events: bool,
    /// How requests are routed, as in the daemon's configuration.
    pub routing: Routing,
    /// The queue for requests that find every eligible worker busy, as in the daemon's configuration.
    pub queue: Queue,
    /// How workers are probed, as in the daemon's configuration.
    pub probe: Probe,
    /// The gateways.
    pub gateways: GatewayGroup,
    /// Times during which an engine is away.
    pub outages: Vec<Outage>,
}

/// A group of equal engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineGroup {
    /// Legs that the engines run.
    #[serde(default = "aggregated")]
    pub role: Role,
    /// Number of engines.
    pub count: u32,
    /// Maximum number of sequences that run at once (vLLM's `--max-num-seqs`).
    #[serde(default = "max_num_seqs")]
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step (vLLM's `--max-num-batched-tokens`).
    #[serde(default = "max_batched_tokens")]
    pub max_batched_tokens: u32,
    /// Number of KV blocks. If not given, it is as many as hold 1,048,576 tokens.
    #[serde(default)]
    pub blocks: Option<u32>,
    /// Duration of a step.
    #[serde(default)]
    pub step_time: StepTimeSpec,
    /// Time that a request takes outside of the engine's steps, for HTTP and the tokenizer, milliseconds. It
    /// delays the first token and does not lengthen a step.
    #[serde(default)]
    pub request_overhead_ms: f64,
    /// Maximum number of requests that routing books on an engine.
    #[serde(default)]
    pub max_concurrency: Option<u32>,
    /// Labels, as of a worker in the daemon's configuration.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Taints, as of a worker in the daemon's configuration.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub taints: BTreeSet<String>,
}

/// Links from prefill to decode engines. A prefill engine makes one transfer at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Links {
    /// KV bytes of a token.
    pub bytes_per_token: u64,
    /// Bandwidth of a prefill engine's link, 10^9 bytes a second.
    pub gigabytes_per_second: f64,
    /// Time that a transfer takes in addition to the time for its bytes, milliseconds.
    pub latency_ms: f64,
    /// How long a prefill engine keeps blocks that no decode engine reads, seconds.
    pub lease_s: f64,
}

/// Every problem for which a fleet cannot be simulated, with the file and line of its key if the fleet
/// came from a file.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FleetError(ConfigErrors);

fn aggregated() -> Role {
    Role::Aggregated
}

fn max_num_seqs() -> u32 {
    256
}

fn max_batched_tokens() -> u32 {
    8_192
}

/// Returns the number of KV blocks of an engine for which a fleet file gives none.
pub(crate) fn assumed_blocks(block_tokens: u32) -> u32 {
    ASSUMED_TOKENS / block_tokens.max(1)
}

impl Default for Links {
    /// A model with 128 KiB of KV a token and a link of 400 gigabits a second.
    fn default() -> Self {
        Self { bytes_per_token: 131_072, gigabytes_per_second: 50.0, latency_ms: 1.0, lease_s: 480.0 }
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            block_tokens: 512,
            engines: Vec::new(),
            links: Links::default(),
            kv_event_delay_ms: 0.0,
            scrape_interval_ms: 1_000.0,
            kv_events: true,
            routing: Routing::default(),
            queue: Queue::default(),
            probe: Probe::default(),
            gateways: GatewayGroup::default(),
            outages: Vec::new(),
        }
    }
}

impl EngineGroup {
    /// `count` engines of a role with vLLM's defaults and the 2,048 blocks of Dynamo's replay example.
    #[must_use]
    pub fn new(role: Role, count: u32) -> Self {
        Self {
            role,
            count,
            max_num_seqs: max_num_seqs(),
            max_batched_tokens: max_batched_tokens(),
            blocks: Some(2_048),
            step_time: StepTimeSpec::Dynamo,
            request_overhead_ms: 0.0,
            max_concurrency: None,
            labels: BTreeMap::new(),
            taints: BTreeSet::new(),
        }
    }

    /// Returns the number of KV blocks, in a fleet with blocks of this size.
    pub(crate) fn kv_blocks(&self, block_tokens: u32) -> u32 {
        self.blocks.unwrap_or_else(|| assumed_blocks(block_tokens))
    }

    pub(crate) fn limits(&self, block_tokens: u32) -> BatchLimits {
        BatchLimits {
            max_num_seqs: self.max_num_seqs,
            max_batched_tokens: self.max_batched_tokens,
            blocks: self.kv_blocks(block_tokens),
            block_size: block_tokens,
            prefill_only: self.role == Role::Prefill,
        }
    }

    pub(crate) fn request_overhead(&self) -> Duration {
        Duration::from_secs_f64(self.request_overhead_ms / 1e3)
    }

    pub(crate) fn step_time(&self) -> StepTime {
        self.step_time.formula()
    }

    /// Appends the problems of the group at position `place`.
    fn check(&self, place: usize, problems: &mut Vec<Problem>) {
        for (key, value) in [
            ("count", self.count),
            ("max_num_seqs", self.max_num_seqs),
            ("max_batched_tokens", self.max_batched_tokens),
            ("blocks", self.blocks.unwrap_or(1)),
        ] {
            if !(1..=16_777_216).contains(&value) {
                let message = format!("{value} is not within 1 to 16777216");
                problems.push(Problem::new(format!("engines[{place}].{key}"), message));
            }
        }
        let overhead = self.request_overhead_ms;
        if !(0.0..=MAX_OVERHEAD_MS).contains(&overhead) {
            let message = format!("{overhead} is not within 0 to {MAX_OVERHEAD_MS}");
            problems.push(Problem::new(format!("engines[{place}].request_overhead_ms"), message));
        }
        if let StepTimeSpec::Linear { c0, c1, c2, c3, c4 } = self.step_time {
            let all = [c0, c1, c2, c3, c4];
            let valid = all.iter().all(|value| value.is_finite() && *value >= 0.0);
            if !valid || all.iter().sum::<f64>() <= 0.0 {
                let message = format!("{all:?} are not five numbers of 0 or more of which one is above 0");
                problems.push(Problem::new(format!("engines[{place}].step_time"), message));
            }
        }
    }
}

impl Links {
    /// Returns the duration of the transfer of so many tokens on an idle link.
    #[expect(clippy::cast_precision_loss, reason = "bytes of one prompt stay below 2^53")]
    pub(crate) fn transfer(&self, tokens: u32) -> Duration {
        let bytes = u64::from(tokens).saturating_mul(self.bytes_per_token) as f64;
        let seconds = bytes / (self.gigabytes_per_second * 1e9) + self.latency_ms / 1e3;
        Duration::from_secs_f64(seconds.min(MAX_TRANSFER_S))
    }
}

impl Fleet {
    /// Reads a fleet from a TOML file.
    ///
    /// # Errors
    /// [`FleetError`] names the file and every problem with the line and the dotted path of its key.
    pub fn read(path: &Path) -> Result<Self, FleetError> {
        let file = || Some(path.to_owned());
        let text = pointsman_config_file::read(path).map_err(FleetError)?;
        let parsed = parse::<Self>(&text, &[])
            .map_err(|problems| FleetError(ConfigErrors::new(file(), problems, &Lines::default())))?;
        let mut problems = parsed.problems;
        let values = parsed.value.problems().into_iter();
        // If a group could not be read, the checks over all groups are skipped.
        let unread = problems.iter().any(|problem| problem.path.starts_with("engines"));
        problems.extend(values.filter(|problem| !unread || problem.path != "engines").map(|mut problem| {
            problem.path = parsed.unread.path_in_file(&problem.path);
            problem
        }));
        if problems.is_empty() {
            return Ok(parsed.value);
        }
        Err(FleetError(ConfigErrors::new(file(), problems, &parsed.lines)))
    }

    /// Checks that every value is in its range and that some engine can serve.
    ///
    /// # Errors
    /// [`FleetError`] names every value out of its range.
    pub fn check(&self) -> Result<(), FleetError> {
        let problems = self.problems();
        let errors = |problems| FleetError(ConfigErrors { file: None, problems });
        if problems.is_empty() { Ok(()) } else { Err(errors(problems)) }
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !(1..=65_536).contains(&self.block_tokens) {
            let message = format!("{} is not within 1 to 65536", self.block_tokens);
            problems.push(Problem::new("block_tokens", message));
        }
        for (key, value, least) in [
            ("kv_event_delay_ms", self.kv_event_delay_ms, 0.0),
            ("scrape_interval_ms", self.scrape_interval_ms, 1.0),
            ("links.gigabytes_per_second", self.links.gigabytes_per_second, 1e-6),
            ("links.latency_ms", self.links.latency_ms, 0.0),
            ("links.lease_s", self.links.lease_s, 0.0),
        ] {
            if !(value.is_finite() && (least..=1e9).contains(&value)) {
                problems.push(Problem::new(key, format!("{value} is not within {least} to 1e9")));
            }
        }
        for (place, group) in self.engines.iter().enumerate() {
            group.check(place, &mut problems);
        }
        let routing = [
            self.routing.problems(),
            self.queue.problems(),
            self.probe.problems(),
            self.gateways.problems(),
            routing::problems_of_outages(&self.outages, u64::from(self.count())),
        ];
        problems.extend(routing.into_iter().flatten());
        problems.extend(self.problem_of_roles());
        problems
    }

    /// Replaces the step time of every engine.
    #[must_use]
    pub(crate) fn with_step_time(mut self, step_time: StepTimeSpec) -> Self {
        self.engines.iter_mut().for_each(|group| group.step_time = step_time);
        self
    }

    /// Returns the names of the engines' step times.
    pub(crate) fn step_times(&self) -> String {
        let mut names: Vec<&str> = self.engines.iter().map(|group| group.step_time.name()).collect();
        names.dedup();
        names.join(", ")
    }

    /// Returns the duration of the transfer of a prompt on an idle link, to a decode engine that has `cached`
    /// of its tokens in its prefix cache.
    pub(crate) fn transfer(&self, isl: u32, cached: u32) -> Duration {
        self.links.transfer(if self.routing.pulls() { isl.saturating_sub(cached) } else { isl })
    }

    /// Returns the number of engines.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.engines.iter().fold(0, |sum, group| sum.saturating_add(group.count))
    }

    /// Says what is assumed for engines for which the file does not give the number of blocks.
    pub(crate) fn assumption(&self) -> Option<String> {
        let without = self.engines.iter().filter(|group| group.blocks.is_none());
        let (count, blocks) = (without.map(|group| group.count).sum::<u32>(), self.block_tokens);
        (count > 0).then(|| {
            format!(
                "`blocks` is not given for {count} engines of the fleet: {} blocks of {blocks} tokens, which hold \
                 {ASSUMED_TOKENS} tokens of KV, are assumed for each",
                assumed_blocks(blocks)
            )
        })
    }

    fn problem_of_roles(&self) -> Option<Problem> {
        let count = |role: Role| -> u64 {
            self.engines.iter().filter(|group| group.role == role).map(|group| u64::from(group.count)).sum()
        };
        let (prefill, decode, aggregated) =
            (count(Role::Prefill), count(Role::Decode), count(Role::Aggregated));
        if prefill + decode + aggregated > u64::from(MAX_ENGINES) {
            return Some(Problem::new("engines", format!("more than {MAX_ENGINES} engines")));
        }
        let found = || format!("{prefill} prefill, {decode} decode and {aggregated} aggregated engines");
        let incomplete = aggregated == 0 && (prefill == 0 || decode == 0);
        incomplete.then(|| {
            let message = format!("{}: add aggregated engines, or both prefill and decode", found());
            Problem::new("engines", message)
        })
    }
}

#[cfg(test)]
mod tests;
