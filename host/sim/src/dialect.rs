//! Handshakes, one a file. A dialect reads the handoff fields of a body, says which leg it is, and makes the sequences'
//! links. It must not know the shape of answers ([`crate::wire`]) nor touch a socket of the gateway's.

use std::sync::Arc;

use crate::{
    config::{Dialect, Leg, Role},
    engine::{Engine, Finish, Local},
    failure::Failure,
    faults::Picked,
    http::Body,
};

mod bootstrap;
mod nixl;

/// What a link may need to know about its request.
pub(crate) struct Incoming<'a> {
    pub(crate) engine: &'a Arc<Engine>,
    pub(crate) body: &'a Body,
    pub(crate) faults: &'a Picked,
    /// The id of the response.
    pub(crate) id: &'a str,
    /// Sequences of the request: prompts times `n`.
    pub(crate) sequences: usize,
}

/// A handshake.
pub(crate) trait Handshake: Sync {
    /// Which leg a body is, by its handoff fields and the engine's role.
    fn leg(&self, engine: &Engine, body: &Body) -> Result<Leg, Failure>;

    /// The link of sequence number `index`.
    fn link(
        &self,
        leg: Leg,
        incoming: &Incoming<'_>,
        index: usize,
    ) -> Result<Box<dyn crate::engine::Link>, Failure>;

    /// How long a prefill leg's answer is, whatever the body asks for; `None`: as long as asked.
    fn prefill_answer(&self) -> Option<(u32, Finish)> {
        None
    }
}

/// No handshake: every request is served whole.
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

    /// Whether an engine of this role listens for other engines, and on which port.
    pub(crate) fn side_port(self, role: Role, side: u16, bootstrap: u16) -> Option<u16> {
        match (self, role) {
            (Self::Vllm, Role::Prefill) => Some(side),
            (Self::Sglang, Role::Prefill) => Some(bootstrap),
            _ => None,
        }
    }
}
