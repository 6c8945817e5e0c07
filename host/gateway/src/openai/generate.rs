//! SGLang's `/generate`: the adapter that a body names, and facts about events and whole answers.
//!
//! Each event repeats the output so far, and has the counts in `meta_info`. A batch's events are about one
//! output each.

use std::sync::LazyLock;

use json_splice::JsonBody;
use memchr::memmem::{self, Finder};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::openai::{
    limits::text_within,
    request_error::{RequestError, read},
    sse::{self, Seen, Usage},
};

/// Maximum length of an adapter's name, bytes.
const MAX_ADAPTER_BYTES: usize = 512;

/// The part of an output that matters here.
#[derive(Deserialize)]
struct Output<'a> {
    #[serde(borrow)]
    meta_info: MetaInfo<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MetaInfo<'a> {
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    prompt_tokens: u32,
    completion_tokens: u32,
    cached_tokens: Option<u32>,
}

/// Why an engine gave an output up.
#[derive(Deserialize)]
struct Abort {
    r#type: String,
    #[serde(default)]
    status_code: Option<u16>,
}

/// Keys of an event, with their colons; made once. A quoted key within a text has escaped quotes, so it is
/// not found.
struct Keys {
    meta_info: Finder<'static>,
    finish_reason: Finder<'static>,
    prompt_tokens: Finder<'static>,
    completion_tokens: Finder<'static>,
    cached_tokens: Finder<'static>,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| Keys {
    meta_info: Finder::new("\"meta_info\":"),
    finish_reason: Finder::new("\"finish_reason\":"),
    prompt_tokens: Finder::new("\"prompt_tokens\":"),
    completion_tokens: Finder::new("\"completion_tokens\":"),
    cached_tokens: Finder::new("\"cached_tokens\":"),
});

/// Usage of the outputs of a batch that have ended.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    ended: u32,
    usage: Usage,
}

/// Returns the adapter that a body names; `None` for a batch, which may name several.
///
/// # Errors
/// [`RequestError`]: the name is too long.
pub(crate) fn adapter(body: &JsonBody) -> Result<Option<String>, RequestError> {
    const FIELD: &str = "lora_path";
    if !body.get(FIELD).is_some_and(|path| path.starts_with('"')) {
        return Ok(None);
    }
    let adapter: Option<String> = read(body, FIELD)?;
    text_within(FIELD, adapter.as_deref().unwrap_or_default(), MAX_ADAPTER_BYTES)?;
    Ok(adapter)
}

/// Looks at one event of a stream. Its usage is that of its output alone.
pub(super) fn event(event: &[u8]) -> Seen {
    let keys = &*KEYS;
    let Some(meta_info) = after(&keys.meta_info, event) else {
        let seen = sse::look(event);
        return Seen { done: seen.done, error: seen.error, ..Seen::default() };
    };
    let finish = after(&keys.finish_reason, meta_info).is_some_and(|value| !value.starts_with(b"null"));
    let count = |key| after(key, meta_info).and_then(number);
    let tokens = count(&keys.completion_tokens);
    let usage = tokens.map(|tokens| Usage {
        prompt_tokens: count(&keys.prompt_tokens).unwrap_or(0),
        completion_tokens: Some(tokens),
        cached_tokens: count(&keys.cached_tokens),
    });
    let token = tokens.is_some_and(|tokens| tokens > 0);
    let error = finish && failed(sse::object(event));
    let may_have_private_fields = finish && sse::has_handoff(event);
    Seen { token, tokens: token.into(), finish, error, usage, may_have_private_fields, ..Seen::default() }
}

/// Looks at a whole answer to a request for `n` outputs of each prompt.
pub(crate) fn whole(n: u32, body: &[u8]) -> Seen {
    let Some(outputs) = outputs(body) else {
        return Seen { error: sse::look(body).error, ..Seen::default() };
    };
    let mut totals = Totals::default();
    outputs.iter().for_each(|output| totals.add(output.meta_info.usage()));
    let usage = (!outputs.is_empty()).then(|| totals.of_prompts(n));
    Seen { error: failed(body), usage, ..Seen::default() }
}

/// Returns whether an output was aborted, in an event's data or a whole answer.
pub(crate) fn was_aborted(json: &[u8]) -> bool {
    aborts(json).is_some_and(|aborts| !aborts.is_empty())
}

/// Returns whether an output was aborted with a status. Without one, a client or an operator aborted the
/// request: its output so far is the answer.
fn failed(json: &[u8]) -> bool {
    aborts(json).is_some_and(|aborts| aborts.iter().any(|abort| abort.status_code.is_some()))
}

fn aborts(json: &[u8]) -> Option<Vec<Abort>> {
    // Almost no answer has one.
    memmem::find(json, b"abort")?;
    let ends = outputs(json)?.into_iter().filter_map(|output| output.meta_info.finish_reason);
    let aborts = ends.filter_map(|end| serde_json::from_str::<Abort>(end.get()).ok());
    Some(aborts.filter(|abort| abort.r#type == "abort").collect())
}

/// The outputs of a whole answer, or of an event: one, or a list for a batch.
fn outputs(json: &[u8]) -> Option<Vec<Output<'_>>> {
    if json.trim_ascii_start().starts_with(b"[") {
        return serde_json::from_slice(json).ok();
    }
    serde_json::from_slice(json).ok().map(|output| vec![output])
}

impl MetaInfo<'_> {
    fn usage(&self) -> Usage {
        let Self { prompt_tokens, completion_tokens, cached_tokens, .. } = *self;
        Usage { prompt_tokens, completion_tokens: Some(completion_tokens), cached_tokens }
    }
}

impl Totals {
    /// Replaces the usage of an event, which is that of one of `items` outputs, by that of the request once
    /// all have ended. `n`: outputs of each prompt.
    pub(crate) fn note(&mut self, seen: &mut Seen, items: u32, n: u32) {
        if items <= 1 {
            return;
        }
        let usage = seen.usage.take().filter(|_| seen.finish);
        if let Some(usage) = usage {
            self.ended += 1;
            self.add(usage);
            seen.usage = (self.ended == items).then(|| self.of_prompts(n));
        }
    }

    fn add(&mut self, more: Usage) {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = &mut self.usage;
        let sum =
            |left: Option<u32>, right: Option<u32>| left.unwrap_or(0).saturating_add(right.unwrap_or(0));
        *prompt_tokens = prompt_tokens.saturating_add(more.prompt_tokens);
        *completion_tokens = Some(sum(*completion_tokens, more.completion_tokens));
        *cached_tokens =
            cached_tokens.or(more.cached_tokens).map(|_| sum(*cached_tokens, more.cached_tokens));
    }

    /// Returns the usage in which each prompt counts once.
    fn of_prompts(&self, n: u32) -> Usage {
        let n = n.max(1);
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = self.usage;
        Usage {
            prompt_tokens: prompt_tokens / n,
            completion_tokens,
            cached_tokens: cached_tokens.map(|tokens| tokens / n),
        }
    }
}

/// What follows the first occurrence of a key.
fn after<'a>(key: &Finder<'_>, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let at = key.find(bytes)?;
    bytes.get(at + key.needle().len()..).map(<[u8]>::trim_ascii_start)
}

/// The number at the beginning of `bytes`.
fn number(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(bytes.get(..digits)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests;
