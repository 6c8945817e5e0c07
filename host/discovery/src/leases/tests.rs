use pointsman_workers::{Registry, Resolver};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    fleet::{Fleet, FleetRules},
    guard::GuardRules,
    source::start,
};

fn spec(id: u64) -> WorkerSpec {
    WorkerSpec::parse_flag(&format!("id={id},role=decode,engine=vllm,model=m,url=http://a:{id}")).unwrap()
}

fn running() -> (Arc<Leases>, Arc<Registry>, CancellationToken) {
    let guard = GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_secs(10) };
    let rules = FleetRules { max_workers: 100, drain: Duration::from_secs(30), moves: false, guard };
    let registry = Arc::new(Registry::default());
    let fleet = Fleet::new(registry.clone(), Resolver::default(), rules);
    let reporter = fleet.add_source("leases");
    let leases =
        Leases::new(reporter.clone(), LeaseRules { max_leases: 8, max_ttl: Duration::from_secs(60) });
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    start(leases.clone(), reporter, &tracker, stop.clone());
    tracker.spawn(fleet.run(stop.clone()));
    (leases, registry, stop)
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn p6_a_worker_is_there_as_long_as_its_lease_is_renewed() {
    let (leases, registry, _stop) = running();
    let count = || registry.snapshot().workers().len();
    leases.put(spec(1), Duration::from_secs(5)).unwrap();
    // P6.1
    assert_eq!(count(), 1);
    for _ in 0..5 {
        seconds(4).await;
        leases.renew(WorkerId(1), None).unwrap();
    }
    assert_eq!(count(), 1);
    seconds(6).await;
    // P6.2
    assert_eq!(count(), 0);
    assert_eq!(leases.renew(WorkerId(1), None), Err(LeaseError::NoLease(WorkerId(1))));
}

#[tokio::test(start_paused = true)]
async fn p6_released_workers_leave_at_once_and_many_expired_ones_are_confirmed_first() {
    let (leases, registry, _stop) = running();
    let count = || registry.snapshot().workers().len();
    for id in 1..=8 {
        leases.put(spec(id), Duration::from_secs(5)).unwrap();
    }
    assert!(leases.release(WorkerId(1)) && leases.release(WorkerId(2)) && !leases.release(WorkerId(2)));
    // P6.3
    assert_eq!(count(), 6);
    seconds(6).await;
    assert_eq!(count(), 6, "six leases ended together");
    leases.put(spec(3), Duration::from_secs(60)).unwrap();
    seconds(11).await;
    assert_eq!(count(), 1);
}

#[tokio::test(start_paused = true)]
async fn p6_leases_have_bounds() {
    let (leases, _, _stop) = running();
    let ttl = Duration::from_secs(5);
    for id in 1..=8 {
        leases.put(spec(id), ttl).unwrap();
    }
    // P6.4
    assert_eq!(leases.put(spec(9), ttl), Err(LeaseError::TooMany(8)));
    assert_eq!(leases.put(spec(8), ttl), Ok(()));
    for ttl in [Duration::from_millis(999), Duration::from_secs(61)] {
        assert!(matches!(leases.put(spec(1), ttl), Err(LeaseError::Ttl { .. })));
    }
    let mut taken = spec(1);
    taken.id = WorkerId(2);
    taken.url = "http://static:1".into();
    assert!(matches!(leases.put(taken, ttl), Ok(())), "its own id with another URL");
    let mut large = spec(1);
    large.labels.insert("a".to_owned(), "x".repeat(10_000));
    assert!(matches!(leases.put(large, ttl), Err(LeaseError::TooLarge(_))));
}

#[tokio::test(start_paused = true)]
async fn p6_a_pause_of_the_gateway_itself_ends_no_lease() {
    let (leases, registry, _stop) = running();
    let count = || registry.snapshot().workers().len();
    let ttl = Duration::from_secs(6);
    leases.put(spec(1), ttl).unwrap();
    leases.put(spec(2), ttl).unwrap();
    seconds(2).await;
    // No task runs meanwhile: the process was stopped, and renewals wait.
    tokio::time::advance(Duration::from_secs(60)).await;
    seconds(2).await;
    // P6.6
    assert_eq!((count(), leases.renew(WorkerId(1), None)), (2, Ok(())));
    seconds(5).await;
    assert_eq!(count(), 1, "the one that is not renewed ends");
}
