//! Special tokens that a tokenizer adds around a text.

use super::library::encode_text;
use crate::{error::EncodeError, folder::Folder};

/// Tokens before and after a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Frame {
    /// Determines the frame of a model's tokenizer; `None` if it depends on the text.
    pub(crate) fn of(folder: &Folder) -> Result<Option<Self>, EncodeError> {
        if let Some((bos, eos)) = folder.explicit_frame {
            let id = |wanted: bool, name| {
                let token = folder.special.iter().find(|(known, _)| *known == name).filter(|_| wanted);
                token.and_then(|(_, token)| folder.tokenizer.token_to_id(token)).into_iter().collect()
            };
            return Ok(Some(Self { before: id(bos, "bos_token"), after: id(eos, "eos_token") }));
        }
        let mut samples = Vec::new();
        for text in ["", "a", "Two words, 3 marks!", " \n é"] {
            samples.push((
                encode_text(&folder.tokenizer, text, false)?,
                encode_text(&folder.tokenizer, text, true)?,
            ));
        }
        let Some((bare, framed)) = samples.last() else { return Ok(None) };
        let more = framed.len().saturating_sub(bare.len());
        let candidates = (0..=more).filter_map(|before| {
            let (before, rest) = framed.split_at_checked(before)?;
            Some(Self { before: before.to_vec(), after: rest.get(bare.len()..)?.to_vec() })
        });
        Ok(candidates.into_iter().find(|frame| samples.iter().all(|(bare, framed)| frame.fits(bare, framed))))
    }

    pub(crate) fn before(&self) -> &[u32] {
        &self.before
    }

    pub(crate) fn after(&self) -> &[u32] {
        &self.after
    }

    fn fits(&self, bare: &[u32], framed: &[u32]) -> bool {
        [&*self.before, bare, &*self.after].concat() == framed
    }
}
