//! The fast encoder has the tokens of Hugging Face's library, or does not serve. Tests of any vocabulary are
//! in the crate `byte-bpe`.

use std::{path::Path, sync::LazyLock, time::UNIX_EPOCH};

use pointsman_tokens::{ChatOptions, EncoderKind, LoadOptions, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Model, fixtures};

/// Patterns of real models, for the pre-tokenizer `Split`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
];

fn load(folder: &Path, fast_encoder: bool) -> Tokenizer {
    Tokenizer::load_with(folder, &LoadOptions { cache_bytes: 0, fast_encoder, ..LoadOptions::default() })
        .unwrap()
}

fn text() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        6 => " ?[a-zA-Z]{1,9}",
        1 => "[0-9]{1,7}",
        2 => "[ \\n\\t\\r\u{a0}\u{3000}\u{b}]{1,6}",
        1 => "'(s|S|ll|LL|re|\u{17f}|d)",
        2 => "[.,;:!?'\"(){}<>|/=#+*-]{1,6}[\\r\\n/]{0,2}",
        1 => Just("<|im_end|>\n".to_owned()),
        1 => "[一-龥ぁ-んァ-ヶ가-힣]{1,12}",
        1 => Just("e\u{301}\u{1f469}\u{200d}\u{1f4bb}\u{fe0f}ǅ½².".to_owned()),
        1 => "\\PC{0,6}",
        1 => "[\u{0}-\u{10ffff}]{0,4}",
        1 => "[a-zA-Z0-9+/]{90,200}",
    ];
    proptest::collection::vec(atom, 0..60).prop_map(|atoms| atoms.concat())
}

/// A tokenizer with both encoders.
struct Pair {
    fast: Tokenizer,
    library: Tokenizer,
}

impl Pair {
    fn of(folder: &Path) -> Self {
        let pair = Self { fast: load(folder, true), library: load(folder, false) };
        assert_eq!(
            (pair.fast.encoder(), pair.library.encoder()),
            (EncoderKind::Fast, EncoderKind::HuggingFace)
        );
        pair
    }

    /// Both, for a copy of the fixture with these patterns and normalizer.
    fn with(patterns: &[&str], normalizer: Value) -> Self {
        let model = Model::copied();
        model.change("tokenizer.json", |file| {
            let split = |pattern: &&str| {
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
            };
            let mut steps: Vec<Value> = patterns.iter().map(split).collect();
            steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false, "trim_offsets": true}));
            file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
            file["normalizer"] = normalizer;
            file["added_tokens"].as_array_mut().unwrap().push(json!({"id": 9_000, "content": "é!", "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": true, "special": false}));
        });
        Self::of(model.path())
    }
}

static MODELS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    vec![
        Pair::of(&fixtures().join("model")),
        Pair::with(&[LLAMA3], json!({"type": "NFC"})),
        Pair::with(&[O200K], Value::Null),
        Pair::with(&DEEPSEEK, json!({"type": "Sequence", "normalizers": []})),
    ]
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn h7_every_text_has_the_tokens_of_the_library(text in text()) {
        for pair in &*MODELS {
            let tokens = pair.library.completion(&text, false).unwrap();
            // H7.1
            prop_assert_eq!(pair.fast.completion(&text, false).unwrap(), tokens, "{:?}", text);
        }
    }
}

#[test]
fn what_the_fast_encoder_does_not_implement_is_left_to_the_library() {
    let encoder = |change: &dyn Fn(&mut Value)| {
        let model = Model::copied();
        model.change("tokenizer.json", change);
        let (tokenizer, library) = (model.load(), load(model.path(), false));
        let text = "Two words, <|im_end|> and 3 more.";
        assert_eq!(tokenizer.completion(text, true).unwrap(), library.completion(text, true).unwrap());
        tokenizer.encoder()
    };
    assert_eq!(encoder(&|_| ()), EncoderKind::Fast);
    let changes: [&dyn Fn(&mut Value); 6] = [
        &|file| file["normalizer"] = json!({"type": "Lowercase"}),
        &|file| file["added_tokens"][3]["rstrip"] = json!(true),
        &|file| file["model"]["byte_fallback"] = json!(true),
        &|file| file["pre_tokenizer"] = json!({"type": "FixedLength", "length": 5}),
        &|file| {
            file["pre_tokenizer"] =
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
        },
        &|file| {
            let split = json!({"type": "Split", "pattern": {"Regex": r"\w++"}, "behavior": "Isolated", "invert": false});
            file["pre_tokenizer"] =
                json!({"type": "Sequence", "pretokenizers": [split, file["pre_tokenizer"]]});
        },
    ];
    for change in changes {
        assert_eq!(encoder(change), EncoderKind::HuggingFace);
    }
}

#[test]
fn h7_truncation_and_padding_in_the_file_are_ignored_as_by_engines() {
    let model = Model::copied();
    model.change("tokenizer.json", |file| {
        file["truncation"] =
            json!({"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0});
        file["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "x"});
    });
    let messages = json!([{"role": "user", "content": "one two three four five six seven"}]).to_string();
    let options = ChatOptions::new(UNIX_EPOCH);
    let fixture = load(&fixtures().join("model"), false);
    for text in ["hi", "one two three four five six seven eight nine ten eleven twelve"] {
        for fast in [true, false] {
            let tokenizer = load(model.path(), fast);
            // H7.3
            assert_eq!(tokenizer.completion(text, true).unwrap(), fixture.completion(text, true).unwrap());
            assert_eq!(
                tokenizer.chat(&messages, &options).unwrap(),
                fixture.chat(&messages, &options).unwrap()
            );
        }
    }
}
