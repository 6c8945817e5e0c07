//! The cases of a `cases.toml`, read into the host's types: names are checked against the fact table and values against
//! their facts' types, so that what is laid out later cannot be wrong.
//!
//! The format is the one that the SDK's `testing` runs natively. Knows no component.

use std::{collections::BTreeMap, fmt};

use pointsman_routing::{
    ObservedOutcome,
    facts::{FactType, Wants},
};
use serde::Deserialize;

use outcome::RawOutcome;

mod outcome;

/// Values of facts by name, each as its low and its high word.
pub(crate) type Values = BTreeMap<String, (u32, u32)>;

/// One case.
#[derive(Debug, PartialEq)]
pub(crate) struct Case {
    /// What it shows.
    pub(crate) name: String,
    /// The operator's settings as JSON; `None` when the case gives none.
    pub(crate) settings: Option<String>,
    /// Seed of the call.
    pub(crate) seed: u64,
    /// Microseconds since the Unix epoch.
    pub(crate) now_us: u64,
    /// Numbers that the slot's state has beforehand.
    pub(crate) state: BTreeMap<String, i64>,
    /// What is observed before the question is put.
    pub(crate) outcomes: Vec<ObservedOutcome>,
    /// Request facts.
    pub(crate) request: Values,
    /// Worker facts, one table a candidate (prefill candidates for a decode override).
    pub(crate) rows: Vec<Values>,
    /// Worker facts of the previewed decode worker; decode overrides only.
    pub(crate) decode: Values,
    /// What is expected.
    pub(crate) expect: Expect,
}

/// What a case expects; exactly one is given.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Expect {
    /// A selector chooses this row.
    Row(u32),
    /// A selector has no opinion.
    Abstain,
    /// A scorer's costs, within 1e-3 or a millionth.
    Costs(Vec<f32>),
    /// A filter keeps these rows.
    Keep(Vec<u32>),
    /// A decode override decides `remote` or `local`.
    Plan(ExpectedPlan),
    /// A selector or a decode override refuses the request with this status.
    Shed(u16),
    /// The settings are refused with a text that contains this.
    Refused(String),
}

/// Where a decode override is expected to prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ExpectedPlan {
    Remote,
    Local,
}

