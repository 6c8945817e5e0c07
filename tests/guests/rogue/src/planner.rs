//! As a decode override: remote, and nothing overridden, until it is due.

#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit", world: "decode-override" });
}

use bindings::exports::pointsman::policy::disaggregation::{
    Call, Error, Guest, Plan, RouterConfigOverride, ShedReason,
};

use crate::script::{due, introduce, misbehave};

struct Rogue;

introduce!();

impl Guest for Rogue {
    fn decide(_: Call, _: Vec<u32>, _: Vec<u32>, _: Vec<u32>) -> Result<Plan, Error> {
        let deed = due();
        misbehave(deed).map_err(Error::Internal)?;
        Ok(match deed {
            #[cfg(feature = "learning")]
            "learn-local" if crate::learner::number("leg/other") >= 3 => Plan::Local,
            "shed-429" => Plan::Shed(ShedReason { status: 429, reason: "the plan is to refuse".into() }),
            "shed-200" => Plan::Shed(ShedReason { status: 200, reason: String::new() }),
            _ => Plan::Remote,
        })
    }

    fn decode_config(_: Call, _: Vec<u32>) -> Result<RouterConfigOverride, Error> {
        let deed = due();
        misbehave(deed.strip_prefix("config-").unwrap_or_default()).map_err(Error::Internal)?;
        Ok(RouterConfigOverride {
            overlap_score_credit: (deed == "nan").then_some(f64::NAN),
            prefill_load_scale: None,
            temperature: (deed == "negative").then_some(-1.0),
            assume_kv_reuse: None,
            track_prefill_tokens: None,
            shared_cache_multiplier: None,
        })
    }
}

#[allow(unsafe_code, reason = "generated")]
mod export {
    use super::{Rogue, bindings};

    bindings::export!(Rogue with_types_in bindings);
}
