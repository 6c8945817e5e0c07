//! Selector: limits the requests of each tenant in a time window, counted in the host's state, and chooses
//! the fewest active requests.

use std::{collections::BTreeMap, time::Duration};

use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, Leg, Policy, Rng, Selector, Shed, Slot, Wants, facts, least, state,
};
use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limit {
    /// Number of requests that a tenant can start in a window.
    pub requests: u32,
    /// Length of a window, milliseconds.
    pub window_ms: u32,
    /// Whether requests without a tenant share a limit of their own.
    pub anonymous: bool,
    /// Number of requests of single tenants, by their hash. The gateway replaces a key `tenant:NAME` by the
    /// hash of NAME.
    pub tenants: BTreeMap<u64, u32>,
}

impl Default for Limit {
    fn default() -> Self {
        Self { requests: 600, window_ms: 60_000, anonymous: false, tenants: BTreeMap::new() }
    }
}

/// The configured policy.
#[derive(Debug)]
pub struct TenantLimit {
    limit: Limit,
    tenant: Slot<u64>,
    requests: Column<u32>,
}

impl TenantLimit {
    /// Counts this request. Returns whether its tenant exceeds the limit in this window. When the counter
    /// cannot be written, the request passes: a limit is not worth an outage.
    fn exceeded(&self, call: &Call, tenant: u64) -> bool {
        let window = call.now_us / 1_000 / u64::from(self.limit.window_ms);
        let life = Duration::from_millis(u64::from(self.limit.window_ms) * 2);
        let sum = state::increment(&format!("{window}/{tenant}"), 1, life);
        let most = self.limit.tenants.get(&tenant).unwrap_or(&self.limit.requests);
        sum.is_ok_and(|sum| sum > i64::from(*most))
    }
}

impl Policy for TenantLimit {
    const NAME: &'static str = "tenant-limit";
    type Settings = Limit;

    fn configure(limit: Limit, wants: &mut Wants) -> Result<Self, String> {
        if limit.window_ms == 0 {
            return Err("window-ms: 0 is not a time: expected 1 or more".to_owned());
        }
        Ok(Self {
            limit,
            tenant: wants.request(facts::TENANT_HASH),
            requests: wants.worker(facts::ACTIVE_REQUESTS),
        })
    }
}

impl Selector for TenantLimit {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let tenant = self.tenant.get(facts);
        let limited = tenant != 0 || self.limit.anonymous;
        let first = call.attempt == 0 && call.leg != Leg::Decode;
        if limited && first && self.exceeded(call, tenant) {
            return Ok(Decision::Shed(Shed {
                status: 429,
                reason: "too many requests of this tenant".to_owned(),
            }));
        }
        #[expect(clippy::cast_precision_loss, reason = "counts of requests are far below 2^24")]
        let costs: Vec<f32> = self.requests.slice(facts).iter().map(|count| *count as f32).collect();
        let row = least(&costs, &mut Rng::new(call.seed));
        Ok(row.map_or(Decision::Abstain, Decision::row))
    }
}

pointsman_policy_sdk::export!(selector TenantLimit);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<TenantLimit>(include_str!("../cases.toml")).unwrap();
    }
}
