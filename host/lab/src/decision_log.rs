//! Reads the gateway's decision log, and turns it into traces.

pub use export::ExportArgs;

mod convert;
mod export;
mod ran;
pub(crate) mod reader;
pub(crate) mod time;

#[cfg(test)]
mod tests;
