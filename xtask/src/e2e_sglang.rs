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
    real_engines::{Options, RealEngine, Session, checks},
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
    let Session { prompts, mut checks, .. } = session;
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
