//! Contents of slots as the operator configured them: policies by name, scorer weights, and trials.
//!
//! A spec holds names and no code. The manager reads the files that it names and builds one program of them,
//! or none.

use std::path::PathBuf;

use pointsman_routing::{NativeMode, Normalize, OnFailure, Picker};

use crate::access::{Access, Grant};

/// One policy of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the configuration.
    pub name: String,
    /// File, relative to the policy directory. While it exists it is used instead of the built-in policy.
    pub file: Option<PathBuf>,
    /// Built-in policy of this name.
    pub embedded: Option<&'static [u8]>,
    /// JSON object passed to `configure`.
    pub settings: String,
}

/// A scorer with its weight.
#[derive(Clone, Debug, PartialEq)]
pub struct ScorerPart {
    /// The scorer.
    pub part: Part,
    /// Factor of its normalized costs.
    pub weight: f32,
    /// How its costs are normalized.
    pub normalize: Normalize,
}

/// How a row is chosen among those that the filters keep.
#[derive(Clone, Debug, PartialEq)]
pub enum Rank {
    /// A native selector. In the decode-override slot: the native default.
    Native(NativeMode),
    /// A selector, a single scorer, or a decode override.
    Policy(Part),
    /// Weighted scorers and a picker.
    Scorers {
        /// At least one.
        scorers: Vec<ScorerPart>,
        /// Picks a row by the weighted sums of the costs.
        picker: Picker,
    },
    /// The ranking policy in the file of the active lane, behind a filter in the file of a trial. The manager
    /// makes it for a trial without a ranking of its own.
    File {
        /// The file of the active lane, relative to the policy directory.
        file: PathBuf,
        /// Settings and grants of the active lane.
        lane: Box<LaneSpec>,
    },
}

/// Which policy in a trial's own file gets the settings of the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InheritedBy {
    /// Any policy.
    Any,
    /// The policy of this name, which the slot names with its settings. Any other gets `{}`, unless the slot
    /// has a file of its own.
    Named(String),
}

/// Content of one lane of a slot. While the lane's own file exists, it replaces `rank`. If it is a filter, it
/// runs after `filters` instead, and `rank` ranks the rows that it keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneSpec {
    /// JSON object passed to `configure` of the policy in the lane's own file.
    pub settings: String,
    /// For a trial without settings of its own, whose `settings` are those of the slot: which policy in its
    /// file gets them.
    pub inherited_by: Option<InheritedBy>,
    /// Grants of its policies.
    pub grants: Vec<Grant>,
    /// Filters, in the order they run, before `rank`.
    pub filters: Vec<Part>,
    /// Built-in ranking without a file. `None` in a trial: the trial exists only while its file does.
    pub rank: Option<Rank>,
    /// Share of the requests that a trial takes part in, 0 to 1.
    pub share: f64,
    /// Salt of the hashes by which policies know names: those in a formula file are hashed.
    pub hash_salt: u64,
}

/// Content of a slot.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotSpec {
    /// The lane that serves.
    pub active: LaneSpec,
    /// The lane that serves a share of the requests.
    pub canary: LaneSpec,
    /// The lane whose choices are only compared.
    pub shadow: LaneSpec,
    /// Reaction to a failure in this slot. `None` uses the router's setting.
    pub on_failure: Option<OnFailure>,
    /// Number of candidates that its policies see at most; `None`: all that are eligible.
    pub max_rows: Option<u32>,
    /// Whether its policies share their state with those of other gateways.
    pub shared_state: bool,
}

impl Part {
    /// Makes a part from a built-in policy, without a file.
    #[must_use]
    pub fn embedded(name: &str, bytes: &'static [u8], settings: String) -> Self {
        Self { name: name.to_owned(), file: None, embedded: Some(bytes), settings }
    }
}

impl LaneSpec {
    /// Makes a lane that runs `rank`, and passes `{}` to a policy in its own file.
    #[must_use]
    pub fn of(rank: Rank) -> Self {
        Self { rank: Some(rank), ..Self::file_only(1.0) }
    }

    /// Makes a trial that exists only while its file does.
    #[must_use]
    pub(crate) fn file_only(share: f64) -> Self {
        let grants = Access::DEFAULT.to_vec();
        Self {
            settings: "{}".to_owned(),
            inherited_by: None,
            grants,
            filters: Vec::new(),
            rank: None,
            share,
            hash_salt: 0,
        }
    }
}

impl SlotSpec {
    /// Makes a slot that runs `rank`. Its trials come from files: a canary serves 5 % of the requests, a
    /// shadow sees all.
    #[must_use]
    pub fn of(rank: Rank) -> Self {
        Self {
            active: LaneSpec::of(rank),
            canary: LaneSpec::file_only(Self::CANARY_SHARE),
            shadow: LaneSpec::file_only(1.0),
            on_failure: None,
            max_rows: None,
            shared_state: false,
        }
    }

    /// Default share of the requests that a canary serves.
    pub const CANARY_SHARE: f64 = 0.05;
}
