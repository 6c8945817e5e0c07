//! A place before prefill, and the routing of a handoff that exists (E6).

use super::*;
use crate::{
    NativeMode,
    query::{Committed, Pairing},
};

fn committed(beyond_limits: bool, only_consumes: bool) -> Pairing {
    Pairing { committed: Some(Committed { beyond_limits, only_consumes }), ..Pairing::default() }
}

impl Fixture {
    fn reserve(&self, change: impl FnOnce(&mut Query<'_>)) -> Result<Option<ReservedPlace>, RouteError> {
        let (snapshot, model, request) = (self.registry.snapshot(), ModelName::new("m"), request());
        let mut query = query(&snapshot, &model, Leg::Decode, &request);
        change(&mut query);
        self.router.reserve(&query, &mut None)
    }

    fn routed(&self, pairing: Pairing, pin: Option<u64>) -> Result<u64, RouteError> {
        let pin = pin.map(|worker| (WorkerId(worker), None));
        let routed = self.route(Leg::Decode, |query| (query.pairing, query.pin) = (pairing, pin));
        routed.map(|routed| routed.receipt.worker.0)
    }
}

#[test]
fn e6_a_reserved_place_is_that_of_its_own_leg_only() {
    let fixture = fixture(selector(choose(0)));
    let place = fixture.reserve(|_| {}).unwrap().unwrap();
    // E6.2
    assert_eq!((place.worker(), fixture.worker(3).reserved()), (WorkerId(3), 1));
    assert_eq!(fixture.routed(Pairing::default(), None), Ok(4));
    let own = Pairing { reserved: Some(WorkerId(3)), ..Pairing::default() };
    assert_eq!(fixture.routed(own, None), Ok(3));
    drop(place);
    assert_eq!((fixture.worker(3).reserved(), fixture.routed(Pairing::default(), None)), (0, Ok(3)));
    // No other place is needed on a worker without a limit.
    let unlimited = fixture.reserve(|query| query.pin = Some((WorkerId(4), None))).unwrap();
    assert!(unlimited.is_none());
}

#[test]
fn e6_what_would_refuse_decode_refuses_before_prefill() {
    let shed = crate::ShedReason { status: 429, reason: "enough".into() };
    let fixture = fixture(selector(Ok(Decision::Shed(shed.clone()))));
    // E6.1
    assert_eq!(fixture.reserve(|_| {}).unwrap_err(), RouteError::Shed(shed));
    let unknown = fixture.reserve(|query| query.pin = Some((WorkerId(9), None))).unwrap_err();
    assert_eq!(unknown, RouteError::UnknownWorker(WorkerId(9)));
}

#[test]
fn e6_policies_and_limits_do_not_refuse_a_committed_handoff() {
    let shed = crate::ShedReason { status: 429, reason: "enough".into() };
    let drops_all = Program::Scorers {
        filters: vec![fake(World::Filter, (&[], &[]), Answer::Keep(vec![]))],
        scorers: vec![],
        picker: Picker::Min,
    };
    for program in [selector(Ok(Decision::Shed(shed))), drops_all] {
        let fixture = fixture(program);
        assert!(fixture.routed(Pairing::default(), None).is_err());
        let routed = fixture.route(Leg::Decode, |query| query.pairing = committed(false, false)).unwrap();
        // E6.5
        assert_eq!(routed.receipt.decider.fallback(), Some("committed"));
    }
    let fixture = fixture(selector(choose(0)));
    let _busy = fixture.worker(3).reserve();
    let pinned = |pairing| fixture.routed(pairing, Some(3));
    assert!(matches!(pinned(Pairing::default()), Err(RouteError::NotEligible(..))));
    // E6.5: a pinned worker that is busy is waited for, and taken in the end
    assert_eq!(pinned(committed(false, false)), Err(RouteError::AllBusy(Leg::Decode)));
    assert_eq!(pinned(committed(true, false)), Ok(3));
    fixture.worker(4).set_health(Health::Unhealthy);
    fixture.worker(3).set_draining(true);
    assert_eq!(fixture.routed(committed(true, false), None), Ok(3), "it drains, and no other is left");
    fixture.worker(3).set_health(Health::Unhealthy);
    assert!(matches!(fixture.routed(committed(true, true), None), Err(RouteError::NoWorker { .. })));
}

#[test]
fn e6_one_token_goes_to_workers_that_the_client_did_not_allow() {
    let fixture = fixture(selector(choose(0)));
    let request = RoutingRequest {
        required_taints: vec!["gold".into()],
        allowed_workers: Some(vec![WorkerId(77)]),
        ..request()
    };
    let route = |pairing| {
        let routed = fixture.route_as(Leg::Decode, &request, |query| query.pairing = pairing);
        routed.map(|routed| routed.receipt.worker.0)
    };
    assert!(route(committed(true, false)).is_err());
    // E6.6
    assert_eq!((route(committed(false, true)), route(committed(true, true))), (Ok(3), Ok(3)));
}

#[test]
fn e6_a_prefill_worker_whose_decode_workers_are_busy_leaves_the_request_to_another_pair() {
    let fixture = fixture(Program::Native(NativeMode::RoundRobin));
    for (id, rack) in [(11, "r1"), (12, "r2")] {
        let more = format!(",topology.rack={rack},kv_transfer=required:rack");
        let prefill = format!("id={id},role=prefill,engine=vllm,url=http://b:{id},model=racks{more}");
        let decode = format!(
            "id={},role=decode,engine=vllm,url=http://b:{},model=racks,topology.rack={rack},max_concurrency=1",
            id + 10,
            id + 10
        );
        for flag in [prefill, decode] {
            fixture.registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
        }
    }
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("racks"), request());
    let prefill = || {
        let query = query(&snapshot, &model, Leg::Prefill, &request);
        let routed = fixture.router.route(&query, &RouterConfigOverride::default()).unwrap();
        routed.receipt.worker.0
    };
    let four = || (0..4).map(|_| prefill()).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(four(), [11, 12].into());
    let busy = fixture.worker(21).reserve();
    // E6.8
    assert_eq!(four(), [12].into());
    let _both = (busy, fixture.worker(22).reserve());
    assert_eq!(four(), [11, 12].into(), "decode says that it is busy");
}
