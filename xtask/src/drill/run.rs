//! Runs a scenario: phases with requests, changes during the phases, and readings of all processes at the
//! end.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{
    injected_faults::{faults, label},
    judge::{self, judge},
    record::{PhaseRecord, Reading, Record},
    rig::Rig,
    scenario::{Change, Changes, Fault, Hold, Phase, Scenario},
};
use crate::{
    client::{CHAT, Outcome},
    decisions::now_us,
    fleet::Fleet,
    load::{Arrivals, Recorder, Running},
    sh,
    table::Checks,
};

/// Settings from the command line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Duration of the last phase, minutes; `None` for the scenario's own.
    pub(super) minutes: Option<f64>,
    /// Factor on the number of requests of loads with a fixed number.
    pub(super) scale: f64,
    /// Seed of random faults.
    pub(super) seed: u64,
}

/// Number of readings of the gateway's process in a phase.
const READINGS: u32 = 100;
/// Number of receipts that are read at once. It is larger than the number of new receipts between two reads.
const RECEIPTS: u32 = 3_500;
/// Maximum time until a request is as fast as before.
const RECOVERY: Duration = Duration::from_secs(10);
const SMALL: &str =
    r#"{"model":"tiny","max_tokens":20,"messages":[{"role":"user","content":"a small question"}]}"#;

/// Runs a scenario with the programs of a directory, and judges its record.
pub(super) async fn run(
    scenario: &Scenario,
    bin: &Path,
    options: Options,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let rig = Rig::start(&scenario.fleet, bin).await?;
    let recorder = Arc::default();
    let random = StdRng::seed_from_u64(options.seed);
    let mut run =
        Run { rig, recorder, loads: Vec::new(), record: Record::default(), options, random, turn: 0 };
    let idle = time_of_one(run.rig.fleet()?).await;
    for (place, phase) in scenario.phases.iter().enumerate() {
        let is_last = place + 1 == scenario.phases.len();
        run.phase(phase, is_last).await.with_context(|| format!("the phase `{}`", phase.name))?;
    }
    run.at_rest(scenario, idle).await?;
    judge(&scenario.holds, &run.record, checks);
    Ok(())
}

struct Run {
    rig: Rig,
    recorder: Arc<Recorder>,
    /// Loads of each gateway, by its position.
    loads: Vec<Vec<Running>>,
    record: Record,
    options: Options,
    random: StdRng,
    /// Number of changes made so far.
    turn: usize,
}

impl Run {
    async fn phase(&mut self, phase: &Phase, is_last: bool) -> anyhow::Result<()> {
        let minutes = self.options.minutes.filter(|_| is_last);
        let time = minutes
            .map_or(Duration::from_secs(phase.seconds), |minutes| Duration::from_secs_f64(minutes * 60.0));
        self.loads.clear();
        for place in 0..self.rig.gateways.len() {
            let loads = self.start_loads(phase, place)?;
            self.loads.push(loads);
        }
        if let Changes::EngineFaults(share) = phase.changes {
            self.inject(&faults(share)).await?;
        }
        let warm_up = Duration::from_secs(phase.warm_up);
        sleep(warm_up).await;
        let began = Instant::now();
        let progress = sh::progress(time.as_secs(), &phase.name);
        let mut readings = Vec::new();
        let mut read = began;
        let mut change = began + first_change(&phase.changes);
        while (began.elapsed() < time || self.is_pending(&phase.changes)) && !self.is_over() {
            if Instant::now() >= read {
                let at = began.elapsed().as_secs_f64() / time.as_secs_f64();
                if let Ok(fleet) = self.rig.fleet() {
                    readings.push((at, Reading::of(fleet).await?));
                }
                read += time / READINGS;
            }
            if Instant::now() >= change {
                change = self.change(phase, change).await?;
            }
            progress.set_position(began.elapsed().as_secs());
            let next = read.min(change).min(Instant::now() + Duration::from_millis(100));
            tokio::time::sleep_until(next).await;
        }
        progress.finish_and_clear();
        let until = Instant::now();
        for running in std::mem::take(&mut self.loads).into_iter().flatten() {
            running.stop().await;
        }
        if let Changes::EngineFaults(_) = phase.changes {
            self.record.fired = Some(self.fired().await?);
            self.inject(&[]).await?;
        }
        if let Ok(fleet) = self.rig.fleet() {
            readings.push((1.0, Reading::of(fleet).await?));
        }
        let all = self.recorder.take();
        let (counted, others) = all.into_iter().partition(|answer| (began..=until).contains(&answer.ended));
        let seconds = (until - began).as_secs_f64();
        let name = phase.name.clone();
        self.record.phases.push(PhaseRecord { name, seconds, counted, others, readings });
        Ok(())
    }

