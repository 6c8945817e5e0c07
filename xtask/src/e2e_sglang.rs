//! `e2e-sglang`: a real SGLang prefill and decode engine on CPU, with KV over TCP (Mooncake), behind the
//! gateway.
//!
//! Greedy output through both legs must equal that of one plain engine, token by token, also for lists of
//! prompts. The gateway must refuse several choices, because the pair would hang. Clients that disconnect
//! must leave no request in the engines. When a decode engine is killed, its stream must end with one valid
//! error event.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    client::{CHAT, Client},
    metrics_text::samples,
    real_engines::{Options, RealEngine, Recorder, Session, checks},
    sh,
    table::Checks,
};

mod engines;
mod install;

use engines::{Installed, Part};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Virtual environment with SGLang; created if it does not exist.
    #[arg(long, default_value = "target/venv-sglang")]
    venv: PathBuf,
    #[command(flatten)]
    options: Options,
}

/// Maximum time until the engines notice that clients disconnected. They check this every few seconds.
const SETTLES: Duration = Duration::from_secs(45);
/// Maximum time until a request that would hang is refused.
const REFUSED: Duration = Duration::from_secs(5);

/// Runs every check and prints the table.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let leavers = args.options.leavers;
    let mut session = Session::begin("sglang", &args.options)?;
    let installed = Installed::at(&sh::root().join(&args.venv))?;
    let expected = plain_engine(&installed, &mut session).await?;

    sh::status("starting a prefill and a decode engine (about 2 min)");
    let mut prefill = installed.start("prefill", Part::Prefill, session.dir.path())?;
    let mut decode = installed.start("decode", Part::Decode, session.dir.path())?;
    prefill.ready().await?;
    decode.ready().await?;
    let workers = [&prefill, &decode].map(|engine| format!("engine=sglang,url=http://{}", engine.address));
    let fleet = session.gateway(&workers).await?;
    let Session { prompts, recorder, mut checks, .. } = session;
    if let Some(recorder) = &recorder {
        for (engine, name) in [(&prefill, "prefill"), (&decode, "decode")] {
            facts(recorder, engine, name).await?;
        }
    }
    checks::compare(&fleet.client, &prompts, &expected, &mut checks).await?;
    checks::batches(&fleet.client, &prompts, &expected, &mut checks).await?;
    let moved = decode.metric("sglang:num_requests_total", "").await?;
    checks.check("requests that the decode engine finished", moved, moved > 0.0);
    several_choices(&fleet.client, &mut checks).await?;
    checks::leave_early(&fleet.client, leavers, &prompts, true).await?;
    let held = held(&[&prefill, &decode]).await?;
    checks.check(&format!("held after {leavers} clients disconnected"), held, held == 0);
    checks.none("bookings left in the gateway", fleet.booked(Duration::from_secs(5)).await?);
    checks::kill_mid_stream(&fleet.client, &mut decode, &mut checks).await?;
    checks.finish()
}

/// Returns the answers of one plain engine. Also tests this engine as an aggregated worker whose KV events
/// the gateway finds by itself.
async fn plain_engine(installed: &Installed, session: &mut Session) -> anyhow::Result<Vec<Vec<u64>>> {
    sh::status("starting one plain engine (about 60 s)");
    let mut plain = installed.start("plain", Part::Plain, session.dir.path())?;
    plain.ready().await?;
    if let Some(recorder) = &session.recorder {
        record(recorder, &plain).await?;
    }
    let worker = format!("engine=sglang,url=http://{}", plain.address);
    let (expected, fleet) = session.plain_answers(&plain, worker).await?;
    let metrics = fleet.metrics().await?;
    let live = samples(&metrics, "pointsman_kv_feed_live").iter().filter(|one| one.value == 1.0).count();
    session.checks.check("feeds of KV events that configured themselves", live, live == 1);
    Ok(expected)
}

/// Checks that the gateway refuses several choices before it sends anything, because a pair hangs on them.
async fn several_choices(client: &Client, checks: &mut Checks) -> anyhow::Result<()> {
    let body = json!({ "model": "tiny", "n": 2, "messages": [{ "role": "user", "content": "hello" }] });
    let asked = client.send(Method::POST, CHAT, &[], Bytes::from(body.to_string()));
    let status = match timeout(REFUSED, asked).await {
        Ok(answer) => answer?.status().to_string(),
        Err(_) => format!("no answer within {REFUSED:?}"),
    };
    checks.check("two choices", &status, status == StatusCode::BAD_REQUEST.to_string());
    Ok(())
}

/// Returns the number of requests in any queue of the engines, from their `/v1/loads`, once it is zero or a
/// time limit has passed.
async fn held(engines: &[&RealEngine]) -> anyhow::Result<u64> {
    let started = tokio::time::Instant::now();
    loop {
        let mut held = 0;
        for engine in engines {
            let loads = engine.client().json("/v1/loads").await?;
            held += loads["loads"].as_array().into_iter().flatten().map(requests).sum::<u64>();
        }
        if held == 0 || started.elapsed() > SETTLES {
            return Ok(held);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

fn requests(load: &Value) -> u64 {
    let queues = load["disaggregation"].as_object().into_iter().flatten();
    let queues = queues.filter(|(name, _)| name.ends_with("_reqs")).map(|(_, count)| count);
    let counts = [&load["num_running_reqs"], &load["num_waiting_reqs"]].into_iter().chain(queues);
    counts.filter_map(Value::as_u64).sum()
}

/// Records the facts that an engine reports.
async fn facts(recorder: &Recorder, engine: &RealEngine, name: &str) -> anyhow::Result<()> {
    for (path, file) in [
        ("/server_info", "server-info.json"),
        ("/model_info", "model-info.json"),
        ("/v1/loads", "loads.json"),
        ("/v1/models", "models.json"),
        ("/metrics", "metrics.txt"),
    ] {
        recorder.get(engine, path, &format!("{name}-{file}")).await?;
    }
    Ok(())
}

/// Records answers of every form that the gateway reads.
async fn record(recorder: &Recorder, engine: &RealEngine) -> anyhow::Result<()> {
    let chat = |more: Value| {
        let mut body = json!({
            "model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": true,
            "rid": "00112233445566778899aabbccddeeff",
            "messages": [{ "role": "user", "content": "Which points lead to siding four?" }],
        });
        body.as_object_mut()
            .into_iter()
            .for_each(|body| body.extend(more.as_object().cloned().unwrap_or_default()));
        body
    };
    let usage = json!({ "stream": true, "stream_options": { "include_usage": true } });
    recorder.post(engine, CHAT, &chat(json!({})), "chat.json").await?;
    recorder.post(engine, CHAT, &chat(usage.clone()), "chat-stream.txt").await?;
    recorder.post(engine, CHAT, &chat(json!({ "max_tokens": -1 })), "chat-refused.json").await?;
    for (prompt, name) in [(json!("Tell about points."), "completion"), (json!(["one", "two"]), "batch")] {
        let mut body = checks::body(&prompt, false, 4);
        body["rid"] = json!("00112233445566778899aabbccddeeff");
        recorder.post(engine, checks::COMPLETIONS, &body, &format!("{name}.json")).await?;
        body.as_object_mut()
            .into_iter()
            .for_each(|body| body.extend(usage.as_object().cloned().unwrap_or_default()));
        recorder.post(engine, checks::COMPLETIONS, &body, &format!("{name}-stream.txt")).await?;
    }
    facts(recorder, engine, "plain").await
}
