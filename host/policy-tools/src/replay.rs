//! Decides recorded decisions again with a given policy, and tells where it differs (`pointsman policy run`).
//!
//! The policy is handed the recorded words, seed and time, and finds in the state what was there, so that the policy that decided then decides the same now, bit
//! for bit. Knows the lines of `/decisions/export`, and neither HTTP nor the command line.

use std::{collections::BTreeMap, io::BufRead};

use pointsman_policy_runtime::State;
use pointsman_routing::{
    Call, Decision, Failure, Normalize, Picker, Plan, Policy, World,
    pick::{normalize, pick},
};
use serde::Serialize;

mod line;

use line::{Lacks, Line};

/// What came of a recording.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Decisions that were decided again.
    pub decisions: u64,
    /// How many came out the same.
    pub agree: u64,
    /// Both by leg.
    pub legs: BTreeMap<String, Share>,
    /// Decisions that the policy was not asked about, by why.
    pub skipped: BTreeMap<String, u64>,
    /// The others.
    pub differences: Vec<Difference>,
}

/// Decisions of one leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// That were decided again.
    pub decisions: u64,
    /// That came out the same.
    pub agree: u64,
}

/// Whose costs say how much a difference matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judge {
    /// This policy's: by how much it finds the recorded choice dearer.
    Policy,
    /// The recorded ones: by how much what decided would have found this policy's choice dearer.
    Recorded,
}

/// A decision that came out otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The decision.
    pub id: String,
    /// Its leg.
    pub leg: String,
    /// What was decided.
    pub recorded: String,
    /// Cost of that as recorded, when it is known.
    pub recorded_cost: Option<f32>,
    /// What the policy says.
    pub new: String,
    /// Cost of that, as the policy says.
    pub new_cost: Option<f32>,
    /// By how much what was decided is dearer, as the policy says; `None` when it gives no costs.
    pub by: Option<f32>,
    /// Cost of what the policy says as recorded, when it is known.
    pub new_cost_recorded: Option<f32>,
    /// By how much what the policy says is dearer, as recorded; `None` when costs are not known.
    pub by_recorded: Option<f32>,
    /// Recorded worker facts in which the two candidates differ.
    pub facts: Vec<Contrast>,
}

/// A worker fact of two candidates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Contrast {
    /// Its name.
    pub fact: String,
    /// The candidate's that was chosen, as the record spells it.
    pub recorded: String,
    /// That of the one the policy says.
    pub new: String,
}

/// Why a recording cannot be decided again.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// A line is no decision.
    #[error("line {0}: {1}")]
    Line(usize, String),
    /// The policy wants what was not recorded.
    #[error(
        "the recording lacks what `{policy}` wants: {}; record it with `[decisions] facts = [{}]`",
        told(.facts), quoted(.facts)
    )]
    Facts {
        /// The policy.
        policy: String,
        /// Decisions that lack it, by the fact's name.
        facts: BTreeMap<String, u64>,
    },
}

/// A policy's answer, or the recorded one.
#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Row(u32),
    Abstain,
    Shed,
    Kept(Vec<u32>),
    Plan(String),
    Failed(String),
}

/// Decides every decision of a recording again; the differences that `judge` finds greatest come first. `state` is what the
/// policy remembers by; it is lost.
///
/// # Errors
/// [`ReplayError`] when the recording cannot be read, or does not have what the policy wants.
pub fn replay(
    policy: &dyn Policy,
    state: &State,
    recording: impl BufRead,
    judge: Judge,
) -> Result<Report, ReplayError> {
    let mut report = Report::default();
    let mut lacking: BTreeMap<String, u64> = BTreeMap::new();
    for (number, text) in (1..).zip(recording.lines()) {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let line: Line =
            serde_json::from_str(&text).map_err(|error| ReplayError::Line(number, error.to_string()))?;
        let recorded = match recorded(&line, policy.info().world) {
            Ok(recorded) => recorded,
            Err(why) => {
                *report.skipped.entry(why).or_default() += 1;
                continue;
            }
        };
        if policy.info().remembers
            && let Err(why) = remember(state, &line, &policy.info().name)
        {
            *report.skipped.entry(why.to_owned()).or_default() += 1;
            continue;
        }
        match again(policy, &line) {
            Ok((new, costs)) => report.note(&line, &recorded, &new, &costs),
            Err(Lacks(names)) => names.into_iter().for_each(|name| *lacking.entry(name).or_default() += 1),
        }
    }
    if !lacking.is_empty() {
        return Err(ReplayError::Facts { policy: policy.info().name.to_string(), facts: lacking });
    }
    let weight = |difference: &Difference| match judge {
        Judge::Policy => difference.by,
        Judge::Recorded => difference.by_recorded,
    };
    // Those without a cost come last.
    let weight = |difference: &Difference| weight(difference).unwrap_or(f32::MIN);
    report.differences.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    Ok(report)
}

