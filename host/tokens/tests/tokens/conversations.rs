//! A conversation has the tokens of its text as a whole, whichever parts of it occurred before.

use std::{
    path::Path,
    sync::{LazyLock, atomic::AtomicBool},
    time::UNIX_EPOCH,
};

use pointsman_tokens::{ChatOptions, LoadOptions, PromptForm, PromptTokens, Reuse, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Model, uncached};

/// Prints sums, as most templates do, and the reasoning of the last answer only.
const SUMS: &str = "{{ bos_token }}{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if loop.last and message.reasoning_content is string -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- message['content'] | trim + '<|im_end|>' + '\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";
/// Wants parts, and changes some texts.
const PARTS: &str = "{% set ns = namespace(users=0) %}{% for m in messages %}{% if m.role == 'user' %}\
    {% set ns.users = ns.users + 1 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role ~ ': ' }}\
    {% for part in m.content %}{% if ns.users % 2 == 1 and loop.first and m.role == 'user' %}{{ part.text|upper }}\
    {% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}";
/// Has no special tokens between messages.
const BARE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

/// One tokenizer with a cache, and one without.
struct Pair {
    cached: Tokenizer,
    plain: Tokenizer,
}

impl Pair {
    fn of(folder: &Path, reuse: Reuse, cache_bytes: usize, fast_encoder: bool) -> Self {
        let options = LoadOptions { cache_bytes, fast_encoder, ..LoadOptions::default() };
        let cached = Tokenizer::load_with(folder, &options).unwrap();
        assert_eq!(cached.reuse(), reuse);
        Self { cached, plain: uncached(folder) }
    }

    fn with(
        template: Option<&str>,
        reuse: Reuse,
        cache_bytes: usize,
        fast: bool,
        change: fn(&mut Value),
    ) -> Self {
        let model = Model::copied();
        template.into_iter().for_each(|template| model.write("chat_template.jinja", template));
        model.change("tokenizer.json", change);
        Self::of(model.path(), reuse, cache_bytes, fast)
    }

    /// Does what the gateway does for a request.
    fn check(&self, messages: &[Value], gap: &str, special: bool) -> Result<PromptTokens, TestCaseError> {
        let (json, ends) = written(messages, gap);
        let fields = |name: &str| (name == "add_special_tokens" && special).then_some("true");
        let options = ChatOptions::read(UNIX_EPOCH, fields).unwrap();
        let key = self.cached.prompt_key(PromptForm::Chat, &json, &ends, fields);
        let known = key.as_ref().and_then(|key| self.cached.known(key));
        let tokens = self.cached.chat_until(&json, key.as_ref(), &options, &AtomicBool::new(false)).unwrap();
        let plain = self.plain.chat(&json, &options).unwrap();
        // H7.6
        prop_assert_eq!(&tokens.to_vec(), &plain);
        prop_assert_eq!(tokens.count(), plain.len());
        if let Some(known) = known {
            prop_assert_eq!(known.to_vec(), plain);
        }
        key.iter().for_each(|key| self.cached.remember(key, &tokens));
        Ok(tokens)
    }
}

/// Returns the JSON of messages with `gap` between them, and their ends.
fn written(messages: &[Value], gap: &str) -> (String, Vec<u32>) {
    let (mut json, mut ends) = ("[".to_owned(), Vec::new());
    for message in messages {
        if !ends.is_empty() {
            json.push(',');
        }
        json.push_str(gap);
        json.push_str(&message.to_string());
        ends.push(u32::try_from(json.len()).unwrap());
        json.push_str(gap);
    }
    json.push(']');
    (json, ends)
}

