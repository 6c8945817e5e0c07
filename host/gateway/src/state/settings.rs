//! Values of the configuration in the form that request handlers need.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use http::HeaderName;
use pointsman_orchestration::{RetryPolicy, SplitRules};
use pointsman_routing::RoutingRequest;
use pointsman_workers::{ModelName, Snapshot};

use ipnet::IpNet;

use super::{
    State,
    caller::{Caller, Operator},
    certificates::Certificates,
    continuations::ContinuationRules,
    keys::Keys,
};
use crate::{
    config::{Http2, LegOrder, Model, Routing, Server, Timeouts, Upstream, settings::Settings as Configured},
    openai::hints::{HintTrust, Hints},
    openai::request::{Request, RequestRules},
    tokenization::{
        RequestTokens,
        latency_targets::TargetRules,
        routing_request::{Measure, TenantLoad, routing_request},
    },
    upstream::PauseLimits,
};

/// Values of one configuration that requests read.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// How requests are split over two workers, where models say nothing else; see [`Settings::split`].
    pub split: SplitRules,
    /// Values of single models that replace those of `split`.
    pub model_splits: BTreeMap<ModelName, ModelSplit>,
    /// Which streams may be continued.
    pub continuations: ContinuationRules,
    /// Latency targets of tenants and models.
    pub targets: TargetRules,
    /// Models of the configuration.
    pub models: Vec<ModelName>,
    /// How long requests of these models wait while no worker can serve them.
    pub worker_waits: BTreeMap<ModelName, Duration>,
    /// Time limit of a whole request, from its first byte.
    pub request_timeout: Duration,
    /// Time limit for connecting to a worker.
    pub connect_timeout: Duration,
    /// How long a client may pause while it uploads a body.
    pub body_idle_timeout: Duration,
    /// Time limits of a leg's answer.
    pub leg_timeouts: LegTimeouts,
    /// Idle connections to workers.
    pub upstream: Upstream,
    /// How long a request body that broke two workers is refused; zero: never.
    pub quarantine: Duration,
    /// How long a connection may stay without a whole request head.
    pub client_idle_timeout: Duration,
    /// HTTP/2 for clients.
    pub http2: Http2,
    /// How long a client may accept no byte of an answer.
    pub client_write_timeout: Duration,
    /// How long both ends of a WebSocket connection may be silent.
    pub realtime_idle_timeout: Duration,
    /// Open connections of one address; 0: no limit.
    pub connections_per_address: usize,
    /// Smallest rate of an upload in bytes per second; 0: any rate.
    pub min_body_rate: u32,
    /// How long a session stays bound when its request does not say; `None`: only requests with a session
    /// control bind.
    pub session_affinity: Option<Duration>,
    /// Time without a token after which a booking is released.
    pub booking_ttl: Duration,
    /// How long a request may wait for a worker that is not busy.
    pub queue_timeout: Duration,
    /// How long new requests are served after the signal that ends the gateway.
    pub drain_delay: Duration,
    /// How long requests in flight may run after the drain began.
    pub drain_timeout: Duration,
    /// HTTP status when every eligible worker is busy.
    pub busy_status: u16,
    /// How requests are read.
    pub request_rules: RequestRules,
    /// Whether a client may see why a worker was chosen.
    pub tell_decisions: bool,
    /// Maximum size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Whether clients have to authenticate.
    pub clients_are_known: bool,
    /// API keys of clients.
    pub keys: Keys<Caller>,
    /// Which clients are refused because their keys seem to be missing.
    pub missing_keys: Vec<String>,
    /// Certificates of clients.
    pub certificates: Certificates<Caller>,
    /// Networks of the proxies that may name the tenant.
    pub trusted_proxies: Vec<IpNet>,
    /// Header in which a trusted proxy names the tenant; `None` if no header.
    pub tenant_header: Option<HeaderName>,
    /// Whether the configuration tells tenants apart: by keys, certificates, tokens or a proxy's header.
    pub has_tenants: bool,
    /// Tokens of operators.
    pub operators: Keys<Operator>,
    /// Certificates of operators.
    pub operator_certificates: Certificates<Operator>,
    /// Whether operators have to prove who they are.
    pub operators_are_known: bool,
    /// Whether operators need the token to read, too.
    pub admin_token_reads: bool,
    /// Names under which operators reach their listener.
    pub admin_names: Vec<String>,
    /// How prompts are measured.
    pub measure: Measure,
}

