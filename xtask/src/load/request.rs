//! One request: its body, its answer, and the verdict.

use std::time::Duration;

use rand::RngExt as _;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::{Answer, End, Kind, Load, Prompt, Recorder, Target};
use crate::{
    client::{CHAT, Client, Outcome, judge},
    proc::monotonic_nanos,
};

/// Longest time of a request. Longer means that it hangs.
const HANGS: Duration = Duration::from_secs(60);

/// What a client has of an answer.
#[derive(Default)]
pub(super) struct Asked {
    status: u16,
    bytes: Vec<u8>,
    ttft: Option<Duration>,
    sent: Option<Instant>,
}

impl Recorder {
    pub(super) fn note(
        &self,
        load: &Load,
        target: &Target,
        due: Instant,
        asked: Asked,
        end: End,
        tokens: u32,
    ) {
        let Asked { status, ttft, sent, .. } = asked;
        let sent = sent.unwrap_or(due);
        let (load, instance, ended) = (load.name, target.instance, Instant::now());
        self.answers.lock().push(Answer { load, instance, due, sent, ended, ttft, tokens, status, end });
    }

    pub(super) async fn one(&self, load: &Load, target: &Target, client: &Client, turn: u64, due: Instant) {
        let place = usize::try_from(turn).unwrap_or_default() % load.kinds.len().max(1);
        let kind = load.kinds.get(place).copied().unwrap_or(Kind::Whole);
        let tokens = rand::rng().random_range(load.tokens.0..=load.tokens.1);
        let body = body(load, kind, turn, tokens);
        self.sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut asked = Asked { sent: Some(Instant::now()), ..Asked::default() };
        let limit = match kind {
            Kind::Leaves { within_ms, .. } => {
                Duration::from_millis(rand::rng().random_range(0..within_ms.max(1)))
            }
            _ => HANGS,
        };
        // The timeout drops the answer, which closes the connection.
        let read = timeout(limit, read(client, load, body, kind == Kind::LeavesAtHead, &mut asked)).await;
        let end = match (kind, read) {
            (Kind::Leaves { .. }, Err(_)) => End::Left(asked.left()),
            (Kind::LeavesAtHead, Ok(Ok(()))) => End::Left(None),
            (_, Err(_)) => self.neither(format!("no end within {limit:?}")),
            (_, Ok(Err(error))) => self.neither(format!("{error:#}")),
            (_, Ok(Ok(()))) => self.judge(kind, &asked),
        };
        self.note(load, target, due, asked, end, tokens);
    }

    fn neither(&self, problem: String) -> End {
        self.problem(problem);
        End::Neither
    }

    fn judge(&self, kind: Kind, asked: &Asked) -> End {
        let stream = matches!(kind, Kind::Stream | Kind::Leaves { stream: true, .. });
        let success = (200..300).contains(&asked.status);
        match (judge(success, &String::from_utf8_lossy(&asked.bytes), stream), kind) {
            (Outcome::OneError, Kind::Malformed) => End::Refused,
            (other, Kind::Malformed) => self.neither(format!("a malformed body got {other:?}")),
            (Outcome::Whole | Outcome::Streamed, _) => End::Complete,
            (Outcome::OneError, _) => End::OneError,
            (Outcome::Neither(problem), _) => self.neither(problem.chars().take(300).collect()),
        }
    }
}

impl Asked {
    /// The `id` of an answer of which a token has come, and the time.
    fn left(&self) -> Option<(String, u64)> {
        self.ttft?;
        let text = String::from_utf8_lossy(&self.bytes);
        let id = text.split("\"id\":\"").nth(1)?.split('"').next()?.to_owned();
        Some((id, monotonic_nanos()))
    }

    fn has_token(&self) -> bool {
        let text = String::from_utf8_lossy(&self.bytes);
        text.split("\"content\":\"").skip(1).any(|rest| !rest.is_empty() && !rest.starts_with('"'))
    }
}

fn body(load: &Load, kind: Kind, turn: u64, tokens: u32) -> String {
    let prompt = match load.prompt {
        Prompt::Same => "a question of eight or so tokens".to_owned(),
        Prompt::Distinct(count) => format!("request {} ", turn % count).repeat(12),
        Prompt::Conversation => {
            format!("{} question {turn} {}", "shared words ".repeat(64), turn / 100)
        }
    };
    let stream = matches!(kind, Kind::Stream | Kind::LeavesAtHead | Kind::Leaves { stream: true, .. });
    match kind {
        Kind::Malformed => "{ this is not JSON".to_owned(),
        _ => json!({
            "model": "tiny", "stream": stream, "max_tokens": tokens, "ignore_eos": true,
            "messages": [{ "role": "user", "content": prompt }],
        })
        .to_string(),
    }
}

/// Sends a request and reads its answer to the end, or only its head.
async fn read(
    client: &Client,
    load: &Load,
    body: String,
    only_head: bool,
    asked: &mut Asked,
) -> anyhow::Result<()> {
    let started = Instant::now();
    let headers = [load.header];
    let headers = if load.header.0.is_empty() { &[][..] } else { &headers[..] };
    let mut answer = client.stream(CHAT, headers, body).await?;
    asked.status = answer.status.as_u16();
    while !only_head && let Some(piece) = answer.piece().await? {
        asked.bytes.extend_from_slice(&piece);
        if asked.ttft.is_none() && asked.has_token() {
            asked.ttft = Some(started.elapsed());
        }
    }
    Ok(())
}
