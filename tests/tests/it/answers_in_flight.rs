//! Whole answers that come at the same time: together they take a bounded number of bytes.

use std::time::Duration;

use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw::{connect_small, until_closed},
    raw_engine::{chunk, json, stream_head},
};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, sleep, timeout},
};

/// Bytes of an answer, and the limit for all bodies: seven eighths of it are for large ones.
const ANSWER: usize = 1_200_000;
const LIMIT: usize = 2_000_000;

/// A gateway in front of an engine that pauses for this long before the last byte of its answers to `slow`,
/// and in the middle of those to `halves`.
async fn bench(pause: Duration) -> (TestCluster, RawEngine) {
    let engine = RawEngine::serving(move |request: &RawRequest| {
        let mut answer = json(&format!(r#"{{"data":["{}"]}}"#, "x".repeat(ANSWER)));
        if request.body.contains("slow") {
            let last = answer.split_off(answer.len() - 1);
            return vec![Act::Send(answer), Act::Pause(pause), Act::Send(last)];
        }
        if request.body.contains("halves") {
            let second = answer.split_off(answer.len() / 2);
            return vec![Act::Send(answer), Act::Pause(pause), Act::Send(second)];
        }
        vec![Act::Send(answer)]
    })
    .await;
    (before(&engine, LIMIT).await, engine)
}

/// A gateway in front of an engine, with a limit for all bodies.
async fn before(engine: &RawEngine, limit: usize) -> TestCluster {
    let cluster = TestClusterBuilder::new().config(|config| {
        config.workers.push(engine.worker("id=1,role=aggregated,engine=openai"));
        (config.limits.body_bytes_in_flight, config.server.max_body_bytes) = (limit, 1_000_000);
        config.timeouts.client_write = Duration::from_secs(3);
    });
    cluster.start().await
}

async fn ask(cluster: &TestCluster, input: &str) -> Reply {
    let body = format!(r#"{{"model":"tiny","input":"{input}"}}"#);
    cluster.client.post("/v1/embeddings", &[], body).await.unwrap()
}

fn used(cluster: &TestCluster) -> usize {
    cluster.gateway.state().body_bytes.used()
}

async fn nothing_is_held(cluster: &TestCluster) {
    cluster.at_rest().await.unwrap();
    cluster.until("nothing is held", |cluster| used(cluster) == 0).await.unwrap();
}

/// The second of two requests had no room.
async fn is_not_charged(cluster: &TestCluster, engine: &RawEngine) {
    let posts = engine.requests().iter().filter(|request| request.line.starts_with("POST")).count();
    assert_eq!(posts, 2, "it is not tried again");
    assert!(cluster.gateway.state().registry.snapshot().workers()[0].ineligible().is_none());
    nothing_is_held(cluster).await;
}

#[tokio::test]
async fn i6_a_whole_answer_waits_for_room_among_the_bodies_in_flight() {
    let (cluster, _engine) = bench(Duration::from_secs(2)).await;
    let slow = async {
        let reply = ask(&cluster, "slow").await;
        (reply, Instant::now())
    };
    let next = async {
        cluster.until("the first is nearly whole", |cluster| used(cluster) > ANSWER).await.unwrap();
        let reply = ask(&cluster, "next").await;
        (reply, Instant::now())
    };
    let mut most = 0;
    let watch = async {
        loop {
            most = most.max(used(&cluster));
            sleep(Duration::from_millis(5)).await;
        }
    };
    let both = async { tokio::join!(slow, next) };
    let ((first, one), (second, two)) = tokio::select! {
        answered = both => answered,
        () = watch => unreachable!(),
    };
    // I6.15
    assert_eq!((first.status.as_u16(), second.status.as_u16()), (200, 200));
    assert!(two > one && second.body.len() > ANSWER, "the second waited");
    assert!(most > ANSWER && most <= LIMIT, "{most}");
    nothing_is_held(&cluster).await;
}

#[tokio::test]
async fn i6_a_whole_answer_without_room_is_refused_and_is_no_failure_of_its_worker() {
    let (cluster, engine) = bench(Duration::from_secs(30)).await;
    let slow = ask(&cluster, "slow");
    let next = async {
        cluster.until("the first is nearly whole", |cluster| used(cluster) > ANSWER).await.unwrap();
        timeout(Duration::from_secs(20), ask(&cluster, "next")).await.unwrap()
    };
    let reply = tokio::select! {
        reply = next => reply,
        _ = slow => unreachable!(),
    };
    // I6.15
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "body_bytes_in_flight"), "{reply:?}");
    assert!(reply.headers.contains_key("retry-after"));
    is_not_charged(&cluster, &engine).await;
}

#[tokio::test]
async fn i6_answers_that_come_together_take_their_room_one_after_the_other() {
    let (cluster, _engine) = bench(Duration::from_secs(1)).await;
    let both = async { tokio::join!(ask(&cluster, "halves one"), ask(&cluster, "halves two")) };
    let (one, two) = timeout(Duration::from_secs(20), both).await.unwrap();
    // I6.15
    assert_eq!((one.status.as_u16(), two.status.as_u16()), (200, 200), "{:?} {:?}", one.code(), two.code());
    cluster.at_rest().await.unwrap();
}

const COMPLETIONS: &str = "/v1/completions";
const FIRST: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n";
/// The limit for all bodies when events are large. Seven eighths of it have room for the buffer of one event,
/// which is larger than its event, and not for two events.
const STREAM_LIMIT: usize = 2_500_000;

fn streamed(prompt: &str) -> String {
    format!(r#"{{"model":"tiny","prompt":"{prompt}","stream":true}}"#)
}

/// A gateway in front of an engine whose streams have one large event. It pauses for this long within that of
/// the prompt `slow`.
async fn streams(pause: Duration) -> (TestCluster, RawEngine) {
    let engine = RawEngine::serving(move |request: &RawRequest| {
        let text = "x".repeat(ANSWER);
        let (start, end) =
            (r#"data: {"choices":[{"index":0,"text":""#, "\",\"finish_reason\":\"stop\"}]}\n\n");
        let begin = [FIRST, start, &text].concat();
        let is_slow = request.body.contains("slow");
        let rest = [chunk([end, "data: [DONE]\n\n"].concat().as_bytes()), b"0\r\n\r\n".to_vec()].concat();
        let begin = [stream_head(), chunk(begin.as_bytes())].concat();
        vec![Act::Send(begin), Act::Pause(if is_slow { pause } else { Duration::ZERO }), Act::Send(rest)]
    })
    .await;
    (before(&engine, STREAM_LIMIT).await, engine)
}

#[tokio::test]
async fn i6_a_large_event_of_a_stream_waits_for_room_among_the_bodies_in_flight() {
    let (cluster, _engine) = streams(Duration::from_secs(2)).await;
    let slow = async {
        let reply = cluster.client.post(COMPLETIONS, &[], streamed("slow")).await.unwrap();
        (reply, Instant::now())
    };
    let next = async {
        cluster.until("the first has its event", |cluster| used(cluster) > ANSWER).await.unwrap();
        let reply = cluster.client.post(COMPLETIONS, &[], streamed("next")).await.unwrap();
        (reply, Instant::now())
    };
    let ((first, one), (second, two)) = async { tokio::join!(slow, next) }.await;
    assert!(two > one, "the second waited");
    for reply in [first, second] {
        let text = String::from_utf8_lossy(&reply.body);
        // I6.22
        assert!(
            reply.status == 200 && text.len() > ANSWER && text.ends_with("data: [DONE]\n\n"),
            "{}",
            &text[..200]
        );
    }
    nothing_is_held(&cluster).await;
}

#[tokio::test]
async fn i6_a_stream_without_room_for_its_event_ends_with_an_error_and_its_worker_is_not_charged() {
    let (cluster, engine) = streams(Duration::from_secs(30)).await;
    let slow = async { cluster.client.post(COMPLETIONS, &[], streamed("slow")).await };
    let next = async {
        cluster.until("the first has its event", |cluster| used(cluster) > ANSWER).await.unwrap();
        let asked = cluster.client.post(COMPLETIONS, &[], streamed("next"));
        timeout(Duration::from_secs(20), asked).await.unwrap().unwrap()
    };
    let reply = tokio::select! {
        reply = next => reply,
        _ = slow => unreachable!(),
    };
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    // I6.22
    assert!(
        reply.status == 200 && text.starts_with(FIRST) && text.contains("body_bytes_in_flight"),
        "{text}"
    );
    is_not_charged(&cluster, &engine).await;
}

#[tokio::test]
async fn i6_a_large_event_counts_until_its_client_has_read_it() {
    let (cluster, _engine) = streams(Duration::ZERO).await;
    let body = streamed("next");
    let mut client = connect_small(cluster.gateway.address).await.unwrap();
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    client.write_all(request.as_bytes()).await.unwrap();
    cluster.until("the event is held", |cluster| used(cluster) > ANSWER / 2).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    // I6.22
    assert!(used(&cluster) > ANSWER / 2, "{}", used(&cluster));
    // I6.22: it ends with the connection of a client that does not read.
    cluster.until("nothing is held", |cluster| used(cluster) == 0).await.unwrap();
    until_closed(&mut client).await;
    cluster.at_rest().await.unwrap();
}
