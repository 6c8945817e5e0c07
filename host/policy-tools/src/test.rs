//! `pointsman policy test`: runs the cases of a `cases.toml` against the compiled component.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use pointsman_policy_cases::{self as cases, Answer, Case, CasesError, FactTable, FactType, Report, Values};
use pointsman_policy_runtime::{LoadedPolicy, Refusal};
use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Moment, ObservedOutcome, Plan, Policy, Purpose, World,
    answer_checks,
    facts::{self, RequestFact, Wants, WorkerFact},
};
use pointsman_workers::{DpRank, Leg, WorkerId, name_hash};

use crate::{
    one_row,
    output::{conclude, escaped, print},
    policy_file::{LimitArgs, PolicyFile, SaltArgs, is_formula, read_or_built_in},
};

/// File of the cases.
const CASES: &str = "cases.toml";
/// Files of projects in other languages than Rust.
const SCRIPTS: [&str; 3] = ["policy.py", "policy.js", "policy.ts"];

/// Arguments of `test`.
#[derive(Debug, Args)]
#[command(after_help = "\
Of a formula file with `keep`, a case gets the answer of `cost` among the rows that `keep` keeps, by their \
numbers in the case. A formula file without cases is only checked.
Exit code: 0 when every case passed, 1 when one failed, 2 when the file is refused or the cases cannot \
be read.")]
pub struct TestArgs {
    /// The component, core module with embedded WIT metadata, or formula file (`NAME.formula.toml`).
    file: PathBuf,
    /// The cases, in the format that the SDK's native tests also read [default: cases.toml, or else the one
    /// beside the component].
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Settings, as a JSON object, for cases that have none [default: {}].
    #[arg(long, value_name = "JSON")]
    settings: Option<String>,
    #[command(flatten)]
    salt: SaltArgs,
    #[command(flatten)]
    limits: LimitArgs,
}

/// The policy, loaded with the settings of the current case. Neighbouring cases with the same settings share
/// one load. Only one is kept because the engine limits the instances of all loads together.
struct Loads<'a> {
    file: &'a PolicyFile,
    current: Option<(String, Result<LoadedPolicy, Refusal>)>,
}

impl TestArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        // What is missing is reported before the policy is compiled, which takes long for some.
        read_or_built_in(&self.file)?;
        let path = self.cases_path();
        let is_optional = self.cases.is_none() && is_formula(&self.file);
        let cases = match std::fs::read_to_string(&path) {
            Ok(text) => self.parse(&text).with_context(|| path.display().to_string())?,
            Err(error) if is_optional && error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                bail!("cannot read the cases {}: {error}; name them with --cases FILE", path.display())
            }
        };
        if let Some(source) = newer_source(&self.file) {
            let (source, file) = (source.display(), self.file.display());
            print(&format!("warning: {source} is newer than {file}: build the policy again\n"))?;
        }
        let file = PolicyFile::read_hashing(&self.file, &self.limits, self.salt.hash_salt)?;
        let default = self.settings.as_deref().unwrap_or("{}");
        let mut loads = Loads { file: &file, current: None };
        match loads.with(default) {
            // A policy may require settings; then each case has its own.
            Err(Refusal::Configure(_)) if self.settings.is_none() => {}
            Err(refusal) => return Err(file.refused(refusal)),
            Ok(_) => {}
        }
        if is_optional && !path.exists() {
            print(&format!("{}: accepted; no cases: {} is missing\n", self.file.display(), path.display()))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut report = Report::default();
        for case in &cases {
            let answer = loads.answer(case, default);
            // The facts that a policy asks for may depend on its settings.
            for fact in loads.unasked(case) {
                report.warn(case, &fact);
            }
            report.record(case, &answer);
        }
        file.access.state().clear();
        let warning = loads.with(default).as_ref().ok().and_then(one_row::warning).unwrap_or_default();
        let code = if report.all_passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        conclude(&escaped(&format!("{report}\n{warning}")), code)
    }

    fn parse(&self, text: &str) -> Result<Vec<Case>, CasesError> {
        cases::parse_hashing(text, &fact_table(), &|name| name_hash(name.as_bytes(), self.salt.hash_salt))
    }

    fn cases_path(&self) -> PathBuf {
        let here = PathBuf::from(CASES);
        let beside = self.file.with_file_name(CASES);
        match &self.cases {
            Some(path) => path.clone(),
            None if !here.exists() && beside.exists() => beside,
            None => here,
        }
    }
}

