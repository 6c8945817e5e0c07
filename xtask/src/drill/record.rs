//! Record of a scenario.

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::Context as _;
use serde_json::Value;
use tokio::time::Instant;

use super::scenario::{Change, Figure};
use crate::{decisions::Decisions, fleet::Fleet, load::Answer, metrics_text, proc::Memory};

/// All results that are judged.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) phases: Vec<PhaseRecord>,
    /// The first results that are errors in every scenario.
    pub(super) problems: Vec<String>,
    /// Times at which engines were killed.
    pub(super) engine_kills: Vec<Instant>,
    /// Times at which gateways were killed, by the number of the process.
    pub(super) gateway_kills: BTreeMap<u32, Instant>,
    /// Number of times that each change was made.
    pub(super) changes: BTreeMap<Change, u64>,
    /// Seconds from the repair of each fault until everything worked again.
    pub(super) heals: BTreeMap<String, Vec<f64>>,
    /// Seconds until each fault was noticed.
    pub(super) notices: BTreeMap<String, Vec<f64>>,
    /// Faults that were not noticed, or after which something did not work again.
    pub(super) not_healed: Vec<String>,
    /// Number of times that each kind of engine fault occurred; `None` if no fault was injected.
    pub(super) fired: Option<BTreeMap<String, u64>>,
    /// Times at which policies were renamed into place, microseconds of the wall clock.
    pub(super) renames: Vec<u64>,
    pub(super) decisions: Decisions,
    /// States of the engines at the end.
    pub(super) states: Vec<Value>,
    /// Times at which the engines noticed that the reader of an answer had disconnected, by the answer's id,
    /// nanoseconds of the monotonic clock.
    pub(super) disconnects: BTreeMap<String, u64>,
    /// Text of the metrics of each gateway at the end.
    pub(super) metrics: Vec<String>,
    /// Number of bookings left at each gateway.
    pub(super) booked: Vec<u64>,
    /// Time until a request took as long as before; `None` if that did not happen.
    pub(super) recovered: Option<Duration>,
}

/// Record of one phase.
#[derive(Debug, Default)]
pub(super) struct PhaseRecord {
    pub(super) name: String,
    /// Duration of the part of the phase that counts, seconds.
    pub(super) seconds: f64,
    /// Requests that ended in the part that counts.
    pub(super) counted: Vec<Answer>,
    /// Requests that ended before or after that part.
    pub(super) others: Vec<Answer>,
    /// Readings of the first gateway's process, each with its time as a share of the phase.
    pub(super) readings: Vec<(f64, Reading)>,
}

/// Resources that a process uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    /// Resident memory, megabytes.
    pub(super) resident: f64,
    pub(super) anonymous: f64,
    pub(super) descriptors: f64,
    /// Number of threads by name.
    pub(super) threads: BTreeMap<String, u32>,
}

impl Record {
    /// Returns all requests.
    pub(super) fn answers(&self) -> impl Iterator<Item = &Answer> {
        self.phases.iter().flat_map(|phase| phase.counted.iter().chain(&phase.others))
    }

    /// Returns the sum of a number or flag over the states of the engines.
    pub(super) fn engines_sum(&self, pointer: &str) -> u64 {
        let values = self.states.iter().filter_map(|state| state.pointer(pointer));
        values.filter_map(|value| value.as_u64().or(value.as_bool().map(u64::from))).sum()
    }

    /// Returns the sum of a metric over all gateways.
    pub(super) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics.iter().map(|text| metrics_text::sum_with(text, name, labels)).sum()
    }
}

impl Reading {
    /// Reads the gateway's process now. The connections of clients are not counted as descriptors, because
    /// the load determines their number.
    pub(super) async fn of(fleet: &Fleet) -> anyhow::Result<Self> {
        let pid = fleet.gateway.pid();
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).context("the gateway ended")?.count();
        let open = metrics_text::sum(&fleet.metrics().await?, "pointsman_client_connections");
        let mut threads = BTreeMap::new();
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            // A thread that ends while its name is read is left out.
            if let Ok(name) = fs::read_to_string(task.path().join("comm")) {
                *threads.entry(name.trim().to_owned()).or_default() += 1;
            }
        }
        let Memory { resident, anonymous } = Memory::of(pid)?;
        let descriptors = f64::from(u32::try_from(descriptors)?) - open;
        Ok(Self { resident, anonymous, descriptors, threads })
    }

    pub(super) fn figure(&self, figure: Figure) -> f64 {
        match figure {
            Figure::Resident => self.resident,
            Figure::Anonymous => self.anonymous,
            Figure::Descriptors => self.descriptors,
            Figure::Threads => self.threads.values().sum::<u32>().into(),
        }
    }
}
