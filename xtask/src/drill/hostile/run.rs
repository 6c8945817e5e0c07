//! Installs a case, waits for its end, and compares the end with the required one.

use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    os::unix::fs::symlink,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::cases::{Case, Content, Expected, Guests, PREFILL};
use crate::{
    beside::{Beside, Cost},
    decisions::now_us,
    digest::sha256,
    fleet::Fleet,
    metrics_text::sum_with,
    poll,
    proc::Memory,
    sh,
};

/// Maximum time until a case has ended as required.
const LIMIT: Duration = Duration::from_secs(60);

/// The fleet on which the cases run.
pub(super) struct Run {
    pub(super) fleet: Fleet,
    pub(super) guests: Guests,
    /// Number of the next good file.
    pub(super) next: Cell<u32>,
    /// Digests of the files that cases have installed.
    pub(super) seen: RefCell<HashSet<String>>,
}

/// Limits of a row: growth of the gateway's peak memory in megabytes, p99 of requests during the case in
/// milliseconds, and time until the next good file serves.
const PEAK_MB: f64 = 150.0;
const P99_MS: f64 = 250.0;
const GOOD_AFTER: Duration = Duration::from_secs(5);

/// Data that identify the content which a case installed.
struct Installed {
    digest: String,
    /// Wall-clock time before the file was renamed, milliseconds.
    at_ms: u64,
}

impl Run {
    /// Swaps good policies a few times, and fills the slot's state to its limit. Returns the memory
    /// afterwards.
    pub(super) async fn warm_up(&self) -> anyhow::Result<Memory> {
        sh::status("warming up");
        self.install_and_wait("decode.wasm", &self.guests.flood()?).await?;
        sleep(Duration::from_secs(8)).await;
        for _ in 0..4 {
            self.install_good().await?;
            sleep(Duration::from_secs(1)).await;
            for file in ["prefill.wasm", "decode.wasm", "decode-override.wasm"] {
                std::fs::remove_file(self.fleet.policies.join(file))?;
            }
            sleep(Duration::from_millis(2_500)).await;
        }
        self.settled().await
    }

    /// Returns the memory after good policies have served for a while: the smallest of ten samples.
    pub(super) async fn settled(&self) -> anyhow::Result<Memory> {
        self.install_good().await?;
        sleep(Duration::from_secs(5)).await;
        let mut smallest = Memory::of(self.fleet.gateway.pid())?;
        for _ in 1..10 {
            sleep(Duration::from_millis(200)).await;
            let sample = Memory::of(self.fleet.gateway.pid())?;
            smallest = if sample.resident < smallest.resident { sample } else { smallest };
        }
        Ok(smallest)
    }

    /// Runs a case and then a good file. Returns the row of the case, and whether it ended as required,
    /// within the limits and without a failed request.
    pub(super) async fn row(&self, case: &Case, beside: &Beside) -> (Vec<String>, bool) {
        let (cells, passed) = match self.measured(case, beside).await {
            Ok((cost, good_after)) => {
                let passed = cost.failed == 0
                    && cost.peak_mb - cost.before_mb <= PEAK_MB
                    && (cost.p99_ms <= P99_MS || cost.p99_ms.is_nan())
                    && good_after <= GOOD_AFTER;
                let memory = format!("{:.0} -> {:.0}", cost.before_mb, cost.peak_mb);
                let after = format!("{:.2}", good_after.as_secs_f64());
                ([memory, format!("{:.1}", cost.p99_ms), after], passed)
            }
            Err(error) => ([format!("{error:#}"), String::new(), String::new()], false),
        };
        let mut row = vec![case.name.clone(), case.file.clone(), format!("{:?}", case.expected)];
        row.extend(cells);
        row.push(if passed { "ok" } else { "FAILED" }.to_owned());
        (row, passed)
    }

    async fn measured(&self, case: &Case, beside: &Beside) -> anyhow::Result<(Cost, Duration)> {
        let before_mb = beside.begin()?;
        self.outcome(case).await?;
        let good_after = self.good_again(&case.file).await?;
        Ok((beside.end(before_mb)?, good_after))
    }

    /// Installs a good file that was never installed before, and returns the time until it serves.
    async fn good_again(&self, file: &str) -> anyhow::Result<Duration> {
        let [selector, planner] = &self.guests.good;
        let good = self.fresh(if file.starts_with("decode-override") { planner } else { selector });
        let file = if file == "prefil.wasm" { PREFILL } else { file };
        let begun = Instant::now();
        self.install_and_wait(file, &good).await?;
        Ok(begun.elapsed())
    }

