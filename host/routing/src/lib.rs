//! The decision: facts in, one checked and booked choice out, with a receipt that says why.
//!
//! Owns the fact table, the trait a loaded policy fills, slots and their generations, the checks on a policy's
//! answer, the native selectors and the receipt. Knows no HTTP and no Wasm: `policy-runtime` fills [`Policy`].

mod check;
mod config;
mod cost;
mod decisions;
pub mod facts;
mod learning;
mod native;
pub mod pick;
mod policy;
mod program;
mod query;
mod receipt;
mod recipe;
mod router;
pub mod scope;
mod slot;
mod slots;

pub use config::RouterConfig;
pub use cost::{CostTerms, cost};
pub use decisions::{Brief, By, DecisionId, Decisions, Ending, Head, Outcome, Record};
pub use learning::{Asked, Learning, Moment, Observed};
pub use policy::{
    Call, Decision, Digest, Failure, Origin, Plan, Policy, PolicyInfo, RouterConfigOverride, ShedReason,
    World,
};
pub use query::{CandidateId, Query, Subject};
pub use receipt::{Decider, Receipt, Shadowed};
pub use recipe::{Recipe, Step};
pub use router::{Explained, OnFailure, Planned, RouteError, Routed, Router};
pub use slot::{
    Active, Agreement, CALL_BUCKETS_US, CallStats, Generation, Lineup, Mode, NativeMode, Normalize, Opinion,
    Picker, Program, Slot, SlotEvent, SlotKind, Trial, WeightedScorer,
};
pub use slots::{SlotSet, Slots};