/// All ways of reuse, both encoders, and caches that evict.
static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let spanning = |file: &mut Value| file["model"]["vocab"]["aĠb"] = json!(5000);
    let stripping = |file: &mut Value| {
        file["added_tokens"][3]["rstrip"] = json!(true);
        file["added_tokens"][2]["lstrip"] = json!(true);
    };
    let whole_words = |file: &mut Value| file["added_tokens"][2]["single_word"] = json!(true);
    vec![
        Pair::with(None, Reuse::Words, 32 << 20, true, |_| ()),
        Pair::with(Some(SUMS), Reuse::Words, 32 << 20, true, |_| ()),
        Pair::with(Some(SUMS), Reuse::Words, 40_000, false, |_| ()),
        Pair::with(Some(SUMS), Reuse::SpecialTokens, 32 << 20, true, spanning),
        Pair::with(Some(SUMS), Reuse::Words, 32 << 20, false, stripping),
        Pair::with(Some(SUMS), Reuse::Off, 32 << 20, false, whole_words),
        Pair::with(Some(PARTS), Reuse::Words, 32 << 20, true, |_| ()),
        Pair::with(Some(BARE), Reuse::Words, 100_000, true, |_| ()),
        Pair::with(Some(BARE), Reuse::SpecialTokens, 32 << 20, true, spanning),
    ]
});

fn content() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        6 => " ?[a-zA-Z]{1,9}",
        4 => " [a-z]{1,9} [a-z]{1,9} [a-z]{1,9}",
        1 => "[0-9 ]{1,6}",
        1 => "[ \\n\\t\\r]{1,4}",
        1 => "[.,;:!?'\"(){}<>|/\\\\-]{1,4}",
        1 => Just("<|im_end|>\n".to_owned()),
        1 => Just("<|im_start|>".to_owned()),
        1 => prop_oneof![Just("<"), Just("<|im"), Just("_end|>"), Just("<think>")].prop_map(str::to_owned),
        1 => Just("é中文😀 e\u{301}".to_owned()),
        1 => "\\PC{0,4}",
    ];
    (proptest::collection::vec(atom, 0..160), 1_usize..6)
        .prop_map(|(atoms, times)| atoms.concat().repeat(times))
}

fn message() -> impl Strategy<Value = Value> {
    let role =
        prop_oneof![4 => Just("user"), 4 => Just("assistant"), 1 => Just("system"), 1 => Just("developer")];
    (role, content(), proptest::option::of(content())).prop_map(|(role, content, reasoning)| match reasoning {
        Some(reasoning) if role == "assistant" => {
            json!({"role": role, "content": content, "reasoning_content": reasoning})
        }
        Some(other) => json!({"role": role, "content": [{"type": "text", "text": content}, {"type": "text", "text": other}]}),
        None => json!({"role": role, "content": content}),
    })
}

/// Change of the conversation before the client's next request.
#[derive(Clone, Debug)]
enum Change {
    Append(Vec<Value>),
    Replace(prop::sample::Index, Value),
    Longer(prop::sample::Index, String),
    Truncate(prop::sample::Index),
    Nothing,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => proptest::collection::vec(message(), 1..3).prop_map(Change::Append),
        1 => (any::<prop::sample::Index>(), message()).prop_map(|(at, new)| Change::Replace(at, new)),
        1 => (any::<prop::sample::Index>(), content()).prop_map(|(at, more)| Change::Longer(at, more)),
        1 => any::<prop::sample::Index>().prop_map(Change::Truncate),
        1 => Just(Change::Nothing),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn h7_every_turn_has_the_tokens_of_its_whole_text(
        pair in 0_usize..9,
        first in message(),
        changes in proptest::collection::vec(change(), 1..7),
        gap in prop_oneof![3 => Just(""), 1 => Just(" \n")],
        special in any::<bool>(),
    ) {
        let pair = &PAIRS[pair];
        let mut messages = vec![first];
        pair.check(&messages, gap, special)?;
        for change in changes {
            match change {
                Change::Append(more) => messages.extend(more),
                Change::Replace(at, new) => *at.get_mut(&mut messages) = new,
                Change::Longer(at, more) => {
                    let message = at.get_mut(&mut messages);
                    let text = message["content"].as_str().unwrap_or("some text").to_owned();
                    message["content"] = json!(text + &more);
                }
                Change::Truncate(at) => messages.truncate(1 + at.index(messages.len())),
                Change::Nothing => {}
            }
            pair.check(&messages, gap, special)?;
        }
    }

