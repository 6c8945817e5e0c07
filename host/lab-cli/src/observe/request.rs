//! Lengths and salted hashes of a mirrored request: all that is kept of it.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::SystemTime,
};

use bytes::Bytes;
use hyper::HeaderMap;
use json_splice::JsonBody;
use pointsman_lab::TraceRequest;
use pointsman_tokens::{ChatOptions, PromptBytes, Tokenizer};
use prefix_index::{BlockHash, Prefix, Salt};
use tokio::time::Duration;

use super::{counts::Missed, json_text::plain};

/// Headers that name a session.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-dynamo-session-id"];
/// Maximum number of token ids of a prompt, as in the gateway.
const MAX_TOKEN_IDS: usize = 4 * 1024 * 1024;
/// Maximum number of answers that a request counts as.
const MAX_SEQUENCES: u32 = 1_024;

/// Measures prompts, and hashes names and blocks.
#[derive(Debug)]
pub(super) struct Measure {
    /// Number of tokens in a block of the trace.
    pub(super) block_tokens: u32,
    /// Number of bytes that count as a token, for prompts of text.
    pub(super) bytes_per_token: u32,
    /// Tokenizer of the engines' model; without one, text is measured in bytes.
    tokenizer: Option<Tokenizer>,
    /// The salt: random keys of this run (SipHash), which are never written.
    salt: RandomState,
}

/// A mirrored request, before its body is read.
#[derive(Debug)]
pub(super) struct Arrived {
    /// Time of arrival, from the start of the observation.
    pub(super) at: Duration,
    pub(super) endpoint: Endpoint,
    pub(super) session: Option<u64>,
    pub(super) tenant: Option<u64>,
}

/// An endpoint whose requests are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Chat,
    Completions,
}

/// A request without its text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kept {
    /// Its output tokens are not known, and it has no model.
    pub(super) request: TraceRequest,
    /// The model as the client named it, which may be any text.
    pub(super) model: String,
    /// The client's limit of output tokens.
    pub(super) max_tokens: Option<u32>,
    /// Number of answers that the client asks for. An engine counts each like a request.
    pub(super) sequences: u32,
    /// Whether its prompt tokens are estimated from bytes.
    pub(super) is_estimated: bool,
    /// Hashes of the prompt's blocks as the engines' events have them; empty when tokens are not known. They
    /// have no salt and are not written.
    pub(super) hashes: Arc<[BlockHash]>,
}

impl Endpoint {
    pub(super) fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }

    fn prompt_key(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }
}

impl Measure {
    pub(super) fn new(block_tokens: u32, bytes_per_token: u32, tokenizer: Option<Tokenizer>) -> Self {
        Self { block_tokens, bytes_per_token, tokenizer, salt: RandomState::new() }
    }

    /// Returns what is kept of a request's head.
    pub(super) fn head(&self, at: Duration, endpoint: Endpoint, headers: &HeaderMap) -> Arrived {
        let session = SESSION_HEADERS.iter().find_map(|name| headers.get(*name));
        let hash = |value: &hyper::header::HeaderValue| self.salt.hash_one(value.as_bytes());
        let tenant = headers.get(hyper::header::AUTHORIZATION).map(hash);
        Arrived { at, endpoint, session: session.map(hash), tenant }
    }

    /// Returns what is kept of a request. `number` is different for each. The error says why it is not kept:
    /// the body has no single prompt of text or token ids.
    pub(super) fn body(&self, arrived: Arrived, body: Bytes, number: u64) -> Result<Kept, Missed> {
        let body = JsonBody::parse(plain(body)).map_err(|_| Missed::Unreadable)?;
        let body = match arrived.endpoint {
            Endpoint::Chat => body,
            Endpoint::Completions => with_single_prompt(body)?,
        };
        self.measured(arrived, &body, number).ok_or(Missed::Unreadable)
    }

