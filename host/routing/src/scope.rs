//! Around a decision: what the code below it may know without being handed it, and what it may leave behind.
//!
//! A policy is called synchronously on the thread that decides, so that this is a thread's own and nobody waits for it.

use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
};

use crate::slot::Generation;

/// Reads that are kept of one decision.
const READS: usize = 16;
/// Bytes that are kept of a value.
const VALUE: usize = 64;

#[derive(Clone, Copy, Default)]
struct Current {
    preview: bool,
    generation: Option<Generation>,
    /// The request's id is in `REQUEST`.
    named: bool,
}

thread_local! {
    static CURRENT: Cell<Current> = Cell::default();
    static REQUEST: RefCell<String> = const { RefCell::new(String::new()) };
    static STATE_READS: RefCell<Vec<StateRead>> = const { RefCell::new(Vec::new()) };
}

/// What a policy read from its slot's state while it decided.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StateRead {
    /// The key.
    pub key: String,
    /// The value's first 64 bytes; `None` when there was none.
    pub value: Option<Vec<u8>>,
}

/// Held while it is in force; what was before comes back when it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Scope {
    before: Current,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Scope {
    /// Nothing that happens meanwhile may change state that outlives it.
    pub fn preview() -> Self {
        Self::with(|current| current.preview = true)
    }

    /// Calls meanwhile are for this generation of a slot.
    pub fn generation(generation: Generation) -> Self {
        Self::with(|current| current.generation = Some(generation))
    }

    /// The same, for a decision about the request of this id. It is only previewed when `preview` is set, or when one of the outer
    /// scopes is a preview.
    pub(crate) fn decision(generation: Generation, preview: bool, request: Option<&str>) -> Self {
        let request = request.filter(|_| !CURRENT.get().named);
        if let Some(request) = request {
            REQUEST.with_borrow_mut(|kept| {
                kept.clear();
                kept.push_str(request);
            });
        }
        Self::with(|current| {
            current.generation = Some(generation);
            current.preview |= preview;
            current.named |= request.is_some();
        })
    }

    fn with(change: impl FnOnce(&mut Current)) -> Self {
        let before = CURRENT.get();
        let mut current = before;
        change(&mut current);
        CURRENT.set(current);
        Self { before, thread: PhantomData }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// Whether state that outlives the decision must stay as it is.
#[must_use]
pub fn is_preview() -> bool {
    CURRENT.get().preview
}

/// The generation that is asked, when a slot asks.
#[must_use]
pub fn generation() -> Option<Generation> {
    CURRENT.get().generation
}

/// Reads the id of the request that is decided about, when it is known.
pub fn with_request<T>(read: impl FnOnce(Option<&str>) -> T) -> T {
    if !CURRENT.get().named {
        return read(None);
    }
    REQUEST.with_borrow(|request| read(Some(request)))
}

/// Notes what a policy read; what is beyond the first 16 reads is forgotten.
pub fn note_state_read(key: &str, value: Option<&[u8]>) {
    STATE_READS.with_borrow_mut(|reads| {
        if reads.len() < READS {
            let value = value.map(|value| value.iter().take(VALUE).copied().collect());
            reads.push(StateRead { key: key.to_owned(), value });
        }
    });
}

/// Takes what was read on this thread since the last time: once before a decision, and once after it, for its receipt.
#[must_use]
pub fn take_state_reads() -> Vec<StateRead> {
    STATE_READS.take()
}

impl std::fmt::Debug for Current {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Current").field("preview", &self.preview).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_ends_where_it_began() {
        assert!(!is_preview());
        let outer = Scope::preview();
        {
            let _inner = Scope::generation(Generation(7));
            assert_eq!((is_preview(), generation()), (true, Some(Generation(7))));
        }
        assert_eq!((is_preview(), generation()), (true, None));
        drop(outer);
        assert!(!is_preview());
    }

    #[test]
    fn a_request_is_named_as_long_as_its_decision_lasts() {
        let name = || with_request(|request| request.map(str::to_owned));
        let outer = Scope::decision(Generation(1), false, Some("a"));
        {
            let _inner = Scope::decision(Generation(2), true, Some("a"));
            let _nobody = Scope::decision(Generation(3), true, None);
            assert_eq!((name().as_deref(), generation()), (Some("a"), Some(Generation(3))));
        }
        assert_eq!((name().as_deref(), is_preview()), (Some("a"), false));
        drop(outer);
        assert_eq!(name(), None);
        let _next = Scope::decision(Generation(1), false, Some("b"));
        assert_eq!(name().as_deref(), Some("b"));
    }

    #[test]
    fn reads_are_bounded_in_number_and_length() {
        let _ = take_state_reads();
        for _ in 0..100 {
            note_state_read("k", Some(&[1; 1_000]));
        }
        let reads = take_state_reads();
        assert_eq!((reads.len(), reads[0].value.as_ref().unwrap().len()), (READS, VALUE));
        assert!(take_state_reads().is_empty());
    }
}
