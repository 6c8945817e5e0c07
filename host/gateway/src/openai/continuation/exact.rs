//! The rest of an answer from token ids. Its engine generates what the first one would have: no text is
//! divided into tokens again.

use std::sync::Arc;

use json_splice::JsonBody;

use super::stop_strings;
use crate::openai::{
    chunk::Reason,
    messages::is_text,
    request::{Endpoint, Request},
    transcript::{DeliveredIds, StopRules},
};

/// The tokens from which an engine generates the rest of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The ids of the prompt and of the output that is kept, as a JSON list.
    pub(crate) ids: Arc<str>,
    /// Number of its tokens.
    pub(crate) tokens: u32,
    /// Output tokens among them.
    pub(crate) kept: u32,
    /// The text with which the rest begins, because the client has it already.
    pub(crate) again: String,
    /// Whether an engine that ignores ids may begin from the text, which the request has, too.
    pub(crate) or_text: bool,
}

/// Returns how far texts lag behind tokens because of the stop strings of a body.
pub(super) fn stop_rules(body: &JsonBody) -> StopRules {
    let longest = stop_strings(body).iter().map(|stop| stop.chars().count()).max().unwrap_or(0);
    let sent_at_once = body.get("include_stop_str_in_output") == Some("true");
    StopRules { overlap: u32::try_from(longest.saturating_sub(1)).unwrap_or(u32::MAX), sent_at_once }
}

/// Returns from which tokens the rest of an answer begins. `text`: what was delivered. `fits`: the rest could
/// begin from the text, too.
///
/// # Errors
/// The tokens do not stand for the whole prompt.
pub(super) fn origin(
    request: &Request,
    delivered: &DeliveredIds<'_>,
    text: &str,
    fits: bool,
) -> Result<Origin, Reason> {
    let is_chat = request.endpoint == Endpoint::ChatCompletions;
    if is_chat && !is_text(request.body.get("messages").unwrap_or_default()) {
        return Err("not_text_only");
    }
    let DeliveredIds { prompt, output, start } = delivered;
    let kept = output.get(..start.kept as usize).ok_or("token_ids")?;
    let ids: Vec<u32> = prompt.iter().chain(kept).copied().collect();
    let again = text.char_indices().rev().take(start.again as usize).last();
    Ok(Origin {
        tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX),
        ids: serde_json::to_string(&ids).map_err(|_| "token_ids")?.into(),
        kept: start.kept,
        again: again.and_then(|(at, _)| text.get(at..)).unwrap_or_default().to_owned(),
        or_text: is_chat && fits && start.again == 0 && kept.len() == output.len(),
    })
}
