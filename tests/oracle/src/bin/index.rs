//! The bench `index`: compares our prefix index with the oracle's concurrent tree, in interleaved
//! rounds.

use std::{
    io::Write as _,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Parser;
use pointsman_oracle::{
    contest::{Ours, Side, Theirs},
    load::{Load, LoadArgs, Payload},
    wire,
};

/// Number of prompts for lookups.
const ASKED: usize = 512;

/// Compares Pointsman's index with the oracle's: stored blocks per second, lookup times under load, bytes per
/// block.
#[derive(Parser)]
#[command(name = "index")]
struct Cli {
    #[command(flatten)]
    load: LoadArgs,
    /// Number of rounds. Each round measures both sides and their ratio.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of writer threads of the oracle. Pointsman has one.
    #[arg(long, default_value_t = 2)]
    oracle_threads: usize,
    /// Stored blocks per second while lookups are timed.
    #[arg(long, default_value_t = 100_000)]
    rate: u64,
    /// Number of threads that look up while the second half of the events is applied.
    #[arg(long, default_value_t = 4)]
    readers: usize,
    /// Seconds after which the measurement with these readers ends, whether or not all events are applied.
    #[arg(long, default_value_t = 20)]
    readers_limit: u64,
}

/// Messages that may wait for the index while readers look up. One of the indexes has no bound of its own.
const IN_FLIGHT: usize = 512;

/// Measurements of a round, in this order.
const FIGURES: [(&str, &str, bool); 9] = [
    ("stored blocks/s, from the wire's bytes", "blocks/s", true),
    ("stored blocks/s, from decoded events (ours with tokens)", "blocks/s", true),
    ("stored blocks/s, from hashed events", "blocks/s", true),
    ("lookup p50 while events stream", "ns", false),
    ("lookup p99 while events stream", "ns", false),
    ("tokens to matches p50 while events stream", "ns", false),
    ("tokens to matches p99 while events stream", "ns", false),
    ("stored blocks/s while readers look up", "blocks/s", true),
    ("lookups/s of the readers meanwhile", "lookups/s", true),
];

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    ensure!(cli.rounds > 0, "no rounds");
    let load = Load::new(&cli.load)?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} prompts, {} messages, {} blocks stored, {} held at the end by {} workers; blocks of {} tokens",
        load.prompts.len(),
        load.payloads.len(),
        load.stored(),
        load.resident,
        cli.load.workers,
        load.block_tokens
    )?;
    let mut rounds = Vec::new();
    for round in 0..cli.rounds {
        // Alternate which side is first.
        let both = if round % 2 == 0 {
            let ours = measure::<Ours>(&load, &cli)?;
            [ours, measure::<Theirs>(&load, &cli)?]
        } else {
            let theirs = measure::<Theirs>(&load, &cli)?;
            [measure::<Ours>(&load, &cli)?, theirs]
        };
        rounds.push(both);
    }
    let mut rows = Vec::new();
    for (place, (name, unit, more_is_better)) in FIGURES.into_iter().enumerate() {
        let of = |side: usize| median(rounds.iter().map(|round| round[side][place]).collect());
        let ratio = median(rounds.iter().map(|round| round[0][place] / round[1][place]).collect());
        rows.push(Row { name, unit, ours: of(0), theirs: of(1), ratio, more_is_better });
    }
    let held = |side| anyhow::Ok(memory(side)? / load.resident as f64);
    let (ours, theirs) = (held(Ours::NAME)?, held(Theirs::NAME)?);
    rows.push(Row {
        name: "bytes a block held (counting allocator)",
        unit: "B",
        ours,
        theirs,
        ratio: ours / theirs,
        more_is_better: false,
    });
    report(&rows, cli.rounds)
}

struct Row {
    name: &'static str,
    unit: &'static str,
    ours: f64,
    theirs: f64,
    ratio: f64,
    more_is_better: bool,
}

fn report(rows: &[Row], rounds: usize) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    for row in rows {
        let line = serde_json::json!({
            "figure": row.name, "unit": row.unit, "pointsman": row.ours, "oracle": row.theirs,
            "ratio": row.ratio, "more_is_better": row.more_is_better, "rounds": rounds,
        });
        writeln!(out, "{line}")?;
    }
    writeln!(
        out,
        "\n| figure | pointsman | dynamo-kv-router | pointsman / it | |\n| --- | --- | --- | --- | --- |"
    )?;
    for row in rows {
        let ahead = if (row.ratio > 1.0) == row.more_is_better { "ahead" } else { "behind" };
        writeln!(
            out,
            "| {}, {} | {:.0} | {:.0} | {:.2} | {ahead} |",
            row.name, row.unit, row.ours, row.theirs, row.ratio
        )?;
    }
    Ok(())
}

