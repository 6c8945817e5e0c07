//! The cache never changes a token, and is disabled for tokenizers where it would.

use std::{sync::LazyLock, time::UNIX_EPOCH};

use pointsman_tokens::{ChatOptions, LoadOptions, Reuse, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Model, fixtures, uncached};

fn content() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        4 => "[a-zA-Z]{1,9}",
        4 => " [a-z]{1,9}",
        1 => "[0-9 ]{1,6}",
        1 => "[ \\n\\t\\r]{1,4}",
        1 => "[.,;:!?'\"(){}<>|/-]{1,4}",
        1 => Just("<|im_end|>\n".to_owned()),
        1 => Just("<think>".to_owned()),
        1 => Just("é中文😀 e\u{301}".to_owned()),
        1 => "\\PC{0,4}",
    ];
    proptest::collection::vec(atom, 0..400).prop_map(|atoms| atoms.concat())
}

/// Tokenizers that all cases share, so that their caches fill and evict.
struct Pair {
    cached: Tokenizer,
    plain: Tokenizer,
}

impl Pair {
    fn of(cache_bytes: usize) -> Self {
        let folder = fixtures().join("model");
        let options = LoadOptions { cache_bytes, ..LoadOptions::default() };
        Self { cached: Tokenizer::load_with(&folder, &options).unwrap(), plain: uncached(&folder) }
    }

    fn check(&self, messages: &Value) -> Result<(), TestCaseError> {
        let options = ChatOptions::new(UNIX_EPOCH);
        let messages = messages.to_string();
        let plain = self.plain.chat(&messages, &options).unwrap();
        prop_assert_eq!(&self.cached.chat(&messages, &options).unwrap(), &plain);
        prop_assert_eq!(&self.cached.chat(&messages, &options).unwrap(), &plain);
        Ok(())
    }
}

static LARGE: LazyLock<Pair> = LazyLock::new(|| Pair::of(32 << 20));
static SMALL: LazyLock<Pair> = LazyLock::new(|| Pair::of(6_000));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn cached_tokens_are_the_tokens_of_the_whole_text(
        contents in proptest::collection::vec(content(), 1..6),
        edited in any::<prop::sample::Index>(),
        other in content(),
    ) {
        prop_assert_eq!(LARGE.cached.reuse(), Reuse::Words);
        let mut messages = json!([]);
        for (turn, content) in contents.iter().enumerate() {
            let role = if turn % 2 == 0 { "user" } else { "assistant" };
            messages.as_array_mut().unwrap().push(json!({"role": role, "content": content}));
            LARGE.check(&messages)?;
            SMALL.check(&messages)?;
        }
        messages[edited.index(contents.len())]["content"] = json!(other);
        LARGE.check(&messages)?;
        SMALL.check(&messages)?;
        let prompt = contents.concat();
        let plain = LARGE.plain.completion(&prompt, true).unwrap();
        prop_assert_eq!(LARGE.cached.completion(&prompt, true).unwrap(), plain);
    }
}

/// Returns 100 KB of text in which no two pieces are equal.
fn story() -> String {
    (0..4000).map(|n| format!("{n} long stories of trains ")).collect()
}

#[test]
fn the_next_turn_encodes_only_what_is_new() {
    let tokenizer = Model::copied().load();
    let options = ChatOptions::new(UNIX_EPOCH);
    let mut messages = json!([{"role": "user", "content": story()}]);
    tokenizer.chat(&messages.to_string(), &options).unwrap();
    let before = tokenizer.cache_stats();
    assert!(before.pieces > 40 && before.hits == 0, "{before:?}");
    messages
        .as_array_mut()
        .unwrap()
        .push(json!({"role": "assistant", "content": "and so it went on ".repeat(40)}));
    tokenizer.chat(&messages.to_string(), &options).unwrap();
    let after = tokenizer.cache_stats();
    assert!(after.misses - before.misses <= 3, "{before:?} {after:?}");
    assert!(after.bytes <= 32 << 20);
}

#[test]
fn a_message_is_known_whatever_follows_it() {
    let model = Model::copied();
    // A message only ends where the next one starts.
    model.write(
        "chat_template.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}<|im_end|>",
    );
    model.change("tokenizer.json", |file| file["model"]["vocab"]["aĠb"] = json!(5000));
    let tokenizer = model.load();
    assert_eq!(tokenizer.reuse(), Reuse::SpecialTokens);
    let misses = |messages: Value| {
        tokenizer.chat(&messages.to_string(), &ChatOptions::new(UNIX_EPOCH)).unwrap();
        tokenizer.cache_stats().misses
    };
    let first = misses(json!([{"role": "user", "content": story()}]));
    assert_eq!(
        misses(json!([{"role": "user", "content": story()}, {"role": "user", "content": "b"}])),
        first
    );
}

#[test]
fn a_story_is_known_behind_another_beginning() {
    let tokenizer = Model::copied().load();
    let story = story();
    let ask = |system: &str| {
        let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": story}]);
        tokenizer.chat(&messages.to_string(), &ChatOptions::new(UNIX_EPOCH)).unwrap();
        tokenizer.cache_stats().misses
    };
    let first = ask(&"be kind to everybody ".repeat(40));
    let second = ask(&"be curt with everybody ".repeat(41));
    assert!(second - first <= 3, "{first} {second}");
}

