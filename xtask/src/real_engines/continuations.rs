//! Streams that read through the death of a real engine (I14), or through its drain (I15): their answers are
//! compared with undisturbed ones, from text and from token ids.

use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{PATIENT, RealEngine, checks};
use crate::{
    client::{CHAT, Client},
    fleet::Fleet,
    metrics_text::by_label,
    poll, sh,
    table::Checks,
};

/// Output tokens of a stream.
const TOKENS: u32 = 160;
/// Streams start apart by this, so that a kill meets each of them at another token.
const APART: Duration = Duration::from_millis(150);

/// Answers that are never continued from text, because it may be divided or trimmed in another way:
/// docs/continuation.md.
const NOT_FROM_TEXT: [&str; 2] = ["ends_with_a_space", "within_a_character"];

/// From what the rest of a stream begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    Exact,
}

/// How an engine leaves while streams run.
#[derive(Debug)]
pub(crate) enum Leaves<'a> {
    /// It is killed.
    Killed(&'a mut RealEngine),
    /// It drains, and its streams move to others.
    Drained(&'a RealEngine),
}

/// Maximum time until a draining engine has no request. Two engines share the cores with each other.
const EMPTY: Duration = Duration::from_secs(60);

/// What a client read.
struct Read {
    text: String,
    is_whole: bool,
    /// The longest time between two events.
    pause: Duration,
}

impl Form {
    /// Settings of the gateway.
    pub(super) fn config(self) -> String {
        let exact = if self == Self::Exact { "[models.tiny]\ncontinuation = \"exact\"\n" } else { "" };
        // Health checks do not have to find the death: the connections tell.
        format!("{PATIENT}{exact}")
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Text => "from text",
            Self::Exact => "from token ids",
        }
    }
}

/// The answers of an undisturbed engine to these numbers of streams.
pub(crate) async fn undisturbed(engine: &RealEngine, streams: usize) -> anyhow::Result<Vec<String>> {
    let client = engine.client();
    let mut answers = Vec::new();
    for turn in 0..streams {
        answers.push(read(&client, turn).await?.text);
    }
    Ok(answers)
}

/// Lets an engine leave while streams run, and compares what their clients read with `expected`. `how` names
/// the run in the table.
pub(crate) async fn read_through(
    fleet: &Fleet,
    form: Form,
    how: &str,
    leaves: Leaves<'_>,
    expected: &[String],
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let streams = expected.len();
    let readers = (0..streams).map(|turn| {
        let client = fleet.client.clone();
        async move {
            sleep(APART * u32::try_from(turn).unwrap_or_default()).await;
            read(&client, turn).await
        }
    });
    let all = APART * u32::try_from(streams).unwrap_or_default();
    let after = all.mul_f64(rand::rng().random_range(0.6..1.0));
    let reason = match (&leaves, form) {
        (Leaves::Drained(_), _) => "moved",
        (Leaves::Killed(_), Form::Exact) => "continued_exact",
        (Leaves::Killed(_), Form::Text) => "continued",
    };
    let leave = async {
        sleep(after).await;
        match leaves {
            Leaves::Killed(engine) => engine.crash(),
            Leaves::Drained(engine) => return Ok(Some(drain(fleet, engine).await?)),
        }
        Ok::<_, anyhow::Error>(None)
    };
    let (read, drained) = tokio::try_join!(try_join_all(readers), leave)?;
    if let Some(took) = drained {
        checks.show(&format!("{how}: time until the worker was empty"), format!("{took:.1?}"));
    }
    let whole = read.iter().filter(|read| read.is_whole).count();
    let equal = read.iter().zip(expected).filter(|(read, expected)| read.text == **expected).count();
    let metrics = fleet.metrics().await?;
    let reasons = by_label(&metrics, "pointsman_continuations_total", "reason");
    let counted = |reason: &str| reasons.get(reason).copied().unwrap_or_default();
    let continued = counted(reason);
    let ended: f64 = match form {
        Form::Exact => 0.0,
        Form::Text => NOT_FROM_TEXT.iter().map(|reason| counted(reason)).sum(),
    };
    let counts: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let shown = format!("{whole} of {streams}; {}", counts.join(", "));
    let passed = whole as f64 + ended == streams as f64 && continued > 0.0;
    checks.check(&format!("{how}: streams that ended well"), shown, passed);
    let shown = format!("{equal} of {streams}");
    // Text may be divided into other tokens behind the seam.
    checks.check(&format!("{how}: equal to undisturbed"), shown, form == Form::Text || equal == streams);
    let mut pauses: Vec<Duration> = read.iter().map(|read| read.pause).collect();
    pauses.sort_unstable_by(|one, other| other.cmp(one));
    pauses.truncate(continued as usize);
    let at = |share: f64| {
        let place = ((1.0 - share) * (pauses.len() as f64 - 1.0)).round() as usize;
        pauses.get(place).map_or(0.0, Duration::as_secs_f64)
    };
    let shown = format!("p50 {:.2} s, p99 {:.2} s", at(0.5), at(0.99));
    checks.check(&format!("{how}: longest pauses of those continued"), shown, true);
    Ok(())
}

/// Drains an engine by moving its streams. Returns the time until it had no request.
pub(super) async fn drain(fleet: &Fleet, engine: &RealEngine) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let url = format!("http://{}", engine.address());
    let workers = fleet.admin.json("/workers").await?;
    let of = |workers: &Value| -> Option<Value> {
        workers["workers"].as_array()?.iter().find(|worker| worker["spec"]["url"] == url.as_str()).cloned()
    };
    let id = of(&workers).context("the gateway does not have the engine")?["id"].clone();
    fleet.admin.post(&format!("/workers/{id}/drain?move=true"), "").await?;
    let empty = || async {
        let worker = of(&fleet.admin.json("/workers").await?).context("the worker is gone")?;
        let ranks = worker["ranks"].as_array().into_iter().flatten();
        let active: u64 = ranks.filter_map(|rank| rank["active_requests"].as_u64()).sum();
        Ok((active == 0).then_some(()))
    };
    poll::until("the draining engine has no request", EMPTY, empty).await?;
    Ok(begun.elapsed())
}

/// Reads a greedy stream: a chat, or a completion.
async fn read(client: &Client, turn: usize) -> anyhow::Result<Read> {
    let mut body = json!({
        "model": "tiny", "stream": true, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true,
    });
    let prompt = checks::prompt(turn);
    let path = if turn.is_multiple_of(2) {
        body["messages"] = json!([{ "role": "user", "content": prompt }]);
        CHAT
    } else {
        body["prompt"] = json!(prompt);
        checks::COMPLETIONS
    };
    let mut stream = client.stream(path, &[], body.to_string()).await?;
    let (mut text, mut pause, mut last, mut is_whole) = (String::new(), Duration::ZERO, None, false);
    let mut problem = format!("stream {turn} has no event, status {}", stream.status);
    while let Some(event) = stream.next().await? {
        let Some(data) = event.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            is_whole = true;
            break;
        }
        let now = Instant::now();
        pause = pause.max(last.replace(now).map_or(Duration::ZERO, |last| now - last));
        let json: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
        let choice = &json["choices"][0];
        text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        problem = format!("stream {turn} ended after {} bytes of text with {data}", text.len());
    }
    if !is_whole {
        sh::status(&problem);
    }
    Ok(Read { text, is_whole, pause })
}