/// Returns a source of the project beside a component that was changed after the component was built.
fn newer_source(component: &Path) -> Option<PathBuf> {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let (dir, built) = (component.parent()?, changed(component)?);
    let script = SCRIPTS.map(|name| dir.join(name));
    let rust = std::fs::read_dir(dir.join("src")).ok().filter(|_| dir.join("Cargo.toml").exists());
    let rust = rust.into_iter().flatten().flatten().map(|entry| entry.path());
    script.into_iter().chain(rust).find(|source| changed(source).is_some_and(|changed| changed > built))
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

    /// Returns the facts that a case sets and the policy loaded for it does not ask for.
    fn unasked(&self, case: &Case) -> Vec<String> {
        let Some((_, Ok(policy))) = &self.current else { return Vec::new() };
        let (request, worker) = self.file.facts(policy);
        case.unasked(request, worker)
    }

    fn answer(&mut self, case: &Case, default: &str) -> Answer {
        let state = self.file.access.state();
        state.clear();
        for (key, number) in &case.state {
            if let Err(error) = state.set(key, &number.to_le_bytes(), 0, 0) {
                return Answer::Failed(format!("state \"{key}\": {error}"));
            }
        }
        let file = self.file;
        let filter = file.filter();
        match self.with(case.settings.as_deref().unwrap_or(default)) {
            Ok(policy) => observe(policy, case)
                .and_then(|()| ask_kept(filter, policy, case))
                .unwrap_or_else(|failure| Answer::Failed(format!("{failure} ({})", failure.kind()))),
            Err(Refusal::Configure(message)) => Answer::Refused(message.clone()),
            // It is not the settings: a probe's trap, for example.
            Err(refusal) => Answer::Failed(format!("{refusal} ({})", refusal.kind())),
        }
    }
}

/// Lets the policy observe the outcomes of a case, which its state then reflects.
fn observe(policy: &dyn Policy, case: &Case) -> Result<(), Failure> {
    if case.outcomes.is_empty() {
        return Ok(());
    }
    let outcomes: Vec<ObservedOutcome> = case.outcomes.iter().map(observed).collect();
    policy.observe(
        &mut DecisionContext::new(Purpose::Route),
        Moment { now_us: case.now_us, seed: case.seed },
        &outcomes,
    )
}

/// Asks the policy about the rows that the filter before it keeps, as the gateway does. The answer names a
/// row by its number in the case. Rows of which none is kept are the filter's answer.
fn ask_kept(filter: Option<&LoadedPolicy>, policy: &dyn Policy, case: &Case) -> Result<Answer, Failure> {
    let Some(filter) = filter else { return ask(policy, case) };
    let kept = match ask(filter, case)? {
        Answer::Keep(kept) if !kept.is_empty() => kept,
        other => return Ok(other),
    };
    let row = |place: &u32| case.rows.get(*place as usize).cloned();
    let rows = kept.iter().filter_map(row).collect();
    Ok(match ask(policy, &Case { rows, ..case.clone() })? {
        Answer::Row(place) => Answer::Row(kept.get(place as usize).copied().unwrap_or(place)),
        other => other,
    })
}

