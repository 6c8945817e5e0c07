//! Native tests: builds the facts that a policy asked for, and runs the cases of a `cases.toml`.
//!
//! `pointsman policy test` runs the same file against the compiled component, with the same results.

use std::collections::BTreeMap;

use pointsman_policy_cases::{self as cases, Answer, Case, FactTable, FactType, Number, Report};

use crate::{
    Call, Decision, DecodeOverride, Facts, Filter, Leg, Moment, Outcome, Plan, Policy, Scorer, Selector,
    Shed, Wants, configure, facts,
};

/// Values of facts by name, for tests that lay out facts themselves.
pub type Values = BTreeMap<String, f64>;

/// The words of one call, as the host lays them out.
#[derive(Debug, Default)]
pub struct Words {
    request: Vec<u32>,
    columns: Vec<u32>,
    rows: usize,
}

impl Words {
    /// Lays out the facts that `wants` asks for. Facts that are not given have the value of an absent fact,
    /// or the gateway's default, otherwise 0.
    ///
    /// # Panics
    /// Panics at an unknown fact and at a value that does not fit its fact.
    #[must_use]
    #[expect(clippy::panic, reason = "a test with a wrong fact has to fail")]
    pub fn lay_out(wants: &Wants, request: &Values, rows: &[Values]) -> Self {
        let table = FactTable::new(facts::ALL.iter().copied());
        let encode = |values: &Values, ty: &dyn Fn(&str) -> Result<FactType, String>| {
            let words = values.iter().map(|(name, value)| {
                let words = ty(name).and_then(|ty| Number::from(*value).words(ty));
                (name.clone(), words.unwrap_or_else(|problem| panic!("fact {name}: {problem}")))
            });
            words.collect::<cases::Values>()
        };
        let request = encode(request, &|name| table.request(name));
        let rows: Vec<_> = rows.iter().map(|row| encode(row, &|name| table.worker(name))).collect();
        Self::encode(&table, wants, &request, &rows)
    }

    /// The view that a policy reads.
    #[must_use]
    pub fn facts(&self) -> Facts<'_> {
        Facts::new(&self.request, &self.columns, self.rows)
    }

    fn encode(table: &FactTable, wants: &Wants, request: &cases::Values, rows: &[cases::Values]) -> Self {
        let known = |ty: Result<FactType, String>| ty.unwrap_or(FactType::U32);
        let wanted = wants.request_names().iter().map(|name| (name.as_str(), known(table.request(name))));
        let columns = wants.worker_names().iter().map(|name| (name.as_str(), known(table.worker(name))));
        Self {
            request: cases::request_words(wanted, request),
            columns: cases::worker_words(columns, rows),
            rows: rows.len(),
        }
    }
}

/// Runs every case on a selector.
///
/// # Errors
/// Returns the report when a case fails, or says what is wrong with the file.
pub fn run_selector<P: Selector>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, call, case| {
        Ok(match policy.select(call, &case.candidates.facts())? {
            Decision::Choose { row, .. } => Answer::Row(row),
            Decision::Abstain => Answer::Abstain,
            Decision::Shed(reason) => shed(reason),
        })
    })
}

/// Runs every case on a scorer.
///
/// # Errors
/// Returns the report when a case fails, or says what is wrong with the file.
pub fn run_scorer<P: Scorer>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, call, case| Ok(Answer::Costs(policy.score(call, &case.candidates.facts())?)))
}

/// Runs every case on a filter.
///
/// # Errors
/// Returns the report when a case fails, or says what is wrong with the file.
pub fn run_filter<P: Filter>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, call, case| Ok(Answer::Keep(policy.keep(call, &case.candidates.facts())?)))
}

/// Runs every case on a decode override's `decide`.
///
/// # Errors
/// Returns the report when a case fails, or says what is wrong with the file.
pub fn run_decode_override<P: DecodeOverride>(text: &str) -> Result<(), String> {
    run::<P>(text, |policy, call, case| {
        Ok(match policy.decide(call, &case.decode.facts(), &case.candidates.facts())? {
            Plan::Remote => Answer::Plan(cases::Plan::Remote),
            Plan::Local => Answer::Plan(cases::Plan::Local),
            Plan::Shed(reason) => shed(reason),
        })
    })
}

/// The facts of a case, laid out for a policy.
struct CaseWords {
    decode: Words,
    candidates: Words,
}

fn run<P: Policy>(
    text: &str,
    ask: impl Fn(&P, &Call, &CaseWords) -> Result<Answer, crate::Error>,
) -> Result<(), String> {
    let table = FactTable::new(facts::ALL.iter().copied());
    let cases = cases::parse(text, &table).map_err(|error| format!("cases.toml: {error}"))?;
    let mut report = Report::default();
    for case in &cases {
        #[cfg(feature = "state")]
        crate::state::testing::preset(&case.state);
        let answer = match configure::<P>(case.settings.as_deref().unwrap_or("{}")) {
            Err(message) => Answer::Refused(message),
            Ok((policy, wants)) => {
                observe(&policy, case);
                let lay_out = |rows: &[cases::Values]| Words::encode(&table, &wants, &case.request, rows);
                let words = CaseWords {
                    decode: lay_out(std::slice::from_ref(&case.decode)),
                    candidates: lay_out(&case.rows),
                };
                ask(&policy, &call(case), &words).unwrap_or_else(|error| Answer::Failed(format!("{error:?}")))
            }
        };
        report.record(case, &answer.checked(case.row_count()));
    }
    if report.all_passed() { Ok(()) } else { Err(report.to_string()) }
}

fn observe(policy: &impl Policy, case: &Case) {
    if case.outcomes.is_empty() {
        return;
    }
    let outcomes: Vec<Outcome> = case.outcomes.iter().map(outcome).collect();
    policy.observe(&Moment { now_us: case.now_us, seed: case.seed }, &outcomes);
}

fn outcome(outcome: &cases::Outcome) -> Outcome {
    Outcome {
        decision: 0,
        seed: outcome.seed,
        leg: match outcome.leg {
            cases::Leg::Prefill => Leg::Prefill,
            cases::Leg::Decode => Leg::Decode,
            cases::Leg::Aggregated => Leg::Aggregated,
        },
        attempt: outcome.attempt,
        worker_id: outcome.worker_id,
        dp_rank: outcome.dp_rank,
        by_policy: outcome.by_policy,
        retried: outcome.retried,
        status: outcome.status,
        ttft_us: outcome.ttft_us,
        itl_us: outcome.itl_us,
        duration_us: outcome.duration_us,
        prompt_tokens: outcome.prompt_tokens,
        output_tokens: outcome.output_tokens,
        cached_predicted: outcome.cached_predicted,
        cached_reported: outcome.cached_reported,
    }
}

fn shed(reason: Shed) -> Answer {
    Answer::Shed { status: reason.status, reason: reason.reason }
}

fn call(case: &Case) -> Call {
    let Case { seed, now_us, attempt, .. } = *case;
    Call { rows: case.row_count(), seed, now_us, attempt, ..Call::default() }
}
