use std::sync::Arc;

use pointsman_workers::{
    BlockHash, DpRank, EngineFacts, Health, Ineligible, Leg, ModelName, Registry, Snapshot, Worker, WorkerId,
    WorkerSpec,
};
use prefix_index::{IndexConfig, PrefixIndex};
use tokio::sync::mpsc;

use super::*;
use crate::{
    Call, Decider, Decision, DecisionContext, Digest, Failure, Generation, Lane, Origin, Picker, Plan,
    Policy, PolicyInfo, Program, RoutingRequest, ShadowAnswer, ShadowResult, ShedReason, Slot, SlotEvent,
    SlotKind, SlotSet, WeightedScorer, World, facts::Wants, policy::TIMEOUT,
};

mod committed;
mod local_plan;
mod short_list;
mod warm_up;

/// A policy with a fixed answer.
#[derive(Debug)]
struct Fake {
    info: PolicyInfo,
    answer: Answer,
}

#[derive(Debug)]
enum Answer {
    Select(Result<Decision, Failure>),
    /// Installs another program in its own slot while it is asked, then chooses row 0.
    SelectAndSwap(std::sync::Weak<crate::Slot>),
    /// Costs are the second column that it wants (after the first), so that a test sees which facts arrived.
    ScoreColumn(usize),
    Costs(Vec<f32>),
    Keep(Vec<u32>),
    Plan(Plan, RouterConfigOverride),
    /// Previews the decode leg with this router while it is called, then plans local prefill.
    PreviewThenPlan(std::sync::Weak<Router>),
}

impl Policy for Fake {
    fn info(&self) -> &PolicyInfo {
        &self.info
    }

    fn keep(
        &self,
        _: &mut DecisionContext<'_>,
        _call: &Call,
        _facts: &[u32],
        kept: &mut Vec<u32>,
    ) -> Result<(), Failure> {
        let Answer::Keep(rows) = &self.answer else { return Err(self.lacks("keep")) };
        kept.clear();
        kept.extend(rows);
        Ok(())
    }

    fn score(
        &self,
        _: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
        costs: &mut Vec<f32>,
    ) -> Result<(), Failure> {
        costs.clear();
        match &self.answer {
            Answer::Costs(given) => costs.extend(given),
            Answer::ScoreColumn(column) => {
                let rows = call.rows as usize;
                let start = self.info.wants.request_width() + column * rows;
                costs.extend(facts[start..start + rows].iter().map(|value| *value as f32));
            }
            _ => return Err(self.lacks("score")),
        }
        Ok(())
    }

    fn select(&self, _: &mut DecisionContext<'_>, _: &Call, _: &[u32]) -> Result<Decision, Failure> {
        match &self.answer {
            Answer::Select(answer) => answer.clone(),
            Answer::SelectAndSwap(slot) => {
                slot.upgrade().unwrap().install(selector(choose(1)));
                choose(0)
            }
            _ => Err(self.lacks("select")),
        }
    }

    fn decide(
        &self,
        _: &mut DecisionContext<'_>,
        _: &Call,
        request: &[u32],
        decode: &[u32],
        prefill: &[u32],
    ) -> Result<Plan, Failure> {
        if let Answer::PreviewThenPlan(router) = &self.answer {
            preview_decode(&router.upgrade().unwrap());
            return Ok(Plan::Local);
        }
        let Answer::Plan(plan, _) = &self.answer else { return Err(self.lacks("decide")) };
        // The shape of what it is given is part of the contract.
        assert_eq!(request.len(), self.info.wants.request_width());
        assert_eq!(decode.len(), self.info.wants.worker_width());
        assert_eq!(prefill.len(), 2 * self.info.wants.worker_width());
        Ok(plan.clone())
    }

    fn decode_config(
        &self,
        _: &mut DecisionContext<'_>,
        call: &Call,
        _: &[u32],
    ) -> Result<RouterConfigOverride, Failure> {
        let Answer::Plan(_, over) = &self.answer else { return Err(self.lacks("decode-config")) };
        assert_eq!(call.rows, 0);
        Ok(*over)
    }
}

fn fake(world: World, wants: (&[&str], &[&str]), answer: Answer) -> Arc<dyn Policy> {
    let wants = Wants::resolve(wants.0, wants.1).unwrap();
    let info = PolicyInfo {
        name: "fake".into(),
        version: "1".into(),
        digest: Digest([7; 32]),
        settings_digest: None,
        world,
        origin: Origin::Embedded,
        wants,
        remembers: false,
        learns: false,
    };
    Arc::new(Fake { info, answer })
}

struct Fixture {
    registry: Registry,
    router: Router,
    events: mpsc::UnboundedReceiver<SlotEvent>,
}

const FLEET: &[&str] = &[
    "id=1,role=prefill,engine=vllm,url=http://a:1,model=m",
    "id=2,role=prefill,engine=vllm,url=http://a:2,model=m,taint=gold",
    "id=3,role=decode,engine=vllm,url=http://a:3,model=m,max_concurrency=1",
    "id=4,role=decode,engine=vllm,url=http://a:4,model=m,label.zone=b",
];

fn fixture_with(on_failure: OnFailure, program: Program) -> Fixture {
    let registry = Registry::default();
    for flag in FLEET {
        registry.upsert(WorkerSpec::parse_flag(flag).unwrap()).set_health(Health::Healthy);
    }
    let (sender, events) = mpsc::unbounded_channel();
    let slots = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), sender.clone()));
    let index = Arc::new(PrefixIndex::new(IndexConfig::default()).unwrap());
    let router = Router::new(Slots::new(slots, []), index, RouterConfig::default(), on_failure);
    Fixture { registry, router, events }
}

fn fixture(program: Program) -> Fixture {
    fixture_with(OnFailure::Fallback, program)
}

fn selector(answer: Result<Decision, Failure>) -> Program {
    Program::Selector { filters: vec![], selector: fake(World::Selector, (&[], &[]), Answer::Select(answer)) }
}

fn scorer(wants: &[&str], column: usize) -> Program {
    let policy = fake(World::Scorer, (&["block-size"], wants), Answer::ScoreColumn(column));
    let scorers = vec![WeightedScorer { policy, weight: 1.0, normalize: Default::default() }];
    Program::Scorers { filters: vec![], scorers, picker: Picker::Min }
}

fn choose(row: u32) -> Result<Decision, Failure> {
    Ok(Decision::Choose { row, costs: vec![], reason: None })
}

