//! The format of `cases.toml`: test cases for a policy, each a set of facts and the expected answer.
//!
//! The SDK runs a file natively (feature `testing`) and `pointsman policy test` runs it against the compiled
//! component. Both read, check and judge cases with this crate, so both report the same results. This crate
//! does not run policies; guests never link it.

mod answer;
mod facts;
mod outcome;
mod parse;
mod report;

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

pub use answer::Answer;
pub use facts::{FactTable, FactType, LEFT_OUT, Number, Values, request_words, worker_words};
pub use outcome::{Leg, Outcome};
pub use parse::{CasesError, parse, parse_hashing};
pub use report::Report;

/// One `[[case]]` of the file, with names and values checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Name of the case: what it shows. Reports identify the case by it.
    pub name: String,
    /// The operator's settings as a JSON object, if the case has any.
    pub settings: Option<String>,
    /// Seed of the call.
    pub seed: u64,
    /// Time of the call, microseconds since the Unix epoch.
    pub now_us: u64,
    /// 0 for the first attempt of the leg, plus 1 for each retry.
    pub attempt: u32,
    /// Numbers in the slot's state before the call.
    pub state: BTreeMap<String, i64>,
    /// Outcomes that the policy observes before the call.
    pub outcomes: Vec<Outcome>,
    /// Request facts that are given.
    pub request: Values,
    /// Worker facts, one table per candidate row. For a decode override these are the prefill candidates.
    pub rows: Vec<Values>,
    /// Worker facts of the previewed decode worker; for decode overrides only.
    pub decode: Values,
    /// The expected answer.
    pub expect: Expect,
}

impl Case {
    /// Returns the facts that the case sets and a policy that asks for these does not read.
    #[must_use]
    pub fn unasked(
        &self,
        request: impl IntoIterator<Item = String>,
        worker: impl IntoIterator<Item = String>,
    ) -> Vec<String> {
        let (request, worker): (BTreeSet<_>, BTreeSet<_>) =
            (request.into_iter().collect(), worker.into_iter().collect());
        let unasked = |given: &Values, asked: &BTreeSet<String>| {
            given.keys().filter(|name| !asked.contains(*name)).cloned().collect::<BTreeSet<_>>()
        };
        let rows = self.rows.iter().chain([&self.decode]).flat_map(|row| unasked(row, &worker));
        let rows: BTreeSet<String> = rows.collect();
        let named = |kind: &str, names: BTreeSet<String>| -> Vec<String> {
            names.into_iter().map(|name| format!("the {kind} fact \"{name}\"")).collect()
        };
        [named("request", unasked(&self.request, &request)), named("worker", rows)].concat()
    }
}

/// The expected answer of a case.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// A selector chooses this row.
    Row(u32),
    /// A selector abstains.
    Abstain,
    /// A scorer returns these costs, up to rounding: within 1e-3, or within a millionth of a larger cost.
    Costs(Vec<f32>),
    /// A filter keeps these rows.
    Keep(Vec<u32>),
    /// A decode override decides `remote` or `local`.
    Plan(Plan),
    /// A selector or a decode override rejects the request with this HTTP status.
    Shed(u16),
    /// The policy refuses its settings with a message that contains this text.
    Refused(String),
}

/// Place of the prefill that a decode override chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plan {
    /// On a prefill worker.
    Remote,
    /// On the decode worker.
    Local,
}

impl Case {
    /// Returns the number of candidate rows.
    #[must_use]
    pub fn row_count(&self) -> u32 {
        u32::try_from(self.rows.len()).unwrap_or(u32::MAX)
    }
}