/// Time limits of a leg's answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LegTimeouts {
    /// Time until the head of a streamed answer, and again until its first event, while the worker makes no
    /// progress.
    pub head: Duration,
    /// Time until the head of a prefill leg's answer, while the worker makes no progress.
    pub prefill_head: Duration,
    /// Time until the head of an answer that is not streamed, while the worker makes no progress.
    pub whole_head: Duration,
    /// Longest pause within an answer while the worker makes no progress.
    pub event_idle: Duration,
    /// Longest pause within an answer, and before that of a stream or a prefill leg, even while the worker
    /// makes progress.
    pub event_idle_max: Duration,
    /// Silence after which the client of a stream gets a comment; 0 sends none.
    pub stream_comment: Duration,
    /// Time of a call that aborts a leg.
    pub abort: Duration,
}

impl LegTimeouts {
    fn of(timeouts: &Timeouts) -> Self {
        Self {
            head: timeouts.head,
            prefill_head: timeouts.prefill_head,
            whole_head: timeouts.whole_head,
            event_idle: timeouts.event_idle,
            event_idle_max: timeouts.event_idle_max,
            stream_comment: timeouts.stream_comment,
            abort: timeouts.abort,
        }
    }

    /// Returns the limits of a pause within an answer.
    pub(crate) fn pause(&self) -> PauseLimits {
        PauseLimits { idle: self.event_idle, most: self.event_idle_max }
    }

    /// Returns the limits of the wait for the first event of a stream.
    pub(crate) fn first_event(&self) -> PauseLimits {
        PauseLimits { idle: self.head, most: self.event_idle_max }
    }
}

/// What one model says about how its requests are split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ModelSplit {
    enforce_disagg: Option<bool>,
    order: Option<LegOrder>,
    continuations: Option<u32>,
    local_fallback: Option<bool>,
}

impl ModelSplit {
    /// Returns these values, with each missing one taken from `others`.
    fn or(self, others: Self) -> Self {
        Self {
            enforce_disagg: self.enforce_disagg.or(others.enforce_disagg),
            order: self.order.or(others.order),
            continuations: self.continuations.or(others.continuations),
            local_fallback: self.local_fallback.or(others.local_fallback),
        }
    }
}

/// Returns the split rules for all models, and what single models say.
fn split_rules(configured: &Configured) -> (SplitRules, BTreeMap<ModelName, ModelSplit>) {
    let Routing { enforce_disagg, order, retries, continuations, local_fallback, .. } = configured.routing;
    let retry_policy = RetryPolicy { order, retries, local_fallback, continuations };
    let split = SplitRules { enforce_disagg, retry_policy };
    let own = |model: &Model| {
        let Model { enforce_disagg, order, continuations, local_fallback, .. } = *model;
        ModelSplit { enforce_disagg, order, continuations, local_fallback }
    };
    let models = configured.models.iter().map(|(name, model)| (ModelName::new(name), own(model)));
    (split, models.filter(|(_, own)| *own != ModelSplit::default()).collect())
}

fn worker_waits(models: &BTreeMap<String, Model>) -> BTreeMap<ModelName, Duration> {
    let waits = models.iter().map(|(name, model)| (ModelName::new(name), model.wait_for_workers));
    waits.filter_map(|(name, limit)| Some((name, limit?))).collect()
}

impl Settings {
    /// Returns whether an address belongs to a trusted proxy.
    #[must_use]
    pub(crate) fn is_trusted_proxy(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted_proxies.iter().any(|network| network.contains(&address))
    }

    /// Returns how requests of a model are split. An adapter has the values of its model where it has none.
    #[must_use]
    pub(crate) fn split(&self, model: &ModelName, workers: &Snapshot) -> SplitRules {
        let of_model = |model| self.model_splits.get(model).copied().unwrap_or_default();
        let own = of_model(model).or(workers.parent_of(model).map(of_model).unwrap_or_default());
        let all = self.split.retry_policy;
        let retry_policy = RetryPolicy {
            order: own.order.unwrap_or(all.order),
            retries: all.retries,
            continuations: own.continuations.unwrap_or(all.continuations),
            local_fallback: own.local_fallback.unwrap_or(all.local_fallback),
        };
        SplitRules::new(own.enforce_disagg.unwrap_or(self.split.enforce_disagg), retry_policy)
    }