fn measure<S: Side>(load: &Load, cli: &Cli) -> anyhow::Result<[f64; 9]> {
    let wire = from_wire::<S>(load, cli)?;
    let events = from_events::<S>(load, cli, |_, _| {})?;
    let hashed = from_events::<S>(load, cli, S::hash)?;
    let [lookup, prompt] = while_streaming::<S>(load, cli)?;
    let [crowded, lookups] = crowd::<S>(load, cli)?;
    Ok([wire, events, hashed, lookup.0, lookup.1, prompt.0, prompt.1, crowded, lookups])
}

/// Measures from bytes to visibility: one thread decodes, the index's own threads write.
fn from_wire<S: Side>(load: &Load, cli: &Cli) -> anyhow::Result<f64> {
    let side = S::new(load.block_tokens, cli.oracle_threads)?;
    let mut reader = S::Reader::default();
    let start = Instant::now();
    for (number, payload) in (1..).zip(&load.payloads) {
        side.feed(side.read(&mut reader, payload, number)?);
    }
    side.drain();
    Ok(load.stored() as f64 / start.elapsed().as_secs_f64())
}

/// Decodes all events.
fn events<S: Side>(side: &S, load: &Load) -> anyhow::Result<Vec<S::Event>> {
    let mut reader = S::Reader::default();
    let read = |(number, payload): (u64, &Payload)| side.read(&mut reader, payload, number);
    (1..).zip(&load.payloads).map(read).collect()
}

/// Measures from decoded events to visibility. `prepare` changes the events before.
fn from_events<S: Side>(load: &Load, cli: &Cli, prepare: fn(&S, &mut S::Event)) -> anyhow::Result<f64> {
    let side = S::new(load.block_tokens, cli.oracle_threads)?;
    let mut events = events(&side, load)?;
    events.iter_mut().for_each(|event| prepare(&side, event));
    let start = Instant::now();
    events.into_iter().for_each(|event| side.feed(event));
    side.drain();
    Ok(load.stored() as f64 / start.elapsed().as_secs_f64())
}

/// Creates an index with the first half of the events. Returns it with the second half, and the number of
/// blocks that each of these stores.
fn half_full<S: Side>(load: &Load, cli: &Cli) -> anyhow::Result<(S, Vec<(S::Event, u64)>)> {
    let side = S::new(load.block_tokens, cli.oracle_threads)?;
    let mut first = events(&side, load)?;
    let rest = first.split_off(first.len() / 2);
    let stored: Vec<u64> = load.payloads[first.len()..].iter().map(|payload| payload.stored).collect();
    first.into_iter().for_each(|event| side.feed(event));
    side.drain();
    Ok((side, rest.into_iter().zip(stored).collect()))
}

/// Measures lookups while the second half of the events is applied.
fn while_streaming<S: Side>(load: &Load, cli: &Cli) -> anyhow::Result<[(f64, f64); 2]> {
    let (side, rest) = half_full::<S>(load, cli)?;
    let done = AtomicBool::new(false);
    Ok(std::thread::scope(|scope| {
        scope.spawn(|| {
            stream(&side, rest, cli.rate);
            done.store(true, Ordering::Release);
        });
        look_up(&side, load, &done)
    }))
}

