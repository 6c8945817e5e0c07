//! CPU time of the tokens and block hashes of each turn of a conversation, with everything that a request
//! needs of this crate: first turn, next turn, and the same prompt again.
//!
//! `POINTSMAN_MODEL` names a model directory that replaces the fixture, `POINTSMAN_FIRST` the bytes of the
//! first turn.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a bench"
)]

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, UNIX_EPOCH},
};

use pointsman_tokens::{ChatOptions, PromptForm, Tokenizer};
use pointsman_workers::BlockHash;
use prefix_index::{PrefixBuilder, Salt};
use rustix::time::{ClockId, clock_gettime};

const TURNS: usize = 20;
const TURN_BYTES: usize = 2_500;
const CONVERSATIONS: u64 = 40;
const BLOCK: usize = 16;

const WORDS: &str = "the of and a to in is you that it he was for on are as with his they at be this have from or \
    one had by word but not what all were we when your can said there use an each which she do how their if will \
    up other about out many then them these so some her would make like him into time has look two more write go \
    see number no way could people my than first water been call who oil its now find long down day did get come \
    made may part request engine decode prefill memory latency gateway scheduler";

/// A conversation of English words, with lines and punctuation.
struct Conversation {
    state: u64,
    json: String,
    /// The ends of its messages.
    ends: Vec<u32>,
}

impl Conversation {
    fn new(seed: u64, first: usize) -> Self {
        let mut new = Self { state: seed << 20 | 1, json: "[".to_owned(), ends: Vec::new() };
        new.message("user", first);
        new
    }

    fn below(&mut self, end: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.state >> 33).unwrap() % end
    }

    fn message(&mut self, role: &str, bytes: usize) {
        let words: Vec<&str> = WORDS.split_whitespace().collect();
        let comma = if self.json.len() > 1 { "," } else { "" };
        self.json.push_str(&format!(r#"{comma}{{"role":"{role}","content":""#));
        let end = self.json.len() + bytes;
        while self.json.len() < end {
            let word = words[self.below(words.len())];
            self.json.push_str(word);
            let space = [" ", " ", " ", " ", " ", " ", " ", " ", ", ", ". ", "\\n"][self.below(11)];
            self.json.push_str(space);
        }
        self.json.push_str("\"}");
        self.ends.push(self.json.len().try_into().unwrap());
    }

    fn grow(&mut self) {
        self.message("assistant", TURN_BYTES / 2);
        self.message("user", TURN_BYTES / 2);
    }

    fn json(&self) -> String {
        format!("{}]", self.json)
    }
}

/// Block hashes of segments, as the gateway keeps them.
type Hashes = quick_cache::sync::Cache<u128, Arc<[BlockHash]>>;

/// Does what the gateway does for a request. Returns the number of blocks.
fn request(tokenizer: &Tokenizer, hashes: &Hashes, messages: &str, ends: &[u32]) -> usize {
    let key = tokenizer.prompt_key(PromptForm::Chat, messages, ends, |_| None);
    let tokens = key.as_ref().and_then(|key| tokenizer.known(key)).unwrap_or_else(|| {
        let options = ChatOptions::read(UNIX_EPOCH, |_| None).unwrap();
        let tokens = tokenizer.chat_until(messages, key.as_ref(), &options, &AtomicBool::new(false)).unwrap();
        key.iter().for_each(|key| tokenizer.remember(key, &tokens));
        tokens
    });
    let mut builder = PrefixBuilder::new(tokens.count(), BLOCK, &Salt::default());
    for segment in tokens.segments() {
        match segment.id().and_then(|id| hashes.get(&id)) {
            Some(known) => builder.push_known(segment.tokens(), &known),
            None => {
                let fresh = builder.push(segment.tokens());
                segment.id().into_iter().for_each(|id| hashes.insert(id, fresh.into()));
            }
        }
    }
    builder.finish().hashes().len()
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
}

fn timed(times: &mut Vec<f64>, work: impl FnOnce() -> usize) {
    let start = cpu();
    let blocks = work();
    times.push((cpu() - start).as_secs_f64() * 1e6);
    assert!(blocks > 0);
}

fn show(name: &str, times: &mut [f64]) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{name}: median {:.0} µs, 10th {:.0}, 90th {:.0} ({})", at(0.5), at(0.1), at(0.9), times.len());
}

fn main() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/model");
    let model = std::env::var_os("POINTSMAN_MODEL").map_or_else(|| fixture.into(), PathBuf::from);
    let first = std::env::var("POINTSMAN_FIRST").map_or(40_000, |bytes| bytes.parse().unwrap());
    let hashes = Hashes::new(4_000);
    let tokenizer = Tokenizer::load(&model).unwrap();
    let (mut firsts, mut nexts, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 0..CONVERSATIONS {
        let mut conversation = Conversation::new(seed, first);
        let messages = conversation.json();
        timed(&mut firsts, || request(&tokenizer, &hashes, &messages, &conversation.ends));
        for _ in 1..TURNS {
            conversation.grow();
            let messages = conversation.json();
            timed(&mut nexts, || request(&tokenizer, &hashes, &messages, &conversation.ends));
            timed(&mut again, || request(&tokenizer, &hashes, &messages, &conversation.ends));
        }
    }
    show("first turn", &mut firsts);
    show("next turn", &mut nexts);
    show("same again", &mut again);
}
