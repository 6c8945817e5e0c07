//! Native tests: builds the facts a policy asked for, and runs the cases of a `cases.toml`.
//!
//! A case gives request facts, rows of worker facts (missing ones are 0), settings, and what is expected.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{
    Call, Decision, DecodeOverride, Facts, Filter, Moment, Outcome, Plan, Policy, Scorer, Selector, Wants,
    configure, facts,
};

/// Named values of facts.
pub type Values = BTreeMap<String, f64>;

/// One row of `cases.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Case {
    /// What it shows.
    pub name: String,
    /// The operator's settings.
    #[serde(default)]
    pub settings: toml::Table,
    /// Seed of the call.
    #[serde(default)]
    pub seed: u64,
    /// Microseconds since the Unix epoch.
    #[serde(default)]
    pub now_us: u64,
    /// Numbers that the slot's state has beforehand.
    #[serde(default)]
    pub state: BTreeMap<String, i64>,
    /// What is observed before the question is put.
    #[serde(default)]
    pub outcomes: Vec<Outcome>,
    /// Request facts.
    #[serde(default)]
    pub request: Values,
    /// Worker facts, one table a candidate (prefill candidates for a decode override).
    #[serde(default)]
    pub rows: Vec<Values>,
    /// Worker facts of the previewed decode worker; decode overrides only.
    #[serde(default)]
    pub decode: Values,
    /// What is expected.
    pub expect: Expect,
}

/// What a case expects; exactly one is given.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// A selector chooses this row.
    Row(u32),
    /// A selector has no opinion.
    Abstain,
    /// A scorer's costs, within 1e-3 or a millionth.
    Costs(Vec<f32>),
    /// A filter keeps these rows.
    Keep(Vec<u32>),
    /// A decode override decides `remote` or `local`.
    Plan(String),
    /// A selector or a decode override refuses the request with this status.
    Shed(u16),
    /// The settings are refused with a text that contains this.
    Refused(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    case: Vec<Case>,
}

/// The words of one call, as a host would hand them over.
#[derive(Debug, Default)]
pub struct Words {
    request: Vec<u32>,
    columns: Vec<u32>,
    rows: usize,
}

impl Words {
    /// Lays out what `wants` asked for.
    #[must_use]
    pub fn lay_out(wants: &Wants, request: &Values, rows: &[Values]) -> Self {
        let mut words = Self { rows: rows.len(), ..Self::default() };
        for name in wants.request_names() {
            words.request.extend(encode("request", name, request.get(name).copied().unwrap_or(0.0)));
        }
        for name in wants.worker_names() {
            let values: Vec<Vec<u32>> = rows
                .iter()
                .map(|row| encode("worker", name, row.get(name).copied().unwrap_or(0.0)))
                .collect();
            let width = values.first().map_or(0, Vec::len);
            for place in 0..width {
                words.columns.extend(values.iter().filter_map(|value| value.get(place).copied()));
            }
        }
        words
    }

    /// The view a policy reads.
    #[must_use]
    pub fn facts(&self) -> Facts<'_> {
        Facts::new(&self.request, &self.columns, self.rows)
    }
}

/// Reads the cases of a `cases.toml`.
///
/// # Errors
/// toml's words.
pub fn parse(text: &str) -> Result<Vec<Case>, String> {
    toml::from_str::<Cases>(text).map(|cases| cases.case).map_err(|error| error.to_string())
}

/// Runs every case on a selector.
///
/// # Errors
/// Every case that differs, with what was expected and what came.
pub fn run_selector<P: Selector>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, case, wants| {
        let words = Words::lay_out(wants, &case.request, &case.rows);
        match policy.select(&call(case), &words.facts()) {
            Ok(Decision::Choose { row, .. }) if matches!(case.expect, Expect::Row(expected) if expected == row) => {
                Ok(())
            }
            Ok(Decision::Abstain) if matches!(case.expect, Expect::Abstain) => Ok(()),
            Ok(Decision::Shed(shed)) if matches!(case.expect, Expect::Shed(status) if status == shed.status) => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    })
}

