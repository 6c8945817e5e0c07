//! Time to check a body with a long prompt or many messages, and to edit its top level; beside a JSON tree.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use json_splice::JsonBody;
use serde_json::{Map, Value, json};

const BYTES: usize = 220 << 10;

fn bench(criterion: &mut Criterion) {
    let text = "All work and no play makes \"Jack\" a dull boy. ";
    let messages: Vec<Value> =
        (0..110).map(|_| json!({"role": "user", "content": text.repeat(40)})).collect();
    let bodies = [
        ("one prompt", json!({"model": "m", "prompt": text.repeat(BYTES / text.len()), "stream": true})),
        ("110 messages", json!({"model": "m", "messages": messages, "stream": true})),
    ];
    let mut group = criterion.benchmark_group("json_splice");
    for (name, body) in bodies {
        let bytes = Bytes::from(body.to_string());
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(format!("{name}, parse"), |b| {
            b.iter(|| JsonBody::parse(black_box(bytes.clone())).unwrap());
        });
        group.bench_function(format!("{name}, parse as a tree"), |b| {
            b.iter(|| serde_json::from_slice::<Map<String, Value>>(black_box(&bytes)).unwrap());
        });
        let parsed = JsonBody::parse(bytes).unwrap();
        group.bench_function(format!("{name}, edit"), |b| {
            b.iter(|| parsed.edit().set("stream", "false").set("max_tokens", "1").remove("user").finish());
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
