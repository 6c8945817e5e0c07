//! vLLM 0.32's format, as recorded, with the same keys in the same order.

use std::fmt::Write as _;

use super::{Choice, Meta, Shape, Usage, json};
use crate::{
    engine::{Finish, Step},
    failure::Failure,
};

pub(super) struct Vllm;

impl Shape for Vllm {
    fn open(&self, meta: &Meta, index: u32, usage: Option<Usage>) -> Vec<String> {
        let (head, usage, ids) = (meta.chunk_head(), running_usage(usage), meta.prompt_ids(index));
        vec![format!(
            r#"{head},"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{usage},"prompt_token_ids":{ids},"prompt_text":null}}"#
        )]
    }

    fn step(&self, meta: &Meta, step: &Step, first: bool, usage: Option<Usage>) -> Vec<String> {
        let Step { index, text, .. } = step;
        let finish = Finish::json(step.finish);
        let ids = meta.ids(step.token.as_slice());
        let mut out = meta.chunk_head();
        let _ = if meta.chat {
            // Only the last chunk contains `stop_reason`, which is null.
            let stop = if step.finish.is_some() { r#""stop_reason":null,"# } else { "" };
            write!(
                out,
                r#","choices":[{{"index":{index},"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":{finish},{stop}"token_ids":{ids}}}]"#
            )
        } else {
            let prompt = if first { meta.prompt_ids(*index) } else { "null".to_owned() };
            write!(
                out,
                r#","choices":[{{"index":{index},"text":"{text}","logprobs":null,"finish_reason":{finish},"stop_reason":null,"prompt_token_ids":{prompt},"token_ids":{ids}}}]"#
            )
        };
        out += &running_usage(usage);
        if step.finish.is_some() && !meta.include_usage {
            out += &fingerprint(meta);
        }
        out.push('}');
        vec![out]
    }

    fn usage(&self, meta: &Meta, usage: Usage) -> String {
        let mut details = format!(r#""cached_tokens":{}"#, usage.cached);
        if meta.chat {
            let _ = write!(details, r#","created_cache_tokens":{}"#, usage.created_cache);
        }
        let (head, counts, fingerprint) = (meta.chunk_head(), counts(usage), fingerprint(meta));
        format!(
            r#"{head},"choices":[],"usage":{{{counts},"prompt_tokens_details":{{{details}}}}}{fingerprint}}}"#
        )
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], usage: Usage, params: Option<&str>) -> String {
        let choices: Vec<String> = choices.iter().map(|choice| whole_choice(meta, choice)).collect();
        let created = if meta.chat { usage.created_cache.to_string() } else { "null".to_owned() };
        let details = format!(
            r#""prompt_tokens_details":{{"cached_tokens":{},"created_cache_tokens":{created},"multimodal_tokens":null}},"completion_tokens_details":null"#,
            usage.cached
        );
        let prompt = if meta.chat {
            format!(r#","prompt_logprobs":null,"prompt_token_ids":{},"prompt_text":null"#, meta.prompt_ids(0))
        } else {
            String::new()
        };
        let (head, choices, counts) = (meta.whole_head(), choices.join(","), counts(usage));
        let (fingerprint, params) = (fingerprint(meta), params.unwrap_or("null"));
        format!(
            r#"{head},"choices":[{choices}],"service_tier":null{fingerprint},"usage":{{{counts},{details}}}{prompt},"kv_transfer_params":{params},"ec_transfer_params":null,"metrics":null}}"#
        )
    }

    fn error(&self, failure: &Failure) -> String {
        let (message, kind, param) = (json(&failure.message), json(failure.kind), json(&failure.param));
        format!(
            r#"{{"error":{{"message":{message},"type":{kind},"param":{param},"code":{}}}}}"#,
            failure.status
        )
    }
}

fn whole_choice(meta: &Meta, choice: &Choice) -> String {
    let Choice { index, text, tokens, finish, .. } = choice;
    let (finish, ids) = (Finish::json(*finish), meta.ids(tokens));
    if meta.chat {
        return format!(
            r#"{{"index":{index},"message":{{"role":"assistant","content":"{text}","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":{finish},"stop_reason":null,"token_ids":{ids},"routed_experts":null}}"#
        );
    }
    let prompt = meta.prompt_ids(*index);
    format!(
        r#"{{"index":{index},"text":"{text}","logprobs":null,"finish_reason":{finish},"stop_reason":null,"token_ids":{ids},"prompt_logprobs":null,"prompt_token_ids":{prompt},"routed_experts":null}}"#
    )
}

fn running_usage(usage: Option<Usage>) -> String {
    usage.map_or_else(String::new, |usage| format!(r#","usage":{{{}}}"#, counts(usage)))
}

fn counts(usage: Usage) -> String {
    let (total, Usage { prompt, completion, .. }) = (usage.total(), usage);
    format!(r#""prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}"#)
}

fn fingerprint(meta: &Meta) -> String {
    format!(r#","system_fingerprint":"vllm-0.32.0-{}""#, meta.fingerprint)
}
