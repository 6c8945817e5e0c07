//! What changes while requests run.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use super::EXPLAINED;
use crate::{
    certificates::Certificates,
    fleet::{EngineSpec, Fleet, Process},
    metrics_text,
    table::Checks,
};

/// Number of engines of each role.
const DECODE: usize = 5;
const PREFILL: usize = 3;
/// A decode leg takes about 250 ms, so five engines with two places each serve 40 requests a second.
const FLAGS: &str = "--overhead-ms 10 --itl-ms 12 --prefill-ms-per-token 0 --natural-len 20";
const PLACES: usize = 2;

/// The engines, and the files that change.
pub(super) struct Changes {
    bin: PathBuf,
    dir: PathBuf,
    specs: Vec<EngineSpec>,
    engines: Vec<Option<Process>>,
    /// Whether the file of workers leaves out an engine.
    left_out: Option<usize>,
    workers: PathBuf,
    config: String,
    certificates: Certificates,
    policies: Vec<Vec<u8>>,
    turn: usize,
    /// When engines were killed.
    kills: Mutex<Vec<Instant>>,
    counts: Counts,
}

/// How often each thing changed.
#[derive(Debug, Default)]
struct Counts {
    workers: u64,
    policies: u64,
    certificates: u64,
    config: u64,
}

impl Changes {
    /// Starts the engines and writes the file of workers.
    pub(super) fn start(
        bin: &Path,
        dir: &Path,
        (workers, config, certificates, policies): (PathBuf, String, Certificates, Vec<Vec<u8>>),
    ) -> anyhow::Result<Self> {
        let role = |place| if place < DECODE { "decode" } else { "prefill" };
        let specs: Vec<_> =
            (0..DECODE + PREFILL).map(|place| EngineSpec::new("vllm", role(place), FLAGS)).collect();
        let engines = specs.iter().enumerate().map(|(place, spec)| spec.start(bin, dir, place).map(Some));
        let engines = engines.collect::<Result<Vec<_>, _>>()?;
        let (left_out, turn) = (None, 0);
        let (kills, counts) = (Mutex::default(), Counts::default());
        let (bin, dir) = (bin.to_owned(), dir.to_owned());
        let changes = Self {
            bin,
            dir,
            specs,
            engines,
            left_out,
            workers,
            config,
            certificates,
            policies,
            turn,
            kills,
            counts,
        };
        changes.write_workers()?;
        Ok(changes)
    }

    /// Text of the configuration.
    pub(super) fn config(&self) -> &str {
        &self.config
    }

    /// File of the authority that clients trust.
    pub(super) fn authority(&self) -> &Path {
        &self.certificates.authority
    }

    /// Whether an engine was killed shortly before a request ended, so that the request may have failed.
    pub(super) fn explains(&self, ended: Instant) -> bool {
        self.kills.lock().iter().any(|kill| (*kill..*kill + EXPLAINED).contains(&ended))
    }

    /// Makes the next change of the round.
    pub(super) async fn next(&mut self, fleet: &Fleet) -> anyhow::Result<()> {
        let (round, step) = (self.turn / 8, self.turn % 8);
        self.turn += 1;
        let place = round % self.engines.len();
        match step {
            0 => self.leave_out(Some(place)),
            2 => self.leave_out(None),
            3 => {
                self.counts.certificates += 1;
                self.certificates.renew()
            }
            4 => self.reload(fleet).await,
            5 => {
                // Its requests fail; another engine is killed in each round.
                self.kills.lock().push(Instant::now());
                self.engines[place] = None;
                Ok(())
            }
            6 => {
                self.engines[place] = Some(self.specs[place].start(&self.bin, &self.dir, place)?);
                self.counts.workers += 1;
                self.write_workers()
            }
            _ => {
                let bytes = &self.policies[usize::try_from(self.counts.policies)? % self.policies.len()];
                self.counts.policies += 1;
                fleet.drop_policy("decode.wasm", bytes)
            }
        }
    }

    fn leave_out(&mut self, place: Option<usize>) -> anyhow::Result<()> {
        self.left_out = place;
        self.counts.workers += 1;
        self.write_workers()
    }

    fn write_workers(&self) -> anyhow::Result<()> {
        let mut text = String::new();
        let all = self.specs.iter().zip(&self.engines).enumerate();
        for (place, (spec, engine)) in all.filter(|(place, _)| Some(*place) != self.left_out) {
            let Some(engine) = engine else { continue };
            text.push_str(&format!(
                "[[workers]]\nurl = 'http://{}'\nrole = '{}'\nengine = 'vllm'\nlabels.place = '{place}'\n",
                engine.listening(),
                spec.role
            ));
            if spec.role == "decode" {
                text.push_str(&format!("max_concurrency = {PLACES}\n"));
            }
        }
        let staged = self.workers.with_extension("staged");
        std::fs::write(&staged, text)?;
        Ok(std::fs::rename(staged, &self.workers)?)
    }

    /// Changes a setting, and reads the file again.
    async fn reload(&mut self, fleet: &Fleet) -> anyhow::Result<()> {
        self.counts.config += 1;
        let seconds = 10 + self.counts.config % 2;
        let config = self.config.replace("[queue]\n", &format!("[queue]\ntimeout = '{seconds}s'\n"));
        std::fs::write(self.dir.join("pointsman.toml"), config)?;
        let answer: Value = serde_json::from_str(&fleet.admin.post("/config/reload", "").await?)?;
        let applied = answer["applied"].as_array().context("the reload lists no applied keys")?;
        ensure!(applied.iter().any(|key| key == "queue.timeout"), "the reload applied nothing: {answer}");
        Ok(())
    }

    /// Compares what changed with what the gateway applied.
    pub(super) async fn judge(&self, fleet: &Fleet, checks: &mut Checks) -> anyhow::Result<()> {
        let metrics = fleet.metrics().await?;
        checks.show("changes of the file of workers", self.counts.workers);
        checks.show("engines killed", self.kills.lock().len());
        checks.show("reloads of the configuration, all applied", self.counts.config);
        let reloads = |name: &str, labels: &[(&str, &str)]| metrics_text::sum_with(&metrics, name, labels);
        for (what, changed, applied) in [
            (
                "policies installed",
                self.counts.policies,
                reloads("pointsman_policy_reloads_total", &[("result", "installed")]),
            ),
            (
                "certificates applied",
                self.counts.certificates,
                reloads("pointsman_tls_reloads_total", &[("outcome", "applied")]),
            ),
        ] {
            let passed = applied + 1.0 >= f64::from(u32::try_from(changed)?);
            checks.check(&format!("{what}, of the changes"), format!("{applied} of {changed}"), passed);
        }
        Ok(())
    }
}
