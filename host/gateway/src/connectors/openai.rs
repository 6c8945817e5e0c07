//! A plain OpenAI-compatible engine: one leg, the client's body without the reserved fields.

use super::{Connector, HandoffKind};

/// The dialect.
#[derive(Debug)]
pub(super) struct Openai;

impl Connector for Openai {
    fn handoff(&self) -> Option<HandoffKind> {
        None
    }
}