fn request() -> RoutingRequest {
    RoutingRequest {
        prompt_tokens: 64,
        block_size: 16,
        prefix: [1, 2, 3, 4].map(|id: u64| BlockHash(id << 40)).to_vec().into(),
        n: 1,
        ..RoutingRequest::default()
    }
}

fn query<'a>(
    snapshot: &'a Snapshot,
    model: &'a ModelName,
    leg: Leg,
    request: &'a RoutingRequest,
) -> Query<'a> {
    Query { seed: 1, request_id: Some("r"), ..Query::new(snapshot, model, leg, request) }
}

impl Fixture {
    fn route(&self, leg: Leg, change: impl FnOnce(&mut Query<'_>)) -> Result<Routed, RouteError> {
        self.route_as(leg, &request(), change)
    }

    fn route_as(
        &self,
        leg: Leg,
        request: &RoutingRequest,
        change: impl FnOnce(&mut Query<'_>),
    ) -> Result<Routed, RouteError> {
        let (snapshot, model) = (self.registry.snapshot(), ModelName::new("m"));
        let mut query = query(&snapshot, &model, leg, request);
        change(&mut query);
        self.router.route(&query, &RouterConfigOverride::default())
    }

    fn worker(&self, id: u64) -> Arc<pointsman_workers::Worker> {
        self.registry.snapshot().get(WorkerId(id)).cloned().unwrap()
    }
}

#[test]
fn a_policy_s_choice_is_booked_and_explained_by_its_receipt() {
    let fixture = fixture(selector(choose(1)));
    let routed = fixture.route(Leg::Prefill, |_| {}).unwrap();
    assert_eq!((routed.receipt.worker, &routed.receipt.decider), (WorkerId(2), &Decider::Policy));
    assert_eq!((routed.receipt.generation, routed.receipt.candidates), (Generation(1), 2));
    // F4.1
    assert_eq!(fixture.worker(2).active_requests(), 1);
    drop(routed);
    // F4.5: on drop
    assert_eq!(fixture.worker(2).active_requests(), 0);
}

#[test]
fn invariant_4_nonsense_is_refused_and_the_fallback_serves() {
    let answers = [
        (choose(9), "invalid"),
        (Ok(Decision::Choose { row: 0, costs: vec![f32::NAN, 0.0], reason: None }), "invalid"),
        (Err(Failure::Trap("unreachable".into())), "trap"),
        (Err(TIMEOUT), "timeout"),
        (Ok(Decision::Abstain), "abstain"),
        (Ok(Decision::Shed(crate::ShedReason { status: 200, reason: "no".into() })), "invalid"),
    ];
    for (answer, expected) in answers {
        let fixture = fixture(selector(answer.clone()));
        let routed = fixture.route(Leg::Prefill, |_| {}).unwrap();
        assert_eq!(routed.receipt.decider.fallback(), Some(expected), "{answer:?}");
    }
}

#[test]
fn a_failing_policy_sheds_or_rejects_where_the_operator_says_so() {
    let failing = || selector(Err(Failure::Trap("x".into())));
    let shed = fixture_with(OnFailure::Shed, failing()).route(Leg::Prefill, |_| {}).unwrap_err();
    assert!(matches!(shed, RouteError::Shed(reason) if reason.status == 429));
    let rejected = fixture_with(OnFailure::Reject, failing()).route(Leg::Prefill, |_| {}).unwrap_err();
    assert_eq!(rejected, RouteError::PolicyFailed("trap"));
}

#[tokio::test(start_paused = true)]
async fn f2_a_preview_leaves_the_trial_call_after_a_pause_to_a_request() {
    let fixture = fixture(selector(Err(TIMEOUT)));
    let fallback = || fixture.route(Leg::Prefill, |_| {}).unwrap().receipt.decider.fallback();
    assert_eq!((fallback(), fallback()), (Some("timeout"), Some("breaker_open")));
    tokio::time::advance(pointsman_workers::BreakerRules::POLICY.first_pause).await;
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Prefill, &request);
    for _ in 0..3 {
        fixture.router.preview(&query, &RouterConfigOverride::default()).unwrap();
    }
    // F2.5
    assert_eq!(fallback(), Some("timeout"), "the policy is tried");
}

#[tokio::test(start_paused = true)]
async fn the_breaker_opens_at_the_first_timeout_and_tries_again_after_its_pause() {
    let mut fixture = fixture(selector(Err(TIMEOUT)));
    let fallback =
        |fixture: &Fixture| fixture.route(Leg::Prefill, |_| {}).unwrap().receipt.decider.fallback();
    assert_eq!(fallback(&fixture), Some("timeout"));
    assert_eq!(fallback(&fixture), Some("breaker_open"));
    tokio::time::advance(pointsman_workers::BreakerRules::POLICY.first_pause).await;
    assert_eq!(fallback(&fixture), Some("timeout"));
    assert_eq!(fallback(&fixture), Some("breaker_open"));
    let event = fixture.events.try_recv().unwrap();
    assert_eq!((event.slot, event.calls, event.failures, event.failure), (SlotKind::Prefill, 1, 1, TIMEOUT));
}

#[test]
fn a_shed_carries_the_policy_s_status_and_reason() {
    let shed = crate::ShedReason { status: 529, reason: "tenant over quota".into() };
    let fixture = fixture(selector(Ok(Decision::Shed(shed.clone()))));
    assert_eq!(fixture.route(Leg::Prefill, |_| {}).unwrap_err(), RouteError::Shed(shed));
    assert_eq!(fixture.worker(1).active_requests() + fixture.worker(2).active_requests(), 0);
}

#[test]
fn facts_come_in_the_order_asked_for_and_labels_become_columns() {
    // Column 0: worker-id low, 1: worker-id high, 2: label. The lowest label value wins: worker 3 has no zone
    // b.
    let fixture = fixture(scorer(&["worker-id", "label-is/zone=b"], 2));
    assert_eq!(fixture.route(Leg::Decode, |_| {}).unwrap().receipt.worker, WorkerId(3));
    let routed = fixture.route(Leg::Decode, |query| query.explain = true).unwrap();
    assert_eq!(routed.receipt.costs, [(WorkerId(3), DpRank(0), 0.0), (WorkerId(4), DpRank(0), 1.0)]);
}

#[test]
fn filters_compact_rows_and_dropping_every_row_is_an_error_of_its_own() {
    let keep = |rows: &[u32]| fake(World::Filter, (&[], &[]), Answer::Keep(rows.to_vec()));
    let last = fake(World::Selector, (&[], &[]), Answer::Select(choose(0)));
    let program = |rows: &[u32]| Program::Selector { filters: vec![keep(rows)], selector: last.clone() };
    assert_eq!(fixture(program(&[1])).route(Leg::Prefill, |_| {}).unwrap().receipt.worker, WorkerId(2));
    let error = fixture(program(&[])).route(Leg::Prefill, |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "no worker can serve 'm': the filters dropped every candidate");
}

#[test]
fn scorers_are_weighed_and_normalized() {
    let scored = |costs: &[f32], weight, normalize| WeightedScorer {
        policy: fake(World::Scorer, (&[], &[]), Answer::Costs(costs.to_vec())),
        weight,
        normalize,
    };
    let scorers = vec![
        scored(&[0.0, 1000.0], 1.0, crate::Normalize::MinMax),
        scored(&[0.2, 0.9], 3.0, crate::Normalize::Unit),
    ];
    let fixture = fixture(Program::Scorers { filters: vec![], scorers, picker: Picker::Min });
    let routed = fixture.route(Leg::Prefill, |query| query.explain = true).unwrap();
    let costs: Vec<f32> = routed.receipt.costs.iter().map(|(_, _, cost)| *cost).collect();
    assert!((costs[0] - 2.4).abs() < 1e-6 && (costs[1] - 1.3).abs() < 1e-6, "{costs:?}");
    assert_eq!(routed.receipt.worker, WorkerId(2));
}

#[test]
fn f1_every_native_mode_serves_and_direct_wants_a_pin() {
    use NativeMode as N;
    for mode in [N::RoundRobin, N::Random, N::PowerOfTwo, N::LeastLoaded, N::Kv] {
        let routed = fixture(Program::Native(mode)).route(Leg::Decode, |_| {}).unwrap();
        assert_eq!(routed.receipt.decider, Decider::Native { mode });
    }
    let direct = fixture(Program::Native(N::Direct));
    assert_eq!(direct.route(Leg::Decode, |_| {}).unwrap_err(), RouteError::NoPin(Leg::Decode));
    let pin = |query: &mut Query<'_>| query.pin = Some((WorkerId(4), None));
    assert_eq!(direct.route(Leg::Decode, pin).unwrap().receipt.worker, WorkerId(4));
}

#[test]
fn f1_each_native_mode_chooses_as_its_name_says() {
    use NativeMode as N;
    let choices = |fixture: &Fixture, seeds: std::ops::Range<u64>| -> Vec<u64> {
        let route = |seed| fixture.route(Leg::Prefill, |query| query.seed = seed).unwrap().receipt.worker.0;
        seeds.map(route).collect()
    };
    let of = |mode| fixture(Program::Native(mode));
    // F1.1: round-robin
    assert_eq!(choices(&of(N::RoundRobin), 0..4), [1, 2, 1, 2]);
    let random = choices(&of(N::Random), 0..60);
    // F1.1: random
    assert!((15..45).contains(&random.iter().filter(|worker| **worker == 1).count()), "{random:?}");
    for mode in [N::PowerOfTwo, N::LeastLoaded] {
        let fixture = of(mode);
        let held = fixture.route(Leg::Prefill, |query| query.pin = Some((WorkerId(1), None))).unwrap();
        // F1.1: power-of-two and least-loaded
        assert_eq!(choices(&fixture, 0..20), [2; 20], "{mode:?}");
        drop(held);
    }
    let kv = of(N::Kv);
    kv.router.index().record(WorkerId(2), DpRank(0), &request().prefix, Instant::now());
    kv.router.index().flush();
    // F1.1: kv
    assert_eq!(choices(&kv, 0..20), [2; 20]);
}

#[test]
fn f5_a_pinned_decision_is_recorded_in_the_index() {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    let routed = fixture.route(Leg::Prefill, |query| query.pin = Some((WorkerId(2), None))).unwrap();
    let recorded = || {
        fixture.router.index().flush();
        let mut overlaps = prefix_index::Overlaps::default();
        fixture.router.index().matches(request().prefix.hashes(), &mut overlaps);
        overlaps.get(WorkerId(2), DpRank(0)).device
    };
    // F5.2
    assert_eq!(recorded(), 4);
    drop(routed);
    // F5.4
    assert_eq!(recorded(), 0, "the worker was never asked");
}

#[test]
fn h3_a_request_that_skips_the_cache_has_no_cached_blocks() {
    let fixture = fixture(Program::Native(NativeMode::Kv));
    fixture.router.index().record(WorkerId(2), DpRank(0), &request().prefix, Instant::now());
    fixture.router.index().flush();
    let pin = |query: &mut Query<'_>| query.pin = Some((WorkerId(2), None));
    for (skips_cache, cached) in [(false, 4), (true, 0), (false, 4)] {
        let request = RoutingRequest { skips_cache, ..request() };
        let routed = fixture.route_as(Leg::Prefill, &request, pin).unwrap();
        // H3.4
        assert_eq!(routed.receipt.cached_blocks, [cached, 0, 0]);
    }
}

#[test]
fn f6_a_worker_with_other_adapters_is_not_eligible() {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    for id in [1, 2] {
        fixture.worker(id).set_health(Health::Unhealthy);
    }
    let flag = "id=7,role=prefill,engine=vllm,url=http://a:7,model=m,lora=fr";
    fixture.registry.upsert(WorkerSpec::parse_flag(flag).unwrap()).set_health(Health::Healthy);
    let asks = |lora: Option<&str>| {
        let request = RoutingRequest { lora: lora.map(Into::into), ..request() };
        fixture.route_as(Leg::Prefill, &request, |_| {}).map(|routed| routed.receipt.worker.0)
    };
    // F6.6
    assert_eq!((asks(Some("fr")), asks(None)), (Ok(7), Ok(7)));
    // F6.6
    assert!(asks(Some("de")).unwrap_err().to_string().contains("lacks the LoRA"));
}

#[test]
fn g_a_pinned_worker_has_no_cost_and_is_not_sampled() {
    let fixture = fixture(Program::Native(NativeMode::Kv));
    let config = RouterConfigOverride { temperature: Some(5.0), ..Default::default() };
    let request = RoutingRequest { preferred_taints: vec![("gold".into(), 9.0)], config, ..request() };
    for seed in 0..50 {
        let routed = fixture.route_as(Leg::Prefill, &request, |query| {
            (query.pin, query.seed, query.explain) = (Some((WorkerId(1), None)), seed, true);
        });
        let receipt = routed.unwrap().receipt;
        // G2.4: worker 2 has the preferred taint
        assert_eq!((receipt.worker, receipt.costs.as_slice()), (WorkerId(1), [].as_slice()));
    }
}

#[test]
fn f3_a_pin_is_booked_and_a_bad_one_is_refused_with_its_reason() {
    let fixture = fixture(selector(choose(0)));
    let pinned = |leg, worker, rank: Option<u32>| {
        fixture.route(leg, |query| query.pin = Some((WorkerId(worker), rank.map(DpRank))))
    };
    let routed = pinned(Leg::Prefill, 2, None).unwrap();
    // F3.5
    assert_eq!((routed.receipt.worker, &routed.receipt.decider), (WorkerId(2), &Decider::Pin));
    // F3.5, F4.1
    assert_eq!(fixture.worker(2).active_requests(), 1);
    // F3.7
    assert_eq!(pinned(Leg::Prefill, 99, None).unwrap_err(), RouteError::UnknownWorker(WorkerId(99)));
    let refused = |leg, worker, rank| pinned(leg, worker, rank).unwrap_err().to_string();
    assert_eq!(
        // F6.1
        refused(Leg::Prefill, 3, None),
        "worker 3 is not eligible for this request: it does not serve the prefill leg of this model"
    );
    assert_eq!(
        refused(Leg::Prefill, 2, Some(4)),
        "worker 2 is not eligible for this request: it has no rank 4: its ranks are 0 to 0"
    );
    fixture.worker(1).set_draining(true);
    // F3.8, F6.3
    assert_eq!(refused(Leg::Prefill, 1, None), "worker 1 is not eligible for this request: it is draining");
}

#[test]
fn i12_the_worker_of_what_a_request_continues_is_one_that_the_client_did_not_choose() {
    let fixture = fixture(selector(choose(0)));
    let continuing = |worker| {
        fixture.route(Leg::Decode, |query| {
            (query.pin, query.continues) = (Some((WorkerId(worker), None)), true);
        })
    };
    let _running = continuing(3).unwrap();
    // I12.13: it is busy
    assert_eq!(continuing(3).unwrap_err(), RouteError::AllBusy(Leg::Decode));
    let holder = fixture.worker(4);
    for (change, reason) in [
        ((|worker| worker.set_asleep(true)) as fn(&Worker) -> bool, "is asleep"),
        (|worker| worker.set_health(Health::Unknown), "is not ready yet"),
        (|worker| worker.set_health(Health::Unhealthy), "fails its health checks"),
    ] {
        assert!(change(&holder));
        let text =
            format!("no worker can serve 'm': worker 4, which has what the request continues, {reason}");
        // I12.13
        assert_eq!(continuing(4).unwrap_err(), RouteError::NoWorker { leg: Leg::Decode, text });
        holder.set_asleep(false);
        holder.set_health(Health::Healthy);
    }
    (0..64).for_each(|_| holder.note_outcome(false));
    assert_eq!(holder.ineligible(), Some(Ineligible::Failing));
    // I12.13: the only worker is tried, as another would be
    assert_eq!(continuing(4).unwrap().receipt.worker, WorkerId(4));
    let failed = fixture.route(Leg::Decode, |query| {
        (query.pin, query.continues) = (Some((WorkerId(4), None)), true);
        query.tried = &[(WorkerId(4), DpRank(0))];
    });
    let text =
        "no worker can serve 'm': worker 4, which has what the request continues, failed it".to_owned();
    // I12.13
    assert_eq!(failed.unwrap_err(), RouteError::NoWorker { leg: Leg::Decode, text });
    let text = "no worker can serve 'm': the worker that had what the request continues has left".to_owned();
    // I12.13
    assert_eq!(continuing(99).unwrap_err(), RouteError::NoWorker { leg: Leg::Decode, text });
}

#[test]
fn f6_only_eligible_candidates_are_offered() {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    fixture.worker(1).set_health(Health::Unhealthy);
    // F6.2
    assert_eq!(fixture.route(Leg::Prefill, |_| {}).unwrap().receipt.worker, WorkerId(2));
    let gold = RoutingRequest { required_taints: vec!["silver".into()], ..request() };
    let error = fixture.route_as(Leg::Prefill, &gold, |_| {}).unwrap_err();
    // F6.5
    assert_eq!(error.to_string(), "no worker can serve 'm': both prefill workers lack a required taint");
    let allowed = RoutingRequest { allowed_workers: Some(vec![WorkerId(4)]), ..request() };
    // F6.4
    assert_eq!(fixture.route_as(Leg::Decode, &allowed, |_| {}).unwrap().receipt.worker, WorkerId(4));
    let nobody = RoutingRequest { allowed_workers: Some(vec![]), ..request() };
    let error = fixture.route_as(Leg::Decode, &nobody, |_| {}).unwrap_err();
    // F6.4
    assert_eq!(
        error.to_string(),
        "no worker can serve 'm': both decode workers are not allowed by the request"
    );
    let tried = [(WorkerId(3), DpRank(0))];
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let again = Query { tried: &tried, ..query(&snapshot, &model, Leg::Decode, &request) };
    let routed = fixture.router.route(&again, &RouterConfigOverride::default()).unwrap();
    assert_eq!(routed.receipt.worker, WorkerId(4));
}

#[test]
fn f6_all_busy_differs_from_no_worker() {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    fixture.worker(4).set_health(Health::Unhealthy);
    let first = fixture.route(Leg::Decode, |_| {}).unwrap();
    // F6.7
    assert_eq!(fixture.route(Leg::Decode, |_| {}).unwrap_err(), RouteError::AllBusy(Leg::Decode));
    drop(first);
    assert!(fixture.route(Leg::Decode, |_| {}).is_ok());
}

#[test]
fn a_decode_worker_must_speak_the_handoff_of_the_prefill_worker() {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    fixture
        .registry
        .upsert(WorkerSpec::parse_flag("id=9,role=prefill,engine=sglang,url=http://a:9,model=m").unwrap());
    fixture.worker(9).set_health(Health::Healthy);
    // No SGLang decode worker: the SGLang prefill worker is not a candidate.
    fixture.worker(1).set_health(Health::Unhealthy);
    fixture.worker(2).set_health(Health::Unhealthy);
    let error = fixture.route(Leg::Prefill, |_| {}).unwrap_err();
    let text = "1 has no decode worker that is up and has its handoff protocol";
    assert!(error.to_string().contains(text), "{error}");
    let error =
        fixture.route(Leg::Decode, |query| query.other_leg = Some((WorkerId(9), DpRank(0)))).unwrap_err();
    assert!(error.to_string().contains("use another handoff protocol"), "{error}");
}

#[test]
fn f5_a_decision_is_recorded_in_the_index_and_draws_the_next_one() {
    let fixture = fixture(Program::Native(NativeMode::Kv));
    let Routed { receipt, mut record, .. } = fixture.route(Leg::Prefill, |_| {}).unwrap();
    record.keep();
    let first = receipt.worker;
    fixture.router.index().flush();
    for seed in 0..20 {
        let routed = fixture.route(Leg::Prefill, |query| query.seed = seed).unwrap();
        // F5.1
        assert_eq!((routed.receipt.worker, routed.receipt.cached_blocks), (first, [4, 0, 0]));
    }
}

#[test]
fn f5_no_decision_is_recorded_for_a_worker_without_a_prefix_cache() {
    let fixture = fixture(Program::Native(NativeMode::Kv));
    let set = |prefix_cache| {
        let facts = EngineFacts { prefix_cache, ..EngineFacts::default() };
        [1, 2].into_iter().for_each(|id| fixture.worker(id).set_facts(facts.clone()));
    };
    let route = || {
        let Routed { receipt, mut record, .. } = fixture.route(Leg::Prefill, |_| {}).unwrap();
        record.keep();
        fixture.router.index().flush();
        (receipt.cached_blocks, fixture.router.index().stats().records)
    };
    set(Some(false));
    // F5.5
    assert_eq!([route(), route()], [([0; 3], 0), ([0; 3], 0)]);
    for known in [None, Some(true)] {
        set(known);
        route();
        assert_eq!(route().0, [4, 0, 0], "{known:?}");
    }
}

#[test]
fn d4_the_decode_override_sees_one_decode_row_and_the_whole_prefill_matrix() {
    let policy = |plan| {
        let over = RouterConfigOverride { temperature: Some(0.5), ..Default::default() };
        let answer = Answer::Plan(plan, over);
        Program::DecodeOverride(fake(
            World::DecodeOverride,
            (&["prompt-tokens"], &["worker-id", "dp-rank"]),
            answer,
        ))
    };
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Decode, &request);
    assert_eq!(fixture.router.plan(&query, Purpose::Route).plan, Plan::Remote);
    // D2.1
    assert_eq!(fixture.router.decode_config(&query, Purpose::Route).0, RouterConfigOverride::DECODE_DEFAULT);
    fixture.router.slots().get(&model, SlotKind::DecodeOverride).install(policy(Plan::Local));
    // D4.1: the fake checks that it is given the previewed decode row
    assert_eq!(fixture.router.plan(&query, Purpose::Route).plan, Plan::Local);
    // D2.3
    assert_eq!(fixture.router.decode_config(&query, Purpose::Route).0.temperature, Some(0.5));
    assert_eq!(fixture.worker(3).active_requests() + fixture.worker(4).active_requests(), 0);
}