    #[test]
    fn completions_that_begin_alike_have_the_tokens_of_their_whole_text(
        pair in 0_usize..9,
        texts in proptest::collection::vec(content(), 1..8),
        other in content(),
        at in any::<prop::sample::Index>(),
    ) {
        let pair = &PAIRS[pair];
        let mut prompt = String::new();
        for text in texts {
            prompt.push_str(&text.repeat(3));
            for special in [false, true] {
                let plain = pair.plain.completion(&prompt, special).unwrap();
                prop_assert_eq!(pair.cached.completion(&prompt, special).unwrap(), plain);
            }
        }
        let middle = prompt.char_indices().map(|(at, _)| at).nth(at.index(prompt.chars().count().max(1)));
        prompt.insert_str(middle.unwrap_or(0), &other);
        prop_assert_eq!(
            pair.cached.completion(&prompt, false).unwrap(),
            pair.plain.completion(&prompt, false).unwrap()
        );
    }
}

fn talk(turns: usize) -> Vec<Value> {
    let text = |turn: usize| {
        (0..60).map(|n| format!("{turn} {n} long stories of trains. ")).collect::<String>().trim().to_owned()
    };
    let role = |turn: usize| if turn.is_multiple_of(2) { "user" } else { "assistant" };
    (0..turns).map(|turn| json!({"role": role(turn), "content": text(turn)})).collect()
}

#[test]
fn the_next_turn_shares_all_segments_but_the_last_and_looks_for_no_old_piece() {
    for template in [None, Some(SUMS)] {
        let pair = Pair::with(template, Reuse::Words, 32 << 20, true, |_| ());
        let before = pair.check(&talk(21), "", false).unwrap();
        let stats = pair.cached.cache_stats();
        let after = pair.check(&talk(23), "", false).unwrap();
        let ids = |tokens: &PromptTokens| -> Vec<u128> {
            tokens.segments().iter().filter_map(pointsman_tokens::TokenSegment::id).collect()
        };
        let (before, after) = (ids(&before), ids(&after));
        assert!(before.len() >= 20 && after.len() > before.len(), "{} {}", before.len(), after.len());
        assert_eq!(after[..before.len()], before);
        let asked = pair.cached.cache_stats();
        assert!(asked.hits + asked.misses - stats.hits - stats.misses <= 5, "{stats:?} {asked:?}");
    }
}

#[test]
fn a_flood_of_other_prompts_does_not_push_out_a_conversation() {
    let pair = Pair::with(Some(SUMS), Reuse::Words, 400_000, true, |_| ());
    let options = ChatOptions::new(UNIX_EPOCH);
    let mut turns = 9;
    let mut reused = 0;
    for flood in 0..60 {
        if flood % 3 == 0 {
            let before = pair.cached.cache_stats();
            pair.check(&talk(turns), "", false).unwrap();
            turns += usize::from(flood % 6 == 0);
            let after = pair.cached.cache_stats();
            reused += usize::from(after.misses - before.misses <= 4);
        }
        let other =
            json!([{"role": "user", "content": format!("{flood} of many other prompts ").repeat(700)}]);
        pair.cached.chat(&other.to_string(), &options).unwrap();
    }
    assert!(reused >= 16, "{reused} of 20");
}

#[test]
fn threads_share_a_conversation() {
    let pair = Pair::with(Some(SUMS), Reuse::Words, 200_000, true, |_| ());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pair = &pair;
            scope.spawn(move || {
                for round in 0..12 {
                    pair.check(&talk(1 + (round * (thread + 1)) % 12), "", false).unwrap();
                }
            });
        }
    });
}

#[test]
fn messages_that_are_not_valid_have_the_same_error_with_and_without_places() {
    let pair = &PAIRS[0];
    let mut messages = talk(5);
    messages[3] = json!({"role": "user", "content": 7});
    let (json, ends) = written(&messages, "");
    let options = ChatOptions::new(UNIX_EPOCH);
    let key = pair.cached.prompt_key(PromptForm::Chat, &json, &ends, |_| None);
    let error = pair.cached.chat_until(&json, key.as_ref(), &options, &AtomicBool::new(false)).unwrap_err();
    assert_eq!(error, pair.plain.chat(&json, &options).unwrap_err());
}
