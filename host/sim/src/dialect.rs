//! Handoff protocols, one per file. A protocol parses the handoff fields of a body, determines the leg, and
//! creates the sequences' links. It does not depend on the form of responses ([`crate::wire`]) or on the
//! gateway's connections.

use std::sync::Arc;

use crate::{
    config::{Dialect, Role, SimConfig},
    engine::{Engine, Finish, Local},
    failure::Failure,
    faults::Picked,
    leg::Leg,
    request::Body,
};

mod bootstrap;
mod nixl;

/// Facts about a request for its links.
pub(crate) struct Incoming<'a> {
    pub(crate) engine: &'a Arc<Engine>,
    pub(crate) body: &'a Body,
    pub(crate) faults: &'a Picked,
    /// Id of the response.
    pub(crate) id: &'a str,
    /// Number of sequences: prompts times `n`.
    pub(crate) sequences: usize,
}

/// A handoff protocol.
pub(crate) trait Handshake: Sync {
    /// Determines the leg of a body by its handoff fields and the engine's role.
    fn leg(&self, engine: &Engine, body: &Body) -> Result<Leg, Failure>;

    /// Creates the link of sequence number `index`.
    fn link(
        &self,
        leg: Leg,
        incoming: &Incoming<'_>,
        index: usize,
    ) -> Result<Box<dyn crate::engine::Link>, Failure>;

    /// Returns the fixed output length of a prefill leg; `None` to use the body's.
    fn prefill_answer(&self) -> Option<(u32, Finish)> {
        None
    }
}

/// No handoff: every request is served completely.
struct Plain;

impl Handshake for Plain {
    fn leg(&self, _: &Engine, _: &Body) -> Result<Leg, Failure> {
        Ok(Leg::Aggregated)
    }

    fn link(&self, _: Leg, _: &Incoming<'_>, _: usize) -> Result<Box<dyn crate::engine::Link>, Failure> {
        Ok(Box::new(Local))
    }
}

impl Dialect {
    pub(crate) fn handshake(self) -> &'static dyn Handshake {
        match self {
            Self::Vllm => &nixl::Nixl,
            Self::Sglang => &bootstrap::Bootstrap,
            Self::Openai => &Plain,
        }
    }

    /// Returns the port on which an engine listens for other engines, if any. SGLang engines that may switch
    /// their role always do.
    pub(crate) fn side_port(self, config: &SimConfig) -> Option<u16> {
        match (self, config.role) {
            (Self::Vllm, Role::Prefill) => Some(config.side_port),
            (Self::Sglang, Role::Prefill) => Some(config.bootstrap_port),
            (Self::Sglang, Role::Decode) if config.role_switch => Some(config.bootstrap_port),
            _ => None,
        }
    }
}
