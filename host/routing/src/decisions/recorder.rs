//! What a decision's policies are handed, written down while they are asked, in the very words that they read.
//!
//! One list of words holds everything in the order it happens, so that keeping a decision is one copy:
//! each stage as `step, rows, listed?, places of the rows when listed, number of facts, facts`, then the candidates, the
//! rows that were left, their costs, and what was read of the state, when anything was. `record` reads it back.

use std::sync::Arc;

use pointsman_workers::Candidate;

use super::state_reads;
use crate::{policy::PolicyInfo, summary::ProgramSummary};

/// The step of a stage that nobody was asked in: facts that are recorded in any case.
pub(crate) const ALWAYS: u32 = u32::MAX;

/// Bytes of a text at most; what is longer is cut.
const LONGEST: usize = 512;

/// The words of one decision. Lives with its thread, and is used again for the next.
#[derive(Default)]
pub(crate) struct Recorder {
    words: Vec<u32>,
    texts: Vec<u32>,
    /// Positions in the pool of the candidates, rising.
    first: Vec<u32>,
    stages: u32,
    /// What policies read of the state, stage by stage, and how many of them did.
    state: Vec<u32>,
    reads: u32,
    summary: Option<Arc<ProgramSummary>>,
}

impl Recorder {
    /// Forgets the decision before.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
        self.first.clear();
        self.state.clear();
        (self.stages, self.reads) = (0, 0);
        self.summary = None;
    }

    /// Begins a decision among `rows`, positions of the pool.
    pub(crate) fn begin(&mut self, summary: &Arc<ProgramSummary>, rows: &[u32]) {
        self.clear();
        self.first.extend_from_slice(rows);
        self.summary = Some(summary.clone());
    }

    /// Writes a stage's facts and gives them to be read. `rows` are some of those that the decision began with.
    pub(crate) fn stage(&mut self, step: u32, rows: &[u32], write: impl FnOnce(&mut Vec<u32>)) -> &[u32] {
        self.words.push(step);
        self.rows(rows);
        let at = self.words.len();
        self.words.push(0);
        write(&mut self.words);
        let facts = count(self.words.len() - at - 1);
        if let Some(length) = self.words.get_mut(at) {
            *length = facts;
        }
        self.stages += 1;
        self.words.get(at + 1..).unwrap_or_default()
    }

    /// Takes what the policy of the last stage read of its slot's state.
    pub(crate) fn take_state(&mut self, policy: &PolicyInfo) {
        if policy.remembers && state_reads::take(self.stages.saturating_sub(1), &mut self.state) {
            self.reads += 1;
        }
    }

    /// Ends a decision: `rows` are those left (`None`: all), `costs` theirs or none, `texts` the request's id, the policy's reason and the
    /// detail of a fallback or refusal.
    pub(crate) fn end(&mut self, pool: &[Candidate], rows: Option<&[u32]>, costs: &[f32], texts: [&str; 3]) {
        self.words.push(count(self.first.len()));
        for row in &self.first {
            let candidate = pool.get(*row as usize);
            let (id, rank) =
                candidate.map_or((0, 0), |candidate| (candidate.worker.id().0, candidate.rank.0));
            self.words.extend([id as u32, (id >> 32) as u32, rank]);
        }
        match rows {
            Some(rows) => self.rows(rows),
            None => self.words.extend([count(self.first.len()), 0]),
        }
        self.words.push(count(costs.len()));
        self.words.extend(costs.iter().map(|cost| cost.to_bits()));
        self.words.append(&mut self.state);
        self.texts.clear();
        for text in texts {
            write_text(text, &mut self.texts);
        }
    }

    pub(crate) fn program(&self) -> Option<&Arc<ProgramSummary>> {
        self.summary.as_ref()
    }

    pub(crate) fn stages(&self) -> u32 {
        self.stages
    }

    pub(crate) fn reads(&self) -> u32 {
        self.reads
    }

    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    pub(crate) fn texts(&self) -> &[u32] {
        &self.texts
    }

    /// How many rows, and which when some were dropped.
    fn rows(&mut self, rows: &[u32]) {
        let listed = rows.len() != self.first.len();
        self.words.extend([count(rows.len()), u32::from(listed)]);
        if listed {
            let mut places = (0_u32..).zip(&self.first);
            for row in rows {
                self.words.extend(places.find(|(_, first)| *first == row).map(|(place, _)| place));
            }
        }
    }
}

/// As bytes, at most so many.
fn write_text(text: &str, out: &mut Vec<u32>) {
    let text = text.get(..text.floor_char_boundary(LONGEST)).unwrap_or(text);
    write_bytes(text.as_bytes(), out);
}

/// Length in bytes, then four bytes a word.
pub(super) fn write_bytes(bytes: &[u8], out: &mut Vec<u32>) {
    out.push(count(bytes.len()));
    out.extend(bytes.chunks(4).map(|chunk| {
        let mut bytes = [0; 4];
        bytes.iter_mut().zip(chunk).for_each(|(byte, given)| *byte = *given);
        u32::from_le_bytes(bytes)
    }));
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
