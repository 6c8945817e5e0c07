//! The operator's rules of the queue, and a request's properties when it asks to be admitted.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use fair_queue::Need;
use pointsman_routing::{CandidateId, RoutingRequest};
use pointsman_workers::{Leg, ModelName, WorkerId};
use tokio::time::{Duration, Instant};

/// Estimated output tokens of a sequence when the request names no limit.
pub const DEFAULT_OUTPUT_TOKENS: u32 = 256;
/// Largest estimate of a sequence's output. The real number replaces it when the request ends.
pub const MAX_OUTPUT_ESTIMATE: u32 = 32_768;
/// How long requests wait by default.
const DEFAULT_WAIT: Duration = Duration::from_secs(30);
/// Longest priority jump, seconds.
const MAX_JUMP_S: f32 = 60.0;
/// Largest size of a request in the shares of the room.
const MAX_SIZE: usize = 1 << 40;
/// Lines of requests with constraints of their own, for each leg of a model.
const CONSTRAINED_LINES: u64 = 15;

/// Bounds of the queue, and the shares of tenants.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueRules {
    /// Requests that may wait; 0: none.
    pub limit: usize,
    /// Bytes of the bodies of requests that wait.
    pub bytes: usize,
    /// How long a request may wait. One without a target for its first token is due after half of it.
    /// Requests that wait keep their places when it changes.
    pub timeout: Duration,
    /// Order of the requests of a tenant and priority.
    pub order: QueueOrder,
    /// Requests that may be in flight before others wait; 0: no limit.
    pub max_inflight: usize,
    /// Whether running streams pause while requests of a higher priority wait.
    pub preempt: bool,
    /// Bounds of single models, besides those of all.
    pub models: BTreeMap<ModelName, ModelBounds>,
    /// Number of models whose requests wait while no worker can serve them. They share what is for these
    /// requests.
    pub waiting_models: usize,
    /// Weight of an input token.
    pub input_weight: f64,
    /// Weight of an output token.
    pub output_weight: f64,
    /// Shares of tenants, by the hash of the tenant.
    pub tenants: HashMap<u64, TenantShare>,
    /// Share of each tenant that is not listed, and of all requests without a tenant together.
    pub others: TenantShare,
}

/// Order of the waiting requests of one tenant and priority. A gateway has the default. Simulations compare
/// it with the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueOrder {
    /// The earliest target for the first token first. Requests that can no longer meet theirs come last.
    #[default]
    LateLast,
    /// Earliest deadline first: the deadline is the target, also when it has passed.
    Edf,
    /// First in, first out.
    Fifo,
}

/// Bounds of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelBounds {
    /// Requests that may wait; 0: as many as of all models.
    pub limit: usize,
    /// Requests that may be in flight before others wait; 0: no limit.
    pub max_inflight: usize,
}

/// Share of a tenant while others wait, too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantShare {
    /// Share of the served tokens, relative to those of other tenants.
    pub weight: f64,
    /// Highest priority of its requests; `None`: any.
    pub max_priority: Option<f32>,
}

impl Default for TenantShare {
    fn default() -> Self {
        Self { weight: 1.0, max_priority: None }
    }
}

impl Default for QueueRules {
    fn default() -> Self {
        Self {
            limit: 0,
            bytes: usize::MAX,
            timeout: DEFAULT_WAIT,
            order: QueueOrder::default(),
            max_inflight: 0,
            preempt: false,
            models: BTreeMap::new(),
            waiting_models: 0,
            input_weight: 1.0,
            output_weight: 2.0,
            tenants: HashMap::new(),
            others: TenantShare::default(),
        }
    }
}

impl QueueRules {
    /// Returns rules with which `limit` requests may wait; 0: no request waits.
    #[must_use]
    pub fn waiting(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Returns whether neither a queue nor a limit of requests in flight is configured.
    pub(super) fn is_off(&self) -> bool {
        let limits_inflight = |bounds: &ModelBounds| bounds.max_inflight > 0;
        self.limit == 0 && self.max_inflight == 0 && !self.models.values().any(limits_inflight)
    }

    pub(super) fn share(&self, tenant: Option<u64>) -> TenantShare {
        tenant.and_then(|hash| self.tenants.get(&hash)).copied().unwrap_or(self.others)
    }

    pub(super) fn model(&self, model: &ModelName) -> ModelBounds {
        self.models.get(model).copied().unwrap_or_default()
    }

    /// Weighted tokens of a request.
    pub(super) fn cost(&self, input: u64, output: u64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "shares need no more precision")]
        let [input, output] = [input as f64, output as f64];
        // A request without any token takes a turn, too.
        (input * self.input_weight + output * self.output_weight).max(1.0)
    }
}

