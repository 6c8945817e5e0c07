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