/// Measures how fast the second half of the events becomes visible while many threads look up without a
/// pause, and how many lookups a second these do.
fn crowd<S: Side>(load: &Load, cli: &Cli) -> anyhow::Result<[f64; 2]> {
    let (side, rest) = half_full::<S>(load, cli)?;
    let every = (load.prompts.len() / ASKED).max(1);
    let prompts = load.prompts.iter().step_by(every);
    let named: Vec<S::Prompt> = prompts.map(|ids| side.name(&wire::prompt(ids, load.block_tokens))).collect();
    let (done, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    Ok(std::thread::scope(|scope| {
        for thread in 0..cli.readers {
            let (side, named, done, lookups) = (&side, &named, &done, &lookups);
            scope.spawn(move || {
                let mut scratch = S::Scratch::default();
                let asked = named.iter().cycle().skip(thread * 7 % named.len().max(1));
                for prompt in asked.take_while(|_| !done.load(Ordering::Relaxed)) {
                    side.ask(prompt, &mut scratch);
                    lookups.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let start = Instant::now();
        let visible = feed_until(&side, rest, start + Duration::from_secs(cli.readers_limit));
        let elapsed = start.elapsed().as_secs_f64();
        done.store(true, Ordering::Relaxed);
        [visible as f64 / elapsed, lookups.load(Ordering::Relaxed) as f64 / elapsed]
    }))
}

/// Sends events until all are visible or the time is over. Returns the number of stored blocks that became
/// visible.
fn feed_until<S: Side>(side: &S, events: Vec<(S::Event, u64)>, end: Instant) -> u64 {
    let (fed, visible) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (all, stored) = (events.len(), events.iter().map(|(_, stored)| *stored).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (event, _) in events {
                while fed.load(Ordering::Acquire) - visible.load(Ordering::Acquire) >= IN_FLIGHT {
                    std::thread::sleep(Duration::from_micros(100));
                }
                if Instant::now() > end {
                    break;
                }
                side.feed(event);
                fed.fetch_add(1, Ordering::AcqRel);
            }
        });
        while visible.load(Ordering::Acquire) < all && Instant::now() < end {
            let before = fed.load(Ordering::Acquire);
            side.drain();
            visible.store(before, Ordering::Release);
        }
    });
    stored.iter().take(visible.into_inner()).sum()
}

/// Sends events at a steady rate, in steps of a millisecond.
fn stream<S: Side>(side: &S, events: Vec<(S::Event, u64)>, rate: u64) {
    let (start, mut blocks) = (Instant::now(), 0_u64);
    for (event, stored) in events {
        blocks += stored.max(1);
        side.feed(event);
        let due = Duration::from_secs_f64(blocks as f64 / rate as f64);
        if let Some(wait) = due.checked_sub(start.elapsed()).filter(|wait| *wait > Duration::from_millis(1)) {
            std::thread::sleep(wait);
        }
    }
}

/// Looks up prompts until the events end. Returns p50 and p99 in ns of the lookup alone, and of hashing and
/// lookup.
fn look_up<S: Side>(side: &S, load: &Load, done: &AtomicBool) -> [(f64, f64); 2] {
    let every = (load.prompts.len() / ASKED).max(1);
    let tokens: Vec<Vec<u32>> =
        load.prompts.iter().step_by(every).map(|ids| wire::prompt(ids, load.block_tokens)).collect();
    let named: Vec<S::Prompt> = tokens.iter().map(|tokens| side.name(tokens)).collect();
    let mut scratch = S::Scratch::default();
    let (mut alone, mut whole) = (Vec::new(), Vec::new());
    let asked = tokens.iter().zip(&named).cycle().take_while(|_| !done.load(Ordering::Acquire));
    for (number, (tokens, named)) in asked.enumerate() {
        let start = Instant::now();
        if number % 4 == 0 {
            side.ask(&side.name(tokens), &mut scratch);
            whole.push(start.elapsed().as_nanos() as u64);
        } else {
            side.ask(named, &mut scratch);
            alone.push(start.elapsed().as_nanos() as u64);
        }
    }
    [percentiles(alone), percentiles(whole)]
}

fn percentiles(mut samples: Vec<u64>) -> (f64, f64) {
    samples.sort_unstable();
    let at = |share: f64| samples.get((samples.len() as f64 * share) as usize).copied().unwrap_or(0) as f64;
    (at(0.5), at(0.99))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs the memory measurement with this program's options.
fn memory(side: &str) -> anyhow::Result<f64> {
    let program = std::env::current_exe()?.with_file_name("index-memory");
    let cli = Cli::parse();
    let mut command = Command::new(&program);
    command.arg(side);
    let LoadArgs { trace, workers, block_tokens, cache_tokens, prompts } = &cli.load;
    command.args(["--workers", &workers.to_string(), "--block-tokens", &block_tokens.to_string()]);
    command.args(["--cache-tokens", &cache_tokens.to_string()]);
    if let Some(trace) = trace {
        command.arg("--trace").arg(trace);
    }
    if let Some(prompts) = prompts {
        command.args(["--prompts", &prompts.to_string()]);
    }
    let output = command.output().with_context(|| format!("could not run `{}`", program.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
