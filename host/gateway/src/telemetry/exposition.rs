//! `/metrics`: every metric of the gateway in the OpenMetrics text format.
//!
//! Counters of requests are in [`Metrics`]. Collectors read the values that other parts of the gateway keep,
//! at the time of a scrape, so no event is counted twice. `prometheus_client` writes all of them.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt,
    io::Write as _,
    sync::{Arc, atomic::Ordering},
};

use axum::response::{IntoResponse, Response};
use flate2::{Compression, write::GzEncoder};
use http::{HeaderMap, HeaderName, header};
use pointsman_cli::lost_log_lines;
use pointsman_discovery::Fleet;
use pointsman_policy_runtime::PolicyManager;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{
    Feeds, Invariant, ModelName, Registry as Workers, WorkerId, events::FeedCounters, url_without_secrets,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text},
    registry::Registry,
};

use super::metrics::{MAX_MODELS, Metrics};
use crate::version::{RELEASE, commit};

mod families;
mod prometheus_text;
mod replicas;
mod slots;
mod sources;

use families::{Families, Labels};
pub(crate) use replicas::ReplicaFigures;

/// Sources of the metrics.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// Workers that serve models.
    pub(crate) workers: Arc<Workers>,
    /// The index, and the record of decisions.
    pub(crate) router: Arc<Router>,
    /// Feeds of KV events.
    pub(crate) feeds: Arc<Feeds>,
    /// The slots and what they run.
    pub(crate) policies: Arc<PolicyManager>,
    /// Outcomes for policies that learn.
    pub(crate) learning: Arc<Learning>,
    /// Sources of workers.
    pub(crate) fleet: Arc<Fleet>,
    /// Models of the configuration. The models that workers serve are known, too.
    pub(crate) models: Vec<ModelName>,
    /// Models that can be served now.
    pub(crate) servable_models: Vec<String>,
    /// Whether the latest version of the configuration file is in force.
    pub(crate) config_applied: bool,
    /// Number of its keys that need a restart.
    pub(crate) config_needs_restart: usize,
    /// Number of requests in the admission queue.
    pub(crate) queued: usize,
    /// Number of requests that wait until a worker can serve their model, by model.
    pub(crate) worker_waits: BTreeMap<ModelName, usize>,
    /// Figures of the exchange with other gateways.
    pub(crate) replicas: ReplicaFigures,
}

/// A text format of `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextFormat {
    /// OpenMetrics 1.0, with exemplars.
    OpenMetrics,
    /// Prometheus 0.0.4, which does not support exemplars.
    Prometheus,
}

