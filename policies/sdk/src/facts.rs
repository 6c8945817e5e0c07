//! The facts that a policy can ask for, as typed constants. `wit/facts.md` describes them. A test compares
//! both with the host's table.
//!
//! ```
//! # use pointsman_policy_sdk::{Wants, facts};
//! let mut wants = Wants::default();
//! let prompt = wants.request(facts::PROMPT_TOKENS);
//! let queue = wants.worker(facts::ENGINE_QUEUE);
//! assert_eq!(wants.worker_names(), ["engine-queue"]);
//! ```

use std::marker::PhantomData;

/// A fact about the request.
#[derive(Clone, Copy, Debug)]
pub struct RequestFact<T>(&'static str, PhantomData<T>);

/// A fact about a candidate.
#[derive(Clone, Copy, Debug)]
pub struct WorkerFact<T>(&'static str, PhantomData<T>);

/// A type of fact values.
pub trait FactValue: Copy {
    /// Name in `wit/facts.md`.
    const TYPE: &'static str;
    /// Number of 32-bit values (or columns of them) that it takes.
    const WIDTH: usize;
    /// Makes the value from its 32-bit halves. `high` is 0 for types of one.
    fn from_words(low: u32, high: u32) -> Self;
}

impl FactValue for u32 {
    const TYPE: &'static str = "u32";
    const WIDTH: usize = 1;
    fn from_words(low: u32, _: u32) -> Self {
        low
    }
}

impl FactValue for f32 {
    const TYPE: &'static str = "f32";
    const WIDTH: usize = 1;
    fn from_words(low: u32, _: u32) -> Self {
        Self::from_bits(low)
    }
}

impl FactValue for u64 {
    const TYPE: &'static str = "u64";
    const WIDTH: usize = 2;
    fn from_words(low: u32, high: u32) -> Self {
        u64::from(high) << 32 | u64::from(low)
    }
}

impl<T> RequestFact<T> {
    /// Returns the name by which policies ask for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl<T> WorkerFact<T> {
    /// Returns the name by which policies ask for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }
}

macro_rules! table {
    (request { $($(#[doc = $rd:literal])* $request:ident = $rname:literal : $rty:ty,)* }
     worker { $($(#[doc = $wd:literal])* $worker:ident = $wname:literal : $wty:ty,)* }) => {
        $($(#[doc = $rd])* pub const $request: RequestFact<$rty> = RequestFact($rname, PhantomData);)*
        $($(#[doc = $wd])* pub const $worker: WorkerFact<$wty> = WorkerFact($wname, PhantomData);)*

        /// All facts: scope (`request` or `worker`), name, and type.
        pub const ALL: &[(&str, &str, &str)] = &[
            $(("request", $rname, <$rty as FactValue>::TYPE),)*
            $(("worker", $wname, <$wty as FactValue>::TYPE),)*
        ];
    };
}

table! {
    request {
        /// Input sequence length (ISL), tokens.
        PROMPT_TOKENS = "prompt-tokens": u32,
        /// 1 when `prompt-tokens` is an estimate from bytes (no tokenizer), else 0.
        PROMPT_TOKENS_ESTIMATED = "prompt-tokens-estimated": u32,
        /// KV blocks that the prompt fills. A partial last block counts as one.
        REQUEST_BLOCKS = "request-blocks": u32,
        /// Tokens in a block.
        BLOCK_SIZE = "block-size": u32,
        /// Number of choices that the client asked for (`n`).
        N = "n": u32,
        /// Client's limit of output tokens; 0 when there is none.
        MAX_TOKENS = "max-tokens": u32,
        /// Expected output sequence length, tokens; 0 when unknown.
        EXPECTED_OUTPUT_TOKENS = "expected-output-tokens": u32,
        /// Target time to first token, microseconds; 0 when none.
        TTFT_TARGET_US = "ttft-target-us": u32,
        /// Target inter-token latency, microseconds; 0 when none.
        ITL_TARGET_US = "itl-target-us": u32,
        /// Strict priority, higher first; 0 when none.
        PRIORITY = "priority": f32,
        /// Seconds by which the request jumps the queue.
        PRIORITY_JUMP_S = "priority-jump-s": f32,
        /// Salted hash of the session id; 0 when none.
        SESSION_HASH = "session-hash": u64,
        /// Salted hash of the LoRA name; 0 when none.
        LORA_HASH = "lora-hash": u64,
        /// Salted hash of the tenant; 0 when none.
        TENANT_HASH = "tenant-hash": u64,
        /// Requests of this tenant now in the gateway.
        TENANT_ACTIVE_REQUESTS = "tenant-active-requests": u32,
        /// Credit for a block cached on the device, after overrides.
        OVERLAP_SCORE_CREDIT = "overlap-score-credit": f32,
        /// Credit for a block cached in host memory.
        HOST_CACHE_CREDIT = "host-cache-credit": f32,
        /// Credit for a block cached on disk.
        DISK_CACHE_CREDIT = "disk-cache-credit": f32,
        /// Weight of prefill load in the cost, after overrides.
        PREFILL_LOAD_SCALE = "prefill-load-scale": f32,
        /// Weight of the count of active requests.
        ACTIVE_REQUEST_WEIGHT = "active-request-weight": f32,
        /// Temperature of the softmax picker, after overrides.
        TEMPERATURE = "temperature": f32,
        /// 1 when equal blocks count as shared, else 0.
        ASSUME_KV_REUSE = "assume-kv-reuse": u32,
        /// 1 when prefill tokens count as load, else 0.
        TRACK_PREFILL_TOKENS = "track-prefill-tokens": u32,
        /// Credit multiplier for caches shared between workers.
        SHARED_CACHE_MULTIPLIER = "shared-cache-multiplier": f32,
        /// Id of the worker of the other leg; 0 while it is not chosen.
        OTHER_LEG_WORKER_ID = "other-leg-worker-id": u64,
        /// Data-parallel rank of that worker; 4294967295 while it is not chosen.
        OTHER_LEG_DP_RANK = "other-leg-dp-rank": u32,
        /// 1 when the request asks for an explanation, so that a selector should return its costs, else 0.
        EXPLAIN = "explain": u32,
        /// Time for which the request has waited in the gateway's queue, microseconds.
        QUEUE_US = "queue-us": u32,
        /// Salted hash of the root session of the request's agent program; 0 when it names no session.
        PROGRAM_HASH = "program-hash": u64,
        /// Requests of the program that were routed before this one.
        PROGRAM_TURN = "program-turn": u32,
        /// Time since a request of the program was routed or answered, milliseconds; 4294967295 when none
        /// was.
        PROGRAM_IDLE_MS = "program-idle-ms": u32,
    }
    worker {
        /// The worker's id.
        WORKER_ID = "worker-id": u64,
        /// The candidate's data-parallel rank.
        DP_RANK = "dp-rank": u32,
        /// Requests that the gateway has assigned to the candidate and that have not ended.
        ACTIVE_REQUESTS = "active-requests": u32,
        /// Prompt tokens of those requests whose prefill has not ended.
        ACTIVE_PREFILL_TOKENS = "active-prefill-tokens": u32,
        /// KV blocks that the candidate would hold with this request. A shared prefix counts once.
        DECODE_BLOCKS = "decode-blocks": u32,
        /// KV blocks of the engine; 0 when unknown.
        TOTAL_BLOCKS = "total-blocks": u32,
        /// Blocks of this prompt's prefix cached on the device.
        CACHED_BLOCKS_DEVICE = "cached-blocks-device": u32,
        /// Blocks of this prompt's prefix cached in host memory, beyond the device's.
        CACHED_BLOCKS_HOST = "cached-blocks-host": u32,
        /// Blocks of this prompt's prefix cached on disk, beyond the host's.
        CACHED_BLOCKS_DISK = "cached-blocks-disk": u32,
        /// Running requests that the engine reports; 0 when unknown.
        ENGINE_RUNNING = "engine-running": u32,
        /// Waiting requests that the engine reports; 0 when unknown.
        ENGINE_QUEUE = "engine-queue": u32,
        /// Share of the KV cache in use that the engine reports, 0 to 1; 0 when unknown.
        KV_USAGE = "kv-usage": f32,
        /// Age of the figures that the engine reports, milliseconds; 4294967295 when there are none.
        LOAD_AGE_MS = "load-age-ms": u32,
        /// Sum of the weights of the request's preferred taints that the candidate has.
        TAINT_PREFERENCE = "taint-preference": f32,
        /// Topology steps to the other leg's worker; 0 when the same domain or unknown.
        TOPOLOGY_DISTANCE = "topology-distance": u32,
        /// 1 when the request's LoRA is loaded on the worker, else 0.
        LORA_LOADED = "lora-loaded": u32,
        /// 1 when the request's session is bound to the candidate, else 0.
        SESSION_BOUND = "session-bound": u32,
        /// Moving average of the time to first token, microseconds; 0 before the first request.
        TTFT_EWMA_US = "ttft-ewma-us": u32,
        /// Moving average of the inter-token latency, microseconds; 0 before the first request.
        ITL_EWMA_US = "itl-ewma-us": u32,
        /// Moving average of the share of failed legs, parts per million.
        ERROR_PPM = "error-ppm": u32,
        /// 1 when the decode worker can prefill by itself, else 0.
        LOCAL_PREFILL = "local-prefill": u32,
        /// Limit of concurrent requests of the worker; 0 when there is none.
        MAX_CONCURRENCY = "max-concurrency": u32,
        /// Moving average of the time per 1,000 uncached prompt tokens, microseconds; 0 when none was seen.
        PREFILL_US_PER_KTOKEN = "prefill-us-per-ktoken": u32,
        /// 1 when the engine tells how many requests run, else 0.
        ENGINE_RUNNING_KNOWN = "engine-running-known": u32,
        /// 1 when the engine tells how many requests wait, else 0.
        ENGINE_QUEUE_KNOWN = "engine-queue-known": u32,
        /// 1 when the engine tells the share of its KV cache in use, else 0.
        KV_USAGE_KNOWN = "kv-usage-known": u32,
        /// Tokens of the request's agent program that the candidate is expected to hold; 0 when none.
        PROGRAM_TOKENS = "program-tokens": u32,
        /// The same of all running programs together.
        RUNNING_PROGRAM_TOKENS = "running-program-tokens": u32,
        /// Requests booked here that begin with as much of this prompt as a worker has cached.
        PREFIX_REQUESTS = "prefix-requests": u32,
    }
}
