//! Metric families whose values are read when they are asked for: workers, policies, the index.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};

use pointsman_workers::{DpRank, FeedStatus, Snapshot, Worker, WorkerId, events::FeedCounters};

use crate::state::State;

mod policies;

/// The families in the OpenMetrics text format, without its end mark.
pub(crate) fn families(app: &State) -> String {
    let mut out = String::new();
    workers(&mut out, &app.registry.snapshot());
    policies::policies(&mut out, app);
    index(&mut out, app);
    let lost = [(String::new(), app.router.decisions().lost())];
    counter(&mut out, "pointsman_decision_records_lost", "Decisions that were made but not recorded", &lost);
    feeds(&mut out, app);
    out
}

fn workers(out: &mut String, snapshot: &Snapshot) {
    let each = |value: &dyn Fn(&Worker) -> u64| -> Vec<(String, u64)> {
        let labels = |worker: &Worker| format!("worker=\"{}\",role=\"{}\"", worker.id(), worker.spec().role);
        snapshot.workers().iter().map(|worker| (labels(worker), value(worker))).collect()
    };
    let eligible = each(&|worker| u64::from(worker.ineligible().is_none()));
    gauge(out, "pointsman_worker_eligible", "Whether a worker may be chosen now", &eligible);
    let booked = each(&|worker| u64::from(worker.active_requests()));
    gauge(out, "pointsman_worker_active_requests", "Requests booked on a worker", &booked);
}

fn index(out: &mut String, app: &State) {
    let stats = app.router.index().stats();
    let one = |value| [(String::new(), value)];
    gauge(out, "pointsman_index_blocks", "Blocks in the prefix index", &one(stats.blocks));
    gauge(out, "pointsman_index_bytes", "Bytes of the prefix index", &one(stats.bytes));
    counter(out, "pointsman_index_evicted", "Records that gave way to the byte budget", &one(stats.evicted));
    counter(
        out,
        "pointsman_index_dropped",
        "Records dropped because the writer was behind",
        &one(stats.dropped),
    );
    counter(out, "pointsman_index_orphans", "Blocks of KV events without a known place", &one(stats.orphans));
}

fn feeds(out: &mut String, app: &State) {
    let feeds = app.feeds.status();
    let each = |value: &dyn Fn(&FeedStatus) -> u64| -> Vec<(String, u64)> {
        let labels = |worker: &WorkerId, rank: &DpRank| format!("worker=\"{worker}\",rank=\"{rank}\"");
        feeds.iter().map(|((worker, rank), status)| (labels(worker, rank), value(status))).collect()
    };
    let count = |counter: fn(&FeedCounters) -> &AtomicU64| {
        each(&move |status: &FeedStatus| counter(&status.counters).load(Ordering::Relaxed))
    };
    gauge(
        out,
        "pointsman_kv_feed_live",
        "Whether the engine's own word is there",
        &each(&|feed| u64::from(feed.live())),
    );
    gauge(
        out,
        "pointsman_kv_feed_lag_milliseconds",
        "Age of the last batch when it came",
        &count(|c| &c.lag_ms),
    );
    counter(out, "pointsman_kv_feed_messages", "Messages of KV events", &count(|c| &c.messages));
    counter(out, "pointsman_kv_feed_events", "KV events", &count(|c| &c.events));
    counter(out, "pointsman_kv_feed_gaps", "Gaps in the numbers of messages", &count(|c| &c.gaps));
    counter(out, "pointsman_kv_feed_replayed", "Messages that a replay brought", &count(|c| &c.replayed));
    counter(out, "pointsman_kv_feed_forgets", "Times everything was forgotten", &count(|c| &c.forgets));
    counter(out, "pointsman_kv_feed_decode_errors", "Messages that are none", &count(|c| &c.decode_errors));
    counter(
        out,
        "pointsman_kv_feed_violations",
        "Connections given up because the engine broke the protocol or a limit",
        &count(|c| &c.violations),
    );
    counter(
        out,
        "pointsman_kv_feed_silences",
        "Connections given up because the engine showed no life",
        &count(|c| &c.silences),
    );
}

fn gauge(out: &mut String, name: &str, help: &str, lines: &[(String, u64)]) {
    family(out, name, "gauge", help, "", lines);
}

fn counter(out: &mut String, name: &str, help: &str, lines: &[(String, u64)]) {
    family(out, name, "counter", help, "_total", lines);
}

fn family(out: &mut String, name: &str, kind: &str, help: &str, suffix: &str, lines: &[(String, u64)]) {
    let _ = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    for (labels, value) in lines {
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(out, "{name}{suffix}{labels} {value}");
    }
}
