//! One instance of a policy: its store, its typed exports, and the failures of a call.

use std::time::Duration;

use futures_util::FutureExt;
use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Moment, ObservedOutcome, Plan, RouterConfigOverride,
};
use pointsman_workers::Leg;
use wasmtime::{Store, Trap};

use crate::{
    guest::Guest,
    guest_info::{GuestInfo, truncate},
    refusal::Refusal,
};

mod convert;
mod linked;

use convert::*;
pub(crate) use linked::Linked;
use linked::{Exports, Learner};

/// One instance in its own store. A failure of the guest poisons the store: drop the instance.
pub(crate) struct Instance {
    store: Store<Guest>,
    exports: Exports,
    learner: Option<Learner>,
    /// CPU time of a call, and of an observed batch.
    deadlines: (Duration, Duration),
    pub(crate) calls: u32,
}

/// An answer of any world, comparable by the probe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Rows(Vec<u32>),
    Costs(Vec<u32>),
    Decision(Decision),
    Plan(Plan, RouterConfigOverride),
}

/// Polls a call once. A guest has nothing to wait for, so a future that is not ready is an error.
fn poll_once<T>(future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    future
        .now_or_never()
        .unwrap_or_else(|| Err(wasmtime::Error::msg("the guest tried to wait, which a policy call may not")))
}

/// Calls `describe` and `configure` of the world that the exports belong to.
macro_rules! introduce {
    ($store:expr, $exports:expr, $settings:expr, $call:path) => {{
        let policy = $exports.pointsman_policy_policy();
        let about = $call(policy.call_describe(&mut *$store))?;
        let wants = $call(policy.call_configure(&mut *$store, $settings))?;
        Ok(wants.map(|wants| GuestInfo {
            name: about.name,
            version: about.version,
            request_facts: wants.request_facts,
            worker_facts: wants.worker_facts,
        }))
    }};
}

fn identity<T>(value: wasmtime::Result<T>) -> wasmtime::Result<T> {
    value
}

impl Instance {
    /// Describes and configures the guest, under the configure deadline that `instantiate` set.
    pub(crate) fn introduce(&mut self, settings: &str) -> Result<GuestInfo, Refusal> {
        let Self { store, exports, .. } = self;
        let outcome = introduce(store, exports, settings);
        match outcome {
            Ok(Ok(about)) => Ok(about),
            Ok(Err(text)) => Err(Refusal::Configure(truncate(text))),
            Err(error) => Err(Refusal::Configure(failure(&self.store, &error).to_string())),
        }
    }

