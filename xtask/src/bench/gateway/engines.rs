//! What stands behind the routers of a scenario: engines of this process, a listener each.

use std::net::SocketAddr;

use super::scenario::{Pair, Scenario, Shape};
use crate::engine::{Engine, Pace};

/// A scenario's engines.
#[derive(Debug)]
pub(super) struct Engines {
    /// Of P/D: those that prefill.
    pub(super) prefill: Vec<SocketAddr>,
    /// All others.
    pub(super) serving: Vec<SocketAddr>,
}

impl Engines {
    pub(super) fn start(scenario: &Scenario) -> anyhow::Result<Self> {
        let pace = Pace { event: scenario.pace, events: scenario.events, ..Pace::default() };
        let start = |count: usize, pace: Pace| -> anyhow::Result<Vec<SocketAddr>> {
            (0..count).map(|_| Ok(Engine::start(pace)?.address)).collect()
        };
        Ok(match scenario.shape {
            // A thousand workers are a thousand paths of one engine.
            Shape::Single { workers } if workers > 16 => {
                Self { prefill: Vec::new(), serving: start(1, pace)? }
            }
            Shape::Single { workers } => {
                Self { prefill: Vec::new(), serving: start(workers as usize, pace)? }
            }
            Shape::Disaggregated(pair) => Self {
                prefill: start(2, Pace { sglang_prefill: pair == Pair::Sglang, ..pace })?,
                serving: start(2, pace)?,
            },
        })
    }
}
