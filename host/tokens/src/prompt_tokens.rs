//! Tokens of a prompt, in segments that prompts share.

use std::sync::Arc;

/// Tokens of a prompt. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct PromptTokens {
    segments: Arc<[TokenSegment]>,
    count: usize,
}

/// A part of the tokens of a prompt.
#[derive(Clone, Debug)]
pub struct TokenSegment {
    id: Option<u128>,
    tokens: Arc<[u32]>,
}

impl PromptTokens {
    pub(crate) fn new(segments: Vec<TokenSegment>) -> Self {
        let count = segments.iter().map(|segment| segment.tokens.len()).sum();
        Self { segments: segments.into(), count }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the segments in their order.
    #[must_use]
    pub fn segments(&self) -> &[TokenSegment] {
        &self.segments
    }

    /// Returns all tokens.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.count);
        self.segments.iter().for_each(|segment| tokens.extend_from_slice(&segment.tokens));
        tokens
    }
}

impl From<Vec<u32>> for PromptTokens {
    fn from(tokens: Vec<u32>) -> Self {
        Self::new(vec![TokenSegment { id: None, tokens: tokens.into() }])
    }
}

impl TokenSegment {
    pub(crate) fn new(id: Option<u128>, tokens: Arc<[u32]>) -> Self {
        Self { id, tokens }
    }

    /// Returns a random number that identifies this segment with all tokens before it, for as long as the
    /// tokenizer lives. `None` if the segment may not occur again.
    #[must_use]
    pub fn id(&self) -> Option<u128> {
        self.id
    }

    /// Returns the tokens of this segment alone.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn shared(&self) -> &Arc<[u32]> {
        &self.tokens
    }
}