/// Runs every case on a scorer.
///
/// # Errors
/// Every case that differs, with what was expected and what came.
pub fn run_scorer<P: Scorer>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, case, wants| {
        let words = Words::lay_out(wants, &case.request, &case.rows);
        let costs = policy.score(&call(case), &words.facts()).map_err(|error| format!("{error:?}"))?;
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-3_f32.max(b.abs() * 1e-6);
        match &case.expect {
            Expect::Costs(expected)
                if expected.len() == costs.len()
                    && expected.iter().zip(&costs).all(|(a, b)| near(*b, *a)) =>
            {
                Ok(())
            }
            _ => Err(format!("{costs:?}")),
        }
    })
}

/// Runs every case on a filter.
///
/// # Errors
/// Every case that differs, with what was expected and what came.
pub fn run_filter<P: Filter>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, case, wants| {
        let words = Words::lay_out(wants, &case.request, &case.rows);
        match policy.keep(&call(case), &words.facts()) {
            Ok(kept) if matches!(&case.expect, Expect::Keep(expected) if *expected == kept) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
}

/// Runs every case on a decode override's `decide`.
///
/// # Errors
/// Every case that differs, with what was expected and what came.
pub fn run_decode_override<P: DecodeOverride>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, case, wants| {
        let decode = Words::lay_out(wants, &case.request, std::slice::from_ref(&case.decode));
        let prefill = Words::lay_out(wants, &case.request, &case.rows);
        let plan = match policy.decide(&call(case), &decode.facts(), &prefill.facts()) {
            Ok(Plan::Remote) => "remote".to_owned(),
            Ok(Plan::Local) => "local".to_owned(),
            Ok(Plan::Shed(shed)) if matches!(case.expect, Expect::Shed(status) if status == shed.status) => {
                return Ok(());
            }
            other => format!("{other:?}"),
        };
        if matches!(&case.expect, Expect::Plan(expected) if *expected == plan) { Ok(()) } else { Err(plan) }
    })
}

fn run<P: Policy>(text: &str, one: impl Fn(&P, &Case, &Wants) -> Result<(), String>) -> Result<(), String> {
    let cases = parse(text)?;
    let mut wrong = String::new();
    for case in &cases {
        #[cfg(feature = "state")]
        crate::state::testing::preset(&case.state);
        let settings = serde_json::to_string(&case.settings).unwrap_or_default();
        let outcome = match (configure::<P>(&settings), &case.expect) {
            (Err(error), Expect::Refused(part)) if error.contains(part.as_str()) => Ok(()),
            (Err(error), _) => Err(format!("refused: {error}")),
            (Ok((policy, wants)), _) => {
                if !case.outcomes.is_empty() {
                    policy.observe(&Moment { now_us: case.now_us, seed: case.seed }, &case.outcomes);
                }
                one(&policy, case, &wants)
            }
        };
        if let Err(got) = outcome {
            wrong.push_str(&format!("case `{}`: expected {:?}, got {got}\n", case.name, case.expect));
        }
    }
    match (cases.is_empty(), wrong.is_empty()) {
        (true, _) => Err("no cases".to_owned()),
        (false, true) => Ok(()),
        (false, false) => Err(wrong),
    }
}

fn call(case: &Case) -> Call {
    Call {
        rows: u32::try_from(case.rows.len()).unwrap_or(u32::MAX),
        seed: case.seed,
        now_us: case.now_us,
        ..Call::default()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "test values fit their facts' types"
)]
fn encode(scope: &str, name: &str, value: f64) -> Vec<u32> {
    let known = facts::ALL.iter().find(|(its, fact, _)| *its == scope && *fact == name).map(|(_, _, ty)| *ty);
    match known.unwrap_or(if name.starts_with("label-number/") { "f32" } else { "u32" }) {
        "f32" => vec![(value as f32).to_bits()],
        "u64" => vec![value as u64 as u32, (value as u64 >> 32) as u32],
        _ => vec![value as u32],
    }
}
