//! Checks of a prefill and a decode engine behind the gateway: equal answers token by token, clients that
//! disconnect, and a decode engine that is killed.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::RealEngine;
use crate::{
    client::{Client, Streaming},
    table::Checks,
};

pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Returns prompts of different lengths, some with a common prefix.
pub(crate) fn prompt(turn: usize) -> String {
    let subject = ["trains", "points", "signals", "sidings", "junctions"][turn % 5];
    let mut text = format!("Tell about {subject}. ");
    for word in 0..(20 + turn * 6 % 240) {
        text.push_str(&format!("{subject}{} ", word * (turn % 7 + 1)));
    }
    text
}

/// Returns the body of a completion for a prompt or a list of prompts.
pub(crate) fn body(prompt: &Value, stream: bool, tokens: u32) -> Value {
    json!({
        "model": "tiny", "prompt": prompt, "stream": stream, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// Returns the answers of one engine, with which those of a pair are compared.
pub(crate) async fn answers(client: &Client, prompts: &[String]) -> anyhow::Result<Vec<Vec<u64>>> {
    let mut all = Vec::new();
    for prompt in prompts {
        all.push(whole(client, prompt).await?);
    }
    Ok(all)
}

/// Compares the answers of a pair with those of one engine.
pub(crate) async fn compare(
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
    for (how, equal) in [("whole", equal), ("streamed", streamed_equal)] {
        let what = format!("greedy tokens equal to the plain engine's, {how}");
        checks.check(&what, format!("{equal} of {all}"), equal == all);
    }
    Ok(())
}

/// Compares the answers to lists of two prompts with those of one engine, and checks their ids.
pub(crate) async fn batches(
    client: &Client,
    prompts: &[String],
    expected: &[Vec<u64>],
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let (mut equal, mut all, mut bare) = (0, 0, 0);
    for (prompts, expected) in prompts.chunks_exact(2).zip(expected.chunks_exact(2)) {
        let answer = client.post(COMPLETIONS, body(&json!(prompts), false, 16).to_string()).await?;
        let answer: Value = serde_json::from_str(&answer)?;
        let id = answer["id"].as_str().unwrap_or_default();
        bare += usize::from(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()));
        all += 1;
        equal += usize::from((0..2).all(|item| tokens(&answer, item).as_ref() == expected.get(item)));
    }
    checks.check("lists of two prompts, equal", format!("{equal} of {all}"), equal == all);
    checks.check("ids of these answers without a number", format!("{bare} of {all}"), bare == all);
    Ok(())
}

/// Returns the token ids of an answer.
async fn whole(client: &Client, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let answer = client.post(COMPLETIONS, body(&json!(prompt), false, 16).to_string()).await?;
    let answer: Value = serde_json::from_str(&answer)?;
    tokens(&answer, 0).with_context(|| format!("the answer has no token ids: {answer}"))
}

async fn streamed(client: &Client, prompt: &str) -> anyhow::Result<Vec<u64>> {
    let mut stream = client.stream(COMPLETIONS, &[], body(&json!(prompt), true, 16).to_string()).await?;
    let mut all = Vec::new();
    while let Some(event) = next_json(&mut stream).await? {
        ensure!(event["error"].is_null(), "the stream contains an error event: {event}");
        all.extend(tokens(&event, 0).unwrap_or_default());
    }
    Ok(all)
}

fn tokens(answer: &Value, choice: usize) -> Option<Vec<u64>> {
    Some(answer["choices"][choice]["token_ids"].as_array()?.iter().filter_map(Value::as_u64).collect())
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

/// Disconnects at random times: during prefill, between the legs, and during the stream. With `lists`, every
/// third client sends a list of two prompts.
pub(crate) async fn leave_early(
    client: &Client,
    count: usize,
    prompts: &[String],
    lists: bool,
) -> anyhow::Result<()> {
    let visits = (0..count).map(|turn| {
        let text = format!("{turn} {}", prompts.get(turn % prompts.len()).map_or("", String::as_str));
        let prompt = if lists && turn % 3 == 0 { json!([text, "and another"]) } else { json!(text) };
        let stay = Duration::from_millis(rand::rng().random_range(0..700));
        let read = async move {
            let mut stream = client.stream(COMPLETIONS, &[], body(&prompt, true, 200).to_string()).await?;
            while stream.piece().await?.is_some() {}
            Ok::<_, anyhow::Error>(())
        };
        async move { timeout(stay, read).await.unwrap_or(Ok(())) }
    });
    futures_util::future::try_join_all(visits).await?;
    Ok(())
}

/// Kills the decode engine during a stream, which must then end with one error event.
pub(crate) async fn kill_mid_stream(
    client: &Client,
    decode: &mut RealEngine,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let long = body(&json!("a long story about points and trains"), true, 1_500);
    let mut stream = client.stream(COMPLETIONS, &[], long.to_string()).await?;
    let Some(first) = next_json(&mut stream).await? else { bail!("the stream ended before its first event") };
    decode.crash();
    let mut events = vec![first];
    while let Some(event) = next_json(&mut stream).await? {
        events.push(event);
    }
    let errors = events.iter().filter(|event| event["error"]["code"].is_string()).count();
    let last = events.last().is_some_and(|event| event["error"].is_object());
    let shown = format!("{errors} error after {} events", events.len() - errors);
    checks.check("decode engine killed in a stream", shown, errors == 1 && last);
    Ok(())
}
