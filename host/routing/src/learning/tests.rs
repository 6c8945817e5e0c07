use parking_lot::Mutex;
use pointsman_workers::{DpRank, Leg, WorkerId};
use tokio::sync::mpsc;

use super::*;
use crate::{
    facts::Wants,
    policy::{Digest, Origin, Policy, PolicyInfo, TIMEOUT, World},
    slot::{Program, SlotEvent},
    slots::SlotSet,
};

/// Notes the seeds of each batch, then answers with `failure`.
#[derive(Debug)]
struct Learner {
    info: PolicyInfo,
    failure: Option<Failure>,
    given: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Policy for Learner {
    fn info(&self) -> &PolicyInfo {
        &self.info
    }

    fn observe(
        &self,
        _: &mut DecisionContext<'_>,
        _: Moment,
        outcomes: &[ObservedOutcome],
    ) -> Result<(), Failure> {
        self.given.lock().push(outcomes.iter().map(|outcome| outcome.seed).collect());
        self.failure.clone().map_or(Ok(()), Err)
    }
}

struct Fixture {
    slots: Slots,
    given: Arc<Mutex<Vec<Vec<u64>>>>,
    events: mpsc::UnboundedReceiver<SlotEvent>,
}

fn learner(failure: Option<Failure>, learns: bool, given: &Arc<Mutex<Vec<Vec<u64>>>>) -> Program {
    let info = PolicyInfo {
        name: "learner".into(),
        version: "1".into(),
        digest: Digest([1; 32]),
        settings_digest: None,
        world: World::Selector,
        origin: Origin::Embedded,
        wants: Wants::default(),
        remembers: true,
        learns,
    };
    let selector = Arc::new(Learner { info, failure, given: given.clone() });
    Program::Selector { filters: vec![], selector }
}

fn fixture(failure: Option<Failure>, learns: bool) -> Fixture {
    let given = Arc::default();
    let (sender, events) = mpsc::unbounded_channel();
    let program = learner(failure, learns, &given);
    let set = SlotSet::build(|kind| Slot::new(kind, None, program.clone(), sender.clone()));
    Fixture { slots: Slots::new(set, []), given, events }
}

fn asked(lane: Lane) -> DecisionSource {
    DecisionSource { slot: SlotKind::Prefill, model: ModelName::new("m"), parent: None, lane }
}

fn outcome(seed: u64) -> ObservedOutcome {
    ObservedOutcome {
        decision: None,
        seed,
        leg: Leg::Prefill,
        attempt: 0,
        worker: WorkerId(1),
        rank: DpRank(0),
        by_policy: true,
        retried: false,
        status: 200,
        ttft: Some(Duration::from_millis(5)),
        itl: None,
        duration: Duration::from_millis(9),
        prompt_tokens: 10,
        output_tokens: 1,
        cached_predicted: None,
        cached_reported: None,
    }
}

fn count(learning: &Learning, label: &str) -> u64 {
    learning.counts().into_iter().find(|(other, _)| *other == label).unwrap().1
}

fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("timed out waiting until {what}");
}

#[test]
fn outcomes_are_delivered_in_order_in_bounded_batches() {
    let fixture = fixture(None, true);
    let learning = Learning::start(fixture.slots.clone()).unwrap();
    (0..700).for_each(|seed| learning.submit(asked(Lane::Active), outcome(seed)));
    until("all are given", || count(&learning, "given") == 700);
    let given = fixture.given.lock();
    assert!(given.len() < 10 && given.iter().all(|batch| batch.len() <= MAX_BATCH), "{given:?}");
    assert_eq!(given.concat(), (0..700).collect::<Vec<_>>());
}

#[test]
fn submitting_never_waits_and_outcomes_beyond_the_queue_are_counted() {
    // The thread sleeps after the first outcome while the queue fills.
    let fixture = fixture(None, true);
    let learning = Learning::start(fixture.slots.clone()).unwrap();
    let many = QUEUE_CAPACITY as u64 * 2;
    (0..many).for_each(|seed| learning.submit(asked(Lane::Active), outcome(seed)));
    assert!(count(&learning, "dropped") > 0);
    until("the rest is given", || count(&learning, "given") + count(&learning, "dropped") == many);
}

