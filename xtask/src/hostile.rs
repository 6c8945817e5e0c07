//! `hostile`: bad policies dropped one after another, by rename, into the folder of a real gateway under a steady load. No request
//! may fail, each has to end as it must, and all of them once more may not cost memory.

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::{
    fleet::{self, Fleet},
    http,
    load::{Load, Memory, Seen},
    setup, sh,
};

mod cases;

use cases::{Case, Content, Expected, Guests};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests a second.
    #[arg(long, default_value_t = 500)]
    rate: u32,
    /// Only cases whose name has this in it.
    #[arg(long)]
    only: Option<String>,
    /// Times that the list is gone through; what is resident is told after each. Memory is judged from the end of the second on.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

const CLIENTS: u32 = 16;
/// How long a case may take until it has ended as it must.
const LIMIT: Duration = Duration::from_secs(60);
/// The round from whose end on memory may not grow. The first ones meet every kind of failure and compile the largest guests for the
/// first time: what the allocator keeps for the next such compile, and pages of the binary, come once. What a policy leaves behind
/// comes with each.
const SETTLED: usize = 2;
/// The growth of memory that is allowed from then on.
const GROWTH: f64 = 0.05;

const CONFIG: &str = r#"
[policies]
rescan = "1s"
[policies.slots.decode]
grants = ["log", "wasi", "state"]
[decisions]
keep = 1000
bytes = 1048576
"#;

/// Runs it; an error when anything is off.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let guests = Guests::build()?;
    let bin = fleet::build()?;
    let dir = tempfile::Builder::new().prefix("pointsman-hostile-").tempdir()?;
    let fleet = start(&bin, dir.path())?;
    let house = House { fleet, guests, log: dir.path().join("gateway.log") };
    let load = Load::start(&house.fleet.client(), args.rate, CLIENTS);
    let mut looks = vec![house.warm_up()?];
    let (mut rows, mut wrong) = (Vec::new(), 0);
    for round in 0..args.rounds {
        let mut cases = cases::all(&house.guests, round)?;
        cases.retain(|case| args.only.as_ref().is_none_or(|only| case.name.contains(only)));
        let progress = sh::progress(cases.len() as u64, "cases");
        for case in &cases {
            let (row, well) = house.row(case, &load);
            wrong += u32::from(!well);
            progress.inc(1);
            let now = Memory::of(house.fleet.gateway.pid())?;
            progress.suspend(|| sh::tell(&format!("{row} {now}")));
            rows.push(row);
        }
        progress.finish_and_clear();
        looks.push(house.settled()?);
    }
    let seen = load.stop();
    sh::print(
        "| case | file | has to be | /policies said | /metrics said | |\n| --- | --- | --- | --- | --- | --- |",
    );
    rows.iter().for_each(|row| sh::print(row));
    judge(&seen, rows.len(), wrong, &looks)
}

/// Prints what was seen; an error when a limit is missed.
fn judge(seen: &Seen, cases: usize, wrong: u32, looks: &[Memory]) -> anyhow::Result<()> {
    sh::print(&format!(
        "\n{cases} cases, {wrong} wrong; {} requests sent, {} failed",
        seen.sent, seen.failed
    ));
    for (round, memory) in looks.iter().enumerate() {
        sh::print(&format!("after round {round}: {memory}"));
    }
    let problem = seen.problem.as_deref().unwrap_or_default();
    ensure!(seen.failed == 0, "{} requests failed, the first: {problem}", seen.failed);
    ensure!(wrong == 0, "{wrong} cases ended otherwise");
    let Some([before, .., after]) = looks.get(SETTLED..) else {
        sh::print("memory is not judged: too few rounds");
        return Ok(());
    };
    let growth = after.resident / before.resident - 1.0;
    sh::print(&format!("resident since round {SETTLED}: {:+.1} %", growth * 100.0));
    ensure!(growth <= GROWTH, "memory grew from {before} to {after}");
    Ok(())
}

/// Two prefill and two decode engines, and the gateway.
fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let (mut engines, mut workers) = (Vec::new(), Vec::new());
    for role in ["prefill", "prefill", "decode", "decode"] {
        let quick = ["--overhead-ms", "1", "--prefill-ms-per-token", "0", "--itl-ms", "1"];
        let flags: Vec<&str> = ["--role", role].into_iter().chain(quick).collect();
        let engine = fleet::engine(bin, dir, &format!("{role}-{}", engines.len()), &flags)?;
        workers.push(format!("role={role},engine=vllm,url=http://{}", engine.listening()));
        engines.push(engine);
    }
    fleet::gateway(bin, dir, engines, CONFIG, &workers)
}

struct House {
    fleet: Fleet,
    guests: Guests,
    log: std::path::PathBuf,
}

/// What /policies and /metrics said.
type Told = (String, String);

