//! `storm`: what a bad day does to the gateway, with real processes. Nothing may be leaked, stranded or left hanging.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::Value;

use crate::{fleet, fleet::Fleet, http, setup, sh};

mod disconnect;
mod faults;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Requests while 5 % of all legs meet a fault, of every kind.
    Faults(faults::Args),
    /// Clients that leave at random times.
    Disconnect(disconnect::Args),
}

/// Runs a storm; an error when something was lost.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build()?;
    match &args.what {
        What::Faults(args) => faults::run(args, &bin),
        What::Disconnect(args) => disconnect::run(args, &bin),
    }
}

/// Works through `count` turns with `clients` threads.
fn turns(count: u64, clients: usize, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                loop {
                    let turn = next.fetch_add(1, Ordering::Relaxed);
                    if turn >= count {
                        return;
                    }
                    work(turn);
                }
            });
        }
    });
}

/// Waits until nothing is booked, and answers what still was after `limit`.
fn booked(fleet: &Fleet, limit: Duration) -> anyhow::Result<u64> {
    let started = Instant::now();
    loop {
        let workers: Value = serde_json::from_str(&http::get(&fleet.admin(), "/workers")?)?;
        let ranks = workers["workers"].as_array().context("no workers")?.iter();
        let ranks = ranks.flat_map(|worker| worker["ranks"].as_array().into_iter().flatten());
        let booked: u64 = ranks.filter_map(|rank| rank["active_requests"].as_u64()).sum();
        if booked == 0 || started.elapsed() > limit {
            return Ok(booked);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// A number of an engine's state, summed over all that answer.
fn engines(fleet: &Fleet, pointer: &str) -> u64 {
    let of = |address: String| -> Option<u64> {
        let state: Value = serde_json::from_str(&http::get(&address, "/sim/state").ok()?).ok()?;
        let value = state.pointer(pointer)?;
        value.as_u64().or_else(|| value.as_bool().map(u64::from))
    };
    fleet.engines.iter().filter_map(|engine| of(engine.listening())).sum()
}

/// The values of a counter of the gateway by its label `reason`.
fn by_reason(fleet: &Fleet, name: &str) -> anyhow::Result<BTreeMap<String, u64>> {
    let text = http::get(&fleet.admin(), "/metrics")?;
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with(name)) {
        let (labels, value) = line.rsplit_once(' ').unwrap_or_default();
        let reason = labels.split("reason=\"").nth(1).and_then(|rest| rest.split('"').next());
        *found.entry(reason.unwrap_or_default().to_owned()).or_default() +=
            value.parse::<f64>().unwrap_or(0.0) as u64;
    }
    Ok(found)
}

/// Rows of the outcome; counts what should not be.
#[derive(Default)]
struct Outcome {
    failed: u32,
}

impl Outcome {
    fn row(&mut self, what: &str, value: impl std::fmt::Display, well: bool) {
        sh::print(&format!("| {what:<60} | {value:>24} | {} |", if well { "ok" } else { "FAILED" }));
        self.failed += u32::from(!well);
    }

    fn end(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.failed == 0, "{} checks failed", self.failed);
        Ok(())
    }
}
