//! `pointsman policy test`: the cases of a `cases.toml` against the compiled component.

use std::{fmt, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use pointsman_policy_runtime::{LoadedPolicy, Refusal};
use pointsman_routing::{Call, Decision, Failure, Moment, Plan, Policy, ShedReason, World, scope::Scope};
use pointsman_workers::Leg;

use crate::{
    cases::{self, Case, Expect, ExpectedPlan},
    output::print,
    policy_file::{LimitArgs, PolicyFile, refused},
};

/// Which file, and which cases.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: 0 when every case passed, 1 when one failed, 2 when the file is refused or the cases cannot be read.")]
pub struct TestArgs {
    /// The component, or core module with embedded WIT metadata.
    file: PathBuf,
    /// The cases: TOML, the same format that the SDK runs natively.
    #[arg(long, value_name = "FILE", default_value = "cases.toml")]
    cases: PathBuf,
    /// JSON object handed to `configure` for the cases that give no settings [default: {}].
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
    #[command(flatten)]
    limits: LimitArgs,
}

/// What a case came to.
#[derive(Debug)]
enum Answer {
    Row(u32),
    Abstain,
    Shed(ShedReason),
    Costs(Vec<f32>),
    Keep(Vec<u32>),
    Plan(ExpectedPlan),
    Refused(Refusal),
    Failed(Failure),
}

/// Loads the policy with each case's settings; neighbours with the same settings share one load. Only one is held, as
/// the instances of all of them together are limited.
struct Loads<'a> {
    file: &'a PolicyFile,
    current: Option<(String, Result<LoadedPolicy, Refusal>)>,
}

impl TestArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let file = PolicyFile::read(&self.file, &self.limits)?;
        let default = self.settings.as_deref().unwrap_or("{}");
        let mut loads = Loads { file: &file, current: None };
        match loads.with(default) {
            // A policy may have settings it cannot do without: then each case gives its own.
            Err(Refusal::Configure(_)) if self.settings.is_none() => {}
            Err(refusal) => return Err(refused(&self.file, refusal)),
            Ok(_) => {}
        }
        let text = std::fs::read_to_string(&self.cases).with_context(|| self.cases.display().to_string())?;
        let cases = cases::parse(&text).with_context(|| self.cases.display().to_string())?;
        let mut failed = 0_usize;
        let mut report = String::new();
        for case in &cases {
            let answer = loads.answer(case, default);
            if answer.meets(&case.expect) {
                report.push_str(&format!("ok      {}\n", case.name));
            } else {
                failed += 1;
                report.push_str(&format!("FAILED  {}: expected {}, got {answer}\n", case.name, case.expect));
            }
        }
        report.push_str(&format!("{} passed, {failed} failed\n", cases.len() - failed));
        print(&report)?;
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

impl Loads<'_> {
    fn with(&mut self, settings: &str) -> &Result<LoadedPolicy, Refusal> {
        let current = match self.current.take() {
            Some(current) if current.0 == settings => current,
            other => {
                drop(other);
                (settings.to_owned(), self.file.load(settings))
            }
        };
        &self.current.insert(current).1
    }

    fn answer(&mut self, case: &Case, default: &str) -> Answer {
        let state = self.file.access.state();
        state.clear();
        for (key, number) in &case.state {
            if let Err(error) = state.set(key, &number.to_le_bytes(), 0, 0) {
                return Answer::Failed(Failure::Error(format!("state `{key}`: {error}")));
            }
        }
        let answer = match self.with(case.settings.as_deref().unwrap_or(default)) {
            Ok(policy) => {
                observe(policy, case).and_then(|()| ask(policy, case)).unwrap_or_else(Answer::Failed)
            }
            Err(refusal) => Answer::Refused(refusal.clone()),
        };
        if matches!(answer, Answer::Failed(_)) {
            // The instance is spent: the next case gets a fresh load rather than wait for a rebuild.
            self.current = None;
        }
        answer
    }
}

/// What a case observes is there when its question is put.
fn observe(policy: &dyn Policy, case: &Case) -> Result<(), Failure> {
    if case.outcomes.is_empty() {
        return Ok(());
    }
    policy.observe(Moment { now_us: case.now_us, seed: case.seed }, &case.outcomes)
}

