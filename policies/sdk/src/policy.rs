//! The traits a policy implements and the types its answers are made of. Mirrors `wit/policy.wit`.

use serde::{Deserialize, de::DeserializeOwned};

use crate::view::{Facts, Wants};

/// Which upstream call of a request is being routed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leg {
    /// Prefill and decode on one worker.
    Aggregated,
    /// The prompt's KV blocks are computed.
    #[default]
    Prefill,
    /// Tokens are generated from transferred blocks.
    Decode,
}

/// What every function is told besides facts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Call {
    /// The leg that is being routed.
    pub leg: Leg,
    /// 0 for the first try of the leg, one more for each retry.
    pub attempt: u32,
    /// Number of candidate rows.
    pub rows: u32,
    /// The only randomness; see [`crate::Rng`].
    pub seed: u64,
    /// The only clock: microseconds since the Unix epoch.
    pub now_us: u64,
}

/// Why a policy has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The question is outside what this policy was made for.
    Unsupported(String),
    /// The policy found itself in a state it cannot answer from.
    Internal(String),
}

/// Refuse the request now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shed {
    /// 429, 503 or 529.
    pub status: u16,
    /// Text for the client.
    pub reason: String,
}

/// A selector's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// This row.
    Choose {
        /// Row number.
        row: u32,
        /// One finite cost a row when the fact `explain` is 1, else empty.
        costs: Vec<f32>,
        /// Why, in the policy's own words.
        reason: Option<String>,
    },
    /// No opinion: the native fallback decides.
    Abstain,
    /// Refuse the request now.
    Shed(Shed),
}

/// Where the prompt is prefilled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// On a prefill worker.
    Remote,
    /// On the decode worker.
    Local,
    /// Refuse the request now.
    Shed(Shed),
}

/// Fields of the router config to replace for the decode leg; `None` keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterConfigOverride {
    /// Credit for a block cached on the device.
    pub overlap_score_credit: Option<f64>,
    /// Weight of the prefill term.
    pub prefill_load_scale: Option<f64>,
    /// Softmax temperature of the picker.
    pub temperature: Option<f64>,
    /// Whether equal blocks count as shared.
    pub assume_kv_reuse: Option<bool>,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: Option<bool>,
    /// Credit multiplier for caches shared between workers.
    pub shared_cache_multiplier: Option<f64>,
}

/// What became of one decision: the request it was made for is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The decision as receipts name it; 0 when it was not recorded.
    pub decision: u64,
    /// The seed of the call that decided.
    pub seed: u64,
    /// The leg; of a decode override, the leg that answered.
    pub leg: Leg,
    /// 0 for the leg's first try.
    pub attempt: u32,
    /// The worker that was chosen.
    pub worker_id: u64,
    /// Its rank.
    pub dp_rank: u32,
    /// The policy chose it; else a hint, a session or the fallback did.
    pub by_policy: bool,
    /// The same leg was decided again later: this worker did not serve the request.
    pub retried: bool,
    /// HTTP status of the request; 499 when the client left.
    pub status: u16,
    /// Time to first token from the request's arrival, microseconds.
    pub ttft_us: Option<u32>,
    /// Mean time between tokens, microseconds.
    pub itl_us: Option<u32>,
    /// The whole request, microseconds.
    pub duration_us: u64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Prompt tokens that were taken to be cached; `None` when nobody looked.
    pub cached_predicted: Option<u32>,
    /// Prompt tokens that the engine says were cached; `None` when it did not say.
    pub cached_reported: Option<u32>,
}

impl Default for Outcome {
    /// A request that went well, by the policy's choice.
    fn default() -> Self {
        Self {
            decision: 0,
            seed: 0,
            leg: Leg::default(),
            attempt: 0,
            worker_id: 0,
            dp_rank: 0,
            by_policy: true,
            retried: false,
            status: 200,
            ttft_us: None,
            itl_us: None,
            duration_us: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            cached_predicted: None,
            cached_reported: None,
        }
    }
}

/// When outcomes are observed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moment {
    /// Microseconds since the Unix epoch.
    pub now_us: u64,
    /// The only randomness; see [`crate::Rng`].
    pub seed: u64,
}

/// Settings of a policy that has none; anything else than `{}` is refused.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoSettings {}

/// Who a policy is and what it wants.
pub trait Policy: Sized + Send + Sync + 'static {
    /// Short name in lower case.
    const NAME: &'static str;
    /// Its version.
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    /// What the operator may set; deny unknown fields, so that a misspelt one is told.
    type Settings: DeserializeOwned;

    /// Builds the policy and asks for its facts.
    ///
    /// # Errors
    /// A text for the operator, when the settings make no sense.
    fn configure(settings: Self::Settings, wants: &mut Wants) -> Result<Self, String>;

    /// What became of decisions, oldest first; called when the policy is exported with `learning`, off the request path. The
    /// instance that observes never decides: what is learnt goes to `state` (feature `state`).
    fn observe(&self, _moment: &Moment, _outcomes: &[Outcome]) {}
}

/// World `filter`.
pub trait Filter: Policy {
    /// The surviving rows, rising.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn keep(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error>;
}

/// World `scorer`.
pub trait Scorer: Policy {
    /// One finite cost a row, lower is better.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn score(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error>;
}

/// World `selector`.
pub trait Selector: Policy {
    /// Chooses a row.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error>;
}

/// World `decode-override`.
pub trait DecodeOverride: Policy {
    /// Remote or local prefill. `decode` has one row, the decode worker that would be chosen now; `prefill` one row a
    /// prefill candidate; both have the request facts.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn decide(&self, call: &Call, decode: &Facts<'_>, prefill: &Facts<'_>) -> Result<Plan, Error>;

    /// The override for the decode leg; `facts` has request facts only.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn decode_config(&self, call: &Call, facts: &Facts<'_>) -> Result<RouterConfigOverride, Error>;
}

impl Decision {
    /// Chooses a row without more words.
    #[must_use]
    pub fn row(row: usize) -> Self {
        Self::Choose { row: u32::try_from(row).unwrap_or(u32::MAX), costs: Vec::new(), reason: None }
    }
}

/// Parses settings and configures a policy, as a host does at load.
///
/// # Errors
/// What is wrong with the settings.
pub fn configure<P: Policy>(settings: &str) -> Result<(P, Wants), String> {
    let text = if settings.trim().is_empty() { "{}" } else { settings };
    let settings = serde_json::from_str(text).map_err(|error| format!("settings: {error}"))?;
    let mut wants = Wants::default();
    let policy = P::configure(settings, &mut wants)?;
    Ok((policy, wants))
}
