//! Checks the lock-free code with the loom model checker: every interleaving of a small scenario,
//! within a bound of preemptions.
//!
//! The code under test is the product's own files, compiled with `cfg(loom)`. Each model has to hold, and has
//! to fail when one of the rules it stands for is broken (`build/flaws.rs`). A model runs in a process of its
//! own, because the checker ends the process at the first failure.

#![expect(clippy::disallowed_types, reason = "loom_types builds on std's own types")]

use std::{
    process::{Command, ExitCode, Output},
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

mod loom_types;
mod sync;

/// The ids that the files import from their crate.
pub(crate) mod id {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) struct BlockHash(pub(crate) u64);

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct WorkerId(pub(crate) u64);

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct DpRank(pub(crate) u32);

    pub(crate) type Candidate = (WorkerId, DpRank);
}

/// The cache tiers and kinds of cache groups that the files import from their crate.
pub(crate) mod events {
    #[allow(dead_code)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Tier {
        Device,
        Host,
        Disk,
    }

    #[allow(dead_code)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum GroupKind {
        Full,
        Window(u32),
        State,
        Other,
    }
}

include!(concat!(env!("OUT_DIR"), "/all.rs"));

/// Name, function, and by how many the number of preemptions is reduced.
type Model = (&'static str, fn(), usize);

const MODELS: &[Model] = &[
    ("lockfree_map: a key is removed and comes back", sound::lockfree_map_model::comes_back, 0),
    ("lockfree_map: the same, with a sweep in between", sound::lockfree_map_model::swept, 0),
    ("lockfree_map: a key before one that stays is removed", sound::lockfree_map_model::leaves, 0),
    ("lockfree_map: values change in place", sound::lockfree_map_model::changes, 0),
    ("lockfree_map: rebuilt", sound::lockfree_map_model::grows, 0),
    ("lockfree_map: emptied", sound::lockfree_map_model::empties, 0),
    ("tree: a segment is split", sound::tree_model::splits, 0),
    ("tree: blocks leave, and others take their place", sound::tree_model::replaced, 0),
    ("tree: a slot passes to another segment", sound::tree_model::passes_on, 0),
    ("tree: holders come and go", sound::tree_model::hands_over, 0),
    ("tree: a segment grows", sound::tree_model::grows, 0),
    ("lookup: a holder is reassigned", sound::lookup_model::holder_is_reassigned, 0),
    ("lookup: a gap comes and goes", sound::lookup_model::gap, 0),
    ("ticker: a guest wakes the clock", sound::ticker_model::wakes, 0),
    ("ticker: two guests", sound::ticker_model::wakes_for_two, 2),
    ("breaker: a success closes it", sound::breaker_model::closes, 0),
    ("breaker: one call is let through", sound::breaker_model::lets_one_through, 0),
    ("breaker: a success ends probation", sound::breaker_model::closes_probation, 0),
];

/// Preemptions in one execution unless `--preemptions` is given.
const PREEMPTIONS: usize = 2;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (mut filter, mut preemptions) = (String::new(), PREEMPTIONS);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--one" => return run_here(&args.next().unwrap_or_default(), preemptions),
            "--preemptions" => {
                preemptions = args.next().and_then(|number| number.parse().ok()).unwrap_or(preemptions)
            }
            _ => filter = arg,
        }
    }
    let wanted = |(name, ..): &&Model| name.contains(&filter);
    let unsound = MODELS.iter().filter(wanted).filter(|(name, ..)| !run(name, preemptions, true)).count();
    println!("\nEach of these flaws has to make its model fail:");
    let unnoticed = FLAWS.iter().filter(wanted).filter(|(name, ..)| !run(name, preemptions, false)).count();
    println!("\n{unsound} models failed, {unnoticed} flaws were not noticed");
    ExitCode::from(u8::from(unsound + unnoticed > 0))
}

/// Runs a model in a process of its own and prints its result. Returns whether the result is as expected.
fn run(name: &str, preemptions: usize, holds: bool) -> bool {
    let start = Instant::now();
    let run = || {
        Command::new(std::env::current_exe()?)
            .args(["--preemptions", &preemptions.to_string(), "--one", name])
            .output()
    };
    let Ok(Output { status, stdout, stderr }) = run() else { return false };
    let (out, error) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let why = error.lines().skip_while(|line| !line.contains("panicked at")).nth(1).unwrap_or_default();
    let expected = status.success() == holds;
    let label = if expected { "ok" } else { "WRONG" };
    println!("{label:5} {:5.1} s  {name}: {} {why}", start.elapsed().as_secs_f64(), out.trim());
    if !expected {
        println!("{error}");
    }
    expected
}

/// Runs a model in this process. A failure ends the process.
fn run_here(name: &str, preemptions: usize) -> ExitCode {
    let Some((_, model, fewer)) = MODELS.iter().chain(FLAWS).find(|(other, ..)| *other == name) else {
        return ExitCode::from(2);
    };
    static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = Some(preemptions.saturating_sub(*fewer));
    checker.max_branches = 10_000;
    checker.check(move || {
        EXECUTIONS.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} executions", EXECUTIONS.load(Ordering::Relaxed));
    ExitCode::SUCCESS
}
