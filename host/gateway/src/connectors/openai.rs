//! A plain OpenAI-compatible engine: one leg, the client's body without the reserved fields.

use pointsman_orchestration::HandoffKind;

use super::Connector;

/// The dialect.
#[derive(Debug)]
pub(super) struct Openai;

impl Connector for Openai {
    fn handoff(&self) -> Option<HandoffKind> {
        None
    }
}
