//! Encodes with Hugging Face's library.

use crate::error::EncodeError;

/// Longest text that is encoded in one piece, bytes: with Hugging Face's library it takes about a second, in
/// which it cannot be stopped.
pub(super) const MAX_PIECE_BYTES: usize = 4 * 1024 * 1024;

/// Encodes a text with Hugging Face's library.
pub(super) fn encode_text(
    library: &tokenizers::Tokenizer,
    text: &str,
    add_special_tokens: bool,
) -> Result<Vec<u32>, EncodeError> {
    if text.len() > MAX_PIECE_BYTES {
        return Err(EncodeError::TooLong(text.len()));
    }
    let encoding = library.encode_fast(text, add_special_tokens);
    let encoding = encoding.map_err(|error| EncodeError::Tokenizer(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}
