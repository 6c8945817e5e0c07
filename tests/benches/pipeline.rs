//! Time the gateway adds to a direct call: the same engine, the same client, with and without the gateway
//! between.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench; criterion's macros write undocumented items")]

use criterion::{Criterion, criterion_group, criterion_main};
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{CHAT, Client, TestClusterBuilder};

fn body(stream: bool, tokens: u32) -> String {
    serde_json::json!({
        "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
        "messages": [{"role": "user", "content": "a prompt of some length ".repeat(20)}],
    })
    .to_string()
}

fn bench(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    let cluster = runtime.block_on(builder.start());
    let pair = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Prefill).sim(Dialect::Vllm, Role::Decode);
    let pair = runtime.block_on(pair.start());
    let direct = Client::new(cluster.sims.first().unwrap().addr());
    for (name, stream, tokens) in [("whole, 1 token", false, 1), ("stream, 32 events", true, 32)] {
        let mut group = c.benchmark_group(name);
        let text = body(stream, tokens);
        let clients =
            [("direct", &direct), ("gateway, 1 leg", &cluster.client), ("gateway, 2 legs", &pair.client)];
        for (way, client) in clients {
            group.bench_function(way, |b| {
                b.to_async(&runtime).iter(|| async {
                    let reply = client.post(CHAT, &[], text.clone()).await.unwrap();
                    assert!(reply.status.is_success());
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
