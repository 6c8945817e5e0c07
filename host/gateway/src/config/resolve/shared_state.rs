//! `shared_state` of slots.

use std::collections::BTreeMap;

use pointsman_routing::SlotKind;

use super::Problems;
use crate::config::{Replicas, settings::ModelSettings, slots::SlotEntry};

impl Problems {
    /// Refuses shared state without an exchange with other gateways.
    pub(super) fn shared_state(
        &mut self,
        replicas: &Replicas,
        slots: &BTreeMap<SlotKind, SlotEntry>,
        models: &BTreeMap<String, ModelSettings>,
    ) {
        if !replicas.servers.is_empty() {
            return;
        }
        let all = slots.iter().map(|slot| ("policies".to_owned(), slot));
        let own = models
            .iter()
            .flat_map(|(name, model)| model.slots.iter().map(move |slot| (format!("models.{name}"), slot)));
        for (section, (kind, entry)) in all.chain(own) {
            if entry.shared_state {
                let path = format!("{section}.slots.{kind}.shared_state");
                self.add(path, "needs other gateways: add `replicas.servers`, or remove the key");
            }
        }
    }
}