impl House {
    /// Good policies swapped a few times, and the slot's memory filled, as it may be: from then on nothing may grow. Answers
    /// what is resident.
    fn warm_up(&self) -> anyhow::Result<Memory> {
        sh::tell("warming up");
        self.drop_and_wait("decode.wasm", &self.guests.flood()?)?;
        thread::sleep(Duration::from_secs(8));
        for _ in 0..4 {
            self.good()?;
            thread::sleep(Duration::from_secs(1));
            for file in ["prefill.wasm", "decode.wasm", "decode-override.wasm"] {
                std::fs::remove_file(self.fleet.policies.join(file))?;
            }
            thread::sleep(Duration::from_millis(2_500));
        }
        self.settled()
    }

    /// What is resident once the good policies serve for a while: the least of some looks.
    fn settled(&self) -> anyhow::Result<Memory> {
        self.good()?;
        thread::sleep(Duration::from_secs(5));
        let looks = (0..10).map(|_| {
            thread::sleep(Duration::from_millis(200));
            Memory::of(self.fleet.gateway.pid())
        });
        let looks = looks.collect::<anyhow::Result<Vec<_>>>()?;
        looks.into_iter().min_by(|a, b| a.resident.total_cmp(&b.resident)).context("no looks")
    }

    fn good(&self) -> anyhow::Result<()> {
        let [selector, planner] = &self.guests.good;
        for (file, bytes) in
            [("prefill.wasm", selector), ("decode.wasm", selector), ("decode-override.wasm", planner)]
        {
            self.drop_and_wait(file, bytes)?;
        }
        Ok(())
    }

