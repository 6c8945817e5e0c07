//! An outcome as a case gives it: a request that went well, but for what it says.

use std::time::Duration;

use pointsman_routing::ObservedOutcome;
use pointsman_workers::{DpRank, Leg, WorkerId};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawOutcome {
    /// What a host that records would say is not there: cases know no ids.
    seed: u64,
    leg: Leg,
    attempt: u32,
    worker_id: u64,
    dp_rank: u32,
    by_policy: bool,
    retried: bool,
    status: u16,
    ttft_us: Option<u32>,
    itl_us: Option<u32>,
    duration_us: u64,
    prompt_tokens: u32,
    output_tokens: u32,
    cached_predicted: Option<u32>,
    cached_reported: Option<u32>,
}

impl Default for RawOutcome {
    fn default() -> Self {
        Self {
            seed: 0,
            leg: Leg::Prefill,
            attempt: 0,
            worker_id: 0,
            dp_rank: 0,
            by_policy: true,
            retried: false,
            status: 200,
            ttft_us: None,
            itl_us: None,
            duration_us: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            cached_predicted: None,
            cached_reported: None,
        }
    }
}

impl From<RawOutcome> for ObservedOutcome {
    fn from(raw: RawOutcome) -> Self {
        let time = |micros: u32| Duration::from_micros(u64::from(micros));
        Self {
            decision: None,
            seed: raw.seed,
            leg: raw.leg,
            attempt: raw.attempt,
            worker: WorkerId(raw.worker_id),
            rank: DpRank(raw.dp_rank),
            by_policy: raw.by_policy,
            retried: raw.retried,
            status: raw.status,
            ttft: raw.ttft_us.map(time),
            itl: raw.itl_us.map(time),
            duration: Duration::from_micros(raw.duration_us),
            prompt_tokens: raw.prompt_tokens,
            output_tokens: raw.output_tokens,
            cached_predicted: raw.cached_predicted,
            cached_reported: raw.cached_reported,
        }
    }
}
