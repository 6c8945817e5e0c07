//! Time to assemble messages of three frames from reads of 16 KiB.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use bytes::BytesMut;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use zmtp::frame::{self, Assembler, Item};

/// Bytes of one read.
const READ: usize = 16 << 10;

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("zmtp");
    for payload in [64, 1 << 10, 64 << 10] {
        let mut wire = BytesMut::new();
        for number in 0..256_u64 {
            frame::message(&[b"topic", &number.to_be_bytes(), &vec![7; payload]], &mut wire);
        }
        group.throughput(Throughput::Bytes(wire.len() as u64));
        group.bench_function(format!("payloads of {payload} bytes"), |b| b.iter(|| assemble(&wire)));
    }
    group.finish();
}

fn assemble(wire: &[u8]) {
    let (mut unread, mut assembler, mut messages) = (BytesMut::new(), Assembler::new(1 << 20), 0);
    for read in wire.chunks(READ) {
        unread.extend_from_slice(read);
        while let Some(item) = assembler.next(&mut unread).unwrap() {
            messages += usize::from(matches!(item, Item::Message(_)));
        }
    }
    assert_eq!(messages, 256);
}

criterion_group!(benches, bench);
criterion_main!(benches);
