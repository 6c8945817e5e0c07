//! The host's `crate::sync` modules, from their own files.

#[path = "../../../host/policy-runtime/src/sync.rs"]
mod policy_runtime;
#[allow(unused_imports, reason = "both files re-export the atomics")]
#[path = "../../../host/workers/src/sync.rs"]
mod workers;

pub(crate) use policy_runtime::*;
pub(crate) use workers::*;
