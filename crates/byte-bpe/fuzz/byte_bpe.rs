//! Byte-level BPE: any vocabulary and text has the tokens of a naive merge, and the bytes of its tokens are
//! those of the text.
#![no_main]

use std::{collections::HashMap, sync::atomic::AtomicBool};

use arbitrary::Arbitrary;
use byte_bpe::{Encoder, text_of};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

#[derive(Arbitrary, Debug)]
struct Input {
    /// Pairs of tokens to merge, by their place among those before.
    merges: Vec<(u8, u8)>,
    ignore_merges: bool,
    /// Whether the text is split into words as by GPT-2.
    splits: bool,
    letters: Vec<u8>,
    text: String,
}

struct Vocabulary {
    tokens: Vec<String>,
    merges: Vec<(String, String)>,
}

fuzz_target!(|input: Input| {
    let vocabulary = Vocabulary::of(&input.merges);
    let ids: HashMap<&str, u32> = vocabulary.tokens.iter().map(String::as_str).zip(0..).collect();
    let json = json!({
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": input.splits},
        "model": {"type": "BPE", "vocab": ids, "merges": vocabulary.merges, "ignore_merges": input.ignore_merges},
    });
    let encoder = Encoder::new(&json.to_string(), &[]).expect("a supported model");
    let encode = |text: &str| {
        let mut tokens = Vec::new();
        encoder.encode(text, &AtomicBool::new(false), &mut tokens).expect("nobody stops it");
        tokens
    };
    let decode = |tokens: &[u32]| -> String {
        tokens.iter().map(|id| vocabulary.tokens[*id as usize].as_str()).collect()
    };
    // Text of few letters has long words and many merges.
    let few: String = input.letters.iter().take(400).map(|letter| char::from(b'a' + letter % 3)).collect();
    for text in [few.as_str(), &input.text] {
        let tokens = encode(text);
        assert_eq!(text_of(&decode(&tokens)).as_deref(), Some(text));
    }
    if !input.splits {
        let naive = vocabulary.naive(&ids, &few, input.ignore_merges);
        assert_eq!(encode(&few), naive, "{few}");
    }
});

impl Vocabulary {
    fn of(choices: &[(u8, u8)]) -> Self {
        let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let mut others = (0x100_u32..).filter_map(char::from_u32);
        let char =
            |byte: u8| if printable(&byte) { char::from(byte) } else { others.next().expect("a character") };
        let mut tokens: Vec<String> = (0..=255).map(char).map(String::from).collect();
        tokens.sort_by_key(|token| !"abc".contains(token.as_str()));
        let mut usable: Vec<String> = tokens[..3].to_vec();
        let mut merges = Vec::new();
        for (left, right) in choices.iter().take(64) {
            let pick = |at: &u8| usable[usize::from(*at) % usable.len()].clone();
            let pair = (pick(left), pick(right));
            let joined = format!("{}{}", pair.0, pair.1);
            if joined.len() <= 40 && !merges.contains(&pair) {
                merges.push(pair);
                if !tokens.contains(&joined) {
                    tokens.push(joined.clone());
                    usable.push(joined);
                }
            }
        }
        Self { tokens, merges }
    }

    /// The tokens of one word: merges the leftmost of the pairs with the lowest rank until none is left.
    fn naive(&self, ids: &HashMap<&str, u32>, word: &str, ignore_merges: bool) -> Vec<u32> {
        if let Some(id) = ids.get(word).filter(|_| ignore_merges) {
            return vec![*id];
        }
        let mut parts: Vec<String> = word.chars().map(String::from).collect();
        for _ in 0..word.len() {
            let rank = |pair: &[String]| {
                self.merges.iter().position(|(left, right)| *left == pair[0] && *right == pair[1])
            };
            let lowest = parts.windows(2).enumerate().filter_map(|(at, pair)| Some((rank(pair)?, at))).min();
            let Some((_, at)) = lowest else { break };
            let right = parts.remove(at + 1);
            parts[at].push_str(&right);
        }
        parts.iter().map(|part| ids[part.as_str()]).collect()
    }
}
