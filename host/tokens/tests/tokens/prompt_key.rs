//! Repeated prompts have the tokens of the first time, and everything that changes tokens makes another
//! prompt.

use std::{sync::atomic::AtomicBool, time::UNIX_EPOCH};

use pointsman_tokens::{ChatOptions, LoadOptions, PromptForm, PromptKey, Tokenizer};
use serde_json::json;

use crate::support::Model;

fn messages(words: usize) -> String {
    let text: String = (0..words).map(|n| format!("{n} times around the house ")).collect();
    json!([{"role": "user", "content": text}]).to_string()
}

fn key(tokenizer: &Tokenizer, messages: &str, fields: &[(&str, &'static str)]) -> Option<PromptKey> {
    let get = |name: &str| fields.iter().find(|(field, _)| *field == name).map(|(_, value)| *value);
    tokenizer.prompt_key(PromptForm::Chat, messages, &[], get)
}

#[test]
fn a_repeated_prompt_is_known_with_its_tokens() {
    let tokenizer = Model::copied().load();
    let messages = messages(400);
    let first = key(&tokenizer, &messages, &[]).unwrap();
    assert!(tokenizer.known(&first).is_none());
    let options = ChatOptions::new(UNIX_EPOCH);
    let tokens = tokenizer.chat_until(&messages, Some(&first), &options, &AtomicBool::new(false)).unwrap();
    tokenizer.remember(&first, &tokens);
    for fields in [&[][..], &[("max_tokens", "7")]] {
        let known = tokenizer.known(&key(&tokenizer, &messages, fields).unwrap()).unwrap();
        assert_eq!((known.count(), known.to_vec()), (tokens.count(), tokens.to_vec()));
    }
}

#[test]
fn whatever_changes_the_tokens_changes_the_key() {
    let tokenizer = Model::copied().load();
    let messages = messages(400);
    let other = messages.replacen("around", "aroumd", 1);
    let fields = ["tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt"];
    let mut keys = vec![key(&tokenizer, &messages, &[]), key(&tokenizer, &other, &[])];
    keys.push(tokenizer.prompt_key(PromptForm::Completion, &messages, &[], |_| None));
    for field in fields.into_iter().chain(["continue_final_message", "add_special_tokens", "chat_template"]) {
        keys.push(key(&tokenizer, &messages, &[(field, "[1]")]));
        keys.push(key(&tokenizer, &messages, &[(field, "[12]")]));
    }
    for (at, key) in keys.iter().enumerate() {
        assert!(key.is_some() && !keys[at + 1..].contains(key), "{at}");
    }
    assert_ne!(key(&Model::copied().load(), &messages, &[]), keys[0], "keys of another load differ");
}

#[test]
fn prompts_that_are_short_or_show_the_time_are_not_kept() {
    let model = Model::copied();
    let tokenizer = model.load();
    assert_eq!(key(&tokenizer, &messages(10), &[]), None);
    let without = LoadOptions { cache_bytes: 0, ..LoadOptions::default() };
    assert_eq!(key(&Tokenizer::load_with(model.path(), &without).unwrap(), &messages(400), &[]), None);
    model.write(
        "chat_template.jinja",
        "{{ strftime_now('%H') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    );
    let clock = model.load();
    let tokens = clock.completion("some words", false).unwrap().into();
    let kept = |key: PromptKey| {
        clock.remember(&key, &tokens);
        clock.known(&key).is_some()
    };
    assert!(!kept(key(&clock, &messages(400), &[]).unwrap()));
    assert!(kept(clock.prompt_key(PromptForm::Completion, &messages(400), &[], |_| None).unwrap()));
}

#[test]
fn the_memory_of_prompts_is_bounded() {
    let options = LoadOptions { cache_bytes: 400_000, ..LoadOptions::default() };
    let tokenizer = Tokenizer::load_with(Model::copied().path(), &options).unwrap();
    let keys: Vec<PromptKey> =
        (400..440).map(|words| key(&tokenizer, &messages(words), &[]).unwrap()).collect();
    for key in &keys {
        tokenizer.remember(key, &vec![7; 2_500].into());
    }
    // A quarter of the budget holds nine prompts of 10 KB.
    let kept = keys.iter().filter(|key| tokenizer.known(key).is_some()).count();
    assert!((1..=9).contains(&kept), "{kept}");
}
