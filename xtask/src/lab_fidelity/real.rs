//! Two real vLLM engines beside the lab's forecast.
//!
//! `pointsman calibrate` fits the lab's engines to a real one. Then round-robin, kv-aware and the default
//! route the same requests to the same engines in turns. The engines share the machine with each other and
//! with all else that runs on it, so that hit rates are judged, and times are only shown.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::{
    Args, Seen, outcomes, ratio, send,
    slice::{self, BLOCK, Request},
};
use crate::{
    fleet,
    load::at_times,
    real_engines::{
        RealEngine,
        engines::{Installed, Kind, Part},
    },
    sh,
    table::{Checks, columns},
};
use anyhow::{Context as _, ensure};

/// Factor by which prompts and answers are shorter than in the trace.
const SCALE: usize = 32;
/// Number of tokens in an engine's block.
const ENGINE_BLOCK: usize = 32;
/// Number of blocks of the trace in a block of an engine.
const TOGETHER: usize = ENGINE_BLOCK * SCALE / BLOCK;
/// Number of KV blocks of an engine.
const BLOCKS: u32 = 640;
/// Longest prompt and answer that an engine takes, tokens.
const LONGEST: u64 = 8_192;
/// Largest difference between the hit rates of the lab and of the engines.
const HITS: f64 = 0.05;
/// Arms whose hit rates are closer than this in the lab have no order.
const EQUAL: f64 = 0.01;

/// Names of the lab's arms, and what the gateway's configuration says for each.
const ARMS: [(&str, &str); 3] = [
    ("round-robin", "[policies.slots.aggregated]\nnative = \"round-robin\"\n"),
    ("kv-aware", "[policies.slots.aggregated]\nbuiltin = \"kv-aware\"\n"),
    ("default", ""),
];

/// Figures of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    hit_rate: f64,
    /// Mean time to the first token, milliseconds.
    ttft: f64,
}

