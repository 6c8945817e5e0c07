//! The parts of a `tokenizer.json` that the encoder implements. Everything else is refused with a reason.

use std::collections::HashMap;

use serde::Deserialize;

use crate::{Unsupported, merge::Merges, split::Splitter};

/// Pattern of a byte-level tokenizer without a pattern of its own, from GPT-2.
const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Parts of a tokenizer that the encoder needs.
pub(super) struct Definition {
    /// Whether texts are brought to Unicode's normalization form C.
    pub(super) nfc: bool,
    /// Rules that split a text into words, each applied to the results of those before it.
    pub(super) splits: Vec<Splitter>,
    pub(super) merges: Merges,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Option<Step>,
    #[serde(default)]
    pre_tokenizer: Option<Step>,
    model: Model,
}

/// A step of a normalizer or a pre-tokenizer.
#[derive(Deserialize)]
struct Step {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    normalizers: Vec<Step>,
    #[serde(default)]
    pretokenizers: Vec<Step>,
    #[serde(default)]
    pattern: Option<Pattern>,
    #[serde(default)]
    behavior: String,
    #[serde(default)]
    invert: bool,
    #[serde(default)]
    add_prefix_space: bool,
    #[serde(default)]
    use_regex: Option<bool>,
}

#[derive(Deserialize)]
enum Pattern {
    Regex(String),
    String(String),
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    merges: MergeList,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MergeList {
    Pairs(Vec<(String, String)>),
    Lines(Vec<String>),
}

impl Definition {
    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// The first part that is not supported.
    pub(super) fn read(json: &str) -> Result<Self, Unsupported> {
        let file: File =
            serde_json::from_str(json).map_err(|error| Unsupported(format!("tokenizer.json: {error}")))?;
        let nfc = file.normalizer.map_or(Ok(false), |step| step.is_nfc())?;
        let mut splits = Vec::new();
        let pre_tokenizer =
            file.pre_tokenizer.ok_or_else(|| Unsupported::new("there is no pre_tokenizer"))?;
        if !pre_tokenizer.add_to(&mut splits)? {
            return Err(Unsupported::new("the last pre_tokenizer is not ByteLevel"));
        }
        Ok(Self { nfc, splits, merges: file.model.merges()? })
    }
}

impl Step {
    fn is_nfc(&self) -> Result<bool, Unsupported> {
        match self.kind.as_str() {
            "NFC" => Ok(true),
            "Sequence" => {
                let each: Result<Vec<bool>, Unsupported> =
                    self.normalizers.iter().map(Self::is_nfc).collect();
                Ok(each?.contains(&true))
            }
            other => Err(Unsupported(format!("normalizer `{other}`"))),
        }
    }

    /// Appends the rules of this pre-tokenizer. Returns whether it ended with the conversion to bytes.
    fn add_to(self, splits: &mut Vec<Splitter>) -> Result<bool, Unsupported> {
        match (self.kind.as_str(), self.pattern) {
            ("Sequence", _) => {
                let mut bytes = false;
                for step in self.pretokenizers {
                    if bytes {
                        return Err(Unsupported::new("a pre_tokenizer behind ByteLevel"));
                    }
                    bytes = step.add_to(splits)?;
                }
                Ok(bytes)
            }
            ("ByteLevel", _) if self.add_prefix_space => {
                Err(Unsupported::new("ByteLevel with add_prefix_space"))
            }
            ("ByteLevel", _) => {
                // The key is absent in old files, where the pattern is used.
                if self.use_regex.unwrap_or(true) {
                    splits.push(Splitter::new(GPT2_PATTERN, true)?);
                }
                Ok(true)
            }
            ("Split", Some(Pattern::Regex(pattern))) => {
                let keep_gaps = match (self.behavior.as_str(), self.invert) {
                    ("Isolated", _) => true,
                    ("Removed", true) => false,
                    (other, invert) => {
                        return Err(Unsupported(format!("Split with behavior `{other}`, invert {invert}")));
                    }
                };
                splits.push(Splitter::new(&pattern, keep_gaps)?);
                Ok(false)
            }
            ("Split", Some(Pattern::String(text))) => {
                Err(Unsupported(format!("Split at the string `{text}`")))
            }
            (other, _) => Err(Unsupported(format!("pre_tokenizer `{other}`"))),
        }
    }
}

impl Model {
    fn merges(self) -> Result<Merges, Unsupported> {
        let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if self.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(Unsupported(format!("model `{}`", self.kind.unwrap_or_default())));
        }
        if self.dropout.is_some_and(|dropout| dropout > 0.0) {
            return Err(Unsupported::new("model with dropout"));
        }
        if given(&self.continuing_subword_prefix) || given(&self.end_of_word_suffix) {
            return Err(Unsupported::new("model with a prefix or suffix of words"));
        }
        if self.byte_fallback {
            return Err(Unsupported::new("model with byte_fallback"));
        }
        let pairs = match self.merges {
            MergeList::Pairs(pairs) => pairs,
            MergeList::Lines(lines) => lines
                .into_iter()
                .filter(|line| !line.starts_with("#version"))
                .map(|line| match line.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
                    _ => Err(Unsupported(format!("merge `{line}`"))),
                })
                .collect::<Result<_, _>>()?,
        };
        Merges::new(&self.vocab, &pairs, self.ignore_merges)
    }
}
