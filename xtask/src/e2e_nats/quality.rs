//! Compares one gateway, several gateways that exchange their load, and as many that do not, under the same
//! load.

use std::{path::Path, time::Duration};

use serde_json::Value;
use tokio::time::sleep;

use super::{
    Args,
    churn::{Churn, Gateways},
    load::{self, Seen},
};
use crate::{
    drill::{self, FleetSpec, Rig},
    metrics_text,
    proc::Memory,
    sh,
    stats::{median, quantile, sorted},
    table::Checks,
};

/// Largest difference between gateways that exchange their load and one gateway, as a share.
const LIMIT: f64 = 0.05;
/// Time between two readings of the engines' load.
const SAMPLE: Duration = Duration::from_millis(200);

/// The cases: name, whether there is only one gateway, and whether the gateways exchange their load.
const CASES: [(&str, bool, bool); 3] =
    [("one gateway", true, false), ("several with exchange", false, true), ("several without", false, false)];

/// Results of a case.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    /// Mean of the busiest engine's number of requests divided by the mean of all engines.
    imbalance: f64,
    /// Share of prompt tokens that engines found in their caches.
    hit_rate: f64,
    /// 90th percentile of the time to first token, milliseconds.
    ttft_p90: f64,
    /// Messages and bytes of the exchange that all gateways sent and received, for each request.
    messages: f64,
    bytes: f64,
    /// Largest resident memory of a gateway, MB.
    memory: f64,
}

/// Runs all cases of all seeds, in a rotating order, and judges them.
pub(super) async fn run(args: &Args, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for seed in 1..=args.seeds {
        let mut row = [Figures::default(); 3];
        for place in (0..3).map(|turn| (usize::try_from(seed).unwrap_or(0) + turn) % 3) {
            let (figures, seen) = one(args, bin, CASES[place], seed).await?;
            let run = format!("seed {seed}, {}", CASES[place].0);
            checks.none(&format!("{run}: requests that failed"), seen.failed);
            seen.problem.iter().for_each(|problem| sh::status(&format!("the first failure: {problem}")));
            if args.churn {
                checks.show(&format!("{run}: requests of killed gateways"), seen.cut);
            }
            let Figures { imbalance, hit_rate, ttft_p90, messages, bytes, memory } = figures;
            let shown = format!("{imbalance:.3}, {hit_rate:.3}, {ttft_p90:.0} ms");
            checks.show(&format!("{run}: imbalance, hit rate, TTFT p90"), shown);
            let shown = format!("{messages:.1}, {bytes:.0}, {memory:.0}");
            checks.show(&format!("{run}: messages, bytes a request, MB"), shown);
            row[place] = figures;
        }
        all.push(row);
    }
    judge(&all, checks);
    Ok(())
}

async fn one(
    args: &Args,
    bin: &Path,
    (_, is_one, exchange): (&str, bool, bool),
    seed: u64,
) -> anyhow::Result<(Figures, Seen)> {
    // Each engine's cache holds about a third of the common beginnings, so the choice of the engine matters.
    let mut fleet = drill::choose(&["replicas".to_owned()])?.remove(0).fleet;
    if args.large {
        // These engines are so slow that 40 requests a second keep one at each of them.
        fleet.gateways = 8;
        fleet.flags.push_str(" --itl-ms 60");
        fleet.engines.iter_mut().for_each(|engines| engines.count = 120);
    }
    let gateways = if is_one { 1 } else { fleet.gateways };
    let spec = FleetSpec { gateways, nats: exchange, ..fleet };
    let mut rig = Rig::start(&spec, bin).await?;
    let running = Gateways::of(&rig);
    let plan = load::plan(seed, args.rate, Duration::from_secs(args.seconds), args.agents);
    let (mut samples, mut churn) = (Vec::new(), Churn::begin(args.churn));
    let seen = tokio::select! {
        seen = load::send(&plan, &running) => seen,
        seen = watch(&mut rig, &running, &mut churn, &mut samples) => seen?,
    };
    let states = [churn.lost, rig.states().await].concat();
    let total =
        |pointer: &str| -> f64 { states.iter().filter_map(|state| state.pointer(pointer)?.as_f64()).sum() };
    let mut figures = Figures {
        imbalance: mean(&samples),
        hit_rate: total("/prefix_hits") / total("/prefix_queries").max(1.0),
        ttft_p90: quantile(&sorted(seen.ttft.clone()), 0.9),
        ..Figures::default()
    };
    for gateway in rig.fleets() {
        let text = gateway.metrics().await?;
        let sum = |name: &str| metrics_text::sum(&text, name) / plan.len().max(1) as f64;
        figures.messages += sum("pointsman_replicas_messages_total");
        figures.bytes += sum("pointsman_replicas_bytes_total");
        figures.memory = figures.memory.max(Memory::of(gateway.gateway.pid())?.resident);
    }
    Ok((figures, seen))
}

