//! Loading of model directories, and the errors for invalid ones.

use std::{fs, time::UNIX_EPOCH};

use pointsman_tokens::{ChatOptions, ContentFormat, EncodeError, LoadOptions, Tokenizer, TokenizerError};
use serde_json::json;

use crate::support::Model;

const MESSAGES: &str = r#"[{"role":"user","content":"hi"}]"#;

fn text(tokenizer: &Tokenizer) -> String {
    tokenizer.render(MESSAGES, &ChatOptions::new(UNIX_EPOCH)).unwrap()
}

#[track_caller]
fn refused(model: &Model, file: &str, problem: &str) {
    let error = Tokenizer::load(model.path()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(file) && message.contains(problem), "{message}");
}

#[test]
fn an_error_names_the_invalid_file() {
    let model = Model::copied();
    model.write("tokenizer_config.json", "{\"bos_token\": 7}");
    refused(&model, "tokenizer_config.json", "bos_token");
    model.write("tokenizer_config.json", "{,}");
    refused(&model, "tokenizer_config.json", "line 1");
    model.write("tokenizer_config.json", r#"{"chat_template": "{% for %}"}"#);
    refused(&model, "tokenizer_config.json", "`default`");
    model.write("chat_template.jinja", "{{ 'open }}");
    refused(&model, "chat_template.jinja", "`default`");
    model.write("tokenizer.json", "{}");
    refused(&model, "tokenizer.json", "");
    fs::remove_file(model.path().join("tokenizer.json")).unwrap();
    refused(&model, "tokenizer.json", "cannot read tokenizer file");
    assert!(matches!(Tokenizer::load(model.path()), Err(TokenizerError::Read { .. })));
}

#[test]
fn operators_options_are_checked() {
    let model = Model::copied();
    for kwargs in ["[]", "{", r#"{"messages":1}"#] {
        let options = LoadOptions { template_kwargs: Some(kwargs.to_owned()), ..LoadOptions::default() };
        let error = Tokenizer::load_with(model.path(), &options).unwrap_err();
        assert!(error.to_string().contains("template_kwargs"), "{error}");
    }
}

#[test]
fn a_folder_without_a_template_encodes_completions_only() {
    let model = Model::copied();
    fs::remove_file(model.path().join("tokenizer_config.json")).unwrap();
    let tokenizer = model.load();
    assert_eq!(tokenizer.content_format(), None);
    assert_eq!(tokenizer.chat(MESSAGES, &ChatOptions::new(UNIX_EPOCH)), Err(EncodeError::NoTemplate));
    assert!(!tokenizer.completion("hi", true).unwrap().is_empty());
}

#[test]
fn templates_come_from_files_before_the_config() {
    let model = Model::copied();
    model.change("tokenizer_config.json", |config| {
        config["chat_template"] = json!([
            {"name": "default", "template": "config"},
            {"name": "tool_use", "template": "config tools"},
        ]);
    });
    assert_eq!(text(&model.load()), "config");
    let read = |tools: &'static str| {
        let get = |field: &str| (field == "tools").then_some(tools);
        ChatOptions::read(UNIX_EPOCH, get).unwrap()
    };
    assert_eq!(model.load().render(MESSAGES, &read("[]")).unwrap(), "config tools");
    assert_eq!(model.load().render(MESSAGES, &read("null")).unwrap(), "config");
    model.write("additional_chat_templates/tool_use.jinja", "file tools");
    model.write(
        "chat_template.jinja",
        "file{% for m in messages %}{% for p in m.content %}.{% endfor %}{% endfor %}",
    );
    let tokenizer = model.load();
    assert_eq!(text(&tokenizer), "file.");
    assert_eq!(tokenizer.content_format(), Some(ContentFormat::Parts));
    assert_eq!(tokenizer.render(MESSAGES, &read("[]")).unwrap(), "file tools");
    let options = LoadOptions {
        chat_template: Some("mine {{ tone }} {{ messages[0].content }}".to_owned()),
        content_format: Some(ContentFormat::Parts),
        template_kwargs: Some(r#"{"tone": "calm"}"#.to_owned()),
        ..LoadOptions::default()
    };
    let tokenizer = Tokenizer::load_with(model.path(), &options).unwrap();
    assert_eq!(text(&tokenizer), "mine calm [{'type': 'text', 'text': 'hi'}]");
}

#[test]
fn the_frame_of_a_completion_is_the_configs_or_the_tokenizers() {
    let model = Model::copied();
    let frame = |model: &Model| {
        let tokenizer = model.load();
        let bare = tokenizer.completion("some text", false).unwrap();
        let framed = tokenizer.completion("some text", true).unwrap();
        let at = framed.windows(bare.len()).position(|window| window == bare).unwrap();
        (framed[..at].to_vec(), framed[at + bare.len()..].to_vec())
    };
    assert_eq!(frame(&model), (vec![0], vec![]));
    model.change("tokenizer_config.json", |config| config["add_eos_token"] = json!(true));
    assert_eq!(frame(&model), (vec![], vec![1]));
    model.change("tokenizer_config.json", |config| config["add_bos_token"] = json!(true));
    assert_eq!(frame(&model), (vec![0], vec![1]));
}

#[test]
fn tokens_of_the_config_are_added_as_transformers_adds_them() {
    let model = Model::copied();
    let new = |model: &Model, text: &str| model.load().completion(text, false).unwrap();
    let size = u32::try_from(new(&model, "<new>").len()).unwrap();
    assert!(size > 1);
    model.change("tokenizer_config.json", |config| {
        config["added_tokens_decoder"] = json!({
            "902": {"content": "<b>", "special": true},
            "901": {"content": "<a>", "special": false, "normalized": true},
            "2": {"content": "<|im_start|>", "special": true, "normalized": false},
        });
        config["additional_special_tokens"] = json!(["<new>", "<|im_end|>"]);
        config["pad_token"] = json!("<pad>");
    });
    let first = new(&model, "<a>")[0];
    assert_eq!(new(&model, "<a><b><pad><new>"), [first, first + 1, first + 2, first + 3]);
    assert_eq!(new(&model, "<|im_start|><|im_end|>"), [2, 3]);
}

#[test]
fn names_come_from_the_old_map_when_the_config_has_no_table() {
    let model = Model::copied();
    model.write("chat_template.jinja", "{{ bos_token }} {{ eos_token }} {{ cls_token }}");
    model.write("special_tokens_map.json", r#"{"bos_token": "B", "cls_token": {"content": "C"}}"#);
    assert_eq!(text(&model.load()), "B <|end|> C");
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let model = Model::copied();
    let long = "word ".repeat(100);
    let tokens = model.load().completion(&long, true).unwrap();
    model.change("tokenizer.json", |file| {
        file["truncation"] =
            json!({"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0});
        file["padding"] = json!({"strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    });
    assert_eq!(model.load().completion(&long, true).unwrap(), tokens);
}

#[test]
fn fields_that_are_not_modelled_or_wrong_are_told() {
    let read = |field: &'static str, json: &'static str| {
        ChatOptions::read(UNIX_EPOCH, |asked| (asked == field).then_some(json)).map(|_| ()).unwrap_err()
    };
    for (field, json, kind) in [
        ("chat_template", r#""x""#, "unsupported"),
        ("truncate_prompt_tokens", "5", "unsupported"),
        ("chat_template_kwargs", r#"{"tokenize":false}"#, "unsupported"),
        ("chat_template_kwargs", "[]", "invalid"),
        ("add_generation_prompt", "3", "invalid"),
        ("tools", "{}", "invalid"),
        ("continue_final_message", "true", "invalid"),
    ] {
        let error = read(field, json);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().starts_with(field), "{error}");
    }
    assert!(ChatOptions::read(UNIX_EPOCH, |_| Some("null")).is_ok());
}
