//! From the raw configuration to validated settings.
//!
//! Each section is taken apart without `..`: a new key does not compile before it is in [`Static`] or [`Reloadable`].

use std::{collections::BTreeSet, time::Duration};

use pointsman_routing::Decisions as Ring;
use pointsman_workers::WorkerSpec;

use super::{
    Config, Decisions, Index, Model, Policies, Probe, Queue, Routing, Server, Timeouts,
    problem::Problem,
    settings::{
        DecisionSettings, IndexSettings, Listeners, ModelSettings, PolicyRuntime, PolicySettings,
        ProbeSettings, QueueSettings, Reloadable, RoutingSettings, ServerSettings, Settings, Static,
        TimeoutSettings,
    },
    slots::is_folder_name,
};

/// Smallest limit of recorded inputs in bytes: less could not hold the inputs of one large decision.
const MIN_DECISION_BYTES: usize = 65_536;

/// Validates `config`.
///
/// # Errors
/// All problems.
pub(super) fn resolve(config: &Config) -> Result<Settings, Vec<Problem>> {
    let Config {
        server,
        routing,
        policies,
        index,
        queue,
        decisions,
        timeouts,
        probe,
        models,
        workers,
        origin: _,
    } = config;
    let mut problems = Problems::default();
    let (listeners, server) = problems.server(server);
    let (block_size, routing) = problems.routing(routing);
    let decisions = problems.decisions(decisions);
    let timeouts = problems.timeouts(timeouts);
    let probe = problems.probe(probe);
    let index = problems.index(index);
    let workers = problems.workers(workers);
    let (runtime, policies) = problems.policies(policies);
    let has_dir = runtime.dir.is_some();
    let model_slots = models.iter().filter(|(_, model)| !model.slots.is_empty());
    let model_slots = model_slots
        .map(|(name, model)| (name.clone(), model.slots.keys().copied().collect::<BTreeSet<_>>()))
        .collect();
    let models =
        models.iter().map(|(name, model)| (name.clone(), problems.model(name, model, has_dir))).collect();
    let Queue { limit, timeout } = *queue;
    let queue = QueueSettings { limit, timeout };
    if !problems.0.is_empty() {
        return Err(problems.0);
    }
    let fixed = Static { listeners, block_size, policies: runtime, index, model_slots };
    let reloadable =
        Reloadable { server, routing, policies, queue, decisions, timeouts, probe, models, workers };
    Ok(Settings { fixed, reloadable })
}

