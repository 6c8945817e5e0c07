//! Names of gateways and fleets, which are parts of subjects.

/// Maximum length of the name of a gateway or of a fleet, bytes.
pub const MAX_NAME: usize = 64;

/// Returns whether a text may be the name of a gateway or of a fleet: a part of a subject without wildcards.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(fits)
}