#[test]
fn invariant_2_a_decision_ends_with_the_generation_it_began_with() {
    let fixture = fixture(selector(choose(1)));
    let model = ModelName::new("m");
    let slot = fixture.router.slots().get(&model, SlotKind::Prefill);
    let swapping = fake(World::Selector, (&[], &[]), Answer::SelectAndSwap(Arc::downgrade(slot)));
    slot.install(Program::Selector { filters: Vec::new(), selector: swapping });
    let receipt = || fixture.route(Leg::Prefill, |_| {}).unwrap().receipt;
    let (during, after) = (receipt(), receipt());
    assert_eq!(
        (during.worker.0, during.generation.0),
        (1, 2),
        "the generation that the decision started with chose, and is in the receipt"
    );
    assert_eq!((after.worker.0, after.generation.0), (2, 3));
}

#[test]
fn a_new_generation_is_seen_by_the_next_decision_and_a_rollback_restores_the_content() {
    let fixture = fixture(selector(choose(0)));
    let model = ModelName::new("m");
    let slot = fixture.router.slots().get(&model, SlotKind::Prefill);
    let worker = || {
        let receipt = fixture.route(Leg::Prefill, |_| {}).unwrap().receipt;
        (receipt.worker.0, receipt.generation.0)
    };
    assert_eq!(worker(), (1, 1));
    slot.install(selector(choose(1)));
    assert_eq!(worker(), (2, 2));
    assert_eq!(slot.rollback(), Some(Generation(3)));
    assert_eq!(worker(), (1, 3));
    assert_eq!(slot.rollback(), None);
}

