//! Texts of clients and engines in messages, cut to a length.

/// Maximum length of a text, characters.
const MAX_TEXT: usize = 300;

/// Returns the beginning of a text for an error message.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
