//! `pointsman drain` and `undrain`.

use std::{process::ExitCode, time::Duration};

use clap::{ArgGroup, Args};
use humantime_serde::re::humantime;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use crate::{
    api::{Moves, Workers},
    block_on,
    gateway::{Gateway, GatewayArgs},
    print,
    text::clean,
    worker_name::id_of,
};

/// Time between two looks at the worker's requests.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two lines that say how the moves of streams go.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Arguments of `drain`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("waits").multiple(true))]
pub struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// Continue its running streams on other workers, a few at a time, and wait until no request of this
    /// gateway runs on the worker. What cannot be continued ends there.
    #[arg(long = "move", group = "waits")]
    moves: bool,
    /// Wait until no request of this gateway runs on the worker.
    #[arg(long, group = "waits")]
    wait: bool,
    /// Longest wait; then the exit code is 1, and the worker stays draining.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration, requires = "waits")]
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
            let id = id_of(&gateway, &self.which.worker).await?;
            let answer = gateway.delete(&format!("/workers/{id}/drain")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            print(&format!("worker {id} gets requests again\n"))?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl DrainArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            let id = id_of(&gateway, &self.which.worker).await?;
            let moves = if self.moves { "?move=true" } else { "" };
            let answer = gateway.post(&format!("/workers/{id}/drain{moves}")).await?;
            if self.json {
                return answer.print_json();
            }
            answer.read::<IgnoredAny>()?;
            if self.wait || self.moves {
                return self.finished(&gateway, id).await;
            }
            print(&format!("worker {id} is draining; it gets no new request\n"))?;
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Waits until the worker has no request.
    async fn finished(&self, gateway: &Gateway, id: u64) -> anyhow::Result<ExitCode> {
        let begun = Instant::now();
        let (mut told, mut told_at) = (None, begun);
        loop {
            let workers: Workers = gateway.get("/workers").await?.read()?;
            let worker = workers.workers.iter().find(|worker| worker.id == id);
            let Some(worker) = worker else {
                print(&format!("worker {id} left the gateway\n"))?;
                return Ok(ExitCode::SUCCESS);
            };
            if !worker.draining {
                print(&format!("worker {id} is not draining any more: another operator ended the drain\n"))?;
                return Ok(ExitCode::FAILURE);
            }
            let (active, waited) = (worker.active(), begun.elapsed());
            let (seconds, moves) = (waited.as_secs_f64(), worker.moves.as_ref());
            if active == 0 && moves.is_none_or(|moves| moves.moving == 0) {
                print(&format!("worker {id} has no request after {seconds:.1} s{}\n", summary(moves)))?;
                return Ok(ExitCode::SUCCESS);
            }
            if waited >= self.timeout {
                print(&format!(
                    "worker {id} still has {active} requests after {seconds:.1} s; it stays draining{}\n",
                    summary(moves)
                ))?;
                return Ok(ExitCode::FAILURE);
            }
            let progress = self.moves.then(|| (active, moves.cloned()));
            if progress != told && told_at.elapsed() >= PROGRESS_INTERVAL {
                let moving = moves.map_or(0, |moves| moves.moving);
                print(&format!(
                    "worker {id} has {active} requests, {moving} are moving{}\n",
                    summary(moves)
                ))?;
                (told, told_at) = (progress, Instant::now());
            }
            tokio::time::sleep(POLL_INTERVAL.min(self.timeout - waited)).await;
        }
    }
}

/// Says how many streams left the worker and how many stayed; empty without `--move`.
fn summary(moves: Option<&Moves>) -> String {
    let Some(Moves { moved, failed, stayed, .. }) = moves else { return String::new() };
    let mut text = format!(": {moved} streams moved");
    if *failed > 0 {
        text.push_str(&format!(", {failed} failed"));
    }
    if !stayed.is_empty() {
        let reasons: Vec<String> =
            stayed.iter().map(|(reason, count)| format!("{count} {}", clean(reason))).collect();
        let count: u64 = stayed.values().sum();
        text.push_str(&format!(", {count} stayed until their end ({})", reasons.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moved_failed_and_stayed_is_told() {
        assert_eq!(summary(None), "");
        let stayed = [("tools".to_owned(), 2), ("\u{1b}".to_owned(), 1)].into();
        let moves = Moves { moved: 3, moving: 1, failed: 1, stayed };
        let expected = ": 3 streams moved, 1 failed, 3 stayed until their end (1 \u{fffd}, 2 tools)";
        // O1.17
        assert_eq!(summary(Some(&moves)), expected);
        assert_eq!(summary(Some(&Moves::default())), ": 0 streams moved");
    }
}