#[test]
fn a_canary_serves_its_share_and_a_session_stays_with_what_it_met() {
    let fixture = fixture(selector(choose(0)));
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    let canary = slot.try_out(Lane::Canary, selector(choose(1)), 0.2);
    let met = |draw, session_hash| {
        let request = RoutingRequest { draw, session_hash, ..request() };
        let receipt = fixture.route_as(Leg::Prefill, &request, |_| {}).unwrap().receipt;
        assert_eq!(receipt.worker.0 == 2, receipt.lane == Lane::Canary);
        assert_eq!(Some(receipt.generation) == canary, receipt.lane == Lane::Canary);
        receipt.lane == Lane::Canary
    };
    let drawn = (0..4_000).filter(|draw| met(*draw, None)).count();
    assert!((700..900).contains(&drawn), "{drawn} of 4000");
    let sessions = 0..200_u64;
    for session in sessions {
        let first = met(session, Some(session));
        assert!((0..20).all(|draw| met(draw * 977, Some(session)) == first), "session {session}");
    }
    // A share of 0 sends no request to the canary.
    slot.set_share(Lane::Canary, 0.0);
    assert_eq!((0..1_000).filter(|draw| met(*draw, None)).count(), 0);
    slot.withdraw(Lane::Canary);
    assert!(slot.snapshot().canary.is_none());
}

