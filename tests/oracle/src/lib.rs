//! Compares Pointsman with NVIDIA Dynamo's KV router (`dynamo-kv-router`), which is the test oracle for block
//! hashes (H1) and the reference for the index.
//!
//! No crate of the gateway depends on this crate.

pub mod contest;
pub mod cost;
pub mod engine;
pub mod load;
pub mod mix;
pub mod sides;
pub mod wire;
