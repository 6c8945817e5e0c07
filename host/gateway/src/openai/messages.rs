//! The messages of a chat.

use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
}

/// Returns whether all content of a list of messages is text. Tokens alone do not describe images and audio.
pub(crate) fn is_text(messages: &str) -> bool {
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(messages) else { return false };
    messages.iter().filter_map(|message| message.content).all(|content| {
        !content.get().starts_with('[')
            || serde_json::from_str::<Vec<Part>>(content.get())
                .is_ok_and(|parts| parts.iter().all(|part| part.kind == "text"))
    })
}
