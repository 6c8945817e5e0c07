//! Applies a changed configuration to the running daemon.
//!
//! Steps that may fail come first, so that a failure leaves everything as it was. Requests that started
//! before keep the old [`State`]; those that start afterwards get the new one.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc, time::Duration};

use pointsman_certificates::pem::Expired;
use pointsman_orchestration::{ModelBounds, QueueOrder, QueueRules, TenantShare};
use pointsman_policy_runtime::Command;
use pointsman_routing::{BusyRules, Decisions, facts::UnknownFact};
use pointsman_workers::{ModelName, WorkerId, WorkerSpec, name_hash, probe::ProbeConfig};

use super::{check::log_missing_keys, slots::specs};
use crate::{
    config::{
        self, ALL_TENANTS, Probe, Problem, Queue, QueueOfModel, TenantEntry,
        reload::{Applied, ReloadError, ReloadTarget, WorkerChanges},
        settings::Settings as Configured,
    },
    state::{
        Settings, SharedState, State, caller::CallerId, certificates::Certificates, jwt::TokenVerifier,
        keys::Keys, memory_limit::body_limit, open_files::connection_limit, rate_limit::RateLimiter,
    },
    tasks::Tasks,
    telemetry::{decision_log::DecisionLog, metrics::Metrics, tenant_metrics::TenantMetrics, traces::Traces},
    tenant_limits::TenantLimits,
    tls::Loaded,
    tokenization::Tokens,
};

impl ReloadTarget for SharedState {
    #[expect(clippy::too_many_lines, reason = "what can fail comes first, then each part is replaced once")]
    async fn apply(&self, before: &Configured, after: &Configured) -> Result<Applied, ReloadError> {
        let config::Config { routing, policies, tenants, limits, decisions, traces, models, workers, .. } =
            &**after;
        let state = self.get();
        let invalid = |error: String| ReloadError::Invalid(error);
        let tokens = load_tokens(&state, models.clone()).await?;
        let record = if decisions.is_same_record(&before.decisions) {
            state.router.decisions().clone()
        } else {
            let facts = Decisions::facts(&decisions.facts).map_err(|error| invalid(error.to_string()))?;
            Arc::new(state.router.decisions().successor(decisions.keep, decisions.bytes, facts))
        };
        let log = if decisions.log() == before.decisions.log() {
            state.decision_log.clone()
        } else {
            let block_tokens = state.settings.measure.block_size;
            let started = DecisionLog::start(&decisions.log(), block_tokens, &state.metrics);
            started.map_err(|error| {
                invalid(format!("decisions.log_dir: cannot start the log's thread: {error}"))
            })?
        };
        let traces = if *traces == before.traces {
            state.traces.clone()
        } else {
            let started = Traces::start(traces, after.server.listen, &state.metrics);
            started.map_err(|error| invalid(format!("traces: cannot start the exporter: {error}")))?
        };
        let certificates = load_certificates(&state, before, after).await?;
        let jwt = token_verifier(state.jwt.as_ref(), after, &state.metrics, &state.tasks).map_err(invalid)?;
        let trust = policies.trust().map_err(invalid)?;
        let report = state.policies.execute(Command::Configure { specs: specs(after), trust }).await?;
        // Nothing below can fail.
        log_missing_keys(after);
        if let Some(certificates) = certificates {
            state.tls.install(certificates, &state.metrics);
        }
        state.queue.set_rules(queue_rules(after));
        state.http2_requests.set_limit(limits.http2_requests);
        state.realtime.set_limit(limits.realtime_connections);
        let sizes =
            |config: &config::Config| (config.limits.body_bytes_in_flight, config.server.max_body_bytes);
        if sizes(after) != sizes(before) {
            state.body_bytes.set_limit(body_limit(after));
        }
        if limits.connections != before.limits.connections {
            state.connections.set_limit(connection_limit(limits.connections));
        }
        state.probe.send_if_modified(|config| {
            let new = probe_config(after);
            std::mem::replace(config, new) != new
        });
        let limiter = if keeps_limiter(before, after) { state.limiter.clone() } else { rate_limiter(after) };
        let router = state.router.reconfigured(routing.cost, policies.on_failure, record);
        let router = router.with_busy(busy_rules(after));
        self.replace(State {
            settings: Settings::new(after),
            router: Arc::new(router),
            limiter,
            tenant_limits: TenantLimits::new(
                tenants,
                routing.hash_salt.expose(),
                state.tenant_limits.as_ref(),
            ),
            tenant_metrics: tenant_metrics(after, &state.metrics),
            jwt,
            decision_log: log,
            traces,
            tokens: Arc::new(tokens),
            ..(*state).clone()
        });
        let changes = worker_changes(&before.workers, workers);
        if changes != WorkerChanges::default() {
            state.fleet.set_configured(workers);
        }
        Ok(Applied { policies: report, workers: changes })
    }
}

