//! Requests on SGLang that the gateway cancels. The engine forgets a request whose connection closes, ignores
//! an abort of it that comes later, and generates the rest of its answer (sglang#36333).

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_gateway::config::Config;
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    raw_engine::{ANSWER, chunk, json as json_answer, status, stream_head},
};
use serde_json::Value;

const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n";
const MS: Duration = Duration::from_millis(1);

/// The requests of one engine, by their ids.
#[derive(Default)]
struct Requests {
    open: Mutex<HashSet<String>>,
    aborted: Mutex<HashSet<String>>,
    /// Requests whose connection was closed before an abort of them came.
    zombies: Mutex<Vec<String>>,
}

/// A request whose connection is open.
struct Open(Arc<Requests>, String);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.lock().remove(&self.1);
        if !self.0.aborted.lock().contains(&self.1) {
            self.0.zombies.lock().push(self.1.clone());
        }
    }
}

struct Engine {
    raw: RawEngine,
    requests: Arc<Requests>,
}

/// Starts an engine that answers generation requests with `acts`.
async fn engine(acts: Vec<Act>) -> Engine {
    let requests = Arc::new(Requests::default());
    let known = requests.clone();
    let script = move |request: &RawRequest| {
        let body: Value = serde_json::from_str(&request.body).unwrap_or_default();
        let Some(id) = body["rid"].as_str().map(str::to_owned) else {
            return vec![Act::Send(status("404 Not Found", "{}"))];
        };
        if request.line == "POST /abort_request" {
            if known.open.lock().contains(&id) {
                known.aborted.lock().insert(id);
            }
            return vec![Act::Send(json_answer("{}"))];
        }
        known.open.lock().insert(id.clone());
        let open = Act::Keep(Arc::new(Open(known.clone(), id)));
        std::iter::once(open).chain(acts.iter().cloned()).collect()
    };
    Engine { raw: RawEngine::serving(script).await, requests }
}

fn token() -> Act {
    Act::Send([stream_head(), chunk(TOKEN.as_bytes())].concat())
}

fn body(stream: bool) -> String {
    format!(r#"{{"model":"tiny","prompt":"which way?","max_tokens":4,"stream":{stream}}}"#)
}

async fn cluster(engines: &[(&str, &RawEngine)], change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        (config.routing.retries, config.routing.quarantine) = (0, Duration::ZERO);
        for (role, engine) in engines {
            config.workers.push(engine.worker(&format!("role={role},engine=sglang")));
        }
        change(config);
    });
    builder.start().await
}

/// How a request ends before its answer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client leaves.
    Leaves,
    Deadline,
    /// The engine is silent between two events.
    Silence,
    PrefillFails,
}

