//! Context of one routing decision, passed to every policy call and from there to every host function that a
//! policy calls.

use crate::{ids::Generation, state_accesses::StateAccesses};

/// Whether a decision takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The choice is booked and acted on.
    Route,
    /// The choice is only reported: no booking, no cursor, no state and no counter changes.
    Preview,
    /// A shadow's answer is compared and dropped: no booking and no cursor changes. Its policies write to the
    /// state that the shadow has of its own.
    Shadow,
}

/// Context of a decision for its callees, and the place where they note accesses to the slot's state.
#[derive(Debug)]
pub struct DecisionContext<'a> {
    purpose: Purpose,
    generation: Option<Generation>,
    request_id: Option<&'a str>,
    state_accesses: Option<&'a mut StateAccesses>,
}

impl<'a> DecisionContext<'a> {
    /// A context without generation and request; state accesses are not noted.
    #[must_use]
    pub fn new(purpose: Purpose) -> Self {
        Self { purpose, generation: None, request_id: None, state_accesses: None }
    }

    /// The same context for a generation of a slot.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Self {
        self.generation = Some(generation);
        self
    }

    /// The same context for a request, by the id that its client knows.
    #[must_use]
    pub(crate) fn with_request_id(mut self, request_id: Option<&'a str>) -> Self {
        self.request_id = request_id;
        self
    }

    /// The same context, in which accesses to the slot's state are noted.
    #[must_use]
    pub(crate) fn with_state_accesses(mut self, accesses: Option<&'a mut StateAccesses>) -> Self {
        self.state_accesses = accesses;
        self
    }

    /// Returns whether the decision takes effect.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The generation that is called, when a slot calls.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.generation
    }

    /// The request's id, when it is known.
    #[must_use]
    pub fn request_id(&self) -> Option<&'a str> {
        self.request_id
    }

    /// Returns the record of accesses to the slot's state; `None`: the decision is not recorded.
    pub fn state_accesses(&mut self) -> Option<&mut StateAccesses> {
        self.state_accesses.as_deref_mut()
    }
}
