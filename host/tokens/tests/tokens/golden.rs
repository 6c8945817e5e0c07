//! Texts and tokens equal those of vLLM 0.32 with transformers 5.19 for the same requests, templates and
//! tokenizer.
//!
//! The ignored test reads a model directory from `POINTSMAN_MODEL` and a file of the same format from
//! `POINTSMAN_GOLDEN`, in which `template` is the text of a template.

use std::{collections::BTreeMap, fs, path::Path, time::SystemTime};

use pointsman_tokens::{ChatOptions, ContentFormat, EncodeError, LoadOptions, Tokenizer};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::support::fixtures;

#[derive(Deserialize)]
struct Case {
    name: String,
    /// Name of a template; the model's own if missing.
    template: Option<String>,
    body: Box<RawValue>,
    text: Option<String>,
    format: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
}

struct Seen {
    text: String,
    format: &'static str,
    ids: Vec<u32>,
}

/// Tokenizers by the text of their template, because a real vocabulary takes long to load.
#[derive(Default)]
struct Loaded(BTreeMap<Option<String>, Tokenizer>);

impl Loaded {
    fn get(&mut self, model: &Path, template: Option<String>) -> Result<&Tokenizer, EncodeError> {
        if !self.0.contains_key(&template) {
            let load = LoadOptions { chat_template: template.clone(), ..LoadOptions::default() };
            let tokenizer = Tokenizer::load_with(model, &load)
                .map_err(|error| EncodeError::Template(format!("does not load: {error}")))?;
            self.0.insert(template.clone(), tokenizer);
        }
        Ok(&self.0[&template])
    }
}

fn run(tokenizer: &Tokenizer, body: &str) -> Result<Seen, EncodeError> {
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(body).unwrap();
    let get = |field: &str| fields.get(field).map(|value| value.get());
    let options = ChatOptions::read(SystemTime::now(), get)?;
    let messages = get("messages").unwrap();
    Ok(Seen {
        text: tokenizer.render(messages, &options)?,
        format: match tokenizer.content_format() {
            Some(ContentFormat::Parts) => "openai",
            _ => "string",
        },
        ids: tokenizer.chat(messages, &options)?,
    })
}

/// Returns the differences from vLLM.
fn difference(case: &Case, tokenizer: Result<&Tokenizer, EncodeError>) -> Option<String> {
    match (tokenizer.and_then(|tokenizer| run(tokenizer, case.body.get())), &case.error) {
        (Err(_), Some(_)) => None,
        (Err(error), None) => Some(format!("{error}; vLLM has {:?}", case.text)),
        (Ok(seen), Some(error)) => Some(format!("{:?}; vLLM fails: {error}", seen.text)),
        (Ok(seen), None) => {
            let text = case.text.as_deref().unwrap();
            let same = seen.text == text && Some(seen.format) == case.format.as_deref();
            if !same {
                return Some(format!("{} {:?}\nvLLM has {:?} {text:?}", seen.format, seen.text, case.format));
            }
            (Some(seen.ids) != case.ids).then(|| "the text is the same, the tokens are not".to_owned())
        }
    }
}

fn check(cases: &str, model: &Path, template: impl Fn(&str) -> String) -> usize {
    let cases: Vec<Case> = serde_json::from_str(cases).unwrap();
    let (mut wrong, mut loaded) = (Vec::new(), Loaded::default());
    for case in &cases {
        let tokenizer = loaded.get(model, case.template.as_deref().map(&template));
        if let Some(difference) = difference(case, tokenizer) {
            wrong.push(format!("{}: {difference}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n\n"));
    cases.len()
}

#[test]
fn chats_are_rendered_and_encoded_as_vllm_does() {
    let cases = fs::read_to_string(fixtures().join("golden.json")).unwrap();
    let template =
        |name: &str| fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap();
    assert!(check(&cases, &fixtures().join("model"), template) > 30);
}

#[test]
#[ignore = "needs POINTSMAN_MODEL and POINTSMAN_GOLDEN"]
fn chats_of_another_model_are_rendered_and_encoded_as_vllm_does() {
    let read = |name: &str| std::env::var(name).unwrap();
    let cases = fs::read_to_string(read("POINTSMAN_GOLDEN")).unwrap();
    let count = check(&cases, Path::new(&read("POINTSMAN_MODEL")), str::to_owned);
    println!("{count} cases");
}
