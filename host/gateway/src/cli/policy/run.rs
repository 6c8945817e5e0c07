//! `pointsman policy run`: recorded decisions decided again with a compiled policy.

use std::{fmt::Write as _, fs::File, io::BufReader, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use pointsman_routing::Policy;
use serde_json::json;

use super::{LimitArgs, PolicyFile, refused};
use crate::{
    cli::say,
    replay::{Difference, Report, replay},
};

/// Differences that are shown.
const SHOWN: usize = 10;

/// Which policy, and which decisions.
#[derive(Debug, Args)]
#[command(after_help = "\
The decisions are lines of the gateway's `GET /decisions/export`:
  curl -s 'http://127.0.0.1:9090/decisions/export?slot=prefill' > decisions.jsonl
A filter is asked in the place of the first filter, a scorer or selector in that of what chose among the rows left.
Exit code: 0 when all agree, 1 when some differ, 2 when the file is refused or the recording lacks what the policy wants.")]
pub(crate) struct RunArgs {
    /// The component, or core module with embedded WIT metadata.
    file: PathBuf,
    /// The recorded decisions, one a line.
    #[arg(long, value_name = "FILE")]
    receipts: PathBuf,
    /// JSON object handed to `configure`, or a file that has it.
    #[arg(long, value_name = "JSON|FILE", default_value = "{}")]
    settings: String,
    /// Tell everything as JSON.
    #[arg(long)]
    json: bool,
    /// Differences do not make the command fail.
    #[arg(long)]
    allow_differences: bool,
    #[command(flatten)]
    limits: LimitArgs,
}

impl RunArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let file = PolicyFile::read(&self.file, &self.limits)?;
        let settings = match self.settings.trim_start().starts_with('{') {
            true => self.settings.clone(),
            false => std::fs::read_to_string(&self.settings).with_context(|| self.settings.clone())?,
        };
        let policy = file.load(&settings).map_err(|refusal| refused(&self.file, &refusal))?;
        let recording = File::open(&self.receipts).with_context(|| self.receipts.display().to_string())?;
        let report = replay(&policy, file.access.state(), BufReader::new(recording))
            .with_context(|| self.receipts.display().to_string())?;
        let info = policy.info();
        if self.json {
            let told = json!({ "policy": info.name, "digest": info.digest, "report": report });
            say(&format!("{told}\n"))?;
        } else {
            say(&text(&format!("{} {}", info.name, info.version), &report))?;
        }
        let fine = report.differences.is_empty() || self.allow_differences;
        Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn text(policy: &str, report: &Report) -> String {
    let Report { decisions, agree, skipped, differences } = report;
    let mut text = format!("policy  {policy}\nagree   {agree} of {decisions}\n");
    for (why, count) in skipped {
        let _ = writeln!(text, "skipped {count}: {why}");
    }
    for difference in differences.iter().take(SHOWN) {
        text.push_str(&line(difference));
    }
    if differences.len() > SHOWN {
        let _ = writeln!(text, "        and {} more", differences.len() - SHOWN);
    }
    text
}

fn line(difference: &Difference) -> String {
    let cost = |cost: Option<f32>| cost.map(|cost| format!(" (cost {cost})")).unwrap_or_default();
    let Difference { id, leg, recorded, new, .. } = difference;
    let (old_cost, new_cost) = (cost(difference.recorded_cost), cost(difference.new_cost));
    let by = difference.by.map(|by| format!(", dearer by {by}")).unwrap_or_default();
    format!("differs {id} {leg}: {recorded}{old_cost}, now {new}{new_cost}{by}\n")
}
