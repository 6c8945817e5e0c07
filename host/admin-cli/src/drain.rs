//! `pointsman drain` and `undrain`.

use std::{process::ExitCode, time::Duration};

use clap::{ArgGroup, Args};
use pointsman_cli::duration;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use crate::{
    answer::GatewayError,
    api::{Moves, Status, Worker, Workers},
    block_on, conclude,
    gateway::{ANSWER_TIMEOUT, Gateway, GatewayArgs},
    print,
    text::{clean, counted},
    worker_name::worker_of,
};

/// Time between two looks at the worker's requests.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two lines that say how the moves of streams go.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time that the gateway has for an answer.
const MIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Arguments of `drain`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("waits").multiple(true))]
pub struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// Continue its running streams on other workers, a few at a time, and wait until no request of this
    /// gateway runs on the worker, and no handoff of it is open. What cannot be continued ends there.
    #[arg(long = "move", group = "waits")]
    moves: bool,
    /// Wait until no request of this gateway runs on the worker, and decode workers have consumed all of its
    /// handoffs.
    #[arg(long, group = "waits")]
    wait: bool,
    /// Longest wait; then the exit code is 1, and the worker stays draining.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, requires = "waits")]
    timeout: Duration,
    /// Print the JSON of the answer unchanged, and do not wait.
    #[arg(long, conflicts_with = "wait")]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Arguments of `undrain`.
