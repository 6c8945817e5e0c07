//! A fleet of real vLLM pairs moves to another version under load (B8.8): the new pair joins, the old one
//! drains by moving its streams, and is removed. No client sees an error, and no request is split over both
//! versions.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{RealEngine, checks, continuations};
use crate::{
    client::{Client, Streaming},
    fleet::Fleet,
    sh,
    table::Checks,
};

/// Clients that read one stream after the other.
const CLIENTS: usize = 3;
/// Output tokens of a stream.
const TOKENS: u32 = 64;
/// Time under load before, between and after the steps.
const PHASE: Duration = Duration::from_secs(20);
/// Maximum time until the gateway sends requests to the new pair.
const JOINS: Duration = Duration::from_secs(120);

/// Ids of the workers of both versions: prefill, decode.
pub(super) const OLD: [u64; 2] = [1, 2];
pub(super) const NEW: [u64; 2] = [3, 4];

/// Streams that the clients read.
#[derive(Default)]
struct Load {
    /// Number of streams by their prefill and decode worker.
    pairs: BTreeMap<[Option<u64>; 2], u32>,
    problems: Vec<String>,
}

/// Moves a gateway's clients from one pair to another, which is not started yet.
pub(super) async fn run(
    fleet: &Fleet,
    old: &mut [RealEngine; 2],
    start_new: impl AsyncFnOnce() -> anyhow::Result<[RealEngine; 2]>,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let is_over = AtomicBool::new(false);
    let clients = (0..CLIENTS).map(|turn| read_until(&fleet.client, turn, &is_over));
    let moves = async {
        let moved = move_fleet(fleet, old, start_new, checks).await;
        is_over.store(true, Relaxed);
        moved
    };
    let (loads, new) = tokio::join!(join_all(clients), moves);
    let mut new = new?;
    let mut all = Load::default();
    for load in loads {
        load.pairs.into_iter().for_each(|(pair, count)| *all.pairs.entry(pair).or_default() += count);
        all.problems.extend(load.problems);
    }
    all.problems.iter().for_each(|problem| sh::status(problem));
    checks.none("streams with an error", all.problems.len() as u64);
    let served = |pair: [u64; 2]| all.pairs.get(&pair.map(Some)).copied().unwrap_or_default();
    let others = all.pairs.values().sum::<u32>() - served(OLD) - served(NEW);
    checks.check("streams by the old pair", served(OLD), served(OLD) > 0);
    checks.check("streams by the new pair", served(NEW), served(NEW) > 0);
    checks.check("streams by others: a mixed pair, or one worker", format!("{:?}", all.pairs), others == 0);
    new.iter_mut().for_each(RealEngine::crash);
    Ok(())
}

/// Adds the new pair, and lets the old one leave. Returns the new one.
async fn move_fleet(
    fleet: &Fleet,
    old: &mut [RealEngine; 2],
    start_new: impl AsyncFnOnce() -> anyhow::Result<[RealEngine; 2]>,
    checks: &mut Checks,
) -> anyhow::Result<[RealEngine; 2]> {
    sleep(PHASE).await;
    sh::status("starting the pair of the new version under load (some minutes)");
    let new = start_new().await?;
    for ((engine, role), id) in new.iter().zip(["prefill", "decode"]).zip(NEW) {
        let url = format!("http://{}", engine.address());
        let worker = json!({ "id": id, "role": role, "engine": "vllm", "url": url });
        fleet.admin.post("/workers", worker.to_string()).await?;
    }
    let joined = Instant::now();
    serves(fleet, NEW).await?;
    checks.show("time until the new pair served a request", format!("{:.1?}", joined.elapsed()));
    for (prefill, decode) in [(OLD[0], NEW[1]), (NEW[0], OLD[1])] {
        let (shown, is_refused) = mixed(&fleet.client, prefill, decode).await?;
        checks.check(&format!("hints: prefill on {prefill}, decode on {decode}"), shown, is_refused);
    }
    sleep(PHASE).await;
    // The decode worker first: a prefill worker without one has no use.
    for (engine, id) in old.iter_mut().zip(OLD).rev() {
        let took = continuations::drain(fleet, engine).await?;
        checks.show(&format!("time until worker {id} was empty"), format!("{took:.1?}"));
        let removed = fleet.admin.send(Method::DELETE, &format!("/workers/{id}"), &[], Bytes::new()).await?;
        checks.check(&format!("worker {id} removed"), removed.status(), removed.status().is_success());
        engine.crash();
    }
    sleep(PHASE).await;
    Ok(new)
}

