//! `GET /decisions/summary`: active, canary and shadow of each slot side by side, over the last hour or less.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State as Extract, rejection::QueryRejection},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use pointsman_routing::{CALL_BUCKETS_US, CallStats, Generation, GenerationHandle, Lane, Program, Slot};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::refuse::invalid;
use crate::{
    state::State,
    telemetry::decision_stats::{Count, DecisionStats, LaneSum, MAX_MINUTES, compared_generation},
};

/// The query string.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Window {
    window: Option<String>,
}

/// A slot with the lanes that run now or decided within the window.
#[derive(Debug, Serialize)]
struct SlotSummary {
    slot: &'static str,
    model: Option<String>,
    lanes: Vec<Value>,
}

/// `GET /decisions/summary?window=1h`.
pub(super) async fn get(
    Extract(state): Extract<Arc<State>>,
    query: Result<Query<Window>, QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let minutes = match query.map_err(|error| error.body_text()).and_then(|Query(query)| minutes(&query)) {
        Ok(minutes) => minutes,
        Err(problem) => return invalid(&headers, &problem),
    };
    let mut slots: Vec<SlotSummary> = (state.router.slots().iter())
        .map(|slot| SlotSummary::of(slot, &state.decision_stats, minutes))
        .collect();
    slots.sort_by(|a, b| a.model.cmp(&b.model));
    Json(json!({ "window_s": minutes * 60, "slots": slots })).into_response()
}

/// Returns the window in whole minutes.
fn minutes(query: &Window) -> Result<u64, String> {
    let Some(text) = &query.window else { return Ok(MAX_MINUTES) };
    let window = humantime_serde::re::humantime::parse_duration(text).ok();
    let window = window.filter(|window| (1..=MAX_MINUTES * 60).contains(&window.as_secs()));
    let shown: String = text.chars().take(40).collect();
    let problem = || format!("window: `{shown}` is not a time from 1s to 1h, such as 15m");
    Ok(window.ok_or_else(problem)?.as_secs().div_ceil(60))
}

impl SlotSummary {
    fn of(slot: &Slot, stats: &DecisionStats, minutes: u64) -> Self {
        let snapshot = slot.snapshot();
        let of_lane = |lane| match lane {
            Lane::Active => Some(&snapshot.active),
            Lane::Canary => snapshot.canary.as_ref().map(|trial| &trial.handle),
            Lane::Shadow => snapshot.shadow.as_ref().map(|trial| &trial.handle),
        };
        let lanes = Lane::ALL.into_iter().filter_map(|lane| {
            let runs = of_lane(lane);
            let own = runs.map(|runs| runs.generation);
            let counted = match lane {
                Lane::Shadow => own.map(|own| compared_generation(own, snapshot.active.generation)),
                Lane::Active | Lane::Canary => own,
            };
            let (sum, last) = stats.sum(slot.model(), slot.kind(), (lane, counted), minutes);
            let generation = own.or(last);
            let runs_or_ran = runs.is_some() || sum.count(Count::Decisions) > 0;
            runs_or_ran.then(|| describe((lane, generation), runs, &sum, slot.stats(lane)))
        });
        Self {
            slot: slot.kind().as_str(),
            model: slot.model().map(ToString::to_string),
            lanes: lanes.collect(),
        }
    }
}

/// One lane: what runs there now, and what that decided within the window. Of a lane that is empty now, what
/// ran there last.
fn describe(
    (lane, generation): (Lane, Option<Generation>),
    runs: Option<&Arc<GenerationHandle>>,
    sum: &LaneSum,
    calls: &CallStats,
) -> Value {
    let ranker = runs.and_then(|runs| runs.program.ranker());
    let native = runs.and_then(|runs| match &runs.program {
        Program::Native(mode) => Some(*mode),
        _ => None,
    });
    let [ttft, itl, e2e] = sum.times();
    json!({
        "lane": lane,
        "policy": ranker.map(|info| info.name.clone()),
        "native": native,
        "digest": ranker.map(|info| info.digest),
        "generation": generation,
        "decisions": sum.count(Count::Decisions),
        "fallbacks": sum.count(Count::Fallbacks),
        "sheds": sum.count(Count::Sheds),
        "failed": sum.count(Count::Failed),
        "compared": sum.count(Count::Compared),
        "agreed": sum.count(Count::Agreed),
        "agreement": sum.share(Count::Agreed, Count::Compared),
        "prompt_blocks": sum.count(Count::PromptBlocks),
        "cached_blocks": sum.count(Count::CachedBlocks),
        "predicted_hit_rate": sum.share(Count::CachedBlocks, Count::PromptBlocks),
        "ttft_ms": ttft,
        "itl_ms": itl,
        "e2e_ms": e2e,
        "decisions_by_minute": sum.minutes,
        "calls": calls.cumulative().last(),
        "call_p99_us": call_p99_us(calls),
        "call_p99_us_max": CALL_BUCKETS_US.last(),
    })
}

/// Returns the bound below which 99 % of a lane's calls since the start were, microseconds; `None` without
/// calls, or when it is above the largest bound.
fn call_p99_us(calls: &CallStats) -> Option<u64> {
    let cumulative = calls.cumulative();
    let all = cumulative.last().copied().filter(|all| *all > 0)?;
    let mut bounds = CALL_BUCKETS_US.into_iter().zip(cumulative);
    bounds.find(|(_, count)| count * 100 >= all * 99).map(|(bound, _)| bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_a_time_of_up_to_an_hour() {
        let of = |text: &str| minutes(&Window { window: Some(text.to_owned()) });
        assert_eq!(minutes(&Window { window: None }), Ok(60));
        assert_eq!([of("15m"), of("90s"), of("1h"), of("1s")], [Ok(15), Ok(2), Ok(60), Ok(1)]);
        for wrong in ["", "soon", "0s", "2h", "-1m", "5"] {
            let expected = format!("window: `{wrong}` is not a time from 1s to 1h, such as 15m");
            assert_eq!(of(wrong), Err(expected));
        }
    }
}
