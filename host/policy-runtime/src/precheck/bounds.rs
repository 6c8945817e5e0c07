//! Largest contents of a file. The largest known guests, CPython and SpiderMonkey in 12 to 18 MB, stay far
//! below each bound.

use super::Stopped;
use crate::refusal::{DECLARED_MEMORY, Refusal};

/// Bounded quantity of a file, in the order of [`BOUNDS`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Bound {
    Sections,
    Nested,
    Depth,
    Types,
    TypeDepth,
    Imports,
    Exports,
    Aliases,
    Instances,
    Functions,
    FunctionBytes,
    Locals,
    /// Product of the bytes and the locals of a function: the compiler's memory follows it.
    FunctionCost,
    LoopDepth,
    BlockDepth,
    Globals,
    Segments,
    Memories,
    MemoryBytes,
    Tables,
    TableElements,
}

/// Name and limit of each bound. The limit of the declared memory is a setting.
const BOUNDS: [(&str, u64); 21] = [
    ("sections", 20_000),
    ("nested modules and components", 500),
    ("levels of nested components", 16),
    ("types", 20_000),
    ("levels of nested types", 32),
    ("imports", 50_000),
    ("exports", 100_000),
    ("aliases and canonical functions", 50_000),
    ("instances", 500),
    ("functions", 200_000),
    ("bytes in one function", 4 << 20),
    ("local variables in one function", 10_000),
    ("bytes times local variables in one function", 1 << 28),
    ("levels of nested loops", 256),
    ("levels of nested blocks", 50_000),
    ("globals", 50_000),
    ("data and element segments", 100_000),
    ("memories", 8),
    (DECLARED_MEMORY, 0),
    ("tables", 32),
    ("elements of declared tables", 20_000),
];

/// How much of each bound a file uses.
pub(super) struct Counts {
    counts: [u64; BOUNDS.len()],
    memory_bytes: u64,
}

impl Counts {
    pub(super) fn new(memory_bytes: usize) -> Self {
        Self { counts: [0; BOUNDS.len()], memory_bytes: u64::try_from(memory_bytes).unwrap_or(u64::MAX) }
    }

    /// Adds to a count and checks it.
    pub(super) fn add(&mut self, bound: Bound, more: u64) -> Result<(), Stopped> {
        let Some(count) = self.counts.get_mut(bound as usize) else { return Ok(()) };
        *count = count.saturating_add(more);
        let count = *count;
        self.check(bound, count)
    }

    /// Checks a value that is not a sum over the file.
    pub(super) fn check(&self, bound: Bound, found: u64) -> Result<(), Stopped> {
        let Some((what, limit)) = BOUNDS.get(bound as usize).copied() else { return Ok(()) };
        let limit = if matches!(bound, Bound::MemoryBytes) { self.memory_bytes } else { limit };
        if found <= limit {
            return Ok(());
        }
        Err(Stopped::Exceeded(Refusal::ExceedsLimit { what: what.into(), found, limit }))
    }
}
