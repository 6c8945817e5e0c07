use pointsman_workers::{BookingRequest, Health, Ineligible, Leg, ModelName, OpenHandoff, Worker};

use super::*;
use crate::found::Read;

const RULES: FleetRules = FleetRules {
    max_workers: 100,
    drain: Duration::from_secs(30),
    moves: false,
    guard: GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_secs(10) },
};

struct Fixture {
    fleet: Arc<Fleet>,
    registry: Arc<Registry>,
    source: Reporter,
    stop: CancellationToken,
}

impl Fixture {
    fn start() -> Self {
        Self::with(RULES)
    }

    fn with(rules: FleetRules) -> Self {
        let registry = Arc::new(Registry::default());
        let fleet = Fleet::new(registry.clone(), Resolver::default(), rules);
        let (source, stop) = (fleet.add_source("etcd:a"), CancellationToken::new());
        Self { fleet, registry, source, stop }
    }

    /// Runs the fleet's timers for a time.
    async fn run(&self, time: Duration) {
        let run = self.fleet.clone().run(self.stop.clone());
        assert!(tokio::time::timeout(time, run).await.is_err(), "the fleet runs until it is stopped");
    }

    fn present(&self, ids: impl IntoIterator<Item = u64>) {
        self.source.present(snapshot(ids.into_iter().map(|id| Found::staying(spec(id))).collect()));
    }

    fn ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> =
            self.registry.snapshot().workers().iter().map(|worker| worker.id().0).collect();
        ids.sort_unstable();
        ids
    }

    fn worker(&self, id: u64) -> Arc<Worker> {
        self.registry.snapshot().get(WorkerId(id)).unwrap().clone()
    }

    fn source_status(&self) -> SourceStatus {
        self.fleet.status().sources[2].clone()
    }
}

fn spec(id: u64) -> WorkerSpec {
    WorkerSpec::parse_flag(&format!("id={id},role=decode,engine=vllm,model=m,url=http://a:{id}")).unwrap()
}

fn request() -> BookingRequest {
    BookingRequest::new(Leg::Decode, Vec::new().into(), 16, 16)
}

fn snapshot(workers: Vec<Found>) -> SourceSnapshot {
    SourceSnapshot { workers, refused: Vec::new(), read: Read::Whole }
}

