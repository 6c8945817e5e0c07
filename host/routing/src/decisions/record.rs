//! A recorded decision, copied out of the ring, and its JSON form (docs/receipts.md).

use std::sync::Arc;

use pointsman_workers::{CandidateIds, DpRank, WorkerId};
use serde::{
    Serialize, Serializer,
    ser::{SerializeMap, SerializeSeq},
};
use serde_json::{Value, json};
use tokio::time::Duration;

use super::{
    fact_json::{RequestFacts, WorkerFacts},
    header::{DecidedBy, DecisionHeader, DecisionResult, Outcome},
    recorder::{ALWAYS, SHADOW},
    state_reads::StateReads,
};
use crate::{
    encoding::WordReader,
    facts::Wants,
    ids::DecisionId,
    policy::World,
    query::CandidateId,
    slot::{PolicySummary, ProgramSummary, SlotKind},
};

/// A copy of one recorded decision.
#[derive(Debug)]
pub struct Record {
    /// The decision's id.
    pub id: DecisionId,
    /// Everything but the recorded facts.
    pub header: DecisionHeader,
    words: Vec<u32>,
    /// The ids that the words have ranges of; `None`: the words list ids.
    ids: Option<Arc<CandidateIds>>,
    always: Arc<Wants>,
}

/// A candidate with its cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Costed {
    /// Position among the decision's candidates.
    pub row: u32,
    /// The worker.
    pub worker: WorkerId,
    /// The rank.
    pub dp_rank: DpRank,
    /// The cost, when known.
    pub cost: Option<f32>,
}

/// The decoded words of a record.
#[derive(Debug, Default)]
pub(super) struct Parts<'a> {
    pub request_id: String,
    pub reason: String,
    pub detail: String,
    stages: Vec<Stage<'a>>,
    candidates: Vec<CandidateId>,
    /// Rows left by the filters; `None`: all.
    left: Option<&'a [u32]>,
    costs: Vec<f32>,
    reads: Vec<StateReads>,
}

#[derive(Debug)]
struct Stage<'a> {
    step: u32,
    rows: u32,
    listed: Option<&'a [u32]>,
    facts: &'a [u32],
}

impl<'a> Stage<'a> {
    fn read(words: &mut WordReader<'a>) -> Option<Self> {
        let step = words.word()?;
        let (rows, listed) = words.rows()?;
        let count = words.word()? as usize;
        Some(Self { step, rows, listed, facts: words.words(count)? })
    }
}

impl Record {
    pub(super) fn new(
        id: DecisionId,
        header: DecisionHeader,
        words: Vec<u32>,
        ids: Option<Arc<CandidateIds>>,
        always: Arc<Wants>,
    ) -> Self {
        Self { id, header, words, ids, always }
    }

    pub(super) fn parts(&self) -> Parts<'_> {
        let mut words = WordReader(&self.words);
        let mut parts = Parts::default();
        let complete = (|| {
            parts.request_id = words.text()?;
            parts.reason = words.text()?;
            parts.detail = words.text()?;
            if !self.header.inputs_dropped {
                for _ in 0..self.header.stages {
                    parts.stages.push(Stage::read(&mut words)?);
                }
                parts.candidates = candidates(&mut words, self.ids.as_deref())?;
                (_, parts.left) = words.rows()?;
                let count = words.word()? as usize;
                parts.costs = words.words(count)?.iter().map(|bits| f32::from_bits(*bits)).collect();
                for _ in 0..self.header.stateful_stages {
                    parts.reads.push(StateReads::parse(&mut words)?);
                }
            }
            Some(())
        })();
        debug_assert!(complete.is_some(), "a record decodes as it was encoded");
        parts
    }
}

impl Record {
    /// The policies that were called, without their facts: for a record without inputs.
    fn called(&self) -> Vec<Value> {
        let program = &self.header.program;
        let of_every_leg = usize::from(program.slot != SlotKind::DecodeOverride && !self.always.is_empty());
        let others = of_every_leg + usize::from(self.header.failed_shadow.is_some());
        let count = (self.header.stages as usize).saturating_sub(others);
        let step = |step: &PolicySummary| json!({ "policy": step.name, "version": step.version, "digest": step.digest, "world": step.world });
        program.policies.iter().take(count).map(step).collect()
    }
}

