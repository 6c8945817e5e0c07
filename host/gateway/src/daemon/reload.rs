//! Applies a changed configuration to the running daemon.
//!
//! What may fail comes first, so that a failure leaves everything as it was. Requests that started before
//! keep the old [`State`]; those that start afterwards get the new one.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc};

use pointsman_policy_runtime::Command;
use pointsman_routing::{Decisions, facts::UnknownFact};
use pointsman_workers::{Registry, WorkerId, WorkerSpec, probe::ProbeConfig};

use super::slots::specs;
use crate::{
    config::{
        reload::{Applied, ReloadError, ReloadTarget, WorkerChanges},
        settings::{DecisionSettings, ProbeSettings, Reloadable, ServerSettings},
    },
    state::{Settings, SharedState, State, rate_limit::RateLimiter},
    tokenization::Tokens,
};

impl ReloadTarget for SharedState {
    async fn apply(&self, before: &Reloadable, after: &Reloadable) -> Result<Applied, ReloadError> {
        let Reloadable { server, routing, policies, queue, decisions, timeouts: _, probe, models, workers } =
            after;
        let state = self.get();
        let invalid = |error: String| ReloadError::Invalid(error);
        let tokens = load_tokens(&state, models.clone()).await?;
        let record = if *decisions == before.decisions {
            state.router.decisions().clone()
        } else {
            let facts = Decisions::facts(&decisions.facts).map_err(|error| invalid(error.to_string()))?;
            Arc::new(state.router.decisions().successor(decisions.keep, decisions.bytes, facts))
        };
        let trust = policies.trust().map_err(invalid)?;
        let report = state.policies.execute(Command::Configure { specs: specs(after), trust }).await?;
        // Nothing below can fail.
        state.queue.set_limit(queue.limit);
        state.probe.send_if_modified(|config| {
            let changed = *config != probe_config(probe);
            *config = probe_config(probe);
            changed
        });
        let keeps_limiter = before.server.requests_per_second == server.requests_per_second
            && before.server.api_keys == server.api_keys;
        let limiter = if keeps_limiter { state.limiter.clone() } else { rate_limiter(server) };
        let router = state.router.reconfigured(routing.cost, policies.on_failure, record);
        self.replace(State {
            settings: Settings::new(state.settings.measure.block_size, after),
            router: Arc::new(router),
            limiter,
            tokens: Arc::new(tokens),
            ..(*state).clone()
        });
        let workers = move_workers(&state.registry, &before.workers, workers);
        Ok(Applied { policies: report, workers })
    }
}

/// Loads the tokenizers that changed, beside the runtime: a large one takes seconds.
async fn load_tokens(
    state: &Arc<State>,
    models: BTreeMap<String, crate::config::settings::ModelSettings>,
) -> Result<Tokens, ReloadError> {
    let state = state.clone();
    let load = move || Tokens::load(&models, &state.registry, Some(&state.tokens));
    let loaded = tokio::task::spawn_blocking(load).await;
    let loaded = loaded.unwrap_or_else(|error| Err(anyhow::anyhow!("loading the tokenizers: {error}")));
    loaded.map_err(|error| ReloadError::Invalid(format!("{error:#}")))
}

/// Returns an empty record of decisions.
///
/// # Errors
/// Names a fact that does not exist; validation rules this out.
pub(super) fn record_of_decisions(settings: &DecisionSettings) -> Result<Decisions, UnknownFact> {
    Ok(Decisions::new(settings.keep, settings.bytes, Decisions::facts(&settings.facts)?))
}

pub(super) fn rate_limiter(server: &ServerSettings) -> Option<Arc<RateLimiter>> {
    let per_second = NonZeroU32::new(server.requests_per_second)?;
    Some(Arc::new(RateLimiter::new(per_second, &server.api_keys)))
}

pub(super) fn probe_config(probe: &ProbeSettings) -> ProbeConfig {
    ProbeConfig { interval: probe.interval, timeout: probe.timeout, load_interval: probe.load_interval }
}

/// Makes the registry follow the file. Only workers whose description differs between two readings change:
/// those that joined through the admin listener stay.
fn move_workers(registry: &Registry, before: &[WorkerSpec], after: &[WorkerSpec]) -> WorkerChanges {
    let known: BTreeMap<WorkerId, &WorkerSpec> = before.iter().map(|spec| (spec.id, spec)).collect();
    let mut changes = WorkerChanges::default();
    for spec in after {
        let list = match known.get(&spec.id) {
            Some(same) if *same == spec => continue,
            Some(_) => &mut changes.changed,
            None => &mut changes.added,
        };
        list.push(spec.id);
        registry.upsert(spec.clone());
    }
    for id in known.keys().filter(|id| !after.iter().any(|spec| spec.id == **id)) {
        registry.remove(*id);
        changes.removed.push(*id);
    }
    changes
}

#[cfg(test)]
mod tests;