/// Loads the tokenizers that changed, beside the runtime: a large one takes seconds.
async fn load_tokens(
    state: &Arc<State>,
    models: BTreeMap<String, config::Model>,
) -> Result<Tokens, ReloadError> {
    let state = state.clone();
    let load = move || state.tokens.load(&models, &state.registry);
    let loaded = tokio::task::spawn_blocking(load).await;
    let failed = |error| vec![Problem::new("models", format!("loading the tokenizers failed: {error}"))];
    loaded.unwrap_or_else(|error| Err(failed(error))).map_err(|problems| refused(&problems))
}

/// Reads the certificates, when their settings changed. Changed files alone are not read here.
async fn load_certificates(
    state: &Arc<State>,
    before: &Configured,
    after: &Configured,
) -> Result<Option<Loaded>, ReloadError> {
    let of = |settings: &Configured| {
        let config::Config { server, upstream, .. } = &**settings;
        (server.tls.clone(), server.http2.enabled, server.admin_tls.clone(), upstream.tls.clone())
    };
    if of(before) == of(after) {
        return Ok(None);
    }
    let (tls, server, upstream) = (state.tls.clone(), after.server.clone(), after.upstream.clone());
    let loaded = tokio::task::spawn_blocking(move || tls.load(&server, &upstream, Expired::Refused)).await;
    let failed = |error| vec![Problem::new("server", format!("reading the certificates failed: {error}"))];
    let loaded = loaded.unwrap_or_else(|error| Err(failed(error)));
    loaded.map(Some).map_err(|problems| refused(&problems))
}

fn refused(problems: &[Problem]) -> ReloadError {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    ReloadError::Invalid(lines.join("\n"))
}

/// Returns an empty record of decisions.
///
/// # Errors
/// Names a fact that does not exist; validation rules this out.
pub(super) fn record_of_decisions(settings: &config::Decisions) -> Result<Decisions, UnknownFact> {
    Ok(Decisions::new(settings.keep, settings.bytes, Decisions::facts(&settings.facts)?))
}

/// Returns the thresholds beyond which workers are busy.
pub(super) fn busy_rules(settings: &Configured) -> BusyRules {
    let models = settings.models.iter().map(|(name, model)| (ModelName::new(name), model.busy.clone()));
    BusyRules::new(settings.routing.busy.clone(), models).with_queue(settings.queue.limit > 0)
}

/// Returns the bounds of the queue and the shares of tenants.
pub(super) fn queue_rules(settings: &Configured) -> QueueRules {
    let Queue { limit, bytes, timeout, max_inflight, preempt, input_weight, output_weight, ref models } =
        settings.queue;
    let bounds = |model: &QueueOfModel| ModelBounds { limit: model.limit, max_inflight: model.max_inflight };
    let share = |entry: &TenantEntry| TenantShare {
        weight: entry.weight.unwrap_or(1.0),
        max_priority: entry.max_priority,
    };
    let others = settings.tenants.get(ALL_TENANTS).cloned().unwrap_or_default();
    let salt = settings.routing.hash_salt.expose();
    let listed = settings.tenants.iter().filter(|(name, _)| *name != ALL_TENANTS);
    QueueRules {
        limit,
        bytes,
        timeout,
        order: QueueOrder::default(),
        max_inflight,
        preempt,
        models: models.iter().map(|(name, model)| (ModelName::new(name), bounds(model))).collect(),
        waiting_models: settings.models.values().filter(|model| model.wait_for_workers.is_some()).count(),
        input_weight,
        output_weight,
        tenants: listed
            .map(|(name, entry)| (name_hash(name.as_bytes(), salt), share(&entry.or(&others))))
            .collect(),
        others: share(&others),
    }
}

