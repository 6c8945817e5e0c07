//! The program of a generation: a native selector, or a composition of policies.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::policy::{Policy, PolicyInfo};

/// Selectors built into the host (F1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NativeMode {
    /// Each candidate in turn.
    RoundRobin,
    /// A random candidate, uniformly.
    Random,
    /// The less loaded of two candidates drawn at random.
    PowerOfTwo,
    /// The fewest active requests.
    LeastLoaded,
    /// The native cost (G).
    Kv,
    /// An external router chooses by header. A request without that header is refused with status 400.
    Direct,
}

/// Normalization of a scorer's costs before they are weighted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Normalize {
    /// Leaves the costs unchanged.
    #[default]
    None,
    /// `(c - min) / (max - min)`; all equal: 0.
    MinMax,
    /// Scores in [0, 1], higher is better: clamped, used as `1 - x`.
    Unit,
}

/// Picks a row from the weighted costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Picker {
    /// The minimum, ties uniform; or softmax when the decision's temperature is above 0.
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
    /// Normalization of its costs.
    pub normalize: Normalize,
}

/// The program of a generation.
#[derive(Clone, Debug)]
pub enum Program {
    /// A native selector; for the decode-override slot: the native default (D2, D4).
    Native(NativeMode),
    /// Filters in order, then one selector.
    Selector {
        /// Run in order, each on the rows that the previous one kept.
        filters: Vec<Arc<dyn Policy>>,
        /// Chooses among the remaining rows.
        selector: Arc<dyn Policy>,
    },
    /// Filters in order, then weighted scorers and a picker.
    Scorers {
        /// Run in order, each on the rows that the previous one kept.
        filters: Vec<Arc<dyn Policy>>,
        /// At least one.
        scorers: Vec<WeightedScorer>,
        /// Picks from the weighted costs.
        picker: Picker,
    },
    /// A decode override.
    DecodeOverride(Arc<dyn Policy>),
}

impl Program {
    /// The policies in call order.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<dyn Policy>> {
        let (filters, scorers, last): (&[_], &[_], _) = match self {
            Self::Native(_) => (&[], &[], None),
            Self::Selector { filters, selector } => (filters, &[], Some(selector)),
            Self::Scorers { filters, scorers, .. } => (filters, scorers, None),
            Self::DecodeOverride(policy) => (&[], &[], Some(policy)),
        };
        filters.iter().chain(scorers.iter().map(|scorer| &scorer.policy)).chain(last)
    }

    /// The filters, in the order they run.
    #[must_use]
    pub fn filters(&self) -> &[Arc<dyn Policy>] {
        match self {
            Self::Selector { filters, .. } | Self::Scorers { filters, .. } => filters,
            Self::Native(_) | Self::DecodeOverride(_) => &[],
        }
    }

    /// Returns the program with `filters` in the place of its first `count` ones. `None`: it takes no
    /// filters.
    #[must_use]
    pub fn with_filters(&self, count: usize, filters: &[Arc<dyn Policy>]) -> Option<Self> {
        let rest = self.filters().iter().skip(count);
        let filters: Vec<_> = filters.iter().chain(rest).cloned().collect();
        match self {
            Self::Selector { selector, .. } => Some(Self::Selector { filters, selector: selector.clone() }),
            Self::Scorers { scorers, picker, .. } => {
                Some(Self::Scorers { filters, scorers: scorers.clone(), picker: *picker })
            }
            Self::Native(_) | Self::DecodeOverride(_) => filters.is_empty().then(|| self.clone()),
        }
    }

    /// The policy that ranks and names the program: the selector, the first scorer, or the decode override.
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
