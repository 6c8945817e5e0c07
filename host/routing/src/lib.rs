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
mod router;
pub mod scope;
mod slot;
mod slots;
mod summary;

pub use config::RouterConfig;
pub use cost::{CostTerms, cost};
pub use decisions::{
    DecidedBy, DecisionHeader, DecisionId, DecisionResult, DecisionSummary, Decisions, Outcome, Record,
};
pub use learning::{DecisionSource, Learning, Moment, ObservedOutcome};
pub use policy::{
    Call, Decision, Digest, Failure, Origin, Plan, Policy, PolicyInfo, RouterConfigOverride, ShedReason,
    World,
};
pub use query::{CandidateId, Query, RoutingRequest};
pub use receipt::{Decider, Receipt, ShadowResult};
pub use router::{OnFailure, OverrideDecision, RouteError, RoutePreview, Routed, Router};
pub use slot::{
    AgreementStats, CALL_BUCKETS_US, CallStats, Generation, GenerationHandle, Lane, NativeMode, Normalize,
    Picker, Program, ShadowVerdict, Slot, SlotEvent, SlotKind, SlotSnapshot, Trial, WeightedScorer,
};
pub use slots::{SlotSet, Slots};
pub use summary::{PolicySummary, ProgramSummary};