#[test]
fn a_canary_whose_breaker_is_open_is_replaced_by_the_active_generation() {
    let fixture = fixture(selector(choose(1)));
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    slot.try_out(Lane::Canary, selector(Err(TIMEOUT)), 1.0);
    let receipt = || fixture.route(Leg::Prefill, |_| {}).unwrap().receipt;
    assert_eq!(receipt().decider.fallback(), Some("timeout"));
    let next = receipt();
    assert_eq!((next.lane, &next.decider, next.worker), (Lane::Active, &Decider::Policy, WorkerId(2)));
}

#[test]
fn a_shadow_runs_on_the_same_facts_and_never_acts() {
    let mut fixture = fixture(selector(choose(0)));
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    let shadow =
        || slot.snapshot().shadow.as_ref().unwrap().handle.agreement.counts().map(|(_, count)| count);
    let receipt =
        |fixture: &Fixture| fixture.route(Leg::Prefill, |query| query.explain = true).unwrap().receipt;
    // It asks for facts that the active one does not use, and ranks the other worker first: worker 2 holds
    // nothing.
    fixture.router.index().record(WorkerId(1), DpRank(0), &request().prefix, Instant::now());
    std::thread::sleep(std::time::Duration::from_millis(50));
    let generation = slot.try_out(Lane::Shadow, scorer(&["cached-blocks-device"], 0), 1.0).unwrap();
    let seen = receipt(&fixture);
    let choice = Some((WorkerId(2), DpRank(0)));
    let (answer, cached_blocks) = (ShadowAnswer::Chose, Some([0; 3]));
    let said = ShadowResult { generation, answer, choice, plan: None, agrees: false, cached_blocks };
    assert_eq!((seen.worker, seen.lane, seen.shadow), (WorkerId(1), Lane::Active, Some(said)));
    assert_eq!(
        (shadow(), seen.costs.as_slice()),
        ([0, 1, 0, 0], [].as_slice()),
        "its costs are not the receipt's"
    );
    slot.try_out(Lane::Shadow, selector(choose(0)), 1.0);
    assert_eq!((receipt(&fixture).shadow.unwrap().agrees, shadow()), (true, [1, 0, 0, 0]));
    // A failure or refusal of the shadow shows only in its counters and at the policy manager.
    slot.try_out(Lane::Shadow, selector(Err(TIMEOUT)), 1.0);
    let seen = receipt(&fixture);
    assert_eq!(
        (seen.worker, seen.decider, seen.shadow.unwrap().choice),
        (WorkerId(1), Decider::Policy, None)
    );
    assert_eq!(receipt(&fixture).shadow, None, "its breaker is open");
    assert_eq!(shadow(), [0, 0, 1, 0]);
    let event = fixture.events.try_recv().unwrap();
    assert_eq!((event.lane, event.failure), (Lane::Shadow, TIMEOUT));
    let refusing = crate::ShedReason { status: 529, reason: "no".into() };
    slot.try_out(Lane::Shadow, selector(Ok(Decision::Shed(refusing))), 1.0);
    let seen = receipt(&fixture);
    let answer = ShadowAnswer::Refused { status: 529, detail: "no".into() };
    // T8.1
    assert_eq!((seen.worker, seen.shadow.unwrap().answer, shadow()), (WorkerId(1), answer, [0, 0, 0, 1]));
    // Pinned requests and previews do not run the shadow.
    let pinned = fixture.route(Leg::Prefill, |query| query.pin = Some((WorkerId(2), None))).unwrap();
    assert_eq!(pinned.receipt.shadow, None);
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Prefill, &request);
    fixture.router.preview(&query, &RouterConfigOverride::default()).unwrap();
    assert_eq!(shadow(), [0, 0, 0, 1]);
}

