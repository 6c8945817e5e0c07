//! `pointsman policy run`: recorded decisions decided again with a compiled policy.

use std::{fmt::Write as _, fs::File, io::BufReader, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use pointsman_routing::Policy;
use serde_json::json;

use crate::{
    output::print,
    policy_file::{LimitArgs, PolicyFile, refused},
    replay::{Contrast, Difference, Judge, Report, replay},
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
pub struct RunArgs {
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
    /// The greatest differences are those by the recorded costs: where what decided finds this policy's choice dearest.
    #[arg(long)]
    as_recorded: bool,
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
        let judge = if self.as_recorded { Judge::Recorded } else { Judge::Policy };
        let report = replay(&policy, file.access.state(), BufReader::new(recording), judge)
            .with_context(|| self.receipts.display().to_string())?;
        let info = policy.info();
        if self.json {
            let told = json!({ "policy": info.name, "digest": info.digest, "report": report });
            print(&format!("{told}\n"))?;
        } else {
            print(&text(&format!("{} {}", info.name, info.version), &report))?;
        }
        let fine = report.differences.is_empty() || self.allow_differences;
        Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn text(policy: &str, report: &Report) -> String {
    let Report { decisions, agree, legs, skipped, differences } = report;
    let mut text = format!("policy  {policy}\nagree   {agree} of {decisions}\n");
    for (leg, share) in legs {
        let _ = writeln!(text, "        {leg}: {} of {}", share.agree, share.decisions);
    }
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

/// What differs as this policy says, as was recorded, and in which facts.
fn line(difference: &Difference) -> String {
    let cost = |cost: Option<f32>| cost.map(|cost| format!(" (cost {cost})")).unwrap_or_default();
    let Difference { id, leg, recorded, new, .. } = difference;
    let (old_cost, new_cost) = (cost(difference.recorded_cost), cost(difference.new_cost));
    let by = difference.by.map(|by| format!(", dearer by {by}")).unwrap_or_default();
    let mut text = format!("differs {id} {leg}: {recorded}{old_cost}, now {new}{new_cost}{by}\n");
    if let (Some(cost), Some(by)) = (difference.new_cost_recorded, difference.by_recorded) {
        let _ = writeln!(text, "        as recorded {new} costs {cost}, dearer by {by}");
    }
    if !difference.facts.is_empty() {
        let one = |Contrast { fact, recorded, new }: &Contrast| format!("{fact} {recorded} | {new}");
        let facts: Vec<String> = difference.facts.iter().map(one).collect();
        let _ = writeln!(text, "        {recorded} | {new}: {}", facts.join(", "));
    }
    text
}
