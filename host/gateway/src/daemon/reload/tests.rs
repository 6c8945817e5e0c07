use super::*;

mod keys;
mod schema;

fn spec(flag: &str) -> WorkerSpec {
    WorkerSpec::parse_flag(flag).unwrap()
}

#[test]
fn workers_of_the_file_change_and_those_that_joined_otherwise_stay() {
    let registry = Registry::default();
    let [one, two] = [1, 2].map(|id| spec(&format!("id={id},role=prefill,engine=vllm,url=http://a:{id}")));
    let joined = spec("id=9,role=decode,engine=vllm,url=http://a:9");
    for worker in [&one, &two, &joined] {
        registry.upsert(worker.clone());
    }
    let kept = registry.snapshot().get(WorkerId(1)).unwrap().clone();
    let two_otherwise = spec("id=2,role=decode,engine=vllm,url=http://a:2");
    let three = spec("id=3,role=prefill,engine=vllm,url=http://a:3");
    let before = [one.clone(), two];
    let changes = move_workers(&registry, &before, &[one.clone(), two_otherwise, three.clone()]);
    let expected = WorkerChanges { added: vec![WorkerId(3)], removed: vec![], changed: vec![WorkerId(2)] };
    assert_eq!(changes, expected);
    assert!(
        Arc::ptr_eq(registry.snapshot().get(WorkerId(1)).unwrap(), &kept),
        "its health and bookings stay"
    );
    let changes = move_workers(&registry, &[one, three.clone()], &[three]);
    assert_eq!(changes.removed, [WorkerId(1)]);
    let left: Vec<u64> = registry.snapshot().workers().iter().map(|worker| worker.id().0).collect();
    assert_eq!(left, [9, 2, 3]);
}