/// Reads the candidates. `ids` are those that ranges refer to.
fn candidates(words: &mut WordReader<'_>, ids: Option<&CandidateIds>) -> Option<Vec<CandidateId>> {
    let count = words.word()? as usize;
    let mut candidates = Vec::with_capacity(count);
    if words.word()? == 1 {
        let listed = CandidateIds::of_words(words.words(count * CandidateIds::WIDTH)?);
        candidates.extend((0..count).filter_map(|place| listed.get(place)));
    } else {
        for _ in 0..words.word()? {
            let (first, length) = (words.word()? as usize, words.word()? as usize);
            candidates.extend((first..first + length).filter_map(|row| ids?.get(row)));
        }
    }
    Some(candidates)
}

impl Parts<'_> {
    /// The cost of a row, when it is known.
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
        let (header, parts) = (&self.header, self.parts());
        let program = &*header.program;
        let named = program.ranker();
        let chosen = parts.chosen(header.result);
        let runner_up = parts.runner_up(chosen.as_ref());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("request_id", &parts.request_id)?;
        map.serialize_entry("model", &header.model)?;
        map.serialize_entry("leg", &header.leg)?;
        map.serialize_entry("attempt", &header.attempt)?;
        map.serialize_entry("slot", &program.slot)?;
        map.serialize_entry("slot_model", &program.model)?;
        map.serialize_entry("generation", &program.generation)?;
        map.serialize_entry("mode", &program.lane)?;
        map.serialize_entry("shadow", &header.shadow)?;
        map.serialize_entry("program", &program.name)?;
        map.serialize_entry("policy", &named.map(|step| &step.name))?;
        map.serialize_entry("digest", &named.map(|step| step.digest))?;
        map.serialize_entry("settings_digest", &named.and_then(|step| step.settings_digest))?;
        map.serialize_entry("decider", &decider(header.by, &parts.detail))?;
        map.serialize_entry("reason", &Some(&parts.reason).filter(|reason| !reason.is_empty()))?;
        map.serialize_entry(
            "call",
            &json!({ "seed": header.seed, "now_us": header.now_us, "temperature": header.temperature }),
        )?;
        map.serialize_entry("eligible", &header.eligible)?;
        map.serialize_entry("candidates", &parts.candidates)?;
        let (stages, reads) = (&parts.stages, &parts.reads);
        let stages =
            Stages { stages, reads, program, shadow: header.failed_shadow.as_deref(), always: &self.always };
        map.serialize_entry("stages", &stages)?;
        if header.inputs_dropped {
            map.serialize_entry("called", &self.called())?;
        }
        map.serialize_entry("picker", &program.picker)?;
        map.serialize_entry("left", &parts.left)?;
        map.serialize_entry("costs", &parts.costs)?;
        map.serialize_entry("choice", &choice(header.result, chosen))?;
        map.serialize_entry("runner_up", &runner_up)?;
        map.serialize_entry("plan", &plan(header.result))?;
        map.serialize_entry("refused", &refused(header.result, &parts.detail))?;
        map.serialize_entry("cached_blocks", &header.cached_blocks)?;
        map.serialize_entry("inputs_dropped", &header.inputs_dropped)?;
        map.serialize_entry("took_us", &(header.took.as_secs_f64() * 1e6))?;
        map.serialize_entry("outcome", &header.outcome)?;
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

/// The chosen candidate; without its row when the inputs were dropped.
pub(super) fn choice(result: DecisionResult, chosen: Option<Costed>) -> Value {
    match (result, chosen) {
        (_, Some(chosen)) => json!(chosen),
        (DecisionResult::Chosen(worker, dp_rank), None) => json!({ "worker": worker, "dp_rank": dp_rank }),
        _ => Value::Null,
    }
}

pub(super) fn plan(result: DecisionResult) -> Value {
    let DecisionResult::Planned(plan, decode) = result else { return Value::Null };
    json!({ "word": plan, "decode": decode })
}