    fn measured(&self, arrived: Arrived, body: &JsonBody, number: u64) -> Option<Kept> {
        let key = arrived.endpoint.prompt_key();
        let prompt = body.get(key)?;
        let salt = body.read::<String>("cache_salt").ok()?;
        let salt = Salt { lora: None, cache: salt.as_deref() };
        let (input_tokens, is_estimated, prefix) = match self.tokens(arrived.endpoint, prompt, body)? {
            Some(ids) => {
                let size = self.block_tokens as usize;
                (u32::try_from(ids.len()).ok()?, false, Prefix::of_tokens(&ids, size, &salt, &[]))
            }
            None => {
                let bytes = self.bytes_per_token.max(1);
                let prompt = match arrived.endpoint {
                    Endpoint::Chat => PromptBytes::of_chat(body, [key], bytes),
                    Endpoint::Completions => PromptBytes::of_text(body, [key], bytes),
                };
                let tokens = u32::try_from(prompt.count()).ok()?.div_ceil(bytes);
                let block_bytes = (self.block_tokens * bytes) as usize;
                (tokens, true, Prefix::of_byte_parts(prompt.parts(), block_bytes, &salt))
            }
        };
        let max_tokens = [body.read::<u32>("max_completion_tokens"), body.read::<u32>("max_tokens")];
        let max_tokens = max_tokens.into_iter().find_map(|limit| limit.ok().flatten());
        let choices = [Some("n"), (arrived.endpoint == Endpoint::Completions).then_some("best_of")];
        let choices = choices.into_iter().flatten().filter_map(|key| body.read::<u32>(key).ok().flatten());
        let sequences = choices.max().unwrap_or(1).clamp(1, MAX_SEQUENCES);
        let named =
            body.read::<String>("user").ok().flatten().map(|user| self.salt.hash_one(user.as_bytes()));
        let request = TraceRequest {
            at: arrived.at,
            input_tokens: input_tokens.max(1),
            output_tokens: 1,
            blocks: self.blocks(&prefix, input_tokens.max(1), number).into(),
            session: arrived.session.or(named).map(|session| format!("{session:016x}")),
            tenant_hash: arrived.tenant,
            ..TraceRequest::default()
        };
        let model = body.read::<String>("model").ok().flatten().unwrap_or_default();
        let hashes = if is_estimated { Arc::default() } else { Arc::clone(prefix.hashes()) };
        Some(Kept { request, model, max_tokens, sequences, is_estimated, hashes })
    }

    /// Returns the token ids of a prompt; `Some(None)` when they are not known, and `None` when it is neither
    /// text nor token ids.
    fn tokens(&self, endpoint: Endpoint, prompt: &str, body: &JsonBody) -> Option<Option<Vec<u32>>> {
        let get = |field: &str| body.get(field);
        match (endpoint, first_element(prompt)) {
            (Endpoint::Completions, Some(b'0'..=b'9')) => {
                let is_short = body.counts(endpoint.prompt_key()).items <= MAX_TOKEN_IDS;
                is_short.then(|| serde_json::from_str(prompt).ok()).flatten().map(Some)
            }
            (Endpoint::Completions, Some(_)) => None,
            (Endpoint::Completions, None) => {
                let text: String = serde_json::from_str(prompt).ok()?;
                let special = get("add_special_tokens").is_none_or(|value| value != "false");
                let encoded = self.tokenizer.as_ref().map(|tokenizer| tokenizer.completion(&text, special));
                Some(encoded.and_then(Result::ok))
            }
            (Endpoint::Chat, _) => {
                let tokenizer = self.tokenizer.as_ref();
                let options = tokenizer.and_then(|_| ChatOptions::read(SystemTime::now(), get).ok());
                let chat =
                    |(tokenizer, options): (&Tokenizer, ChatOptions)| tokenizer.chat(prompt, &options).ok();
                Some(tokenizer.zip(options).and_then(chat))
            }
        }
    }

