//! The messages of a body, as parts of a prompt.

use serde::Deserialize;

use crate::core::Piece;

#[derive(Debug, Deserialize)]
pub(super) struct Message {
    #[serde(default)]
    pub(super) role: String,
    #[serde(default)]
    pub(super) content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
pub(super) struct Part {
    #[serde(default)]
    text: Option<String>,
    /// vLLM accepts an object; other forms are not modelled.
    #[serde(default)]
    image_url: Option<ImageUrl>,
}

#[derive(Debug, Deserialize)]
struct ImageUrl {
    url: String,
}

impl Message {
    pub(super) fn pieces(&self) -> Vec<Piece<'_>> {
        match &self.content {
            None => Vec::new(),
            Some(Content::Text(text)) => vec![Piece::Text(text)],
            Some(Content::Parts(parts)) => parts.iter().filter_map(Part::piece).collect(),
        }
    }
}

impl Part {
    fn piece(&self) -> Option<Piece<'_>> {
        let image = self.image_url.as_ref().map(|image| Piece::Image(&image.url));
        image.or_else(|| self.text.as_deref().map(Piece::Text))
    }
}