/// Returns the verifier of tokens: `running`, when the configuration asks for the same.
pub(super) fn token_verifier(
    running: Option<&Arc<TokenVerifier>>,
    settings: &Configured,
    metrics: &Arc<Metrics>,
    tasks: &Tasks,
) -> Result<Option<Arc<TokenVerifier>>, String> {
    let Some(jwt) = &settings.credentials.jwt else { return Ok(None) };
    let salt = settings.routing.hash_salt.expose();
    if let Some(same) = running.filter(|running| running.is_of(jwt, salt)) {
        return Ok(Some(same.clone()));
    }
    let started = TokenVerifier::start(jwt, salt, metrics, tasks, running.map(|running| &**running));
    started.map(|started| Some(Arc::new(started))).map_err(|error| format!("auth.jwt: {error}"))
}

/// Returns whether the clients and their rates are the same as before.
fn keeps_limiter(before: &Configured, after: &Configured) -> bool {
    before.server.requests_per_second == after.server.requests_per_second
        && before.credentials.keys == after.credentials.keys
        && before.credentials.dir_keys == after.credentials.dir_keys
        && before.auth.certificates == after.auth.certificates
}

pub(super) fn rate_limiter(settings: &Configured) -> Option<Arc<RateLimiter>> {
    let per_second = NonZeroU32::new(settings.server.requests_per_second)?;
    let keys = Keys::of_clients(&settings.credentials, 0);
    let certificates = Certificates::of_clients(&settings.auth.certificates, 0);
    let ids = keys.owners().chain(certificates.owners()).filter_map(|caller| match &caller.id {
        CallerId::Configured(name) => Some(&**name),
        CallerId::Subject(_) => None,
    });
    Some(Arc::new(RateLimiter::new(per_second, ids)))
}

/// Returns the series of the tenants that the configuration names.
pub(super) fn tenant_metrics(settings: &Configured, metrics: &Metrics) -> Arc<TenantMetrics> {
    let (credentials, tenants) = (&settings.credentials, &settings.tenants);
    let limited = tenants.keys().filter(|name| *name != ALL_TENANTS);
    let keys = credentials.keys.iter().chain(&credentials.dir_keys);
    let keys = keys.filter_map(|key| key.tenant.as_deref());
    let certificates = settings.auth.certificates.iter().map(|entry| &*entry.tenant);
    let certificates = certificates.filter(|tenant| !tenant.is_empty());
    Arc::new(metrics.tenants.named(limited.map(String::as_str).chain(keys).chain(certificates)))
}

pub(super) fn probe_config(settings: &Configured) -> ProbeConfig {
    let Probe { interval, timeout, health_timeout, load_interval, max_per_second, stuck_after } =
        settings.probe;
    // Often enough to distinguish a pause within an answer from a worker that is stuck.
    let shortest = if stuck_after.is_zero() { Duration::MAX } else { stuck_after };
    let look_interval = (shortest.min(settings.timeouts.event_idle) / 4).min(MAX_LOOK_INTERVAL);
    ProbeConfig {
        interval,
        timeout,
        health_timeout,
        load_interval,
        max_per_second,
        stuck_after,
        look_interval,
    }
}

/// Longest time between two looks at the activity of workers.
const MAX_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns which workers differ between two readings of the file.
fn worker_changes(before: &[WorkerSpec], after: &[WorkerSpec]) -> WorkerChanges {
    let known: BTreeMap<WorkerId, &WorkerSpec> = before.iter().map(|spec| (spec.id, spec)).collect();
    let mut changes = WorkerChanges::default();
    for spec in after {
        match known.get(&spec.id) {
            Some(same) if *same == spec => {}
            Some(_) => changes.changed.push(spec.id),
            None => changes.added.push(spec.id),
        }
    }
    let gone = known.keys().filter(|id| !after.iter().any(|spec| spec.id == **id));
    changes.removed.extend(gone.copied());
    changes
}

#[cfg(test)]
mod tests;