    /// Returns other content with the same behaviour.
    fn fresh(&self, policy: &[u8]) -> Vec<u8> {
        let number = self.next.get();
        self.next.set(number + 1);
        [policy, &[0, 6, 1, b'g'], &number.to_le_bytes()].concat()
    }

    /// Keeps changing the content of two slots. Returns the digest of the last content.
    async fn change(&self, times: u32, pause: Duration) -> anyhow::Result<String> {
        let [selector, _] = &self.guests.good;
        let mut last = Vec::new();
        for _ in 0..times {
            last = self.fresh(selector);
            self.fleet.drop_policy(PREFILL, &last)?;
            self.fleet.drop_policy("decode.wasm", &self.fresh(selector))?;
            sleep(pause).await;
        }
        Ok(sha256(&last))
    }

    /// Installs a case and waits for the required end.
    async fn outcome(&self, case: &Case) -> anyhow::Result<()> {
        let at_ms = now_us()? / 1_000;
        let failed_before = self.failures(case).await?;
        let digest = match case.content {
            Content::Changing { times, pause } => self.change(times, pause).await?,
            _ => self.install(case)?,
        };
        let again = !self.seen.borrow_mut().insert(digest.clone());
        let installed = Installed { digest, at_ms };
        match &case.expected {
            Expected::Refused(kind) => {
                // From the second round on, a file that crashed its compiler is not compiled again.
                let kind = if kind == "compiler_died" && again { "quarantined" } else { kind };
                self.refused(case, kind, &installed).await?;
                self.counted("refused", &[kind.to_owned()]).await
            }
            Expected::RolledBack(failures) => {
                let slot = self.refused(case, "rolled_back", &installed).await?;
                ensure!(slot["state"] == "rolled-back", "the slot's state is {}", slot["state"]);
                let quarantined = slot["quarantined"].as_array().context("the slot has no `quarantined`")?;
                ensure!(quarantined.iter().any(|one| *one == installed.digest), "it is not quarantined");
                ensure!(self.failures(case).await? > failed_before, "no call failed in the expected way");
                self.counted("rolled_back", failures).await
            }
            Expected::Serves => self.serves(case, &installed.digest).await,
            Expected::Stray => self.stray(case).await,
            Expected::Any => self.any(case, &installed).await,
        }
    }

    async fn install_good(&self) -> anyhow::Result<()> {
        let [selector, planner] = &self.guests.good;
        self.install_and_wait("prefill.wasm", selector).await?;
        self.install_and_wait("decode.wasm", selector).await?;
        self.install_and_wait("decode-override.wasm", planner).await
    }

    async fn install_and_wait(&self, file: &str, bytes: &[u8]) -> anyhow::Result<()> {
        self.fleet.drop_policy(file, bytes)?;
        let digest = sha256(bytes);
        self.until(file, |slot| Ok((slot["digest"] == digest).then_some(()))).await
    }

    /// Reads the state of a file's slot until `find` returns a value.
    async fn until<T>(
        &self,
        file: &str,
        find: impl FnMut(&Value) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let (find, last) = (RefCell::new(find), RefCell::new(Value::Null));
        let look = || async {
            let slot = self.slot(file).await?;
            let found = (find.borrow_mut())(&slot);
            *last.borrow_mut() = slot;
            found
        };
        let found = poll::until(&format!("{file} is as specified"), LIMIT, look).await;
        found.with_context(|| {
            let slot = last.borrow();
            slot["refusals"].as_array().and_then(|all| all.last()).unwrap_or(&slot["policy"]).to_string()
        })
    }

    async fn slot(&self, file: &str) -> anyhow::Result<Value> {
        self.fleet.slot(file.trim_end_matches(".wasm")).await
    }

    /// Renames the case's file into place and returns its digest.
    fn install(&self, case: &Case) -> anyhow::Result<String> {
        match &case.content {
            Content::Bytes(bytes) => {
                self.fleet.drop_policy(&case.file, bytes)?;
                Ok(sha256(bytes))
            }
            Content::Pipe => {
                let staged = self.fleet.policies.join(".pipe");
                sh::run(Command::new("mkfifo").arg(&staged))?;
                std::fs::rename(staged, self.fleet.policies.join(&case.file))?;
                Ok(String::new())
            }
            Content::KernelFile => {
                let staged = self.fleet.policies.join(".link");
                symlink("/proc/kmsg", &staged)?;
                std::fs::rename(staged, self.fleet.policies.join(&case.file))?;
                // The gateway reads it as an empty file.
                Ok(sha256(b""))
            }
            Content::Changing { .. } => Ok(String::new()),
        }
    }

