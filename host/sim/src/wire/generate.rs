//! SGLang's `/generate` (0.5.23, without `--incremental-streaming-output`): each event repeats the output so
//! far, and the counts are in `meta_info`. Keys have the engine's order.

use super::{Choice, Meta, Shape, Usage, json, sglang::Sglang};
use crate::{
    core::Prompt,
    engine::{Finish, Step},
    failure::Failure,
};

pub(super) struct Generate;

impl Shape for Generate {
    fn open(&self, _: &Meta, _: u32, _: Option<Usage>) -> Vec<String> {
        Vec::new()
    }

    fn step(&self, _: &Meta, _: &Step, _: bool, _: Option<Usage>) -> Vec<String> {
        Vec::new()
    }

    fn repeat(&self, meta: &Meta, said: &Choice) -> Option<String> {
        let index = if meta.batch { format!(r#","index":{}"#, said.index) } else { String::new() };
        Some(format!("{}{index}}}", output(meta, said)))
    }

    fn usage(&self, _: &Meta, _: Usage) -> String {
        String::new()
    }

    fn whole(&self, meta: &Meta, choices: &[Choice], _: Usage, _: Option<&str>) -> String {
        let outputs: Vec<String> = choices.iter().map(|choice| output(meta, choice) + "}").collect();
        let outputs = outputs.join(",");
        if meta.batch { format!("[{outputs}]") } else { outputs }
    }

    fn error(&self, failure: &Failure) -> String {
        if failure.status == 400 {
            return format!(r#"{{"error":{{"message":{}}}}}"#, json(&failure.message));
        }
        Sglang.error(failure)
    }

    /// A failure of the scheduler is an output that was aborted with a status.
    fn error_event(&self, failure: &Failure) -> String {
        let finish = abort(&failure.message, Some(failure));
        format!(r#"{{"text":"","output_ids":[],{}}}"#, meta_info("", &finish, [0; 3]))
    }
}

/// Returns an output without its closing brace.
fn output(meta: &Meta, choice: &Choice) -> String {
    let Choice { index, text, tokens, finish, cached } = choice;
    let completion = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let prompt = meta.prompts.get((index / meta.n.max(1)) as usize).map_or(0, Prompt::isl);
    let finish = match finish {
        None => "null".to_owned(),
        Some(Finish::Length) => format!(r#"{{"type":"length","length":{completion}}}"#),
        Some(Finish::Stop) => r#"{"type":"stop","matched":2}"#.to_owned(),
        Some(Finish::Abort) => abort("Aborted", None),
    };
    let id = meta.item_ids.get(*index as usize).unwrap_or(&meta.id);
    let meta_info = meta_info(id, &finish, [prompt, completion, *cached]);
    format!(r#"{{"text":{},"output_ids":{},{meta_info}"#, json(text), json(tokens))
}

/// Returns the field `meta_info`, with the tokens of the prompt, of the output, and of the prompt that were
/// cached.
fn meta_info(id: &str, finish: &str, [prompt, completion, cached]: [u32; 3]) -> String {
    format!(
        r#""meta_info":{{"id":"{id}","finish_reason":{finish},"prompt_tokens":{prompt},"weight_version":"default","num_retractions":0,"reasoning_tokens":0,"completion_tokens":{completion},"cached_tokens":{cached},"dp_rank":null}}"#
    )
}

fn abort(message: &str, failure: Option<&Failure>) -> String {
    let (status, kind) = (json(&failure.map(|it| it.status)), json(&failure.map(|it| it.kind)));
    format!(r#"{{"type":"abort","message":{},"status_code":{status},"err_type":{kind}}}"#, json(message))
}