    fn start_loads(&self, phase: &Phase, place: usize) -> anyhow::Result<Vec<Running>> {
        let Some(Some(gateway)) = self.rig.gateways.get(place) else { return Ok(Vec::new()) };
        let peak = self.record.phases.last().map_or(0.0, judge::goodput);
        let start = |load: &crate::load::Load| {
            let mut load = load.clone();
            if phase.times_peak > 0.0 {
                load.arrivals = Arrivals::Rate(peak * phase.times_peak);
            }
            if load.requests < u64::MAX {
                let scaled = (load.requests as f64 * self.options.scale).ceil() as u64;
                load.requests = scaled;
            }
            self.recorder.start(load, &gateway.target)
        };
        phase.loads.iter().map(start).collect()
    }

    /// Whether a fault that the phase must cause is still to come.
    fn is_pending(&self, changes: &Changes) -> bool {
        matches!(changes, Changes::Each { faults, .. } if self.turn < faults.len())
    }

    fn is_over(&mut self) -> bool {
        self.loads.iter_mut().flatten().all(Running::is_over)
    }

    /// Makes the change that is due. Returns the time of the next change.
    async fn change(&mut self, phase: &Phase, due: Instant) -> anyhow::Result<Instant> {
        match &phase.changes {
            Changes::None | Changes::EngineFaults(_) => {}
            Changes::Cycle { every, steps } => {
                let step = steps.get(self.turn % steps.len()).context("no step")?;
                let round = self.turn / steps.len();
                self.turn += 1;
                self.step(step, round).await?;
                return Ok(due + *every);
            }
            Changes::Random { faults, calm } => {
                let mut drawn = draw(&mut self.random, faults);
                drawn.sort_unstable();
                let away = Duration::from_millis(self.random.random_range(500..6_000));
                self.take_away(phase, &drawn, away, false).await?;
                return Ok(Instant::now() + *calm);
            }
            Changes::Each { faults, away } => {
                if let Some(fault) = faults.get(self.turn) {
                    self.turn += 1;
                    self.take_away(phase, &[*fault], *away, true).await?;
                    return Ok(Instant::now() + Duration::from_secs(1));
                }
            }
        }
        Ok(due + Duration::from_secs(1))
    }

    /// Makes one change of a cycle.
    async fn step(&mut self, step: &Change, round: usize) -> anyhow::Result<()> {
        let count = self.record.changes.entry(step.clone()).or_default();
        *count += 1;
        let count = *count;
        let place = round % self.rig.engines.len().max(1);
        match step {
            Change::LeaveOut => self.rig.leave_out(Some(place)),
            Change::PutBack => self.rig.leave_out(None),
            Change::Certificate => self.rig.renew_certificate(),
            Change::Config => self.rig.reload_config(count).await,
            Change::KillEngine => {
                self.record.engine_kills.push(Instant::now());
                self.rig.kill_engine(place);
                Ok(())
            }
            Change::RestartEngine => self.rig.start_engine(place).await,
            Change::Policy(slot) => {
                let bytes = &self.rig.policies[usize::try_from(count)? % self.rig.policies.len()];
                self.record.renames.push(now_us()?);
                let fleet = self.rig.fleet()?;
                fleet.drop_policy(&format!("{slot}.wasm"), bytes)?;
                if count.is_multiple_of(8) {
                    self.record.decisions.read(fleet, RECEIPTS).await?;
                }
                Ok(())
            }
        }
    }

    /// Causes faults, repairs them after a time, and waits until everything works again.
    async fn take_away(
        &mut self,
        phase: &Phase,
        faults: &[Fault],
        away: Duration,
        noticed: bool,
    ) -> anyhow::Result<()> {
        let engine = self.random.random_range(0..self.rig.engines.len().max(1));
        let gateway = self.random.random_range(0..self.rig.gateways.len().max(1));
        let shown = format!("{faults:?}, engine {engine}, gateway {gateway}");
        let back = Instant::now() + away;
        for fault in faults {
            let place = if *fault == Fault::Gateway { gateway } else { engine };
            let leaves = self.random.random_bool(0.5);
            let killing = Instant::now();
            if let Some(instance) = self.rig.fail(*fault, place, leaves).await? {
                self.record.gateway_kills.insert(instance, killing);
                for running in self.loads.get_mut(gateway).map(std::mem::take).into_iter().flatten() {
                    running.stop().await;
                }
            }
        }
        for fault in faults.iter().filter(|_| noticed) {
            match self.rig.notices(*fault).await {
                Ok(took) => {
                    let times = self.record.notices.entry(format!("{fault:?}")).or_default();
                    times.push(took.as_secs_f64());
                }
                Err(error) => self.record.not_healed.push(format!("{shown}: {error:#}")),
            }
        }
        tokio::time::sleep_until(back).await;
        self.rig.repair(faults, engine, gateway).await?;
        if faults.contains(&Fault::Gateway) {
            let loads = self.start_loads(phase, gateway)?;
            if let Some(place) = self.loads.get_mut(gateway) {
                *place = loads;
            }
        }
        match self.rig.whole(super::HEAL).await {
            Ok(took) => {
                for fault in faults {
                    let times = self.record.heals.entry(format!("{fault:?}")).or_default();
                    times.push(took.as_secs_f64());
                }
            }
            Err(error) => self.record.not_healed.push(format!("{shown}: {error:#}")),
        }
        Ok(())
    }