    /// Returns how long a request for a model waits while no worker can serve it, and the model whose section
    /// says so.
    #[must_use]
    pub(crate) fn worker_wait<'a>(
        &'a self,
        model: &'a ModelName,
        workers: &'a Snapshot,
    ) -> Option<(&'a ModelName, Duration)> {
        let found = workers.own_or_parent(model, |model| self.worker_waits.get_key_value(model));
        found.map(|(model, limit)| (model, *limit))
    }

    /// Derives the values from a validated configuration.
    #[must_use]
    pub(crate) fn new(configured: &Configured) -> Self {
        let (timeouts, auth) = (&configured.timeouts, &configured.auth);
        let Server { max_body_bytes, trust_hints, tell_decisions, admin_token_reads, http2, .. } =
            configured.server;
        let Routing {
            bytes_per_token, session_affinity, busy_status, quarantine, block_size, hash_salt, ..
        } = configured.routing;
        let (split, model_splits) = split_rules(configured);
        let keys = Keys::of_clients(&configured.credentials, hash_salt.expose());
        let certificates = Certificates::of_clients(&auth.certificates, hash_salt.expose());
        let tenant_header = configured.server.tenant_header();
        let is_of_tenant = |caller: &Caller| caller.tenant.is_some();
        Self {
            has_tenants: tenant_header.is_some()
                || auth.jwt.as_ref().is_some_and(|jwt| !jwt.tenant_claim.is_empty())
                || keys.owners().any(is_of_tenant)
                || certificates.owners().any(is_of_tenant),
            split,
            model_splits,
            continuations: ContinuationRules::of(configured),
            targets: TargetRules::of(configured),
            models: configured.models.keys().map(|name| ModelName::new(name)).collect(),
            worker_waits: worker_waits(&configured.models),
            request_timeout: timeouts.request,
            connect_timeout: timeouts.connect,
            body_idle_timeout: timeouts.body_idle,
            leg_timeouts: LegTimeouts::of(timeouts),
            upstream: configured.upstream.clone(),
            quarantine,
            client_idle_timeout: timeouts.client_idle,
            http2,
            client_write_timeout: timeouts.client_write,
            realtime_idle_timeout: timeouts.realtime_idle,
            connections_per_address: configured.limits.connections_per_address,
            min_body_rate: configured.limits.min_body_rate,
            session_affinity: Some(session_affinity).filter(|ttl| !ttl.is_zero()),
            booking_ttl: timeouts.booking,
            queue_timeout: configured.queue.timeout,
            drain_delay: timeouts.drain_delay,
            drain_timeout: timeouts.drain,
            busy_status,
            request_rules: RequestRules {
                trust: if trust_hints { HintTrust::Trusted } else { HintTrust::Ignored },
                limits: configured.limits.clone(),
                forward_authorization: configured.upstream.forward_authorization,
            },
            tell_decisions,
            max_body_bytes,
            clients_are_known: configured.clients_are_known(),
            keys,
            missing_keys: configured.missing_keys(),
            certificates,
            trusted_proxies: auth.networks(),
            tenant_header,
            operators_are_known: configured.operators_are_known(),
            operator_certificates: Certificates::of_operators(&auth.certificates),
            operators: Keys::of_operators(&configured.credentials, configured.server.admin_token.as_ref()),
            admin_token_reads,
            admin_names: configured.server.admin_names.clone(),
            measure: Measure { block_size, bytes_per_token, salt: hash_salt },
        }
    }

    /// Returns how long this request's session is bound to its workers; `None` if it is not bound.
    #[must_use]
    pub(crate) fn affinity(&self, hints: &Hints) -> Option<Duration> {
        hints.session.as_ref()?;
        hints.session_control.map(|control| control.timeout).or(self.session_affinity)
    }
}

impl State {
    /// Returns what routing may know of a request; see [`routing_request`].
    #[must_use]
    pub(crate) fn routing_request(
        &self,
        (request, workers): (&Request, &Snapshot),
        tokens: Option<&RequestTokens>,
        tenant: Option<TenantLoad>,
    ) -> RoutingRequest {
        let Settings { measure, targets, .. } = &self.settings;
        // The engine's own hashes of a prompt contain the adapter that the request names as its model.
        let adapter = Some(request.model.as_str()).filter(|_| workers.is_adapter(&request.model));
        let adapter = request.hints.lora.as_deref().or(adapter);
        let mut measured = routing_request((request, adapter, workers), measure, targets, tokens, tenant);
        self.programs.fill(&mut measured);
        measured
    }
}
