//! One instance of a policy: its store and typed exports, and how a call into it may end.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt;
use pointsman_routing::{Call, Decision, Failure, Plan, RouterConfigOverride, ShedReason, World};
use pointsman_workers::Leg;
use wasmtime::{Store, Trap, component::InstancePre};

use crate::{
    about::{About, cut},
    access::Access,
    bindings::{
        decode_override as d, decode_override_async as da, filter as f, filter_async as fa, scorer as s,
        scorer_async as sa, selector as l, selector_async as la,
    },
    engine::PolicyEngine,
    guest::Guest,
    meter::Counted,
    refusal::Refusal,
};

/// A component that is linked and type-checked against its world.
#[derive(Clone)]
pub(crate) enum Linked {
    Filter(f::FilterPre<Guest>),
    Scorer(s::ScorerPre<Guest>),
    Selector(l::SelectorPre<Guest>),
    DecodeOverride(d::DecodeOverridePre<Guest>),
    FilterAsync(fa::FilterPre<Guest>),
    ScorerAsync(sa::ScorerPre<Guest>),
    SelectorAsync(la::SelectorPre<Guest>),
    DecodeOverrideAsync(da::DecodeOverridePre<Guest>),
}

enum Exports {
    Filter(f::Filter),
    Scorer(s::Scorer),
    Selector(l::Selector),
    DecodeOverride(d::DecodeOverride),
    FilterAsync(fa::Filter),
    ScorerAsync(sa::Scorer),
    SelectorAsync(la::Selector),
    DecodeOverrideAsync(da::DecodeOverride),
}

/// One instance in its own store. After a failure that is the guest's fault the store is poisoned: drop it.
pub(crate) struct Instance {
    store: Store<Guest>,
    exports: Exports,
    deadline: Duration,
    pub(crate) calls: u32,
}

/// An answer of any world, comparable, for probing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Rows(Vec<u32>),
    Costs(Vec<u32>),
    Decision(Decision),
    Plan(Plan, RouterConfigOverride),
}

/// The future of a guest without anything to wait for is ready at once. One that is not tries to wait, and must not.
fn at_once<T>(future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    future.now_or_never().unwrap_or_else(|| Err(wasmtime::Error::msg("the guest waits for something")))
}

impl Linked {
    /// Type-checks every export of the world.
    pub(crate) fn new(world: World, wasi: bool, pre: InstancePre<Guest>) -> Result<Self, Refusal> {
        let linked = match (world, wasi) {
            (World::Filter, false) => f::FilterPre::new(pre).map(Self::Filter),
            (World::Scorer, false) => s::ScorerPre::new(pre).map(Self::Scorer),
            (World::Selector, false) => l::SelectorPre::new(pre).map(Self::Selector),
            (World::DecodeOverride, false) => d::DecodeOverridePre::new(pre).map(Self::DecodeOverride),
            (World::Filter, true) => fa::FilterPre::new(pre).map(Self::FilterAsync),
            (World::Scorer, true) => sa::ScorerPre::new(pre).map(Self::ScorerAsync),
            (World::Selector, true) => la::SelectorPre::new(pre).map(Self::SelectorAsync),
            (World::DecodeOverride, true) => da::DecodeOverridePre::new(pre).map(Self::DecodeOverrideAsync),
        };
        linked.map_err(|error| Refusal::Contract(format!("{error:#}")))
    }

    /// A fresh instance, not yet configured.
    pub(crate) fn instantiate(
        &self,
        engine: &PolicyEngine,
        name: Arc<str>,
        access: &Access,
    ) -> Result<Instance, Refusal> {
        let limits = engine.limits();
        let counted = Counted::new(engine.meter());
        let guest = Guest::new(name, limits.memory_bytes, access, counted);
        let mut store = engine.store(guest);
        store.data_mut().allow(limits.configure_deadline);
        store.set_epoch_deadline(1);
        let exports = match self {
            Self::Filter(pre) => pre.instantiate(&mut store).map(Exports::Filter),
            Self::Scorer(pre) => pre.instantiate(&mut store).map(Exports::Scorer),
            Self::Selector(pre) => pre.instantiate(&mut store).map(Exports::Selector),
            Self::DecodeOverride(pre) => pre.instantiate(&mut store).map(Exports::DecodeOverride),
            Self::FilterAsync(pre) => at_once(pre.instantiate_async(&mut store)).map(Exports::FilterAsync),
            Self::ScorerAsync(pre) => at_once(pre.instantiate_async(&mut store)).map(Exports::ScorerAsync),
            Self::SelectorAsync(pre) => {
                at_once(pre.instantiate_async(&mut store)).map(Exports::SelectorAsync)
            }
            Self::DecodeOverrideAsync(pre) => {
                at_once(pre.instantiate_async(&mut store)).map(Exports::DecodeOverrideAsync)
            }
        };
        let exports = exports.map_err(|error| Refusal::Instantiate(failure(&store, &error).to_string()))?;
        Ok(Instance { store, exports, deadline: limits.deadline, calls: 0 })
    }
}