/// Makes the one call of a case, with the same arguments as the SDK's native tests.
fn ask(policy: &dyn Policy, case: &Case) -> Result<Answer, Failure> {
    let info = policy.info();
    let Case { seed, now_us, attempt, .. } = *case;
    let call = Call { leg: Leg::Prefill, attempt, rows: case.row_count(), seed, now_us };
    // Made as a preview, so that state written by one case is absent in the next.
    let context = &mut DecisionContext::new(Purpose::Preview);
    let rows = case.row_count() as usize;
    let request = request_words(&info.wants, &case.request);
    let candidates = worker_words(&info.wants, &case.rows);
    let facts = || [request.as_slice(), candidates.as_slice()].concat();
    let shed =
        |reason: pointsman_routing::ShedReason| Answer::Shed { status: reason.status, reason: reason.reason };
    match info.world {
        World::Filter => {
            let mut kept = Vec::new();
            policy.keep(context, &call, &facts(), &mut kept)?;
            answer_checks::kept(&kept, rows)?;
            Ok(Answer::Keep(kept))
        }
        World::Scorer => {
            let mut costs = Vec::new();
            policy.score(context, &call, &facts(), &mut costs)?;
            answer_checks::costs(&costs, rows)?;
            Ok(Answer::Costs(costs))
        }
        World::Selector => Ok(match policy.select(context, &call, &facts())? {
            Decision::Choose { row, costs, .. } => {
                answer_checks::choice(row, &costs, rows)?;
                Answer::Row(row)
            }
            Decision::Abstain => Answer::Abstain,
            Decision::Shed(reason) => shed(answer_checks::shed(reason)?),
        }),
        World::DecodeOverride => {
            let decode = worker_words(&info.wants, std::slice::from_ref(&case.decode));
            let plan = policy.decide(context, &call, &request, &decode, &candidates)?;
            Ok(match answer_checks::plan(plan)? {
                Plan::Remote => Answer::Plan(cases::Plan::Remote),
                Plan::Local => Answer::Plan(cases::Plan::Local),
                Plan::Shed(reason) => shed(reason),
            })
        }
    }
}

fn observed(outcome: &cases::Outcome) -> ObservedOutcome {
    let time = |micros: u32| Duration::from_micros(u64::from(micros));
    ObservedOutcome {
        decision: None,
        seed: outcome.seed,
        leg: match outcome.leg {
            cases::Leg::Prefill => Leg::Prefill,
            cases::Leg::Decode => Leg::Decode,
            cases::Leg::Aggregated => Leg::Aggregated,
        },
        attempt: outcome.attempt,
        worker: WorkerId(outcome.worker_id),
        rank: DpRank(outcome.dp_rank),
        by_policy: outcome.by_policy,
        retried: outcome.retried,
        status: outcome.status,
        ttft: outcome.ttft_us.map(time),
        itl: outcome.itl_us.map(time),
        duration: Duration::from_micros(outcome.duration_us),
        prompt_tokens: outcome.prompt_tokens,
        output_tokens: outcome.output_tokens,
        cached_predicted: outcome.cached_predicted,
        cached_reported: outcome.cached_reported,
    }
}

/// Returns the host's fact table in the form that checks cases.
pub(crate) fn fact_table() -> FactTable {
    let request = RequestFact::ALL.iter().map(|fact| ("request", fact.name(), type_name(fact.ty())));
    let worker = WorkerFact::ALL.iter().map(|fact| ("worker", fact.name(), type_name(fact.ty())));
    FactTable::new(request.chain(worker))
}

fn type_name(ty: facts::FactType) -> &'static str {
    match ty {
        facts::FactType::U32 => "u32",
        facts::FactType::F32 => "f32",
        facts::FactType::U64 => "u64",
    }
}

fn fact_type(ty: facts::FactType) -> FactType {
    match ty {
        facts::FactType::U32 => FactType::U32,
        facts::FactType::F32 => FactType::F32,
        facts::FactType::U64 => FactType::U64,
    }
}

fn request_words(wants: &Wants, values: &Values) -> Vec<u32> {
    cases::request_words(wants.request.iter().map(|fact| (fact.name(), fact_type(fact.ty()))), values)
}

fn worker_words(wants: &Wants, rows: &[Values]) -> Vec<u32> {
    let columns: Vec<_> =
        wants.worker.iter().map(|column| (column.to_string(), fact_type(column.ty()))).collect();
    cases::worker_words(columns.iter().map(|(name, ty)| (name.as_str(), *ty)), rows)
}
