//! Synchronisation primitives of the lock-free code, so that the loom model checker can replace them.
//!
//! Normal builds get std's atomics and `arc-swap`. A program that checks the code compiles the files that
//! import from here with `cfg(loom)`, and supplies the checker's versions as `crate::loom_types`.

#[cfg(loom)]
pub(crate) use crate::loom_types::{ArcSwap, atomic};
#[cfg(not(loom))]
pub(crate) use {arc_swap::ArcSwap, std::sync::atomic};