/// Calls `describe` and `configure` of whichever world the exports are of.
macro_rules! introduce {
    ($store:expr, $exports:expr, $settings:expr, $call:path) => {{
        let policy = $exports.pointsman_policy_policy();
        let about = $call(policy.call_describe(&mut *$store))?;
        let wants = $call(policy.call_configure(&mut *$store, $settings))?;
        Ok(wants.map(|wants| About {
            name: about.name,
            version: about.version,
            request_facts: wants.request_facts,
            worker_facts: wants.worker_facts,
        }))
    }};
}

/// Converts the answers and errors of one binding module.
macro_rules! convert {
    ($($module:ident: $call:ident, $error:ident;)*) => {$(
        fn $call(call: &Call) -> crate::bindings::$module::pointsman::policy::types::Call {
            use crate::bindings::$module::pointsman::policy::types as wit;
            wit::Call {
                leg: match call.leg {
                    Leg::Aggregated => wit::Leg::Aggregated,
                    Leg::Prefill => wit::Leg::Prefill,
                    Leg::Decode => wit::Leg::Decode,
                },
                attempt: call.attempt,
                rows: call.rows,
                seed: call.seed,
                now_us: call.now_us,
            }
        }

        fn $error(error: crate::bindings::$module::pointsman::policy::types::Error) -> Failure {
            use crate::bindings::$module::pointsman::policy::types as wit;
            match error {
                wit::Error::Unsupported(text) => Failure::Error(cut(format!("unsupported: {text}"))),
                wit::Error::Internal(text) => Failure::Error(cut(text)),
            }
        }
    )*};
}

convert! {
    filter: call_f, error_f;
    scorer: call_s, error_s;
    selector: call_l, error_l;
    decode_override: call_d, error_d;
    filter_async: call_fa, error_fa;
    scorer_async: call_sa, error_sa;
    selector_async: call_la, error_la;
    decode_override_async: call_da, error_da;
}

macro_rules! decision {
    ($name:ident, $module:ident) => {
        fn $name(
            decision: crate::bindings::$module::exports::pointsman::policy::selecting::Decision,
        ) -> Decision {
            use crate::bindings::$module::exports::pointsman::policy::selecting as wit;
            match decision {
                wit::Decision::Choose(choice) => {
                    Decision::Choose { row: choice.row, costs: choice.costs, reason: choice.reason.map(cut) }
                }
                wit::Decision::Abstain => Decision::Abstain,
                wit::Decision::Shed(shed) => {
                    Decision::Shed(ShedReason { status: shed.status, reason: cut(shed.reason) })
                }
            }
        }
    };
}
decision!(decision_l, selector);
decision!(decision_la, selector_async);

macro_rules! disaggregation {
    ($plan:ident, $over:ident, $module:ident) => {
        fn $plan(plan: crate::bindings::$module::exports::pointsman::policy::disaggregation::Plan) -> Plan {
            use crate::bindings::$module::exports::pointsman::policy::disaggregation as wit;
            match plan {
                wit::Plan::Remote => Plan::Remote,
                wit::Plan::Local => Plan::Local,
                wit::Plan::Shed(shed) => {
                    Plan::Shed(ShedReason { status: shed.status, reason: cut(shed.reason) })
                }
            }
        }

        fn $over(
            over: crate::bindings::$module::exports::pointsman::policy::disaggregation::RouterConfigOverride,
        ) -> RouterConfigOverride {
            RouterConfigOverride {
                overlap_score_credit: over.overlap_score_credit,
                prefill_load_scale: over.prefill_load_scale,
                temperature: over.temperature,
                assume_kv_reuse: over.assume_kv_reuse,
                track_prefill_tokens: over.track_prefill_tokens,
                shared_cache_multiplier: over.shared_cache_multiplier,
            }
        }
    };
}
disaggregation!(plan_d, over_d, decode_override);
disaggregation!(plan_da, over_da, decode_override_async);

fn as_is<T>(value: wasmtime::Result<T>) -> wasmtime::Result<T> {
    value
}

