//! The question that is put to the router: one leg of one request, over one pinned worker snapshot.

use std::sync::Arc;

use pointsman_workers::{DpRank, Leg, ModelName, Prefix, Snapshot, WorkerId, WorkerSpec};

use crate::policy::RouterConfigOverride;

/// What is known of a request, the same for all its legs. Holds no prompt text.
#[derive(Clone, Debug)]
pub struct RoutingRequest {
    /// Input sequence length, tokens.
    pub prompt_tokens: u32,
    /// Whether `prompt_tokens` was estimated from bytes.
    pub prompt_tokens_estimated: bool,
    /// Tokens in a block.
    pub block_size: u32,
    /// Hashes of the prompt's prefix.
    pub prefix: Prefix,
    /// Choices asked for.
    pub n: u32,
    /// The client's cap on output tokens.
    pub max_tokens: Option<u32>,
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
    /// Drawn once a request: which of two generations it meets when it has no session.
    pub draw: u64,
    /// Salted hash of the session id.
    pub session_hash: Option<u64>,
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
    /// Taints that make a worker dearer (negative) or cheaper (positive).
    pub preferred_taints: Vec<(String, f32)>,
    /// Workers it may run on; empty is any.
    pub allowed_workers: Vec<WorkerId>,
    /// The client's own override of the router config.
    pub config: RouterConfigOverride,
}

/// A candidate by name.
pub type CandidateId = (WorkerId, DpRank);

/// One leg to route.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The workers this request sees for the whole leg.
    pub snapshot: &'a Snapshot,
    /// The model it wants.
    pub model: &'a ModelName,
    /// Which leg.
    pub leg: Leg,
    /// 0, then one more for each retry of the leg.
    pub attempt: u32,
    /// What is known of the request.
    pub request: &'a RoutingRequest,
    /// The worker (and rank) a hint pins this leg to.
    pub pin: Option<(WorkerId, Option<DpRank>)>,
    /// The candidate this leg's session is bound to (spec F8); chosen when it is eligible and no hint pins another.
    pub session: Option<CandidateId>,
    /// The decode candidate for which the decode override decided on local prefill; chosen when it is eligible.
    pub planned: Option<CandidateId>,
    /// Candidates this request already tried; not candidates again.
    pub tried: &'a [CandidateId],
    /// The other leg's candidate when it is already chosen.
    pub other_leg: Option<CandidateId>,
    /// Whether the client asked why.
    pub explain: bool,
    /// A probe of one worker: it runs there alone, and needs no partner (spec A1).
    pub probe: bool,
    /// The only randomness of the decision.
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// The id the client knows the request by; `None`: the decision is not recorded.
    pub request_id: Option<&'a str>,
}

impl Query<'_> {
    /// The other leg's worker as the snapshot knows it.
    #[must_use]
    pub fn peer(&self) -> Option<&WorkerSpec> {
        let (worker, _) = self.other_leg?;
        self.snapshot.get(worker).map(|worker| worker.spec())
    }
}

impl RoutingRequest {
    /// Blocks the prompt fills, the last one counted whole.
    #[must_use]
    pub fn request_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.block_size.max(1))
    }
}
