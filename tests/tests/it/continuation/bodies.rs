//! The memory that requests for rests take: it counts with that of all bodies, and is freed once their
//! engines generate.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::*;

/// Size of a prompt, bytes.
const PROMPT: usize = 40_000;

/// A cluster whose bodies in flight take `bytes` at most.
async fn bounded(bytes: usize) -> TestCluster {
    cluster(Dialect::Vllm, AGGREGATED, |config| {
        config.server.max_body_bytes = PROMPT + 10_000;
        config.limits.body_bytes_in_flight = bytes;
    })
    .await
}

fn long_prompt(tokens: u32) -> Value {
    json!({"prompt": "all points ".repeat(PROMPT / 11), "max_tokens": tokens})
}

fn used(cluster: &TestCluster) -> usize {
    cluster.gateway.state().body_bytes.used()
}

#[tokio::test]
async fn i14_a_rest_without_room_for_its_body_is_not_sent() {
    let cluster = bounded(PROMPT * 2 - 5_000).await;
    for sim in &cluster.sims {
        sim.set_faults(once(FaultKind::Cut { after_tokens: 4 }));
    }
    let events = stream(&cluster, COMPLETIONS, long_prompt(TOKENS)).await;
    // I14.16
    assert!(events.last().unwrap().contains("bad_upstream"), "{:?}", events.last());
    assert_eq!(continued(&cluster, "body_bytes_in_flight").await, 1.0);
    cluster.at_rest().await.unwrap();
    assert_eq!(used(&cluster), 0);
}

#[tokio::test]
async fn i14_the_body_of_a_rest_is_freed_once_its_engine_generates() {
    // Room for two requests, and for one rest at a time.
    let cluster = bounded(PROMPT * 7 / 2).await;
    cluster.admin.post("/workers/2/drain", &[], "").await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..2 {
        let body = body(COMPLETIONS, long_prompt(3_000));
        let mut stream = cluster.client.stream(COMPLETIONS, &[], body).await.unwrap();
        stream.next().await.unwrap();
        streams.push(stream);
    }
    let bodies = used(&cluster);
    assert!((PROMPT * 2..PROMPT * 5 / 2).contains(&bodies), "{bodies}");
    cluster.admin.delete("/workers/2/drain").await.unwrap();
    let mut readers = tokio::task::JoinSet::new();
    streams.into_iter().for_each(|stream| drop(readers.spawn(stream.all())));
    cluster.admin.post("/workers/1/drain?move=true", &[], "").await.unwrap();
    let moved = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.get(pointsman_workers::WorkerId(1)).unwrap().move_counts().unwrap().moved == 2
    };
    // I14.16: both streams run on for seconds
    cluster.until("both moved", moved).await.unwrap();
    assert_eq!(used(&cluster), bodies);
    while let Some(events) = readers.join_next().await {
        assert_eq!(events.unwrap().unwrap().last().unwrap(), "[DONE]");
    }
    cluster.at_rest().await.unwrap();
    assert_eq!(used(&cluster), 0);
}

#[tokio::test]
async fn i14_a_rest_that_fails_before_its_first_token_takes_no_more_memory() {
    let cluster = bounded(PROMPT * 10).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let (gateway, ends) = (cluster.gateway.state().clone(), is_over.clone());
    let highest = std::thread::spawn(move || {
        let mut highest = 0;
        while !ends.load(Relaxed) {
            highest = highest.max(gateway.body_bytes.used());
        }
        highest
    });
    for turn in 0..6 {
        for sim in &cluster.sims {
            let prompt = Some("continue_final_message".to_owned());
            let of_rest =
                Fault { prompt, times: Some(1), ..Fault::always(FaultKind::Cut { after_tokens: 0 }) };
            let first = Fault { times: Some(1), ..Fault::always(FaultKind::Cut { after_tokens: 4 }) };
            sim.set_faults(vec![of_rest, first]);
        }
        let prompt = format!("{turn} {}", "all points ".repeat(PROMPT / 11));
        let long = json!({"messages": [{"role": "user", "content": prompt}]});
        let events = stream(&cluster, CHAT, long).await;
        assert!(events.last().unwrap().contains("4 output tokens were delivered"), "{:?}", events.last());
    }
    is_over.store(true, Relaxed);
    let highest = highest.join().unwrap();
    // I14.16: the request and one for its rest
    assert!((PROMPT * 2..PROMPT * 5 / 2).contains(&highest), "{highest}");
    cluster.at_rest().await.unwrap();
}
