//! Asks a policy for a recorded decision.

use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Normalize, Picker, Plan, Policy, Purpose, World,
    pick::{normalize, pick},
};

use super::{
    Answer,
    recorded_decision::{self, MissingFacts, RecordedDecision},
};

/// An answer and costs by candidate row, or the facts that the recording lacks.
pub(super) type Asked = Result<(Answer, Vec<(u32, f32)>), MissingFacts>;

/// Asks the policy; returns its answer and its costs by candidate row.
pub(super) fn ask(filter: Option<&dyn Policy>, policy: &dyn Policy, line: &RecordedDecision) -> Asked {
    let info = policy.info();
    let mut rows = if info.world == World::Filter { line.all_rows() } else { line.left_rows() };
    let call = |rows: usize| Call {
        leg: line.leg,
        attempt: line.attempt,
        rows: u32::try_from(rows).unwrap_or(u32::MAX),
        seed: line.call.seed,
        now_us: line.call.now_us,
    };
    if info.world == World::DecodeOverride {
        let words = line.plan_words(&info.wants)?;
        let answer = match policy.decide(
            &mut DecisionContext::new(Purpose::Route),
            &call(words.rows),
            &words.request,
            &words.decode,
            &words.prefill,
        ) {
            Ok(Plan::Remote) => Answer::Plan("remote".to_owned()),
            Ok(Plan::Local) => Answer::Plan("local".to_owned()),
            Ok(Plan::Shed(_)) => Answer::Plan("shed".to_owned()),
            Err(failure) => Answer::Failed(failure.to_string()),
        };
        return Ok((answer, Vec::new()));
    }
    if let Some(filter) = filter {
        let facts = line.words(&filter.info().wants, &rows)?;
        let mut kept = Vec::new();
        let context = &mut DecisionContext::new(Purpose::Route);
        if let Err(failure) = filter.keep(context, &call(rows.len()), &facts, &mut kept) {
            return Ok((Answer::Failed(failure.to_string()), Vec::new()));
        }
        rows = kept.iter().filter_map(|place| rows.get(*place as usize).copied()).collect();
        if rows.is_empty() {
            return Ok((Answer::Failed("the filter keeps no row".to_owned()), Vec::new()));
        }
    }
    let (call, facts) = (call(rows.len()), line.words(&info.wants, &rows)?);
    let by_row = |costs: Vec<f32>| rows.iter().copied().zip(costs).collect::<Vec<_>>();
    let row = |place: usize| rows.get(place).copied();
    let outcome: Result<(Answer, Vec<f32>), Failure> = match info.world {
        World::Filter => {
            let mut kept = Vec::new();
            policy.keep(&mut DecisionContext::new(Purpose::Route), &call, &facts, &mut kept).map(|()| {
                (Answer::Kept(kept.iter().filter_map(|place| row(*place as usize)).collect()), Vec::new())
            })
        }
        World::Scorer => score(policy, line, &call, &facts).map(|(place, costs)| {
            (place.and_then(row).map_or_else(|| Answer::Failed("no row".to_owned()), Answer::Row), costs)
        }),
        _ => select(policy, line, &call, &facts, &rows),
    };
    Ok(match outcome {
        Ok((answer, costs)) => (answer, by_row(costs)),
        Err(failure) => (Answer::Failed(failure.to_string()), Vec::new()),
    })
}

/// Scores and picks as the slot does with this scorer alone: with the recorded normalisation, weight and
/// picker.
fn score(
    policy: &dyn Policy,
    line: &RecordedDecision,
    call: &Call,
    facts: &[u32],
) -> Result<(Option<usize>, Vec<f32>), Failure> {
    let mut costs = Vec::new();
    policy.score(&mut DecisionContext::new(Purpose::Route), call, facts, &mut costs)?;
    if costs.len() != call.rows as usize || costs.iter().any(|cost| !cost.is_finite()) {
        return Err(Failure::Invalid("the costs are not one finite number per row".to_owned()));
    }
    let (weight, scale) = line.only_scorer().unwrap_or((1.0, Normalize::None));
    normalize(scale, &mut costs);
    costs.iter_mut().for_each(|cost| *cost = 0.0 + weight * *cost);
    let picker = line.picker.unwrap_or(Picker::Min);
    Ok((pick(picker, &costs, line.call.temperature, call.seed), costs))
}

/// Asks the selector as recorded. If it chooses another row and returns no costs, asks again with `explain`
/// set.
fn select(
    policy: &dyn Policy,
    line: &RecordedDecision,
    call: &Call,
    facts: &[u32],
    rows: &[u32],
) -> Result<(Answer, Vec<f32>), Failure> {
    let (place, costs) = match policy.select(&mut DecisionContext::new(Purpose::Route), call, facts)? {
        Decision::Abstain => return Ok((Answer::Abstain, Vec::new())),
        Decision::Shed(_) => return Ok((Answer::Shed, Vec::new())),
        Decision::Choose { row, costs, .. } => (row, costs),
    };
    let row = rows.get(place as usize).copied();
    let row = row.ok_or_else(|| Failure::Invalid(format!("row {place} of {}", rows.len())))?;
    let recorded = line.choice.as_ref().and_then(|choice| choice.row);
    if !costs.is_empty() || recorded == Some(row) {
        return Ok((Answer::Row(row), costs));
    }
    let mut explained = facts.to_vec();
    let Some(explain) =
        recorded_decision::explain_index(&policy.info().wants).and_then(|at| explained.get_mut(at))
    else {
        return Ok((Answer::Row(row), costs));
    };
    *explain = 1;
    let costs = match policy.select(&mut DecisionContext::new(Purpose::Route), call, &explained) {
        Ok(Decision::Choose { costs, .. }) => costs,
        _ => Vec::new(),
    };
    Ok((Answer::Row(row), costs))
}
