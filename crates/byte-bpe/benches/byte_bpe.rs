//! Time to encode prose, and one word without spaces; beside Hugging Face's library.

#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench")]

use std::{hint::black_box, sync::atomic::AtomicBool};

use byte_bpe::Encoder;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tokenizers::Tokenizer;

const FIXTURE: &str = include_str!("../fixtures/tokenizer.json");
const BYTES: usize = 64 << 10;

/// Returns English-like text of made-up words.
fn prose() -> String {
    let syllables =
        ["ra", "ten", "mo", "li", "st", "er", "qua", "in", "do", "the", "con", "pre", "ly", "ous"];
    let mut state = 7_u64;
    let mut below = |end: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % 1_000_003).unwrap() % end
    };
    let mut text = String::with_capacity(BYTES + 32);
    while text.len() < BYTES {
        (0..=below(3)).for_each(|_| text.push_str(syllables[below(syllables.len())]));
        text.push_str([" ", " ", " ", ", ", ". ", "\n", " 42 "][below(7)]);
    }
    text
}

fn bench(criterion: &mut Criterion) {
    let encoder = Encoder::new(FIXTURE, &[]).unwrap();
    let library: Tokenizer = FIXTURE.parse().unwrap();
    let stopped = AtomicBool::new(false);
    let mut tokens = Vec::new();
    let mut group = criterion.benchmark_group("byte_bpe");
    for (name, text) in [("prose", prose()), ("one word", "abcdefghij".repeat(800))] {
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function(name, |b| {
            b.iter(|| {
                tokens.clear();
                encoder.encode(black_box(&text), &stopped, &mut tokens).unwrap();
                tokens.len()
            });
        });
        group.bench_function(format!("{name}, tokenizers"), |b| {
            b.iter(|| library.encode_fast(black_box(text.as_str()), false).unwrap().get_ids().len());
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
