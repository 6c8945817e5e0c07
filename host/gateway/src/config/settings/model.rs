//! Settings of a model.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use pointsman_routing::{BusyByLeg, SlotKind};

use crate::config::{LegOrder, Model, SlotEntry, TokenSource};

/// Settings of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelSettings {
    /// Source of token ids; `None`: prompts are measured in bytes.
    pub tokenizer: Option<TokenSource>,
    /// How long a request waits for an engine's token ids.
    pub tokenizer_timeout: Duration,
    /// Memory limit of cached tokenizations in bytes.
    pub tokenizer_cache_bytes: usize,
    /// Refuse a request without a prefill worker; `None`: as `routing.enforce_disagg`.
    pub enforce_disagg: Option<bool>,
    /// Which leg is routed first; `None`: as `routing.order`.
    pub order: Option<LegOrder>,
    /// Prefill locally after remote prefill failed for good; `None`: as `routing.local_fallback`.
    pub local_fallback: Option<bool>,
    /// Thresholds beyond which a worker is busy, by leg.
    pub busy: BusyByLeg,
    /// Content of the model's own slots.
    pub slots: BTreeMap<SlotKind, SlotEntry>,
}

impl ModelSettings {
    /// The settings that a section of the file states.
    pub(in crate::config) fn of(model: &Model) -> Self {
        let Model {
            tokenizer,
            tokenizer_timeout,
            tokenizer_cache_bytes,
            enforce_disagg,
            order,
            local_fallback,
            busy,
            slots,
        } = model.clone();
        Self {
            tokenizer,
            tokenizer_timeout,
            tokenizer_cache_bytes,
            enforce_disagg,
            order,
            local_fallback,
            busy,
            slots,
        }
    }

    /// Settings of a model that the file does not mention.
    pub(in crate::config) fn unset() -> Self {
        Self::of(&Model::default())
    }

    /// Appends the dotted path of each key whose value differs in `new`.
    pub(super) fn changed_keys(&self, new: &Self, model: &str, paths: &mut Vec<String>) {
        let Self {
            tokenizer,
            tokenizer_timeout,
            tokenizer_cache_bytes,
            enforce_disagg,
            order,
            local_fallback,
            busy,
            slots,
        } = self;
        let keys = [
            ("tokenizer", *tokenizer != new.tokenizer),
            ("tokenizer_timeout", *tokenizer_timeout != new.tokenizer_timeout),
            ("tokenizer_cache_bytes", *tokenizer_cache_bytes != new.tokenizer_cache_bytes),
            ("enforce_disagg", *enforce_disagg != new.enforce_disagg),
            ("order", *order != new.order),
            ("local_fallback", *local_fallback != new.local_fallback),
            ("busy", *busy != new.busy),
            // A slot that only one of the two has needs a restart: it is one of the static keys.
            ("slots", slots.iter().any(|(kind, entry)| new.slots.get(kind).is_some_and(|new| new != entry))),
        ];
        let changed = keys.into_iter().filter(|(_, changed)| *changed);
        paths.extend(changed.map(|(key, _)| format!("models.{model}.{key}")));
    }
}

/// Returns the dotted paths of the slots that only one of two configurations has.
pub(super) fn changed_slots(
    before: &BTreeMap<String, BTreeSet<SlotKind>>,
    after: &BTreeMap<String, BTreeSet<SlotKind>>,
) -> Vec<String> {
    let paths = |models: &BTreeMap<String, BTreeSet<SlotKind>>| -> BTreeSet<String> {
        let of = |(model, kinds): (&String, &BTreeSet<SlotKind>)| -> Vec<String> {
            kinds.iter().map(|kind| format!("models.{model}.slots.{kind}")).collect()
        };
        models.iter().flat_map(of).collect()
    };
    paths(before).symmetric_difference(&paths(after)).cloned().collect()
}
