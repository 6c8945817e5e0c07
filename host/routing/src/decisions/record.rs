//! A decision as it was copied out of the ring, and its shape as JSON (docs/receipts.md).

use std::sync::Arc;

use pointsman_workers::{DpRank, WorkerId};
use serde::{
    Serialize, Serializer,
    ser::{SerializeMap, SerializeSeq},
};
use serde_json::{Value, json};
use tokio::time::Duration;

use super::{
    DecidedBy, DecisionHeader, DecisionId, DecisionResult, Outcome, encoding::Words, recorder::ALWAYS,
    state_reads::Reads,
};
use crate::{
    facts::{FactType, Wants},
    policy::World,
    query::CandidateId,
    summary::{PolicySummary, ProgramSummary},
};

/// One decision, copied.
#[derive(Debug)]
pub struct Record {
    /// Its name.
    pub id: DecisionId,
    /// What is known besides the inputs.
    pub head: DecisionHeader,
    words: Vec<u32>,
    always: Arc<Wants>,
}

/// A candidate with its cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Costed {
    /// Row among the decision's candidates.
    pub row: u32,
    /// The worker.
    pub worker: WorkerId,
    /// Its rank.
    pub dp_rank: DpRank,
    /// Its cost, when known.
    pub cost: Option<f32>,
}

/// The words of a record, read.
#[derive(Debug, Default)]
pub(super) struct Parts<'a> {
    pub request_id: String,
    pub reason: String,
    pub detail: String,
    stages: Vec<Stage<'a>>,
    candidates: Vec<CandidateId>,
    /// Rows that were left at the end, `None`: all.
    left: Option<&'a [u32]>,
    costs: Vec<f32>,
    reads: Vec<Reads>,
}

#[derive(Debug)]
struct Stage<'a> {
    step: u32,
    rows: u32,
    listed: Option<&'a [u32]>,
    facts: &'a [u32],
}

impl<'a> Stage<'a> {
    fn read(words: &mut Words<'a>) -> Option<Self> {
        let step = words.word()?;
        let (rows, listed) = words.rows()?;
        let count = words.word()? as usize;
        Some(Self { step, rows, listed, facts: words.take(count)? })
    }
}

impl Record {
    pub(super) fn new(id: DecisionId, head: DecisionHeader, words: Vec<u32>, always: Arc<Wants>) -> Self {
        Self { id, head, words, always }
    }

    pub(super) fn parts(&self) -> Parts<'_> {
        let mut words = Words(&self.words);
        let mut parts = Parts::default();
        let whole = (|| {
            parts.request_id = words.text()?;
            parts.reason = words.text()?;
            parts.detail = words.text()?;
            if !self.head.cut {
                for _ in 0..self.head.stages {
                    parts.stages.push(Stage::read(&mut words)?);
                }
                let count = words.word()? as usize;
                let ids = words.take(count * 3)?;
                parts.candidates = ids
                    .as_chunks::<3>()
                    .0
                    .iter()
                    .map(|[low, high, rank]| (WorkerId(whole(*low, *high)), DpRank(*rank)))
                    .collect();
                (_, parts.left) = words.rows()?;
                let count = words.word()? as usize;
                parts.costs = words.take(count)?.iter().map(|bits| f32::from_bits(*bits)).collect();
                for _ in 0..self.head.reads {
                    parts.reads.push(Reads::parse(&mut words)?);
                }
            }
            Some(())
        })();
        debug_assert!(whole.is_some(), "a record is read as it was written");
        parts
    }
}

