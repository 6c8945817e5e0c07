//! The traits that a policy implements, and the types of its arguments and answers. Mirrors `wit/policy.wit`.

use serde::{Deserialize, de::DeserializeOwned};

use crate::view::{Facts, Wants};

/// The part of a request that is being routed to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leg {
    /// One worker computes the prompt and generates the tokens.
    Aggregated,
    /// The worker computes the prompt's KV blocks.
    #[default]
    Prefill,
    /// The worker generates tokens from KV blocks that it receives.
    Decode,
}

/// Arguments that every call has besides facts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Call {
    /// Leg that is being routed.
    pub leg: Leg,
    /// 0 for the first attempt of the leg, plus 1 for each retry.
    pub attempt: u32,
    /// Number of candidates, which is the length of every column of worker facts.
    pub rows: u32,
    /// Seed for [`crate::Rng`]. Take randomness from it only, or the policy is refused as not deterministic.
    pub seed: u64,
    /// Time of the call, microseconds since the Unix epoch. Policies have no other clock.
    pub now_us: u64,
}

/// Why a call has no answer. The host counts a failure, and the slot's fallback decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The policy does not support the call, with the reason.
    Unsupported(String),
    /// The policy failed, with the reason.
    Internal(String),
}

/// Refuses a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shed {
    /// HTTP status for the client: 429, 503 or 529.
    pub status: u16,
    /// Message for the client.
    pub reason: String,
}

/// Answer of a [`Selector`].
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Chooses a candidate.
    Choose {
        /// Number of the candidate's row, from 0.
        row: u32,
        /// Cost of each candidate, finite, lower is better. Needed when the fact `explain` is 1, else it may
        /// be empty.
        costs: Vec<f32>,
        /// Explanation for receipts and the decision record.
        reason: Option<String>,
    },
    /// Leaves the choice to the slot's fallback.
    Abstain,
    /// Refuses the request.
    Shed(Shed),
}

/// Answer of [`DecodeOverride::decide`]: where the prompt is prefilled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// On a prefill worker, which hands the KV blocks over.
    Remote,
    /// On the decode worker itself.
    Local,
    /// Refuses the request.
    Shed(Shed),
}

/// Router settings for the decode leg of one request. `None` keeps the configured value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterConfigOverride {
    /// Credit for each block of the prompt that is cached on the device.
    pub overlap_score_credit: Option<f64>,
    /// Weight of prefill load in the cost.
    pub prefill_load_scale: Option<f64>,
    /// Temperature of the softmax picker; 0 picks the lowest cost.
    pub temperature: Option<f64>,
    /// Whether requests with equal blocks count as sharing them.
    pub assume_kv_reuse: Option<bool>,
    /// Whether tokens in prefill count as load.
    pub track_prefill_tokens: Option<bool>,
    /// Factor of the credit for caches that workers share.
    pub shared_cache_multiplier: Option<f64>,
}

/// Result of a request that the policy routed, for [`Policy::observe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of the decision in receipts; 0 when it was not recorded.
    pub decision: u64,
    /// Seed of the call that decided.
    pub seed: u64,
    /// Leg. For a decode override: the leg that produced the answer.
    pub leg: Leg,
    /// 0 for the first attempt of the leg, plus 1 for each retry.
    pub attempt: u32,
    /// Id of the chosen worker.
    pub worker_id: u64,
    /// Data-parallel rank of the chosen worker.
    pub dp_rank: u32,
    /// Whether the policy chose the worker. Otherwise a hint, a session or the fallback did.
    pub by_policy: bool,
    /// Whether the leg was retried elsewhere, so that this worker did not serve the request.
    pub retried: bool,
    /// HTTP status of the request; 499 when the client disconnected.
    pub status: u16,
    /// Time from the request's arrival to the first token, microseconds.
    pub ttft_us: Option<u32>,
    /// Mean time between output tokens, microseconds.
    pub itl_us: Option<u32>,
    /// Duration of the request, microseconds.
    pub duration_us: u64,
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
    /// Number of output tokens.
    pub output_tokens: u32,
    /// Number of prompt tokens that the gateway predicted to be cached. `None`: there was no lookup.
    pub cached_predicted: Option<u32>,
    /// Number of prompt tokens that the engine reported as cached. `None`: it reported none.
    pub cached_reported: Option<u32>,
}

