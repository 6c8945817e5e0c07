//! Which streams may be continued: what models and tenants say about it.

use std::collections::HashMap;

use pointsman_workers::{ModelName, Snapshot, name_hash};

use crate::config::{ALL_TENANTS, ContinuationForm, settings::Settings as Configured};

/// Maximum size of all transcripts together, bytes: some 10,000 streams with answers of 1,000 tokens. A
/// stream that does not fit is not continued.
pub(crate) const MAX_TRANSCRIPTS: usize = 64 * 1024 * 1024;

/// What models and tenants say about continuations.
#[derive(Clone, Debug)]
pub(crate) struct ContinuationRules {
    forms: HashMap<ModelName, ContinuationForm>,
    /// Limits of the tenants with a section of their own, by the hash of their names.
    tenants: HashMap<u64, Option<u32>>,
    others: Option<u32>,
}

impl ContinuationRules {
    pub(super) fn of(configured: &Configured) -> Self {
        let forms = configured.models.iter();
        let forms = forms.filter_map(|(name, model)| Some((ModelName::new(name), model.continuation?)));
        let others = configured.tenants.get(ALL_TENANTS).and_then(|entry| entry.continuations);
        let salt = configured.routing.hash_salt.expose();
        let listed = configured.tenants.iter().filter(|(name, _)| *name != ALL_TENANTS);
        Self {
            forms: forms.collect(),
            tenants: listed
                .map(|(name, entry)| (name_hash(name.as_bytes(), salt), entry.continuations.or(others)))
                .collect(),
            others,
        }
    }

    /// Returns how often a stream of a tenant may be continued, if that is limited.
    pub(crate) fn limit(&self, tenant: Option<u64>) -> Option<u32> {
        tenant.and_then(|hash| self.tenants.get(&hash)).copied().unwrap_or(self.others)
    }

    /// Returns whether streams of a model are to be continued from token ids.
    pub(crate) fn is_exact(&self, model: &ModelName, workers: &Snapshot) -> bool {
        workers.own_or_parent(model, |model| self.forms.get(model)) == Some(&ContinuationForm::Exact)
    }
}
