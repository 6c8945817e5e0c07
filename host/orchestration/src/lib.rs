//! How a request runs on its workers: the rules without I/O, for the gateway and the simulator alike.
//!
//! [`SplitRules`] and [`Splittable`] decide between one worker and two. [`Legs`] orders the legs and handles
//! their failures. [`Attempts`] decides what follows when no worker takes a leg. [`AdmissionQueue`] holds
//! requests while every worker is busy, and [`Sessions`] binds sessions and responses to workers.
//! [`AgentPrograms`] knows which sessions belong together. Time is `tokio::time::Instant`, so that a paused
//! clock drives everything.

pub use admission_queue::{
    Admission, AdmissionQueue, AdmissionRequest, Admit, DEFAULT_OUTPUT_TOKENS, MAX_OUTPUT_ESTIMATE,
    ModelBounds, PausableStream, Place, Pressure, QueueOrder, QueueRules, TenantShare, WorkerWait,
    estimated_output,
};
pub use agent_programs::{AgentPrograms, RUNNING_FOR};
pub use attempts::{AfterRefusal, Attempts, Entry, Parking, Queued, Waiting};
pub use legs::{
    Action, Actions, Event, Failed, HandoffKind, LegOrder, Legs, Lost, PrefillTraits, RetryPolicy, Shape,
};
pub use sessions::{
    BindingKey, CLOSED_FOR, MAX_BINDINGS, Promise, Promises, SessionChange, SessionHolds, Sessions, Stamp,
};
pub use split::{
    NoPair, SplitRules, Splittable, has_pair_without, is_of, is_up, pair_may_take_over, pair_that_is_up,
};

mod admission_queue;
mod agent_programs;
mod attempts;
mod backoff;
mod legs;
mod sessions;
mod split;
