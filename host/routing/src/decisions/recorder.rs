//! Records the facts that the policies of one decision were given, in the same words that the policies read.
//!
//! One list of words holds everything in order. It is packed before it is stored (`packed`), outside of the
//! lock of the ring:
//!
//! ```text
//! each stage:  step, rows, listed?, positions of the rows when listed, number of facts, facts
//! candidates:  count, then the lower halves of the worker ids, the upper halves, the ranks
//! rows left:   rows, listed?, positions when listed
//! costs:       count, costs
//! state:       the accesses of each stage that had any
//! ```
//!
//! `record` reads it back.

use std::sync::Arc;

use pointsman_workers::Pool;

use super::packed;
use crate::{
    encoding::{count, write_text},
    slot::ProgramSummary,
    state_accesses::StateAccesses,
};

/// The step of a stage without a policy: facts that are recorded for every decision.
pub(crate) const ALWAYS: u32 = u32::MAX;

/// The words of one decision.
#[derive(Default)]
pub(crate) struct Recorder {
    words: Vec<u32>,
    /// The words as the ring stores them, when the decision has ended.
    packed: Vec<u32>,
    texts: Vec<u32>,
    /// Positions in the pool of the candidates, rising.
    candidates: Vec<u32>,
    /// Number of eligible candidates, of which those may be a short list.
    eligible: usize,
    stages: u32,
    /// Encoded state accesses, stage by stage, and the number of stages that had any.
    state: Vec<u32>,
    stateful_stages: u32,
    program: Option<Arc<ProgramSummary>>,
}

impl Recorder {
    /// Drops the previous decision.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
        self.candidates.clear();
        self.eligible = 0;
        self.state.clear();
        (self.stages, self.stateful_stages) = (0, 0);
        self.program = None;
    }

    /// Starts a decision of `program`, without candidates.
    pub(crate) fn begin(&mut self, program: &Arc<ProgramSummary>) {
        self.clear();
        self.program = Some(program.clone());
    }

    /// Sets the candidates, before the first stage: positions in the pool, rising.
    pub(crate) fn set_candidates(&mut self, rows: &[u32]) {
        self.candidates.extend_from_slice(rows);
        self.eligible = rows.len();
    }

    /// Sets the number of eligible candidates, of which the candidates are a short list.
    pub(crate) fn set_eligible(&mut self, eligible: u32) {
        self.eligible = eligible as usize;
    }

    /// Returns the number of eligible candidates.
    pub(crate) fn eligible(&self) -> u32 {
        count(self.eligible)
    }

    /// Returns whether the candidates are a short list of the eligible ones.
    pub(crate) fn is_short(&self) -> bool {
        self.eligible > self.candidates.len()
    }

    /// Writes a stage's facts and returns them. `rows` are a subset of the candidates.
    pub(crate) fn stage(&mut self, step: u32, rows: &[u32], write: impl FnOnce(&mut Vec<u32>)) -> &[u32] {
        self.words.push(step);
        self.write_rows(rows);
        let length_at = self.words.len();
        self.words.push(0);
        write(&mut self.words);
        let facts = count(self.words.len() - length_at - 1);
        if let Some(length) = self.words.get_mut(length_at) {
            *length = facts;
        }
        self.stages += 1;
        self.words.get(length_at + 1..).unwrap_or_default()
    }

    /// Moves the state accesses of the last stage's policy here; `None`: they were not noted.
    pub(crate) fn take_state(&mut self, accesses: Option<&mut StateAccesses>) {
        let stage = self.stages.saturating_sub(1);
        if accesses.is_some_and(|accesses| accesses.move_to(stage, &mut self.state)) {
            self.stateful_stages += 1;
        }
    }

    /// Ends a decision. `rows` are those left (`None`: all), `costs` theirs or none; `texts` are the
    /// request's id, the policy's reason, and the detail of a fallback or refusal.
    pub(crate) fn end(&mut self, pool: &Pool, rows: Option<&[u32]>, costs: &[f32], texts: [&str; 3]) {
        self.words.push(count(self.candidates.len()));
        for column in [pool.ids_low(), pool.ids_high(), pool.ranks()] {
            if self.candidates.len() == column.len() {
                // Rows rise, so these are all.
                self.words.extend_from_slice(column);
            } else {
                let value = |row: &u32| column.get(*row as usize).copied().unwrap_or(0);
                self.words.extend(self.candidates.iter().map(value));
            }
        }
        match rows {
            Some(rows) => self.write_rows(rows),
            None => self.words.extend([count(self.candidates.len()), 0]),
        }
        self.words.push(count(costs.len()));
        self.words.extend(costs.iter().map(|cost| cost.to_bits()));
        self.words.append(&mut self.state);
        packed::pack(&self.words, &mut self.packed);
        self.texts.clear();
        for text in texts {
            write_text(text, &mut self.texts);
        }
    }

    pub(crate) fn program(&self) -> Option<&Arc<ProgramSummary>> {
        self.program.as_ref()
    }

    pub(crate) fn stages(&self) -> u32 {
        self.stages
    }

    pub(crate) fn stateful_stages(&self) -> u32 {
        self.stateful_stages
    }

    /// Returns the packed words of the decision that has ended.
    pub(crate) fn packed(&self) -> &[u32] {
        &self.packed
    }

    pub(crate) fn texts(&self) -> &[u32] {
        &self.texts
    }

    /// The number of rows, and which ones when some candidates were dropped.
    fn write_rows(&mut self, rows: &[u32]) {
        let listed = rows.len() != self.candidates.len();
        self.words.extend([count(rows.len()), u32::from(listed)]);
        if listed {
            let mut candidates = (0_u32..).zip(&self.candidates);
            for row in rows {
                let position = candidates.find(|(_, candidate)| *candidate == row);
                self.words.extend(position.map(|(position, _)| position));
            }
        }
    }
}
