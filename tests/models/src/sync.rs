//! The `crate::sync` modules of the files under test.

#[path = "../../../host/policy-runtime/src/sync.rs"]
mod policy_runtime;
#[allow(unused_imports, reason = "all files re-export the atomics")]
#[path = "../../../crates/prefix-index/src/sync.rs"]
mod prefix_index;
#[allow(unused_imports, reason = "all files re-export the atomics")]
#[path = "../../../host/workers/src/sync.rs"]
mod workers;

pub(crate) use policy_runtime::*;
pub(crate) use prefix_index::*;
pub(crate) use workers::*;