impl Parts<'_> {
    /// Cost of a row, when it is known.
    fn cost(&self, row: u32) -> Option<f32> {
        let place = match self.left {
            None => row as usize,
            Some(left) => left.iter().position(|other| *other == row)?,
        };
        self.costs.get(place).copied()
    }

    fn costed(&self, row: u32) -> Option<Costed> {
        let (worker, dp_rank) = *self.candidates.get(row as usize)?;
        Some(Costed { row, worker, dp_rank, cost: self.cost(row) })
    }

    pub(super) fn chosen(&self, result: DecisionResult) -> Option<Costed> {
        let DecisionResult::Chosen(worker, rank) = result else { return None };
        let row = self.candidates.iter().position(|candidate| *candidate == (worker, rank))?;
        self.costed(u32::try_from(row).ok()?)
    }

    /// The cheapest of those that were not chosen.
    pub(super) fn runner_up(&self, chosen: Option<&Costed>) -> Option<Costed> {
        let chosen = chosen?.row;
        let others = (0_u32..).zip(&self.candidates).filter(|(row, _)| *row != chosen);
        let others = others.filter_map(|(row, _)| Some((row, self.cost(row)?)));
        let (row, _) = others.min_by(|a, b| a.1.total_cmp(&b.1))?;
        self.costed(row)
    }
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (head, parts) = (&self.head, self.parts());
        let summary = &*head.program;
        let named = summary.ranker();
        let chosen = parts.chosen(head.result);
        let runner_up = parts.runner_up(chosen.as_ref());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("request_id", &parts.request_id)?;
        map.serialize_entry("model", &head.model)?;
        map.serialize_entry("leg", &head.leg)?;
        map.serialize_entry("attempt", &head.attempt)?;
        map.serialize_entry("slot", &summary.slot)?;
        map.serialize_entry("generation", &summary.generation)?;
        map.serialize_entry("mode", &summary.lane)?;
        map.serialize_entry("shadow", &head.shadow)?;
        map.serialize_entry("policy", &named.map(|step| &step.name))?;
        map.serialize_entry("digest", &named.map(|step| step.digest))?;
        map.serialize_entry("decider", &decider(head.by, &parts.detail))?;
        map.serialize_entry("reason", &Some(&parts.reason).filter(|reason| !reason.is_empty()))?;
        map.serialize_entry(
            "call",
            &json!({ "seed": head.seed, "now_us": head.now_us, "temperature": head.temperature }),
        )?;
        map.serialize_entry("candidates", &parts.candidates)?;
        let stages = Stages { stages: &parts.stages, reads: &parts.reads, summary, always: &self.always };
        map.serialize_entry("stages", &stages)?;
        map.serialize_entry("picker", &summary.picker)?;
        map.serialize_entry("left", &parts.left)?;
        map.serialize_entry("costs", &parts.costs)?;
        map.serialize_entry("choice", &choice(head.result, chosen))?;
        map.serialize_entry("runner_up", &runner_up)?;
        map.serialize_entry("plan", &plan(head.result))?;
        map.serialize_entry("refused", &refused(head.result, &parts.detail))?;
        map.serialize_entry("cached_blocks", &head.cached_blocks)?;
        map.serialize_entry("inputs_dropped", &head.cut)?;
        map.serialize_entry("took_us", &(head.took.as_secs_f64() * 1e6))?;
        map.serialize_entry("outcome", &head.outcome)?;
        map.end()
    }
}

pub(super) fn decider(by: DecidedBy, detail: &str) -> Value {
    match by {
        DecidedBy::Fallback(reason) => json!({ "by": "fallback", "reason": reason, "detail": detail }),
        DecidedBy::Native(mode) => json!({ "by": "native", "mode": mode }),
        other => json!({ "by": other.label() }),
    }
}

/// The candidate, also when the inputs that say its row were dropped.
pub(super) fn choice(result: DecisionResult, chosen: Option<Costed>) -> Value {
    match (result, chosen) {
        (_, Some(chosen)) => json!(chosen),
        (DecisionResult::Chosen(worker, dp_rank), None) => json!({ "worker": worker, "dp_rank": dp_rank }),
        _ => Value::Null,
    }
}

pub(super) fn plan(result: DecisionResult) -> Value {
    let DecisionResult::Planned(word, decode) = result else { return Value::Null };
    json!({ "word": word, "decode": decode })
}

pub(super) fn refused(result: DecisionResult, detail: &str) -> Value {
    let DecisionResult::Refused(code) = result else { return Value::Null };
    json!({ "code": code, "detail": detail })
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let millis = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
        json!({
            "status": self.status, "code": self.code, "retried": self.retried, "ttft_ms": millis(self.ttft),
            "itl_ms": millis(self.itl), "output_tokens": self.output_tokens,
            "cached_tokens": { "predicted": self.cached_predicted, "reported": self.cached_reported },
        })
        .serialize(serializer)
    }
}

