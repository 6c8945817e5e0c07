//! What a slot is to run, as the operator wrote it: parts by name, how they are weighed, what is on trial beside.
//!
//! A spec names; it holds no code. The manager reads the files it names and makes a program of them, all or nothing.

use std::path::PathBuf;

use pointsman_routing::{NativeMode, Normalize, OnFailure, Picker};

use crate::access::{Access, Grant};

/// One policy of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// As the operator calls it.
    pub name: String,
    /// Its file, relative to the policy folder. While it is there it wins over the built-in one.
    pub file: Option<PathBuf>,
    /// The built-in policy of this name.
    pub embedded: Option<&'static [u8]>,
    /// JSON object handed to `configure`.
    pub settings: String,
}

/// A scorer with its weight.
#[derive(Clone, Debug, PartialEq)]
pub struct ScorerPart {
    /// The scorer.
    pub part: Part,
    /// Multiplies its normalized costs.
    pub weight: f32,
    /// Scale of its costs.
    pub normalize: Normalize,
}

/// What chooses among the rows that filters left.
#[derive(Clone, Debug, PartialEq)]
pub enum Rank {
    /// A native selector; in the decode-override slot: the native default.
    Native(NativeMode),
    /// A selector, a scorer by itself, or a decode override.
    Policy(Part),
    /// Weighed scorers and a picker.
    Scorers {
        /// At least one.
        scorers: Vec<ScorerPart>,
        /// Picks from the weighed costs.
        picker: Picker,
    },
}

/// What one lane of a slot runs. The lane's own file, while it is there, takes the place of `rank`; a filter in it runs after
/// `filters` and narrows what `rank` then ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneSpec {
    /// JSON object handed to `configure` of the policy in the lane's own file.
    pub settings: String,
    /// What its policies may import.
    pub grants: Vec<Grant>,
    /// Run in order, before anything else.
    pub filters: Vec<Part>,
    /// What ranks while there is no file. A trial may have nothing: then it is one only while its file is there.
    pub rank: Option<Rank>,
    /// Share of requests that a trial takes part in, 0 to 1.
    pub share: f64,
}

/// What a slot runs.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotSpec {
    /// What serves.
    pub active: LaneSpec,
    /// What serves a share of requests.
    pub canary: LaneSpec,
    /// What looks on.
    pub shadow: LaneSpec,
    /// What a failure leads to in this slot; `None`: what the router says.
    pub on_failure: Option<OnFailure>,
}

impl Part {
    /// A built-in policy, whatever the folder holds.
    #[must_use]
    pub fn embedded(name: &str, bytes: &'static [u8], settings: String) -> Self {
        Self { name: name.to_owned(), file: None, embedded: Some(bytes), settings }
    }
}

impl LaneSpec {
    /// A lane that runs `rank`, and hands `{}` to the policy in its file.
    #[must_use]
    pub fn of(rank: Rank) -> Self {
        Self { rank: Some(rank), ..Self::file_only(1.0) }
    }

    /// A trial that there is only while its file is there.
    #[must_use]
    pub fn file_only(share: f64) -> Self {
        let grants = Access::DEFAULT.to_vec();
        Self { settings: "{}".to_owned(), grants, filters: Vec::new(), rank: None, share }
    }
}

impl SlotSpec {
    /// A slot that runs `rank`, with trials only from files: canaries for a twentieth of requests, shadows for all.
    #[must_use]
    pub fn of(rank: Rank) -> Self {
        Self {
            active: LaneSpec::of(rank),
            canary: LaneSpec::file_only(Self::CANARY_SHARE),
            shadow: LaneSpec::file_only(1.0),
            on_failure: None,
        }
    }

    /// Share of requests of a canary that does not say.
    pub const CANARY_SHARE: f64 = 0.05;
}