/// Puts into the state what was read of it, and nothing else.
fn remember(state: &State, line: &Line, policy: &str) -> Result<(), &'static str> {
    state.clear();
    let read = line.state(policy).ok_or("more of the state was read than is recorded")?;
    for (key, value) in read {
        state.set(key, &value, 0, 0).map_err(|_| "the state it read does not fit")?;
    }
    Ok(())
}

/// What was decided, as a policy of this world would say it; or why it has no say.
fn recorded(line: &Line, world: World) -> Result<Answer, String> {
    if line.inputs_dropped {
        return Err("inputs were dropped".to_owned());
    }
    if line.plan.is_some() != (world == World::DecodeOverride) {
        return Err(format!("not for a {world}"));
    }
    match (line.decider.by.as_str(), line.decider.reason.as_deref()) {
        ("policy" | "native", _) => {}
        ("fallback", Some("abstain")) if world != World::Filter => return Ok(Answer::Abstain),
        ("fallback", reason) => return Err(format!("fallback: {}", reason.unwrap_or_default())),
        (other, _) => return Err(format!("decided by {other}")),
    }
    if let Some(plan) = &line.plan {
        return Ok(Answer::Plan(plan.word.clone()));
    }
    if world == World::Filter {
        return Ok(Answer::Kept(line.kept_by_the_first_filter()));
    }
    if let Some(refused) = &line.refused {
        return if refused.code == "shed" {
            Ok(Answer::Shed)
        } else {
            Err(format!("refused: {}", refused.code))
        };
    }
    line.choice.as_ref().and_then(|choice| choice.row).map(Answer::Row).ok_or_else(|| "no choice".to_owned())
}

