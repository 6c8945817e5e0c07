//! Configuration of a simulation's gateways: the daemon's keys that change how requests run, and the outages
//! of engines.

use std::time::Duration;

use pointsman_config_file::Problem;
use pointsman_orchestration::{HandoffKind, LegOrder, RetryPolicy, SplitRules};
use pointsman_routing::BusyByLeg;
use pointsman_sim::core::PromptKv;
use serde::{Deserialize, Serialize};

/// Largest value of a time, seconds.
const MAX_S: f64 = 31_622_400.0;
/// Maximum number of outages.
const MAX_OUTAGES: usize = 10_000;
/// Maximum number of gateways. Each has a prefix index of its own.
const MAX_GATEWAYS: u32 = 64;
/// Longest delay of a message between gateways.
const MAX_DELAY: Duration = Duration::from_secs(3_600);

/// `[routing]`: as in the daemon's configuration, with the kind of handoff, which real engines would
/// determine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Routing {
    /// How the decode leg of a request finds the KV of its prefill leg: `completed` (vLLM with NIXL),
    /// `bootstrap` (SGLang) or `addressed` (vLLM with P2P NCCL).
    pub handoff: HandoffKind,
    /// Which leg is routed first.
    pub order: LegOrder,
    /// Refuse a request without a prefill worker instead of prefilling locally.
    pub enforce_disagg: bool,
    /// Number of further attempts of a request, over all of its legs.
    pub retries: u32,
    /// Prefill locally when all attempts of remote prefill have failed; ignored with `enforce_disagg`.
    pub local_fallback: bool,
    /// How long each session stays bound to its workers; 0 means that sessions are not bound.
    #[serde(with = "humantime_serde")]
    pub session_affinity: Duration,
    /// Thresholds beyond which a worker is busy, by leg.
    pub busy: BusyByLeg,
}

/// `[queue]`: requests that wait while every eligible worker is busy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Queue {
    /// Maximum number of requests that wait; 0 means that no request waits.
    pub limit: usize,
    /// Maximum time that a request waits.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

/// `[gateways]`: the gateways between clients and engines. A load balancer spreads the requests at random.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayGroup {
    /// Number of gateways.
    pub count: u32,
    /// Whether gateways send each other their bookings, as with `[replicas]` of the daemon.
    pub exchange: bool,
    /// Time between two batches of bookings; 0 means that each change is sent at once.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Time from sending a message to its arrival at the other gateways.
    #[serde(with = "humantime_serde")]
    pub delay: Duration,
}

/// `[probe]`: how workers are probed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    /// Time between health checks.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
}

/// `[[outages]]`: an engine is away for a time. It loses its requests and its cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outage {
    /// Position of the engine in the fleet, from 0.
    pub engine: u32,
    /// Start of the outage, seconds from the start of the run.
    pub from_s: f64,
    /// Duration of the outage, seconds.
    pub for_s: f64,
}

impl Routing {
    /// Returns how a decode engine gets the KV of a prompt. An engine that pulls (vLLM with NIXL) first
    /// allocates the blocks, of which its prefix cache may have some, and then reads the others.
    pub(crate) fn decode_kv(&self) -> PromptKv {
        match self.handoff {
            HandoffKind::Completed => PromptKv::Awaited,
            HandoffKind::Bootstrap | HandoffKind::Addressed => PromptKv::Received,
        }
    }

    /// Whether a decode engine pulls the blocks that it lacks.
    pub(crate) fn pulls(&self) -> bool {
        self.decode_kv() == PromptKv::Awaited
    }
}

impl Default for Routing {
    /// Returns the daemon's defaults.
    fn default() -> Self {
        Self {
            handoff: HandoffKind::Completed,
            order: LegOrder::PrefillFirst,
            enforce_disagg: false,
            retries: 2,
            local_fallback: false,
            session_affinity: Duration::ZERO,
            busy: BusyByLeg::new(),
        }
    }
}

