//! A rogue that learns: counts outcomes in `state` until its deed is due. Its deeds begin with `observe-`.

#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({
        path: "../../../wit",
        inline: "package rogue:learns; world learner {
            import pointsman:policy/state@0.1.1;
            export pointsman:policy/learning@0.1.1;
        }",
        world: "rogue:learns/learner",
        generate_all,
    });
}

use bindings::{
    exports::pointsman::policy::learning::{Guest, Leg, Outcome},
    pointsman::policy::state,
};

use crate::script::{due_observing, misbehave};

/// Returns the count under this name.
pub(crate) fn number(name: &str) -> i64 {
    state::get(name).and_then(|value| value.try_into().ok()).map_or(0, i64::from_le_bytes)
}

struct Learner;

impl Guest for Learner {
    fn observe(_: u64, _: u64, outcomes: Vec<Outcome>) {
        let _ = misbehave(due_observing());
        let count = i64::try_from(outcomes.len()).unwrap_or(0);
        let _ = state::increment("outcomes", count, 0);
        for outcome in outcomes {
            let _ = state::increment(&format!("status/{}", outcome.status), 1, 0);
            let _ = state::increment(&format!("worker/{}", outcome.worker_id), 1, 0);
            let leg = if outcome.leg == Leg::Aggregated { "aggregated" } else { "other" };
            let _ = state::increment(&format!("leg/{leg}"), 1, 0);
            let _ = state::increment("retried", i64::from(outcome.retried), 0);
            let _ = state::increment("by-policy", i64::from(outcome.by_policy), 0);
            let sane = outcome.ttft_us.is_none_or(|ttft| ttft > 0 && u64::from(ttft) <= outcome.duration_us);
            let _ = state::increment("odd", i64::from(!sane || outcome.decision == 0), 0);
        }
    }
}

#[allow(unsafe_code, reason = "generated")]
mod export {
    use super::{Learner, bindings};

    bindings::export!(Learner with_types_in bindings);
}
