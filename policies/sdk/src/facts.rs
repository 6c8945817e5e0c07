//! The facts a policy may ask for, as typed constants. `wit/facts.md` documents them; a test of the workspace holds the
//! two against the host's own table.

use std::marker::PhantomData;

/// A fact about the request.
#[derive(Clone, Copy, Debug)]
pub struct RequestFact<T>(&'static str, PhantomData<T>);

/// A fact about a candidate.
#[derive(Clone, Copy, Debug)]
pub struct WorkerFact<T>(&'static str, PhantomData<T>);

/// A type that a fact's value may have.
pub trait FactValue: Copy {
    /// Its name in `wit/facts.md`.
    const TYPE: &'static str;
    /// Slots (or columns) it takes.
    const WIDTH: usize;
    /// Its value from its slots; `high` is 0 unless it takes two.
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
    /// The name it is asked for by.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl<T> WorkerFact<T> {
    /// The name it is asked for by.
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

        /// Every fact: scope, name, type.
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
        /// Blocks the prompt fills, the last one counted whole.
        REQUEST_BLOCKS = "request-blocks": u32,
        /// Tokens in a block.
        BLOCK_SIZE = "block-size": u32,
        /// Choices asked for.
        N = "n": u32,
        /// The client's cap on output tokens; 0 when it gave none.
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
        /// Credit for a block cached on the device, as in force.
        OVERLAP_SCORE_CREDIT = "overlap-score-credit": f32,
        /// Credit for a block cached in host memory.
        HOST_CACHE_CREDIT = "host-cache-credit": f32,
        /// Credit for a block cached on disk.
        DISK_CACHE_CREDIT = "disk-cache-credit": f32,
        /// Weight of the prefill term, as in force.
        PREFILL_LOAD_SCALE = "prefill-load-scale": f32,
        /// Weight of the count of active requests.
        ACTIVE_REQUEST_WEIGHT = "active-request-weight": f32,
        /// The picker's softmax temperature, as in force.
        TEMPERATURE = "temperature": f32,
        /// 1 when equal blocks count as shared, else 0.
        ASSUME_KV_REUSE = "assume-kv-reuse": u32,
        /// 1 when prefill tokens count as load, else 0.
        TRACK_PREFILL_TOKENS = "track-prefill-tokens": u32,
        /// Credit multiplier for caches shared between workers.
        SHARED_CACHE_MULTIPLIER = "shared-cache-multiplier": f32,
        /// Worker of the other leg when it is already chosen; 0 when not.
        OTHER_LEG_WORKER_ID = "other-leg-worker-id": u64,
        /// Rank of the other leg's worker; 4294967295 when not chosen.
        OTHER_LEG_DP_RANK = "other-leg-dp-rank": u32,
        /// 1 when the request asked why: a selector should return its costs.
        EXPLAIN = "explain": u32,
    }
    worker {
        /// The worker's id.
        WORKER_ID = "worker-id": u64,
        /// The candidate's data-parallel rank.
        DP_RANK = "dp-rank": u32,
        /// Requests booked here now.
        ACTIVE_REQUESTS = "active-requests": u32,
        /// Prompt tokens booked here whose prefill has not completed.
        ACTIVE_PREFILL_TOKENS = "active-prefill-tokens": u32,
        /// Blocks booked here after admission: this request's own included, a shared prefix counted once.
        DECODE_BLOCKS = "decode-blocks": u32,
        /// KV blocks the engine has; 0 when unknown.
        TOTAL_BLOCKS = "total-blocks": u32,
        /// Blocks of this prompt's prefix cached on the device.
        CACHED_BLOCKS_DEVICE = "cached-blocks-device": u32,
        /// Blocks of this prompt's prefix cached in host memory, beyond the device's.
        CACHED_BLOCKS_HOST = "cached-blocks-host": u32,
        /// Blocks of this prompt's prefix cached on disk, beyond the host's.
        CACHED_BLOCKS_DISK = "cached-blocks-disk": u32,
        /// Requests the engine itself says are running; 0 when unknown.
        ENGINE_RUNNING = "engine-running": u32,
        /// Requests the engine itself says are waiting; 0 when unknown.
        ENGINE_QUEUE = "engine-queue": u32,
        /// Share of the KV cache in use as the engine says, 0 to 1; 0 when unknown.
        KV_USAGE = "kv-usage": f32,
        /// Age of the engine's own load figures, milliseconds; 4294967295 when there are none.
        LOAD_AGE_MS = "load-age-ms": u32,
        /// Sum of the weights of the preferred taints that this candidate has.
        TAINT_PREFERENCE = "taint-preference": f32,
        /// Topology steps to the other leg's worker; 0 when the same domain or unknown.
        TOPOLOGY_DISTANCE = "topology-distance": u32,
        /// 1 when the request's LoRA is loaded here, else 0.
        LORA_LOADED = "lora-loaded": u32,
        /// 1 when the request's session is bound here, else 0.
        SESSION_BOUND = "session-bound": u32,
        /// Moving average of time to first token, microseconds; 0 when none seen.
        TTFT_EWMA_US = "ttft-ewma-us": u32,
        /// Moving average of inter-token latency, microseconds; 0 when none seen.
        ITL_EWMA_US = "itl-ewma-us": u32,
        /// Moving share of legs that failed, parts per million.
        ERROR_PPM = "error-ppm": u32,
        /// 1 when the worker can prefill without a handoff, else 0.
        LOCAL_PREFILL = "local-prefill": u32,
        /// Requests the worker may have at once; 0 when unlimited.
        MAX_CONCURRENCY = "max-concurrency": u32,
    }
}
