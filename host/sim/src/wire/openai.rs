//! Plain OpenAI format, without extensions.

use super::{Choice, Meta, Shape, Usage, json};
use crate::{
    engine::{Finish, Step},
    failure::Failure,
};

pub(super) struct Openai;

impl Shape for Openai {
    fn open(&self, meta: &Meta, index: u32, usage: Option<Usage>) -> Vec<String> {
        vec![chunk(meta, index, r#""delta":{"role":"assistant","content":""}"#, None, usage)]
    }

    fn step(&self, meta: &Meta, step: &Step, _: bool, usage: Option<Usage>) -> Vec<String> {
        let piece = if meta.chat {
            format!(r#""delta":{{"content":"{}"}}"#, step.text)
        } else {
            format!(r#""text":"{}""#, step.text)
        };
        vec![chunk(meta, step.index, &piece, step.finish, usage)]
    }

    fn usage(&self, meta: &Meta, usage: Usage) -> String {
        format!(r#"{},"choices":[],"usage":{}}}"#, meta.chunk_head(), usage_json(usage))
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, _: Option<&str>) -> String {
        let choices: Vec<String> = choices.iter().map(|choice| whole_choice(meta, choice)).collect();
        format!(r#"{},"choices":[{}],"usage":{}}}"#, meta.whole_head(), choices.join(","), usage_json(usage))
    }

    fn error(&self, failure: &Failure) -> String {
        let (message, param) = (json(&failure.message), json(&failure.param));
        let kind = if failure.status < 500 { "invalid_request_error" } else { "server_error" };
        format!(r#"{{"error":{{"message":{message},"type":"{kind}","param":{param},"code":null}}}}"#)
    }
}

fn chunk(meta: &Meta, index: u32, piece: &str, finish: Option<Finish>, usage: Option<Usage>) -> String {
    let usage = usage.map_or_else(String::new, |usage| format!(r#","usage":{}"#, usage_json(usage)));
    format!(
        r#"{},"choices":[{{"index":{index},{piece},"logprobs":null,"finish_reason":{}}}]{usage}}}"#,
        meta.chunk_head(),
        Finish::json(finish)
    )
}

fn whole_choice(meta: &Meta, choice: &Choice) -> String {
    let Choice { index, text, finish, .. } = choice;
    let body = if meta.chat {
        format!(r#""message":{{"role":"assistant","content":"{text}"}}"#)
    } else {
        format!(r#""text":"{text}""#)
    };
    format!(r#"{{"index":{index},{body},"logprobs":null,"finish_reason":{}}}"#, Finish::json(*finish))
}

fn usage_json(usage: Usage) -> String {
    let (total, Usage { prompt, completion, cached, .. }) = (usage.total(), usage);
    format!(
        r#"{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":{cached}}}}}"#
    )
}
