//! The interface of a loaded policy: pure functions over flat lists of facts, each of which may fail.
//!
//! A policy's failure is data ([`Failure`]), never an error of the request.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use pointsman_workers::Leg;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    config::RouterConfigOverride,
    context::DecisionContext,
    facts::Wants,
    outcome::{Moment, ObservedOutcome},
};

/// Arguments of every policy function besides its facts. Mirrors `record call` of `wit/policy.wit`, which
/// never grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Call {
    /// The leg that is being routed.
    pub leg: Leg,
    /// 0 for the first try of this leg, then one more for each retry.
    pub attempt: u32,
    /// Number of candidate rows in the facts.
    pub rows: u32,
    /// The only randomness a policy has; recorded, so that a decision replays.
    pub seed: u64,
    /// The only clock a policy has: microseconds since the Unix epoch.
    pub now_us: u64,
}

/// The worlds of `wit/policy.wit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum World {
    /// Keeps rows.
    Filter,
    /// Gives every row a cost.
    Scorer,
    /// Chooses a row.
    Selector,
    /// Decides between remote and local prefill, and configures the decode leg.
    DecodeOverride,
}

/// A selector's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Chooses a candidate row.
    Choose {
        /// Index into the candidate rows.
        row: u32,
        /// One cost per row when the request asked for an explanation, else empty.
        costs: Vec<f32>,
        /// The policy's explanation, for the receipt.
        reason: Option<String>,
    },
    /// No opinion: the fallback decides.
    Abstain,
    /// Refuse the request now.
    Shed(ShedReason),
}

/// A decode override's answer to "is remote prefill worth it".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Prefill on a prefill worker.
    Remote,
    /// Prefill on the decode worker.
    Local,
    /// Refuse the request now.
    Shed(ShedReason),
}

impl Plan {
    /// Returns its word in receipts and metrics.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Local => "local",
            Self::Shed(_) => "shed",
        }
    }
}

/// Why a policy refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShedReason {
    /// HTTP status the policy wishes; the host allows 429, 503 and 529.
    pub status: u16,
    /// Text for the client.
    pub reason: String,
}

/// SHA-256 of a policy file as it was read from the directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

/// Source of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Compiled into the binary.
    Embedded,
    /// A file of the policy directory.
    File(PathBuf),
}

/// Identity of a policy. Immutable while the policy is loaded.
#[derive(Clone, Debug)]
pub struct PolicyInfo {
    /// The name that the policy declares.
    pub name: Arc<str>,
    /// The version that the policy declares.
    pub version: Arc<str>,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Digest of its settings; `None`: it has none.
    pub settings_digest: Option<Digest>,
    /// The world it fills.
    pub world: World,
    /// Source of the policy's bytes.
    pub origin: Origin,
    /// The facts it asked for at load.
    pub wants: Wants,
    /// Whether it reads and writes the slot's state.
    pub remembers: bool,
    /// Whether it observes the outcomes of requests.
    pub learns: bool,
}

/// Outcome of a request whose policy gives no usable answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The native fallback decides.
    #[default]
    Fallback,
    /// Status 429 with a time to retry.
    Shed,
    /// Status 503.
    Reject,
}

/// Why a policy gave no usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The policy returned its own error.
    #[error("policy error: {0}")]
    Error(String),
    /// The guest trapped.
    #[error("trap: {0}")]
    Trap(String),
    /// The guest ran past its deadline and was stopped.
    #[error("stopped after {} ms of CPU time ({key})", millis(.limit))]
    Timeout {
        /// CPU time that the call had.
        limit: Duration,
        /// Key of the configuration that sets it.
        key: &'static str,
    },
    /// The guest asked for more memory than it may have.
    #[error("needs more than {limit} bytes of memory (policies.memory_bytes)")]
    Memory {
        /// Largest linear memory of an instance, bytes.
        limit: usize,
    },
    /// The answer broke the contract: row out of range, non-finite cost, wrong length.
    #[error("invalid answer: {0}")]
    Invalid(String),
    /// Every warm instance is busy or being rebuilt; the policy was not called.
    #[error("no instance ready")]
    NotReady,
}

