//! What a failed leg means for its worker, for the request (whether another worker may take it, and which one
//! is suspected), and for the client.

pub(crate) mod broken_handoff;
mod failed_leg;
mod failure_text;
mod lateness;
mod missing_model;
pub(crate) mod quarantine;
pub(crate) mod refusals;
pub(crate) mod second_opinion;
pub(crate) mod worker_outcome;
