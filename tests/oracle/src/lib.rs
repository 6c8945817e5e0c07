//! Pointsman beside NVIDIA Dynamo's KV router (`dynamo-kv-router`), which is the oracle of behaviour H1 and
//! the yardstick of the index: an engine's cache as its events tell it, and both sides' views of it.
//!
//! Nothing here is part of the gateway, and no crate of the gateway depends on it.

pub mod contest;
pub mod cost;
pub mod engine;
pub mod load;
pub mod sides;
pub mod wire;