impl Default for Queue {
    /// Returns the daemon's defaults.
    fn default() -> Self {
        Self { limit: 0, timeout: Duration::from_secs(30) }
    }
}

impl Default for GatewayGroup {
    /// Returns one gateway. If a file sets several, they send each other their bookings at the daemon's
    /// interval.
    fn default() -> Self {
        Self { count: 1, exchange: true, interval: Duration::from_millis(5), delay: Duration::ZERO }
    }
}

impl Default for Probe {
    /// Returns the daemon's default.
    fn default() -> Self {
        Self { interval: Duration::from_secs(2) }
    }
}

impl Routing {
    pub(crate) fn split_rules(&self) -> SplitRules {
        let Self { order, retries, local_fallback, .. } = *self;
        SplitRules::new(self.enforce_disagg, RetryPolicy { order, retries, local_fallback, continuations: 0 })
    }

    /// Returns the problems of the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let wrong = |(leg, thresholds): (&pointsman_workers::Leg, &pointsman_routing::BusyThresholds)| {
            let (key, problem) = thresholds.check().err()?;
            Some(Problem::new(format!("routing.busy.{}.{key}", leg.as_str()), problem))
        };
        let mut problems: Vec<_> = self.busy.iter().filter_map(wrong).collect();
        if self.session_affinity.as_secs_f64() > MAX_S {
            problems.push(too_long("routing.session_affinity", self.session_affinity));
        }
        problems
    }
}

impl Queue {
    /// Returns the problems of the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let long = self.timeout.as_secs_f64() > MAX_S;
        long.then(|| too_long("queue.timeout", self.timeout)).into_iter().collect()
    }
}

impl GatewayGroup {
    /// Returns the problems of the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let within = (1..=MAX_GATEWAYS).contains(&self.count);
        let problem =
            || Problem::new("gateways.count", format!("{} is not within 1 to {MAX_GATEWAYS}", self.count));
        let mut problems: Vec<Problem> = (!within).then(problem).into_iter().collect();
        for (key, value) in [("gateways.interval", self.interval), ("gateways.delay", self.delay)] {
            if value > MAX_DELAY {
                let value = humantime_serde::re::humantime::format_duration(value);
                problems.push(Problem::new(key, format!("{value} is longer than an hour")));
            }
        }
        problems
    }

    /// Whether there are several gateways and they exchange bookings.
    pub(crate) fn exchange_bookings(&self) -> bool {
        self.exchange && self.count > 1
    }
}

impl Probe {
    /// Returns the problems of the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let within = (Duration::from_millis(10)..=Duration::from_secs(3_600)).contains(&self.interval);
        let problem = || {
            let interval = humantime_serde::re::humantime::format_duration(self.interval);
            Problem::new("probe.interval", format!("{interval} is not within 10ms to 1h"))
        };
        (!within).then(problem).into_iter().collect()
    }
}

/// Returns the problems of the outages of a fleet with `engines` engines.
pub(super) fn problems_of_outages(outages: &[Outage], engines: u64) -> Vec<Problem> {
    if outages.len() > MAX_OUTAGES {
        return vec![Problem::new(
            "outages",
            format!("{} outages; expected at most {MAX_OUTAGES}", outages.len()),
        )];
    }
    let mut problems = Vec::new();
    for (place, outage) in outages.iter().enumerate() {
        if u64::from(outage.engine) >= engines {
            let problem = format!("{} is not within 0 to {}", outage.engine, engines.saturating_sub(1));
            problems.push(Problem::new(format!("outages[{place}].engine"), problem));
        }
        for (key, value) in [("from_s", outage.from_s), ("for_s", outage.for_s)] {
            if !(0.0..=MAX_S).contains(&value) {
                let message = format!("{value} is not within 0 to {MAX_S}");
                problems.push(Problem::new(format!("outages[{place}].{key}"), message));
            }
        }
    }
    problems
}

fn too_long(key: &str, value: Duration) -> Problem {
    let value = humantime_serde::re::humantime::format_duration(value);
    Problem::new(key, format!("{value} is longer than 366 days"))
}