/// A request that asks to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// The model that it names.
    pub model: &'a ModelName,
    /// Its properties for routing.
    pub request: &'a RoutingRequest,
    /// The worker that a hint names.
    pub pin: Option<WorkerId>,
    /// When it arrived.
    pub arrived: Instant,
    /// Size of its body.
    pub bytes: usize,
}

/// Requests that the same workers may serve. When the first one finds no worker, the others find none either.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LineId {
    model: ModelName,
    leg: Leg,
    constraints: u64,
}

impl fair_queue::Line for LineId {
    type Group = ModelName;

    fn group(&self) -> &ModelName {
        &self.model
    }
}

impl LineId {
    pub(super) fn leg(&self) -> Leg {
        self.leg
    }

    /// Whether any worker of the leg may serve its requests.
    pub(super) fn takes_any_worker(&self) -> bool {
        self.constraints == 0
    }
}

impl AdmissionRequest<'_> {
    /// Returns when it is due, and the deadline of its first token, in microseconds from `origin`. It is due
    /// when its client wants the first token, and without such a target when it has waited half of the
    /// timeout, so it goes before what arrives later than that.
    pub(super) fn dues_us(&self, origin: Instant, rules: &QueueRules) -> (i64, i64) {
        let arrived = micros(origin, self.arrived);
        let jump = thousandths(self.jump_s()).saturating_mul(1_000);
        let target = self.request.ttft_target_us.filter(|_| rules.order != QueueOrder::Fifo).map(i64::from);
        let wait = i64::try_from(rules.timeout.as_micros() / 2).unwrap_or(i64::MAX);
        let due = arrived.saturating_add(target.unwrap_or(wait)).saturating_sub(jump);
        let target = target.filter(|_| rules.order == QueueOrder::LateLast);
        (due, target.map_or(i64::MAX, |target| arrived.saturating_add(target)))
    }

    pub(super) fn line(&self, leg: Leg, tried: &[CandidateId]) -> LineId {
        let request = self.request;
        let (lora, taints, engine) = (&request.lora, &request.required_taints, request.engine);
        let allowed = &request.allowed_workers;
        // Requests that need a longer context than some worker has wait beside the others, with those of
        // about the same length.
        let context = request.context_tokens.map(u32::ilog2);
        let is_free =
            lora.is_none() && taints.is_empty() && allowed.is_none() && engine.is_none() && context.is_none();
        let constraints = if is_free && self.pin.is_none() && tried.is_empty() {
            0
        } else {
            let mut hasher = DefaultHasher::new();
            (lora, taints, engine, context, self.pin, tried).hash(&mut hasher);
            allowed.hash(&mut hasher);
            1 + hasher.finish() % CONSTRAINED_LINES
        };
        LineId { model: self.model.clone(), leg, constraints }
    }

    /// Prompt tokens, and estimated output tokens of all sequences.
    pub(super) fn tokens(&self) -> (u64, u64) {
        (u64::from(self.request.prompt_tokens), estimated_output(self.request))
    }

    /// Expected cost, and what it takes of the room: its bytes, or those that one of `limit` requests may
    /// have if these are more.
    pub(super) fn need(&self, rules: &QueueRules) -> Need {
        let (input, output) = self.tokens();
        let size = self.bytes.max(rules.bytes / rules.limit.max(1)).min(MAX_SIZE);
        Need { cost: rules.cost(input, output), size: u64::try_from(size).unwrap_or(u64::MAX) }
    }

    /// Seconds by which the request jumps the queue within its tenant and band.
    pub(super) fn jump_s(&self) -> f32 {
        self.request.priority_jump_s.clamp(-MAX_JUMP_S, MAX_JUMP_S)
    }
}

/// Returns the estimated output tokens of all sequences of a request: what it says, or a default.
#[must_use]
pub fn estimated_output(request: &RoutingRequest) -> u64 {
    let said = match (request.expected_output_tokens, request.max_tokens) {
        (Some(expected), Some(most)) => Some(expected.min(most)),
        (expected, most) => expected.or(most),
    };
    let of_one = said.unwrap_or(DEFAULT_OUTPUT_TOKENS).min(MAX_OUTPUT_ESTIMATE);
    u64::from(of_one) * u64::from(request.n.max(1))
}

/// Returns the priority of a request that its tenant may have, in thousandths.
pub(super) fn class_of(rules: &QueueRules, request: &RoutingRequest) -> i64 {
    let most = rules.share(request.tenant_hash).max_priority;
    thousandths(most.map_or(request.priority, |most| request.priority.min(most)))
}

/// Microseconds from `origin` to a time.
pub(super) fn micros(origin: Instant, time: Instant) -> i64 {
    i64::try_from(time.saturating_duration_since(origin).as_micros()).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_possible_truncation, reason = "a float cast saturates, and is 0 for NaN")]
fn thousandths(value: f32) -> i64 {
    (f64::from(value) * 1_000.0) as i64
}
