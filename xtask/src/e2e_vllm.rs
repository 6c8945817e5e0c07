//! `e2e-vllm`, `e2e-mooncake`: run a real prefill and a real decode engine (vLLM on CPU) behind the gateway,
//! with NIXL or with Mooncake over TCP.
//!
//! Greedy output through both legs must equal that of one plain engine, token by token. The engines' own
//! counters must show that KV was transferred. Blocks of disconnected clients must not stay pinned for longer
//! than the lease. When a decode engine is killed, its stream must end with one valid error event.

use std::{path::PathBuf, time::Duration};

use crate::{
    real_engines::{
        Options, RealEngine, Session, checks,
        continuations::{self, Form},
    },
    sh,
    table::Checks,
};

pub(crate) mod engines;
mod install;

use engines::{Installed, Part, Vllm};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Virtual environment with vLLM, nixl and Mooncake; created if it does not exist.
    #[arg(long, default_value = "target/venv-vllm")]
    venv: PathBuf,
    #[command(flatten)]
    options: Options,
    /// Streams that run when a plain engine is killed, in each form of continuation; 0: none.
    #[arg(long, default_value_t = 25)]
    streams: usize,
}

/// Time after which vLLM frees blocks that were not pulled.
const LEASE: Duration = Duration::from_secs(30);
/// Gauges that show the requests and blocks of an engine.
const HELD: [&str; 3] =
    ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
/// Number of blocks of an engine.
const BLOCKS: u32 = 512;

/// A connector of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connector {
    /// The prefill leg runs first; its answer names the blocks.
    Nixl,
    /// Both legs run at once, connected by a transfer id.
    Mooncake,
}

/// Runs every check and prints the table.
pub(crate) async fn run(args: &Args, connector: Connector) -> anyhow::Result<()> {
    let leavers = args.options.leavers;
    let mut session = Session::begin("vllm", &args.options)?;
    let installed = Installed::at(&sh::root().join(&args.venv))?;
    let (plain, expected) = plain_engine(&installed, &mut session).await?;
    if connector == Connector::Nixl && args.streams > 0 {
        continued(&installed, &mut session, plain, args.streams).await?;
    } else {
        drop(plain);
    }

    sh::status("starting a prefill and a decode engine (about 3 min)");
    let mut prefill = installed.start("prefill", Part::Prefill(connector), session.dir.path(), BLOCKS)?;
    let mut decode = installed.start("decode", Part::Decode(connector), session.dir.path(), BLOCKS)?;
    prefill.engine.ready().await?;
    decode.engine.ready().await?;
    let workers = [prefill.as_worker("prefill"), decode.as_worker("decode")];
    let fleet = session.gateway(&workers).await?;
    let Session { prompts, mut checks, .. } = session;
    checks::compare(&fleet.client, &prompts, &expected, &mut checks).await?;
    transferred(connector, &decode.engine, &mut checks).await?;
    checks::leave_early(&fleet.client, leavers, &prompts, false).await?;
    let engines = [&prefill.engine, &decode.engine];
    let held = checks::held(&engines, &HELD, LEASE + Duration::from_secs(15)).await?;
    let expired = format!("vllm:{}_num_kv_expired_reqs_total", connector.metrics());
    let expired = prefill.engine.metric(&expired, "").await?;
    let shown = format!("{held} (leases that ended: {expired})");
    checks.check(&format!("held after {leavers} clients disconnected"), shown, held == 0.0);
    checks.none("bookings left in the gateway", fleet.booked(Duration::from_secs(5)).await?);
    checks::kill_mid_stream(&fleet.client, &mut decode.engine, &mut checks).await?;
    checks.finish()
}

/// Returns one plain engine and its answers. Also tests this engine as an aggregated worker of the gateway.
async fn plain_engine(installed: &Installed, session: &mut Session) -> anyhow::Result<(Vllm, Vec<Vec<u64>>)> {
    sh::status("starting one plain engine (about 90 s)");
    let mut plain = installed.start("plain", Part::Plain, session.dir.path(), BLOCKS)?;
    plain.engine.ready().await?;
    let (expected, _) = session.plain_answers(&plain.engine, plain.as_worker("aggregated")).await?;
    Ok((plain, expected))
}

/// Kills one of two plain engines under streams, twice in each form of continuation.
async fn continued(
    installed: &Installed,
    session: &mut Session,
    first: Vllm,
    streams: usize,
) -> anyhow::Result<()> {
    let expected = continuations::undisturbed(&first.engine, streams).await?;
    let mut engines = vec![first];
    for (turn, form) in [Form::Exact, Form::Text, Form::Exact, Form::Text].into_iter().enumerate() {
        sh::status(&format!("starting a second plain engine, to be killed (turn {} of 4)", turn + 1));
        let mut second =
            installed.start(&format!("plain-{turn}"), Part::Plain, session.dir.path(), BLOCKS)?;
        second.engine.ready().await?;
        engines.push(second);
        let workers: Vec<String> = engines.iter().map(|engine| engine.as_worker("aggregated")).collect();
        let fleet = session.continuing(form, &workers).await?;
        let mut dying = engines.remove(0);
        continuations::read_through_a_kill(&fleet, form, &mut dying.engine, &expected, &mut session.checks)
            .await?;
    }
    Ok(())
}

async fn transferred(connector: Connector, decode: &RealEngine, checks: &mut Checks) -> anyhow::Result<()> {
    // With Mooncake, the sending engine counts.
    if connector == Connector::Nixl {
        let bytes = decode.metric(&format!("vllm:{}_bytes_transferred_sum", connector.metrics()), "").await?;
        checks.check("bytes of KV that the decode engine pulled", format!("{bytes:.0}"), bytes > 0.0);
    }
    let by_source = "vllm:prompt_tokens_by_source_total";
    let external = decode.metric(by_source, "external_kv_transfer").await?;
    let computed = decode.metric(by_source, "local_compute").await?;
    let shown = format!("{external:.0} (computed {computed:.0})");
    checks.check("prompt tokens from the prefill engine", shown, external > computed);
    Ok(())
}

impl Connector {
    /// Returns the beginning of the names of its metrics, after `vllm:`.
    fn metrics(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
        }
    }
}
