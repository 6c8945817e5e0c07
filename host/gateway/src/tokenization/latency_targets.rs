//! Latency targets of tenants and models, for requests that do not name a target.

use std::{collections::HashMap, time::Duration};

use pointsman_workers::{ModelName, Snapshot, name_hash};

use crate::config::{ALL_TENANTS, TenantEntry, settings::Settings as Configured};

/// Targets that requests have unless they name their own.
#[derive(Clone, Debug, Default)]
pub(crate) struct TargetRules {
    /// By the hash of the tenant's name.
    tenants: HashMap<u64, Targets>,
    other_tenants: Targets,
    models: HashMap<ModelName, Targets>,
}

/// Targets of a request in microseconds; `None`: the request has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Targets {
    /// Time from the request's arrival to its first token.
    pub ttft_us: Option<u32>,
    /// Time between two tokens.
    pub itl_us: Option<u32>,
}

impl TargetRules {
    pub(crate) fn of(configured: &Configured) -> Self {
        let others = configured.tenants.get(ALL_TENANTS).cloned().unwrap_or_default();
        let salt = configured.routing.hash_salt.expose();
        let of_tenant = |entry: &TenantEntry| Targets::of(entry.ttft_target, entry.itl_target);
        let listed = configured.tenants.iter().filter(|(name, _)| *name != ALL_TENANTS);
        Self {
            tenants: listed
                .map(|(name, entry)| (name_hash(name.as_bytes(), salt), of_tenant(&entry.or(&others))))
                .collect(),
            other_tenants: of_tenant(&others),
            models: configured
                .models
                .iter()
                .map(|(name, model)| (ModelName::new(name), Targets::of(model.ttft_target, model.itl_target)))
                .collect(),
        }
    }

    /// Returns the targets of a request that names none: each is that of its tenant, or else of its model, or
    /// else of the model that this is an adapter of.
    pub(crate) fn of_request(&self, model: &ModelName, tenant: Option<u64>, workers: &Snapshot) -> Targets {
        let of_tenant = tenant.and_then(|hash| self.tenants.get(&hash)).unwrap_or(&self.other_tenants);
        let of_model = |model| self.models.get(model).copied().unwrap_or_default();
        let parent = workers.parent_of(model).map(of_model).unwrap_or_default();
        of_tenant.or(of_model(model)).or(parent)
    }
}

impl Targets {
    fn of(ttft: Option<Duration>, itl: Option<Duration>) -> Self {
        let micros = |target: Duration| u32::try_from(target.as_micros()).unwrap_or(u32::MAX).max(1);
        Self { ttft_us: ttft.map(micros), itl_us: itl.map(micros) }
    }

    /// Returns these targets, with each missing one taken from `others`.
    #[must_use]
    pub(crate) fn or(self, others: Self) -> Self {
        Self { ttft_us: self.ttft_us.or(others.ttft_us), itl_us: self.itl_us.or(others.itl_us) }
    }
}
