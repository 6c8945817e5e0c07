//! `pointsman decisions summary`.

use std::process::ExitCode;

use clap::Args;

use crate::{
    api::{LaneFigures, Quantiles, Summary},
    block_on,
    gateway::{GatewayArgs, query},
    print,
    text::{Column, NONE, Table, age, millis, percent},
};

/// Arguments of `decisions summary`.
#[derive(Debug, Args)]
pub(crate) struct SummaryArgs {
    /// Time to look back, from 1s to 1h.
    #[arg(long, value_name = "TIME", default_value = "1h")]
    window: String,
    /// Print the JSON of `GET /decisions/summary` unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl SummaryArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        let path = format!("/decisions/summary{}", query(&[("window", Some(&self.window))]));
        let answer = block_on(async { Ok(gateway.get(&path).await?) })?;
        if self.json {
            return answer.print_json();
        }
        print(&summary_text(&answer.read::<Summary>()?))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn summary_text(summary: &Summary) -> String {
    let mut table = Table::new(&[
        Column::Left("SLOT"),
        Column::Left("MODEL"),
        Column::Left("LANE"),
        Column::Right("DECISIONS"),
        Column::Right("FALLBACKS"),
        Column::Right("REFUSED"),
        Column::Right("FAILED"),
        Column::Right("AGREES"),
        Column::Right("HITS"),
        Column::Right("TTFT p50"),
        Column::Right("p99"),
        Column::Right("ITL p50"),
        Column::Right("p99"),
        Column::Left("POLICY"),
    ]);
    for slot in &summary.slots {
        for lane in &slot.lanes {
            let [ttft_p50, ttft_p99] = quantiles(lane.ttft_ms);
            let [itl_p50, itl_p99] = quantiles(lane.itl_ms);
            table.row(vec![
                slot.slot.clone(),
                slot.model.clone().unwrap_or_else(|| "all".to_owned()),
                lane.lane.clone(),
                lane.decisions.to_string(),
                lane.fallbacks.to_string(),
                lane.sheds.to_string(),
                lane.failed.to_string(),
                percent(lane.agreement),
                percent(lane.predicted_hit_rate),
                ttft_p50,
                ttft_p99,
                itl_p50,
                itl_p99,
                policy(lane),
            ]);
        }
    }
    format!("the last {}\n\n{}", age(summary.window_s), table.text())
}

fn quantiles(of: Option<Quantiles>) -> [String; 2] {
    [of.and_then(|times| times.p50), of.and_then(|times| times.p99)].map(millis)
}

/// The policy of a lane. A lane that ended within the window runs nothing now.
fn policy(lane: &LaneFigures) -> String {
    let native = || lane.native.as_ref().map(|name| format!("native:{name}"));
    let name = lane.policy.clone().or_else(native);
    match (name, lane.generation) {
        (Some(name), Some(generation)) => format!("{name}@{generation}"),
        _ => NONE.to_owned(),
    }
}
