//! What a generation of a slot runs: a native selector, or policies composed.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::policy::{Policy, PolicyInfo};

/// Selectors built into the host (spec F1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NativeMode {
    /// Each candidate in turn.
    RoundRobin,
    /// Uniform.
    Random,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
    /// The fewest active requests.
    LeastLoaded,
    /// The cost of spec G.
    Kv,
    /// An external router chooses by header; a request without a choice is 400.
    Direct,
}

/// How a scorer's costs are brought to one scale before they are weighed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Normalize {
    /// As they are.
    #[default]
    None,
    /// `(c - min) / (max - min)`; all equal: 0.
    MinMax,
    /// Scores in [0, 1], higher is better: clamped, used as `1 - x`.
    Unit,
}

/// How a row is picked from the weighed costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Picker {
    /// The minimum, ties uniform; or softmax when the temperature in force is above 0.
    #[default]
    Min,
    /// `p ~ exp(-(c - min) / ((max - min) * T))`.
    Softmax {
        /// T above 0.
        temperature: f32,
    },
    /// Probability in proportion to `max - c`; all equal: uniform.
    WeightedRandom,
}

/// One scorer of a slot with its weight.
#[derive(Clone, Debug)]
pub struct WeightedScorer {
    /// The loaded scorer.
    pub policy: Arc<dyn Policy>,
    /// Multiplies its normalized costs.
    pub weight: f32,
    /// Scale of its costs.
    pub normalize: Normalize,
}

/// What a generation runs.
#[derive(Clone, Debug)]
pub enum Program {
    /// A native selector; for the decode-override slot: the native default of spec D2 and D4.
    Native(NativeMode),
    /// Filters in order, then one selector.
    Selector {
        /// Run in order, each on what the one before left.
        filters: Vec<Arc<dyn Policy>>,
        /// Chooses among the rest.
        selector: Arc<dyn Policy>,
    },
    /// Filters in order, then weighed scorers and a picker.
    Scorers {
        /// Run in order, each on what the one before left.
        filters: Vec<Arc<dyn Policy>>,
        /// At least one.
        scorers: Vec<WeightedScorer>,
        /// Picks from the weighed costs.
        picker: Picker,
    },
    /// A decode override.
    DecodeOverride(Arc<dyn Policy>),
}

impl Program {
    /// The policies it calls, in order.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<dyn Policy>> {
        let (filters, scorers, last): (&[_], &[_], _) = match self {
            Self::Native(_) => (&[], &[], None),
            Self::Selector { filters, selector } => (filters, &[], Some(selector)),
            Self::Scorers { filters, scorers, .. } => (filters, scorers, None),
            Self::DecodeOverride(policy) => (&[], &[], Some(policy)),
        };
        filters.iter().chain(scorers.iter().map(|scorer| &scorer.policy)).chain(last)
    }

    /// The policy that ranks, which gives the program its name: the selector, the first scorer, or the decode override.
    #[must_use]
    pub fn ranker(&self) -> Option<&PolicyInfo> {
        match self {
            Self::Native(_) => None,
            Self::Selector { selector, .. } => Some(selector.info()),
            Self::Scorers { scorers, .. } => scorers.first().map(|scorer| scorer.policy.info()),
            Self::DecodeOverride(policy) => Some(policy.info()),
        }
    }
}
