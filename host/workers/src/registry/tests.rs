use tokio::time::Duration;
use tokio_util::task::TaskTracker;

use super::*;
use crate::{
    booking::BookingRequest,
    worker::{Health, Ineligible},
};

fn spec(flag: &str) -> WorkerSpec {
    WorkerSpec::parse_flag(flag).unwrap()
}

/// A registry of so many workers, whose models are not known.
pub(super) fn registry(workers: usize) -> Registry {
    let registry = Registry::default();
    for id in 1..=workers {
        registry.upsert(spec(&format!("id={id},role=aggregated,engine=vllm,url=http://a:{id}")));
    }
    registry
}

fn ids(pool: &[Candidate]) -> Vec<(u64, u32)> {
    pool.iter().map(|candidate| (candidate.worker.id().0, candidate.rank.0)).collect()
}

fn listed(models: Vec<ModelName>) -> ListedModels {
    ListedModels { models, base_models: vec![], adapters: vec![] }
}

fn one_request() -> BookingRequest {
    BookingRequest::new(Leg::Decode, Vec::new().into(), 16, 16)
}

#[test]
fn pools_follow_roles_ranks_and_local_prefill() {
    let registry = Registry::default();
    registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
    registry.upsert(spec("id=2,role=decode,engine=vllm,url=http://a:2,model=m,dp_size=2"));
    registry.upsert(spec("id=3,role=decode,engine=sglang,url=http://a:3,model=m"));
    registry.upsert(spec("id=4,role=aggregated,engine=openai,url=http://a:4,model=m"));
    let (snapshot, model) = (registry.snapshot(), ModelName::new("m"));
    assert_eq!(ids(snapshot.pool(&model, Leg::Prefill)), [(1, 0)]);
    assert_eq!(ids(snapshot.pool(&model, Leg::Decode)), [(2, 0), (2, 1), (3, 0)]);
    // B1.3
    assert_eq!(ids(snapshot.pool(&model, Leg::Aggregated)), [(2, 0), (2, 1), (4, 0)]);
    assert!(snapshot.pool(&ModelName::new("other"), Leg::Decode).is_empty());
}

#[test]
fn b2_activation_is_idempotent_and_survives_workers_that_leave_and_rejoin_elsewhere() {
    let registry = Registry::default();
    let model = ModelName::new("m");
    let add =
        |url: &str| registry.upsert(spec(&format!("role=prefill,engine=vllm,model=m,url=http://{url}"))).id();
    let first = add("a:1");
    let observe = |up| registry.snapshot().activation(&model).unwrap().observe(up);
    // B2.1: pending
    assert_eq!(observe(false), None, "pending until both pools were up once");
    assert_eq!((observe(true), observe(true)), (Some(ActivationState::Active), None));
    // B2.1, B2.2
    assert_eq!((observe(false), observe(false)), (Some(ActivationState::Unavailable), None));
    registry.remove(first);
    assert!(registry.snapshot().activation(&model).is_none());
    add("b:1");
    let state = registry.snapshot().activation(&model).unwrap().state();
    assert_eq!(state, ActivationState::Unavailable);
    assert_eq!(observe(true), Some(ActivationState::Active));
}

#[test]
fn a_worker_with_an_equal_description_keeps_its_health_and_bookings() {
    let registry = Registry::default();
    let worker = registry.upsert(spec("role=decode,engine=vllm,model=m,url=http://a:1"));
    let version = registry.snapshot().version();
    let again = registry.upsert(spec("role=decode,engine=vllm,model=m,url=http://a:1"));
    assert!(Arc::ptr_eq(&worker, &again) && registry.snapshot().version() == version);
}

#[test]
fn p12_the_ranks_follow_the_new_description_whatever_is_reported_to_the_worker_before() {
    let registry = Registry::default();
    let flag = "id=1,role=decode,engine=vllm,model=m,url=http://a:1,dp_size=2";
    let before = registry.upsert(spec(flag));
    before.set_health(Health::Healthy);
    let booking = before.candidates()[1].book(&one_request());
    let sure = |worker: &Arc<Worker>| {
        worker.candidates().iter().map(|rank| rank.load().surely_eligible()).collect::<Vec<_>>()
    };
    let limited = registry.upsert(spec(&format!("{flag},max_concurrency=1")));
    let tell = |worker: &Worker| [true, false].map(|asleep| worker.set_asleep(asleep));
    tell(&before);
    // P12.1, P12.3
    assert_eq!((sure(&limited), limited.ineligible()), (vec![false; 2], Some(Ineligible::AtCapacity)));
    let open = registry.upsert(spec(&flag.replace("dp_size=2", "dp_size=3")));
    tell(&limited);
    assert_eq!((sure(&open), open.active_requests(), open.ineligible()), (vec![true; 3], 1, None));
    // P12.1
    let prefill = registry.upsert(spec(&flag.replace("role=decode", "role=prefill")));
    assert!(!before.set_health(Health::Healthy), "a check of the description before");
    assert_eq!((prefill.ineligible(), prefill.active_requests()), (Some(Ineligible::NotReady), 1));
    drop(booking);
    assert_eq!(prefill.active_requests(), 0);
}

