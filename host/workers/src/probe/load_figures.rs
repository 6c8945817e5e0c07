//! Load figures of an engine or a rank, and how engines name their series. No I/O.

use super::exposition::Sample;
use crate::activity::EngineProgress;

/// Load and progress of an engine or of one of its ranks; `None` for figures that are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LoadFigures {
    pub(super) running: Option<u32>,
    pub(super) waiting: Option<u32>,
    pub(super) kv_usage: Option<f32>,
    pub(super) kv_tokens: Option<u64>,
    pub(super) progress: EngineProgress,
}

impl LoadFigures {
    /// Returns whether any load figure is known.
    pub(super) fn has_load(&self) -> bool {
        self.known().contains(&true)
    }

    /// Returns which figures are known, in the order of [`LOAD_NAMES`].
    pub(super) fn known(&self) -> [bool; 3] {
        [self.running.is_some(), self.waiting.is_some(), self.kv_usage.is_some()]
    }

    /// Returns whether requests run or wait, as the engine says.
    pub(super) fn claims_work(&self) -> bool {
        self.running.is_some_and(|running| running > 0) || self.waiting.is_some_and(|waiting| waiting > 0)
    }
}

/// Names of the load figures in `GET /workers` and in the log.
pub(super) const LOAD_NAMES: [&str; 3] = ["running", "waiting", "kv_usage"];

/// Returns the label of the sample's data-parallel rank; empty if it has none.
pub(super) fn rank_label<'a>(sample: &Sample<'a>) -> &'a str {
    sample.label("dp_rank").or_else(|| sample.label("engine")).unwrap_or_default()
}

/// Returns whether the series counts requests of one priority only, which are in the total, too (SGLang).
pub(super) fn is_part(sample: &Sample<'_>) -> bool {
    sample.label("priority").is_some_and(|priority| !priority.is_empty())
}

/// Returns whether `name` is an engine's form of the name `known`.
pub(super) fn is(name: &str, known: &str) -> bool {
    let name = name.strip_prefix("ray_").unwrap_or(name);
    let Some((engine, figure)) = known.split_once(':') else { return false };
    let Some(rest) = name.strip_prefix(engine) else { return false };
    rest.strip_prefix([':', '_']) == Some(figure)
}
