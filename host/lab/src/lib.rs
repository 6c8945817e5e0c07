//! The lab: runs request traces through the production router and policies over modelled engines, in virtual
//! time.
//!
//! An [`Arm`] is one way to route: a native mode or compiled policies. The lab gives each arm the same trace
//! and the same fleet, and measures the times that a client would have seen. Routing is not modelled: the lab
//! calls `pointsman_routing::Router`, the policy runtime, the prefix index, bookings and the registry, all on
//! the paused clock of a tokio runtime. Only engines and links are models ([`pointsman_sim::core`]).

pub use arm::{Arm, ArmError};
pub use arrivals::ArrivalUnit;
pub use fleet::{
    EngineGroup, Fleet, FleetError, GatewayGroup, Links, Outage, Probe, Queue, Routing, StepTimeSpec,
};
pub use max_load::{ArmMaxLoad, MaxLoad, max_load};
pub use monitor::Monitor;
pub use observed::{Window, WindowFit, fit_windows, run_observed};
pub use outcome::{Ended, Outcome};
pub use output_file::output_file;
pub use report::{
    ArmReport, Clairvoyant, Comparison, DecisionCost, Events, Figure, Figures, PairDifference, Plan,
    Possible, Quantiles, RankBy, Ranked, RoleShares, Slo, compare,
};
pub use run::{Draws, DrawsError, ExchangedMessages, RunError, RunOptions, RunResult, run, run_with_draws};
pub use study::Study;
pub use trace::{
    BlockIds, MAX_LINE, MAX_TOKENS, MAX_TURNS, Targets, Trace, TraceError, TraceFormat, TraceRequest,
};

pub mod calibrate;
pub mod cli;
pub mod decision_log;
pub mod generate;
pub mod html;
pub mod text;

mod arm;
mod arrivals;
mod ceiling;
mod engines;
mod fleet;
mod jobs;
mod max_load;
mod monitor;
mod observed;
mod outcome;
mod output_file;
mod prepared;
mod report;
mod run;
mod stats;
mod study;
mod trace;
