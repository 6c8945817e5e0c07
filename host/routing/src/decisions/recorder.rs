//! Records the facts that the policies of one decision were given, in the same words that the policies read.
//!
//! One list of words holds everything in order. It is packed before it is stored (`packed`), outside of the
//! lock of the ring:
//!
//! ```text
//! each stage:  step, rows, listed?, positions of the rows when listed, number of facts, facts
//! candidates:  count, listed?; when listed the lower halves of the worker ids, the upper halves, the ranks;
//!              otherwise the number of ranges, then the first row and the length of each
//! rows left:   rows, listed?, positions when listed
//! costs:       count, costs
//! state:       the accesses of each stage that had any
//! ```
//!
//! Ranges are of rows of the pool's ids. These are kept once for all decisions among the pool (`shard`).
//!
//! `record` reads it back.

use std::sync::Arc;

use pointsman_workers::{CandidateIds, Pool};

use super::packed;
use crate::{
    encoding::{count, write_text},
    slot::ProgramSummary,
    state_accesses::StateAccesses,
};

/// The step of a stage without a policy: facts that are recorded for every decision.
pub(crate) const ALWAYS: u32 = u32::MAX;
/// Added to the step of the shadow whose call failed.
pub(crate) const SHADOW: u32 = 1 << 31;
/// Smallest pool whose ids are kept once for all decisions. The ids of smaller ones are copied.
const MIN_SHARED: usize = 64;

/// A decision as the ring stores it.
#[derive(Clone, Copy)]
pub(crate) struct Recorded<'a> {
    pub(super) texts: &'a [u32],
    pub(super) packed: &'a [u32],
    /// The ids that the words have ranges of.
    pub(super) ids: Option<&'a Arc<CandidateIds>>,
}

/// The words of one decision.
#[derive(Default)]
pub(crate) struct Recorder {
    words: Vec<u32>,
    /// The words as the ring stores them, when the decision has ended.
    packed: Vec<u32>,
    texts: Vec<u32>,
    /// The ids that the words have ranges of.
    ids: Option<Arc<CandidateIds>>,
    /// Positions in the pool of the candidates, rising.
    candidates: Vec<u32>,
    /// Number of eligible candidates. The recorded ones may be a short list of these.
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
        (self.program, self.ids) = (None, None);
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

    /// Sets the number of eligible candidates, when the recorded ones are a short list of these.
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
        self.write_candidates(pool);
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

    /// Returns the decision that has ended.
    pub(crate) fn recorded(&self) -> Recorded<'_> {
        Recorded { texts: &self.texts, packed: &self.packed, ids: self.ids.as_ref() }
    }

    fn write_candidates(&mut self, pool: &Pool) {
        let Self { words, candidates, .. } = self;
        let most = candidates.len() / CandidateIds::WIDTH;
        let ids = (pool.len() >= MIN_SHARED && candidates.len() >= pool.len() / 2).then(|| pool.ids());
        words.push(count(candidates.len()));
        let begin = words.len();
        if ids.is_some() && write_ranges(candidates, pool.len(), most, words) {
            self.ids = ids.cloned();
            return;
        }
        words.truncate(begin);
        words.push(1);
        for column in pool.ids().columns() {
            let value = |row: &u32| column.get(*row as usize).copied().unwrap_or(0);
            words.extend(candidates.iter().map(value));
        }
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

/// Writes `rows`, which rise, as ranges. Returns whether there are at most `most`.
fn write_ranges(rows: &[u32], all: usize, most: usize, out: &mut Vec<u32>) -> bool {
    out.extend([0, 0]);
    let number_at = out.len() - 1;
    let mut ranges = 0;
    if rows.len() == all {
        // Rows rise, so these are all.
        out.extend([0, count(all)]);
        ranges = 1;
    } else {
        for range in rows.chunk_by(|row, next| row + 1 == *next) {
            out.extend([range.first().copied().unwrap_or(0), count(range.len())]);
            ranges += 1;
            if ranges > most {
                return false;
            }
        }
    }
    if let Some(number) = out.get_mut(number_at) {
        *number = count(ranges);
    }
    true
}
