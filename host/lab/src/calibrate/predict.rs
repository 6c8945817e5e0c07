//! Predicts measured requests with the lab, which uses the router, legs, links and engines of `pointsman
//! compare`.

use super::{Predicted, Sample, errors::HeldOut};
use crate::{
    arm::Arm,
    fleet::Fleet,
    outcome::Ended,
    run::{RunError, RunOptions, run},
    trace::{Trace, TraceRequest},
};

/// Predicts the times of each request, or `None` for a request that the fleet cannot serve. No two prompts
/// share a prefix.
///
/// # Errors
/// The fleet is not valid.
pub fn predict(fleet: &Fleet, samples: &[Sample]) -> Result<Vec<Option<Predicted>>, RunError> {
    // The lab expects requests in the order of their arrival.
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by(|left, right| {
        let at = |place: &usize| samples.get(*place).map_or(0.0, |sample| sample.at_ms);
        at(left).total_cmp(&at(right))
    });
    let requests = order.iter().filter_map(|place| samples.get(*place)).map(|sample| TraceRequest {
        at: sample.at(),
        input_tokens: sample.isl.max(1),
        output_tokens: sample.osl.max(1),
        ..TraceRequest::default()
    });
    let trace = Trace {
        name: "measured".to_owned(),
        block_tokens: fleet.block_tokens,
        requests: requests.collect(),
        ..Trace::default()
    };
    let arm = Arm::parse("least-loaded")?;
    let result = run(&arm, &trace, fleet, RunOptions::default())?;
    let mut predicted = vec![None; samples.len()];
    for (place, outcome) in order.iter().zip(&result.outcomes) {
        let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        if let (Ended::Complete, Some(predicted)) = (outcome.ended, predicted.get_mut(*place)) {
            *predicted = Some(Predicted {
                ttft_ms: milliseconds(outcome.ttft),
                itl_ms: outcome.itl().map(milliseconds),
                e2e_ms: milliseconds(outcome.e2e),
            });
        }
    }
    Ok(predicted)
}

/// Predicts requests that were not fitted, and compares the prediction with the measurement.
///
/// # Errors
/// The fleet is not valid.
pub fn check(fleet: &Fleet, samples: &[Sample]) -> Result<HeldOut, RunError> {
    Ok(HeldOut::of(samples, &predict(fleet, samples)?))
}