#[derive(Debug, Args)]
pub struct UndrainArgs {
    #[command(flatten)]
    which: Which,
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Worker of the command.
#[derive(Debug, Args)]
struct Which {
    /// Id, URL or address of the worker, as `pointsman workers` shows them, or a beginning that no other
    /// worker has.
    worker: String,
}

impl UndrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            let worker = worker_of(&gateway, &self.which.worker).await?;
            let id = worker.id;
            let answer = gateway.delete(&format!("/workers/{id}/drain")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            let text = match (worker.draining, worker.refusal()) {
                (true, _) => after_undrain(&gateway, id).await?,
                (false, None) => format!("worker {id} was not drained; it gets requests as before"),
                (false, Some(why)) => format!("worker {id} was not drained; it gets no request: {why}"),
            };
            print(&format!("{text}\n"))?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl DrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let mut gateway = self.gateway.client()?;
        if self.wait || self.moves {
            // A gateway that hangs is not waited for any longer than its worker.
            gateway = gateway.with_timeout(self.timeout.clamp(MIN_ANSWER_TIMEOUT, ANSWER_TIMEOUT));
        }
        block_on(async {
            let worker = worker_of(&gateway, &self.which.worker).await?;
            let id = worker.id;
            let moves = if self.moves { "?move=true" } else { "" };
            let answer = gateway.post(&format!("/workers/{id}/drain{moves}")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            print(&format!("worker {id} is draining; it gets no new request\n"))?;
            for warning in warnings(&gateway, &worker).await? {
                print(&format!("warning: {warning}\n"))?;
            }
            if self.wait || self.moves {
                return self.finished(&gateway, id).await;
            }
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Waits until the worker has no request and no open handoff.
    async fn finished(&self, gateway: &Gateway, id: u64) -> anyhow::Result<ExitCode> {
        let begun = Instant::now();
        let (mut told, mut told_at) = (None, begun);
        loop {
            let workers: Workers = gateway.get("/workers").await?.read()?;
            let worker = workers.workers.iter().find(|worker| worker.id == id);
            let Some(worker) = worker else {
                return conclude(&format!("worker {id} left the gateway\n"), ExitCode::SUCCESS);
            };
            if !worker.draining {
                let text =
                    format!("worker {id} is not draining any more: another operator ended the drain\n");
                return conclude(&text, ExitCode::FAILURE);
            }
            let (active, handoffs, waited) = (worker.active(), worker.open_handoffs, begun.elapsed());
            let (seconds, moves) = (waited.as_secs_f64(), worker.moves.as_ref());
            if active + handoffs == 0 && moves.is_none_or(|moves| moves.moving == 0) {
                let text = format!("worker {id} has no request after {seconds:.1} s{}\n", summary(moves));
                return conclude(&text, ExitCode::SUCCESS);
            }
            if waited >= self.timeout {
                let text = format!(
                    "worker {id} still has {} after {seconds:.1} s; it stays draining{}{}\n",
                    work(active, handoffs),
                    summary(moves),
                    left(active, moves)
                );
                return conclude(&text, ExitCode::FAILURE);
            }
            let progress = self.moves.then(|| (active, handoffs, moves.cloned()));
            if progress != told && told_at.elapsed() >= PROGRESS_INTERVAL {
                let moving = moves.map_or(0, |moves| moves.moving);
                let are = if moving == 1 { "is" } else { "are" };
                print(&format!(
                    "worker {id} has {}, {moving} {are} moving{}\n",
                    work(active, handoffs),
                    summary(moves)
                ))?;
                (told, told_at) = (progress, Instant::now());
            }
            tokio::time::sleep(POLL_INTERVAL.min(self.timeout - waited)).await;
        }
    }
}

/// Says whether a worker gets requests after its drain was ended.
///
/// # Errors
/// The gateway does not answer, or the worker left it.
pub async fn after_undrain(gateway: &Gateway, worker: u64) -> Result<String, GatewayError> {
    let now = worker_of(gateway, &worker.to_string()).await?;
    Ok(match now.refusal() {
        None => format!("worker {worker} gets requests again"),
        Some(why) => format!("the drain of worker {worker} ended, but it gets no request: {why}"),
    })
}

/// Says how a drain of a worker began, with warnings.
///
/// # Errors
/// The gateway does not answer, or the worker left it.
pub async fn after_drain(gateway: &Gateway, worker: u64) -> Result<String, GatewayError> {
    let now = worker_of(gateway, &worker.to_string()).await?;
    let warnings = warnings(gateway, &now).await?;
    Ok([vec![format!("worker {worker} is draining")], warnings].concat().join("; "))
}

/// Names the models that no worker serves after this one was drained.
async fn warnings(gateway: &Gateway, drained: &Worker) -> Result<Vec<String>, GatewayError> {
    let status: Status = gateway.get("/status").await?.read()?;
    let lost = drained.models.iter().filter(|model| !status.models.contains(model));
    let warning = |model: &String| {
        format!("model {} cannot be served now: no other eligible worker serves it", clean(model))
    };
    Ok(lost.map(warning).collect())
}

/// Says how many streams left the worker, and how many stayed and why; empty without `--move`.
fn summary(moves: Option<&Moves>) -> String {
    let Some(Moves { moved, failed, stayed, .. }) = moves else { return String::new() };
    let mut text = format!(": {} moved", counted(*moved, "stream"));
    if *failed > 0 {
        text.push_str(&format!(", {failed} failed"));
    }
    if !stayed.is_empty() {
        let reason = |(reason, count): (&String, &u64)| match explained(reason) {
            Some(why) => format!("{count} {reason}: {why}"),
            None => format!("{count} {}", clean(reason)),
        };
        let reasons: Vec<String> = stayed.iter().map(reason).collect();
        let count: u64 = stayed.values().sum();
        let their = if count == 1 { "its" } else { "their" };
        text.push_str(&format!(", {count} stayed until {their} end ({})", reasons.join("; ")));
    }
    text
}

/// Says what the worker still has to do.
fn work(active: u64, handoffs: u64) -> String {
    let requests = counted(active, "request");
    match handoffs {
        0 => requests,
        _ => format!("{requests} and {} that decode has not consumed", counted(handoffs, "handoff")),
    }
}

/// Says why requests are left on the worker, and what to do.
fn left(active: u64, moves: Option<&Moves>) -> String {
    if active == 0 {
        return String::new();
    }
    let Some(Moves { moving, stayed, .. }) = moves else {
        return "; requests end where they run: `--move` continues streams on other workers".to_owned();
    };
    let undecided = active.saturating_sub(moving + stayed.values().sum::<u64>());
    if undecided == 0 {
        return String::new();
    }
    let (wait, are) = if undecided == 1 { ("waits", "is") } else { ("wait", "are") };
    format!("; {undecided} {wait} for another worker, or {are} of a realtime session or of Envoy")
}

/// Explains why a stream does not leave its worker (docs/continuation.md).
fn explained(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "off" => "`continuations` is 0",
        "pinned" => "a hint names the worker",
        "moved_twice" => "it left two workers before",
        "not_streamed" => "the answer is not streamed",
        "engine" => "the model has workers of an engine that cannot continue chats",
        "endpoint" => "answers of this endpoint are not continued",
        "seed" => "the request has a seed, and draws",
        "choices" => "the request asks for several choices",
        "logprobs" => "the request asks for log probabilities",
        "tools" => "the request has tools",
        "structured_output" => "the answer has to follow a format",
        "penalties" => "the request has penalties",
        "reasoning" => "the request asks for reasoning",
        "template" => "the request changes the chat template",
        "other_field" => "the request has a field of which the effect on the rest is not known",
        "other_content" => "the answer has thoughts, calls of tools, refusals or sound",
        "too_long" => "the text is longer than 256 KiB",
        "memory" => "the texts of all streams take too much memory",
        "exhausted" => "the stream was continued before",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moved_failed_and_stayed_is_told() {
        assert_eq!(summary(None), "");
        let stayed = [("tools".to_owned(), 2), ("\u{1b}".to_owned(), 1)].into();
        let moves = Moves { moved: 3, moving: 1, failed: 1, stayed };
        let expected = ": 3 streams moved, 1 failed, 3 stayed until their end (1 \u{fffd}; 2 tools: the request has tools)";
        // O1.17
        assert_eq!(summary(Some(&moves)), expected);
        assert_eq!(
            left(5, Some(&moves)),
            "; 1 waits for another worker, or is of a realtime session or of Envoy"
        );
        assert_eq!([left(4, Some(&moves)), left(0, None)], ["", ""]);
        // O1.4
        assert_eq!(
            [work(2, 0), work(0, 1)],
            ["2 requests", "0 requests and 1 handoff that decode has not consumed"]
        );
        assert_eq!(summary(Some(&Moves::default())), ": 0 streams moved");
        assert_eq!(summary(Some(&Moves { moved: 1, ..Moves::default() })), ": 1 stream moved");
        assert_eq!(
            [0, 1, 2].map(|count| counted(count, "request")),
            ["0 requests", "1 request", "2 requests"]
        );
    }
}