#[test]
fn a_shadow_sees_the_rows_that_the_active_one_s_filters_dropped_and_its_share_holds() {
    let keep = fake(World::Filter, (&[], &[]), Answer::Keep(vec![1]));
    let last = fake(World::Selector, (&[], &[]), Answer::Select(choose(0)));
    let fixture = fixture(Program::Selector { filters: vec![keep], selector: last });
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    slot.try_out(Lane::Shadow, selector(choose(0)), 0.25);
    let asked = (0..2_000).filter_map(|draw| {
        let request = RoutingRequest { draw, ..request() };
        let receipt = fixture.route_as(Leg::Prefill, &request, |_| {}).unwrap().receipt;
        assert_eq!(receipt.worker, WorkerId(2));
        receipt.shadow
    });
    let asked: Vec<ShadowResult> = asked.collect();
    assert!(asked.iter().all(|said| said.choice == Some((WorkerId(1), DpRank(0)))));
    assert!((430..570).contains(&asked.len()), "{}", asked.len());
}

#[test]
fn a_shadow_of_the_decode_override_is_compared_by_its_plan() {
    let plan = |plan| {
        let answer = Answer::Plan(plan, RouterConfigOverride::default());
        Program::DecodeOverride(fake(World::DecodeOverride, (&[], &[]), answer))
    };
    let fixture = fixture(Program::Native(NativeMode::Kv));
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::DecodeOverride).clone();
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Decode, &request);
    let counts =
        || slot.snapshot().shadow.as_ref().unwrap().handle.agreement.counts().map(|(_, count)| count);
    slot.try_out(Lane::Shadow, plan(Plan::Local), 1.0);
    assert_eq!((fixture.router.plan(&query, Purpose::Route).plan, counts()), (Plan::Remote, [0, 1, 0, 0]));
    slot.try_out(Lane::Shadow, plan(Plan::Remote), 1.0);
    assert_eq!((fixture.router.plan(&query, Purpose::Route).plan, counts()), (Plan::Remote, [1, 0, 0, 0]));
    let shed = || Plan::Shed(ShedReason { status: 429, reason: "full".into() });
    slot.try_out(Lane::Shadow, plan(shed()), 1.0);
    let planned = fixture.router.plan(&query, Purpose::Route);
    let answer = ShadowAnswer::Refused { status: 429, detail: "full".into() };
    // T8.1
    assert_eq!(
        (planned.plan, planned.shadow.unwrap().answer, counts()),
        (Plan::Remote, answer, [0, 0, 0, 1])
    );
    slot.install(plan(shed()));
    // Both refuse.
    assert_eq!((fixture.router.plan(&query, Purpose::Route).plan, counts()), (shed(), [1, 0, 0, 1]));
}