impl TextFormat {
    /// Returns the format that a scraper asks for: OpenMetrics if it names it and does not prefer
    /// `text/plain`.
    #[must_use]
    pub(crate) fn accepted(headers: &HeaderMap) -> Self {
        let open = weight(headers, header::ACCEPT, "application/openmetrics-text");
        if open > 0.0 && open >= weight(headers, header::ACCEPT, "text/plain") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    #[must_use]
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Returns the response with the text of `/metrics`, compressed if the scraper takes gzip.
pub(crate) fn respond(text: String, format: TextFormat, headers: &HeaderMap) -> Response {
    let described =
        [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept, accept-encoding")];
    if weight(headers, header::ACCEPT_ENCODING, "gzip") > 0.0 {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        if let Ok(body) = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish()) {
            return (described, [(header::CONTENT_ENCODING, "gzip")], body).into_response();
        }
    }
    (described, text).into_response()
}

/// Returns the highest weight (`q`) that a header gives a value; 0 if it does not name the value.
fn weight(headers: &HeaderMap, name: HeaderName, wanted: &str) -> f32 {
    let accepted = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let weights = accepted.flat_map(|value| value.split(',')).filter_map(|range| {
        let mut parts = range.split(';').map(str::trim);
        if !parts.next()?.eq_ignore_ascii_case(wanted) {
            return None;
        }
        let mut given = parts.filter_map(|part| part.split_once('='));
        match given.find(|(name, _)| name.trim().eq_ignore_ascii_case("q")) {
            Some((_, weight)) => weight.trim().parse().ok(),
            None => Some(1.0),
        }
    });
    weights.fold(0.0, f32::max)
}

/// Returns the text of `/metrics`.
///
/// # Errors
/// `prometheus_client` cannot write a metric.
pub(crate) fn encode(metrics: &Metrics, sources: Sources, format: TextFormat) -> Result<String, fmt::Error> {
    let snapshot = sources.workers.snapshot();
    let served = snapshot.models().into_iter().filter(|model| !snapshot.is_adapter(model));
    metrics.expect_models(&served.chain(&sources.models).collect());
    metrics.expect_fixed();
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    registry.register_collector(Box::new(sources));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(match format {
        TextFormat::OpenMetrics => text,
        TextFormat::Prometheus => prometheus_text::of(&text),
    })
}

impl Collector for Sources {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let out = &mut Families(encoder);
        let build =
            vec![("version", RELEASE.to_owned()), ("commit", commit().unwrap_or("unknown").to_owned())];
        let help = "1, with the release and the commit that the gateway was built from";
        out.gauges("pointsman_build_info", help, [(build, 1_u64)])?;
        let help = "Number of models that can be served now; GET /readyz names them";
        out.gauge("pointsman_servable_models", help, self.servable_models.len() as u64)?;
        self.encode_models(out)?;
        let help = "1 if the latest version of the configuration file is in force, apart from keys that need a \
                    restart, else 0; GET /status says why";
        out.gauge("pointsman_config_last_reload_successful", help, u64::from(self.config_applied))?;
        let help =
            "Number of keys of the configuration that changed and need a restart; GET /status names them";
        out.gauge("pointsman_config_needs_restart", help, self.config_needs_restart as u64)?;
        let help = "Number of log lines that were not written, by reason";
        let lost = lost_log_lines().map(|(reason, lines)| (vec![("reason", reason.to_owned())], lines));
        out.counters("pointsman_log_lines_dropped", help, lost)?;
        let help = "Number of requests that wait in the admission queue now";
        out.gauge("pointsman_queued_requests", help, self.queued as u64)?;
        let waits = self.worker_waits.iter();
        let waits = waits.map(|(model, waits)| (vec![("model", model.to_string())], *waits as u64));
        let help = "Number of requests that wait now until a worker can serve their model, which has wait_for_workers";
        out.gauges("pointsman_requests_waiting_for_workers", help, waits)?;
        self.encode_workers(out)?;
        sources::encode(out, &self.fleet)?;
        replicas::encode(out, &self.replicas)?;
        slots::encode(out, &self.policies, &self.learning)?;
        self.encode_index(out)?;
        self.encode_feeds(out)
    }
}

impl Sources {
    /// Writes which of the models can be served that are configured, or that a worker has. Adapters are left
    /// out, because engines may have any number of them.
    fn encode_models(&self, out: &mut Families<'_>) -> fmt::Result {
        let snapshot = self.workers.snapshot();
        let listed = snapshot.models().into_iter().filter(|model| !snapshot.is_adapter(model));
        let models: BTreeSet<&ModelName> = listed.chain(&self.models).collect();
        let servable: HashSet<&str> = self.servable_models.iter().map(String::as_str).collect();
        let models = models
            .into_iter()
            .take(MAX_MODELS)
            .map(|model| (vec![("model", model.to_string())], u64::from(servable.contains(model.as_str()))));
        let help = "1 if the model can be served now, else 0; GET /status says why";
        out.gauges("pointsman_model_servable", help, models)
    }