    /// Drops a policy and waits until it serves.
    fn drop_and_wait(&self, file: &str, bytes: &[u8]) -> anyhow::Result<()> {
        self.fleet.drop_policy(file, bytes)?;
        let (digest, started) = (hex(bytes), Instant::now());
        while self.slot(file)?["digest"].as_str() != Some(&digest) {
            ensure!(started.elapsed() < LIMIT, "{file} does not serve");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn slot(&self, file: &str) -> anyhow::Result<Value> {
        self.fleet.slot(file.trim_end_matches(".wasm"))
    }

    /// One case: its line of the table, and whether it ended as it must without a failed request.
    fn row(&self, case: &Case, load: &Load) -> (String, bool) {
        let failed = load.failed();
        let outcome = self.judge(case);
        let well = outcome.is_ok() && load.failed() == failed;
        let (policies, metrics) = outcome.unwrap_or_else(|error| (format!("{error:#}"), String::new()));
        let (expected, mark) = (case.expected.told(), if well { "ok" } else { "FAILED" });
        (format!("| {} | `{}` | {expected} | {policies} | {metrics} | {mark} |", case.name, case.file), well)
    }

    fn judge(&self, case: &Case) -> anyhow::Result<Told> {
        let begun = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
        let failures = self.failures(case);
        let digest = self.put(case)?;
        match &case.expected {
            Expected::Refused(kind) => self.refused(case, kind, &digest, begun),
            Expected::RolledBack(kinds) => self.rolled_back(case, kinds, &digest, begun, failures),
            Expected::Serves => self.serves(case, &digest),
            Expected::Stray => self.stray(case),
        }
    }

    /// Renames it into place; its digest.
    fn put(&self, case: &Case) -> anyhow::Result<String> {
        match &case.content {
            Content::Bytes(bytes) => {
                self.fleet.drop_policy(case.file, bytes)?;
                Ok(hex(bytes))
            }
            Content::Pipe => {
                let staged = self.fleet.policies.join(".pipe");
                sh::run(Command::new("mkfifo").arg(&staged))?;
                std::fs::rename(staged, self.fleet.policies.join(case.file))?;
                Ok(String::new())
            }
        }
    }

    /// The newest refusal of the case's content, as soon as there is one.
    fn refusal(&self, case: &Case, digest: &str, begun: u128) -> anyhow::Result<Value> {
        let started = Instant::now();
        loop {
            let slot = self.slot(case.file)?;
            let records = slot["refusals"].as_array().context("no refusals")?;
            let found = records.iter().rev().find(|record| {
                let of_it = record["digest"].as_str().is_none_or(|found| found == digest);
                of_it && record["at_ms"].as_u64().is_some_and(|at| u128::from(at) >= begun)
            });
            if let Some(record) = found {
                return Ok(record.clone());
            }
            ensure!(started.elapsed() < LIMIT, "neither refused nor rolled back: {}", slot["policy"]);
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn refused(&self, case: &Case, kind: &str, digest: &str, begun: u128) -> anyhow::Result<Told> {
        let record = self.refusal(case, digest, begun)?;
        ensure!(record["kind"] == kind, "{}: {}", record["kind"], record["message"]);
        ensure!(self.slot(case.file)?["digest"] != digest, "it serves all the same");
        let counted = self.counted(&["pointsman_policy_reloads_total", "refused", kind])?;
        Ok((told(&record), format!("refused/{kind} {counted}")))
    }

    /// Calls of the case's slot that ended in a failure it has to meet.
    fn failures(&self, case: &Case) -> u64 {
        let Expected::RolledBack(failures) = &case.expected else { return 0 };
        let slot = case.file.trim_end_matches(".wasm");
        let count = |failure: &&str| {
            self.counted(&["pointsman_policy_calls_total", slot, "active", failure]).unwrap_or(0)
        };
        failures.iter().map(count).sum()
    }

    fn rolled_back(
        &self,
        case: &Case,
        failures: &[&str],
        digest: &str,
        begun: u128,
        before: u64,
    ) -> anyhow::Result<Told> {
        let record = self.refusal(case, digest, begun)?;
        ensure!(record["kind"] == "rolled_back", "{}: {}", record["kind"], record["message"]);
        let slot = self.slot(case.file)?;
        ensure!(slot["state"] == "rolled-back" && slot["digest"] != digest, "state {}", slot["state"]);
        let quarantined = slot["quarantined"].as_array().context("no quarantine")?;
        ensure!(quarantined.iter().any(|one| one == digest), "it is not quarantined");
        let failed = self.failures(case).saturating_sub(before);
        ensure!(failed > 0, "no call ended so: {}", record["message"]);
        let reloads = |failure: &&str| {
            self.counted(&["pointsman_policy_reloads_total", "rolled_back", failure]).unwrap_or(0)
        };
        let reloads: u64 = failures.iter().map(reloads).sum();
        ensure!(reloads > 0, "the metric does not tell of it");
        Ok((told(&record), format!("rolled_back {reloads}, calls +{failed}")))
    }

    /// It serves a thousand calls and more, and nothing of them failed.
    fn serves(&self, case: &Case, digest: &str) -> anyhow::Result<Told> {
        let started = Instant::now();
        let lines = self.lines()?;
        loop {
            let slot = self.slot(case.file)?;
            let calls = slot["calls"].as_u64().unwrap_or(0);
            if slot["digest"] == digest && calls > 1_500 {
                let failures = slot["failures"].as_u64().unwrap_or(u64::MAX);
                ensure!(failures * 100 < calls, "{failures} of {calls} calls failed");
                let (lines, took) = (self.lines()? - lines, started.elapsed().as_secs_f64());
                #[expect(clippy::cast_precision_loss, reason = "lines of a log")]
                let rate = lines as f64 / took;
                ensure!(rate < 100.0, "{rate:.0} lines a second in the log");
                self.good()?;
                let told = format!("serves: {calls} calls, {failures} failed");
                return Ok((told, format!("{rate:.0} lines a second logged")));
            }
            ensure!(
                started.elapsed() < LIMIT,
                "{}",
                slot["refusals"].as_array().and_then(|all| all.last()).unwrap_or(&slot["policy"])
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn stray(&self, case: &Case) -> anyhow::Result<Told> {
        let started = Instant::now();
        while started.elapsed() < LIMIT {
            let status: Value = serde_json::from_str(&http::get(&self.fleet.admin(), "/policies")?)?;
            let strays = status["strays"].as_array().context("no strays")?;
            if strays.iter().any(|stray| stray == case.file) {
                std::fs::remove_file(self.fleet.policies.join(case.file))?;
                let counted = self.counted(&["pointsman_policy_reloads_total", "refused", "no_slot"])?;
                return Ok(("among the strays".to_owned(), format!("refused/no_slot {counted}")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!("nobody told of it")
    }

    /// The value of the first line of /metrics that begins with the first word and has all the others as labels' values.
    fn counted(&self, words: &[&str]) -> anyhow::Result<u64> {
        let text = http::get(&self.fleet.admin(), "/metrics")?;
        let fits = |line: &&str| {
            words.iter().enumerate().all(|(place, word)| {
                if place == 0 { line.starts_with(word) } else { line.contains(&format!("=\"{word}\"")) }
            })
        };
        let line = text.lines().find(fits).with_context(|| format!("no metric {words:?}"))?;
        let (_, value) = line.rsplit_once(' ').context("no value")?;
        Ok(value.parse()?)
    }

    /// Lines in the gateway's log.
    fn lines(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read(&self.log)?.iter().filter(|byte| **byte == b'\n').count())
    }
}

impl Expected {
    fn told(&self) -> String {
        match self {
            Self::Refused(kind) => format!("refused: {kind}"),
            Self::RolledBack(failures) => format!("fallback, rolled back: {}", failures.join(" or ")),
            Self::Stray => "told".to_owned(),
            Self::Serves => "harmless".to_owned(),
        }
    }
}

/// A refusal in one cell of a table.
fn told(record: &Value) -> String {
    let message = record["message"].as_str().unwrap_or_default();
    let mut short: String =
        message.chars().take(70).map(|c| if c == '|' || c.is_control() { ' ' } else { c }).collect();
    if short.len() < message.len() {
        short.push('…');
    }
    format!("{}: {short}", record["kind"].as_str().unwrap_or_default())
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