/// Asks the policy; its answer, and its costs by the candidates' rows.
fn again(policy: &dyn Policy, line: &Line) -> Result<(Answer, Vec<(u32, f32)>), Lacks> {
    let info = policy.info();
    let rows = if info.world == World::Filter { line.all_rows() } else { line.left_rows() };
    let call = |rows: usize| Call {
        leg: line.leg,
        attempt: line.attempt,
        rows: u32::try_from(rows).unwrap_or(u32::MAX),
        seed: line.call.seed,
        now_us: line.call.now_us,
    };
    if info.world == World::DecodeOverride {
        let words = line.plan_words(&info.wants)?;
        let answer = match policy.decide(&call(words.rows), &words.request, &words.decode, &words.prefill) {
            Ok(Plan::Remote) => Answer::Plan("remote".to_owned()),
            Ok(Plan::Local) => Answer::Plan("local".to_owned()),
            Ok(Plan::Shed(_)) => Answer::Plan("shed".to_owned()),
            Err(failure) => Answer::Failed(failure.to_string()),
        };
        return Ok((answer, Vec::new()));
    }
    let (call, facts) = (call(rows.len()), line.words(&info.wants, &rows)?);
    let by_row = |costs: Vec<f32>| rows.iter().copied().zip(costs).collect::<Vec<_>>();
    let row = |place: usize| rows.get(place).copied();
    let outcome: Result<(Answer, Vec<f32>), Failure> = match info.world {
        World::Filter => {
            let mut kept = Vec::new();
            policy.keep(&call, &facts, &mut kept).map(|()| {
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

/// As the slot would: one scorer alone, on the recorded scale and with the recorded picker where there was one.
fn score(
    policy: &dyn Policy,
    line: &Line,
    call: &Call,
    facts: &[u32],
) -> Result<(Option<usize>, Vec<f32>), Failure> {
    let mut costs = Vec::new();
    policy.score(call, facts, &mut costs)?;
    if costs.len() != call.rows as usize || costs.iter().any(|cost| !cost.is_finite()) {
        return Err(Failure::Invalid("the costs are not one finite number a row".to_owned()));
    }
    let (weight, scale) = line.only_scorer().unwrap_or((1.0, Normalize::None));
    normalize(scale, &mut costs);
    costs.iter_mut().for_each(|cost| *cost = 0.0 + weight * *cost);
    let picker = line.picker.unwrap_or(Picker::Min);
    Ok((pick(picker, &costs, line.call.temperature, call.seed), costs))
}

/// Asks as it was recorded; where that gives another row and no costs, once more to be told them.
fn select(
    policy: &dyn Policy,
    line: &Line,
    call: &Call,
    facts: &[u32],
    rows: &[u32],
) -> Result<(Answer, Vec<f32>), Failure> {
    let (place, costs) = match policy.select(call, facts)? {
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
    let Some(explain) = line::place_of_explain(&policy.info().wants).and_then(|at| explained.get_mut(at))
    else {
        return Ok((Answer::Row(row), costs));
    };
    *explain = 1;
    let costs = match policy.select(call, &explained) {
        Ok(Decision::Choose { costs, .. }) => costs,
        _ => Vec::new(),
    };
    Ok((Answer::Row(row), costs))
}

impl Report {
    fn note(&mut self, line: &Line, recorded: &Answer, new: &Answer, costs: &[(u32, f32)]) {
        // Where the policy had no opinion the fallback's choice was right, if it is the same.
        let chosen = line.choice.as_ref().and_then(|choice| choice.row);
        let same = recorded == new
            || (*recorded == Answer::Abstain && chosen.map(Answer::Row).as_ref() == Some(new));
        let share = self.legs.entry(line.leg.as_str().to_owned()).or_default();
        share.decisions += 1;
        share.agree += u64::from(same);
        self.decisions += 1;
        self.agree += u64::from(same);
        if !same {
            self.differences.push(difference(line, recorded, new, costs));
        }
    }
}

fn difference(line: &Line, recorded: &Answer, new: &Answer, costs: &[(u32, f32)]) -> Difference {
    let chosen = line.choice.as_ref().and_then(|choice| choice.row);
    let proposed = if let Answer::Row(row) = new { Some(*row) } else { None };
    let says = |row: Option<u32>| costs.iter().find(|(other, _)| Some(*other) == row).map(|(_, cost)| *cost);
    let dearer = |dear: Option<f32>, cheap: Option<f32>| dear.zip(cheap).map(|(dear, cheap)| dear - cheap);
    let (recorded_cost, new_cost) = (line.choice.as_ref().and_then(|choice| choice.cost), says(proposed));
    let new_cost_recorded = proposed.and_then(|row| line.cost(row));
    Difference {
        id: line.id.clone(),
        leg: line.leg.as_str().to_owned(),
        recorded: recorded.told(line),
        recorded_cost,
        new: new.told(line),
        new_cost,
        by: dearer(says(chosen), new_cost),
        new_cost_recorded,
        by_recorded: dearer(new_cost_recorded, recorded_cost),
        facts: chosen.zip(proposed).map(|(chosen, row)| line.contrasts(chosen, row)).unwrap_or_default(),
    }
}

impl Answer {
    fn told(&self, line: &Line) -> String {
        match self {
            Self::Row(row) => match line.candidates.get(*row as usize) {
                Some((worker, rank)) => format!("{worker}/{rank}"),
                None => format!("row {row}"),
            },
            Self::Abstain => "abstain".to_owned(),
            Self::Shed => "shed".to_owned(),
            Self::Kept(rows) => format!("keeps {rows:?}"),
            Self::Plan(word) => word.clone(),
            Self::Failed(failure) => format!("failed: {failure}"),
        }
    }
}

fn told(facts: &BTreeMap<String, u64>) -> String {
    let one = |(name, count): (&String, &u64)| format!("`{name}` (in {count} decisions)");
    facts.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn quoted(facts: &BTreeMap<String, u64>) -> String {
    facts.keys().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
