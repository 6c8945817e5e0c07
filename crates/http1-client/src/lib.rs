#![doc = include_str!("../README.md")]

mod body;
mod call;
pub mod chunked;
mod connection;
mod error;
mod pool;
#[cfg(test)]
mod tests;
pub mod wire;

pub use body::Body;
pub use call::Delivery;
pub use connection::{Connection, Observer, Transport};
pub use error::{CallError, WireError};
pub use pool::{Pool, PoolLimits};
