//! Replays recorded decisions with a policy and reports the differences (`pointsman policy run`).
//!
//! The policy gets the recorded facts, seed and time, and finds the recorded values in its state. The policy
//! that made a decision therefore makes the same one again, bit for bit. This module reads the lines of
//! `/decisions/export`; it does not know HTTP or the command line.

use std::{collections::BTreeMap, io::BufRead};

use pointsman_admin_cli::text;
use pointsman_policy_runtime::State;
use pointsman_routing::{Policy, World};
use serde::{Deserialize, Serialize};

mod ask;
mod recorded_decision;

use ask::ask;
use recorded_decision::{MissingFacts, RecordedDecision};

/// Result of replaying a recording.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Number of replayed decisions.
    pub decisions: u64,
    /// Number of decisions that the policy made as recorded.
    pub agree: u64,
    /// Both numbers by leg.
    pub legs: BTreeMap<String, Share>,
    /// Both numbers by the rule that decided: slot, lane, policy, and digests of its content and settings.
    #[serde(default)]
    pub rules: BTreeMap<String, Share>,
    /// Number of decisions that were not replayed, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// The decisions that differ.
    pub differences: Vec<Difference>,
}

/// Numbers of one leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Number of replayed decisions.
    pub decisions: u64,
    /// Number of decisions that the policy made as recorded.
    pub agree: u64,
}

/// Costs that rank the differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankBy {
    /// Costs of the replayed policy: how much more it assigns to the recorded choice.
    Policy,
    /// Recorded costs: how much more they assign to the choice of the replayed policy.
    Recorded,
}

/// A decision that the policy makes differently.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Id of the decision.
    pub id: String,
    /// Leg of the request.
    pub leg: String,
    /// The recorded decision.
    pub recorded: String,
    /// Recorded cost of the recorded choice, if known.
    pub recorded_cost: Option<f32>,
    /// The decision of the policy.
    pub new: String,
    /// Cost that the policy gave its own choice.
    pub new_cost: Option<f32>,
    /// Difference by which the recorded choice costs more, by the policy's costs; `None` if it returns none.
    pub by: Option<f32>,
    /// Recorded cost of the policy's choice, if known.
    pub new_cost_recorded: Option<f32>,
    /// Difference by which the policy's choice costs more, by the recorded costs; `None` if they are not
    /// known.
    pub by_recorded: Option<f32>,
    /// Recorded worker facts in which the two candidates differ.
    pub facts: Vec<FactDifference>,
}

/// A worker fact in which two candidates differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FactDifference {
    /// Name of the fact.
    pub fact: String,
    /// Value of the recorded choice, as written in the recording.
    pub recorded: String,
    /// Value of the policy's choice.
    pub new: String,
}

/// Reason why a recording cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// A line is not a decision: its number and the problem.
    #[error("line {0}: {1}")]
    Line(usize, String),
    /// The policy asks for facts that were not recorded.
    #[error(
        "the recording lacks facts that \"{policy}\" asks for: {}; \
         record them with `[decisions] facts = [{}]`",
        counted(.facts), quoted(.facts.keys())
    )]
    Facts {
        /// Name of the policy.
        policy: String,
        /// Number of decisions that lack the fact, by its name.
        facts: BTreeMap<String, u64>,
    },
}

impl ReplayError {
    fn of_line(number: usize, text: &str, error: &serde_json::Error) -> Self {
        #[derive(Deserialize)]
        struct List {
            #[serde(rename = "decisions")]
            _decisions: Vec<serde::de::IgnoredAny>,
        }
        #[derive(Deserialize)]
        struct Log {
            #[serde(rename = "log")]
            _log: serde::de::IgnoredAny,
        }
        let hint = match serde_json::from_str::<List>(text) {
            _ if serde_json::from_str::<Log>(text).is_ok() => {
                "; this is a decision log, which has no facts to replay: record decisions with GET /decisions/export"
            }
            Ok(_) => "; this is a list of decisions: record them with GET /decisions/export, one in a line",
            Err(_) if error.is_eof() => "; the line is cut off: record the decisions again, or remove it",
            Err(_) => "",
        };
        // Its line is that of the text, which is one line.
        let error = error.to_string().replace(" at line 1 column ", " at column ");
        Self::Line(number, format!("{error}{hint}"))
    }
}

/// A recorded or replayed decision.
#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Row(u32),
    Abstain,
    Shed,
    Kept(Vec<u32>),
    Plan(String),
    Failed(String),
}

/// Replays every decision of a recording. The report lists the largest differences first, as `costs` ranks
/// them. Overwrites `state`, which the policy reads.
///
/// # Errors
/// [`ReplayError`] if the recording cannot be read, or no decision in it has the facts that the policy asks
/// for.
pub fn replay(
    policy: &dyn Policy,
    state: &State,
    recording: impl BufRead,
    costs: RankBy,
) -> Result<Report, ReplayError> {
    replay_behind(None, policy, state, recording, costs)
}