    /// Waits for the newest refusal of the case's content, which must have this kind. Returns the slot.
    async fn refused(&self, case: &Case, kind: &str, installed: &Installed) -> anyhow::Result<Value> {
        let newest = |slot: &Value| {
            let records = slot["refusals"].as_array().context("the slot has no field `refusals`")?;
            let found = records.iter().rev().find(|record| {
                let same = record["digest"].as_str().is_none_or(|digest| digest == installed.digest);
                same && record["at_ms"].as_u64().is_some_and(|at| at >= installed.at_ms)
            });
            Ok(found.cloned())
        };
        let record = self.until(&case.file, newest).await?;
        ensure!(record["kind"] == kind, "{}: {}", record["kind"], record["message"]);
        let slot = self.slot(&case.file).await?;
        ensure!(slot["digest"] != installed.digest, "it serves although its end is {kind}");
        Ok(slot)
    }

    /// Waits until the policy has served well over a thousand calls, of which fewer than 1 % may fail.
    async fn serves(&self, case: &Case, digest: &str) -> anyhow::Result<()> {
        let (started, lines) = (Instant::now(), self.log_lines()?);
        let served = |slot: &Value| -> anyhow::Result<_> {
            let calls = slot["calls"].as_u64().unwrap_or(0);
            let failures = slot["failures"].as_u64().unwrap_or(u64::MAX);
            Ok((slot["digest"] == digest && calls > 1_500).then_some((calls, failures)))
        };
        let (calls, failures) = self.until(&case.file, served).await?;
        ensure!(failures * 100 < calls, "{failures} of {calls} calls failed");
        let rate = (self.log_lines()? - lines) as f64 / started.elapsed().as_secs_f64();
        ensure!(rate < 100.0, "the log grows by {rate:.0} lines a second; the limit is 100");
        self.install_good().await
    }

    /// Waits until the content is refused or serves.
    async fn any(&self, case: &Case, installed: &Installed) -> anyhow::Result<()> {
        let ended = |slot: &Value| -> anyhow::Result<_> {
            let records = slot["refusals"].as_array().context("the slot has no field `refusals`")?;
            let refused = || records.iter().any(|record| record["digest"] == installed.digest);
            Ok((slot["digest"] == installed.digest || refused()).then_some(()))
        };
        self.until(&case.file, ended).await
    }

    async fn stray(&self, case: &Case) -> anyhow::Result<()> {
        let listed = || async {
            let status = self.fleet.admin.json("/policies").await?;
            let strays = status["strays"].as_array().context("/policies has no field `strays`")?;
            Ok(strays.iter().any(|stray| *stray == case.file.as_str()).then_some(()))
        };
        poll::until("/policies lists it among the strays", LIMIT, listed).await?;
        std::fs::remove_file(self.fleet.policies.join(&case.file))?;
        self.counted("refused", &["no_slot".to_owned()]).await
    }

    /// Returns the number of calls of the case's slot that failed in one of the expected ways.
    async fn failures(&self, case: &Case) -> anyhow::Result<f64> {
        let Expected::RolledBack(failures) = &case.expected else { return Ok(0.0) };
        let (slot, metrics) = (case.file.trim_end_matches(".wasm"), self.fleet.metrics().await?);
        let failed = |failure: &String| {
            let labels = [("outcome", failure.as_str()), ("slot", slot), ("lane", "active")];
            sum_with(&metrics, "pointsman_policy_calls_total", &labels)
        };
        Ok(failures.iter().map(failed).sum())
    }

    /// Requires that a reload with this result and one of these reasons was counted.
    async fn counted(&self, result: &str, reasons: &[String]) -> anyhow::Result<()> {
        let (name, metrics) = ("pointsman_policy_reloads_total", self.fleet.metrics().await?);
        let count = |reason: &String| sum_with(&metrics, name, &[("result", result), ("reason", reason)]);
        let counted: f64 = reasons.iter().map(count).sum();
        ensure!(counted > 0.0, "{name} has no reload with the result {result} and a reason of {reasons:?}");
        Ok(())
    }

    fn log_lines(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read(&self.fleet.gateway.log)?.iter().filter(|byte| **byte == b'\n').count())
    }
}