#[test]
fn t2_a_receipt_of_the_decode_override_has_its_shadow_and_the_text_of_its_failure() {
    let fixture = recording(fixture(Program::Native(NativeMode::Kv)), &[]);
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::DecodeOverride).clone();
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Decode, &request);
    let program = |answer| Program::DecodeOverride(fake(World::DecodeOverride, (&[], &[]), answer));
    let plan = |plan| program(Answer::Plan(plan, RouterConfigOverride::default()));
    let seen = || {
        let planned = fixture.router.plan(&query, Purpose::Route);
        let record = fixture.router.decisions().get(planned.id.unwrap(), |_, _| true).unwrap();
        (planned.shadow.map(|shadow| shadow.agrees), serde_json::to_value(&record).unwrap())
    };
    slot.install(plan(Plan::Local));
    slot.try_out(Lane::Shadow, plan(Plan::Remote), 1.0);
    let generation = slot.snapshot().shadow.as_ref().unwrap().handle.generation;
    let said = serde_json::json!({
        "generation": generation, "answer": "chose", "choice": null, "plan": "remote", "agrees": false,
        "cached_blocks": null,
    });
    let (agrees, record) = seen();
    // T2.5
    assert_eq!((agrees, &record["shadow"]), (Some(false), &said));
    let failing = || program(Answer::Costs(Vec::new()));
    slot.try_out(Lane::Shadow, failing(), 1.0);
    let generation = slot.snapshot().shadow.as_ref().unwrap().handle.generation;
    let (agrees, record) = seen();
    let detail = "invalid answer: `fake` is a decode-override and exports no `decide`";
    let said = serde_json::json!({
        "generation": generation, "answer": "failed", "kind": "invalid", "detail": detail, "choice": null,
        "agrees": false, "cached_blocks": null,
    });
    // T2.5
    assert_eq!((agrees, &record["shadow"]), (Some(false), &said));
    slot.install(failing());
    let (_, record) = seen();
    let decider = &record["decider"];
    assert_eq!((&decider["reason"], &record["plan"]["word"]), (&"invalid".into(), &"remote".into()));
    // T2.4
    let detail = decider["detail"].as_str().unwrap();
    assert!(detail.starts_with("invalid answer: `") && detail.ends_with(" exports no `decide`"), "{detail}");
}

#[test]
fn t8_the_failed_call_of_a_shadow_is_recorded_with_its_facts_and_its_request() {
    let fixture = recording(fixture(selector(choose(0))), &[]);
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    let keep = fake(World::Filter, (&[], &["worker-id"]), Answer::Keep(vec![1]));
    let failing =
        fake(World::Selector, (&["prompt-tokens"], &["active-requests"]), Answer::Select(Err(TIMEOUT)));
    slot.try_out(Lane::Shadow, Program::Selector { filters: vec![keep], selector: failing }, 1.0);
    let receipt = fixture.route(Leg::Prefill, |query| query.request_id = Some("r-7")).unwrap().receipt;
    let record = fixture.router.decisions().get(receipt.id.unwrap(), |_, _| true).unwrap();
    let record = serde_json::to_value(&record).unwrap();
    let answer = (&record["shadow"]["answer"], &record["shadow"]["kind"], &record["shadow"]["detail"]);
    // T8.2
    assert_eq!(answer, (&"failed".into(), &"timeout".into(), &TIMEOUT.to_string().into()), "{record}");
    let stage = record["stages"].as_array().unwrap().last().unwrap();
    let asked = (&stage["kept"], &stage["request"]["prompt-tokens"], &stage["workers"]["active-requests"]);
    // T8.3
    assert_eq!(stage["failed_shadow"]["world"], "selector", "{record}");
    assert_eq!(asked, (&serde_json::json!([1]), &request().prompt_tokens.into(), &serde_json::json!([0])));
    assert_eq!(stage.get("policy"), None, "it did not lead to the choice");
    let handle = slot.snapshot().shadow.as_ref().unwrap().handle.clone();
    // T8.3
    assert_eq!(handle.last_failure().unwrap().request_id.as_deref(), Some("r-7"));
}

#[test]
fn a_slot_s_on_failure_setting_overrides_the_router_s() {
    let fixture = fixture(selector(Err(Failure::Trap("x".into()))));
    let slot = fixture.router.slots().get(&ModelName::new("m"), SlotKind::Prefill).clone();
    slot.set_on_failure(Some(OnFailure::Reject));
    assert_eq!(fixture.route(Leg::Prefill, |_| {}).unwrap_err(), RouteError::PolicyFailed("trap"));
    assert_eq!(fixture.route(Leg::Decode, |_| {}).unwrap().receipt.decider.fallback(), Some("trap"));
    slot.set_on_failure(None);
    assert_eq!(fixture.route(Leg::Prefill, |_| {}).unwrap().receipt.decider.fallback(), Some("trap"));
}

fn recorded(fixture: &Fixture) -> Vec<serde_json::Value> {
    let decisions = fixture.router.decisions();
    let copies = decisions.ids().into_iter().filter_map(|id| decisions.get(id, |_, _| true));
    copies.map(|record| serde_json::to_value(&record).unwrap()).collect()
}

fn recording(mut fixture: Fixture, always: &[&str]) -> Fixture {
    fixture.router =
        fixture.router.recording(Decisions::new(100, 1 << 20, Decisions::facts(always).unwrap()));
    fixture
}

#[test]
fn a_decision_is_recorded_with_the_facts_of_each_policy() {
    let filter = fake(World::Filter, (&[], &["dp-rank"]), Answer::Keep(vec![1]));
    let last = fake(World::Scorer, (&["block-size"], &["worker-id"]), Answer::Costs(vec![4.5]));
    let scorers = vec![WeightedScorer { policy: last, weight: 2.0, normalize: Default::default() }];
    let program = Program::Scorers { filters: vec![filter], scorers, picker: Picker::Min };
    let fixture = recording(fixture(program), &["prompt-tokens", "active-requests"]);
    let routed = fixture.route(Leg::Prefill, |_| {}).unwrap();
    let seen = recorded(&fixture).remove(0);
    assert_eq!(seen["id"], routed.receipt.id.unwrap().to_string());
    assert_eq!(seen["candidates"], serde_json::json!([[1, 0], [2, 0]]));
    let stages = seen["stages"].as_array().unwrap();
    assert_eq!((stages.len(), &stages[0]["policy"]), (3, &serde_json::Value::Null));
    assert_eq!(stages[0]["request"], serde_json::json!({ "prompt-tokens": 64 }));
    // The load before this decision, without its own booking.
    assert_eq!(stages[0]["workers"], serde_json::json!({ "active-requests": [0, 0] }));
    assert_eq!((&stages[1]["world"], &stages[1]["rows"]), (&"filter".into(), &2.into()));
    assert_eq!((&stages[2]["kept"], &stages[2]["weight"]), (&serde_json::json!([1]), &2.0.into()));
    assert_eq!(stages[2]["workers"], serde_json::json!({ "worker-id": [2] }));
    assert_eq!(seen["choice"], serde_json::json!({ "row": 1, "worker": 2, "dp_rank": 0, "cost": 9.0 }));
    assert_eq!((&seen["runner_up"], &seen["outcome"]), (&serde_json::Value::Null, &serde_json::Value::Null));
}

