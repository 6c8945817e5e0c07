//! One request: its body, its answer, and the verdict.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use rand::RngExt as _;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::{Answer, End, Kind, Load, Prompt, Recorder, Target};
use crate::{
    client::{CHAT, Client, LIMIT, Outcome, Received},
    proc::monotonic_nanos,
};

impl Recorder {
    pub(super) fn note(
        &self,
        load: &Load,
        target: &Target,
        due: Instant,
        received: &Received,
        end: End,
        tokens: u32,
    ) {
        let Received { status, ttft, sent, .. } = received;
        let (load, instance, ended) = (load.name.clone(), target.instance, Instant::now());
        let (sent, status, ttft) = (sent.unwrap_or(due), *status, *ttft);
        self.answers.lock().push(Answer { load, instance, due, sent, ended, ttft, tokens, status, end });
    }

    pub(super) async fn one(&self, load: &Load, target: &Target, client: &Client, turn: u64, due: Instant) {
        let place = usize::try_from(turn).unwrap_or_default() % load.kinds.len().max(1);
        let kind = load.kinds.get(place).copied().unwrap_or(Kind::Whole);
        let tokens = rand::rng().random_range(load.tokens.0..=load.tokens.1);
        let body = body(load, kind, turn, tokens);
        self.sent.fetch_add(1, Relaxed);
        let limit = match kind {
            Kind::Leaves { within_ms, .. } => {
                Duration::from_millis(rand::rng().random_range(0..within_ms.max(1)))
            }
            _ => LIMIT,
        };
        let (name, value) = &load.header;
        let headers = [(name.as_str(), value.as_str())];
        let headers = if name.is_empty() { &[][..] } else { &headers[..] };
        let mut received = Received::default();
        let read = async {
            if kind == Kind::LeavesAtHead {
                return client.stream(CHAT, headers, body).await.map(drop);
            }
            client.read(CHAT, headers, body, &mut received, |_| ()).await
        };
        // The timeout drops the answer, which closes the connection.
        let read = timeout(limit, read).await;
        let end = match (kind, read) {
            (Kind::Leaves { .. }, Err(_)) => End::Left(left(&received)),
            (Kind::LeavesAtHead, Ok(Ok(()))) => End::Left(None),
            (_, Err(_)) => self.neither_with(format!("no end within {limit:?}")),
            (_, Ok(Err(error))) => self.neither_with(format!("{error:#}")),
            (_, Ok(Ok(()))) => self.judge(kind, &received),
        };
        self.note(load, target, due, &received, end, tokens);
    }

    fn neither_with(&self, problem: String) -> End {
        self.problem(problem);
        End::Neither
    }

    fn judge(&self, kind: Kind, received: &Received) -> End {
        match (received.judge(is_stream(kind)), kind) {
            (Outcome::OneError, Kind::Malformed) => End::Refused,
            (other, Kind::Malformed) => self.neither_with(format!("a malformed body got {other:?}")),
            (Outcome::Whole | Outcome::Streamed, _) => End::Complete,
            (Outcome::OneError, _) => End::OneError,
            (Outcome::Neither(problem), _) => self.neither_with(problem.chars().take(300).collect()),
        }
    }
}

/// The `id` of an answer of which a token has come, and the time.
fn left(received: &Received) -> Option<(String, u64)> {
    received.ttft?;
    let text = received.text();
    let id = text.split("\"id\":\"").nth(1)?.split('"').next()?.to_owned();
    Some((id, monotonic_nanos()))
}

fn is_stream(kind: Kind) -> bool {
    matches!(kind, Kind::Stream | Kind::LeavesAtHead | Kind::Leaves { stream: true, .. })
}

fn body(load: &Load, kind: Kind, turn: u64, tokens: u32) -> String {
    let prompt = match load.prompt {
        Prompt::Same => "a question of eight or so tokens".to_owned(),
        Prompt::Distinct(count) => format!("request {} ", turn % count).repeat(12),
        Prompt::Conversation => {
            format!("{} question {turn} {}", "shared words ".repeat(64), turn / 100)
        }
    };
    match kind {
        Kind::Malformed => "{ this is not JSON".to_owned(),
        _ => json!({
            "model": "tiny", "stream": is_stream(kind), "max_tokens": tokens, "ignore_eos": true,
            "messages": [{ "role": "user", "content": prompt }],
        })
        .to_string(),
    }
}