/// Why a file has no cases to run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CasesError {
    /// Not TOML, or not of this form; toml's words.
    #[error("{0}")]
    Form(String),
    /// There is none.
    #[error("no cases")]
    Empty,
    /// A fact that does not exist, or a value that does not fit.
    #[error("case `{case}`: {place}: {problem}")]
    Fact {
        /// The case.
        case: String,
        /// `request`, `decode` or the row.
        place: String,
        /// What is wrong, naming the fact.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCases {
    #[serde(default)]
    case: Vec<RawCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawCase {
    name: String,
    settings: Option<toml::Table>,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    now_us: u64,
    #[serde(default)]
    state: BTreeMap<String, i64>,
    #[serde(default)]
    outcomes: Vec<RawOutcome>,
    #[serde(default)]
    request: RawValues,
    #[serde(default)]
    rows: Vec<RawValues>,
    #[serde(default)]
    decode: RawValues,
    expect: Expect,
}

type RawValues = BTreeMap<String, Number>;

/// A number as written: whole ones stay exact, whatever their size.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "a number")]
enum Number {
    Whole(u64),
    Other(f64),
}

/// Reads and checks the cases of a `cases.toml`.
pub(crate) fn parse(text: &str) -> Result<Vec<Case>, CasesError> {
    let raw: RawCases = toml::from_str(text).map_err(|error| CasesError::Form(error.to_string()))?;
    if raw.case.is_empty() {
        return Err(CasesError::Empty);
    }
    raw.case.into_iter().map(RawCase::check).collect()
}

/// The words of the request facts that a policy asked for; those a case does not give are 0.
pub(crate) fn request_words(wants: &Wants, values: &Values) -> Vec<u32> {
    let mut words = Vec::with_capacity(wants.request_width());
    for fact in &wants.request {
        let (low, high) = values.get(fact.name()).copied().unwrap_or_default();
        words.push(low);
        words.extend((fact.ty() == FactType::U64).then_some(high));
    }
    words
}

/// The columns of the worker facts that a policy asked for; values a row does not give are 0.
pub(crate) fn worker_words(wants: &Wants, rows: &[Values]) -> Vec<u32> {
    let mut words = Vec::with_capacity(wants.worker_width() * rows.len());
    for column in &wants.worker {
        let name = column.to_string();
        let values = || rows.iter().map(|row| row.get(&name).copied().unwrap_or_default());
        words.extend(values().map(|(low, _)| low));
        if column.ty() == FactType::U64 {
            words.extend(values().map(|(_, high)| high));
        }
    }
    words
}

impl RawCase {
    fn check(self) -> Result<Case, CasesError> {
        let check = |place: String, values: RawValues, ty: fn(&str) -> Result<FactType, String>| {
            let encoded = values.into_iter().map(|(name, value)| {
                let words = ty(&name)
                    .and_then(|ty| value.words(ty).map_err(|problem| format!("`{name}`: {problem}")))?;
                Ok((name, words))
            });
            encoded.collect::<Result<Values, String>>().map_err(|problem| CasesError::Fact {
                case: self.name.clone(),
                place,
                problem,
            })
        };
        let request = check("request".to_owned(), self.request, request_type)?;
        let decode = check("decode".to_owned(), self.decode, worker_type)?;
        let rows = self.rows.into_iter().enumerate();
        let rows = rows
            .map(|(row, values)| check(format!("row {row}"), values, worker_type))
            .collect::<Result<_, _>>()?;
        let settings = self.settings.map(|table| serde_json::to_string(&table)).transpose();
        let settings = settings.map_err(|error| CasesError::Fact {
            case: self.name.clone(),
            place: "settings".to_owned(),
            problem: error.to_string(),
        })?;
        Ok(Case {
            name: self.name,
            settings,
            seed: self.seed,
            now_us: self.now_us,
            state: self.state,
            outcomes: self.outcomes.into_iter().map(ObservedOutcome::from).collect(),
            request,
            rows,
            decode,
            expect: self.expect,
        })
    }
}

fn request_type(name: &str) -> Result<FactType, String> {
    let wants = Wants::resolve(&[name], &[] as &[&str]).map_err(|unknown| unknown.to_string())?;
    Ok(wants.request.first().map_or(FactType::U32, |fact| fact.ty()))
}

fn worker_type(name: &str) -> Result<FactType, String> {
    let wants = Wants::resolve(&[] as &[&str], &[name]).map_err(|unknown| unknown.to_string())?;
    Ok(wants.worker.first().map_or(FactType::U32, |column| column.ty()))
}

impl Number {
    /// The low and the high word of a fact of this type.
    fn words(self, ty: FactType) -> Result<(u32, u32), String> {
        match ty {
            FactType::F32 => Ok((self.single().to_bits(), 0)),
            FactType::U32 => {
                let value = self.whole().and_then(|value| u32::try_from(value).ok());
                value
                    .map(|value| (value, 0))
                    .ok_or_else(|| format!("{self} is not a whole number below 2^32"))
            }
            FactType::U64 => {
                let value = self.whole().ok_or_else(|| format!("{self} is not a whole number below 2^64"))?;
                let low = u32::try_from(value & 0xffff_ffff).unwrap_or_default();
                Ok((low, u32::try_from(value >> 32).unwrap_or_default()))
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "whole, not negative, and below 2^53"
    )]
    fn whole(self) -> Option<u64> {
        match self {
            Self::Whole(value) => Some(value),
            Self::Other(value) => {
                let exact = value.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&value);
                exact.then_some(value as u64)
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "a single is what the fact is"
    )]
    fn single(self) -> f32 {
        match self {
            Self::Whole(value) => value as f32,
            Self::Other(value) => value as f32,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => value.fmt(f),
            Self::Other(value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(row) => write!(f, "row {row}"),
            Self::Abstain => f.write_str("abstain"),
            Self::Costs(costs) => write!(f, "costs {costs:?}"),
            Self::Keep(rows) => write!(f, "keep {rows:?}"),
            Self::Plan(ExpectedPlan::Remote) => f.write_str("plan remote"),
            Self::Plan(ExpectedPlan::Local) => f.write_str("plan local"),
            Self::Shed(status) => write!(f, "shed {status}"),
            Self::Refused(part) => write!(f, "refused with `{part}`"),
        }
    }
}

#[cfg(test)]
mod tests;