pub(super) fn refused(result: DecisionResult, detail: &str) -> Value {
    let DecisionResult::Refused(code) = result else { return Value::Null };
    json!({ "code": code, "detail": detail })
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let millis = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
        json!({
            "status": self.status, "code": self.code, "retried": self.retried, "moved": self.moved,
            "ttft_ms": millis(self.ttft), "itl_ms": millis(self.itl), "output_tokens": self.output_tokens,
            "output_tokens_source": self.output_source, "ended_at_ms": self.ended_at_ms,
            "duration_ms": millis(Some(self.duration)),
            "prompt_tokens": self.prompt_tokens,
            "times_ms": {
                "queued": from_micros(self.times.queued), "prefill_sent": from_micros(self.times.sent.prefill),
                "prefill_ended": from_micros(self.times.prefill_ended),
                "answer_sent": from_micros(self.times.sent.answering),
            },
            "run": self.run.map(|run| json!({
                "sent_ms": from_micros(Some(run.sent)), "ended_ms": from_micros(run.ended),
                "failed": run.failure.map(|failure| failure.kind),
                "status": run.failure.and_then(|failure| failure.status),
            })),
            "cached_tokens": { "predicted": self.cached_predicted, "reported": self.cached_reported },
            "stream_failed": self.stream_failed.map(|failed| json!({
                "result": failed.result, "why": failed.why, "delivered_tokens": failed.delivered,
                "rest": failed.rest,
            })),
            "continues": self.continues,
        })
        .serialize(serializer)
    }
}

fn from_micros(time: Option<u32>) -> Option<f64> {
    time.map(|micros| f64::from(micros) / 1e3)
}

struct Stages<'a> {
    stages: &'a [Stage<'a>],
    reads: &'a [StateReads],
    program: &'a ProgramSummary,
    shadow: Option<&'a ProgramSummary>,
    always: &'a Wants,
}

impl Stages<'_> {
    /// Returns the policy of a step, and whether it is one of the shadow.
    fn policy(&self, step: u32) -> Option<(&PolicySummary, bool)> {
        if step == ALWAYS {
            return None;
        }
        let (program, place) = match step.checked_sub(SHADOW) {
            Some(place) => (self.shadow?, place),
            None => (self.program, step),
        };
        Some((program.policies.get(place as usize)?, step >= SHADOW))
    }
}

impl Serialize for Stages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.stages.len()))?;
        for (number, stage) in (0_u32..).zip(self.stages) {
            let policy = self.policy(stage.step);
            let (step, is_shadow) = (policy.map(|(step, _)| step), policy.is_some_and(|(_, shadow)| shadow));
            let wants = step.map_or(self.always, |step| &step.wants);
            let reads = self.reads.iter().find(|reads| reads.stage == number);
            list.serialize_element(&StageJson { stage, step, is_shadow, wants, reads })?;
        }
        list.end()
    }
}

/// A stage with the names of its facts.
struct StageJson<'a> {
    stage: &'a Stage<'a>,
    step: Option<&'a PolicySummary>,
    is_shadow: bool,
    wants: &'a Wants,
    reads: Option<&'a StateReads>,
}

impl Serialize for StageJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(step) = self.step.filter(|_| self.is_shadow) {
            // Without the key `policy`, readers do not take it for a call that led to the choice.
            let digest = step.digest;
            map.serialize_entry(
                "failed_shadow",
                &json!({ "policy": step.name, "digest": digest, "world": step.world }),
            )?;
        } else if let Some(step) = self.step {
            map.serialize_entry("policy", &step.name)?;
            map.serialize_entry("version", &step.version)?;
            map.serialize_entry("digest", &step.digest)?;
            if let Some(settings) = step.settings_digest {
                map.serialize_entry("settings_digest", &settings)?;
            }
            map.serialize_entry("world", &step.world)?;
            if let Some((weight, normalize)) = step.weight {
                map.serialize_entry("weight", &weight)?;
                map.serialize_entry("normalize", &normalize)?;
            }
        }
        map.serialize_entry("rows", &self.stage.rows)?;
        map.serialize_entry("kept", &self.stage.listed)?;
        let mut words = WordReader(self.stage.facts);
        let request = words.words(self.wants.request_width()).unwrap_or_default();
        map.serialize_entry("request", &RequestFacts { wants: self.wants, words: request })?;
        let overrides = self.step.is_some_and(|step| step.world == World::DecodeOverride);
        if overrides && !words.0.is_empty() {
            let decode = words.words(self.wants.worker_width()).unwrap_or_default();
            map.serialize_entry("decode", &WorkerFacts { wants: self.wants, words: decode, rows: 1 })?;
        }
        let rows = self.stage.rows as usize;
        map.serialize_entry("workers", &WorkerFacts { wants: self.wants, words: words.0, rows })?;
        if let Some(reads) = self.reads {
            map.serialize_entry("state", reads)?;
            map.serialize_entry("state_cut", &reads.truncated)?;
        }
        map.end()
    }
}
