//! Routing decisions: from facts to one checked and booked choice, with a receipt that explains it.
//!
//! Owns the fact table, the interface of a loaded policy, slots and their generations, the checks of a
//! policy's answer, the native selectors, the receipt and the ring of recorded decisions. Knows neither HTTP
//! nor WebAssembly: `policy-runtime` implements [`Policy`].

pub mod answer_checks;
mod buffers;
mod busy;
mod config;
mod context;
mod cost;
mod decision_facts;
mod decisions;
mod encoding;
pub mod facts;
mod ids;
mod inputs;
mod learning;
mod leg_run;
mod native;
mod outcome;
pub mod pick;
mod policy;
mod program;
mod query;
mod receipt;
mod router;
mod shared_state;
mod short_list;
mod slot;
mod slots;
mod state_accesses;

pub use busy::{BusyByLeg, BusyCandidate, BusyRules, BusyThresholds};
pub use config::{MAX_NUMBER, RouterConfig, RouterConfigOverride};
pub use context::{DecisionContext, Purpose};
pub use cost::{CostTerms, cost};
pub use decisions::{
    DecidedBy, DecisionHeader, DecisionResult, DecisionSummary, Decisions, LegTimes, Outcome, Record,
    StreamFailed,
};
pub use ids::{DecisionId, Generation};
pub use learning::{BatchedLearning, DecisionSource, Learning};
pub use leg_run::{LegFailure, LegRun};
pub use outcome::{Moment, ObservedOutcome};
pub use policy::{
    Call, Decision, Digest, Failure, OnFailure, Origin, Plan, Policy, PolicyInfo, ShedReason, World,
};
pub use query::{AgentProgram, CandidateId, Committed, Pairing, Query, RoutingRequest};
pub use receipt::{Decider, Receipt, RefusedDecision, ShadowAnswer, ShadowResult};
pub use router::{
    OverrideDecision, ReservedPlace, RouteError, RoutePreview, Routed, Router, holder_text, no_worker_text,
};
pub use shared_state::{ChangeRefused, SharedContent, SharedState, Stamp, StateChange};
pub use short_list::MIN_ROWS;
pub use slot::{
    AgreementStats, CALL_BUCKETS_US, CallStats, GenerationHandle, Lane, LastFailure, MIN_IN_A_ROW,
    NativeMode, Normalize, OneWorker, OnlyChoice, Picker, PolicySummary, Program, ProgramSummary,
    ShadowVerdict, Slot, SlotEvent, SlotKind, SlotSnapshot, Trial, WeightedScorer,
};
pub use slots::{SlotSet, Slots};
pub use state_accesses::StateAccesses;