#[test]
fn threads_share_a_cache() {
    let pair = Pair::of(200_000);
    let texts: Vec<String> =
        (0..24).map(|n| format!("{n} some words about {} ", n * n).repeat(200)).collect();
    let plain: Vec<Vec<u32>> = texts.iter().map(|text| pair.plain.completion(text, false).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (pair, texts, plain) = (&pair, &texts, &plain);
            scope.spawn(move || {
                for round in 0..texts.len() {
                    let at = (round * (thread + 1)) % texts.len();
                    assert_eq!(pair.cached.completion(&texts[at], false).unwrap(), plain[at]);
                }
            });
        }
    });
}

/// Loads a changed fixture, and checks that reuse does not change its tokens.
fn reuse_of(change: impl FnOnce(&mut Value)) -> Reuse {
    let model = Model::copied();
    model.change("tokenizer.json", change);
    let (cached, plain) = (model.load(), uncached(model.path()));
    let text = "one two <|im_start|> three four<|im_end|>five six  seven <think> x y z\n".repeat(60);
    for special in [true, false] {
        let tokens = plain.completion(&text, special).unwrap();
        assert_eq!(cached.completion(&text, special).unwrap(), tokens);
        assert_eq!(cached.completion(&text, special).unwrap(), tokens);
    }
    cached.reuse()
}

/// Returns a tokenizer in the style of SentencePiece.
fn metaspace(scheme: &str) -> Reuse {
    reuse_of(|file| {
        *file = serde_json::from_str(&file.to_string().replace('Ġ', "▁")).unwrap();
        file["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    })
}

#[test]
fn what_depends_on_its_place_is_not_reused() {
    assert_eq!(reuse_of(|_| {}), Reuse::Words);
    assert_eq!(metaspace("first"), Reuse::Off);
    assert_eq!(metaspace("always"), Reuse::Words);
    assert_eq!(metaspace("never"), Reuse::Words);
    assert_eq!(reuse_of(|file| file["added_tokens"][2]["single_word"] = json!(true)), Reuse::Off);
    assert_eq!(
        reuse_of(|file| file["pre_tokenizer"] = json!({"type": "FixedLength", "length": 5})),
        Reuse::SpecialTokens
    );
}

#[test]
fn what_changes_the_front_of_a_text_is_cut_at_special_tokens_only() {
    let prepend = json!({"type": "Prepend", "prepend": "x"});
    assert_eq!(reuse_of(|file| file["normalizer"] = prepend), Reuse::SpecialTokens);
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    assert_eq!(reuse_of(|file| file["normalizer"] = strip), Reuse::SpecialTokens);
}

#[test]
fn a_vocabulary_that_spans_words_is_not_cut_between_words() {
    let reuse = reuse_of(|file| {
        file["pre_tokenizer"] =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        file["model"]["vocab"]["eĠt"] = json!(5000);
        file["model"]["merges"].as_array_mut().unwrap().insert(0, json!(["e", "Ġt"]));
    });
    assert_eq!(reuse, Reuse::SpecialTokens);
}

#[test]
fn a_mark_that_looks_like_a_space_is_none() {
    // As in DeepSeek's vocabularies: byte-level, with SentencePiece's space marks in the names of special
    // tokens.
    let reuse = reuse_of(|file| {
        file["model"]["vocab"]["<end▁of>"] = json!(5000);
        file["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(json!({"id": 5001, "content": "<a▁b>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": true, "special": false}));
    });
    assert_eq!(reuse, Reuse::Words);
}

#[test]
fn tokens_that_swallow_space_are_respected() {
    for side in ["lstrip", "rstrip"] {
        assert_eq!(reuse_of(|file| file["added_tokens"][3][side] = json!(true)), Reuse::Words);
        assert_eq!(reuse_of(|file| file["added_tokens"][4][side] = json!(true)), Reuse::Words);
    }
    let later = |file: &mut Value| {
        file["added_tokens"][4]["normalized"] = json!(true);
        file["added_tokens"][4]["rstrip"] = json!(true);
    };
    assert_eq!(reuse_of(later), Reuse::SpecialTokens);
}

/// `POINTSMAN_MODEL=/opt/vllm/model cargo test -p pointsman-tokens -- --ignored real_model`
#[test]
#[ignore = "needs POINTSMAN_MODEL"]
fn a_real_model_loads_and_its_cache_is_right() {
    let folder = std::env::var_os("POINTSMAN_MODEL").unwrap();
    let (cached, plain) = (Tokenizer::load(folder.as_ref()).unwrap(), uncached(folder.as_ref()));
    println!("{cached:?} {:?}", cached.content_format());
    let source = include_str!("reuse.rs").repeat(3);
    let mut messages = json!([]);
    for role in ["user", "assistant", "user"] {
        messages.as_array_mut().unwrap().push(json!({"role": role, "content": source}));
        let options = ChatOptions::new(UNIX_EPOCH);
        match plain.chat(&messages.to_string(), &options) {
            Ok(tokens) => assert_eq!(cached.chat(&messages.to_string(), &options).unwrap(), tokens),
            Err(error) => println!("chat: {error}"),
        }
    }
    for special in [true, false] {
        let tokens = plain.completion(&source, special).unwrap();
        assert_eq!(cached.completion(&source, special).unwrap(), tokens);
    }
    println!("{:?}", cached.cache_stats());
}