/// Prints the forecast and the figures of every turn.
pub(super) async fn run(args: &Args, venv: &Path) -> anyhow::Result<()> {
    let bin = fleet::build_programs("release", &[fleet::GATEWAY, fleet::LAB])?;
    let installed = Installed::at(Kind::VllmNixl, Some(venv))?;
    let requests = shorter(slice::read(&args.trace, args.requests, args.speed)?);
    let temporary = tempfile::Builder::new().prefix("pointsman-fidelity-").tempdir()?;
    let dir = args.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(dir)?;
    sh::status("starting two engines (about 3 min)");
    let start = |n| installed.start(&format!("engine-{n}"), Part::KvEvents, dir, BLOCKS);
    let mut engines = (0..2).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    for engine in &mut engines {
        engine.ready().await?;
    }
    let lab = Lab::new(&bin, dir, &requests, &engines[0])?;
    let forecasts = ARMS.iter().map(|(arm, _)| lab.forecast(arm)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut runs = vec![Vec::new(); ARMS.len()];
    for round in 0..args.rounds {
        for turn in 0..ARMS.len() {
            // No arm is always the first or the last of a round.
            let place = (turn + round as usize) % ARMS.len();
            let number = round * ARMS.len() as u32 + turn as u32;
            let run = one_turn(&bin, dir, ARMS[place].1, &engines, &requests, number).await?;
            let Run { hit_rate, ttft } = run;
            sh::status(&format!("{}: hit rate {hit_rate:.4}, mean TTFT {ttft:.1} ms", ARMS[place].0));
            runs[place].push(run);
        }
    }
    report(&forecasts, &runs)
}

/// Shortens the requests. Sessions whose prompts no engine takes end there.
fn shorter(requests: Vec<Request>) -> Vec<Request> {
    let mut blocks = HashMap::new();
    let each = requests.into_iter().map(|mut request| {
        // The same blocks after each other are the same block of an engine.
        request.hash_ids = request
            .hash_ids
            .chunks(TOGETHER)
            .map(|ids| {
                let next = blocks.len() as u32;
                *blocks.entry(ids.to_vec()).or_insert(next)
            })
            .collect();
        request.input_length = (request.input_length / SCALE as u64).max(1);
        // The rest of the division may have been all that was in the last block.
        request.hash_ids.truncate(request.input_length.div_ceil(ENGINE_BLOCK as u64) as usize);
        request.output_length = (request.output_length / SCALE as u64).max(1);
        request
    });
    each.filter(|request| request.input_length + request.output_length < LONGEST).collect()
}

/// Returns token ids that differ between blocks, and between turns: an engine keeps its cache.
fn prompt(request: &Request, turn: u32) -> Vec<u32> {
    // The tiny model has 4,096 tokens, and the first are special.
    let digit = |number: u32| 100 + number % 3_900;
    let of_block = |id: u32| {
        let head = [digit(id), digit(id / 3_900), digit(turn)];
        head.into_iter().chain(std::iter::repeat_n(digit(7), ENGINE_BLOCK - 3))
    };
    let tokens = request.hash_ids.iter().flat_map(|id| of_block(*id));
    tokens.take(usize::try_from(request.input_length).unwrap_or(usize::MAX)).collect()
}

/// Routes all requests by one arm.
async fn one_turn(
    bin: &Path,
    dir: &Path,
    slots: &str,
    engines: &[RealEngine],
    requests: &[Request],
    turn: u32,
) -> anyhow::Result<Run> {
    let workers: Vec<String> = engines.iter().map(|engine| engine.as_worker("aggregated")).collect();
    let config = format!("[routing]\nblock_size = {ENGINE_BLOCK}\n[probe]\ntimeout = \"10s\"\n{slots}");
    let fleet = fleet::gateway(bin, dir, &config, &workers).await?;
    fleet.kv_feeds(engines.len(), Duration::from_secs(20)).await?;
    let progress = sh::progress(requests.len() as u64, "requests");
    let one = |number: usize| {
        let (fleet, request, progress) = (&fleet, &requests[number], &progress);
        async move {
            let tokens = prompt(request, turn);
            let seen = send(&fleet.client, number, &tokens, request.output_length).await;
            progress.inc(1);
            seen.with_context(|| format!("request {number} of turn {turn}"))
        }
    };
    let answers = at_times(requests.iter().map(Request::at), one).await;
    progress.finish_and_clear();
    Ok(figures(requests, &answers.into_iter().collect::<anyhow::Result<Vec<_>>>()?))
}

fn figures(requests: &[Request], seen: &[Seen]) -> Run {
    let tokens = requests.iter().map(|request| request.input_length).sum();
    let ttft = seen.iter().map(|seen| seen.ttft_ms).sum::<f64>() / seen.len().max(1) as f64;
    Run { hit_rate: ratio(seen.iter().map(|seen| seen.cached).sum(), tokens), ttft }
}

/// The lab's program with the fleet and the trace.
struct Lab<'a> {
    program: PathBuf,
    dir: &'a Path,
    requests: &'a [Request],
}

impl<'a> Lab<'a> {
    fn new(bin: &Path, dir: &'a Path, requests: &'a [Request], engine: &RealEngine) -> anyhow::Result<Self> {
        let lab = Self { program: bin.join(fleet::LAB.name), dir, requests };
        std::fs::write(lab.trace(), slice::write(requests))?;
        let url = format!("http://{}", engine.address());
        let mut calibrate = Command::new(&lab.program);
        calibrate.args(["calibrate", "--url", &url, "--max-requests", "120", "--max-seconds", "240"]);
        calibrate
            .args(["--max-prompt-tokens", "6000", "--max-concurrency", "6", "--output"])
            .arg(lab.fleet());
        sh::run(&mut calibrate)?;
        let fleet = std::fs::read_to_string(lab.fleet())?;
        ensure!(fleet.contains("count = 1\n"), "calibrate wrote a fleet without `count = 1`: {fleet}");
        std::fs::write(lab.fleet(), fleet.replace("count = 1\n", "count = 2\n"))?;
        Ok(lab)
    }

