//! Input of a routing decision: one leg of one request, over one pinned snapshot of the workers.

use std::sync::Arc;

use pointsman_workers::{DpRank, Engine, Leg, ModelName, Snapshot, WorkerId, WorkerSpec};
use prefix_index::Prefix;

use crate::{config::RouterConfigOverride, policy::Call};

/// Routing facts of a request, the same for all its legs. Holds no prompt text.
#[derive(Clone, Debug, Default)]
pub struct RoutingRequest {
    /// Input sequence length, tokens.
    pub prompt_tokens: u32,
    /// Whether `prompt_tokens` was estimated from bytes.
    pub prompt_tokens_estimated: bool,
    /// Tokens in a block.
    pub block_size: u32,
    /// Hashes of the prompt's prefix.
    pub prefix: Prefix,
    /// Whether the engine computes the whole prompt, whatever it has cached.
    pub skips_cache: bool,
    /// Choices asked for.
    pub n: u32,
    /// The client's cap on output tokens.
    pub max_tokens: Option<u32>,
    /// Tokens that a worker's context has to hold, if they are known.
    pub context_tokens: Option<u32>,
    /// Expected output tokens.
    pub expected_output_tokens: Option<u32>,
    /// Target time to first token, microseconds.
    pub ttft_target_us: Option<u32>,
    /// Target inter-token latency, microseconds.
    pub itl_target_us: Option<u32>,
    /// Strict priority, higher first.
    pub priority: f32,
    /// Seconds by which it jumps the queue.
    pub priority_jump_s: f32,
    /// Random number of the request. Without a session it decides between the active generation and a canary.
    pub draw: u64,
    /// Salted hash of the session id.
    pub session_hash: Option<u64>,
    /// The agent program that the request belongs to.
    pub program: Option<Box<AgentProgram>>,
    /// The LoRA adapter asked for.
    pub lora: Option<Arc<str>>,
    /// Salted hash of the LoRA name.
    pub lora_hash: Option<u64>,
    /// Salted hash of the tenant.
    pub tenant_hash: Option<u64>,
    /// Requests of the tenant now in the gateway.
    pub tenant_active_requests: u32,
    /// Taints a worker must have.
    pub required_taints: Vec<String>,
    /// Taints that raise (negative weight) or lower (positive weight) a worker's cost.
    pub preferred_taints: Vec<(String, f32)>,
    /// Workers that may serve it; `None`: any.
    pub allowed_workers: Option<Vec<WorkerId>>,
    /// The only engine that has the request's endpoint; `None`: any.
    pub engine: Option<Engine>,
    /// The client's own override of the router config.
    pub config: RouterConfigOverride,
}

/// The agent program of a request: a root session with the sessions of all sub-agents that descend from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentProgram {
    /// Salted hash of the request's session.
    pub session: u64,
    /// Salted hash of the session that started it.
    pub parent: Option<u64>,
    /// Salted hash of the root session.
    pub hash: u64,
    /// Number of requests of the program that were routed before this one.
    pub turn: u32,
    /// Time since a request of the program was routed or answered, milliseconds.
    pub idle_ms: Option<u32>,
    /// Tokens of the program that candidates are expected to hold.
    pub held: Vec<(CandidateId, u32)>,
    /// Whether this request was counted as a turn.
    pub counted: bool,
    /// Whether a worker answered this request.
    pub answered: bool,
}

/// Identifies a candidate: a worker and one of its data-parallel ranks.
pub type CandidateId = (WorkerId, DpRank);

/// Facts about the other leg of a pair, besides its candidate, and about the handoff.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairing {
    /// Whether this decode leg is routed before its prefill leg, which then has to fit it.
    pub is_first: bool,
    /// The worker (and rank) a hint pins the other leg to.
    pub other_pin: Option<(WorkerId, Option<DpRank>)>,
    /// The worker on which a place is reserved for this leg.
    pub reserved: Option<WorkerId>,
    /// The handoff that this decode leg has to consume.
    pub committed: Option<Committed>,
}

/// A handoff that exists: its prefill worker holds blocks until a decode worker has pulled them. Policies
/// advise where it goes, and refuse it no longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Whether load limits, failures of other requests and draining no longer count: any live worker takes
    /// it.
    pub beyond_limits: bool,
    /// Whether no client waits: one token is generated so that the blocks are pulled, on any worker that can.
    pub only_consumes: bool,
}

