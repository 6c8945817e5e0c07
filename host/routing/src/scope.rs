//! Around a decision: what the code below it may know without being handed it, and what it may leave behind.
//!
//! A policy is called synchronously on the thread that decides, so that this is a thread's own and nobody waits for it.

use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
};

use crate::{decisions::state_reads, slot::Generation};

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

/// Notes what a policy found in its slot's state; `None`: nothing. Kept for the receipt where a decision is recorded.
pub fn note_state_read(key: &str, before: Option<&[u8]>) {
    if CURRENT.get().named {
        state_reads::note_read(key, before);
    }
}

/// Notes that a policy writes to its slot's state: what it reads there later in this call is its own.
pub fn note_state_write(key: &str) {
    if CURRENT.get().named {
        state_reads::note_write(key);
    }
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
}