impl Instance {
    /// Who it is and what it wants, under the configure deadline that `instantiate` set.
    pub(crate) fn introduce(&mut self, settings: &str) -> Result<About, Refusal> {
        let Self { store, exports, .. } = self;
        let outcome = introduce(store, exports, settings);
        match outcome {
            Ok(Ok(about)) => Ok(about),
            Ok(Err(text)) => Err(Refusal::Configure(cut(text))),
            Err(error) => Err(Refusal::Configure(failure(&self.store, &error).to_string())),
        }
    }

    /// World `filter`.
    pub(crate) fn keep(&mut self, call: &Call, facts: &[u32]) -> Result<Vec<u32>, Failure> {
        self.begin(call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::Filter(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_f(call), facts);
                kept.map(|kept| kept.map_err(error_f))
            }
            Exports::FilterAsync(exports) => {
                let kept = exports.pointsman_policy_filtering().call_keep(&mut *store, call_fa(call), facts);
                at_once(kept).map(|kept| kept.map_err(error_fa))
            }
            _ => return Err(Failure::Invalid("no filter".to_owned())),
        };
        self.end(answer)
    }

    /// World `scorer`.
    pub(crate) fn score(&mut self, call: &Call, facts: &[u32]) -> Result<Vec<f32>, Failure> {
        self.begin(call);
        let Self { store, exports, .. } = self;
        let answer = match exports {
            Exports::Scorer(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_s(call), facts);
                costs.map(|costs| costs.map_err(error_s))
            }
            Exports::ScorerAsync(exports) => {
                let costs = exports.pointsman_policy_scoring().call_score(&mut *store, call_sa(call), facts);
                at_once(costs).map(|costs| costs.map_err(error_sa))
            }
            _ => return Err(Failure::Invalid("no scorer".to_owned())),
        };
        self.end(answer)
    }

    /// World `selector`.
    pub(crate) fn select(&mut self, call: &Call, facts: &[u32]) -> Result<Decision, Failure> {
        self.begin(call);
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
                at_once(decision).map(|decision| decision.map(decision_la).map_err(error_la))
            }
            _ => return Err(Failure::Invalid("no selector".to_owned())),
        };
        self.end(answer)
    }

    /// World `decode-override`: where to prefill.
    pub(crate) fn decide(
        &mut self,
        call: &Call,
        request: &[u32],
        decode: &[u32],
        prefill: &[u32],
    ) -> Result<Plan, Failure> {
        self.begin(call);
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
                at_once(plan).map(|plan| plan.map(plan_da).map_err(error_da))
            }
            _ => return Err(Failure::Invalid("no decode override".to_owned())),
        };
        self.end(answer)
    }

    /// World `decode-override`: the decode leg's config.
    pub(crate) fn decode_config(
        &mut self,
        call: &Call,
        facts: &[u32],
    ) -> Result<RouterConfigOverride, Failure> {
        self.begin(call);
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
                at_once(over).map(|over| over.map(over_da).map_err(error_da))
            }
            _ => return Err(Failure::Invalid("no decode override".to_owned())),
        };
        self.end(answer)
    }

    /// It is configured and proved: from now on what it writes to the slot's state lasts.
    pub(crate) fn serve(&mut self) {
        self.store.data_mut().serve();
    }

    /// Linear memory it has now, bytes.
    pub(crate) fn memory_used(&self) -> usize {
        self.store.data().memory_used
    }

    /// Instructions it may still run, where they are counted.
    pub(crate) fn fuel(&self) -> Option<u64> {
        self.store.get_fuel().ok()
    }

    fn begin(&mut self, call: &Call) {
        self.calls += 1;
        self.store.data_mut().begin(call);
        self.store.data_mut().allow(self.deadline);
        self.store.set_epoch_deadline(1);
    }

    fn end<T>(&mut self, answer: wasmtime::Result<Result<T, Failure>>) -> Result<T, Failure> {
        answer.unwrap_or_else(|error| Err(failure(&self.store, &error)))
    }
}

fn introduce(
    store: &mut Store<Guest>,
    exports: &Exports,
    settings: &str,
) -> wasmtime::Result<Result<About, String>> {
    match exports {
        Exports::Filter(exports) => introduce!(store, exports, settings, as_is),
        Exports::Scorer(exports) => introduce!(store, exports, settings, as_is),
        Exports::Selector(exports) => introduce!(store, exports, settings, as_is),
        Exports::DecodeOverride(exports) => introduce!(store, exports, settings, as_is),
        Exports::FilterAsync(exports) => introduce!(store, exports, settings, at_once),
        Exports::ScorerAsync(exports) => introduce!(store, exports, settings, at_once),
        Exports::SelectorAsync(exports) => introduce!(store, exports, settings, at_once),
        Exports::DecodeOverrideAsync(exports) => introduce!(store, exports, settings, at_once),
    }
}

/// What a failed call was about.
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