    fn encode_workers(&self, out: &mut Families<'_>) -> fmt::Result {
        let snapshot = self.workers.snapshot();
        let workers = || {
            snapshot.workers().iter().map(|worker| {
                let labels =
                    vec![("worker", worker.id().to_string()), ("role", worker.spec().role.to_string())];
                (worker, labels)
            })
        };
        let info = workers().map(|(worker, mut labels)| {
            let spec = worker.spec();
            labels.push(("engine", spec.engine.as_str().to_owned()));
            labels.push(("url", url_without_secrets(&spec.url)));
            (labels, 1_u64)
        });
        out.gauges("pointsman_worker_info", "1 for each worker, described by the labels", info)?;
        let eligible = workers().map(|(worker, labels)| (labels, u64::from(worker.ineligible().is_none())));
        out.gauges("pointsman_worker_eligible", "1 if the worker may be chosen now, else 0", eligible)?;
        let faulty = workers().map(|(worker, labels)| (labels, u64::from(worker.is_faulty())));
        let help = "1 if the worker is not ready, unhealthy or failing and does not drain, else 0; GET /workers says why";
        out.gauges("pointsman_worker_faulty", help, faulty)?;
        let known = workers().map(|(worker, labels)| (labels, u64::from(worker.reports_load())));
        let help = "1 if the engine reports running requests, waiting requests and KV usage, else 0";
        out.gauges("pointsman_worker_load_known", help, known)?;
        let misconfigured = workers().map(|(worker, labels)| (labels, u64::from(worker.is_misconfigured())));
        let help = "1 if the engine contradicts the worker's description, else 0; GET /workers says why";
        out.gauges("pointsman_worker_misconfigured", help, misconfigured)?;
        let busy: HashSet<WorkerId> =
            self.router.busy().busy_candidates(&snapshot).iter().map(|busy| busy.worker).collect();
        let busy = workers().map(|(worker, labels)| (labels, u64::from(busy.contains(&worker.id()))));
        let help = "1 if the worker is beyond a busy threshold of some leg, else 0";
        out.gauges("pointsman_worker_busy", help, busy)?;
        let paused = workers().map(|(worker, labels)| (labels, u64::from(worker.pause().is_some())));
        let help = "1 if the worker is not chosen for a pause because its engine has too much to do, else 0";
        out.gauges("pointsman_worker_paused", help, paused)?;
        let stuck = workers().map(|(worker, labels)| (labels, u64::from(worker.stuck().is_some())));
        let help = "1 if requests wait for the worker and it makes no progress, else 0";
        out.gauges("pointsman_worker_stuck", help, stuck)?;
        let times = workers().map(|(worker, labels)| (labels, worker.ejections()));
        let help = "Number of times that the worker was ejected because it made no progress";
        out.counters("pointsman_worker_ejections", help, times)?;
        let booked = workers().map(|(worker, labels)| (labels, u64::from(worker.own_requests())));
        let help = "Number of requests that this gateway has booked on the worker";
        out.gauges("pointsman_worker_active_requests", help, booked)
    }

    fn encode_index(&self, out: &mut Families<'_>) -> fmt::Result {
        let stats = self.router.index().stats();
        out.gauge("pointsman_index_blocks", "Number of blocks in the prefix index", stats.blocks)?;
        out.gauge("pointsman_index_bytes", "Memory of the prefix index in bytes", stats.bytes)?;
        let help = "Number of records that the prefix index evicted to stay within its memory limit";
        out.counter("pointsman_index_evicted", help, stats.evicted)?;
        let help = "Number of records that the prefix index dropped because its writer was behind";
        out.counter("pointsman_index_dropped", help, stats.dropped)?;
        let help = "Number of blocks of KV events whose place in the prefix index is not known";
        out.counter("pointsman_index_orphans", help, stats.orphans)?;
        let help = "Number of decisions that could not be recorded";
        out.counter("pointsman_decision_records_lost", help, self.router.decisions().lost())?;
        let host = Invariant::ALL.into_iter().map(|rule| (rule.as_str(), rule.times_broken()));
        let index = prefix_index::Invariant::ALL.into_iter().map(|rule| rule.as_str()).zip(stats.broken);
        let broken = host.chain(index).map(|(place, times)| (vec![("place", place.to_owned())], times));
        let help = "Number of states that contradict themselves, by the rule that they break; each is a bug";
        out.counters("pointsman_invariant_violations", help, broken)
    }

