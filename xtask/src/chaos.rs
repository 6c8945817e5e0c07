//! `chaos`: processes are killed and networks are cut at random, while three gateways serve requests.
//!
//! The gateways find their engines (vLLM's prefill and decode) through the real etcd, and tell each other
//! their load over the real NATS. Each fault takes away one or two of: an engine, NATS, etcd, a gateway, the
//! third gateway's network to NATS, and that to etcd. Every client has to get a whole answer or one valid
//! error.

use std::{collections::BTreeMap, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::{Instant, sleep};

use crate::{
    fleet, sh,
    stats::{median, quantile, sorted},
    table::Checks,
};

mod rig;

use self::rig::Rig;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Minutes of faults.
    #[arg(long, default_value_t = 30)]
    minutes: u64,
    /// Seed of the faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Engine,
    Nats,
    Etcd,
    Gateway,
    NetworkToNats,
    NetworkToEtcd,
}

const FAULTS: [Fault; 6] =
    [Fault::Engine, Fault::Nats, Fault::Etcd, Fault::Gateway, Fault::NetworkToNats, Fault::NetworkToEtcd];
/// Longest time until everything is whole again: etcd's and NATS's clients wait between two attempts.
const HEAL: Duration = Duration::from_secs(15);
/// Time in which everything is whole before the next fault.
const CALM: Duration = Duration::from_secs(2);

/// Faults at random for the given time; returns an error when a row falls short.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(args.minutes > 0, "--minutes 0: expected 1 or more");
    let bin = fleet::build("release")?;
    let dir = tempfile::Builder::new().prefix("pointsman-chaos-").tempdir()?;
    let mut rig = Rig::start(&bin, dir.path()).await?;
    let mut random = StdRng::seed_from_u64(args.seed);
    let (began, time) = (Instant::now(), Duration::from_secs(args.minutes * 60));
    let progress = sh::progress(args.minutes * 60, "seconds");
    let (mut healed, mut faults) = (BTreeMap::<String, Vec<f64>>::new(), 0_u64);
    while began.elapsed() < time {
        let drawn = draw(&mut random);
        let engine = random.random_range(0..rig::ENGINES.len());
        let gateway = random.random_range(0..rig::GATEWAYS);
        for fault in &drawn {
            rig.fail(*fault, engine, gateway, random.random_bool(0.5)).await?;
            faults += 1;
        }
        sleep(Duration::from_millis(random.random_range(500..6_000))).await;
        rig.repair(&drawn, engine, gateway).await?;
        let took = rig.whole(HEAL).await;
        match took {
            Ok(took) => {
                for fault in &drawn {
                    healed.entry(format!("{fault:?}")).or_default().push(took.as_secs_f64());
                }
            }
            Err(error) => {
                sh::status(&format!("after {drawn:?} (engine {engine}, gateway {gateway}): {error:#}"));
                healed.entry("not healed".to_owned()).or_default().push(HEAL.as_secs_f64());
            }
        }
        sleep(CALM).await;
        progress.set_position(began.elapsed().as_secs().min(args.minutes * 60));
    }
    progress.finish_and_clear();
    let mut checks = Checks::default();
    checks.show("faults", faults);
    for (what, times) in &healed {
        let shown = format!("{}: {}", times.len(), spread(times));
        checks.check(&format!("{what}: count, s to heal, p50 / max"), shown, what != "not healed");
    }
    rig.judge(&mut checks).await?;
    checks.finish()
}

/// Returns one fault, or in one of three cases two.
fn draw(random: &mut StdRng) -> Vec<Fault> {
    let count = if random.random_range(0..3) == 0 { 2 } else { 1 };
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let fault = FAULTS.get(random.random_range(0..FAULTS.len())).copied();
        drawn.extend(fault.filter(|fault| !drawn.contains(fault)));
    }
    drawn
}

fn spread(times: &[f64]) -> String {
    let times = sorted(times.to_vec());
    format!("{:.2} / {:.2}", median(times.clone()), quantile(&times, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_drawn_and_none_twice_at_once() {
        let mut random = StdRng::seed_from_u64(1);
        let draws: Vec<Vec<Fault>> = (0..200).map(|_| draw(&mut random)).collect();
        for fault in FAULTS {
            assert!(draws.iter().any(|drawn| drawn.contains(&fault)), "{fault:?}");
        }
        assert!(draws.iter().any(|drawn| drawn.len() == 2));
        assert!(draws.iter().all(|drawn| drawn.first() != drawn.get(1)));
    }

    #[test]
    fn spread_is_median_and_longest() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), "2.00 / 3.00");
    }
}
