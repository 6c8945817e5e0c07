//! Several data threads serve one listener. A file of its own: the test reads the CPU time of the process's
//! threads.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{collections::HashMap, fs};

use pointsman_gateway::config::SlotEntry;
use pointsman_routing::SlotKind;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{CHAT, Client, TestClusterBuilder, client::text_of, own_process};
use serde_json::json;
use tokio::task::JoinSet;

const THREADS: usize = 4;
const CLIENTS: usize = 48;
const TURNS: usize = 6;

fn chat(client: usize, stream: bool) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": 6, "ignore_eos": true,
        "messages": [{"role": "user", "content": format!("client {client} asks again ").repeat(12)}],
    })
    .to_string()
}

/// CPU time of each data thread, nanoseconds. The kernel cuts thread names to 15 bytes.
fn data_threads() -> HashMap<String, u64> {
    let threads = fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
    let named = threads.filter(|path| fs::read_to_string(path.join("comm")).unwrap() == "pointsman-data-\n");
    let on_cpu = |path: std::path::PathBuf| {
        let stat = fs::read_to_string(path.join("schedstat")).unwrap();
        (path.display().to_string(), stat.split(' ').next().unwrap().parse().unwrap())
    };
    named.map(on_cpu).collect()
}

/// Sends requests in turn, streamed and whole, and returns their texts.
async fn converse(client: Client, number: usize) -> Vec<String> {
    let mut texts = Vec::new();
    for turn in 0..TURNS {
        if turn % 2 == 0 {
            let stream = client.stream(CHAT, &[], chat(number, true)).await.unwrap();
            assert_eq!(stream.status, 200);
            let events = stream.all().await.unwrap();
            assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
            texts.push(text_of(&events));
        } else {
            let reply = client.post(CHAT, &[], chat(number, false)).await.unwrap();
            assert_eq!(reply.status, 200, "{reply:?}");
            let json = reply.json().unwrap();
            texts.push(json["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
        }
    }
    texts
}

#[tokio::test]
async fn several_data_threads_share_the_requests_and_lose_none() {
    own_process!();
    let remote: SlotEntry = toml::from_str("builtin = \"conditional-disagg\"").unwrap();
    let mut builder = TestClusterBuilder::new().config(|config| {
        config.server.threads = THREADS;
        config.policies.slots.insert(SlotKind::DecodeOverride, remote);
    });
    for role in [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode] {
        builder = builder.sim(Dialect::Vllm, role);
    }
    let cluster = builder.start().await;
    // They start when the workers were asked (N10.1).
    cluster.until("the threads run", |_| data_threads().len() == THREADS).await.unwrap();
    let before = data_threads();
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        // A client of its own has connections of its own, which the threads accept in turn.
        clients.spawn(converse(Client::new(cluster.gateway.address), number));
    }
    for texts in clients.join_all().await {
        assert!(!texts[0].is_empty());
        assert!(texts.iter().all(|text| *text == texts[0]), "one prompt, one answer: {texts:?}");
    }
    cluster.at_rest().await.unwrap();
    let sent = (CLIENTS * TURNS) as u64;
    let pulled: u64 = cluster.sims[2..].iter().map(|sim| sim.state().handoffs.pulled).sum();
    assert_eq!(pulled, sent, "each request committed one handoff and consumed it");
    let stranded: u64 = cluster.sims.iter().map(|sim| sim.state().stranded).sum();
    assert_eq!(stranded, 0);
    // A millisecond is far above what an idle thread uses and far below a share of this load.
    let worked = data_threads().iter().filter(|(thread, cpu)| **cpu > before[*thread] + 1_000_000).count();
    assert!(worked >= 2, "only {worked} of {THREADS} data threads served requests");
}
