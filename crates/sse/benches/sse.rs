//! Time to split a recorded stream that arrives in pieces, and to scan its events; beside a JSON tree.

#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use serde_json::Value;
use sse::Splitter;

const STREAM: &[u8] = include_bytes!("../fixtures/sglang-0.5.23/chat-stream.txt");
/// Bytes that arrive together.
const PIECE: usize = 1_460;

fn bench(criterion: &mut Criterion) {
    let stream = STREAM.repeat(64);
    let mut group = criterion.benchmark_group("sse");
    group.throughput(Throughput::Bytes(stream.len() as u64));
    group.bench_function("split", |b| b.iter(|| split(&stream, |_| ())));
    group.bench_function("split and scan", |b| {
        b.iter(|| split(&stream, |event| _ = black_box(sse::look(event))));
    });
    group.bench_function("split and parse as a tree", |b| {
        b.iter(|| {
            split(&stream, |event| drop(black_box(serde_json::from_slice::<Value>(sse::object(event)))))
        });
    });
    group.finish();
}

fn split(stream: &[u8], mut each: impl FnMut(&[u8])) {
    let mut splitter = Splitter::default();
    for piece in stream.chunks(PIECE) {
        splitter.room().extend_from_slice(piece);
        let whole = splitter.whole().unwrap();
        let events = splitter.first(whole);
        sse::events(events).for_each(|place| each(&events[place]));
        splitter.discard(whole);
    }
    assert_eq!(splitter.rest(), 0);
}

criterion_group!(benches, bench);
criterion_main!(benches);
