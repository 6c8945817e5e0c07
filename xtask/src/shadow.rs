//! `shadow`: kv-aware serves a trace while another policy runs as its shadow. Then the other policy decides
//! again from the recorded receipts. Both ways must give the same number of equal decisions.

use std::{
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::ensure;
use pointsman_guest_build::GuestBuild;
use pointsman_rig::trace;
use serde_json::Value;

use crate::{
    fleet::{self, EngineSpec, Fleet},
    load::closed_loop,
    metrics_text::sum_with,
    poll::until,
    sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Policy of this repository that runs as the shadow.
    #[arg(long, default_value = "least-loaded")]
    policy: String,
    /// Number of requests to send; the trace is repeated if it is shorter.
    #[arg(long, default_value_t = 2_000)]
    requests: usize,
    /// Trace in the Mooncake format, JSON lines [default: the 400 lines of tests/fixtures].
    #[arg(long)]
    trace: Option<PathBuf>,
    /// File to write the receipts to.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
}

/// Number of concurrent requests.
const CLIENTS: usize = 12;
const LEGS: [&str; 2] = ["prefill", "decode"];

/// `facts` records what kv-aware does not read but a shadow may, so that the shadow can decide again later.
const CONFIG: &str = r#"
[decisions]
keep = 20000
bytes = 134217728
facts = ["request-blocks", "engine-queue", "kv-usage", "load-age-ms", "max-concurrency", "session-hash", "session-bound"]
[probe]
load_interval = "200ms"
"#;

/// Runs the comparison; returns an error when a request failed or the counts differ.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let bin = fleet::build_programs("release", &[fleet::GATEWAY, fleet::ENGINE, fleet::POLICY])?;
    let policy = |name: &str| GuestBuild::new(&sh::root(), &format!("policy-{name}")).build();
    let (active, shadow) = (policy("kv-aware")?, policy(&args.policy)?);
    let bodies = trace::bodies(args.trace.as_deref(), args.requests)?;
    let dir = tempfile::Builder::new().prefix("pointsman-shadow-").tempdir()?;
    // The engines' caches are small enough that they evict prefixes.
    let flags = "--overhead-ms 4 --prefill-ms-per-token 0.05 --itl-ms 2";
    let engines = LEGS.map(|role| vec![EngineSpec::new("vllm", role, flags); 3]).concat();
    let fleet = fleet::start(&bin, dir.path(), &engines, CONFIG).await?;
    for leg in LEGS {
        fleet.drop_policy(&format!("{leg}.wasm"), &active)?;
        fleet.drop_policy(&format!("{leg}.shadow.wasm"), &shadow)?;
    }
    for leg in LEGS {
        until_both_serve(&fleet, leg).await?;
    }
    send(&fleet, &bodies, args.requests).await?;
    let receipts = args.keep.clone().unwrap_or_else(|| dir.path().join("receipts.jsonl"));
    let export = fleet.admin.get("/decisions/export").await?;
    std::fs::write(
        &receipts,
        export.lines().filter(|line| by_kv_aware(line)).collect::<Vec<_>>().join("\n"),
    )?;
    let file = dir.path().join("shadow.wasm");
    std::fs::write(&file, shadow)?;
    let replay = |more: &[&str]| {
        let mut command = Command::new(bin.join(fleet::POLICY.name));
        command.arg("run").arg(&file).arg("--receipts").arg(&receipts);
        command.args(["--as-recorded", "--allow-differences"]).args(more);
        command
    };
    sh::run(&mut replay(&[]))?;
    let report: Value = serde_json::from_str(&sh::output(&mut replay(&["--json"]))?)?;
    let metrics = fleet.metrics().await?;
    for leg in LEGS {
        compare(&metrics, leg, &report["report"]["legs"][leg])?;
    }
    Ok(())
}

fn compare(metrics: &str, leg: &str, replayed: &Value) -> anyhow::Result<()> {
    let count = |result| {
        sum_with(metrics, "pointsman_policy_shadow_total", &[("slot", leg), ("result", result)]) as u64
    };
    let (agree, disagree, failed) = (count("agree"), count("disagree"), count("failed"));
    sh::print(&format!("{leg}: the shadow agreed {agree} times, disagreed {disagree}; replayed: {replayed}"));
    ensure!(agree + disagree > 0, "{leg}: the shadow decided nothing");
    ensure!(failed == 0, "{leg}: {failed} decisions of the shadow failed");
    let same =
        replayed["agree"].as_u64() == Some(agree) && replayed["decisions"].as_u64() == Some(agree + disagree);
    ensure!(same, "{leg}: the replay of the receipts counts differently from the shadow");
    Ok(())
}

/// Whether kv-aware made the decision; the first ones may predate its installation.
fn by_kv_aware(line: &str) -> bool {
    serde_json::from_str(line).is_ok_and(|line: Value| line["policy"] == "kv-aware")
}

async fn until_both_serve(fleet: &Fleet, leg: &str) -> anyhow::Result<()> {
    let serve = || async {
        let slot = fleet.slot(leg).await?;
        Ok((slot["policy"] == "kv-aware" && !slot["shadow"].is_null()).then_some(()))
    };
    until(&format!("both policies serve {leg}"), Duration::from_secs(20), serve).await
}

async fn send(fleet: &Fleet, bodies: &[String], count: usize) -> anyhow::Result<()> {
    let failed = AtomicU64::new(0);
    ensure!(!bodies.is_empty(), "the trace is empty");
    closed_loop(count as u64, CLIENTS, |turn| {
        let body = usize::try_from(turn).ok().and_then(|turn| bodies.get(turn % bodies.len()));
        let (body, failed) = (body.cloned().unwrap_or_default(), &failed);
        async move {
            if !fleet.client.stream_chat(&[], body).await.complete {
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    })
    .await;
    let failed = failed.into_inner();
    ensure!(failed == 0, "{failed} of {count} requests failed");
    Ok(())
}
