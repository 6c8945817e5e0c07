//! The fact table: every number a policy may ask for, by name, with its unit and type.
//!
//! `wit/facts.md` documents the same table for policy authors and the SDK has it as constants; a test in
//! `tests/` holds the three against each other. A new fact is a new row here and needs no new WIT.

use std::{fmt, sync::Arc};

/// The type of a fact, which determines its layout in the flat `list<u32>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactType {
    /// One word.
    U32,
    /// One word: the bits of an IEEE 754 single.
    F32,
    /// Two words (request) or two columns (worker), low half first.
    U64,
}

/// Declares one enum of facts with names and types, in the order of the table.
macro_rules! facts {
    ($(#[$meta:meta])* $name:ident {
        $($(#[doc = $doc:literal])* $variant:ident = $text:literal : $ty:ident,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[doc = $doc])* $variant,)* }

        impl $name {
            /// The whole table, in its order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name by which a policy requests the fact.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// The type of its value.
            #[must_use]
            pub fn ty(self) -> FactType {
                match self { $(Self::$variant => FactType::$ty,)* }
            }
        }
    };
}

facts! {
    /// Facts about the request, one value each.
    RequestFact {
        /// Input sequence length (ISL), tokens.
        PromptTokens = "prompt-tokens": U32,
        /// 1 when `prompt-tokens` is an estimate from bytes (no tokenizer), else 0.
        PromptTokensEstimated = "prompt-tokens-estimated": U32,
        /// Blocks the prompt fills, the last one counted whole.
        RequestBlocks = "request-blocks": U32,
        /// Tokens in a block.
        BlockSize = "block-size": U32,
        /// Number of choices requested.
        N = "n": U32,
        /// The client's limit of output tokens; 0 when it set none.
        MaxTokens = "max-tokens": U32,
        /// Expected output sequence length, tokens; 0 when unknown.
        ExpectedOutputTokens = "expected-output-tokens": U32,
        /// Target time to first token, microseconds; 0 when none.
        TtftTargetUs = "ttft-target-us": U32,
        /// Target inter-token latency, microseconds; 0 when none.
        ItlTargetUs = "itl-target-us": U32,
        /// Strict priority, higher first; 0 when none.
        Priority = "priority": F32,
        /// Seconds by which the request jumps the queue.
        PriorityJump = "priority-jump-s": F32,
        /// Salted hash of the session id; 0 when none.
        SessionHash = "session-hash": U64,
        /// Salted hash of the LoRA name; 0 when none.
        LoraHash = "lora-hash": U64,
        /// Salted hash of the tenant; 0 when none.
        TenantHash = "tenant-hash": U64,
        /// Requests of this tenant now in the gateway.
        TenantActiveRequests = "tenant-active-requests": U32,
        /// Credit for a block cached on the device, as in force.
        OverlapScoreCredit = "overlap-score-credit": F32,
        /// Credit for a block cached in host memory.
        HostCacheCredit = "host-cache-credit": F32,
        /// Credit for a block cached on disk.
        DiskCacheCredit = "disk-cache-credit": F32,
        /// Weight of the prefill term, as in force.
        PrefillLoadScale = "prefill-load-scale": F32,
        /// Weight of the count of active requests.
        ActiveRequestWeight = "active-request-weight": F32,
        /// The picker's softmax temperature, as in force.
        Temperature = "temperature": F32,
        /// 1 when equal blocks count as shared, else 0.
        AssumeKvReuse = "assume-kv-reuse": U32,
        /// 1 when prefill tokens count as load, else 0.
        TrackPrefillTokens = "track-prefill-tokens": U32,
        /// Credit multiplier for caches shared between workers.
        SharedCacheMultiplier = "shared-cache-multiplier": F32,
        /// Worker of the other leg when it is already chosen; 0 when not.
        OtherLegWorkerId = "other-leg-worker-id": U64,
        /// Rank of the other leg's worker; 4294967295 when not chosen.
        OtherLegDpRank = "other-leg-dp-rank": U32,
        /// 1 when the request wants an explanation: a selector should return its costs.
        Explain = "explain": U32,
        /// Time for which the request has waited in the gateway's queue, microseconds.
        QueueUs = "queue-us": U32,
        /// Salted hash of the root session of the request's agent program; 0 when it names no session.
        ProgramHash = "program-hash": U64,
        /// Requests of the program that were routed before this one.
        ProgramTurn = "program-turn": U32,
        /// Time since a request of the program was routed or answered, milliseconds; 4294967295 when none
        /// was.
        ProgramIdleMs = "program-idle-ms": U32,
    }
}

facts! {
    /// Facts about a candidate, one column each.
    WorkerFact {
        /// The worker's id.
        WorkerId = "worker-id": U64,
        /// The candidate's data-parallel rank.
        DpRank = "dp-rank": U32,
        /// Requests booked here now.
        ActiveRequests = "active-requests": U32,
        /// Prompt tokens booked here whose prefill has not completed.
        ActivePrefillTokens = "active-prefill-tokens": U32,
        /// Blocks booked here after admission: this request's own included, a shared prefix counted once.
        DecodeBlocks = "decode-blocks": U32,
        /// KV blocks the engine has; 0 when unknown.
        TotalBlocks = "total-blocks": U32,
        /// Blocks of this prompt's prefix cached on the device.
        CachedBlocksDevice = "cached-blocks-device": U32,
        /// Blocks of this prompt's prefix cached in host memory, beyond the device's.
        CachedBlocksHost = "cached-blocks-host": U32,
        /// Blocks of this prompt's prefix cached on disk, beyond the host's.
        CachedBlocksDisk = "cached-blocks-disk": U32,
        /// Requests that the engine reports as running; 0 when unknown.
        EngineRunning = "engine-running": U32,
        /// Requests that the engine reports as waiting; 0 when unknown.
        EngineQueue = "engine-queue": U32,
        /// Share of the KV cache in use as the engine reports, 0 to 1; 0 when unknown.
        KvUsage = "kv-usage": F32,
        /// Age of the engine's own load figures, milliseconds; 4294967295 when there are none.
        LoadAgeMs = "load-age-ms": U32,
        /// Sum of the weights of the preferred taints that this candidate has.
        TaintPreference = "taint-preference": F32,
        /// Topology steps to the other leg's worker; 0 when the same domain or unknown.
        TopologyDistance = "topology-distance": U32,
        /// 1 when the request's LoRA is loaded here, else 0.
        LoraLoaded = "lora-loaded": U32,
        /// 1 when the request's session is bound here, else 0.
        SessionBound = "session-bound": U32,
        /// Moving average of time to first token, microseconds; 0 when none seen.
        TtftEwmaUs = "ttft-ewma-us": U32,
        /// Moving average of inter-token latency, microseconds; 0 when none seen.
        ItlEwmaUs = "itl-ewma-us": U32,
        /// Moving share of legs that failed, parts per million.
        ErrorPpm = "error-ppm": U32,
        /// 1 when the worker can prefill without a handoff, else 0.
        LocalPrefill = "local-prefill": U32,
        /// Requests the worker may have at once; 0 when unlimited.
        MaxConcurrency = "max-concurrency": U32,
        /// Moving average of the time per 1,000 uncached prompt tokens, microseconds; 0 when none was seen.
        PrefillUsPerKtoken = "prefill-us-per-ktoken": U32,
        /// 1 when the engine reports `engine-running`, else 0.
        EngineRunningKnown = "engine-running-known": U32,
        /// 1 when the engine reports `engine-queue`, else 0.
        EngineQueueKnown = "engine-queue-known": U32,
        /// 1 when the engine reports `kv-usage`, else 0.
        KvUsageKnown = "kv-usage-known": U32,
        /// Tokens of the request's agent program that the candidate is expected to hold; 0 when none.
        ProgramTokens = "program-tokens": U32,
        /// The same of all running programs together.
        RunningProgramTokens = "running-program-tokens": U32,
        /// Requests booked here that begin with as much of this prompt as a worker has cached.
        PrefixRequests = "prefix-requests": U32,
    }
}

/// A worker fact as asked for: one of the table, or one made from a label or a taint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WorkerColumn {
    /// A fact of the table.
    Fact(WorkerFact),
    /// `label-is/<key>=<value>` (u32): 1 when the worker's label has that value, else 0.
    LabelIs {
        /// The label's key.
        key: Arc<str>,
        /// The value compared with.
        value: Arc<str>,
    },
    /// `label-number/<key>` (f32): the label as a number; 0 when missing or not a number.
    LabelNumber {
        /// The label's key.
        key: Arc<str>,
    },
    /// `taint-is/<name>` (u32): 1 when the worker has the taint, else 0.
    TaintIs(Arc<str>),
}

/// The facts that a policy requested at load, resolved against the table, in the policy's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Request facts.
    pub request: Vec<RequestFact>,
    /// Worker facts, one column (or two, for u64) each.
    pub worker: Vec<WorkerColumn>,
}

/// A fact name that the table does not contain. Its text suggests the name that was probably meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {scope} fact `{name}`: {}", self.advice())]
pub struct UnknownFact {
    /// `request` or `worker`.
    pub scope: &'static str,
    /// The requested name.
    pub name: String,
}

impl UnknownFact {
    fn advice(&self) -> String {
        let (request, worker) = (RequestFact::ALL.iter().map(|fact| fact.name()), WorkerFact::ALL.iter());
        let worker = worker.map(|fact| fact.name());
        let of_scope: Vec<&str> = match self.scope {
            "request" if worker.clone().any(|name| name == self.name) => {
                return "it is a worker fact".to_owned();
            }
            "worker" if request.clone().any(|name| name == self.name) => {
                return "it is a request fact".to_owned();
            }
            "request" => request.collect(),
            "worker" => worker.collect(),
            _ => request.chain(worker).collect(),
        };
        let likeness = |name: &str| strsim::jaro_winkler(&self.name, name);
        let closest = of_scope.into_iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        match closest.filter(|name| likeness(name) > 0.8) {
            Some(name) => format!("did you mean `{name}`?"),
            None => "`pointsman policy facts` lists the names of facts".to_owned(),
        }
    }
}

impl FactType {
    /// Slots (or columns) one value takes in the flat list.
    #[must_use]
    pub fn width(self) -> usize {
        match self {
            Self::U32 | Self::F32 => 1,
            Self::U64 => 2,
        }
    }
}

impl WorkerColumn {
    /// The type of its values.
    #[must_use]
    pub fn ty(&self) -> FactType {
        match self {
            Self::Fact(fact) => fact.ty(),
            Self::LabelIs { .. } | Self::TaintIs(_) => FactType::U32,
            Self::LabelNumber { .. } => FactType::F32,
        }
    }

    fn parse(name: &str) -> Option<Self> {
        if let Some(label) = name.strip_prefix("label-is/") {
            let (key, value) = label.split_once('=')?;
            return (!key.is_empty()).then(|| Self::LabelIs { key: key.into(), value: value.into() });
        }
        if let Some(key) = name.strip_prefix("label-number/") {
            return (!key.is_empty()).then(|| Self::LabelNumber { key: key.into() });
        }
        if let Some(name) = name.strip_prefix("taint-is/") {
            return (!name.is_empty()).then(|| Self::TaintIs(name.into()));
        }
        WorkerFact::ALL.iter().find(|fact| fact.name() == name).map(|fact| Self::Fact(*fact))
    }
}

impl fmt::Display for WorkerColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fact(fact) => f.write_str(fact.name()),
            Self::LabelIs { key, value } => write!(f, "label-is/{key}={value}"),
            Self::LabelNumber { key } => write!(f, "label-number/{key}"),
            Self::TaintIs(name) => write!(f, "taint-is/{name}"),
        }
    }
}

