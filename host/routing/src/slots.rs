//! All slots of a gateway: four shared by all models, and the slots of individual models.

use std::{collections::HashMap, sync::Arc};

use pointsman_workers::ModelName;

use crate::slot::{Slot, SlotKind};

/// One slot of each kind.
#[derive(Clone, Debug)]
pub struct SlotSet {
    prefill: Arc<Slot>,
    decode: Arc<Slot>,
    aggregated: Arc<Slot>,
    decode_override: Arc<Slot>,
}

/// Every slot, found by model and kind. The set of slots is fixed at start; their content is not.
#[derive(Clone, Debug)]
pub struct Slots {
    all_models: SlotSet,
    by_model: HashMap<ModelName, HashMap<SlotKind, Arc<Slot>>>,
}

impl SlotSet {
    /// Builds one slot of each kind with `make`.
    pub fn build(mut make: impl FnMut(SlotKind) -> Slot) -> Self {
        Self {
            prefill: Arc::new(make(SlotKind::Prefill)),
            decode: Arc::new(make(SlotKind::Decode)),
            aggregated: Arc::new(make(SlotKind::Aggregated)),
            decode_override: Arc::new(make(SlotKind::DecodeOverride)),
        }
    }

    /// Selects the shared slots among `slots`; `None` when a kind is missing.
    #[must_use]
    pub fn of(slots: &[Arc<Slot>]) -> Option<Self> {
        let find = |kind| slots.iter().find(|slot| slot.model().is_none() && slot.kind() == kind).cloned();
        Some(Self {
            prefill: find(SlotKind::Prefill)?,
            decode: find(SlotKind::Decode)?,
            aggregated: find(SlotKind::Aggregated)?,
            decode_override: find(SlotKind::DecodeOverride)?,
        })
    }

    fn get(&self, kind: SlotKind) -> &Arc<Slot> {
        match kind {
            SlotKind::Prefill => &self.prefill,
            SlotKind::Decode => &self.decode,
            SlotKind::Aggregated => &self.aggregated,
            SlotKind::DecodeOverride => &self.decode_override,
        }
    }
}

impl Slots {
    /// The shared slots, and those of `own` that belong to one model.
    #[must_use]
    pub fn new(all_models: SlotSet, own: impl IntoIterator<Item = Arc<Slot>>) -> Self {
        let mut by_model: HashMap<ModelName, HashMap<SlotKind, Arc<Slot>>> = HashMap::new();
        for slot in own {
            if let Some(model) = slot.model().cloned() {
                by_model.entry(model).or_default().insert(slot.kind(), slot);
            }
        }
        Self { all_models, by_model }
    }

    /// Returns the slot of a model: its own, or the shared one.
    #[must_use]
    pub fn get(&self, model: &ModelName, kind: SlotKind) -> &Arc<Slot> {
        self.get_or_parent(model, None, kind)
    }

    /// Like [`Slots::get`]. An adapter of `parent` has the parent's slot before the shared one.
    #[must_use]
    pub(crate) fn get_or_parent(
        &self,
        model: &ModelName,
        parent: Option<&ModelName>,
        kind: SlotKind,
    ) -> &Arc<Slot> {
        let own = |model: &ModelName| self.by_model.get(model)?.get(&kind);
        own(model).or_else(|| own(parent?)).unwrap_or_else(|| self.all_models.get(kind))
    }

    /// All slots, the shared ones first.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Slot>> {
        SlotKind::ALL
            .into_iter()
            .map(|kind| self.all_models.get(kind))
            .chain(self.by_model.values().flat_map(HashMap::values))
    }
}
