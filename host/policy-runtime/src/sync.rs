//! Synchronisation primitives of the epoch's clock, so that the loom model checker can replace them.
//!
//! `tests/models` compiles the files that import from here with `cfg(loom)` and supplies the checker's
//! versions as
//! `crate::loom_types`.

#[cfg(loom)]
pub(crate) use crate::loom_types::{atomic, thread};
#[cfg(not(loom))]
pub(crate) use std::{sync::atomic, thread};
