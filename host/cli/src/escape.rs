//! Escapes what a terminal, or a reader of lines, may take for more than text. It may come from a policy, a
//! file name, an engine or a client.

use std::borrow::Cow;

/// Returns text for a terminal. Line ends and tabs stay.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    let stays = |character: char| matches!(character, '\n' | '\t') || !is_unsafe(character);
    if text.chars().all(stays) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if stays(character) { shown.push(character) } else { shown.extend(character.escape_default()) }
    }
    Cow::Owned(shown)
}

/// Returns whether this is a control character, a line or paragraph separator, or a mark that reorders or
/// hides text.
pub(crate) fn is_unsafe(character: char) -> bool {
    let invisible = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let direction = matches!(character, '\u{2028}'..='\u{202e}');
    character.is_control() || invisible || direction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_text_only() {
        let wild = "a\u{1b}[2J\r\u{9b}1m\u{202e}\u{7f}\n\té漢";
        assert_eq!(escaped(wild), "a\\u{1b}[2J\\r\\u{9b}1m\\u{202e}\\u{7f}\n\té漢");
        assert!(matches!(escaped("plain é漢\n"), Cow::Borrowed(_)));
    }
}
