//! One instance of a policy: its store, its typed exports, and the failures of a call.

use futures_util::FutureExt;
use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Moment, ObservedOutcome, Plan, RouterConfigOverride,
};
use pointsman_workers::Leg;
use tokio::runtime::Handle;
use wasmtime::{Store, Trap};

use crate::{
    catch_panic::catch_panic,
    guest::{Guest, TimeLimit},
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
    deadlines: (TimeLimit, TimeLimit),
    timers: Timers,
    pub(crate) calls: u32,
    /// Whether a call failed within wasmtime. No further call can enter the store.
    pub(crate) poisoned: bool,
}

/// Bytes of text and lists that a guest may return, or pass to the host, in one call, besides those of its
/// rows: a reason, a log line, a value of the state.
const MAX_PASSED_BYTES: usize = 128 * 1024;
/// Bytes of an answer for each row: a cost, and the row itself.
const BYTES_PER_ROW: usize = 8;
/// Like [`MAX_PASSED_BYTES`], while the guest is configured. No request waits then.
const MAX_CONFIGURED_BYTES: usize = 4 << 20;

/// An answer of any world, comparable by the probe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Rows(Vec<u32>),
    Costs(Vec<u32>),
    Decision(Decision),
    Plan(Plan, RouterConfigOverride),
}

/// Runtime that timers of a guest register with. `None` stands for the calling thread's own.
type Timers = Option<Handle>;

/// Polls a call once. A guest has nothing to wait for, so a future that is not ready is an error. The host's
/// part of a call may panic where a guest does what no policy should: that is an error, too.
fn poll_once<T>(timers: &Timers, future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    let without = Handle::try_current().is_err();
    let _entered = timers.as_ref().filter(|_| without).map(Handle::enter);
    match catch_panic(|| future.now_or_never()) {
        Ok(Some(outcome)) => outcome,
        Ok(None) => Err(wasmtime::Error::msg("the guest tried to wait, which a policy call may not")),
        Err(panic) => Err(wasmtime::Error::msg(format!("the host panicked: {panic}"))),
    }
}

/// Calls `describe` of the world that the exports belong to, and returns the name.
macro_rules! describe {
    ($timers:expr, $store:expr, $exports:expr, $call:path) => {
        $call($timers, $exports.pointsman_policy_policy().call_describe(&mut *$store)).map(|about| about.name)
    };
}

/// Calls `describe` and `configure` of the world that the exports belong to.
macro_rules! introduce {
    ($timers:expr, $store:expr, $exports:expr, $settings:expr, $call:path) => {{
        let policy = $exports.pointsman_policy_policy();
        let about = $call($timers, policy.call_describe(&mut *$store))?;
        $store.data_mut().set_policy(&about.name);
        let wants = $call($timers, policy.call_configure(&mut *$store, $settings))?;
        Ok(wants.map(|wants| GuestInfo {
            name: about.name,
            version: about.version,
            request_facts: wants.request_facts,
            worker_facts: wants.worker_facts,
        }))
    }};
}

fn identity<T>(_: &Timers, value: wasmtime::Result<T>) -> wasmtime::Result<T> {
    value
}

impl Instance {
    /// Returns the guest's name.
    pub(crate) fn describe(&mut self) -> Result<String, Refusal> {
        let Self { store, exports, timers, .. } = self;
        let name = match exports {
            Exports::Filter(exports) => describe!(timers, store, exports, identity),
            Exports::Scorer(exports) => describe!(timers, store, exports, identity),
            Exports::Selector(exports) => describe!(timers, store, exports, identity),
            Exports::DecodeOverride(exports) => describe!(timers, store, exports, identity),
            Exports::FilterAsync(exports) => describe!(timers, store, exports, poll_once),
            Exports::ScorerAsync(exports) => describe!(timers, store, exports, poll_once),
            Exports::SelectorAsync(exports) => describe!(timers, store, exports, poll_once),
            Exports::DecodeOverrideAsync(exports) => describe!(timers, store, exports, poll_once),
        };
        name.map_err(|error| Refusal::Configure(failure(&self.store, &error).to_string()))
    }

    /// Describes and configures the guest, under the configure deadline that `instantiate` set.
    pub(crate) fn introduce(&mut self, settings: &str) -> Result<GuestInfo, Refusal> {
        self.try_introduce(settings)?.map_err(|text| Refusal::Configure(truncate(text)))
    }

    /// Same as [`Self::introduce`]. The inner error is the guest's own answer to the settings.
    pub(crate) fn try_introduce(&mut self, settings: &str) -> Result<Result<GuestInfo, String>, Refusal> {
        let Self { store, exports, timers, .. } = self;
        let outcome = introduce(timers, store, exports, settings);
        outcome.map_err(|error| Refusal::Configure(failure(&self.store, &error).to_string()))
    }