/// Reads the engines' load all the time, and lets engines and gateways come and go. Ends only with an error.
async fn watch(
    rig: &mut Rig,
    running: &Gateways,
    churn: &mut Churn,
    samples: &mut Vec<f64>,
) -> anyhow::Result<Seen> {
    loop {
        let states = rig.states().await;
        samples.extend(imbalance(&states));
        churn.step(rig, running, &states).await?;
        sleep(SAMPLE).await;
    }
}

/// Returns the busiest engine's number of requests divided by the mean, if the mean is at least one.
fn imbalance(states: &[Value]) -> Option<f64> {
    let count = |state: &Value, key: &str| state.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let loads: Vec<f64> = states.iter().map(|one| count(one, "running") + count(one, "waiting")).collect();
    let mean = mean(&loads);
    (mean >= 1.0).then(|| loads.iter().copied().fold(0.0, f64::max) / mean)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Compares the gateways with one, seed by seed.
fn judge(all: &[[Figures; 3]], checks: &mut Checks) {
    type Read = fn(&Figures) -> f64;
    let figures: [(&str, Read, bool); 3] = [
        ("imbalance", |figures| figures.imbalance, false),
        ("hit rate", |figures| figures.hit_rate, true),
        ("TTFT p90", |figures| figures.ttft_p90, false),
    ];
    for (case, judged) in [(1, true), (2, false)] {
        for (figure, read, more_is_better) in figures {
            let ratios = sorted(all.iter().map(|row| read(&row[case]) / read(&row[0])).collect());
            let middle = median(ratios.clone());
            let (low, high) = (quantile(&ratios, 0.0), quantile(&ratios, 1.0));
            let good = if more_is_better { middle >= 1.0 - LIMIT } else { middle <= 1.0 + LIMIT };
            let shown = format!("{middle:.3} ({low:.3} to {high:.3})");
            let (name, limit) = (CASES[case].0, if judged { " (limit 5 %)" } else { "" });
            checks.check(&format!("{figure}, {name} / one{limit}"), shown, good || !judged);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn imbalance_is_that_of_loaded_engines() {
        let states = |loads: [u32; 2]| loads.map(|load| json!({ "running": load, "waiting": 0 }));
        assert_eq!(imbalance(&states([3, 1])), Some(1.5));
        assert_eq!(imbalance(&states([1, 0])), None);
    }

    #[test]
    fn a_worse_median_fails_and_an_apart_one_does_not() {
        let figures = |factor: f64| Figures {
            imbalance: 1.2 * factor,
            hit_rate: 0.5 / factor,
            ttft_p90: 100.0 * factor,
            ..Figures::default()
        };
        let judged = |exchange: f64, apart: f64| {
            let mut checks = Checks::default();
            judge(&[[figures(1.0), figures(exchange), figures(apart)]], &mut checks);
            checks.finish().is_ok()
        };
        assert!(judged(1.04, 2.0) && !judged(1.1, 1.0));
    }
}