/// The one call of a case, as the native runner makes it.
fn ask(policy: &dyn Policy, case: &Case) -> Result<Answer, Failure> {
    let info = policy.info();
    let rows = u32::try_from(case.rows.len()).unwrap_or(u32::MAX);
    let call = Call { leg: Leg::Prefill, attempt: 0, rows, seed: case.seed, now_us: case.now_us };
    // What one case writes is not there in the next.
    let _preview = Scope::preview();
    let request = cases::request_words(&info.wants, &case.request);
    let candidates = cases::worker_words(&info.wants, &case.rows);
    let facts = || [request.as_slice(), candidates.as_slice()].concat();
    match info.world {
        World::Filter => {
            let mut kept = Vec::new();
            policy.keep(&call, &facts(), &mut kept)?;
            Ok(Answer::Keep(kept))
        }
        World::Scorer => {
            let mut costs = Vec::new();
            policy.score(&call, &facts(), &mut costs)?;
            Ok(Answer::Costs(costs))
        }
        World::Selector => Ok(match policy.select(&call, &facts())? {
            Decision::Choose { row, .. } => Answer::Row(row),
            Decision::Abstain => Answer::Abstain,
            Decision::Shed(reason) => Answer::Shed(reason),
        }),
        World::DecodeOverride => {
            let decode = cases::worker_words(&info.wants, std::slice::from_ref(&case.decode));
            Ok(match policy.decide(&call, &request, &decode, &candidates)? {
                Plan::Remote => Answer::Plan(ExpectedPlan::Remote),
                Plan::Local => Answer::Plan(ExpectedPlan::Local),
                Plan::Shed(reason) => Answer::Shed(reason),
            })
        }
    }
}

impl Answer {
    fn meets(&self, expect: &Expect) -> bool {
        match (expect, self) {
            (Expect::Row(expected), Self::Row(row)) => expected == row,
            (Expect::Abstain, Self::Abstain) => true,
            (Expect::Costs(expected), Self::Costs(costs)) => {
                expected.len() == costs.len() && expected.iter().zip(costs).all(|(a, b)| near(*a, *b))
            }
            (Expect::Keep(expected), Self::Keep(rows)) => expected == rows,
            (Expect::Plan(expected), Self::Plan(plan)) => expected == plan,
            (Expect::Shed(status), Self::Shed(reason)) => *status == reason.status,
            (Expect::Refused(part), Self::Refused(refusal)) => refusal.to_string().contains(part.as_str()),
            _ => false,
        }
    }
}

/// Within 1e-3 or a millionth of what was expected.
fn near(expected: f32, cost: f32) -> bool {
    (cost - expected).abs() <= 1e-3_f32.max(expected.abs() * 1e-6)
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(row) => Expect::Row(*row).fmt(f),
            Self::Abstain => Expect::Abstain.fmt(f),
            Self::Costs(costs) => write!(f, "costs {costs:?}"),
            Self::Keep(rows) => write!(f, "keep {rows:?}"),
            Self::Plan(plan) => Expect::Plan(*plan).fmt(f),
            Self::Shed(ShedReason { status, reason }) => write!(f, "shed {status}: {reason}"),
            Self::Refused(refusal) => write!(f, "refused ({}): {refusal}", refusal.kind()),
            Self::Failed(failure) => write!(f, "failure ({}): {failure}", failure.kind()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_may_differ_by_rounding_only() {
        let costs = |costs: &[f32]| Answer::Costs(costs.to_vec());
        let expect = Expect::Costs(vec![1.0, 2_000_000.0]);
        assert!(costs(&[1.0009, 2_000_001.0]).meets(&expect));
        assert!(!costs(&[1.002, 2_000_000.0]).meets(&expect));
        assert!(!costs(&[1.0, f32::NAN]).meets(&expect));
        assert!(!costs(&[1.0]).meets(&expect));
    }

    #[test]
    fn an_answer_of_another_kind_never_meets() {
        let refusal = Refusal::Configure("x: 1 is too many".to_owned());
        assert!(Answer::Refused(refusal.clone()).meets(&Expect::Refused("too many".to_owned())));
        assert!(!Answer::Refused(refusal).meets(&Expect::Refused("too few".to_owned())));
        assert!(!Answer::Row(0).meets(&Expect::Refused(String::new())));
        assert!(!Answer::Abstain.meets(&Expect::Row(0)));
        assert!(!Answer::Failed(Failure::Timeout).meets(&Expect::Abstain));
    }
}