/// Like [`replay`], for a policy that ranks the rows that the recorded filters and then `filter` keep.
///
/// # Errors
/// Same as [`replay`].
pub fn replay_behind(
    filter: Option<&dyn Policy>,
    policy: &dyn Policy,
    state: &State,
    recording: impl BufRead,
    costs: RankBy,
) -> Result<Report, ReplayError> {
    let mut report = Report::default();
    let mut lacking: BTreeMap<String, u64> = BTreeMap::new();
    for (number, text) in (1..).zip(recording.lines()) {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let line: RecordedDecision =
            serde_json::from_str(&text).map_err(|error| ReplayError::of_line(number, &text, &error))?;
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
        match ask(filter, policy, &line) {
            Ok((new, costs)) => report.note(&line, &recorded, &new, &costs),
            Err(MissingFacts(names)) => {
                report.skip_without(&names);
                names.into_iter().for_each(|name| *lacking.entry(name).or_default() += 1);
            }
        }
    }
    if !lacking.is_empty() && report.decisions == 0 {
        return Err(ReplayError::Facts { policy: policy.info().name.to_string(), facts: lacking });
    }
    let weight = |difference: &Difference| match costs {
        RankBy::Policy => difference.by,
        RankBy::Recorded => difference.by_recorded,
    };
    // Differences without a cost come last.
    let weight = |difference: &Difference| weight(difference).unwrap_or(f32::MIN);
    report.differences.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    Ok(report)
}

/// Sets the state to the values that the recorded call read.
fn remember(state: &State, line: &RecordedDecision, policy: &str) -> Result<(), &'static str> {
    state.clear();
    let read = line.state(policy).ok_or("the recording does not hold all state that was read")?;
    for (key, value) in read {
        state.set(key, &value, 0, 0).map_err(|_| "the recorded state exceeds the limits")?;
    }
    Ok(())
}

/// Returns the recorded decision as a policy of this world would return it, or why such a policy did not make
/// it.
fn recorded(line: &RecordedDecision, world: World) -> Result<Answer, String> {
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

impl Report {
    /// Counts a decision that lacks facts.
    fn skip_without(&mut self, facts: &[String]) {
        let facts = quoted(facts);
        let why = format!(
            "without facts that the policy asks for; record them with `[decisions] facts = [{facts}]`"
        );
        *self.skipped.entry(why).or_default() += 1;
    }

    fn note(&mut self, line: &RecordedDecision, recorded: &Answer, new: &Answer, costs: &[(u32, f32)]) {
        // The recorded policy abstained and the fallback chose: the same choice by this policy agrees.
        let chosen = line.choice.as_ref().and_then(|choice| choice.row);
        let same = recorded == new
            || (*recorded == Answer::Abstain && chosen.map(Answer::Row).as_ref() == Some(new));
        let leg = self.legs.entry(line.leg.as_str().to_owned()).or_default();
        let rule = self.rules.entry(line.rule()).or_default();
        for share in [leg, rule] {
            share.decisions += 1;
            share.agree += u64::from(same);
        }
        self.decisions += 1;
        self.agree += u64::from(same);
        if !same {
            self.differences.push(difference(line, recorded, new, costs));
        }
    }
}

fn difference(line: &RecordedDecision, recorded: &Answer, new: &Answer, costs: &[(u32, f32)]) -> Difference {
    let chosen = line.choice.as_ref().and_then(|choice| choice.row);
    let proposed = if let Answer::Row(row) = new { Some(*row) } else { None };
    let cost_of =
        |row: Option<u32>| costs.iter().find(|(other, _)| Some(*other) == row).map(|(_, cost)| *cost);
    let excess = |high: Option<f32>, low: Option<f32>| high.zip(low).map(|(high, low)| high - low);
    let (recorded_cost, new_cost) = (line.choice.as_ref().and_then(|choice| choice.cost), cost_of(proposed));
    let new_cost_recorded = proposed.and_then(|row| line.cost(row));
    Difference {
        id: line.id.clone(),
        leg: line.leg.as_str().to_owned(),
        recorded: recorded.describe(line),
        recorded_cost,
        new: new.describe(line),
        new_cost,
        by: excess(cost_of(chosen), new_cost),
        new_cost_recorded,
        by_recorded: excess(new_cost_recorded, recorded_cost),
        facts: chosen
            .zip(proposed)
            .map(|(chosen, row)| line.fact_differences(chosen, row))
            .unwrap_or_default(),
    }
}

impl Answer {
    fn describe(&self, line: &RecordedDecision) -> String {
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

fn counted(facts: &BTreeMap<String, u64>) -> String {
    let one = |(name, count): (&String, &u64)| format!("`{name}` (in {})", text::counted(*count, "decision"));
    facts.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn quoted<'a>(facts: impl IntoIterator<Item = &'a String>) -> String {
    facts.into_iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
