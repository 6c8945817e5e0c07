//! What the gateway's process uses over time.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::Context as _;

use super::{DESCRIPTORS, GROWTH};
use crate::{fleet::Fleet, metrics_text, proc::Memory, sh, stats::median, table::Checks};

/// One reading.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    /// Anonymous memory, megabytes.
    pub(super) memory: f64,
    pub(super) descriptors: f64,
    pub(super) threads: f64,
    /// Number of threads by name.
    names: BTreeMap<String, u32>,
}

/// All readings with the time since the start.
#[derive(Debug, Default)]
pub(super) struct Readings(Vec<(Duration, Reading)>);

impl Reading {
    /// Reads the process now. The connections of clients are not counted as descriptors: their number is the
    /// load's.
    pub(super) async fn of(fleet: &Fleet) -> anyhow::Result<Self> {
        let pid = fleet.gateway.pid();
        let count = |name: &str| -> anyhow::Result<f64> {
            let entries = fs::read_dir(format!("/proc/{pid}/{name}")).context("the gateway ended")?;
            Ok(f64::from(u32::try_from(entries.count())?))
        };
        let names = thread_names(pid);
        let metrics = fleet.metrics().await?;
        let open = metrics_text::sum(&metrics, "pointsman_client_connections");
        Ok(Self {
            memory: Memory::of(pid)?.anonymous,
            descriptors: count("fd")? - open,
            threads: names.values().sum::<u32>().into(),
            names,
        })
    }
}

/// Number of threads of a process by name. A thread that ends while it is read is left out.
fn thread_names(pid: u32) -> BTreeMap<String, u32> {
    let mut names = BTreeMap::new();
    let tasks = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"));
    for task in tasks.into_iter().flatten().flatten() {
        if let Ok(name) = fs::read_to_string(task.path().join("comm")) {
            *names.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    names
}

impl Readings {
    pub(super) fn add(&mut self, at: Duration, reading: Reading) {
        self.0.push((at, reading));
    }

    /// Points of one figure over minutes.
    pub(super) fn points(&self, figure: impl Fn(&Reading) -> f64) -> Vec<(f64, f64)> {
        self.0.iter().map(|(at, reading)| (at.as_secs_f64() / 60.0, figure(reading))).collect()
    }

    /// Compares the second quarter, in which buffers are full, with the last one.
    pub(super) fn judge(&self, checks: &mut Checks) -> anyhow::Result<()> {
        let quarter = self.0.len() / 4;
        anyhow::ensure!(quarter > 0, "there are too few readings");
        let of = |from: usize, figure: fn(&Reading) -> f64| {
            median(self.0.iter().skip(from).take(quarter).map(|(_, reading)| figure(reading)).collect())
        };
        let both = |figure| (of(quarter, figure), of(self.0.len() - quarter, figure));
        let (before, after) = both(|reading| reading.memory);
        let growth = after / before - 1.0;
        let shown = format!("{before:.1} / {after:.1} MB = {:+.1} %", growth * 100.0);
        checks.check("memory, second / last quarter (limit +5 %)", shown, growth <= GROWTH);
        let (before, after) = both(|reading| reading.descriptors);
        let shown = format!("{before:.0} / {after:.0}");
        checks.check("file descriptors, likewise (limit +5)", shown, after - before <= DESCRIPTORS);
        let (before, after) = both(|reading| reading.threads);
        checks.check("threads, likewise (limit +0)", format!("{before:.0} / {after:.0}"), after <= before);
        for line in self.changed_threads(quarter) {
            sh::print(&line);
        }
        Ok(())
    }

    /// A line for each thread name whose number differs between the second and the last quarter (medians).
    fn changed_threads(&self, quarter: usize) -> Vec<String> {
        let mut names: Vec<&String> = self.0.iter().flat_map(|(_, reading)| reading.names.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let of = |from: usize, name: &String| {
            let counts = self.0.iter().skip(from).take(quarter);
            median(counts.map(|(_, reading)| reading.names.get(name).copied().unwrap_or(0).into()).collect())
        };
        let both = names.into_iter().map(|name| (name, of(quarter, name), of(self.0.len() - quarter, name)));
        let changed = both.filter(|(_, before, after)| before != after);
        changed.map(|(name, before, after)| format!("threads `{name}`: {before} / {after}")).collect()
    }
}
