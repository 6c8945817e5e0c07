//! `pointsman policy run`: replays recorded decisions with a compiled policy.

use std::{
    fmt::Write as _,
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use pointsman_policy_runtime::FormulaSettings;
use pointsman_routing::Policy;
use serde_json::json;

use crate::{
    output::{escaped, print},
    policy_file::{LimitArgs, PolicyFile, SaltArgs},
    replay::{Difference, FactDifference, RankBy, Report, replay_behind},
};

/// Number of differences in the text report.
const MAX_SHOWN: usize = 10;

/// First bytes of files in the formats of gzip and zstd.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
The decisions are lines of the gateway's `GET /decisions/export`:
  curl -s 'http://127.0.0.1:9090/decisions/export?slot=prefill' > decisions.jsonl

A filter replaces the first recorded filter. A scorer or selector replaces the policy that made the choice. \
`keep` of a formula file that has a cost runs behind the recorded filters. \
A decision without the facts that the policy asks for is skipped and counted.
Exit code: 0 when all decisions agree, 1 when some differ, 2 when the file is refused or no decision has the facts \
that the policy asks for.")]
pub struct RunArgs {
    /// The component, core module with embedded WIT metadata, or formula file (`NAME.formula.toml`); or the
    /// name of a built-in policy, of which `formula` takes its formulas from --settings.
    file: PathBuf,
    /// The recorded decisions, one per line.
    #[arg(long, value_name = "FILE")]
    receipts: PathBuf,
    /// Settings: a JSON object, or a file with one.
    #[arg(long, value_name = "JSON|FILE", default_value = "{}")]
    settings: String,
    /// Print the whole report as JSON.
    #[arg(long)]
    json: bool,
    /// Rank differences by the recorded costs instead of this policy's costs.
    #[arg(long)]
    as_recorded: bool,
    /// Exit with 0 although decisions differ.
    #[arg(long)]
    allow_differences: bool,
    #[command(flatten)]
    salt: SaltArgs,
    #[command(flatten)]
    limits: LimitArgs,
}

impl RunArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let settings = match self.settings.trim_start().starts_with('{') {
            true => self.settings.clone(),
            false => std::fs::read_to_string(&self.settings).with_context(|| self.settings.clone())?,
        };
        let salt = self.salt.hash_salt;
        let file = if self.file == Path::new("formula") && !self.file.exists() {
            let formulas = serde_json::from_str(&settings).context("--settings")?;
            let formulas = FormulaSettings::of(&formulas, salt);
            PolicyFile::of_formulas(&self.file, formulas, settings.as_bytes(), &self.limits)?
        } else {
            PolicyFile::read_hashing(&self.file, &self.limits, salt)?
        };
        let policy = file.load(&settings).map_err(|refusal| file.refused(&refusal))?;
        let recording = open(&self.receipts).with_context(|| self.receipts.display().to_string())?;
        let rank_by = if self.as_recorded { RankBy::Recorded } else { RankBy::Policy };
        let filter = file.filter().map(|filter| -> &dyn Policy { filter });
        let report = replay_behind(filter, &policy, file.access.state(), recording, rank_by)
            .with_context(|| self.receipts.display().to_string())?;
        let skipped: Vec<String> =
            report.skipped.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let skipped =
            if skipped.is_empty() { String::new() } else { format!(": skipped {}", skipped.join(", ")) };
        ensure!(
            report.decisions > 0,
            "{}: no decision to replay{skipped}; record some with GET /decisions/export",
            self.receipts.display()
        );
        let info = policy.info();
        if self.json {
            let document = json!({ "policy": info.name, "digest": info.digest, "report": report });
            print(&format!("{document}\n"))?;
        } else {
            print(&escaped(&text(&format!("{} {}", info.name, info.version), &report)))?;
        }
        let fine = report.differences.is_empty() || self.allow_differences;
        Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Opens a recording, and says how to expand a compressed one.
fn open(path: &Path) -> anyhow::Result<impl BufRead> {
    let mut recording = BufReader::new(File::open(path)?);
    let begin = recording.fill_buf()?;
    let packed = [(&GZIP[..], "gzip"), (&ZSTD[..], "zstd")];
    if let Some((_, format)) = packed.iter().find(|(magic, _)| begin.starts_with(magic)) {
        bail!(
            "the file is compressed ({format}); expand it first: `{format} -dc FILE > decisions.jsonl`. Files of \
             decisions.log_dir have no facts to replay: record decisions with GET /decisions/export"
        );
    }
    // Editors on Windows begin a file with it.
    if begin.starts_with(BYTE_ORDER_MARK) {
        recording.consume(BYTE_ORDER_MARK.len());
    }
    Ok(recording)
}

fn text(policy: &str, report: &Report) -> String {
    let Report { decisions, agree, legs, rules, skipped, differences } = report;
    let mut text = format!("policy  {policy}\nagree   {agree} of {decisions}\n");
    for (leg, share) in legs {
        let _ = writeln!(text, "        {leg}: {} of {}", share.agree, share.decisions);
    }
    // One slot has several rules, one after another: active and canary differ, and settings change.
    if rules.len() > legs.len() {
        let _ = writeln!(text, "rules   {} decided:", rules.len());
        for (rule, share) in rules {
            let _ = writeln!(text, "        {rule}: {} of {}", share.agree, share.decisions);
        }
    }
    for (why, count) in skipped {
        let _ = writeln!(text, "skipped {count}: {why}");
    }
    for difference in differences.iter().take(MAX_SHOWN) {
        text.push_str(&line(difference));
    }
    if differences.len() > MAX_SHOWN {
        let _ = writeln!(text, "        and {} more", differences.len() - MAX_SHOWN);
    }
    text
}

/// Describes a difference by this policy's costs, by the recorded costs and by the facts that differ.
fn line(difference: &Difference) -> String {
    let Difference { id, leg, recorded, new, .. } = difference;
    // Costs are those of a worker.
    let old = if recorded == "abstain" { "the fallback's choice" } else { recorded };
    let mut text = format!("differs {id} {leg}: recorded {recorded}");
    if let Some(cost) = difference.recorded_cost {
        let _ = write!(text, " (recorded cost {cost})");
    }
    let _ = write!(text, ", now {new}");
    if let Some(cost) = difference.new_cost {
        let than = difference.by.map(|by| format!("; {old} costs {}", compared(by).0)).unwrap_or_default();
        let _ = write!(text, " (cost {cost}{than})");
    }
    text.push('\n');
    if let (Some(cost), Some(by)) = (difference.new_cost_recorded, difference.by_recorded) {
        let (much, than) = compared(by);
        let _ = writeln!(text, "        by the recorded costs {new} costs {cost}, {much} {than} {old}");
    }
    if !difference.facts.is_empty() {
        let one =
            |FactDifference { fact, recorded, new }: &FactDifference| format!("{fact} {recorded} | {new}");
        let facts: Vec<String> = difference.facts.iter().map(one).collect();
        let _ = writeln!(text, "        {recorded} | {new}: {}", facts.join(", "));
    }
    text
}

/// Returns how much more something costs, and the word before what it is compared with.
fn compared(by: f32) -> (String, &'static str) {
    match by {
        0.0 => ("as much".to_owned(), "as"),
        by if by < 0.0 => (format!("{} less", -by), "than"),
        by => (format!("{by} more"), "than"),
    }
}