    /// World `filter`.
    pub(crate) fn keep(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<Vec<u32>, Failure> {
        self.begin(context, call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::Filter(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_f(call), facts);
                kept.map(|kept| kept.map_err(error_f))
            }
            Exports::FilterAsync(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_fa(call), facts);
                poll_once(kept).map(|kept| kept.map_err(error_fa))
            }
            _ => return Err(Failure::Invalid("the policy is not a filter".to_owned())),
        };
        self.end(context, answer)
    }

    /// World `scorer`.
    pub(crate) fn score(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<Vec<f32>, Failure> {
        self.begin(context, call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::Scorer(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_s(call), facts);
                costs.map(|costs| costs.map_err(error_s))
            }
            Exports::ScorerAsync(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_sa(call), facts);
                poll_once(costs).map(|costs| costs.map_err(error_sa))
            }
            _ => return Err(Failure::Invalid("the policy is not a scorer".to_owned())),
        };
        self.end(context, answer)
    }

    /// World `selector`.
    pub(crate) fn select(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<Decision, Failure> {
        self.begin(context, call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::Selector(exports) => {
                let decision =
                    exports.pointsman_policy_selecting().call_select(&mut *store, call_l(call), facts);
                decision.map(|decision| decision.map(decision_l).map_err(error_l))
            }
            Exports::SelectorAsync(exports) => {
                let decision =
                    exports.pointsman_policy_selecting().call_select(&mut *store, call_la(call), facts);
                poll_once(decision).map(|decision| decision.map(decision_la).map_err(error_la))
            }
            _ => return Err(Failure::Invalid("the policy is not a selector".to_owned())),
        };
        self.end(context, answer)
    }

    /// World `decode-override`: where to prefill.
    pub(crate) fn decide(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        request: &[u32],
        decode: &[u32],
        prefill: &[u32],
    ) -> Result<Plan, Failure> {
        self.begin(context, call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::DecodeOverride(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let plan = guest.call_decide(&mut *store, call_d(call), request, decode, prefill);
                plan.map(|plan| plan.map(plan_d).map_err(error_d))
            }
            Exports::DecodeOverrideAsync(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let plan = guest.call_decide(&mut *store, call_da(call), request, decode, prefill);
                poll_once(plan).map(|plan| plan.map(plan_da).map_err(error_da))
            }
            _ => return Err(Failure::Invalid("the policy is not a decode override".to_owned())),
        };
        self.end(context, answer)
    }

    /// World `decode-override`: the decode leg's config.
    pub(crate) fn decode_config(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<RouterConfigOverride, Failure> {
        self.begin(context, call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::DecodeOverride(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let over = guest.call_decode_config(&mut *store, call_d(call), facts);
                over.map(|over| over.map(over_d).map_err(error_d))
            }
            Exports::DecodeOverrideAsync(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let over = guest.call_decode_config(&mut *store, call_da(call), facts);
                poll_once(over).map(|over| over.map(over_da).map_err(error_da))
            }
            _ => return Err(Failure::Invalid("the policy is not a decode override".to_owned())),
        };
        self.end(context, answer)
    }

    /// Observes outcomes of decisions, when the guest exports `learning`.
    pub(crate) fn observe(
        &mut self,
        context: &mut DecisionContext<'_>,
        moment: Moment,
        outcomes: &[ObservedOutcome],
    ) -> Result<(), Failure> {
        let Moment { now_us, seed } = moment;
        // Nothing is routed here; what it may read of the call is the time and the randomness.
        self.begin(context, &Call { leg: Leg::Aggregated, attempt: 0, rows: 0, seed, now_us });
        self.store.data_mut().allow(self.deadlines.1);
        let Self { store, learner, .. } = self;
        let answer = match learner {
            Some(Learner::Sync(exports)) => {
                let outcomes: Vec<_> = outcomes.iter().map(outcome_s).collect();
                exports.pointsman_policy_learning().call_observe(&mut *store, now_us, seed, &outcomes)
            }
            Some(Learner::Async(exports)) => {
                let outcomes: Vec<_> = outcomes.iter().map(outcome_a).collect();
                let guest = exports.pointsman_policy_learning();
                poll_once(guest.call_observe(&mut *store, now_us, seed, &outcomes))
            }
            None => return Err(Failure::Invalid("the policy does not export `learning`".to_owned())),
        };
        self.end(context, answer.map(Ok))
    }

    /// Ends configuration and probe: from now on writes to the slot's state last.
    pub(crate) fn serve(&mut self) {
        self.store.data_mut().serve();
    }

    /// Present linear memory, bytes.
    pub(crate) fn memory_used(&self) -> usize {
        self.store.data().memory_used
    }

    /// Instructions left, when the engine counts them.
    pub(crate) fn fuel(&self) -> Option<u64> {
        self.store.get_fuel().ok()
    }

    fn begin(&mut self, context: &mut DecisionContext<'_>, call: &Call) {
        self.calls += 1;
        self.store.data_mut().begin(context, call);
        self.store.data_mut().allow(self.deadlines.0);
        self.store.set_epoch_deadline(1);
    }

    fn end<T>(
        &mut self,
        context: &mut DecisionContext<'_>,
        answer: wasmtime::Result<Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.store.data_mut().end(context);
        answer.unwrap_or_else(|error| Err(failure(&self.store, &error)))
    }
}

fn introduce(
    store: &mut Store<Guest>,
    exports: &Exports,
    settings: &str,
) -> wasmtime::Result<Result<GuestInfo, String>> {
    match exports {
        Exports::Filter(exports) => introduce!(store, exports, settings, identity),
        Exports::Scorer(exports) => introduce!(store, exports, settings, identity),
        Exports::Selector(exports) => introduce!(store, exports, settings, identity),
        Exports::DecodeOverride(exports) => introduce!(store, exports, settings, identity),
        Exports::FilterAsync(exports) => introduce!(store, exports, settings, poll_once),
        Exports::ScorerAsync(exports) => introduce!(store, exports, settings, poll_once),
        Exports::SelectorAsync(exports) => introduce!(store, exports, settings, poll_once),
        Exports::DecodeOverrideAsync(exports) => introduce!(store, exports, settings, poll_once),
    }
}

/// Classifies a failed call.
fn failure(store: &Store<Guest>, error: &wasmtime::Error) -> Failure {
    if store.data().denied {
        return Failure::Memory;
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => Failure::Timeout,
        Some(trap) => Failure::Trap(trap.to_string()),
        None => Failure::Trap(error.root_cause().to_string()),
    }
}
