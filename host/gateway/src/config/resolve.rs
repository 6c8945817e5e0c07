//! From the raw configuration to validated settings.
//!
//! Each section is taken apart without `..`: a new key does not compile before it is in [`Static`] or
//! [`Reloadable`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use http::{HeaderName, HeaderValue};

use super::{
    Config, Index, Policies, Problem, Routing, Secret, Server,
    settings::{
        AuthSettings, IndexSettings, Listeners, PolicyRuntime, PolicySettings, Reloadable, RoutingSettings,
        ServerSettings, Settings, Static,
    },
};

mod auth;
mod certificates;
mod decisions;
mod jwt;
mod limits;
mod model;
mod shared_state;
mod timeouts;
mod traces;
mod upstream;
mod workers;

/// Validates `config`. Returns the settings with all problems. If there are problems, the settings serve only
/// to look for more.
#[expect(clippy::too_many_lines, reason = "one line for each section")]
pub(super) fn resolve(config: &Config) -> (Settings, Vec<Problem>) {
    let Config {
        server,
        auth,
        routing,
        policies,
        index,
        queue,
        tenants,
        limits,
        decisions,
        traces,
        timeouts,
        upstream,
        probe,
        discovery,
        ext_proc,
        replicas,
        models,
        workers,
        origin: _,
    } = config;
    let mut problems = Problems::default();
    let auth = problems.auth(auth, server);
    let (listeners, server) = problems.server(server, &auth);
    let (block_size, routing) = problems.routing(routing);
    let (decisions, decision_log) = problems.decisions(decisions);
    let limits = problems.limits(limits, server.max_body_bytes);
    let traces = problems.traces(traces);
    let timeouts = problems.timeouts(timeouts);
    let upstream = problems.upstream(upstream);
    let probe = problems.probe(probe);
    problems.busy_without_load(&routing.busy, models, probe.load_interval);
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
    problems.shared_state(replicas, &policies.slots, &models);
    let tenants_wrong = super::tenants::problems(tenants);
    problems.0.extend([discovery.problems(), replicas.problems(), queue.problems(), tenants_wrong].concat());
    let others = [("server.listen", listeners.listen), ("server.admin_listen", listeners.admin_listen)];
    problems.0.extend(ext_proc.problems(others));
    let (queue, tenants, discovery) = (queue.clone(), tenants.clone(), discovery.clone());
    let (ext_proc, replicas) = (ext_proc.clone(), replicas.clone());
    let fixed = Static {
        listeners,
        block_size,
        policies: runtime,
        index,
        discovery,
        ext_proc,
        replicas,
        model_slots,
    };
    let reloadable = Reloadable {
        server,
        auth,
        routing,
        policies,
        queue,
        tenants,
        limits,
        decisions,
        decision_log,
        traces,
        timeouts,
        upstream,
        probe,
        models,
        workers,
    };
    (Settings { fixed, reloadable }, problems.0)
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
            return Duration::from_secs(1);
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

    fn server(&mut self, server: &Server, auth: &AuthSettings) -> (Listeners, ServerSettings) {
        let token = server.operators_token(auth.knows_operators());
        let Server {
            listen,
            admin_listen,
            threads,
            tokenizer_threads,
            max_body_bytes,
            trust_hints,
            tell_decisions,
            requests_per_second,
            ref api_keys,
            ref tenants,
            ref cors_origins,
            ref tenant_header,
            admin_token: _,
            admin_token_file: _,
            admin_token_reads,
            admin_insecure,
            ref admin_names,
            ref tls,
            http2,
            ref admin_tls,
        } = *server;
        self.0.extend(server.bad_names());
        let admin_token = token.unwrap_or_else(|problem| {
            self.0.push(problem);
            None
        });
        if listen == admin_listen && listen.port() != 0 {
            let message = format!("`{admin_listen}` is also the address of server.listen: use another port");
            self.add("server.admin_listen", message);
        }
        http2.check(&mut self.0);
        for (path, tls) in [("server.tls", tls), ("server.admin_tls", admin_tls)] {
            tls.iter().for_each(|tls| tls.check(path, &mut self.0));
        }
        self.tenants(api_keys, tenants);
        let settings = ServerSettings {
            max_body_bytes,
            trust_hints,
            tell_decisions,
            requests_per_second,
            api_keys: api_keys.clone(),
            tenants: tenants.clone(),
            tenant_header: self.tenant_header(tenant_header),
            admin_token,
            admin_token_reads,
            admin_names: admin_names.clone(),
            tls: tls.clone(),
            http2,
            admin_tls: admin_tls.clone(),
        };
        let cors_origins = self.origins(cors_origins);
        let fixed =
            Listeners { listen, admin_listen, threads, tokenizer_threads, cors_origins, admin_insecure };
        (fixed, settings)
    }

    /// Returns the origins of pages that may call the clients' listener.
    fn origins(&mut self, origins: &[String]) -> Vec<HeaderValue> {
        let mut valid = Vec::new();
        for (position, origin) in origins.iter().enumerate() {
            let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let fits = origin == "*" || host.is_some_and(|host| !host.is_empty() && !host.contains('/'));
            match HeaderValue::from_str(origin).ok().filter(|_| fits) {
                Some(origin) => valid.push(origin),
                None => self.add(
                    format!("server.cors_origins[{position}]"),
                    format!(
                        "`{origin}` is not an origin: expected `https://HOST`, `http://HOST:PORT` or `*`"
                    ),
                ),
            }
        }
        valid
    }

    /// Checks that each key belongs to one tenant at most, and that no name is empty.
    fn tenants(&mut self, api_keys: &[Secret], tenants: &BTreeMap<String, Vec<Secret>>) {
        let mut owners: BTreeMap<&str, &str> = api_keys.iter().map(|key| (key.expose(), "")).collect();
        for (tenant, keys) in tenants {
            let path = format!("server.tenants.{tenant}");
            if tenant.is_empty() {
                self.add(path.clone(), "the name of a tenant is empty: give it a name");
            }
            for (position, key) in keys.iter().enumerate() {
                let path = format!("{path}[{position}]");
                if key.expose().is_empty() {
                    self.add(path, "the key is empty: every client would know it");
                } else if let Some(owner) = owners.insert(key.expose(), tenant) {
                    let owner = if owner.is_empty() { "server.api_keys" } else { owner };
                    self.add(
                        path,
                        format!("the same key belongs to `{owner}`, too: give each tenant its own"),
                    );
                }
            }
        }
    }

    /// Returns the header in which a proxy names the tenant.
    fn tenant_header(&mut self, name: &str) -> Option<HeaderName> {
        if name.is_empty() {
            return None;
        }
        let header = HeaderName::try_from(name).ok();
        if header.is_none() {
            self.add("server.tenant_header", format!("`{name}` is not the name of an HTTP header"));
        }
        header
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
            quarantine,
            hash_salt,
            ref busy,
            cost,
        } = *routing;
        self.busy("routing.busy", busy);
        self.cost(&cost);
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
            quarantine,
            hash_salt,
            busy: busy.clone(),
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
            signatures_bind,
            ref min_versions,
            pins: _,
            ref compile_cache,
            compile_memory_bytes,
            compile_cpu,
            compile_timeout,
            compiler: _,
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
            compile_memory_bytes,
            compile_cpu: self.limit("policies.compile_cpu", compile_cpu),
            compile_timeout: self.limit("policies.compile_timeout", compile_timeout),
        };
        let (min_versions, slots) = (min_versions.clone(), slots.clone());
        let settings = PolicySettings {
            on_failure,
            require_signed,
            trusted_keys,
            signatures_bind,
            min_versions,
            pins,
            slots,
        };
        (runtime, settings)
    }

    fn index(&mut self, index: &Index) -> IndexSettings {
        let Index { byte_budget, ttl } = *index;
        IndexSettings { byte_budget, ttl: self.limit("index.ttl", ttl) }
    }
}