#[test]
fn a_failing_learner_is_paused_and_its_decisions_go_on() {
    let mut fixture = fixture(Some(TIMEOUT), true);
    let learning = Learning::start(fixture.slots.clone()).unwrap();
    let slot = fixture.slots.get(&ModelName::new("m"), SlotKind::Prefill).clone();
    (0..300).for_each(|seed| learning.submit(asked(Lane::Active), outcome(seed)));
    until("they are accounted for", || count(&learning, "failed") + count(&learning, "withheld") == 300);
    assert!(count(&learning, "withheld") > 0, "one timeout is enough");
    assert_eq!(fixture.given.lock().len(), 1);
    let active = slot.pin();
    assert!(active.observing.is_open() && !active.breaker.is_open());
    assert_eq!((active.calls(), active.failures()), (0, 0));
    assert!(fixture.events.try_recv().is_err(), "no reason for a rollback");
    let timeouts =
        |stats: &crate::slot::CallStats| stats.outcomes().find(|(kind, _)| *kind == "timeout").unwrap().1;
    assert_eq!((timeouts(slot.observed(Lane::Active)), timeouts(slot.stats(Lane::Active))), (1, 0));
}

#[test]
fn outcomes_go_to_the_lane_s_generation_or_else_to_the_active_one() {
    let fixture = fixture(None, false);
    let slot = fixture.slots.get(&ModelName::new("m"), SlotKind::Prefill).clone();
    let learning = Learning::start(fixture.slots.clone()).unwrap();
    let canary = Arc::default();
    slot.try_out(Lane::Canary, learner(None, true, &canary), 0.5);
    learning.submit(asked(Lane::Canary), outcome(1));
    learning.submit(asked(Lane::Active), outcome(2));
    until("the canary has its own", || *canary.lock() == [[1]]);
    slot.withdraw(Lane::Canary);
    let active = Arc::default();
    slot.install(learner(None, true, &active));
    learning.submit(asked(Lane::Canary), outcome(3));
    until("the active one has it", || *active.lock() == [[3]]);
    assert!(fixture.given.lock().is_empty(), "a policy that does not learn gets no outcomes");
}

/// Notes whose decisions it observes, and in which context.
#[derive(Debug)]
struct Observer(PolicyInfo, Arc<Mutex<Vec<(bool, Purpose)>>>);

impl Policy for Observer {
    fn info(&self) -> &PolicyInfo {
        &self.0
    }

    fn observe(
        &self,
        context: &mut DecisionContext<'_>,
        _: Moment,
        outcomes: &[ObservedOutcome],
    ) -> Result<(), Failure> {
        self.1.lock().extend(outcomes.iter().map(|outcome| (outcome.by_policy, context.purpose())));
        Ok(())
    }
}

#[test]
fn t7_a_shadow_gets_the_outcomes_of_the_lanes_that_serve_as_those_of_others() {
    let fixture = fixture(None, true);
    let slot = fixture.slots.get(&ModelName::new("m"), SlotKind::Prefill).clone();
    let observed = Arc::new(Mutex::new(Vec::new()));
    let info = slot.pin().program.ranker().unwrap().clone();
    let selector = Arc::new(Observer(info, observed.clone()));
    slot.try_out(Lane::Shadow, Program::Selector { filters: vec![], selector }, 0.5);
    let mut learning = BatchedLearning::new(fixture.slots.clone());
    learning.submit(asked(Lane::Active), outcome(1));
    learning.submit(asked(Lane::Canary), outcome(2));
    learning.deliver(|| Moment { now_us: 0, seed: 0 });
    // T7.5
    assert_eq!(*observed.lock(), [(false, Purpose::Shadow); 2]);
    assert_eq!(*fixture.given.lock(), [[1], [2]]);
}
