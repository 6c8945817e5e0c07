//! Two bounds of the mean time to first token, with which the arms are compared.
//!
//! [`Relaxation`] is a time that no policy can beat. [`search`] looks for an assignment of requests to
//! engines that beats every arm, with knowledge that no router has: it knows all arrivals and lengths, and
//! simulates the consequences of a choice.

pub(crate) use relaxation::{Relaxation, Ways};
pub(crate) use replay::Scene;
pub(crate) use search::search;
pub(crate) use waits::Waits;

mod continued;
mod pooled;
mod relaxation;
mod replay;
mod search;
mod waits;

#[cfg(test)]
mod tests;
