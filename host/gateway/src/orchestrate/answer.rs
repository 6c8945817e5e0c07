//! The answer of an engine before any of it is passed on: the head and the first event of a stream, the
//! answer of a prefill, and an answer that is not streamed.

pub(crate) mod drain_prefill;
pub(crate) mod first_event;
pub(crate) mod pending_head;
pub(crate) mod whole_answer;
pub(crate) mod whole_estimate;
