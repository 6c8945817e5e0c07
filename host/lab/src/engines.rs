//! The modelled engines of a run, and the ids of their workers in routing.

use std::sync::Arc;

use pointsman_sim::core::{BatchEngine, BatchLimits, CacheChange, StepTime};
use pointsman_workers::{DpRank, Health, Registry, Role, SpecError, Worker, WorkerId, WorkerSpec};
use prefix_index::events::{Batch, KvEvent, Stored, Tier};
use tokio::time::Duration;

use crate::{
    fleet::{EngineGroup, Fleet},
    prepared::block_token_ids,
    trace::{Trace, TraceRequest},
};

/// The only model of a simulation.
pub(crate) const MODEL: &str = "model";

/// One engine.
pub(crate) struct Engine {
    role: Role,
    pub(crate) core: BatchEngine,
    /// Time from a request's arrival to its entry into the scheduler's queue.
    pub(crate) request_overhead: Duration,
    /// Time at which the link to other engines becomes free, from the start of the run.
    pub(crate) link_free: Duration,
    pub(crate) limits: BatchLimits,
    pub(crate) step_time: StepTime,
    /// Time at which the current step ends.
    pub(crate) step_ends: Option<Duration>,
    /// Number of outages of the engine so far. Events of an earlier incarnation are ignored.
    pub(crate) incarnation: u32,
    /// Number of current outages; outages may overlap.
    pub(crate) outages: u32,
    pub(crate) last_check: Option<Duration>,
    pub(crate) next_check: Option<Duration>,
    /// Number of consecutive load figures that could not be read.
    pub(crate) load_failures: u32,
}

/// Builds the engines of a fleet.
pub(crate) fn build(fleet: &Fleet) -> Vec<Engine> {
    let engine = |group: &EngineGroup| {
        let (limits, step_time) = (group.limits(fleet.block_tokens), group.step_time());
        Engine {
            role: group.role,
            core: BatchEngine::new(limits, step_time),
            request_overhead: group.request_overhead(),
            link_free: Duration::ZERO,
            limits,
            step_time,
            step_ends: None,
            incarnation: 0,
            outages: 0,
            last_check: None,
            next_check: None,
            load_failures: 0,
        }
    };
    let groups = fleet.engines.iter();
    groups.flat_map(|group| (0..group.count).map(move |_| engine(group))).collect()
}

/// Returns whether the KV blocks of an engine can hold its part of a request. A prefill engine holds the
/// prompt and one token.
pub(crate) fn holds(role: Role, core: &BatchEngine, request: &TraceRequest) -> bool {
    let output = if role == Role::Prefill { 1 } else { request.output_tokens };
    core.fits(request.input_tokens, output)
}

/// Returns the aggregated workers that can hold a request, and the workers of pairs if a whole pair can.
/// `None` if no worker is left.
pub(crate) fn that_hold(engines: &[Engine], request: &TraceRequest) -> Option<Vec<WorkerId>> {
    let holds = |engine: &Engine| holds(engine.role, &engine.core, request);
    let has = |role: Role| engines.iter().any(|engine| engine.role == role && holds(engine));
    let has_pair = has(Role::Prefill) && has(Role::Decode);
    let is_allowed = |engine: &Engine| holds(engine) && (has_pair || engine.role == Role::Aggregated);
    let allowed = (0..).zip(engines).filter(|(_, engine)| is_allowed(engine)).map(|(place, _)| id(place));
    Some(allowed.collect::<Vec<_>>()).filter(|allowed| !allowed.is_empty())
}

/// Registers the engines of a fleet with a gateway, healthy and with their capacity.
pub(crate) fn register(fleet: &Fleet, registry: &Registry) -> Result<Vec<Arc<Worker>>, SpecError> {
    let mut workers = Vec::new();
    for group in &fleet.engines {
        for _ in 0..group.count {
            let id = workers.len() + 1;
            let role = match group.role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Aggregated => "aggregated",
            };
            let limit =
                group.max_concurrency.map_or_else(String::new, |limit| format!(",max_concurrency={limit}"));
            let (blocks, port) = (group.kv_blocks(fleet.block_tokens), 1 + id % 65_535);
            let mut spec = WorkerSpec::parse_flag(&format!(
                "id={id},role={role},engine=vllm,url=http://engine-{id}:{port},model={MODEL},total_blocks={blocks}{limit}"
            ))?;
            spec.labels.clone_from(&group.labels);
            spec.taints.extend(group.taints.iter().cloned());
            let worker = registry.upsert(spec);
            worker.set_health(Health::Healthy);
            workers.push(worker);
        }
    }
    Ok(workers)
}

/// Returns the position of the engine that a worker id names.
pub(crate) fn position(worker: WorkerId) -> usize {
    usize::try_from(worker.0).unwrap_or(usize::MAX).wrapping_sub(1)
}

/// Returns the worker id of the engine at a position.
pub(crate) fn id(place: usize) -> WorkerId {
    WorkerId(place as u64 + 1)
}

/// Rank of every engine: an engine has only one.
pub(crate) const RANK: DpRank = DpRank(0);

/// Turns the changes of an engine's cache into the events that a vLLM engine would send.
pub(crate) fn events(
    changes: impl IntoIterator<Item = CacheChange>,
    trace: &Trace,
    block_tokens: u32,
    request_of: impl Fn(u64) -> usize,
) -> Batch {
    let mut events: Vec<KvEvent> = Vec::new();
    for change in changes {
        match change {
            CacheChange::Removed { hash } => match events.last_mut() {
                Some(KvEvent::Removed { hashes, .. }) => hashes.push(hash),
                _ => events.push(KvEvent::Removed { hashes: vec![hash], tier: Tier::Device, group: None }),
            },
            CacheChange::Stored { hash, parent, tag, position } => {
                let follows = |stored: &Stored| parent.is_some() && stored.hashes.last().copied() == parent;
                if !matches!(events.last(), Some(KvEvent::Stored(stored)) if follows(stored)) {
                    let stored = Stored { parent, block_size: block_tokens, ..Stored::default() };
                    events.push(KvEvent::Stored(stored));
                }
                let Some(KvEvent::Stored(stored)) = events.last_mut() else { continue };
                stored.hashes.push(hash);
                let number = request_of(tag);
                let request = trace.requests.get(number);
                add_tokens(
                    request,
                    number,
                    tag,
                    trace.block_tokens,
                    block_tokens,
                    position,
                    &mut stored.token_ids,
                );
            }
        }
    }
    Batch { ts: 0.0, dp_rank: None, events }
}

fn add_tokens(
    request: Option<&TraceRequest>,
    number: usize,
    tag: u64,
    trace_block: u32,
    block_tokens: u32,
    position: u32,
    out: &mut Vec<u32>,
) {
    let in_prompt =
        |request: &&TraceRequest| (position + 1).saturating_mul(block_tokens) <= request.input_tokens;
    match request.filter(in_prompt) {
        Some(request) => block_token_ids(request, number as u64, trace_block, block_tokens, position, out),
        None => {
            // Output tokens, which no prompt contains.
            let unique = (tag as u32).wrapping_mul(0x9e37_79b9) | 0x8000_0000;
            out.resize(out.len() + block_tokens as usize, unique);
        }
    }
}
