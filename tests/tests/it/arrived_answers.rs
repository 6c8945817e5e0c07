//! Answers that wait in the gateway's sockets while its thread does not run, as under a CPU limit, and
//! clients that leave meanwhile.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, TestCluster, TestClusterBuilder, own_process, raw::send,
    raw_engine::json as json_answer,
};
use serde_json::json;

const MS: Duration = Duration::from_millis(1);

/// Takes log lines. A thread that logs a request with the id `stop-here` stands still while the lock is held.
#[derive(Clone, Default)]
struct Log(Arc<(Mutex<()>, AtomicBool)>);

impl Log {
    fn stop(&self) -> MutexGuard<'_, ()> {
        self.0.1.store(false, Ordering::SeqCst);
        self.0.0.lock()
    }

    fn stands_still(&self) -> bool {
        self.0.1.load(Ordering::SeqCst)
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if String::from_utf8_lossy(bytes).contains("stop-here") {
            self.0.1.store(true, Ordering::SeqCst);
            drop(self.0.0.lock());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A request for a model, as bytes.
fn request(model: &str, id: &str) -> String {
    let body = json!({ "model": model, "prompt": "which way?", "max_tokens": 9 }).to_string();
    let length = body.len();
    format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nx-request-id: {id}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
}

/// The answer of an engine, with what it hands over.
fn answer() -> String {
    let choice = json!({ "index": 0, "text": "good", "finish_reason": "length" });
    let parameters = json!({ "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
        "remote_host": "127.0.0.1", "remote_port": 1 });
    json!({ "id": "x", "choices": [choice], "kv_transfer_params": parameters }).to_string()
}

/// A gateway with one thread, which may close prefills.
async fn gateway(prefill: &RawEngine, decode: &RawEngine, request_timeout: Option<Duration>) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.server.threads = 1;
        config.timeouts.request = request_timeout.unwrap_or(config.timeouts.request);
        for (role, engine) in [("prefill,prefill_cancellable=true", prefill), ("decode", decode)] {
            config.workers.push(engine.worker(&format!("role={role},engine=vllm")));
        }
    });
    builder.start().await
}

#[tokio::test]
async fn e1_a_prefill_that_has_begun_to_answer_is_not_closed() {
    let answer = answer();
    let whole = json_answer(&answer);
    let (begin, rest) = whole.split_at(whole.len() / 2);
    let acts = vec![Act::Send(begin.to_vec()), Act::Pause(400 * MS), Act::Send(rest.to_vec())];
    let prefill = RawEngine::serving(move |_| acts.clone()).await;
    let decode = RawEngine::serving(move |_| vec![Act::Send(json_answer(&answer))]).await;
    let cluster = gateway(&prefill, &decode, None).await;
    let client = send(cluster.gateway.address, request("tiny", "a")).await.unwrap();
    cluster.until("prefill runs", |_| prefill.requests().len() == 1).await.unwrap();
    tokio::time::sleep(100 * MS).await;
    drop(client);
    // E1.7
    cluster.until("the handoff is consumed", |_| decode.requests().len() == 1).await.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e4_a_prefill_that_has_begun_to_answer_at_the_deadline_is_not_closed() {
    let answer = answer();
    let whole = json_answer(&answer);
    let (begin, rest) = whole.split_at(whole.len() / 2);
    let acts = vec![Act::Send(begin.to_vec()), Act::Pause(2_000 * MS), Act::Send(rest.to_vec())];
    let prefill = RawEngine::serving(move |_| acts.clone()).await;
    let decode = RawEngine::serving(move |_| vec![Act::Send(json_answer(&answer))]).await;
    let cluster = gateway(&prefill, &decode, Some(1_000 * MS)).await;
    let body = json!({ "model": "tiny", "prompt": "which way?", "max_tokens": 9 }).to_string();
    let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    // E4.2
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (504, "deadline"));
    assert_eq!(decode.requests().len(), 0);
    // E4.2
    cluster.until("the handoff is consumed", |_| decode.requests().len() == 1).await.unwrap();
    assert!(decode.requests()[0].body.contains("\"max_tokens\":1,"), "{:?}", decode.requests()[0]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "only the gateway's thread waits for it")]
async fn e1_a_handoff_that_arrived_before_its_client_left_is_consumed() {
    own_process!();
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let answer = answer();
    let late = json_answer(&answer);
    let prefill = RawEngine::serving(move |_| vec![Act::Pause(400 * MS), Act::Send(late.clone())]);
    let decode = RawEngine::serving(move |_| vec![Act::Send(json_answer(&answer))]);
    let (prefill, decode) = (prefill.await, decode.await);
    let cluster = gateway(&prefill, &decode, None).await;
    let address = cluster.gateway.address;
    for round in 1..=4 {
        let client = send(address, request("tiny", "a")).await.unwrap();
        cluster.until("prefill runs", |_| prefill.requests().len() == round).await.unwrap();
        let still = log.stop();
        let other = send(address, request("no such model", "stop-here")).await.unwrap();
        while !log.stands_still() {
            tokio::time::sleep(MS).await;
        }
        // The answer comes, and then the client leaves.
        tokio::time::sleep(500 * MS).await;
        drop(client);
        tokio::time::sleep(10 * MS).await;
        drop(still);
        // E1.7
        cluster.until("the handoff is consumed", |_| decode.requests().len() == round).await.unwrap();
        cluster.at_rest().await.unwrap();
        drop(other);
    }
}