    /// Returns a salted id for each block of a prompt. Hashes may be further apart than blocks: a block gets
    /// its id from the first hash at or after its end. Blocks after the last hash are shared with no
    /// request.
    fn blocks(&self, prefix: &Prefix, tokens: u32, number: u64) -> Vec<u64> {
        let marks = (1_u32..).zip(prefix.hashes().iter());
        let mut marks = marks.map(|(mark, hash)| (prefix.blocks(mark), hash.0)).peekable();
        (1..=tokens.div_ceil(self.block_tokens))
            .map(|position| {
                while marks.next_if(|(depth, _)| *depth < position).is_some() {}
                match marks.peek().filter(|_| position <= tokens / self.block_tokens) {
                    Some((_, hash)) => self.salt.hash_one((1_u8, hash, position)),
                    None => self.salt.hash_one((2_u8, number, position)),
                }
            })
            .collect()
    }
}

/// Returns a body whose prompt is not a list of prompts. A list of one prompt, as some clients always send,
/// counts as this prompt.
fn with_single_prompt(body: JsonBody) -> Result<JsonBody, Missed> {
    let key = Endpoint::Completions.prompt_key();
    let prompt = body.get(key).ok_or(Missed::Unreadable)?;
    // Token ids are one prompt.
    if !matches!(first_element(prompt), Some(b'"' | b'[')) {
        return Ok(body);
    }
    if body.counts(key).items != 1 {
        return Err(Missed::SeveralPrompts);
    }
    let only = prompt.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or_default();
    let only = only.trim_ascii().to_owned();
    JsonBody::parse(body.edit().set(key, only).finish()).map_err(|_| Missed::Unreadable)
}