    /// Sets these faults in every engine.
    async fn inject(&self, faults: &[Value]) -> anyhow::Result<()> {
        for process in self.rig.engines.iter().filter_map(|engine| engine.process.as_ref()) {
            process.client().post("/sim/faults", json!(faults).to_string()).await?;
        }
        Ok(())
    }

    /// Returns how often each kind of fault occurred, summed over the engines. A kind that never occurred has
    /// 0.
    async fn fired(&self) -> anyhow::Result<std::collections::BTreeMap<String, u64>> {
        let mut fired: std::collections::BTreeMap<_, _> =
            faults(1.0).iter().map(|fault| (label(fault), 0)).collect();
        for state in self.rig.states().await {
            let counts =
                state["faults_fired"].as_object().context("/sim/state has no field `faults_fired`")?;
            for (kind, count) in counts {
                *fired.entry(kind.clone()).or_default() += count.as_u64().unwrap_or(0);
            }
        }
        Ok(fired)
    }

    /// Reads the state of all processes after all requests have ended.
    async fn at_rest(&mut self, scenario: &Scenario, idle: Duration) -> anyhow::Result<()> {
        let Self { rig, record, .. } = self;
        let holds = || scenario.holds.iter();
        if holds().any(|hold| matches!(hold, Hold::Recovers(_))) {
            record.recovered = recovery(rig.fleet()?, idle * 2 + Duration::from_millis(50)).await;
        }
        let wait = holds().find_map(|hold| match hold {
            Hold::NoBookings(seconds) => Some(Duration::from_secs(*seconds)),
            _ => None,
        });
        for fleet in rig.fleets() {
            record.booked.push(fleet.booked(wait.unwrap_or_default()).await?);
        }
        sleep(Duration::from_secs(scenario.rest)).await;
        if holds().any(|hold| matches!(hold, Hold::NearSwaps(_))) {
            record.decisions.read(rig.fleet()?, RECEIPTS).await?;
        }
        if holds().any(|hold| matches!(hold, Hold::Noticed(_))) {
            for process in rig.engines.iter().filter_map(|engine| engine.process.as_ref()) {
                let list = process.client().json("/sim/disconnects").await?;
                for entry in list.as_array().into_iter().flatten() {
                    if let (Some(id), Some(at)) = (entry["id"].as_str(), entry["at_ns"].as_u64()) {
                        record.disconnects.insert(id.to_owned(), at);
                    }
                }
            }
        }
        record.states = rig.states().await;
        for fleet in rig.fleets() {
            record.metrics.push(fleet.metrics().await?);
        }
        record.problems = self.recorder.problems();
        Ok(())
    }
}

/// Returns the time until the first change of a phase.
fn first_change(changes: &Changes) -> Duration {
    match changes {
        Changes::Cycle { every, .. } => *every,
        Changes::None | Changes::EngineFaults(_) => Duration::from_secs(1),
        Changes::Random { .. } | Changes::Each { .. } => Duration::from_secs(2),
    }
}

/// Returns one fault, or two faults in one of three cases.
fn draw(random: &mut StdRng, faults: &[Fault]) -> Vec<Fault> {
    let count = if random.random_range(0..3) == 0 { 2 } else { 1 };
    let mut drawn = Vec::new();
    while drawn.len() < count.min(faults.len()) {
        let fault = faults.get(random.random_range(0..faults.len())).copied();
        drawn.extend(fault.filter(|fault| !drawn.contains(fault)));
    }
    drawn
}

/// Returns how long it takes until a request is served within `limit`; Returns `None` if it takes too long.
async fn recovery(fleet: &Fleet, limit: Duration) -> Option<Duration> {
    let start = Instant::now();
    while start.elapsed() < RECOVERY {
        if time_of_one(fleet).await <= limit {
            return Some(start.elapsed());
        }
        sleep(Duration::from_millis(50)).await;
    }
    None
}

/// Returns the time of one request, or a long time if it is not served.
async fn time_of_one(fleet: &Fleet) -> Duration {
    let started = Instant::now();
    match fleet.client.outcome(CHAT, SMALL, false).await {
        Outcome::Whole => started.elapsed(),
        _ => Duration::from_secs(60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_drawn_and_none_twice_at_once() {
        let all = [Fault::Engine, Fault::Nats, Fault::Etcd, Fault::Gateway];
        let mut random = StdRng::seed_from_u64(1);
        let draws: Vec<Vec<Fault>> = (0..200).map(|_| draw(&mut random, &all)).collect();
        for fault in all {
            assert!(draws.iter().any(|drawn| drawn.contains(&fault)), "{fault:?}");
        }
        assert!(draws.iter().any(|drawn| drawn.len() == 2));
        assert!(draws.iter().all(|drawn| drawn.first() != drawn.get(1)));
    }
}
