//! Between the host's types and those that each world's bindings generate, which are the same and have other
//! names.

use std::time::Duration;

use pointsman_routing::{
    Call, Decision, DecisionId, Failure, ObservedOutcome, Plan, RouterConfigOverride, ShedReason,
};
use pointsman_workers::Leg;

use crate::guest_info::truncate;

/// Converts the answers and errors of one binding module.
macro_rules! convert {
    ($($module:ident: $call:ident, $error:ident;)*) => {$(
        pub(super) fn $call(call: &Call) -> crate::bindings::$module::pointsman::policy::types::Call {
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

        pub(super) fn $error(error: crate::bindings::$module::pointsman::policy::types::Error) -> Failure {
            use crate::bindings::$module::pointsman::policy::types as wit;
            match error {
                wit::Error::Unsupported(text) => Failure::Error(truncate(format!("unsupported: {text}"))),
                wit::Error::Internal(text) => Failure::Error(truncate(text)),
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
        pub(super) fn $name(
            decision: crate::bindings::$module::exports::pointsman::policy::selecting::Decision,
        ) -> Decision {
            use crate::bindings::$module::exports::pointsman::policy::selecting as wit;
            match decision {
                wit::Decision::Choose(choice) => Decision::Choose {
                    row: choice.row,
                    costs: choice.costs,
                    reason: choice.reason.map(truncate),
                },
                wit::Decision::Abstain => Decision::Abstain,
                wit::Decision::Shed(shed) => {
                    Decision::Shed(ShedReason { status: shed.status, reason: truncate(shed.reason) })
                }
            }
        }
    };
}
decision!(decision_l, selector);
decision!(decision_la, selector_async);

macro_rules! disaggregation {
    ($plan:ident, $over:ident, $module:ident) => {
        pub(super) fn $plan(
            plan: crate::bindings::$module::exports::pointsman::policy::disaggregation::Plan,
        ) -> Plan {
            use crate::bindings::$module::exports::pointsman::policy::disaggregation as wit;
            match plan {
                wit::Plan::Remote => Plan::Remote,
                wit::Plan::Local => Plan::Local,
                wit::Plan::Shed(shed) => {
                    Plan::Shed(ShedReason { status: shed.status, reason: truncate(shed.reason) })
                }
            }
        }

        pub(super) fn $over(
            over: crate::bindings::$module::exports::pointsman::policy::disaggregation::RouterConfigOverride,
        ) -> RouterConfigOverride {
            RouterConfigOverride {
                overlap_score_credit: over.overlap_score_credit,
                prefill_load_scale: over.prefill_load_scale,
                temperature: over.temperature,
                assume_kv_reuse: over.assume_kv_reuse,
                track_prefill_tokens: over.track_prefill_tokens,
                shared_cache_multiplier: over.shared_cache_multiplier,
                overlap_score_weight: None,
            }
        }
    };
}
disaggregation!(plan_d, over_d, decode_override);
disaggregation!(plan_da, over_da, decode_override_async);

macro_rules! outcome {
    ($name:ident, $module:ident) => {
        pub(super) fn $name(
            seen: &ObservedOutcome,
        ) -> crate::bindings::$module::exports::pointsman::policy::learning::Outcome {
            use crate::bindings::$module::exports::pointsman::policy::learning as wit;
            wit::Outcome {
                decision: seen.decision.map_or(0, DecisionId::number),
                seed: seen.seed,
                leg: match seen.leg {
                    Leg::Aggregated => wit::Leg::Aggregated,
                    Leg::Prefill => wit::Leg::Prefill,
                    Leg::Decode => wit::Leg::Decode,
                },
                attempt: seen.attempt,
                worker_id: seen.worker.0,
                dp_rank: seen.rank.0,
                by_policy: seen.by_policy,
                retried: seen.retried,
                status: seen.status,
                ttft_us: seen.ttft.map(short),
                itl_us: seen.itl.map(short),
                duration_us: u64::try_from(seen.duration.as_micros()).unwrap_or(u64::MAX),
                prompt_tokens: seen.prompt_tokens,
                output_tokens: seen.output_tokens,
                cached_predicted: seen.cached_predicted,
                cached_reported: seen.cached_reported,
            }
        }
    };
}
outcome!(outcome_s, learner);
outcome!(outcome_a, learner_async);

/// Microseconds; more than an hour is an hour and some.
fn short(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
