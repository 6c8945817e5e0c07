//! The places that workers are read from.

pub(crate) mod file;
