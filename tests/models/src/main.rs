//! What the host's threads share without a lock, in every order that the loom model checker finds within a bound of preemptions:
//! the host's own files, on the checker's atomics. Each model has to hold, and to fail once a rule is broken
//! (`build/flaws.rs`). A model is a process of its own, for the checker ends with the first that fails.

#![expect(clippy::disallowed_types, reason = "the checker's stand-ins are made of std's own")]

use std::{
    process::{Command, ExitCode, Output},
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

mod stand_in;

/// What the rooms know of the rest of the host.
pub(crate) mod id {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct BlockHash(pub(crate) u64);

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct WorkerId(pub(crate) u64);

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct DpRank(pub(crate) u32);
}

/// The same.
pub(crate) mod events {
    #[allow(dead_code)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Tier {
        Device,
        Host,
        Disk,
    }
}

include!(concat!(env!("OUT_DIR"), "/all.rs"));

/// Its name, itself, and how many preemptions fewer it is given.
type Model = (&'static str, fn(), usize);

const MODELS: &[Model] = &[
    ("cells: a key leaves and comes back", sound::cells_model::comes_back, 0),
    ("cells: the same, swept between", sound::cells_model::swept, 0),
    ("cells: a key leaves before one that stays", sound::cells_model::leaves, 0),
    ("cells: values change in place", sound::cells_model::changes, 0),
    ("cells: written anew", sound::cells_model::grows, 0),
    ("cells: emptied", sound::cells_model::empties, 0),
    ("shards: a list's place goes to another block", sound::shards_model::lists, 0),
    ("shards: holders change", sound::shards_model::hands_over, 0),
    ("shards: written anew", sound::shards_model::grows, 0),
    ("lookup: a slot goes to another candidate", sound::lookup_model::slot_goes_on, 0),
    ("lookup: a hole comes and goes", sound::lookup_model::hole, 0),
    ("ticker: a guest wakes the clock", sound::ticker_model::wakes, 0),
    ("ticker: two guests", sound::ticker_model::wakes_for_two, 2),
    ("breaker: a success closes it", sound::breaker_model::closes, 0),
    ("breaker: one call is let through", sound::breaker_model::lets_one_through, 0),
    ("breaker: a success ends probation", sound::breaker_model::closes_probation, 0),
];

/// Preemptions in one execution when nothing else is asked for.
const PREEMPTIONS: usize = 2;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let (mut filter, mut preemptions) = (String::new(), PREEMPTIONS);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--one" => return one(&words.next().unwrap_or_default(), preemptions),
            "--preemptions" => {
                preemptions = words.next().and_then(|number| number.parse().ok()).unwrap_or(preemptions)
            }
            _ => filter = word,
        }
    }
    let wanted = |(name, ..): &&Model| name.contains(&filter);
    let sound = MODELS.iter().filter(wanted).filter(|(name, ..)| !tell(name, preemptions, true)).count();
    println!("\nEach of these has to be noticed:");
    let flaws = FLAWS.iter().filter(wanted).filter(|(name, ..)| !tell(name, preemptions, false)).count();
    println!("\n{sound} models do not hold, {flaws} flaws were not noticed");
    ExitCode::from(u8::from(sound + flaws > 0))
}

/// Runs a model in a process of its own and says how it went; whether that is as it has to be.
fn tell(name: &str, preemptions: usize, holds: bool) -> bool {
    let begun = Instant::now();
    let run = || {
        Command::new(std::env::current_exe()?)
            .args(["--preemptions", &preemptions.to_string(), "--one", name])
            .output()
    };
    let Ok(Output { status, stdout, stderr }) = run() else { return false };
    let (said, error) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let why = error.lines().skip_while(|line| !line.contains("panicked at")).nth(1).unwrap_or_default();
    let right = status.success() == holds;
    let word = if right { "ok" } else { "WRONG" };
    println!("{word:5} {:5.1} s  {name}: {} {why}", begun.elapsed().as_secs_f64(), said.trim());
    if !right {
        println!("{error}");
    }
    right
}

/// Runs a model here; a flaw that is noticed ends the process.
fn one(name: &str, preemptions: usize) -> ExitCode {
    let Some((_, model, fewer)) = MODELS.iter().chain(FLAWS).find(|(one, ..)| *one == name) else {
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
