//! `demo`: the gateway's main job on real processes. Engines, the gateway, and clients that replay a real
//! trace, while policies are swapped, refused and rolled back and a worker is killed.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pointsman_guest_build::GuestBuild;

use crate::{
    fleet::{self, EngineSpec, Fleet},
    setup, sh,
};

mod build;
mod clients;
mod story;
mod table;
pub(crate) mod trace;

use clients::Clients;
use story::{STORY, Step};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Keep the engines and the gateway running and print commands to try.
    #[arg(long)]
    keep: bool,
    /// Requests to send, from the beginning of the trace.
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// Another trace in the Mooncake format, JSON lines.
    #[arg(long)]
    trace: Option<PathBuf>,
}

/// Policies that the story installs.
struct Policies {
    least_loaded: Vec<u8>,
    looping: Vec<u8>,
    weighted_random: Vec<u8>,
}

/// The policy that loops behaves for 50 calls of an instance first, so that it passes admission.
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

/// Runs the demo; returns an error when an event did not end as it must.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = build::binaries()?;
    let policies = build::policies()?;
    let dir = tempfile::Builder::new().prefix("pointsman-demo-").tempdir()?;
    let mut fleet = fleet::start(&bin, dir.path(), &engines(), CONFIG).await?;
    let bodies = trace::bodies(&trace::path(args.trace.as_deref()), args.requests)?;
    let total = bodies.len();
    ensure!(total > 0, "the trace is empty, or --requests is 0");
    let bar = ProgressBar::new(total as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} requests  {msg}")?);
    let mut clients = Clients::start(&fleet.client, bodies, &bar);
    for (percent, step) in STORY {
        clients.until_answered(total * percent / 100).await;
        act(step, &mut fleet, &policies, &clients)?;
        bar.set_message(step.message());
        story::settle(step, &fleet).await?;
    }
    let seen = clients.finish().await;
    bar.finish_and_clear();
    let rows = story::rows(&fleet, &seen).await?;
    table::print(&fleet, &seen, &rows).await?;
    let verdict = story::verdict(&rows, &seen);
    if args.keep && verdict.is_ok() {
        keep(fleet, dir);
        return Ok(());
    }
    if verdict.is_ok() {
        table::next_steps();
    }
    verdict
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

fn act(step: Step, fleet: &mut Fleet, policies: &Policies, clients: &Clients) -> anyhow::Result<()> {
    match step {
        Step::Swap => fleet.drop_policy("prefill.wasm", &policies.least_loaded),
        Step::Garbage => fleet.drop_policy("prefill.wasm", b"this is not a policy"),
        Step::Loop => fleet.drop_policy("decode.wasm", &policies.looping),
        Step::SwapAgain => fleet.drop_policy("prefill.wasm", &policies.weighted_random),
        Step::Kill => {
            let victim = fleet.engines.iter_mut().find(|engine| engine.name == story::VICTIM);
            clients.note_kill();
            victim.context("the worker to kill does not run")?.stop();
            Ok(())
        }
    }
}

fn keep(fleet: Fleet, dir: tempfile::TempDir) {
    let commands = table::commands(&fleet.gateway.listening(), &fleet.admin_address(), &fleet.policies);
    sh::print("\nEverything keeps running. Try:");
    commands.iter().for_each(|command| sh::print(&format!("  {command}")));
    let pids: Vec<String> = fleet.detach().iter().map(u32::to_string).collect();
    sh::print(&format!("To stop it:\n  kill {}", pids.join(" ")));
    let _ = dir.keep();
}

fn guest(name: &str) -> anyhow::Result<Vec<u8>> {
    Ok(GuestBuild::new(&sh::root(), name).build()?)
}

/// Whether a directory holds both binaries.
fn has_binaries(bin: &Path) -> bool {
    ["pointsman", "pointsman-sim"].iter().all(|name| bin.join(name).is_file())
}
