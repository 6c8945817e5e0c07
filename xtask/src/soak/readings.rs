//! What the gateway's process uses over time.

use std::{fs, time::Duration};

use anyhow::Context as _;

use super::{DESCRIPTORS, GROWTH};
use crate::{fleet::Fleet, metrics_text, proc::Memory, stats::median, table::Checks};

/// One reading.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Anonymous memory, megabytes.
    pub(super) memory: f64,
    pub(super) descriptors: f64,
    pub(super) threads: f64,
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
        let metrics = fleet.metrics().await?;
        let open = metrics_text::sum(&metrics, "pointsman_client_connections");
        Ok(Self {
            memory: Memory::of(pid)?.anonymous,
            descriptors: count("fd")? - open,
            threads: count("task")?,
        })
    }
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
        Ok(())
    }
}
