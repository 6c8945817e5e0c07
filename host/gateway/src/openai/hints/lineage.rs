//! Place of a request in an agent program (F11).

use http::HeaderMap;

use super::{
    NvExt,
    headers::{SESSION_FINAL, Session, header},
    nvext::AgentContext,
};
use crate::openai::request_error::RequestError;

/// Place of a request in an agent program: a root session with its sub-agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lineage {
    /// Session of the agent.
    pub session: String,
    /// Session that started it.
    pub parent: Option<String>,
    /// Whether it is the last request of its session.
    pub ends: bool,
}

impl Lineage {
    /// Reads the place of a request. A header wins over the body; a request that names only a parent belongs
    /// to the parent's session.
    ///
    /// # Errors
    /// [`RequestError`] names the header that does not parse.
    pub(super) fn parse(
        headers: &HeaderMap,
        named: Session,
        ext: &NvExt,
    ) -> Result<Option<Self>, RequestError> {
        let AgentContext { session_id, parent_session_id, session_final } = &ext.agent_context;
        let controlled = || ext.session_control.as_ref().map(|control| &control.session_id);
        let in_body = session_id.as_ref().or_else(controlled).or(ext.session_id.as_ref());
        let parent = named.parent.or_else(|| parent_session_id.clone());
        let last: Option<bool> = header(headers, &SESSION_FINAL)?;
        let session = named.id.or_else(|| in_body.cloned()).or_else(|| parent.clone());
        let ends = last.or(*session_final).unwrap_or(false);
        Ok(session.map(|session| Self { session, parent, ends }))
    }
}