impl Wants {
    /// Resolves the names a policy asked for.
    ///
    /// # Errors
    /// [`UnknownFact`] names the first that the table lacks.
    pub fn resolve<R: AsRef<str>, W: AsRef<str>>(request: &[R], worker: &[W]) -> Result<Self, UnknownFact> {
        let unknown = |scope, name: &str| UnknownFact { scope, name: name.to_owned() };
        let find = |name: &str| RequestFact::ALL.iter().copied().find(|fact| fact.name() == name);
        let request = request
            .iter()
            .map(|name| find(name.as_ref()).ok_or_else(|| unknown("request", name.as_ref())))
            .collect::<Result<_, _>>()?;
        let worker = worker
            .iter()
            .map(|name| WorkerColumn::parse(name.as_ref()).ok_or_else(|| unknown("worker", name.as_ref())))
            .collect::<Result<_, _>>()?;
        Ok(Self { request, worker })
    }

    /// Returns whether nothing was asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.request.is_empty() && self.worker.is_empty()
    }

    /// Slots that the request facts take.
    #[must_use]
    pub fn request_width(&self) -> usize {
        self.request.iter().map(|fact| fact.ty().width()).sum()
    }

    /// Columns that the worker facts take.
    #[must_use]
    pub fn worker_width(&self) -> usize {
        self.worker.iter().map(|column| column.ty().width()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wants_resolve_in_the_order_asked_for() {
        let wants =
            Wants::resolve(&["block-size", "session-hash"], &["dp-rank", "worker-id", "label-is/zone=a"]);
        let wants = wants.expect("all known");
        assert_eq!(wants.request, [RequestFact::BlockSize, RequestFact::SessionHash]);
        assert_eq!((wants.request_width(), wants.worker_width()), (3, 4));
    }

    #[test]
    fn an_unknown_fact_is_named() {
        let error = Wants::resolve(&["prompt-text"], &[] as &[&str]).expect_err("no such fact");
        let see = "`pointsman policy facts` lists the names of facts";
        assert_eq!(error.to_string(), "unknown request fact `prompt-text`: did you mean `prompt-tokens`?");
        let error = Wants::resolve(&[] as &[&str], &["label-is/=x"]).expect_err("no key");
        assert_eq!(error.to_string(), format!("unknown worker fact `label-is/=x`: {see}"));
    }

    #[test]
    fn a_misspelled_fact_gets_a_suggestion_and_one_of_the_other_kind_is_named() {
        let worker = |name| Wants::resolve(&[] as &[&str], &[name]).expect_err("unknown").to_string();
        let text = "unknown worker fact `active-request`: did you mean `active-requests`?";
        assert_eq!(worker("active-request"), text);
        assert_eq!(worker("block-size"), "unknown worker fact `block-size`: it is a request fact");
        let error = Wants::resolve(&["kv-usage"], &[] as &[&str]).expect_err("unknown");
        assert_eq!(error.to_string(), "unknown request fact `kv-usage`: it is a worker fact");
    }
}
