//! Time to tokenize a 220 KB chat prompt: as a whole, with an empty cache, for the next turn, and for a
//! repeated prompt.
//!
//! `POINTSMAN_MODEL` names a model directory that replaces the fixture.

#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench")]

use std::{
    cell::Cell,
    fmt::Write,
    hint::black_box,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use pointsman_tokens::{ChatOptions, LoadOptions, Tokenizer};

const BYTES: usize = 220 << 10;

fn model() -> PathBuf {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/model");
    std::env::var_os("POINTSMAN_MODEL").map_or_else(|| fixture.into(), PathBuf::from)
}

/// Returns English-like text of 4,000 made-up words, with short ones more frequent.
fn prose(bytes: usize, seed: u64) -> String {
    let syllables =
        ["ra", "ten", "mo", "li", "st", "er", "qua", "in", "do", "the", "con", "pre", "ly", "ous", "k"];
    let mut state = seed | 1;
    let mut below = |end: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % 1_000_003).unwrap() % end
    };
    let mut text = String::with_capacity(bytes + 32);
    while text.len() < bytes {
        for _ in 0..=below(3) {
            text.push_str(syllables[below(syllables.len())]);
        }
        text.push_str([" ", " ", " ", " ", " ", ", ", ". ", "\n", " 42 ", "'s "][below(10)]);
    }
    text
}

/// Returns a conversation of `turns` messages and `bytes` bytes. Every message starts with `nonce`.
fn conversation(turns: usize, bytes: usize, nonce: u64) -> String {
    let text = prose(bytes / turns, 7);
    let mut json = String::from("[");
    for turn in 0..turns {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        let content = serde_json::Value::from(format!("{nonce} {turn} {text}"));
        write!(json, r#"{{"role":"{role}","content":{content}}},"#).unwrap();
    }
    json.pop();
    json.push(']');
    json
}

/// Returns the conversation with one more message of 2 KB that is not cached.
fn grown(messages: &str, nonce: u64) -> String {
    let content = serde_json::Value::from(format!("{nonce} {}", prose(2048, nonce)));
    format!(r#"{},{{"role":"user","content":{content}}}]"#, messages.strip_suffix(']').unwrap())
}

fn bench(criterion: &mut Criterion) {
    let folder = model();
    let without_cache = |fast_encoder| {
        let options = LoadOptions { cache_bytes: 0, fast_encoder, ..LoadOptions::default() };
        Tokenizer::load_with(&folder, &options).unwrap()
    };
    let (library, whole) = (without_cache(false), without_cache(true));
    let cached = Tokenizer::load(&folder).unwrap();
    let options = ChatOptions::new(SystemTime::UNIX_EPOCH);
    let nonce = Cell::new(0_u64);
    let next = || {
        nonce.set(nonce.get() + 1);
        nonce.get()
    };

    let mut group = criterion.benchmark_group("tokens/220KB");
    group.throughput(Throughput::Bytes(BYTES as u64));
    for (shape, turns) in [("110 messages", 110), ("1 message", 1)] {
        let messages = conversation(turns, BYTES, 0);
        let tokens = cached.chat(&messages, &options).unwrap();
        assert_eq!(tokens, library.chat(&messages, &options).unwrap());
        assert_eq!(tokens, whole.chat(&messages, &options).unwrap());
        group.bench_function(format!("{shape}/template only"), |b| {
            b.iter(|| black_box(cached.render(&messages, &options).unwrap()));
        });
        group.bench_function(format!("{shape}/no cache, Hugging Face"), |b| {
            b.iter(|| black_box(library.chat(&messages, &options).unwrap()));
        });
        group.bench_function(format!("{shape}/no cache"), |b| {
            b.iter(|| black_box(whole.chat(&messages, &options).unwrap()));
        });
        group.bench_function(format!("{shape}/cold"), |b| {
            let fresh = || Tokenizer::load(&folder).unwrap();
            b.iter_batched(
                || (fresh(), conversation(turns, BYTES, next())),
                |(tokenizer, messages)| (tokenizer.chat(&messages, &options).unwrap(), tokenizer),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("{shape}/next turn"), |b| {
            b.iter_batched(
                || {
                    // Other benches evict the conversation from the cache.
                    cached.chat(&messages, &options).unwrap();
                    grown(&messages, next())
                },
                |messages| black_box(cached.chat(&messages, &options).unwrap()),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("{shape}/warm"), |b| {
            b.iter(|| black_box(cached.chat(&messages, &options).unwrap()));
        });
    }
    group.finish();
    criterion.bench_function("tokens/load", |b| b.iter(|| Tokenizer::load(&folder).unwrap()));
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4));
    targets = bench
}
criterion_main!(benches);
