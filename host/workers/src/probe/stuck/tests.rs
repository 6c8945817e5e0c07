use super::*;
use crate::spec::WorkerSpec;

/// Workers of one pool, all healthy.
fn fleet(workers: u64) -> Arc<Registry> {
    let registry = Arc::new(Registry::default());
    for id in 1..=workers {
        let flag = format!("id={id},role=aggregated,engine=vllm,model=m,dp_size=2,url=http://a:{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    registry
}

/// Ejects the workers `stuck` in this order, as far as possible. Returns those that were ejected.
fn away(registry: &Registry, stuck: &[u64]) -> Vec<u64> {
    let (snapshot, since) = (registry.snapshot(), Instant::now());
    let stuck = stuck.iter().zip(0_u64..).map(|(id, after)| {
        let since = since + Duration::from_secs(after);
        (Stuck { by: StuckBy::Silence, since }, snapshot.get(WorkerId(*id)).unwrap())
    });
    eject(&snapshot, stuck.collect());
    let workers = snapshot.workers().iter().filter(|worker| worker.is_ejected());
    workers.map(|worker| worker.id().0).collect()
}

#[tokio::test(start_paused = true)]
async fn b7_neither_the_last_eligible_worker_nor_more_than_half_of_a_pool_is_ejected() {
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
    assert_eq!(snapshot.get(WorkerId(1)).unwrap().ejections(), 1);
}

/// Workers 1 and 2 prefill, 3 and 4 decode. Handoffs were late between these pairs, in this order. Returns
/// those that are blamed.
fn blamed(late: &[(u64, u64)]) -> Vec<u64> {
    let registry = Registry::default();
    for (id, role) in (1..).zip(["prefill", "prefill", "decode", "decode"]) {
        let flag = format!("id={id},role={role},engine=vllm,model=m,url=http://a:{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    let snapshot = registry.snapshot();
    let worker = |id: u64| snapshot.get(WorkerId(id)).unwrap();
    for (request, (prefill, decode)) in (0_u64..).zip(late) {
        worker(*prefill).note_handoff_late(request, WorkerId(*decode));
        worker(*decode).note_handoff_late(request, WorkerId(*prefill));
    }
    let look = |id| (worker(id).activity().look(Instant::now(), Duration::from_secs(30)).stuck, worker(id));
    let found = (1..=4).map(look).filter_map(|(stuck, worker)| Some((stuck?, worker)));
    let mut found: Vec<(Stuck, &Arc<Worker>)> = found.collect();
    blame_one_of_two(&mut found);
    let kept = found.iter().map(|(_, worker)| worker.id().0).collect();
    let is_stuck = |id: &u64| worker(*id).stuck().is_some();
    assert_eq!(kept, (1..=4).filter(is_stuck).collect::<Vec<u64>>());
    kept
}

#[tokio::test(start_paused = true)]
async fn b7_one_worker_is_to_blame_for_late_handoffs() {
    // B7.7
    assert_eq!(blamed(&[(1, 3), (1, 4), (1, 3)]), [1]);
    assert_eq!(blamed(&[(1, 4), (1, 4), (1, 3), (1, 4)]), [1], "the other one had this partner only");
    assert_eq!(blamed(&[(1, 4), (2, 4), (1, 4), (1, 3)]), [1, 4]);
    assert_eq!(blamed(&[(1, 4), (2, 4), (1, 4)]), [4]);
    assert_eq!(blamed(&[(1, 4), (1, 4), (1, 4)]), [1], "nothing tells, so the prefill worker");
    assert_eq!(blamed(&[(1, 3), (2, 4), (1, 3)]), [0; 0]);
}
