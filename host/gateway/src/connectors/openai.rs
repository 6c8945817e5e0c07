//! A plain OpenAI-compatible engine: one leg, the client's body without the reserved fields.

use bytes::Bytes;
use pointsman_orchestration::HandoffKind;

use super::{Connector, LegContext, clean, with_model};
use crate::openai::request::Request;

#[derive(Debug)]
pub(super) struct Openai;

impl Connector for Openai {
    fn handoff(&self) -> Option<HandoffKind> {
        None
    }

    fn single(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        with_model(clean(request), request).finish()
    }
}
