//! SGLang's format: the finish reason is in a separate chunk, and errors are flat objects.

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
            r#""delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null}"#,
            None,
            usage,
        )]
    }

    fn step(&self, meta: &Meta, step: &Step, _: bool, usage: Option<Usage>) -> Vec<String> {
        let mut chunks = Vec::new();
        if step.token.is_some() {
            chunks.push(chunk(meta, step.index, &piece(meta, Some(step.text)), None, usage));
        }
        if step.finish.is_some() {
            let nothing = if meta.chat { None } else { Some("") };
            chunks.push(chunk(meta, step.index, &piece(meta, nothing), step.finish, usage));
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

fn piece(meta: &Meta, text: Option<&str>) -> String {
    let text = json(&text);
    if meta.chat {
        format!(r#""delta":{{"role":null,"content":{text},"reasoning_content":null,"tool_calls":null}}"#)
    } else {
        format!(r#""text":{text}"#)
    }
}

fn chunk(meta: &Meta, index: u32, piece: &str, finish: Option<Finish>, usage: Option<Usage>) -> String {
    let usage = usage.map_or_else(|| "null".to_owned(), usage_json);
    format!(
        r#"{},"choices":[{{"index":{index},{piece},"logprobs":null,"finish_reason":{},"matched_stop":null}}],"usage":{usage}}}"#,
        meta.chunk_head(),
        Finish::json(finish)
    )
}

fn whole_choice(meta: &Meta, choice: &Choice) -> String {
    let Choice { index, text, finish, .. } = choice;
    let finish = Finish::json(*finish);
    let body = if meta.chat {
        format!(
            r#""message":{{"role":"assistant","content":"{text}","reasoning_content":null,"tool_calls":null}}"#
        )
    } else {
        format!(r#""text":"{text}""#)
    };
    format!(r#"{{"index":{index},{body},"logprobs":null,"finish_reason":{finish},"matched_stop":null}}"#)
}

fn usage_json(usage: Usage) -> String {
    let (total, Usage { prompt, completion, cached, .. }) = (usage.total(), usage);
    format!(
        r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached}}},"reasoning_tokens":0}}"#
    )
}