#[tokio::test(start_paused = true)]
async fn p1_a_worker_that_is_listed_no_more_drains_and_is_gone_when_its_requests_end() {
    let fixture = Fixture::start();
    fixture.present(1..=4);
    assert_eq!(fixture.ids(), [1, 2, 3, 4]);
    let worker = fixture.worker(4);
    worker.set_health(Health::Healthy);
    let booking = worker.candidates()[0].book(&request());
    fixture.present(1..=2);
    // P1.1: the idle one is gone, the busy one drains
    assert_eq!(fixture.ids(), [1, 2, 4]);
    assert_eq!(worker.ineligible(), Some(Ineligible::Draining));
    assert_eq!(fixture.fleet.status().leaving, 1);
    // P1.1: as long as decode has to pull the blocks of its prompt
    let handoff = OpenHandoff::new(worker.clone());
    drop(booking);
    fixture.run(Duration::from_secs(1)).await;
    assert_eq!(fixture.ids(), [1, 2, 4]);
    drop(handoff);
    fixture.run(Duration::from_secs(1)).await;
    assert_eq!(fixture.ids(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn p1_a_worker_that_comes_back_while_it_drains_is_kept() {
    let fixture = Fixture::start();
    fixture.present(1..=4);
    let worker = fixture.worker(4);
    worker.set_health(Health::Healthy);
    let _booking = worker.candidates()[0].book(&request());
    fixture.present(1..=3);
    assert!(worker.leaving());
    fixture.present(1..=4);
    // P1.2
    assert!(Arc::ptr_eq(&worker, &fixture.worker(4)));
    assert_eq!(worker.ineligible(), None);
    fixture.run(Duration::from_secs(60)).await;
    assert_eq!(fixture.ids(), [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn p1_the_streams_of_a_worker_that_leaves_are_asked_to_move_until_it_is_listed_again() {
    for moves in [false, true] {
        let fixture = Fixture::with(FleetRules { moves, ..RULES });
        fixture.present(1..=4);
        let worker = fixture.worker(4);
        let _booking = worker.candidates()[0].book(&request());
        fixture.present(1..=3);
        // P1.5
        assert_eq!((worker.leaving(), worker.asks_to_move() != 0), (true, moves));
        fixture.present(1..=4);
        // P1.5
        assert_eq!((worker.leaving(), worker.asks_to_move()), (false, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn p1_a_worker_whose_requests_do_not_end_is_removed_after_the_drain() {
    let fixture = Fixture::start();
    fixture.present(1..=4);
    let _booking = fixture.worker(4).candidates()[0].book(&request());
    fixture.present(1..=3);
    fixture.run(Duration::from_secs(29)).await;
    assert_eq!(fixture.ids(), [1, 2, 3, 4]);
    fixture.run(Duration::from_secs(2)).await;
    // P1.3
    assert_eq!(fixture.ids(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn p1_what_an_operator_removed_stays_away_until_its_source_changes_it() {
    let fixture = Fixture::start();
    fixture.present(1..=3);
    assert!(fixture.fleet.leave(WorkerId(2)) && !fixture.fleet.leave(WorkerId(9)));
    fixture.present(1..=3);
    // P1.4
    assert_eq!(fixture.ids(), [1, 3]);
    let mut other = spec(2);
    other.max_concurrency = Some(7);
    fixture.source.present(snapshot([spec(1), other, spec(3)].map(Found::staying).into()));
    assert_eq!(fixture.ids(), [1, 2, 3]);
    assert!(fixture.fleet.leave(WorkerId(3)));
    fixture.present(1..=2);
    fixture.present(1..=3);
    // P1.4: listed again
    assert_eq!(fixture.ids(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn p1_another_pod_at_the_same_address_is_another_worker() {
    let fixture = Fixture::start();
    let of = |pod: &str| Found { identity: Some(pod.into()), ..Found::staying(spec(1)) };
    let present = |pod: &str| fixture.source.present(snapshot(vec![of(pod)]));
    present("a/0");
    let worker = fixture.worker(1);
    worker.set_health(Health::Healthy);
    worker.set_draining(true);
    let _booking = worker.candidates()[0].book(&request());
    present("a/1");
    assert!(fixture.worker(1).continues(&worker), "another place among the ports of its pod");
    present("b/0");
    let next = fixture.worker(1);
    // P1.6
    assert!(!next.continues(&worker) && !next.draining() && next.own_requests() == 0);
    assert_eq!(next.health(), Health::Unknown);
    assert!(fixture.fleet.leave(WorkerId(1)));
    present("b/0");
    // P1.4, P1.7
    assert!(fixture.ids().is_empty());
    let dismissed = fixture.fleet.status().dismissed;
    assert_eq!((&*dismissed[0].id_text, &*dismissed[0].url), ("1", "http://a:1"));
    present("c/0");
    // P1.6
    assert_eq!(fixture.ids(), [1]);
    assert!(fixture.fleet.status().dismissed.is_empty());
}

#[tokio::test(start_paused = true)]
async fn p2_sources_do_not_take_workers_from_each_other() {
    let fixture = Fixture::start();
    let other = fixture.fleet.add_source("file:b");
    fixture.present(1..=2);
    let kept = fixture.worker(1);
    let mut taken = spec(1);
    taken.max_concurrency = Some(7);
    other.present(snapshot(vec![Found::staying(taken)]));
    // P2.3
    assert!(Arc::ptr_eq(&kept, &fixture.worker(1)));
    let refused = &fixture.fleet.status().sources[3].refused[0];
    // P2.1: both sources are named
    assert!(refused.problem.contains("`file:b`") && refused.problem.contains("`etcd:a`"), "{refused:?}");
    let joined = fixture.fleet.join(spec(1).clone());
    assert_eq!(joined, Ok(WorkerId(1)), "described alike");
    fixture.fleet.set_configured(&[spec(2)]);
    assert_eq!(&*fixture.fleet.sources_of_workers()[&WorkerId(2)], "static");
    let mut other = spec(2);
    other.max_concurrency = Some(7);
    let refused = fixture.fleet.join(other).unwrap_err().to_string();
    assert_eq!(refused, "id 2 of source `admin` belongs to source `static`: remove one of them");
}

#[tokio::test(start_paused = true)]
async fn p3_a_source_that_is_away_keeps_its_workers_and_is_shown() {
    let fixture = Fixture::start();
    assert_eq!(fixture.source_status().state, SourceState::Starting);
    fixture.present(1..=4);
    fixture.source.away("connection refused");
    tokio::time::advance(Duration::from_secs(3600)).await;
    fixture.source.away("connection refused");
    fixture.run(Duration::from_secs(60)).await;
    // P3.1
    assert_eq!(fixture.ids(), [1, 2, 3, 4]);
    let status = fixture.source_status();
    // P3.2
    assert_eq!((status.state, status.times_away, status.workers), (SourceState::Away, 1, 4));
    assert!(status.age_ms >= Some(3_600_000) && status.problem.as_deref() == Some("connection refused"));
    fixture.source.alive();
    assert_eq!(fixture.source_status().state, SourceState::Present);
}

#[tokio::test(start_paused = true)]
async fn p4_a_mass_removal_waits_until_the_source_was_read_again() {
    let fixture = Fixture::start();
    fixture.present(1..=8);
    fixture.present(1..=1);
    // P4.1: the removal waits, and is shown
    assert_eq!(fixture.ids().len(), 8);
    assert_eq!(fixture.source_status().held, 7);
    let asked = async {
        fixture.source.recheck().await;
        fixture.present(1..=1);
    };
    tokio::select! {
        () = asked => {}
        () = fixture.run(Duration::from_secs(30)) => panic!("the source was not asked again"),
    }
    // P4.2: asked, and confirmed
    assert_eq!(fixture.ids(), [1]);
    assert_eq!(fixture.source_status().held, 0);
}

#[tokio::test(start_paused = true)]
async fn p4_workers_that_said_that_they_leave_are_not_held() {
    let fixture = Fixture::start();
    fixture.present(1..=8);
    let leaving = |id: u64| Found::staying(spec(id)).ending();
    fixture.source.present(snapshot((1..=8).map(leaving).collect()));
    assert!(fixture.worker(1).leaving());
    fixture.source.present(snapshot(Vec::new()));
    // P4.6
    assert!(fixture.ids().is_empty());
}

#[tokio::test(start_paused = true)]
async fn p4_workers_that_are_not_ready_are_counted_by_role_and_keep_their_drain() {
    let fixture = Fixture::start();
    let prefill = |id: u64| {
        WorkerSpec::parse_flag(&format!("id={id},role=prefill,engine=vllm,url=http://a:{id}")).unwrap()
    };
    let report = |unready: &[u64]| {
        let found =
            |spec: WorkerSpec| Found { unready: unready.contains(&spec.id.0), ..Found::staying(spec) };
        let workers = (1..=8).map(prefill).chain((11..=12).map(spec)).map(found);
        fixture.source.present(snapshot(workers.collect()));
        (1..=12)
            .filter(|id| fixture.ids().contains(id) && fixture.worker(*id).leaving())
            .collect::<Vec<u64>>()
    };
    assert_eq!(report(&[]), [0_u64; 0]);
    // P4.7: half of the prefill workers; all decode workers are more than half of theirs
    assert_eq!(report(&[1, 2, 3, 4, 11, 12]), [1, 2, 3, 4]);
    assert_eq!(report(&[1, 2, 3, 4, 5, 11]), [11]);
    assert_eq!(report(&[11]), [11]);
    let _booking = fixture.worker(11).candidates()[0].book(&request());
    // P4.7: it is not removed while it is listed, and drains when it is not
    fixture.run(RULES.drain * 2).await;
    assert_eq!((fixture.ids().len(), fixture.fleet.status().leaving), (10, 0));
    fixture.source.present(snapshot((1..=8).map(prefill).chain([spec(12)]).map(Found::staying).collect()));
    assert_eq!((fixture.ids().len(), fixture.fleet.status().leaving), (10, 1));
    fixture.run(RULES.drain + Duration::from_secs(1)).await;
    assert_eq!(fixture.ids().len(), 9);
}

#[tokio::test(start_paused = true)]
async fn p4_workers_that_are_not_ready_are_counted_by_their_models() {
    let fixture = Fixture::start();
    let other = |id: u64| WorkerSpec { models: vec![ModelName::new("n")], ..spec(id) };
    let leaving = |unready: &[u64]| {
        let found =
            |spec: WorkerSpec| Found { unready: unready.contains(&spec.id.0), ..Found::staying(spec) };
        fixture.source.present(snapshot((1..=8).map(spec).chain((9..=10).map(other)).map(found).collect()));
        (1..=10).filter(|id| fixture.worker(*id).leaving()).collect::<Vec<u64>>()
    };
    assert_eq!(leaving(&[]), [0_u64; 0]);
    // P4.7
    assert_eq!(leaving(&[1, 9, 10]), [1]);
    assert_eq!(leaving(&[1, 2, 9]), [1, 2, 9]);
}

#[tokio::test(start_paused = true)]
async fn p4_the_streams_of_a_worker_that_is_not_ready_stay() {
    let fixture = Fixture::with(FleetRules { moves: true, ..RULES });
    let last = Found::staying(spec(4));
    let unready = Found { unready: true, ..last.clone() };
    let asks = |last: Option<&Found>| {
        let others = (1..=3).map(spec).map(Found::staying);
        fixture.source.present(snapshot(others.chain(last.cloned()).collect()));
        let worker = fixture.worker(4);
        (worker.leaving(), worker.asks_to_move() != 0)
    };
    assert_eq!(asks(Some(&last)), (false, false));
    let _booking = fixture.worker(4).candidates()[0].book(&request());
    // P4.7
    assert_eq!(asks(Some(&unready)), (true, false));
    assert_eq!(asks(Some(&last.clone().ending())), (true, true));
    assert_eq!(asks(Some(&unready)), (true, false));
    assert_eq!(asks(None), (true, true), "it drains");
}

#[tokio::test(start_paused = true)]
async fn workers_flap_for_a_long_time_and_none_is_lost_or_left_behind() {
    let fixture = Fixture::start();
    let mut seed = 1_u64;
    for _ in 0..2_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let ids = (1..=50).filter(|id| (seed >> (id % 60)) & 3 != 0);
        fixture.present(ids);
        tokio::time::advance(Duration::from_millis(200)).await;
        fixture.fleet.tick(Instant::now());
    }
    fixture.present(1..=50);
    assert_eq!(fixture.ids(), (1..=50).collect::<Vec<_>>());
    let inner = fixture.fleet.inner.lock();
    assert_eq!((inner.members.owners().count(), inner.members.leaving(), inner.dismissed.len()), (50, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn workers_of_the_configuration_change_and_others_stay() {
    let fixture = Fixture::start();
    fixture.fleet.set_configured(&[spec(1), spec(2)]);
    fixture.fleet.join(spec(9)).unwrap();
    let kept = fixture.worker(1);
    let mut two = spec(2);
    two.max_concurrency = Some(7);
    fixture.fleet.set_configured(&[spec(1), two, spec(3)]);
    assert_eq!(fixture.ids(), [1, 2, 3, 9]);
    assert!(Arc::ptr_eq(&kept, &fixture.worker(1)), "its health and bookings stay");
    assert_eq!(fixture.worker(2).spec().max_concurrency, Some(7));
    fixture.fleet.set_configured(&[spec(3)]);
    assert_eq!(fixture.ids(), [3, 9]);
}
