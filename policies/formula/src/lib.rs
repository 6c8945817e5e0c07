//! Selector and filter: formulas of the operator, compiled in `configure`.
//!
//! The selector chooses the lowest `cost`, and rejects the request when `shed` holds. The filter keeps the
//! candidates for which `keep` holds. Costs are always returned, so that receipts have them.

use std::collections::BTreeMap;

use pointsman_formula::{Asked, Formula, Inputs, Names, Role, Vocabulary, try_out};
use pointsman_policy_sdk::{
    Call, Decision, Error, Facts, Filter, Policy, Rng, Selector, Shed, Wants, facts, least,
};
use serde::{Deserialize, de::IgnoredAny};

/// Settings that are not known.
type Unknown = BTreeMap<String, IgnoredAny>;

/// Settings of the selector.
#[derive(Clone, Debug, Deserialize)]
pub struct RankSettings {
    /// Cost of each candidate; the lowest one is chosen.
    pub cost: Option<String>,
    /// When to reject a request.
    #[serde(default)]
    pub shed: Option<ShedSettings>,
    /// Hashes of the names in the formulas. The gateway adds them.
    #[serde(default)]
    pub names: Names,
    #[serde(flatten)]
    unknown: Unknown,
}

/// When a request is rejected, and how.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { when = \"min(engine_queue) > 8\" }")]
pub struct ShedSettings {
    /// A condition on the request and on all candidates.
    pub when: String,
    /// Status of the answer: 429, 503 or 529.
    #[serde(default = "too_many_requests")]
    pub status: u16,
    /// Message for the client.
    #[serde(default = "shed_reason")]
    pub reason: String,
}

/// Settings of the filter.
#[derive(Clone, Debug, Deserialize)]
pub struct KeepSettings {
    /// Condition on each candidate.
    pub keep: Option<String>,
    /// Hashes of the names in the formula. The gateway adds them.
    #[serde(default)]
    pub names: Names,
    #[serde(flatten)]
    unknown: Unknown,
}

/// Refuses a setting that is not known. `expected` leaves out what only the gateway writes.
fn check_known(unknown: &Unknown, expected: &str) -> Result<(), String> {
    let Some(name) = unknown.keys().next() else { return Ok(()) };
    Err(format!("settings: unknown field `{name}`, expected {expected}"))
}

fn too_many_requests() -> u16 {
    429
}

fn shed_reason() -> String {
    "the gateway is overloaded; try again later".to_owned()
}

/// The configured selector.
#[derive(Debug)]
pub struct Rank {
    cost: Formula,
    shed: Option<(Formula, Shed)>,
}

/// The configured filter.
#[derive(Debug)]
pub struct Keep(Formula);

impl Policy for Rank {
    const NAME: &'static str = "formula";
    type Settings = RankSettings;

    fn configure(settings: RankSettings, wants: &mut Wants) -> Result<Self, String> {
        let RankSettings { cost, shed, names, unknown } = settings;
        check_known(&unknown, "one of `cost`, `keep`, `shed`")?;
        let cost = cost.ok_or("settings: missing field `cost`")?;
        let mut asked = Asked::default();
        let cost = compile("cost", &cost, Role::Cost, &names, &mut asked)?;
        let shed = match shed {
            None => None,
            Some(ShedSettings { when, status, reason }) => {
                if ![429, 503, 529].contains(&status) {
                    return Err(format!(
                        "shed.status: {status} is not a status of a rejection; use 429, 503 or 529"
                    ));
                }
                let when = compile("shed.when", &when, Role::Shed, &names, &mut asked)?;
                Some((when, Shed { status, reason }))
            }
        };
        let when = shed.as_ref().map(|(when, _)| when);
        try_out(&[Some(&cost), when].into_iter().flatten().collect::<Vec<_>>(), &asked)?;
        ask(&asked, wants);
        Ok(Self { cost, shed })
    }
}

impl Policy for Keep {
    const NAME: &'static str = "formula";
    type Settings = KeepSettings;

    fn configure(settings: KeepSettings, wants: &mut Wants) -> Result<Self, String> {
        let KeepSettings { keep, names, unknown } = settings;
        check_known(&unknown, "`keep` of a filter")?;
        let keep = keep.ok_or("settings: missing field `keep`")?;
        let mut asked = Asked::default();
        let keep = compile("keep", &keep, Role::Keep, &names, &mut asked)?;
        try_out(&[&keep], &asked)?;
        ask(&asked, wants);
        Ok(Self(keep))
    }
}

impl Selector for Rank {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let inputs = inputs(facts);
        if let Some((when, shed)) = &self.shed {
            check_work(when, inputs.rows)?;
            if when.holds(inputs) {
                return Ok(Decision::Shed(shed.clone()));
            }
        }
        check_work(&self.cost, inputs.rows)?;
        let costs = self.cost.numbers(inputs);
        let row = least(&costs, &mut Rng::new(call.seed));
        Ok(match row.and_then(|row| u32::try_from(row).ok()) {
            Some(row) => Decision::Choose { row, costs, reason: None },
            None => Decision::Abstain,
        })
    }
}

impl Filter for Keep {
    fn keep(&self, _: &Call, facts: &Facts<'_>) -> Result<Vec<u32>, Error> {
        let inputs = inputs(facts);
        check_work(&self.0, inputs.rows)?;
        Ok(self.0.rows(inputs))
    }
}

fn compile(key: &str, source: &str, role: Role, names: &Names, asked: &mut Asked) -> Result<Formula, String> {
    let formula = Formula::new(source, role, &Vocabulary::new(facts::ALL.iter().copied()), names, asked);
    formula.map_err(|mistake| format!("{key}: {}", mistake.describe(source)))
}

fn ask(asked: &Asked, wants: &mut Wants) {
    let [request, worker] = asked.names();
    wants.by_name(request, worker);
}

fn inputs<'a>(facts: &Facts<'a>) -> Inputs<'a> {
    let (request, columns) = facts.flat();
    Inputs { request, columns, rows: facts.rows() }
}

fn check_work(formula: &Formula, rows: usize) -> Result<(), Error> {
    formula.check_work(rows).map_err(Error::Unsupported)
}

#[cfg(not(feature = "filter"))]
pointsman_policy_sdk::export!(selector Rank);
#[cfg(feature = "filter")]
pointsman_policy_sdk::export!(filter Keep);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases() {
        pointsman_policy_sdk::testing::run_selector::<Rank>(include_str!("../cases.toml")).unwrap();
    }

    #[test]
    fn cases_of_the_filter() {
        pointsman_policy_sdk::testing::run_filter::<Keep>(include_str!("../filter-cases.toml")).unwrap();
    }
}