/// The problems found so far.
#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem::new(path, message));
    }

    /// Returns a limit of time, which must not be zero.
    fn limit(&mut self, path: &str, limit: Duration) -> Duration {
        if limit.is_zero() {
            self.add(path, "`0s` would end everything at once: expected more than 0");
        }
        limit
    }

    /// Returns a size, which must not be zero.
    fn size(&mut self, path: &str, size: u32) -> u32 {
        if size == 0 {
            self.add(path, "`0` is too small: expected 1 or more");
        }
        size
    }

    fn server(&mut self, server: &Server) -> (Listeners, ServerSettings) {
        let token = server.operators_token();
        let Server {
            listen,
            admin_listen,
            threads,
            max_body_bytes,
            trust_hints,
            tell_decisions,
            requests_per_second,
            ref api_keys,
            admin_token: _,
            admin_token_file: _,
            admin_token_reads,
        } = *server;
        let admin_token = token.unwrap_or_else(|problem| {
            self.0.push(problem);
            None
        });
        let settings = ServerSettings {
            max_body_bytes,
            trust_hints,
            tell_decisions,
            requests_per_second,
            api_keys: api_keys.clone(),
            admin_token,
            admin_token_reads,
        };
        (Listeners { listen, admin_listen, threads }, settings)
    }

    fn routing(&mut self, routing: &Routing) -> (u32, RoutingSettings) {
        let Routing {
            enforce_disagg,
            block_size,
            bytes_per_token,
            order,
            retries,
            local_fallback,
            session_affinity,
            busy_status,
            hash_salt,
            cost,
        } = *routing;
        if !(400..600).contains(&busy_status) {
            self.add(
                "routing.busy_status",
                format!("`{busy_status}` is not an HTTP error status: expected 400 to 599"),
            );
        }
        let settings = RoutingSettings {
            enforce_disagg,
            bytes_per_token: self.size("routing.bytes_per_token", bytes_per_token),
            order,
            retries,
            local_fallback,
            session_affinity,
            busy_status,
            hash_salt,
            cost,
        };
        (self.size("routing.block_size", block_size), settings)
    }

    fn policies(&mut self, policies: &Policies) -> (PolicyRuntime, PolicySettings) {
        self.0.extend(policies.problems());
        let (trusted_keys, pins) = policies.signatures().unwrap_or_default();
        let Policies {
            ref dir,
            deadline,
            configure_deadline,
            observe_deadline,
            memory_bytes,
            on_failure,
            probation_calls,
            probation_failure_share,
            debounce,
            rescan,
            require_signed,
            trusted_keys: _,
            trusted_key_files: _,
            pins: _,
            ref compile_cache,
            ref slots,
        } = *policies;
        let runtime = PolicyRuntime {
            dir: dir.clone(),
            deadline: self.limit("policies.deadline", deadline),
            configure_deadline: self.limit("policies.configure_deadline", configure_deadline),
            observe_deadline: self.limit("policies.observe_deadline", observe_deadline),
            memory_bytes,
            probation_calls,
            probation_failure_share,
            debounce,
            rescan: self.limit("policies.rescan", rescan),
            compile_cache: compile_cache.clone(),
        };
        (runtime, PolicySettings { on_failure, require_signed, trusted_keys, pins, slots: slots.clone() })
    }

    fn index(&mut self, index: &Index) -> IndexSettings {
        let Index { byte_budget, ttl } = *index;
        IndexSettings { byte_budget, ttl: self.limit("index.ttl", ttl) }
    }

    fn decisions(&mut self, decisions: &Decisions) -> DecisionSettings {
        let Decisions { keep, bytes, ref facts } = *decisions;
        if let Err(unknown) = Ring::facts(facts) {
            self.add("decisions.facts", format!("{unknown}: see wit/facts.md for the names of facts"));
        }
        if keep > 0 && bytes < MIN_DECISION_BYTES {
            let message = format!(
                "`{bytes}` is too small: expected {MIN_DECISION_BYTES} or more, or `keep = 0` to record nothing"
            );
            self.add("decisions.bytes", message);
        }
        DecisionSettings { keep, bytes, facts: facts.clone() }
    }

    fn timeouts(&mut self, timeouts: &Timeouts) -> TimeoutSettings {
        let Timeouts { connect, request, body_idle, booking, drain } = *timeouts;
        TimeoutSettings {
            connect: self.limit("timeouts.connect", connect),
            request: self.limit("timeouts.request", request),
            body_idle: self.limit("timeouts.body_idle", body_idle),
            booking: self.limit("timeouts.booking", booking),
            drain,
        }
    }

    fn probe(&mut self, probe: &Probe) -> ProbeSettings {
        let Probe { interval, timeout, load_interval } = *probe;
        ProbeSettings {
            interval: self.limit("probe.interval", interval),
            timeout: self.limit("probe.timeout", timeout),
            load_interval,
        }
    }

    fn model(&mut self, name: &str, model: &Model, has_dir: bool) -> ModelSettings {
        let Model { ref tokenizer, tokenizer_timeout, tokenizer_cache_bytes, ref slots } = *model;
        if !slots.is_empty() && !is_folder_name(name) {
            self.add(
                format!("models.{name}.slots"),
                format!("`{name}` cannot name a directory of policies: expected NAME or OWNER/NAME"),
            );
        }
        for (kind, entry) in slots {
            self.0.extend(entry.problems(&format!("models.{name}.slots.{kind}"), *kind, has_dir));
        }
        let (tokenizer, slots) = (tokenizer.clone(), slots.clone());
        ModelSettings { tokenizer, tokenizer_timeout, tokenizer_cache_bytes, slots }
    }

    fn workers(&mut self, workers: &[WorkerSpec]) -> Vec<WorkerSpec> {
        for (index, worker) in workers.iter().enumerate() {
            let same = workers.iter().take(index).position(|other| other.id == worker.id);
            if let Some(same) = same {
                let id = worker.id;
                let message =
                    format!("`{id}` is already the id of workers[{same}]: give each worker its own");
                self.add(format!("workers[{index}].id"), message);
            }
        }
        workers.to_vec()
    }
}
