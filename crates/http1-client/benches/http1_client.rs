//! Time to read the head of an answer, and to take a chunked body apart.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use http1_client::{chunked::Chunked, wire};

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n";
/// Bytes of one read.
const READ: usize = 16 << 10;

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("http1_client");
    group.bench_function("request head", |b| {
        b.iter(|| wire::request(&http::Method::POST, "10.0.0.1:8000", "/v1/x", &[], black_box(512)).unwrap());
    });
    group.bench_function("response head", |b| {
        b.iter(|| wire::response(black_box(HEAD), &[http::header::CONTENT_TYPE]).unwrap().unwrap());
    });
    for size in [128, 4 << 10] {
        let chunk = [format!("{size:x}\r\n").into_bytes(), vec![b'x'; size], b"\r\n".to_vec()].concat();
        let body = [chunk.repeat(256), b"0\r\n\r\n".to_vec()].concat();
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(format!("chunks of {size} bytes"), |b| {
            let mut out = Vec::with_capacity(body.len());
            b.iter(|| {
                out.clear();
                let mut chunked = Chunked::default();
                for read in body.chunks(READ) {
                    assert_eq!(chunked.decode(read, &mut out).unwrap(), 0);
                }
                assert!(chunked.is_done());
                out.len()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