    fn trace(&self) -> PathBuf {
        self.dir.join("trace.jsonl")
    }

    fn fleet(&self) -> PathBuf {
        self.dir.join("fleet.toml")
    }

    fn forecast(&self, arm: &str) -> anyhow::Result<Run> {
        let output = self.dir.join(format!("lab-{arm}.jsonl"));
        let mut lab = Command::new(&self.program);
        lab.args(["trace", "run", "--fixed-schedule", "--trace-block", &ENGINE_BLOCK.to_string()]);
        lab.args(["--arm", arm, "--fleet"]).arg(self.fleet()).arg("--output").arg(&output).arg(self.trace());
        sh::run(&mut lab)?;
        Ok(figures(self.requests, &outcomes(&output)?))
    }
}

fn report(forecasts: &[Run], runs: &[Vec<Run>]) -> anyhow::Result<()> {
    let head = ["arm", "hit rate, lab", "hit rate, engines", "TTFT ms, lab", "TTFT ms, engines"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut hits = Vec::new();
    for (place, (forecast, runs)) in forecasts.iter().zip(runs).enumerate() {
        let (hit_rate, of_hits) = mean_and_error(runs.iter().map(|run| run.hit_rate));
        let (ttft, of_ttft) = mean_and_error(runs.iter().map(|run| run.ttft));
        rows.push(vec![
            ARMS[place].0.to_owned(),
            format!("{:.4}", forecast.hit_rate),
            format!("{hit_rate:.4} ± {of_hits:.4}"),
            format!("{:.1}", forecast.ttft),
            format!("{ttft:.1} ± {of_ttft:.1}"),
        ]);
        hits.push(hit_rate);
    }
    columns(&rows).iter().for_each(|row| sh::print(row));
    let mut checks = Checks::default();
    for (place, (arm, _)) in ARMS.iter().enumerate() {
        let difference = hits[place] - forecasts[place].hit_rate;
        let text = format!("{:+.1} points", difference * 100.0);
        checks.check(&format!("hit rate beside the lab's, {arm}"), text, difference.abs() <= HITS);
    }
    let wrong = (0..ARMS.len()).flat_map(|one| (0..ARMS.len()).map(move |other| (one, other)));
    let wrong = wrong.filter(|(one, other)| {
        forecasts[*one].hit_rate > forecasts[*other].hit_rate + EQUAL && hits[*one] <= hits[*other]
    });
    checks.none("pairs of arms in another order than the lab's", wrong.count() as u64);
    checks.finish()
}

/// Mean of these values, and its standard error.
fn mean_and_error(values: impl ExactSizeIterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::{Request, mean_and_error, prompt, shorter};

    #[test]
    fn equal_beginnings_stay_equal_and_turns_share_nothing() {
        let line = |ids: &str| {
            let text = format!(
                r#"{{"timestamp": 0, "input_length": 2048, "output_length": 64, "hash_ids": {ids}}}"#
            );
            serde_json::from_str::<Request>(&text).unwrap()
        };
        let short = shorter(vec![line("[1, 2, 3, 4]"), line("[1, 2, 9, 4]")]);
        let mut one_token_more = line("[1, 2, 3, 4, 5]");
        one_token_more.input_length = 2_049;
        assert_eq!(shorter(vec![one_token_more])[0].hash_ids.len(), 2, "64 tokens are two blocks");
        assert_eq!((short[0].input_length, short[0].output_length), (64, 2));
        let [one, other] = [&short[0], &short[1]].map(|request| prompt(request, 0));
        assert_eq!((one.len(), &one[..32], one[32..] == other[32..]), (64, &other[..32], false));
        assert_ne!(one[..32], prompt(&short[0], 1)[..32]);
    }

    #[test]
    fn the_error_of_a_mean_is_that_of_its_values() {
        assert_eq!(mean_and_error([1.0, 3.0].into_iter()), (2.0, 1.0));
        assert_eq!(mean_and_error([1.0].into_iter()), (1.0, 0.0));
    }
}
