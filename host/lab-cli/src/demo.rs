//! `demo`: shows the gateway's main job with real processes. Clients replay a recorded trace through the
//! gateway to engines, while policies are swapped, refused and rolled back and a worker is killed.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pointsman_embedded_policies::{KV_AWARE, LEAST_LOADED};
use pointsman_rig::{
    fleet::{self, EngineSpec, Fleet},
    terminal::{print, status},
    trace,
};

mod clients;
mod story;
mod table;

use clients::Clients;
use story::{STORY, Step};

/// A policy that loops without end after a number of calls.
const LOOPING: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/looping.wasm"));

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Keep the engines and the gateway running and print commands to try.
    #[arg(long)]
    keep: bool,
    /// Number of requests to send, from the beginning of the trace.
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// Other trace, in the Mooncake format (JSON lines).
    #[arg(long)]
    trace: Option<PathBuf>,
}

/// The looping policy answers the first 50 calls of an instance, so that it passes admission.
const CONFIG: &str = r#"
[policies]
rescan = "1s"
[policies.slots.decode.settings]
mode = "spin"
after = 50
[probe]
interval = "200ms"
load_interval = "1s"
"#;

impl DemoArgs {
    /// Runs the demo. Returns an error when an event did not end as expected.
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.show())?;
        Ok(ExitCode::SUCCESS)
    }

    async fn show(&self) -> anyhow::Result<()> {
        let bin = programs()?;
        let bodies = trace::bodies(self.trace.as_deref(), self.requests)?;
        let total = bodies.len();
        ensure!(total > 0, "the trace is empty, or --requests is 0");
        let dir = tempfile::Builder::new().prefix("pointsman-demo-").tempdir()?;
        status("Starting six simulated engines and a gateway");
        let mut fleet = fleet::start(&bin, dir.path(), &engines(), CONFIG).await?;
        status(&format!("The operators' page: http://{}/", fleet.admin_address()));
        let bar = ProgressBar::new(total as u64);
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} requests  {msg}")?);
        let mut clients = Clients::start(&fleet.client, bodies, &bar);
        for (percent, step) in STORY {
            clients.until_answered(total * percent / 100).await;
            act(step, &mut fleet, &clients)?;
            bar.set_message(step.message());
            story::settle(step, &fleet).await?;
        }
        let seen = clients.finish().await;
        bar.finish_and_clear();
        let rows = story::rows(&fleet, &seen).await?;
        table::print(&fleet, &seen, &rows).await?;
        story::verdict(&rows, &seen)?;
        if self.keep {
            keep(fleet, dir)?
        } else {
            table::next_steps()
        }
        Ok(())
    }
}

/// Returns the directory of this program, which must contain the gateway, too.
fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("the path of this program is unknown")?;
    let dir = own.parent().context("this program has no directory")?.to_owned();
    let has_gateway = dir.join("pointsman").is_file();
    ensure!(has_gateway, "{} has no program `pointsman`; install the whole package", dir.display());
    Ok(dir)
}

fn engines() -> [EngineSpec; 6] {
    let model = "--natural-len 4096 --overhead-ms 8 --prefill-ms-per-token 0.05 --itl-ms 4 \
                 --kv-transfer-us-per-token 2";
    let plan = [
        ("vllm", "prefill"),
        ("vllm", "prefill"),
        ("vllm", "decode"),
        ("vllm", "decode"),
        ("sglang", "prefill"),
        ("sglang", "decode"),
    ];
    plan.map(|(dialect, role)| EngineSpec::new(dialect, role, model))
}

fn act(step: Step, fleet: &mut Fleet, clients: &Clients) -> anyhow::Result<()> {
    match step {
        Step::Swap => fleet.drop_policy("prefill.wasm", LEAST_LOADED),
        Step::Garbage => fleet.drop_policy("prefill.wasm", b"this is not a policy"),
        Step::Loop => fleet.drop_policy("decode.wasm", LOOPING),
        Step::SwapAgain => fleet.drop_policy("prefill.wasm", KV_AWARE),
        Step::Kill => {
            let victim = fleet.engines.iter_mut().find(|engine| engine.name == story::VICTIM);
            let victim = victim.context("the worker to kill does not run")?;
            clients.during_kill(|| victim.stop());
            Ok(())
        }
    }
}

/// Leaves all processes running, and prints commands for them.
fn keep(fleet: Fleet, dir: tempfile::TempDir) -> anyhow::Result<()> {
    let spare = dir.path().join("least-loaded.wasm");
    std::fs::write(&spare, LEAST_LOADED)?;
    let admin = fleet.admin_address();
    let commands = table::commands(&fleet.gateway.listening(), &admin, (&spare, &fleet.policies));
    print(&format!("\nEverything keeps running: see http://{admin}/, and try:"));
    commands.iter().for_each(|command| print(&format!("  {command}")));
    let pids: Vec<String> = fleet.detach().iter().map(u32::to_string).collect();
    let files = dir.keep();
    print(&format!("To stop it:\n  kill {}; rm -r {}", pids.join(" "), files.display()));
    Ok(())
}