impl Default for Outcome {
    /// Returns a successful request on a worker that the policy chose.
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

/// Time and randomness of one [`Policy::observe`] call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moment {
    /// Time, microseconds since the Unix epoch.
    pub now_us: u64,
    /// Seed for [`crate::Rng`].
    pub seed: u64,
}

/// Settings of a policy without settings. Any field is an error.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoSettings {}

/// Name, settings and facts of a policy.
///
/// ```
/// use pointsman_policy_sdk::{Column, Policy, Wants, facts};
///
/// #[derive(serde::Deserialize)]
/// #[serde(deny_unknown_fields, rename_all = "kebab-case")]
/// struct Settings { limit: u32 }
///
/// struct QueueLimit { limit: u32, queue: Column<u32> }
///
/// impl Policy for QueueLimit {
///     const NAME: &'static str = "queue-limit";
///     type Settings = Settings;
///     fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
///         if settings.limit == 0 {
///             return Err("limit: 0 keeps no worker; use at least 1".into());
///         }
///         Ok(Self { limit: settings.limit, queue: wants.worker(facts::ENGINE_QUEUE) })
///     }
/// }
/// ```
pub trait Policy: Sized + Send + Sync + 'static {
    /// Name in metrics, receipts and log lines: 1 to 64 letters, digits, `-`, `_`, `.` and `+`.
    const NAME: &'static str;
    /// Version, under the same rule as the name. Empty: the version of the crate that exports the policy.
    const VERSION: &'static str = "";
    /// Settings of the operator. Use `deny_unknown_fields`, so that a misspelt name is an error.
    type Settings: DeserializeOwned;

    /// Builds the policy from its settings, and asks for its facts. Called once for each instance.
    ///
    /// # Errors
    /// A message for the operator when the settings are invalid. The policy is then refused.
    fn configure(settings: Self::Settings, wants: &mut Wants) -> Result<Self, String>;

    /// Learns from finished requests, oldest first. Called only when the policy is exported with `learning`,
    /// and never while a request waits. The instance that observes does not route: pass what it learns
    /// through [`crate::state`] (feature `state`).
    fn observe(&self, _moment: &Moment, _outcomes: &[Outcome]) {}
}

/// World `filter`: keeps some of the candidates.
///
/// ```
/// # use pointsman_policy_sdk::{Call, Column, Error, Facts, Filter, NoSettings, Policy, Wants, facts};
/// # struct Loaded(Column<u32>);
/// # impl Policy for Loaded {
/// #     const NAME: &'static str = "loaded";
/// #     type Settings = NoSettings;
/// #     fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
/// #         Ok(Self(wants.worker(facts::LORA_LOADED)))
/// #     }
/// # }
/// impl Filter for Loaded {
///     fn keep(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error> {
///         let rows = (0_u32..).zip(self.0.slice(facts));
///         Ok(rows.filter(|(_, loaded)| **loaded == 1).map(|(row, _)| row).collect())
///     }
/// }
/// ```
pub trait Filter: Policy {
    /// Returns the rows to keep, in rising order without duplicates.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn keep(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error>;
}

/// World `scorer`: gives every candidate a cost.
///
/// ```
/// # use pointsman_policy_sdk::{Call, Column, Error, Facts, NoSettings, Policy, Scorer, Wants, facts};
/// # struct KvUsage(Column<f32>);
/// # impl Policy for KvUsage {
/// #     const NAME: &'static str = "kv-usage";
/// #     type Settings = NoSettings;
/// #     fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
/// #         Ok(Self(wants.worker(facts::KV_USAGE)))
/// #     }
/// # }
/// impl Scorer for KvUsage {
///     fn score(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error> {
///         Ok(self.0.slice(facts).to_vec())
///     }
/// }
/// ```
pub trait Scorer: Policy {
    /// Returns one finite cost for each row, in order. Lower is better.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn score(&self, call: &Call, facts: &Facts<'_>) -> Result<Vec<f32>, Error>;
}