impl End {
    /// Sends requests that end in this way, one after the other, and waits until the engine has none.
    async fn of(self, cluster: &TestCluster, stream: bool, engine: &Engine) {
        for turn in 1..=3 {
            let asked = || engine.raw.requests().iter().filter(|one| one.line.ends_with(COMPLETIONS)).count();
            if stream && self != Self::PrefillFails {
                let mut answer = cluster.client.stream(COMPLETIONS, &[], body(true)).await.unwrap();
                answer.next().await.unwrap().unwrap();
                if self != Self::Leaves {
                    answer.all().await.unwrap();
                }
            } else if self == Self::Leaves {
                tokio::select! {
                    reply = cluster.client.post(COMPLETIONS, &[], body(false)) => panic!("it ended: {reply:?}"),
                    sent = cluster.until("the leg is sent", |_| asked() == turn) => sent.unwrap(),
                }
            } else {
                cluster.client.post(COMPLETIONS, &[], body(stream)).await.unwrap();
            }
            cluster.until("the leg is closed", |_| engine.requests.open.lock().is_empty()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn e2_an_sglang_leg_that_is_cancelled_is_aborted_before_its_connection_closes() {
    let token = || vec![token(), Act::Hang];
    let answers = || vec![Act::Send(json_answer(ANSWER))];
    let fails = || vec![Act::Pause(100 * MS), Act::Send(status("500 Internal Server Error", "{}"))];
    let cases = [
        (End::Leaves, true, Some(answers()), token()),
        (End::Leaves, true, None, token()),
        (End::Leaves, false, None, vec![Act::Hang]),
        (End::Deadline, true, Some(answers()), token()),
        (End::Deadline, true, None, token()),
        (End::Deadline, false, Some(answers()), vec![Act::Hang]),
        (End::Deadline, false, None, vec![Act::Hang]),
        (End::Silence, true, Some(answers()), token()),
        (End::Silence, true, None, token()),
        (End::PrefillFails, true, Some(fails()), vec![Act::Hang]),
    ];
    for (end, stream, prefill, acts) in cases {
        let shown = format!("{end:?}, streamed: {stream}, pair: {}", prefill.is_some());
        let decode = engine(acts).await;
        let prefill = match prefill {
            Some(acts) => Some(engine(acts).await),
            None => None,
        };
        let role = if prefill.is_some() { "decode" } else { "aggregated" };
        let pair = prefill.iter().map(|prefill| ("prefill", &prefill.raw));
        let engines: Vec<_> = pair.chain([(role, &decode.raw)]).collect();
        let change = |config: &mut Config| match end {
            End::Deadline => config.timeouts.request = 500 * MS,
            End::Silence => {
                (config.timeouts.event_idle, config.timeouts.event_idle_max) = (300 * MS, 600 * MS)
            }
            End::Leaves | End::PrefillFails => {}
        };
        let cluster = cluster(&engines, change).await;
        end.of(&cluster, stream, &decode).await;
        // E2.3, E2.7
        assert_eq!(*decode.requests.zombies.lock(), Vec::<String>::new(), "{shown}");
        assert_eq!(decode.requests.aborted.lock().len(), 3, "{shown}");
        cluster.at_rest().await.unwrap();
    }
}

/// A connection that is counted until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn e2_an_engine_gets_64_aborts_at_a_time_and_legs_close_without_their_answers() {
    const CLIENTS: usize = 200;
    let [aborts, legs] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let (hanging, running) = (aborts.clone(), legs.clone());
    let hangs = move |request: &RawRequest| {
        let is_abort = request.line == "POST /abort_request";
        let count = if is_abort { &hanging } else { &running };
        count.fetch_add(1, Ordering::SeqCst);
        let keep = Act::Keep(Arc::new(Counted(count.clone())));
        if is_abort { vec![keep, Act::Hang] } else { vec![keep, token(), Act::Hang] }
    };
    let engine = RawEngine::serving(hangs).await;
    let prefill = RawEngine::serving(|_| vec![Act::Send(json_answer(ANSWER))]).await;
    let limit = |config: &mut Config| config.timeouts.abort = Duration::from_secs(60);
    let cluster = cluster(&[("prefill", &prefill), ("decode", &engine)], limit).await;
    let mut streams = Vec::new();
    for _ in 0..CLIENTS {
        let mut stream = cluster.client.stream(COMPLETIONS, &[], body(true)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        streams.push(stream);
    }
    drop(streams);
    // E2.7: no leg waits for the answer to its abort
    cluster.until("the legs are closed", |_| legs.load(Ordering::SeqCst) == 0).await.unwrap();
    cluster.until("aborts are sent", |_| aborts.load(Ordering::SeqCst) >= 64).await.unwrap();
    tokio::time::sleep(300 * MS).await;
    // E2.8
    assert_eq!(aborts.load(Ordering::SeqCst), 64);
    drop(engine);
    cluster.at_rest().await.unwrap();
}

/// The body of a list of prompts.
fn list(prompts: usize) -> String {
    let prompts = vec!["which way?"; prompts];
    format!(r#"{{"model":"tiny","prompt":{prompts:?},"max_tokens":4,"stream":true}}"#)
}

/// Returns whether a request aborts an item of a list.
fn aborts_item(request: &RawRequest) -> bool {
    let body: Value = serde_json::from_str(&request.body).unwrap_or_default();
    request.line == "POST /abort_request" && body["rid"].as_str().is_some_and(|id| id.contains('_'))
}

#[tokio::test]
async fn e2_aborts_of_lists_leave_turns_to_those_of_single_requests() {
    const LISTS: usize = 70;
    let [items, singles] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let (hanging, answered) = (items.clone(), singles.clone());
    let script = move |request: &RawRequest| {
        if aborts_item(request) {
            hanging.fetch_add(1, Ordering::SeqCst);
            return vec![Act::Keep(Arc::new(Counted(hanging.clone()))), Act::Hang];
        }
        if request.line == "POST /abort_request" {
            answered.fetch_add(1, Ordering::SeqCst);
            return vec![Act::Send(json_answer("{}"))];
        }
        vec![token(), Act::Hang]
    };
    let engine = RawEngine::serving(script).await;
    let limit = |config: &mut Config| config.timeouts.abort = Duration::from_secs(60);
    let cluster = cluster(&[("aggregated", &engine)], limit).await;
    let mut streams = Vec::new();
    for _ in 0..LISTS {
        let mut stream = cluster.client.stream(COMPLETIONS, &[], list(10)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        streams.push(stream);
    }
    drop(streams);
    cluster.until("aborts are sent", |_| items.load(Ordering::SeqCst) >= 8).await.unwrap();
    tokio::time::sleep(300 * MS).await;
    // E2.8
    assert_eq!(items.load(Ordering::SeqCst), 8);
    let mut stream = cluster.client.stream(COMPLETIONS, &[], body(true)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    cluster.until("the single request is aborted", |_| singles.load(Ordering::SeqCst) > 0).await.unwrap();
    assert_eq!(items.load(Ordering::SeqCst), 8);
    drop(engine);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn e2_the_items_of_a_list_are_aborted_once_within_the_time_of_one_abort() {
    for (pause, limit, most) in [(0, 5000, 300), (50, 500, 11)] {
        let engine = RawEngine::serving(move |request| match aborts_item(request) {
            true => vec![Act::Pause(pause * MS), Act::Send(json_answer("{}"))],
            false => vec![token(), Act::Hang],
        });
        let engine = engine.await;
        let change = |config: &mut Config| config.timeouts.abort = limit * MS;
        let cluster = cluster(&[("aggregated", &engine)], change).await;
        let mut stream = cluster.client.stream(COMPLETIONS, &[], list(300)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        drop(stream);
        let aborts = || engine.requests().iter().filter(|one| aborts_item(one)).count();
        cluster.until("items are aborted", |_| aborts() >= 2).await.unwrap();
        tokio::time::sleep(2500 * MS).await;
        // E2.8
        assert!((2..=most).contains(&aborts()), "{} of {most}", aborts());
        cluster.at_rest().await.unwrap();
    }
}
