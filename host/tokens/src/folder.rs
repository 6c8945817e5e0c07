//! Reads a Hugging Face model directory: the files and keys that transformers reads, and nothing else.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::Deserialize;
use tokenizers::AddedToken;

use crate::error::TokenizerError;

/// Special tokens that templates use by name.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Content of a model directory.
pub(crate) struct Folder {
    /// Content of `tokenizer.json`.
    pub(crate) json: String,
    /// The tokenizer with all added tokens, without truncation and padding.
    pub(crate) tokenizer: tokenizers::Tokenizer,
    /// Special tokens by name.
    pub(crate) special: Vec<(&'static str, String)>,
    /// Whether bos and eos are added around a text, if the configuration specifies it.
    pub(crate) explicit_frame: Option<(bool, bool)>,
    /// Whether special tokens in a text are treated as ordinary text.
    pub(crate) split_special_tokens: bool,
    /// Templates by name, each with its file.
    pub(crate) templates: BTreeMap<String, (PathBuf, String)>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    chat_template: Option<Templates>,
    added_tokens_decoder: Option<BTreeMap<String, Token>>,
    additional_special_tokens: Option<Vec<Token>>,
    extra_special_tokens: Option<serde_json::Value>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    split_special_tokens: bool,
    #[serde(flatten)]
    rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Full(Full),
}

#[derive(Clone, Deserialize)]
struct Full {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Folder {
    /// Reads a directory.
    pub(crate) fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let text = read(&path)?;
        let mut tokenizer =
            tokenizers::Tokenizer::from_str(&text).map_err(|error| TokenizerError::invalid(&path, error))?;
        // Engines ignore both as well: the files often hold what the model was trained or converted with.
        let whole = tokenizer.with_truncation(None).map(|_| ());
        whole.map_err(|error| TokenizerError::invalid(&path, error))?;
        tokenizer.with_padding(None);

        let config_path = folder.join("tokenizer_config.json");
        let mut config: Config = match optional(&config_path)? {
            Some(text) => parse(&config_path, &text)?,
            None => Config::default(),
        };
        if config.added_tokens_decoder.is_none() {
            let path = folder.join("special_tokens_map.json");
            if let Some(text) = optional(&path)? {
                config.rest.extend(parse::<BTreeMap<String, serde_json::Value>>(&path, &text)?);
            }
        }
        let named = config.named(&config_path)?;
        let tokens = config.tokens(&config_path, &named)?;
        add_missing(&mut tokenizer, &tokens).map_err(|error| TokenizerError::invalid(&config_path, error))?;
        let special = named.into_iter().map(|(name, token)| (name, token.content)).collect();
        let explicit = config.add_bos_token.is_some() || config.add_eos_token.is_some();
        let flag = |flag: Option<bool>| flag.unwrap_or(false);
        let frame = (flag(config.add_bos_token), flag(config.add_eos_token));
        let mut templates = template_files(folder)?;
        if templates.is_empty() {
            templates = config.chat_template.map(|found| found.by_name(&config_path)).unwrap_or_default();
        }
        tokenizer.set_encode_special_tokens(config.split_special_tokens);
        Ok(Self {
            json: text,
            tokenizer,
            special,
            explicit_frame: explicit.then_some(frame),
            split_special_tokens: config.split_special_tokens,
            templates,
        })
    }
}

impl Config {
    fn named(&self, path: &Path) -> Result<Vec<(&'static str, AddedToken)>, TokenizerError> {
        let mut named = Vec::new();
        for name in NAMED {
            let found = self.rest.get(name).filter(|value| !value.is_null()).cloned();
            let token = found.map(serde_json::from_value::<Token>).transpose();
            let token = token.map_err(|error| TokenizerError::invalid(path, format!("{name}: {error}")))?;
            named.extend(token.map(|token| (name, token.added(true))));
        }
        Ok(named)
    }

