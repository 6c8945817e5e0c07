//! SGLang's format (0.5.23 with `--enable-cache-report`). The finish reason of a chat is in a separate chunk,
//! and errors are flat objects.

use super::{Choice, Meta, Shape, Usage, json};
use crate::{
    engine::{Finish, Step},
    failure::Failure,
};

pub(super) struct Sglang;

impl Shape for Sglang {
    fn open(&self, meta: &Meta, index: u32, usage: Option<Usage>) -> Vec<String> {
        vec![chunk(
            meta,
            index,
            r#""delta":{"reasoning_content":null,"role":"assistant","content":""}"#,
            None,
            usage,
        )]
    }

    fn step(&self, meta: &Meta, step: &Step, _: bool, usage: Option<Usage>) -> Vec<String> {
        let text = step.token.map(|_| step.text);
        if !meta.chat {
            return vec![chunk(meta, step.index, &piece(meta, text), step.finish, usage)];
        }
        let mut chunks = Vec::new();
        if text.is_some() {
            chunks.push(chunk(meta, step.index, &piece(meta, text), None, usage));
        }
        if step.finish.is_some() {
            chunks.push(chunk(meta, step.index, &piece(meta, None), step.finish, usage));
        }
        chunks
    }

    fn usage(&self, meta: &Meta, usage: Usage) -> String {
        format!(r#"{},"choices":[],"usage":{}}}"#, meta.chunk_head(), usage_json(usage))
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, _: Option<&str>) -> String {
        let choices: Vec<String> = choices.iter().map(|choice| whole_choice(meta, choice)).collect();
        let (head, choices, usage) = (meta.whole_head(), choices.join(","), usage_json(usage));
        format!(r#"{head},"choices":[{choices}],"usage":{usage},"metadata":{{"weight_version":"default"}}}}"#)
    }

    fn error(&self, failure: &Failure) -> String {
        let (message, kind, param) = (json(&failure.message), json(failure.kind), json(&failure.param));
        let code = failure.status;
        format!(r#"{{"object":"error","message":{message},"type":{kind},"param":{param},"code":{code}}}"#)
    }

    fn error_event(&self, failure: &Failure) -> String {
        format!(r#"{{"error":{}}}"#, self.error(failure))
    }
}

/// Returns a chat's chunk, which omits fields that are not set, except the reasoning.
fn piece(meta: &Meta, text: Option<&str>) -> String {
    match text {
        Some(text) if meta.chat => {
            format!(r#""delta":{{"reasoning_content":null,"content":{}}}"#, json(text))
        }
        None if meta.chat => r#""delta":{"reasoning_content":null}"#.to_owned(),
        _ => format!(r#""text":{}"#, json(text.unwrap_or_default())),
    }
}

fn chunk(meta: &Meta, index: u32, piece: &str, finish: Option<Finish>, usage: Option<Usage>) -> String {
    let usage = match usage {
        Some(usage) => format!(r#","usage":{}"#, usage_json(usage)),
        None if meta.chat => String::new(),
        None => r#","usage":null"#.to_owned(),
    };
    format!(
        r#"{},"choices":[{{"index":{index},{piece},"logprobs":null,"finish_reason":{},"matched_stop":null}}]{usage}}}"#,
        meta.item_head(index),
        Finish::json(finish)
    )
}

fn whole_choice(meta: &Meta, choice: &Choice) -> String {
    let Choice { index, text, finish, .. } = choice;
    let finish = Finish::json(*finish);
    let body = if meta.chat {
        format!(r#""message":{{"role":"assistant","content":"{text}","reasoning_content":null}}"#)
    } else {
        format!(r#""text":"{text}""#)
    };
    format!(r#"{{"index":{index},{body},"logprobs":null,"finish_reason":{finish},"matched_stop":null}}"#)
}

fn usage_json(usage: Usage) -> String {
    let (total, Usage { prompt, completion, cached, .. }) = (usage.total(), usage);
    format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached}}},"reasoning_tokens":0,"completion_tokens_details":null}}"#
    )
}
