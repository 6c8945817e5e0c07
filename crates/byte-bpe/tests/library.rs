//! The encoder has the tokens of Hugging Face's library, for any text and vocabulary.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::{
    collections::BTreeSet,
    sync::{LazyLock, atomic::AtomicBool},
};

use byte_bpe::{AddedToken, EncodeError, Encoder};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

const FIXTURE: &str = include_str!("../fixtures/tokenizer.json");

/// Patterns of real models, for the pre-tokenizer `Split`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
];

/// A tokenizer with both encoders.
struct Pair {
    encoder: Encoder,
    library: Tokenizer,
}

impl Pair {
    fn of(file: &Value) -> Self {
        let json = file.to_string();
        let library: Tokenizer = json.parse().unwrap();
        let mut added: Vec<_> = library.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let added: Vec<_> = added
            .iter()
            .map(|(id, token)| AddedToken {
                id: *id,
                content: &token.content,
                normalized: token.normalized,
                single_word: token.single_word,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
            })
            .collect();
        Self { encoder: Encoder::new(&json, &added).unwrap(), library }
    }

    fn check(&self, text: &str) -> Result<(), TestCaseError> {
        let mut tokens = Vec::new();
        self.encoder.encode(text, &AtomicBool::new(false), &mut tokens).unwrap();
        let expected = self.library.encode_fast(text, false).unwrap().get_ids().to_vec();
        prop_assert_eq!(tokens, expected, "{:?}", text);
        Ok(())
    }
}

fn fixture() -> Value {
    serde_json::from_str(FIXTURE).unwrap()
}

/// The fixture with these patterns and normalizer, and a token that is found in normalized text.
fn with(patterns: &[&str], normalizer: Value) -> Value {
    let mut file = fixture();
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let mut steps: Vec<Value> = patterns.iter().map(split).collect();
    steps.push(
        json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false, "trim_offsets": true}),
    );
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
    file["normalizer"] = normalizer;
    file["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": 9_000, "content": "é!", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": true, "special": false}));
    file
}

static MODELS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    let mut of_gpt2 = fixture();
    of_gpt2["pre_tokenizer"] = gpt2;
    vec![
        Pair::of(&of_gpt2),
        Pair::of(&with(&[LLAMA3], json!({"type": "NFC"}))),
        Pair::of(&with(&DEEPSEEK, json!({"type": "Sequence", "normalizers": []}))),
    ]
});

fn text() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        6 => " ?[a-zA-Z]{1,9}",
        1 => "[0-9]{1,7}",
        2 => "[ \\n\\t\\r\u{a0}\u{3000}\u{b}]{1,6}",
        1 => "'(s|S|ll|LL|re|\u{17f}|d)",
        2 => "[.,;:!?'\"(){}<>|/=#+*-]{1,6}[\\r\\n/]{0,2}",
        1 => Just("<|im_end|>\n".to_owned()),
        1 => "[一-龥ぁ-んァ-ヶ가-힣]{1,12}",
        1 => Just("e\u{301}!\u{1f469}\u{200d}\u{1f4bb}\u{fe0f}ǅ½².".to_owned()),
        1 => "[\u{0}-\u{10ffff}]{0,4}",
        1 => "[a-zA-Z0-9+/]{90,200}",
    ];
    proptest::collection::vec(atom, 0..60).prop_map(|atoms| atoms.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_text_has_the_tokens_of_the_library(text in text()) {
        for pair in &*MODELS {
            pair.check(&text)?;
        }
    }
}

/// Returns a byte-level model whose merges join the tokens chosen by `choices`, which makes deep and unusual
/// ones.
fn vocabulary(choices: &[(prop::sample::Index, prop::sample::Index)]) -> Value {
    let file = fixture();
    let known = file["model"]["vocab"].as_object().unwrap();
    let mut tokens: Vec<String> = known.keys().filter(|token| token.chars().count() == 1).cloned().collect();
    tokens.sort_by_key(|token| !"abc".contains(token.as_str()));
    let (letters, mut merges, mut seen) = (4, Vec::new(), BTreeSet::new());
    let mut usable: Vec<String> = tokens.iter().take(letters).cloned().collect();
    for (left, right) in choices {
        let (left, right) = (left.get(&usable).clone(), right.get(&usable).clone());
        let joined = format!("{left}{right}");
        if joined.len() <= 40 && seen.insert((left.clone(), right.clone())) {
            merges.push(json!([left, right]));
            if !tokens.contains(&joined) {
                tokens.push(joined.clone());
                usable.push(joined);
            }
        }
    }
    let vocab: serde_json::Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({"type": "BPE", "vocab": vocab, "merges": merges})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_vocabulary_has_the_tokens_of_the_library(
        choices in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..120),
        ignore_merges in any::<bool>(),
        texts in proptest::collection::vec("[abc!]{0,300}", 8),
    ) {
        let mut file = fixture();
        file["added_tokens"] = json!([]);
        file["post_processor"] = Value::Null;
        file["model"] = vocabulary(&choices);
        file["model"]["ignore_merges"] = json!(ignore_merges);
        let pair = Pair::of(&file);
        for text in texts {
            pair.check(&text)?;
        }
    }
}

#[test]
fn what_is_not_implemented_is_named() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut file = fixture();
        change(&mut file);
        Encoder::new(&file.to_string(), &[]).unwrap_err().to_string()
    };
    assert_eq!(refused(&|file| file["normalizer"] = json!({"type": "Lowercase"})), "normalizer `Lowercase`");
    assert_eq!(refused(&|file| file["model"]["byte_fallback"] = json!(true)), "model with byte_fallback");
    assert_eq!(refused(&|file| file["pre_tokenizer"] = Value::Null), "there is no pre_tokenizer");
    let stripped = AddedToken {
        id: 3,
        content: "<x>",
        normalized: false,
        single_word: false,
        lstrip: false,
        rstrip: true,
    };
    let error = Encoder::new(FIXTURE, &[stripped]).unwrap_err();
    assert_eq!(error.to_string(), "added token `<x>` with single_word, lstrip or rstrip");
}

#[test]
fn a_set_flag_ends_the_encode() {
    let (encoder, mut tokens) = (Encoder::new(FIXTURE, &[]).unwrap(), Vec::new());
    assert_eq!(encoder.encode("words", &AtomicBool::new(true), &mut tokens), Err(EncodeError::Stopped));
    assert!(tokens.is_empty());
}