    /// Returns the tokens that the configuration adds to the tokenizer, in the order in which transformers
    /// adds them.
    fn tokens(
        &self,
        path: &Path,
        named: &[(&'static str, AddedToken)],
    ) -> Result<Vec<AddedToken>, TokenizerError> {
        let mut by_id: Vec<(u32, AddedToken)> = Vec::new();
        for (id, token) in self.added_tokens_decoder.iter().flatten() {
            let problem =
                || TokenizerError::invalid(path, format!("added_tokens_decoder: `{id}` is not a token id"));
            by_id.push((id.parse().map_err(|_| problem())?, token.clone().added(false)));
        }
        by_id.sort_by_key(|(id, _)| *id);
        let extra = self.extra_special_tokens.as_ref().and_then(serde_json::Value::as_array);
        let extra = extra.into_iter().flatten().filter_map(|token| Token::deserialize(token).ok());
        let extra = self.additional_special_tokens.iter().flatten().cloned().chain(extra);
        let special =
            named.iter().map(|(_, token)| token.clone()).chain(extra.map(|token| token.added(true)));
        let mut tokens: Vec<AddedToken> = by_id.into_iter().map(|(_, token)| token).collect();
        for token in special {
            match tokens.iter_mut().find(|known| known.content == token.content) {
                Some(known) => known.special = true,
                None => tokens.push(token),
            }
        }
        Ok(tokens)
    }
}

impl Templates {
    fn by_name(self, path: &Path) -> BTreeMap<String, (PathBuf, String)> {
        let named = match self {
            Self::One(template) => vec![Named { name: "default".to_owned(), template }],
            Self::Named(named) => named,
        };
        named.into_iter().map(|named| (named.name, (path.to_owned(), named.template))).collect()
    }
}

impl Token {
    fn added(self, special: bool) -> AddedToken {
        match self {
            Self::Text(content) => AddedToken::from(content, true),
            Self::Full(full) => AddedToken {
                single_word: full.single_word,
                lstrip: full.lstrip,
                rstrip: full.rstrip,
                normalized: full.normalized.unwrap_or(!(special || full.special)),
                special: special || full.special,
                content: full.content,
            },
        }
    }
}

/// Adds the tokens that the tokenizer does not have. A named token may lack flags, so it is present if its
/// content is. A token of the decoder table replaces one with other flags.
fn add_missing(tokenizer: &mut tokenizers::Tokenizer, tokens: &[AddedToken]) -> tokenizers::Result<()> {
    let known: Vec<String> =
        tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
    let missing: Vec<AddedToken> =
        tokens.iter().filter(|token| !known.contains(&token.content)).cloned().collect();
    tokenizer.add_tokens(missing).map(|_| ())
}

/// Reads `chat_template.jinja` and `additional_chat_templates/*.jinja`.
fn template_files(folder: &Path) -> Result<BTreeMap<String, (PathBuf, String)>, TokenizerError> {
    let mut templates = BTreeMap::new();
    let path = folder.join("chat_template.jinja");
    if let Some(text) = optional(&path)? {
        templates.insert("default".to_owned(), (path, text));
    }
    let more = folder.join("additional_chat_templates");
    let entries = match fs::read_dir(&more) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(templates),
        Err(error) => return Err(TokenizerError::Read { path: more, error }),
    };
    for entry in entries {
        let path = entry.map_err(|error| TokenizerError::Read { path: more.clone(), error })?.path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = read(&path)?;
            templates.insert(name, (path, text));
        }
    }
    Ok(templates)
}

fn read(path: &Path) -> Result<String, TokenizerError> {
    fs::read_to_string(path).map_err(|error| TokenizerError::Read { path: path.to_owned(), error })
}

fn optional(path: &Path) -> Result<Option<String>, TokenizerError> {
    match read(path) {
        Err(TokenizerError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T, TokenizerError> {
    serde_json::from_str(text).map_err(|error| TokenizerError::invalid(path, error))
}
