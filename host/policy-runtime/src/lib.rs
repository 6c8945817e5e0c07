//! The policy runtime: turns files into loaded policies, runs them within their limits, and keeps slots up to
//! date.
//!
//! Knows WebAssembly and files; knows no HTTP and no requests. The crate `routing` defines the questions for
//! a policy and the meaning of its answers. Nothing here is ever waited for by a request: calls are bounded
//! by a deadline, and loading, rebuilding and dropping happen on threads of their own.

mod access;
mod admission;
mod bindings;
mod cache_key;
mod capacity;
mod catch_panic;
mod chores;
mod compile_child;
mod compiler_process;
mod engine;
mod formula;
mod guest;
mod guest_info;
mod inspect;
mod instance;
mod loaded;
mod log_limit;
mod manager;
mod meter;
mod names;
mod outline;
mod pool;
mod precheck;
mod probe;
mod refusal;
mod shared_modules;
mod slot_log;
mod spec;
mod split;
mod state;
mod sync;
mod ticker;
mod trust;

pub use access::{Access, Grant};
pub use capacity::Capacity;
pub use catch_panic::{PanicHook, panic_hook};
pub use compile_child::run_compiler_process;
pub use compiler_process::{CompileLimits, QuarantinedFile, clear_quarantine, quarantined_files};
pub use engine::{Limits, PolicyEngine};
pub use formula::{FORMULA_SUFFIX, FormulaComponents, FormulaSettings, MAX_FORMULA_FILE_BYTES};
pub use inspect::{Inspection, inspect};
pub use loaded::{CompiledPolicy, LoadCost, LoadedPolicy, compile, digest, load};
pub use manager::{
    Change, ChangeRecord, Command, CommandError, CompilingStatus, InitialContent, LaneStatus, LaneSummary,
    ManagerConfig, ManagerStatus, MemoryStatus, PartRefusal, PartStatus, PolicyDir, PolicyManager, Probation,
    RefusalRecord, ReloadCount, Report, RollbackStatus, SlotConfig, SlotName, SlotState, SlotStatus,
    SlotSummary, Source, UndoneRollback, check_file_name,
};
pub use meter::Usage;
pub use names::{hash_tenants, with_hashed_tenants};
pub use probe::SampleCall;
pub use refusal::Refusal;
pub use slot_log::{PolicyLine, PolicyLines};
pub use spec::{InheritedBy, LaneSpec, Part, Rank, ScorerPart, SlotSpec};
pub use state::{State, StateError, StateQuota};
pub use trust::TrustRules;
