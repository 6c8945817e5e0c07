//! The encoder of a model: the fast one where it passes its self-test, else Hugging Face's library.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use byte_bpe::{AddedToken, EncodeError as FastError, Encoder as FastEncoder};

use super::{
    library::{MAX_PIECE_BYTES, encode_text},
    self_test,
};
use crate::{error::EncodeError, folder::Folder};

/// Text with which tests make the fast encoder panic.
#[cfg(test)]
const PANIC: &str = "\u{10fffd}panic";

/// Implementation that encodes the texts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderKind {
    /// The gateway's own encoder for byte-level BPE.
    Fast,
    /// Hugging Face's library.
    HuggingFace,
}

/// Encodes texts as a whole.
pub(crate) struct Backend {
    library: tokenizers::Tokenizer,
    fast: Option<FastEncoder>,
    /// Set when the fast encoder failed: the library serves from then on.
    failed: AtomicBool,
}

impl EncoderKind {
    /// Returns the stable label in metrics and logs.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::HuggingFace => "hugging_face",
        }
    }
}

impl Backend {
    /// Chooses the encoder of a model.
    pub(crate) fn new(folder: Folder, use_fast: bool) -> Self {
        let fast = if use_fast { tested(&folder) } else { Err("disabled".to_owned()) };
        let fast = fast.inspect_err(|reason| {
            tracing::info!(reason, "the fast encoder does not serve this tokenizer; Hugging Face's does");
        });
        Self { library: folder.tokenizer, fast: fast.ok(), failed: AtomicBool::new(false) }
    }

    /// Returns Hugging Face's tokenizer.
    pub(crate) fn library(&self) -> &tokenizers::Tokenizer {
        &self.library
    }

    pub(crate) fn kind(&self) -> EncoderKind {
        match self.fast {
            Some(_) if !self.failed.load(Relaxed) => EncoderKind::Fast,
            _ => EncoderKind::HuggingFace,
        }
    }

    /// Appends the tokens of a text, without special tokens around it.
    pub(crate) fn append(
        &self,
        text: &str,
        stopped: &AtomicBool,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.len() > MAX_PIECE_BYTES {
            return Err(EncodeError::TooLong(text.len()));
        }
        let start = tokens.len();
        if let Some(fast) = self.fast.as_ref().filter(|_| !self.failed.load(Relaxed)) {
            match contained(fast, text, stopped, tokens) {
                Ok(()) => return Ok(()),
                Err(FastError::Stopped) => return Err(EncodeError::Stopped),
                Err(FastError::Failed) => {
                    self.failed.store(true, Relaxed);
                    tokens.truncate(start);
                    tracing::error!(
                        bytes = text.len(),
                        "the fast encoder failed; Hugging Face's serves from now on"
                    );
                }
            }
        }
        tokens.extend(encode_text(&self.library, text, false)?);
        Ok(())
    }
}

/// Returns the fast encoder of a model if it has the same tokens as Hugging Face's library, else the reason.
fn tested(folder: &Folder) -> Result<FastEncoder, String> {
    if folder.split_special_tokens {
        return Err("split_special_tokens".to_owned());
    }
    let mut added: Vec<_> = folder.tokenizer.get_added_tokens_decoder().into_iter().collect();
    added.sort_by_key(|(id, _)| *id);
    let of_encoder = added.iter().map(|(id, token)| AddedToken {
        id: *id,
        content: &token.content,
        normalized: token.normalized,
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
    });
    let fast = FastEncoder::new(&folder.json, &of_encoder.collect::<Vec<_>>())
        .map_err(|unsupported| unsupported.to_string())?;
    let contents: Vec<&str> = added.iter().map(|(_, token)| token.content.as_str()).collect();
    let encode = |text: &str| {
        let mut tokens = Vec::new();
        contained(&fast, text, &AtomicBool::new(false), &mut tokens).ok().map(|()| tokens)
    };
    match self_test::difference(&folder.tokenizer, &contents, encode).map_err(|error| error.to_string())? {
        Some(text) => {
            tracing::warn!(?text, "self-test: the fast encoder has other tokens than Hugging Face's");
            Err("self-test failed".to_owned())
        }
        None => Ok(fast),
    }
}

/// Encodes with the fast encoder. A panic is a failure.
fn contained(
    fast: &FastEncoder,
    text: &str,
    stopped: &AtomicBool,
    tokens: &mut Vec<u32>,
) -> Result<(), FastError> {
    // The encoder drops the buffers of a call that panics, and the caller its tokens.
    let encode = || {
        #[cfg(test)]
        assert!(!text.contains(PANIC), "as the test asks for");
        fast.encode(text, stopped, tokens)
    };
    catch_unwind(AssertUnwindSafe(encode)).unwrap_or(Err(FastError::Failed))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn folder() -> Folder {
        Folder::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/model")).unwrap()
    }

    fn append(backend: &Backend, text: &str) -> Vec<u32> {
        let mut tokens = vec![7];
        backend.append(text, &AtomicBool::new(false), &mut tokens).unwrap();
        tokens.split_off(1)
    }

    #[test]
    fn h7_an_encoder_with_other_tokens_fails_the_self_test_and_the_library_serves() {
        let mut changed = folder();
        let mut json: serde_json::Value = serde_json::from_str(&changed.json).unwrap();
        json["model"]["merges"].as_array_mut().unwrap().swap(0, 200);
        changed.json = json.to_string();
        let reason = tested(&changed).err().unwrap();
        assert_eq!(reason, "self-test failed");
        let (changed, good) = (Backend::new(changed, true), Backend::new(folder(), true));
        // H7.2
        assert_eq!((changed.kind(), good.kind()), (EncoderKind::HuggingFace, EncoderKind::Fast));
        let text = "There are two encoders, and the others' tokens count.";
        assert_eq!(append(&changed, text), append(&good, text));
        assert_eq!(Backend::new(folder(), false).kind(), EncoderKind::HuggingFace);
    }

    #[test]
    fn h7_a_panic_of_the_fast_encoder_hands_the_text_and_all_later_ones_to_the_library() {
        let backend = Backend::new(folder(), true);
        let text = format!("before {PANIC} behind");
        assert_eq!(backend.kind(), EncoderKind::Fast);
        assert_eq!(append(&backend, &text), encode_text(backend.library(), &text, false).unwrap());
        assert_eq!(backend.kind(), EncoderKind::HuggingFace);
        assert_eq!(append(&backend, "later"), encode_text(backend.library(), "later", false).unwrap());
    }

    #[test]
    fn a_stopped_encode_ends_early_and_a_text_beyond_the_limit_is_refused() {
        let backend = Backend::new(folder(), true);
        let stopped = AtomicBool::new(true);
        let encode = |text: &str| backend.append(text, &stopped, &mut Vec::new());
        assert_eq!(encode("two words"), Err(EncodeError::Stopped));
        assert_eq!(encode(&"a".repeat(MAX_PIECE_BYTES)), Err(EncodeError::Stopped));
        assert_eq!(backend.kind(), EncoderKind::Fast);
        let long = "a".repeat(MAX_PIECE_BYTES + 1);
        assert_eq!(encode(&long), Err(EncodeError::TooLong(MAX_PIECE_BYTES + 1)));
    }
}