    /// World `filter`.
    pub(crate) fn keep(
        &mut self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<Vec<u32>, Failure> {
        self.begin(context, call);
        let Self { store, exports, timers, .. } = self;
        let answer = match exports {
            Exports::Filter(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_f(call), facts);
                kept.map(|kept| kept.map_err(error_f))
            }
            Exports::FilterAsync(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_fa(call), facts);
                poll_once(timers, kept).map(|kept| kept.map_err(error_fa))
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
        let Self { store, exports, timers, .. } = self;
        let answer = match exports {
            Exports::Scorer(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_s(call), facts);
                costs.map(|costs| costs.map_err(error_s))
            }
            Exports::ScorerAsync(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_sa(call), facts);
                poll_once(timers, costs).map(|costs| costs.map_err(error_sa))
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
        let Self { store, exports, timers, .. } = self;
        let answer = match exports {
            Exports::Selector(exports) => {
                let decision =
                    exports.pointsman_policy_selecting().call_select(&mut *store, call_l(call), facts);
                decision.map(|decision| decision.map(decision_l).map_err(error_l))
            }
            Exports::SelectorAsync(exports) => {
                let decision =
                    exports.pointsman_policy_selecting().call_select(&mut *store, call_la(call), facts);
                poll_once(timers, decision).map(|decision| decision.map(decision_la).map_err(error_la))
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
        let Self { store, exports, timers, .. } = self;
        let answer = match exports {
            Exports::DecodeOverride(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let plan = guest.call_decide(&mut *store, call_d(call), request, decode, prefill);
                plan.map(|plan| plan.map(plan_d).map_err(error_d))
            }
            Exports::DecodeOverrideAsync(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let plan = guest.call_decide(&mut *store, call_da(call), request, decode, prefill);
                poll_once(timers, plan).map(|plan| plan.map(plan_da).map_err(error_da))
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
        let Self { store, exports, timers, .. } = self;
        let answer = match exports {
            Exports::DecodeOverride(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let over = guest.call_decode_config(&mut *store, call_d(call), facts);
                over.map(|over| over.map(over_d).map_err(error_d))
            }
            Exports::DecodeOverrideAsync(exports) => {
                let guest = exports.pointsman_policy_disaggregation();
                let over = guest.call_decode_config(&mut *store, call_da(call), facts);
                poll_once(timers, over).map(|over| over.map(over_da).map_err(error_da))
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
        let Self { store, learner, timers, .. } = self;
        let answer = match learner {
            Some(Learner::Sync(exports)) => {
                let outcomes: Vec<_> = outcomes.iter().map(outcome_s).collect();
                exports.pointsman_policy_learning().call_observe(&mut *store, now_us, seed, &outcomes)
            }
            Some(Learner::Async(exports)) => {
                let outcomes: Vec<_> = outcomes.iter().map(outcome_a).collect();
                let guest = exports.pointsman_policy_learning();
                poll_once(timers, guest.call_observe(&mut *store, now_us, seed, &outcomes))
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
        // The host copies what a guest passes, which no epoch interrupts.
        self.store.set_hostcall_fuel(MAX_PASSED_BYTES + BYTES_PER_ROW * call.rows as usize);
    }

    fn end<T>(
        &mut self,
        context: &mut DecisionContext<'_>,
        answer: wasmtime::Result<Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.store.data_mut().end(context);
        answer.unwrap_or_else(|error| {
            self.poisoned = true;
            Err(failure(&self.store, &error))
        })
    }
}

fn introduce(
    timers: &Timers,
    store: &mut Store<Guest>,
    exports: &Exports,
    settings: &str,
) -> wasmtime::Result<Result<GuestInfo, String>> {
    match exports {
        Exports::Filter(exports) => introduce!(timers, store, exports, settings, identity),
        Exports::Scorer(exports) => introduce!(timers, store, exports, settings, identity),
        Exports::Selector(exports) => introduce!(timers, store, exports, settings, identity),
        Exports::DecodeOverride(exports) => introduce!(timers, store, exports, settings, identity),
        Exports::FilterAsync(exports) => introduce!(timers, store, exports, settings, poll_once),
        Exports::ScorerAsync(exports) => introduce!(timers, store, exports, settings, poll_once),
        Exports::SelectorAsync(exports) => introduce!(timers, store, exports, settings, poll_once),
        Exports::DecodeOverrideAsync(exports) => introduce!(timers, store, exports, settings, poll_once),
    }
}

/// Classifies a failed call.
fn failure(store: &Store<Guest>, error: &wasmtime::Error) -> Failure {
    if store.data().denied {
        return Failure::Memory { limit: store.data().memory_bytes };
    }
    // A panic reports its message and place before it traps.
    let with_last_words = |text: String| match store.data().last_words() {
        Some(words) => Failure::Trap(truncate(format!("{words} ({text})"))),
        None => Failure::Trap(truncate(text)),
    };
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => {
            let TimeLimit { time, key } = store.data().time_limit;
            Failure::Timeout { limit: time, key }
        }
        Some(trap) => with_last_words(trap.to_string()),
        None => {
            let text = error.root_cause().to_string();
            // wasmtime has no type for this error.
            if text.contains("fuel allocated for hostcalls") {
                let limit = MAX_PASSED_BYTES / 1024;
                return Failure::Invalid(format!("more than {limit} KiB of text and lists in one call"));
            }
            with_last_words(text)
        }
    }
}