#[test]
fn the_runner_up_is_the_cheapest_of_the_others() {
    let fixture = recording(fixture(scorer(&["worker-id"], 0)), &[]);
    let routed = fixture.route(Leg::Decode, |query| query.explain = true).unwrap();
    assert_eq!(routed.receipt.runner_up(), Some((WorkerId(4), DpRank(0), 4.0)));
    let expected = serde_json::json!({ "row": 1, "worker": 4, "dp_rank": 0, "cost": 4.0 });
    assert_eq!(recorded(&fixture)[0]["runner_up"], expected);
}

#[test]
fn refusals_and_fallbacks_are_recorded_and_previews_and_queries_without_a_request_id_are_not() {
    let shed = crate::ShedReason { status: 529, reason: "over quota".into() };
    let shedding = recording(fixture(selector(Ok(Decision::Shed(shed)))), &[]);
    shedding.route(Leg::Prefill, |_| {}).unwrap_err();
    let seen = recorded(&shedding).remove(0);
    let expected = serde_json::json!({ "code": "shed", "detail": "over quota" });
    assert_eq!((&seen["refused"], &seen["choice"]), (&expected, &serde_json::Value::Null));

    let failing = recording(fixture(selector(Err(Failure::Trap("ouch".into())))), &[]);
    failing.route(Leg::Prefill, |_| {}).unwrap();
    let seen = recorded(&failing).remove(0);
    assert_eq!(
        (&seen["decider"]["reason"], &seen["decider"]["detail"]),
        (&"trap".into(), &"trap: ouch".into())
    );
    assert!(seen["choice"]["cost"].is_number(), "the fallback's own cost: {seen}");

    let quiet = recording(fixture(selector(choose(0))), &[]);
    quiet.route(Leg::Prefill, |query| query.request_id = None).unwrap();
    let (snapshot, model, request) = (quiet.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Prefill, &request);
    quiet.router.preview(&query, &RouterConfigOverride::default()).unwrap();
    quiet
        .route(Leg::Prefill, |query| query.tried = &[(WorkerId(1), DpRank(0)), (WorkerId(2), DpRank(0))])
        .unwrap_err();
    assert!(recorded(&quiet).is_empty(), "{:?}", recorded(&quiet));
}

#[test]
fn a_plan_is_recorded_with_the_decode_row_and_the_prefill_matrix() {
    let over = RouterConfigOverride::default();
    let policy =
        fake(World::DecodeOverride, (&["block-size"], &["worker-id"]), Answer::Plan(Plan::Local, over));
    let fixture = recording(fixture(Program::DecodeOverride(policy)), &["n"]);
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let planned = fixture.router.plan(&query(&snapshot, &model, Leg::Decode, &request), Purpose::Route);
    let seen = recorded(&fixture).remove(0);
    assert_eq!(
        (&seen["id"], &seen["slot"]),
        (&planned.id.unwrap().to_string().into(), &"decode-override".into())
    );
    let (worker, _) = planned.decode.unwrap();
    assert_eq!(seen["plan"], serde_json::json!({ "word": "local", "decode": [worker, 0] }));
    let stage = &seen["stages"][0];
    assert_eq!(stage["decode"], serde_json::json!({ "worker-id": [worker] }));
    assert_eq!(stage["workers"], serde_json::json!({ "worker-id": [1, 2] }));
    assert_eq!(seen["candidates"], serde_json::json!([[1, 0], [2, 0]]));
}

fn preview_decode(router: &Router) {
    let registry = Registry::default();
    for flag in FLEET {
        registry.upsert(WorkerSpec::parse_flag(flag).unwrap()).set_health(Health::Healthy);
    }
    let (snapshot, model, request) = (registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Decode, &request);
    router.preview(&query, &RouterConfigOverride::default()).unwrap();
}

#[test]
fn a_decode_override_that_previews_the_decode_leg_is_recorded_with_its_own_facts() {
    let fixture = recording(fixture(scorer(&["dp-rank", "worker-id"], 1)), &[]);
    let router = Arc::new(fixture.router);
    let answer = Answer::PreviewThenPlan(Arc::downgrade(&router));
    let policy = fake(World::DecodeOverride, (&["block-size"], &["worker-id"]), answer);
    let model = ModelName::new("m");
    router.slots().get(&model, SlotKind::DecodeOverride).install(Program::DecodeOverride(policy));
    let (snapshot, request) = (fixture.registry.snapshot(), request());
    let query = query(&snapshot, &model, Leg::Decode, &request);
    let decision = router.plan(&query, Purpose::Route);
    assert_eq!((&decision.plan, decision.fallback), (&Plan::Local, None));
    let decisions = router.decisions();
    let record = decisions.get(decision.id.unwrap(), |_, _| true).unwrap();
    let json = serde_json::to_value(&record).unwrap();
    assert_eq!((json["stages"].as_array().unwrap().len(), &json["slot"]), (1, &"decode-override".into()));
    let stage = &json["stages"][0];
    assert_eq!(stage["request"], serde_json::json!({ "block-size": 16 }));
    assert_eq!(stage["decode"], serde_json::json!({ "worker-id": [3] }));
    assert_eq!(stage["workers"], serde_json::json!({ "worker-id": [1, 2] }));
    assert_eq!(json["candidates"], serde_json::json!([[1, 0], [2, 0]]));
}

#[test]
fn round_robin_takes_turns_within_each_model() {
    let fixture = fixture(Program::Native(NativeMode::RoundRobin));
    for id in [5, 6] {
        let flag = format!("id={id},role=prefill,engine=vllm,url=http://a:{id},model=other");
        fixture.registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
    }
    let (snapshot, request) = (fixture.registry.snapshot(), request());
    let route = |model: &str| {
        let model = ModelName::new(model);
        let query = Query { probe: true, ..query(&snapshot, &model, Leg::Prefill, &request) };
        fixture.router.route(&query, &RouterConfigOverride::default()).unwrap().receipt.worker.0
    };
    let turns: Vec<_> = (0..4).map(|_| (route("m"), route("other"))).collect();
    assert_eq!(turns, [(1, 5), (2, 6), (1, 5), (2, 6)]);
}

#[test]
fn f3_direct_mode_without_a_pin_is_recorded_with_its_reason() {
    for always in [&["active-requests"][..], &[]] {
        let fixture = recording(fixture(Program::Native(NativeMode::Direct)), always);
        let error = fixture.route(Leg::Prefill, |_| {}).unwrap_err();
        assert_eq!(error, RouteError::NoPin(Leg::Prefill));
        let record = recorded(&fixture).remove(0);
        assert_eq!(record["decider"], serde_json::json!({ "by": "native", "mode": "direct" }));
        assert_eq!(record["refused"]["code"], "no_pin", "{record}");
    }
}