/// Waits until a request to a pair of workers is answered.
async fn serves(fleet: &Fleet, pair: [u64; 2]) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let (status, text) = hinted(&fleet.client, pair[0], pair[1]).await?;
        if status == 200 {
            return Ok(());
        }
        anyhow::ensure!(begun.elapsed() < JOINS, "the new pair serves nothing after {JOINS:?}: {text}");
        sleep(Duration::from_millis(500)).await;
    }
}

/// Asks for a pair of both versions. Returns what the client got, and whether the gateway refused it.
async fn mixed(client: &Client, prefill: u64, decode: u64) -> anyhow::Result<(String, bool)> {
    let (status, text) = hinted(client, prefill, decode).await?;
    let error: Value = serde_json::from_str(&text).unwrap_or_default();
    let code = error["error"]["code"].as_str().unwrap_or("no code");
    sh::status(&text);
    Ok((format!("{status} {code}"), status >= 400 && error["error"]["code"].is_string()))
}

/// Sends a completion whose hints name both workers.
async fn hinted(client: &Client, prefill: u64, decode: u64) -> anyhow::Result<(u16, String)> {
    let [prefill, decode] = [prefill, decode].map(|id| id.to_string());
    let hints = [("x-prefill-instance-id", &*prefill), ("x-worker-instance-id", &*decode)];
    let body = checks::body(&json!(checks::prompt(1)), false, 4).to_string();
    let answer = client.stream(checks::COMPLETIONS, &hints, body).await?;
    Ok((answer.status.as_u16(), answer.rest().await?))
}

/// Reads streams until it is over.
async fn read_until(client: &Client, turn: usize, is_over: &AtomicBool) -> Load {
    let mut load = Load::default();
    let mut number = turn;
    while !is_over.load(Relaxed) {
        match read(client, number).await {
            Ok(pair) => *load.pairs.entry(pair).or_default() += 1,
            Err(error) => load.problems.push(format!("stream {number}: {error:#}")),
        }
        number += CLIENTS;
    }
    load
}

/// Reads one stream to its end. Returns the prefill and the decode worker that the gateway names.
async fn read(client: &Client, turn: usize) -> anyhow::Result<[Option<u64>; 2]> {
    let body = checks::body(&json!(format!("{turn} {}", checks::prompt(turn))), true, TOKENS);
    let asks = [("x-pointsman-decision", "1")];
    let mut stream = client.stream(checks::COMPLETIONS, &asks, body.to_string()).await?;
    let pair = [worker(&stream, "prefill"), worker(&stream, "decode")];
    let mut last = format!("no event, status {}", stream.status);
    while let Some(event) = stream.next().await? {
        let Some(data) = event.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            return Ok(pair);
        }
        let json: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
        anyhow::ensure!(json["error"].is_null(), "{data}");
        data.clone_into(&mut last);
    }
    anyhow::bail!("it ended without [DONE] after: {last}")
}

/// Returns the worker of a leg in the header that tells the decisions: `prefill=1/0 …, decode=2/0 …`.
fn worker(stream: &Streaming, leg: &str) -> Option<u64> {
    let told = stream.headers.get("x-pointsman-decision")?.to_str().ok()?;
    let of = told.split(", ").find_map(|part| part.strip_prefix(leg)?.strip_prefix('='))?;
    of.split('/').next()?.parse().ok()
}
