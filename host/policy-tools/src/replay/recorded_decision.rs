//! One line of `/decisions/export`, and the encoding of its facts for a policy.

use std::collections::BTreeMap;

use pointsman_routing::{
    Normalize, Picker,
    facts::{FactType, RequestFact, Wants, WorkerColumn, WorkerFact},
};
use pointsman_workers::Leg;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::FactDifference;

/// Facts that identify a candidate, so that any two candidates differ in them.
const IDENTITY_FACTS: [&str; 2] = ["worker-id", "dp-rank"];

/// Names of facts that a policy asks for and the recording missing.
#[derive(Debug)]
pub(super) struct MissingFacts(pub(super) Vec<String>);

/// Facts by name. Numbers stay text until their type is known, because a single must not be rounded to a
/// double.
type Facts = BTreeMap<String, Box<RawValue>>;

#[derive(Debug, Deserialize)]
pub(super) struct RecordedDecision {
    pub(super) id: String,
    pub(super) leg: Leg,
    #[serde(default)]
    slot: String,
    slot_model: Option<String>,
    #[serde(default)]
    mode: String,
    policy: Option<String>,
    digest: Option<String>,
    settings_digest: Option<String>,
    pub(super) attempt: u32,
    pub(super) decider: Decider,
    pub(super) call: RecordedCall,
    pub(super) candidates: Vec<(u64, u32)>,
    pub(super) picker: Option<Picker>,
    pub(super) choice: Option<Choice>,
    pub(super) plan: Option<RecordedPlan>,
    pub(super) refused: Option<Refused>,
    pub(super) inputs_dropped: bool,
    stages: Vec<Stage>,
    left: Option<Vec<u32>>,
    costs: Option<Vec<f32>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Decider {
    pub(super) by: String,
    pub(super) reason: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RecordedCall {
    pub(super) seed: u64,
    pub(super) now_us: u64,
    pub(super) temperature: f32,
}

#[derive(Debug, Deserialize)]
pub(super) struct Choice {
    pub(super) row: Option<u32>,
    pub(super) cost: Option<f32>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RecordedPlan {
    pub(super) word: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Refused {
    pub(super) code: String,
}

#[derive(Debug, Deserialize)]
struct Stage {
    policy: Option<String>,
    world: Option<String>,
    weight: Option<f32>,
    normalize: Option<Normalize>,
    rows: u32,
    kept: Option<Vec<u32>>,
    request: Facts,
    decode: Option<Facts>,
    workers: Facts,
    /// Values that the policy read from the slot's state, by key; `None` for an absent key.
    #[serde(default)]
    state: BTreeMap<String, Option<Box<RawValue>>>,
    #[serde(default)]
    state_cut: bool,
}

/// Facts as a decode override reads them.
#[derive(Debug, Default)]
pub(super) struct PlanWords {
    pub(super) request: Vec<u32>,
    pub(super) decode: Vec<u32>,
    pub(super) prefill: Vec<u32>,
    pub(super) rows: usize,
}

/// Low and high word of a value.
type Words = (u32, u32);

impl RecordedDecision {
    pub(super) fn all_rows(&self) -> Vec<u32> {
        (0_u32..).zip(&self.candidates).map(|(row, _)| row).collect()
    }

    /// Describes the rule that decided: the slot, the lane, and the policy with its content and settings.
    pub(super) fn rule(&self) -> String {
        let place = match &self.slot_model {
            Some(model) => format!("{model}/{}", self.slot),
            None => self.slot.clone(),
        };
        let short = |digest: &str| digest.chars().take(12).collect::<String>();
        let mut text = format!("{place} {}: {}", self.mode, self.policy.as_deref().unwrap_or("native"));
        for (name, digest) in [("", &self.digest), ("settings ", &self.settings_digest)] {
            if let Some(digest) = digest {
                text.push_str(&format!(" {name}{}", short(digest)));
            }
        }
        text
    }

    /// Returns the rows that the last policy chose from.
    pub(super) fn left_rows(&self) -> Vec<u32> {
        self.left.clone().unwrap_or_else(|| self.all_rows())
    }

    /// Returns the recorded cost of a row.
    pub(super) fn cost(&self, row: u32) -> Option<f32> {
        let index = self.left_rows().iter().position(|left| *left == row)?;
        self.costs.as_ref()?.get(index).copied()
    }

    /// Returns the worker facts in which two rows differ, by name. A fact that several policies read appears
    /// once.
    pub(super) fn fact_differences(&self, recorded: u32, new: u32) -> Vec<FactDifference> {
        let mut found = BTreeMap::new();
        for stage in self.stages.iter().filter(|stage| stage.decode.is_none()) {
            for (fact, values) in &stage.workers {
                let value = |row| stage.index_of(row).and_then(|index| numbers(values).nth(index));
                if let (Some(old), Some(new)) = (value(recorded), value(new))
                    && old != new
                    && !IDENTITY_FACTS.contains(&fact.as_str())
                {
                    found.insert(fact.clone(), (old.to_owned(), new.to_owned()));
                }
            }
        }
        found.into_iter().map(|(fact, (recorded, new))| FactDifference { fact, recorded, new }).collect()
    }

    /// Returns the rows that the first filter kept; all rows if there was no filter.
    pub(super) fn kept_by_the_first_filter(&self) -> Vec<u32> {
        let mut stages = self.stages.iter().skip_while(|stage| stage.world.as_deref() != Some("filter"));
        let next = stages.next().and_then(|_| stages.next());
        match next {
            Some(next) => next.kept.clone().unwrap_or_else(|| self.all_rows()),
            None => self.left_rows(),
        }
    }

    /// Returns the recorded state by key. Values that this policy read come last, so that they take
    /// precedence. Returns `None` if more state was read than recorded, or a value is malformed.
    pub(super) fn state(&self, policy: &str) -> Option<Vec<(&str, Vec<u8>)>> {
        let (own, others): (Vec<&Stage>, Vec<_>) =
            self.stages.iter().partition(|stage| stage.policy.as_deref() == Some(policy));
        let mut state = Vec::new();
        // The first policy that read a key saw the value from before the decision; reversing puts it last.
        for stage in others.into_iter().rev().chain(own.into_iter().rev()) {
            if stage.state_cut {
                return None;
            }
            for (key, raw) in &stage.state {
                if let Some(raw) = raw {
                    state.push((key.as_str(), value(raw.get())?));
                }
            }
        }
        Some(state)
    }

    /// Returns weight and normalisation of the scorer if there was exactly one.
    pub(super) fn only_scorer(&self) -> Option<(f32, Normalize)> {
        let mut scorers = self.stages.iter().filter(|stage| stage.world.as_deref() == Some("scorer"));
        let only = scorers.next().filter(|_| scorers.next().is_none())?;
        Some((only.weight?, only.normalize?))
    }

    /// Encodes the facts of `rows` as a filter, scorer or selector reads them.
    pub(super) fn words(&self, wants: &Wants, rows: &[u32]) -> Result<Vec<u32>, MissingFacts> {
        let (mut words, mut missing) = (Vec::new(), Vec::new());
        self.write_request(wants, &mut words, &mut missing);
        for column in &wants.worker {
            match self.column(column, rows) {
                Some(values) => write_column(column.ty(), &values, &mut words),
                None => missing.push(column.to_string()),
            }
        }
        if missing.is_empty() { Ok(words) } else { Err(MissingFacts(missing)) }
    }

    /// Encodes the facts as a decode override reads them.
    pub(super) fn plan_words(&self, wants: &Wants) -> Result<PlanWords, MissingFacts> {
        let (mut words, mut missing) = (PlanWords::default(), Vec::new());
        self.write_request(wants, &mut words.request, &mut missing);
        let stage = self.stages.iter().find(|stage| stage.world.as_deref() == Some("decode-override"));
        for column in &wants.worker {
            let (name, ty) = (column.to_string(), column.ty());
            let row = stage.and_then(|stage| stage.decode.as_ref()?.get(&name)).and_then(|raw| list(raw, ty));
            let rows = stage.and_then(|stage| list(stage.workers.get(&name)?, ty));
            match (row, rows) {
                (Some(row), Some(rows)) => {
                    write_column(ty, &row, &mut words.decode);
                    write_column(ty, &rows, &mut words.prefill);
                }
                _ => missing.push(name),
            }
        }
        if !wants.worker.is_empty() {
            words.rows = stage.map_or(0, |stage| stage.rows as usize);
        }
        if missing.is_empty() { Ok(words) } else { Err(MissingFacts(missing)) }
    }

    fn write_request(&self, wants: &Wants, words: &mut Vec<u32>, missing: &mut Vec<String>) {
        for fact in &wants.request {
            let recorded = self.stages.iter().find_map(|stage| stage.request.get(fact.name()));
            let value = match (recorded, fact) {
                (Some(raw), _) => number(raw.get(), fact.ty()),
                // Not recorded means that the client did not ask for an explanation.
                (None, RequestFact::Explain) => Some((0, 0)),
                (None, RequestFact::Temperature) => Some((self.call.temperature.to_bits(), 0)),
                (None, _) => None,
            };
            match value {
                Some((low, high)) => {
                    words.push(low);
                    words.extend((fact.ty() == FactType::U64).then_some(high));
                }
                None => missing.push(fact.name().to_owned()),
            }
        }
    }

    /// Returns the column of a worker fact for `rows`, from a stage that recorded it for all of them.
    fn column(&self, column: &WorkerColumn, rows: &[u32]) -> Option<Vec<Words>> {
        let name = column.to_string();
        let recorded = self.stages.iter().filter(|stage| stage.decode.is_none()).find_map(|stage| {
            let values = list(stage.workers.get(&name)?, column.ty())?;
            rows.iter().map(|row| values.get(stage.index_of(*row)?).copied()).collect()
        });
        let candidate = |row: &u32| self.candidates.get(*row as usize).copied();
        recorded.or_else(|| match column {
            WorkerColumn::Fact(WorkerFact::WorkerId) => {
                rows.iter().map(|row| candidate(row).map(|(worker, _)| halves(worker))).collect()
            }
            WorkerColumn::Fact(WorkerFact::DpRank) => {
                rows.iter().map(|row| candidate(row).map(|(_, rank)| (rank, 0))).collect()
            }
            _ => self.known(&name, rows),
        })
    }

    /// Returns whether a figure is known, from a recording of a gateway that had no such fact: figures that
    /// were recorded counted as known.
    fn known(&self, name: &str, rows: &[u32]) -> Option<Vec<Words>> {
        let figure = name.strip_suffix("-known")?;
        let has = |stage: &Stage| stage.decode.is_none() && stage.workers.contains_key(figure);
        self.stages.iter().any(has).then(|| vec![(1, 0); rows.len()])
    }
}

impl Stage {
    /// Returns the index of a candidate row in the columns of this stage.
    fn index_of(&self, row: u32) -> Option<usize> {
        match &self.kept {
            None => Some(row as usize),
            Some(kept) => kept.binary_search(&row).ok(),
        }
    }
}

/// Returns the index of the fact `explain` among the words of a policy.
pub(super) fn explain_index(wants: &Wants) -> Option<usize> {
    let index = wants.request.iter().position(|fact| *fact == RequestFact::Explain)?;
    Some(wants.request.iter().take(index).map(|fact| fact.ty().width()).sum())
}

fn write_column(ty: FactType, values: &[Words], words: &mut Vec<u32>) {
    words.extend(values.iter().map(|(low, _)| low));
    if ty == FactType::U64 {
        words.extend(values.iter().map(|(_, high)| high));
    }
}

fn list(raw: &RawValue, ty: FactType) -> Option<Vec<Words>> {
    numbers(raw).map(|text| number(text, ty)).collect()
}

/// Splits a JSON list into its numbers, as written.
fn numbers(raw: &RawValue) -> impl Iterator<Item = &str> {
    let inner = raw.get().trim().trim_start_matches('[').trim_end_matches(']').trim();
    inner.split(',').map(str::trim).filter(|text| !text.is_empty())
}

fn number(text: &str, ty: FactType) -> Option<Words> {
    let text = text.trim();
    match ty {
        FactType::U32 => text.parse().ok().map(|value| (value, 0)),
        FactType::U64 => text.parse().ok().map(halves),
        FactType::F32 => {
            let bits = text.strip_prefix("\"0x").and_then(|bits| bits.strip_suffix('"'));
            let bits = bits.map(|bits| u32::from_str_radix(bits, 16).ok());
            bits.unwrap_or_else(|| text.parse().ok().map(f32::to_bits)).map(|bits| (bits, 0))
        }
    }
}

/// Decodes a value of the state: a number, stored in eight bytes, or bytes in hexadecimal.
fn value(text: &str) -> Option<Vec<u8>> {
    let Some(hex) = text.strip_prefix("\"0x").and_then(|text| text.strip_suffix('"')) else {
        return text.parse::<i64>().ok().map(|number| number.to_le_bytes().to_vec());
    };
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

fn halves(value: u64) -> Words {
    (value as u32, (value >> 32) as u32)
}