#[test]
fn p12_a_worker_that_its_engine_completes_keeps_its_bookings_and_its_drain() {
    let registry = Registry::default();
    let before = registry.upsert(spec("id=1,role=decode,engine=vllm,model=m,url=http://a:1"));
    before.set_health(Health::Healthy);
    before.set_draining(true);
    let booking = before.candidates()[0].book(&one_request());
    registry.complete(&before, WorkerSpec { dp_size: 4, ..before.spec().clone() });
    let after = registry.snapshot().get(WorkerId(1)).unwrap().clone();
    // P12.4
    assert_eq!((after.candidates().len(), after.active_requests(), after.draining()), (4, 1, true));
    after.set_draining(false);
    assert_eq!((before.draining(), after.ineligible()), (false, None));
    drop(booking);
    assert_eq!(after.active_requests(), 0);
}

#[test]
fn many_workers_join_and_leave_in_one_snapshot() {
    let registry = Registry::default();
    let of =
        |id: u64, port: u16| spec(&format!("id={id},role=decode,engine=vllm,model=m,url=http://a:{port}"));
    registry.apply(vec![of(1, 1), of(2, 2), of(3, 3)], &[]);
    let before = registry.snapshot();
    registry.apply(vec![of(1, 1), of(2, 9), of(4, 4)], &[WorkerId(3)]);
    let after = registry.snapshot();
    assert_eq!(after.version(), before.version() + 1);
    let ids: BTreeSet<u64> = after.workers().iter().map(|worker| worker.id().0).collect();
    assert_eq!(ids, [1, 2, 4].into());
    let same = |id| Arc::ptr_eq(before.get(WorkerId(id)).unwrap(), after.get(WorkerId(id)).unwrap());
    assert!(same(1) && !same(2), "only a worker with an equal description is kept");
    registry.apply(vec![of(1, 1)], &[WorkerId(7)]);
    assert_eq!(registry.snapshot().version(), after.version(), "nothing changed");
}

#[test]
fn invariant_2_a_pinned_snapshot_does_not_see_later_changes() {
    let registry = Registry::default();
    registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
    let before = registry.snapshot();
    registry.remove(WorkerId(1));
    assert_eq!(before.workers().len(), 1);
    assert!(registry.snapshot().workers().is_empty());
}

#[test]
fn b2_a_worker_rejoining_under_another_address_is_found() {
    let registry = Registry::default();
    registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1,model=m"));
    registry.remove(WorkerId(1));
    registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://b:9,model=m"));
    let snapshot = registry.snapshot();
    // B2.4
    assert_eq!(
        snapshot.get(WorkerId(1)).map(|worker| worker.spec().url.to_string()),
        Some("http://b:9".into())
    );
}

#[test]
fn b5_a_worker_is_eligible_only_after_its_facts_were_read() {
    let registry = Registry::default();
    let worker = registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1"));
    // B5.1
    assert_eq!(worker.ineligible(), Some(Ineligible::NotReady));
    registry.learn_models(WorkerId(1), listed(vec![ModelName::new("learnt")]), false);
    worker.set_health(Health::Healthy);
    assert_eq!(worker.ineligible(), None);
    assert!(registry.snapshot().serves(&ModelName::new("learnt")));
}

#[test]
fn m4_nothing_stays_of_models_that_their_engines_unloaded() {
    let registry = Registry::default();
    registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1"));
    let name = |number: u32| ModelName::new(&format!("m{number}"));
    for number in 0..50 {
        registry.learn_models(WorkerId(1), listed(vec![name(number), ModelName::new("base")]), false);
        registry.publish(&registry.members.lock());
    }
    // M4.7
    assert_eq!(registry.activations.lock().len(), 2);
    assert!(!registry.has_lost(&name(1)));
    registry.remove(WorkerId(1));
    assert!(registry.has_lost(&name(49)) && registry.has_lost(&ModelName::new("base")));
}

#[test]
fn m4_workers_that_come_and_go_leave_a_bounded_number_of_models() {
    let registry = Registry::default();
    for worker in 0..3 {
        registry.upsert(spec("id=1,role=prefill,engine=vllm,url=http://a:1"));
        let names = (0..6_000).map(|model| ModelName::new(&format!("w{worker}-m{model}"))).collect();
        registry.learn_models(WorkerId(1), listed(names), false);
        registry.publish(&registry.members.lock());
        registry.remove(WorkerId(1));
    }
    // M4.7
    assert_eq!(registry.activations.lock().len(), super::MAX_LOST_MODELS);
}

#[tokio::test(start_paused = true)]
async fn b5_reports_of_many_engines_share_a_snapshot() {
    let registry = Arc::new(Registry::default());
    let of = |id: u64| spec(&format!("id={id},role=prefill,engine=vllm,url=http://a:{id}"));
    registry.apply((1..=3).map(of).collect(), &[]);
    let publisher = registry.clone();
    let publisher = TaskTracker::new().spawn(async move { publisher.publish_late().await });
    let started = Instant::now();
    tokio::time::advance(Duration::from_millis(10)).await;
    registry.learned.published(300, started);
    let version = registry.snapshot().version();
    let models = |count: u64| {
        let learn =
            |id| registry.learn_models(WorkerId(id), listed(vec![ModelName::new(&format!("m{id}"))]), false);
        (1..=count).for_each(learn);
    };
    models(3);
    // B5.11
    assert_eq!(registry.snapshot().version(), version);
    tokio::time::sleep(Duration::from_millis(321)).await;
    let snapshot = registry.snapshot();
    assert_eq!((snapshot.version(), snapshot.models().len()), (version + 1, 3));
    publisher.abort();
}