    fn encode_feeds(&self, out: &mut Families<'_>) -> fmt::Result {
        let feeds = self.feeds.status();
        let snapshot = self.workers.snapshot();
        let drains = |id| snapshot.get(id).is_some_and(|worker| worker.drains());
        let feeds = || {
            feeds.iter().map(|((worker, rank), status)| {
                (vec![("worker", worker.to_string()), ("rank", rank.to_string())], (*worker, status))
            })
        };
        let live = feeds().filter(|(_, (worker, _))| !drains(*worker));
        let live = live.map(|(labels, (_, status))| (labels, u64::from(status.live())));
        let feeds = || feeds().map(|(labels, (_, status))| (labels, status));
        let help = "1 if the feed is connected and up to date, else 0; workers that drain have none";
        out.gauges("pointsman_kv_feed_live", help, live)?;
        let seconds = |millis: u64| std::time::Duration::from_millis(millis).as_secs_f64();
        let lag =
            feeds().map(|(labels, status)| (labels, seconds(status.counters.lag_ms.load(Ordering::Relaxed))));
        out.gauges("pointsman_kv_feed_lag_seconds", "Age of the last batch at its arrival in seconds", lag)?;
        for (name, help, counter) in FEED_COUNTERS {
            let counts = feeds().map(|(labels, status): (Labels, _)| {
                (labels, counter(&status.counters).load(Ordering::Relaxed))
            });
            out.counters(name, help, counts)?;
        }
        Ok(())
    }
}

type FeedCounter = fn(&FeedCounters) -> &std::sync::atomic::AtomicU64;

const FEED_COUNTERS: [(&str, &str, FeedCounter); 9] = [
    ("pointsman_kv_feed_messages", "Number of messages of KV events", |feed| &feed.messages),
    ("pointsman_kv_feed_events", "Number of KV events", |feed| &feed.events),
    ("pointsman_kv_feed_gaps", "Number of gaps in the sequence of messages", |feed| &feed.gaps),
    ("pointsman_kv_feed_replayed", "Number of messages that a replay delivered", |feed| &feed.replayed),
    ("pointsman_kv_feed_failed_replays", "Number of replays given up while messages were missing", |feed| {
        &feed.failed_replays
    }),
    (
        "pointsman_kv_feed_forgets",
        "Number of times that everything known of the engine's cache was discarded",
        |feed| &feed.forgets,
    ),
    ("pointsman_kv_feed_decode_errors", "Number of messages that could not be decoded", |feed| {
        &feed.decode_errors
    }),
    (
        "pointsman_kv_feed_violations",
        "Number of connections closed because the engine broke the protocol or a limit",
        |feed| &feed.violations,
    ),
    ("pointsman_kv_feed_silences", "Number of connections closed because the engine stayed silent", |feed| {
        &feed.silences
    }),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m4_open_metrics_is_for_scrapers_that_prefer_it() {
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                            text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        let cases = [
            (prometheus_3, true),
            ("text/plain, Application/OpenMetrics-Text", true),
            ("application/openmetrics-text; Q=0.5", true),
            ("application/openmetrics-text;q=0, text/plain", false),
            ("text/plain;q=0.9,application/openmetrics-text;q=0.1", false),
            ("application/openmetrics-text;q=x", false),
            ("text/plain;version=0.0.4;q=1,*/*;q=0.1", false),
            ("application/openmetrics-text-2", false),
        ];
        for (accept, is_open) in cases {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
            // M4.4
            assert_eq!(TextFormat::accepted(&headers) == TextFormat::OpenMetrics, is_open, "{accept}");
        }
        // M4.4
        assert_eq!(TextFormat::accepted(&HeaderMap::new()), TextFormat::Prometheus);
    }
}