struct Stages<'a> {
    stages: &'a [Stage<'a>],
    reads: &'a [Reads],
    summary: &'a ProgramSummary,
    always: &'a Wants,
}

impl Serialize for Stages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.stages.len()))?;
        for (number, stage) in (0_u32..).zip(self.stages) {
            let step = self.summary.policies.get(stage.step as usize);
            let wants = step.map_or(self.always, |step| &step.wants);
            let reads = self.reads.iter().find(|reads| reads.stage == number);
            let step = step.filter(|_| stage.step != ALWAYS);
            list.serialize_element(&Told { stage, step, wants, reads })?;
        }
        list.end()
    }
}

/// A stage with the names of its facts.
struct Told<'a> {
    stage: &'a Stage<'a>,
    step: Option<&'a PolicySummary>,
    wants: &'a Wants,
    reads: Option<&'a Reads>,
}

impl Serialize for Told<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(step) = self.step {
            map.serialize_entry("policy", &step.name)?;
            map.serialize_entry("version", &step.version)?;
            map.serialize_entry("digest", &step.digest)?;
            map.serialize_entry("world", &step.world)?;
            if let Some((weight, normalize)) = step.weighed {
                map.serialize_entry("weight", &weight)?;
                map.serialize_entry("normalize", &normalize)?;
            }
        }
        map.serialize_entry("rows", &self.stage.rows)?;
        map.serialize_entry("kept", &self.stage.listed)?;
        let mut words = Words(self.stage.facts);
        let request = words.take(self.wants.request_width()).unwrap_or_default();
        map.serialize_entry("request", &Singles { wants: self.wants, words: request })?;
        let overrides = self.step.is_some_and(|step| step.world == World::DecodeOverride);
        if overrides && !words.0.is_empty() {
            let decode = words.take(self.wants.worker_width()).unwrap_or_default();
            map.serialize_entry("decode", &Columns { wants: self.wants, words: decode, rows: 1 })?;
        }
        let rows = self.stage.rows as usize;
        map.serialize_entry("workers", &Columns { wants: self.wants, words: words.0, rows })?;
        if let Some(reads) = self.reads {
            map.serialize_entry("state", reads)?;
            map.serialize_entry("state_cut", &reads.cut)?;
        }
        map.end()
    }
}

/// Request facts by name.
struct Singles<'a> {
    wants: &'a Wants,
    words: &'a [u32],
}

impl Serialize for Singles<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut words = Words(self.words);
        serializer.collect_map(self.wants.request.iter().filter_map(|fact| {
            let low = words.word()?;
            let high = if fact.ty() == FactType::U64 { words.word()? } else { 0 };
            Some((fact.name(), Number { ty: fact.ty(), low, high }))
        }))
    }
}

/// Worker facts by name, one list a fact; of an empty matrix nothing.
struct Columns<'a> {
    wants: &'a Wants,
    words: &'a [u32],
    rows: usize,
}

impl Serialize for Columns<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut words = Words(self.words);
        serializer.collect_map(self.wants.worker.iter().filter_map(|column| {
            let ty = column.ty();
            let low = words.take(self.rows)?;
            let high = if ty == FactType::U64 { words.take(self.rows)? } else { &[] };
            Some((column.to_string(), Column { ty, low, high }))
        }))
    }
}

struct Column<'a> {
    ty: FactType,
    low: &'a [u32],
    high: &'a [u32],
}

impl Serialize for Column<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let high = self.high.iter().copied().chain(std::iter::repeat(0));
        serializer.collect_seq(self.low.iter().zip(high).map(|(low, high)| Number {
            ty: self.ty,
            low: *low,
            high,
        }))
    }
}

/// A fact's value; a single that is no number is told by its bits.
struct Number {
    ty: FactType,
    low: u32,
    high: u32,
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let single = f32::from_bits(self.low);
        match self.ty {
            FactType::U32 => serializer.serialize_u32(self.low),
            FactType::U64 => serializer.serialize_u64(whole(self.low, self.high)),
            FactType::F32 if single.is_finite() => serializer.serialize_f32(single),
            FactType::F32 => serializer.collect_str(&format_args!("0x{:08x}", self.low)),
        }
    }
}

fn whole(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