/// A call that ran past its deadline, for tests.
#[cfg(test)]
pub(crate) const TIMEOUT: Failure =
    Failure::Timeout { limit: Duration::from_millis(2), key: "policies.deadline" };

fn millis(time: &Duration) -> f64 {
    u32::try_from(time.as_micros()).map_or(f64::INFINITY, f64::from) / 1e3
}

/// A loaded policy. A function its world lacks answers [`Failure::Invalid`].
///
/// Calls are synchronous, bounded by the policy's deadline, and never wait for a compile, a file or a reload.
pub trait Policy: Send + Sync + fmt::Debug {
    /// Returns the policy's identity.
    fn info(&self) -> &PolicyInfo;

    /// World `filter`: writes the surviving rows to `kept` (cleared first). Not yet checked.
    ///
    /// # Errors
    /// [`Failure`] when there is no usable answer.
    fn keep(
        &self,
        _context: &mut DecisionContext<'_>,
        _call: &Call,
        _facts: &[u32],
        _kept: &mut Vec<u32>,
    ) -> Result<(), Failure> {
        Err(self.lacks("keep"))
    }

    /// World `scorer`: writes one cost per row to `costs` (cleared first). Not yet checked.
    ///
    /// # Errors
    /// [`Failure`] when there is no usable answer.
    fn score(
        &self,
        _context: &mut DecisionContext<'_>,
        _call: &Call,
        _facts: &[u32],
        _costs: &mut Vec<f32>,
    ) -> Result<(), Failure> {
        Err(self.lacks("score"))
    }

    /// World `selector`: chooses a row. Not yet checked.
    ///
    /// # Errors
    /// [`Failure`] when there is no usable answer.
    fn select(
        &self,
        _context: &mut DecisionContext<'_>,
        _call: &Call,
        _facts: &[u32],
    ) -> Result<Decision, Failure> {
        Err(self.lacks("select"))
    }

    /// World `decode-override`: `request` are the request facts, `decode` one row of worker facts for the
    /// previewed decode choice, `prefill` the worker facts of all prefill candidates, column by column
    /// (`call.rows` rows).
    ///
    /// # Errors
    /// [`Failure`] when there is no usable answer.
    fn decide(
        &self,
        _context: &mut DecisionContext<'_>,
        _call: &Call,
        _request: &[u32],
        _decode: &[u32],
        _prefill: &[u32],
    ) -> Result<Plan, Failure> {
        Err(self.lacks("decide"))
    }

    /// World `decode-override`: the override in force for the decode leg; `facts` are request facts,
    /// `call.rows` is 0.
    ///
    /// # Errors
    /// [`Failure`] when there is no usable answer.
    fn decode_config(
        &self,
        _context: &mut DecisionContext<'_>,
        _call: &Call,
        _facts: &[u32],
    ) -> Result<RouterConfigOverride, Failure> {
        Err(self.lacks("decode-config"))
    }

    /// Any world, when the policy [learns](PolicyInfo::learns): outcomes of decisions of its slot, oldest
    /// first. Never called while a request waits, and by one thread at a time.
    ///
    /// # Errors
    /// [`Failure`] when the call did not complete.
    fn observe(
        &self,
        _context: &mut DecisionContext<'_>,
        _moment: Moment,
        _outcomes: &[ObservedOutcome],
    ) -> Result<(), Failure> {
        Err(self.lacks("observe"))
    }

    /// The failure of a call to a function that this policy's world does not export.
    fn lacks(&self, function: &str) -> Failure {
        let info = self.info();
        Failure::Invalid(format!("`{}` is a {} and exports no `{function}`", info.name, info.world))
    }
}

impl World {
    /// The stable label of this world.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Scorer => "scorer",
            Self::Selector => "selector",
            Self::DecodeOverride => "decode-override",
        }
    }
}

impl Failure {
    /// Stable metric label.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Error(_) => "error",
            Self::Trap(_) => "trap",
            Self::Timeout { .. } => "timeout",
            Self::Memory { .. } => "memory",
            Self::Invalid(_) => "invalid",
            Self::NotReady => "not_ready",
        }
    }
}

impl Digest {
    /// The first 12 hex digits, for logs and receipts.
    #[must_use]
    pub fn short(&self) -> String {
        self.to_string().chars().take(12).collect()
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{self}")
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