/// Returns the first byte after the opening bracket of a list; `None` when the value is not a list.
fn first_element(value: &str) -> Option<u8> {
    value.strip_prefix('[')?.trim_ascii_start().bytes().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(measure: &Measure, endpoint: Endpoint, body: &str, number: u64) -> Option<Kept> {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "Bearer secret-key".parse().unwrap());
        let head = measure.head(Duration::from_secs(1), endpoint, &headers);
        measure.body(head, Bytes::copy_from_slice(body.as_bytes()), number).ok()
    }

    #[test]
    fn equal_prefixes_share_ids_within_a_run_and_none_with_another_run() {
        let (own, other) = (Measure::new(4, 4, None), Measure::new(4, 4, None));
        let first = kept(&own, Endpoint::Completions, r#"{"prompt":[1,2,3,4,5,6,7,8,9]}"#, 0).unwrap();
        let second = kept(&own, Endpoint::Completions, r#"{"prompt":[1,2,3,4,5,6,7,9,9]}"#, 1).unwrap();
        let elsewhere = kept(&other, Endpoint::Completions, r#"{"prompt":[1,2,3,4,5,6,7,8,9]}"#, 0).unwrap();
        let (a, b, c) = (&first.request.blocks, &second.request.blocks, &elsewhere.request.blocks);
        assert_eq!((a.len(), first.request.input_tokens, first.is_estimated), (3, 9, false));
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[2], b[2], "a partial block is shared with no request");
        assert_ne!(a[0], c[0], "the salt is that of the run");
        assert_ne!(first.request.tenant_hash, elsewhere.request.tenant_hash);
    }

    #[test]
    fn the_tools_of_a_chat_are_measured_and_tell_prompts_apart() {
        let measure = Measure::new(16, 4, None);
        let of = |tool: &str| {
            let tools = tool.repeat(1_000);
            let body = format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"tools":["{tools}"]}}"#);
            kept(&measure, Endpoint::Chat, &body, 0).unwrap().request
        };
        let (one, other) = (of("a"), of("b"));
        // H5.6
        assert_eq!((one.input_tokens, other.input_tokens), (259, 259));
        assert_eq!(of("a").blocks[0], one.blocks[0]);
        assert_ne!(one.blocks[0], other.blocks[0]);
    }

    #[test]
    fn text_is_measured_in_bytes_and_has_an_id_for_each_block() {
        let measure = Measure::new(16, 4, None);
        let content = "x".repeat(64 * 100);
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"{content}"}}],"max_tokens":7,"user":"alice"}}"#
        );
        let kept = kept(&measure, Endpoint::Chat, &body, 0).unwrap();
        assert!(kept.is_estimated && kept.max_tokens == Some(7) && kept.request.session.is_some());
        assert_eq!(kept.request.blocks.len(), kept.request.input_tokens.div_ceil(16) as usize);
        let distinct: std::collections::HashSet<_> = kept.request.blocks.iter().collect();
        assert_eq!(distinct.len(), kept.request.blocks.len());
        assert!(!format!("{kept:?}").contains("alice"));
    }

    #[test]
    fn a_tokenizer_counts_the_tokens_of_text_and_hashes_them_as_the_engines_do() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tokens/fixtures/model");
        let tokenizer = Tokenizer::load(model.as_ref()).unwrap();
        let ids = tokenizer.completion("one two three four five six", true).unwrap();
        let measure = Measure::new(2, 4, Some(tokenizer));
        let text =
            kept(&measure, Endpoint::Completions, r#"{"prompt":"one two three four five six"}"#, 0).unwrap();
        assert_eq!((text.request.input_tokens as usize, text.is_estimated), (ids.len(), false));
        let same = serde_json::json!({ "prompt": ids }).to_string();
        assert_eq!(text.hashes, kept(&measure, Endpoint::Completions, &same, 1).unwrap().hashes);
        let chat = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
        let chat = kept(&measure, Endpoint::Chat, chat, 2).unwrap();
        assert!(!chat.is_estimated && chat.request.input_tokens > 0);
    }

    #[test]
    fn a_list_of_one_prompt_is_that_prompt() {
        let measure = Measure::new(4, 4, None);
        let of = |prompt: &str| {
            let body = format!(r#"{{"prompt":{prompt},"n":4,"best_of":5}}"#);
            kept(&measure, Endpoint::Completions, &body, 0).unwrap()
        };
        // S5.13
        for (list, alone) in [(r#"[ "one, two, three, four, five" ]"#, r#""one, two, three, four, five""#)]
            .into_iter()
            .chain([("[[1,2,3,4,5] ]", "[1,2,3,4,5]")])
        {
            assert_eq!(of(list), of(alone), "{list}");
        }
        // S5.14
        assert_eq!(of("[1]").sequences, 5);
        let head = measure.head(Duration::ZERO, Endpoint::Completions, &HeaderMap::new());
        let several = Bytes::from_static(br#"{"prompt":["a","b"]}"#);
        assert_eq!(measure.body(head, several, 0), Err(Missed::SeveralPrompts));
    }

    #[test]
    fn escaped_and_plain_text_are_equal_prompts() {
        let measure = Measure::new(4, 4, None);
        let chat = |text: &str| {
            let body = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]}}"#);
            let kept = kept(&measure, Endpoint::Chat, &body, 0).unwrap();
            (kept.request.input_tokens, kept.request.blocks)
        };
        let (plain, escaped) =
            ("привет \\n 😀 a/b", r"\u043f\u0440\u0438\u0432\u0435\u0442 \n \ud83d\uDE00 a\/b");
        // S5.15
        assert_eq!(chat(&plain.repeat(20)), chat(&escaped.repeat(20)));
    }

    #[test]
    fn what_has_no_single_prompt_is_not_kept() {
        let measure = Measure::new(16, 4, None);
        for body in
            ["", "[]", "{}", r#"{"prompt":["a","b"]}"#, r#"{"prompt":[[1],[2]]}"#, r#"{"prompt":[-1]}"#]
        {
            assert_eq!(kept(&measure, Endpoint::Completions, body, 0), None, "{body}");
        }
        assert!(kept(&measure, Endpoint::Completions, r#"{"prompt":"a"}"#, 0).is_some());
    }
}