/// One leg to route.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The workers, pinned for the whole leg.
    pub snapshot: &'a Snapshot,
    /// The requested model.
    pub model: &'a ModelName,
    /// The leg to route.
    pub leg: Leg,
    /// 0, then one more for each retry of the leg.
    pub attempt: u32,
    /// Facts of the request.
    pub request: &'a RoutingRequest,
    /// The worker (and rank) a hint pins this leg to.
    pub pin: Option<(WorkerId, Option<DpRank>)>,
    /// The candidate this leg's session is bound to (F8); chosen when it is eligible and no hint pins
    /// another.
    pub session: Option<CandidateId>,
    /// The decode candidate for which the decode override decided on local prefill: no other one may serve
    /// this leg, unless a hint pins one.
    pub planned: Option<CandidateId>,
    /// Candidates that this request already tried; they are skipped.
    pub tried: &'a [CandidateId],
    /// The worker that is chosen only if no other is eligible: it may not have read this request.
    pub spared: Option<WorkerId>,
    /// Workers that are chosen only if no other is eligible: their engines lack the request's endpoint, as
    /// far as is known.
    pub lacking: &'a [WorkerId],
    /// The other leg's candidate when it is already chosen.
    pub other_leg: Option<CandidateId>,
    /// Further facts about the other leg and the handoff.
    pub pairing: Pairing,
    /// Time for which the request has waited in the gateway's queue, microseconds.
    pub queue_us: u32,
    /// Whether the client asked for an explanation.
    pub explain: bool,
    /// Whether this is a probe of one worker, which runs on that worker alone (A1).
    pub probe: bool,
    /// Whether the request continues a response that the pinned worker stored: a draining worker serves it,
    /// too.
    pub continues: bool,
    /// The only randomness of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// The request's id; `None`: the decision is not recorded.
    pub request_id: Option<&'a str>,
}

impl<'a> Query<'a> {
    /// Returns a query for the first attempt of a leg: no hints, seed 0 at time 0, and not recorded.
    #[must_use]
    pub fn new(snapshot: &'a Snapshot, model: &'a ModelName, leg: Leg, request: &'a RoutingRequest) -> Self {
        Self {
            snapshot,
            model,
            leg,
            attempt: 0,
            request,
            pin: None,
            session: None,
            planned: None,
            tried: &[],
            spared: None,
            lacking: &[],
            other_leg: None,
            pairing: Pairing::default(),
            queue_us: 0,
            explain: false,
            probe: false,
            continues: false,
            seed: 0,
            now_us: 0,
            request_id: None,
        }
    }

    /// The arguments of a policy call over `rows` candidates.
    pub(crate) fn call(&self, rows: usize) -> Call {
        Call {
            leg: self.leg,
            attempt: self.attempt,
            rows: u32::try_from(rows).unwrap_or(u32::MAX),
            seed: self.seed,
            now_us: self.now_us,
        }
    }

    /// Returns whether a handoff exists that this leg has to consume.
    pub(crate) fn is_committed(&self) -> bool {
        self.pairing.committed.is_some()
    }

    /// Returns whether the leg only frees the blocks of a handoff: terms of the client no longer count.
    pub(crate) fn only_consumes(&self) -> bool {
        self.pairing.committed.is_some_and(|committed| committed.only_consumes)
    }

    /// Returns the other leg's worker, when it is chosen and still in the snapshot.
    #[must_use]
    pub fn peer(&self) -> Option<&WorkerSpec> {
        let (worker, _) = self.other_leg?;
        self.snapshot.get(worker).map(|worker| worker.spec())
    }
}

impl RoutingRequest {
    /// The same request with only the facts that decide which workers may serve it (F6).
    #[must_use]
    pub fn conditions(&self) -> Self {
        Self {
            context_tokens: self.context_tokens,
            lora: self.lora.clone(),
            required_taints: self.required_taints.clone(),
            allowed_workers: self.allowed_workers.clone(),
            engine: self.engine,
            ..Self::default()
        }
    }

    /// Number of blocks of the prompt, a partial last block included.
    #[must_use]
    pub fn request_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.block_size.max(1))
    }

    /// Tokens of the request's agent program that candidates are expected to hold.
    pub(crate) fn held_tokens(&self) -> impl Iterator<Item = (CandidateId, u32)> + '_ {
        self.program.iter().flat_map(|program| program.held.iter().copied())
    }
}
