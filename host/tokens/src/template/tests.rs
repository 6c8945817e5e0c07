use std::time::{Duration, UNIX_EPOCH};

use super::*;

fn rendered(template: &str) -> Result<String, EncodeError> {
    let options = ChatOptions::new(UNIX_EPOCH + Duration::from_secs(1_721_951_999));
    let messages = r#"[{"role":"user","content":"hi"}]"#;
    run(&ChatTemplate::compile(template, None).unwrap(), messages, &options)
}

fn run(template: &ChatTemplate, messages: &str, options: &ChatOptions) -> Result<String, EncodeError> {
    let turns = messages::read(messages, template.format())?.into_iter();
    let messages = turns.map(|turn| Arc::new(turn.into())).collect();
    Ok(template.render(messages, options, &[])?.from(0).into_owned())
}

#[test]
fn the_clock_is_the_requests_own() {
    let template = "{% macro m() %}{{ strftime_now('%H:%M') }}{% endmacro %}{{ strftime_now is defined }} \
                    {{ strftime_now('%d %b %Y') }} {{ m() }}";
    assert_eq!(rendered(template).unwrap(), "True 25 Jul 2024 23:59");
    assert_eq!(rendered("{{ strftime_now('%!') }}").unwrap_err().kind(), "template");
}

#[test]
fn a_template_refuses_by_its_own_words() {
    let refused = EncodeError::Refused("roles must alternate".to_owned());
    assert_eq!(rendered("{{ raise_exception('roles must alternate') }}"), Err(refused.clone()));
    let inside = "{% macro m() %}{{ raise_exception('roles must alternate') }}{% endmacro %}{{ m() }}";
    assert_eq!(rendered(inside), Err(refused));
    assert_eq!(rendered("{{ nothing.at.all }}").unwrap_err().kind(), "template");
}

#[test]
fn generation_blocks_are_plain_blocks() {
    let template =
        "{% for m in messages %}\n  {%- generation -%}\n {{ m.content }}{% endgeneration %}\n{% endfor %}";
    assert_eq!(rendered(template).unwrap(), "hi");
    assert_eq!(without_generation_tags("{% set generation = 1 %}{%"), "{% set generation = 1 %}{%");
}

#[test]
fn a_template_that_hides_the_last_message_cannot_continue_it() {
    let mut options = ChatOptions::new(UNIX_EPOCH);
    options.continue_final_message = true;
    let run = |template: &str, messages: &str| {
        run(&ChatTemplate::compile(template, None).unwrap(), messages, &options)
    };
    let messages = r#"[{"role":"user","content":"hi "}]"#;
    assert_eq!(run("{{ messages[0].content }}!", messages).unwrap(), "hi ");
    assert_eq!(run("{{ messages[0].content|trim }}!", messages).unwrap(), "hi");
    for (template, messages) in [("{{ 1 }}", messages), ("content", messages), ("{{ content }}", "[]")] {
        assert_eq!(run(template, messages).unwrap_err().kind(), "invalid");
    }
}

#[test]
fn tests_answer_as_in_python() {
    let template = "{{ none is iterable }} {{ 'a' is iterable }} {{ nope is iterable }} {{ 7 is sequence }} \
                    {{ 'a' is sequence }} {{ messages is sequence }} {{ {} is sequence }} {{ tools is iterable }}";
    assert_eq!(rendered(template).unwrap(), "False True True False True True True False");
}
