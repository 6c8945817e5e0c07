//! Requests of all kinds at a fixed rate, over connections with TLS that do not last.

use std::{path::Path, sync::Arc, time::Duration};

use http::Method;
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use super::changes::Changes;
use crate::{
    client::{CHAT, Client, Outcome},
    fleet::Fleet,
    sh,
    table::Checks,
};

/// Requests over the connections of one client, before another one begins with new connections.
const REQUESTS_OF_A_CLIENT: u64 = 200;
/// Requests that are open at most.
const MAX_OPEN: usize = 1_000;
/// Longest time of a request.
const LIMIT: Duration = Duration::from_secs(60);

/// How many requests ended in which way.
#[derive(Debug, Default)]
pub(super) struct Seen {
    sent: u64,
    complete: u64,
    refused_as_expected: u64,
    left: u64,
    /// When requests ended with one valid error, and the error.
    errors: Vec<(Instant, String)>,
    /// Ends that are never right.
    wrong: Vec<String>,
}

/// A running load.
pub(super) struct Traffic {
    stop: CancellationToken,
    load: JoinSet<()>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Stream,
    Whole,
    /// Leaves after the first piece of the answer.
    Leaves,
    /// Its body is not JSON: refused.
    Malformed,
}

impl Traffic {
    /// Starts `rate` requests a second.
    pub(super) fn start(fleet: &Fleet, authority: &Path, rate: u32) -> anyhow::Result<Self> {
        let (stop, seen) = (CancellationToken::new(), Arc::<Mutex<Seen>>::default());
        let address = fleet.gateway.listening();
        let client = Client::secure(&address, authority)?;
        let authority = authority.to_owned();
        let mut load = JoinSet::new();
        load.spawn(run((stop.clone(), seen.clone()), (address, authority), client, rate));
        Ok(Self { stop, load, seen })
    }

    /// Ends the load, and waits for the open requests.
    pub(super) async fn stop(self) -> Seen {
        self.stop.cancel();
        self.load.join_all().await;
        std::mem::take(&mut *self.seen.lock())
    }
}

async fn run(
    (stop, seen): (CancellationToken, Arc<Mutex<Seen>>),
    (address, authority): (String, std::path::PathBuf),
    mut client: Client,
    rate: u32,
) {
    let (began, mut open) = (Instant::now(), JoinSet::new());
    for turn in 0_u64.. {
        let due = began + Duration::from_secs_f64(turn as f64 / f64::from(rate));
        tokio::select! {
            () = stop.cancelled() => break,
            () = sleep_until(due) => {}
        }
        while open.try_join_next().is_some() {}
        if turn % REQUESTS_OF_A_CLIENT == 0 {
            match Client::secure(&address, &authority) {
                Ok(new) => client = new,
                Err(error) => seen.lock().wrong.push(format!("{error:#}")),
            }
        }
        if open.len() >= MAX_OPEN {
            seen.lock().wrong.push(format!("{MAX_OPEN} requests are open"));
            sleep(Duration::from_secs(1)).await;
            continue;
        }
        let kind = match turn % 20 {
            0 => Kind::Malformed,
            1 | 2 => Kind::Leaves,
            3..=7 => Kind::Whole,
            _ => Kind::Stream,
        };
        seen.lock().sent += 1;
        open.spawn(one(client.clone(), kind, turn, seen.clone()));
    }
    open.join_all().await;
}

async fn one(client: Client, kind: Kind, turn: u64, seen: Arc<Mutex<Seen>>) {
    let stream = matches!(kind, Kind::Stream | Kind::Leaves);
    // Every prompt is another one. A hundred of them share their beginning.
    let prompt = format!("{} question {turn} {}", "shared words ".repeat(64), turn / 100);
    let body = match kind {
        Kind::Malformed => "{ this is not JSON".to_owned(),
        _ => serde_json::json!({
            "model": "tiny", "stream": stream, "max_tokens": 20,
            "messages": [{ "role": "user", "content": prompt }],
        })
        .to_string(),
    };
    if matches!(kind, Kind::Leaves) {
        let left = timeout(LIMIT, leave(&client, body)).await;
        let mut seen = seen.lock();
        match left {
            Ok(Ok(())) => seen.left += 1,
            Ok(Err(error)) => seen.wrong.push(format!("{error:#}")),
            Err(_) => seen.wrong.push(format!("no piece of an answer within {LIMIT:?}")),
        }
        return;
    }
    let outcome = client.outcome(CHAT, body, stream).await;
    let mut seen = seen.lock();
    match (outcome, kind) {
        (Outcome::OneError, Kind::Malformed) => seen.refused_as_expected += 1,
        (outcome, Kind::Malformed) => seen.wrong.push(format!("a malformed body got {outcome:?}")),
        (Outcome::Whole | Outcome::Streamed, _) => seen.complete += 1,
        (Outcome::OneError, _) => seen.errors.push((Instant::now(), "one valid error".to_owned())),
        (Outcome::Neither(problem), _) => seen.wrong.push(problem),
    }
}

async fn leave(client: &Client, body: String) -> anyhow::Result<()> {
    let answer = client.send(Method::POST, CHAT, &[], body.into()).await?;
    drop(answer);
    Ok(())
}

impl Seen {
    /// Every error has an engine's end shortly before it.
    pub(super) fn judge(&self, changes: &Changes, checks: &mut Checks) {
        checks.check("requests sent", self.sent, self.sent > 0);
        checks.check("complete answers", self.complete, self.complete > 0);
        checks.check("malformed bodies refused", self.refused_as_expected, self.refused_as_expected > 0);
        checks.check("clients that left", self.left, self.left > 0);
        let (explained, unexplained): (Vec<_>, Vec<_>) =
            self.errors.iter().partition(|(ended, _)| changes.explains(*ended));
        checks.show("errors within 5 s after an engine was killed", explained.len());
        checks.none("errors without such a reason", unexplained.len() as u64);
        checks.none("answers that are neither whole nor one valid error", self.wrong.len() as u64);
        for problem in self.wrong.iter().take(5) {
            sh::status(&format!("one of these: {problem}"));
        }
    }
}
