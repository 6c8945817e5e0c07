use super::*;
use crate::{activity::StuckBy, spec::WorkerSpec};

/// Workers of one pool, all healthy.
fn fleet(workers: u64) -> Arc<Registry> {
    let registry = Arc::new(Registry::default());
    for id in 1..=workers {
        let flag = format!("id={id},role=aggregated,engine=vllm,model=m,dp_size=2,url=http://a:{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    registry
}

/// Puts aside what can be, of the workers `stuck`, in this order. Returns the ones that are.
fn away(registry: &Registry, stuck: &[u64]) -> Vec<u64> {
    let (snapshot, since) = (registry.snapshot(), Instant::now());
    let stuck = stuck.iter().zip(0_u64..).map(|(id, after)| {
        let since = since + Duration::from_secs(after);
        (Stuck { by: StuckBy::Silence, since }, snapshot.get(WorkerId(*id)).unwrap())
    });
    put_aside(&snapshot, stuck.collect());
    let workers = snapshot.workers().iter().filter(|worker| worker.is_put_aside());
    workers.map(|worker| worker.id().0).collect()
}

#[tokio::test(start_paused = true)]
async fn b7_neither_the_last_eligible_worker_nor_more_than_half_of_a_pool_is_put_aside() {
    // B7.5
    assert_eq!(away(&fleet(1), &[1]), [0; 0]);
    assert_eq!(away(&fleet(2), &[2, 1]), [2], "the first that was stuck");
    assert_eq!(away(&fleet(3), &[1, 2, 3]), [1]);
    assert_eq!(away(&fleet(5), &[5, 4, 3, 2, 1]), [4, 5]);
    let registry = fleet(3);
    assert_eq!(away(&registry, &[1]), [1]);
    let snapshot = registry.snapshot();
    assert_eq!(snapshot.get(WorkerId(1)).unwrap().ineligible(), Some(Ineligible::Stuck));
    snapshot.get(WorkerId(2)).unwrap().set_health(Health::Unhealthy);
    assert_eq!(away(&registry, &[1]), [1], "half of those that are up");
    (0..5).for_each(|_| snapshot.get(WorkerId(3)).unwrap().note_outcome(false));
    assert_eq!(away(&registry, &[1]), [0; 0], "the other one fails");
    assert_eq!(snapshot.get(WorkerId(1)).unwrap().ineligible(), None);
    assert_eq!(snapshot.get(WorkerId(1)).unwrap().times_put_aside(), 1);
}
