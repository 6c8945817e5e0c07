//! When a feed that is not live is a problem.

use prefix_index::IndexConfig;
use tokio::time::{Duration, advance};

use super::*;
use crate::spec::WorkerSpec;

/// A sink of a worker's feed, and the state of the feed.
fn feed(worker: &Arc<Worker>) -> (IndexSink, FeedStatus) {
    let (live, endpoint, outage): (Arc<AtomicBool>, Arc<str>, _) =
        (Arc::default(), "tcp://a:5557".into(), Arc::<Outage>::default());
    let sink = IndexSink {
        index: Arc::new(PrefixIndex::new(IndexConfig::default()).unwrap()),
        owner: worker.clone(),
        worker: worker.id(),
        rank: DpRank(0),
        live: live.clone(),
        endpoint: endpoint.clone(),
        outage: outage.clone(),
        forget_lines: LogLimit::new(LOG_INTERVAL),
        live_lines: LogLimit::new(LOG_INTERVAL),
        skipped_lines: LogLimit::new(SKIPPED_LOG_INTERVAL),
        unreadable_lines: LogLimit::new(SKIPPED_LOG_INTERVAL),
    };
    (sink, FeedStatus { counters: Arc::default(), endpoint, live, outage })
}

#[tokio::test(start_paused = true)]
async fn h6_a_feed_is_a_problem_when_its_worker_has_been_healthy_without_it_for_ten_seconds() {
    let spec = WorkerSpec::parse_flag("id=1,role=decode,engine=vllm,url=http://a:1").unwrap();
    let worker = Arc::new(Worker::new(spec));
    let (sink, status) = feed(&worker);
    let lost = |after| {
        let (sink, status) = (&sink, &status);
        async move {
            advance(Duration::from_secs(after)).await;
            sink.lost(&zmtp::Error::Closed);
            status.problem().is_some()
        }
    };
    // H6.22
    assert!(!lost(60).await, "the engine loads its model");
    worker.set_health(Health::Healthy);
    assert!(!lost(9).await);
    assert!(lost(1).await);
    sink.live(true);
    assert_eq!((status.live(), status.problem()), (true, None));
    sink.live(false);
    assert!(!lost(9).await);
    assert!(lost(1).await);
    worker.set_health(Health::Unhealthy);
    assert!(!lost(1).await, "that is the worker's problem");
    worker.set_health(Health::Healthy);
    sink.live(true);
    sink.unreadable("not msgpack");
    assert_eq!((status.live(), status.problem().as_deref()), (false, Some("not msgpack")));
    sink.live(false);
    assert_eq!(status.problem().as_deref(), Some("not msgpack"), "a new connection alone does not end it");
    sink.live(true);
    assert_eq!((status.live(), status.problem()), (true, None));
}