/// World `selector`: chooses a candidate. The example of this crate is one.
pub trait Selector: Policy {
    /// Chooses a row, abstains, or refuses the request.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error>;
}

/// World `decode-override`: decides between remote and local prefill, and sets the router for the decode leg.
///
/// ```
/// # use pointsman_policy_sdk::{
/// #     Call, DecodeOverride, Error, Facts, NoSettings, Plan, Policy, RouterConfigOverride, Slot, Wants,
/// facts,
/// # };
/// # struct ShortIsLocal(Slot<u32>);
/// # impl Policy for ShortIsLocal {
/// #     const NAME: &'static str = "short-is-local";
/// #     type Settings = NoSettings;
/// #     fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
/// #         Ok(Self(wants.request(facts::PROMPT_TOKENS)))
/// #     }
/// # }
/// impl DecodeOverride for ShortIsLocal {
///     fn decide(&self, _: &Call, decode: &Facts<'_>, _: &Facts<'_>) -> Result<Plan, Error> {
///         Ok(if self.0.get(decode) < 512 { Plan::Local } else { Plan::Remote })
///     }
///
///     fn decode_config(&self, _: &Call, _: &Facts<'_>) -> Result<RouterConfigOverride, Error> {
///         Ok(RouterConfigOverride::default())
///     }
/// }
/// ```
pub trait DecodeOverride: Policy {
    /// Decides where the prompt is prefilled. `decode` has one row: the decode worker that would be chosen
    /// now, or no row when there is none. `prefill` has one row for each prefill candidate. Both have the
    /// request facts.
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn decide(&self, call: &Call, decode: &Facts<'_>, prefill: &Facts<'_>) -> Result<Plan, Error>;

    /// Returns the router settings for the decode leg after a remote prefill. `facts` has request facts and
    /// no rows. By default they are [`RouterConfigOverride::after_remote_prefill`].
    ///
    /// # Errors
    /// [`Error`] when there is no answer.
    fn decode_config(&self, _call: &Call, _facts: &Facts<'_>) -> Result<RouterConfigOverride, Error> {
        Ok(RouterConfigOverride::after_remote_prefill())
    }
}

impl RouterConfigOverride {
    /// Returns the settings for a decode worker that receives all blocks, whatever it has cached, and does
    /// not prefill.
    #[must_use]
    pub fn after_remote_prefill() -> Self {
        Self {
            overlap_score_credit: Some(0.0),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(false),
            ..Self::default()
        }
    }
}

impl Decision {
    /// Chooses a row, without costs and reason.
    #[must_use]
    pub fn row(row: usize) -> Self {
        Self::Choose { row: u32::try_from(row).unwrap_or(u32::MAX), costs: Vec::new(), reason: None }
    }

    /// Adds an explanation of the choice for receipts. The host keeps the first 512 bytes.
    #[must_use]
    pub fn because(self, reason: impl Into<String>) -> Self {
        match self {
            Self::Choose { row, costs, .. } => Self::Choose { row, costs, reason: Some(reason.into()) },
            other => other,
        }
    }
}

/// Parses `settings`, a JSON object, and configures a policy, as the host does when it loads one. Empty text
/// stands for `{}`.
///
/// # Errors
/// A message that says what is wrong with the settings.
pub fn configure<P: Policy>(settings: &str) -> Result<(P, Wants), String> {
    let text = if settings.trim().is_empty() { "{}" } else { settings };
    let settings = serde_json::from_str(text).map_err(|error| crate::settings::problem(text, &error))?;
    let mut wants = Wants::default();
    let policy = P::configure(settings, &mut wants)?;
    Ok((policy, wants))
}
