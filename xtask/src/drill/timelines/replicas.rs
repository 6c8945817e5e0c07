//! Three gateways that exchange their load.

use std::time::Duration;

use super::{
    super::scenario::{Changes, Fault, FleetSpec, Happened, Hold, Phase, Scenario, Source},
    ONE_GATEWAY, PHASE, engines,
};
use crate::load::{Arrivals, Kind::Stream, Load, STEADY};

const ASKING: Load = Load { arrivals: Arrivals::Rate(12.5), kinds: &[Stream], tokens: (30, 30), ..STEADY };
const WHOLE_AGAIN: &[Hold] =
    &[Hold::Happened(&[Happened::Complete]), Hold::Heals(15), Hold::NoneLost, Hold::NoBookings(30)];
/// Probes that notice a killed engine soon, and a source from which workers may leave one by one.
const CHAOTIC: &str = "[probe]\ninterval = '500ms'\n[discovery]\ndrain = '2s'\nremoval_share = 1.0\n\
                       [server]\nthreads = 1\n";

/// Three gateways that find their engines through the real etcd and exchange their load over the real NATS,
/// while one or two processes or networks at a time fail.
pub(in super::super) const CHAOS: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[
            engines(3, "vllm", "prefill", "--threads 1 --max-num-seqs 64"),
            engines(3, "vllm", "decode", "--threads 1 --max-num-seqs 64"),
        ],
        gateways: 3,
        source: Source::Etcd,
        nats: true,
        config: CHAOTIC,
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[ASKING],
        seconds: 1_800,
        changes: Changes::Random {
            faults: &[
                Fault::Engine,
                Fault::Nats,
                Fault::Etcd,
                Fault::Gateway,
                Fault::NetworkToNats,
                Fault::NetworkToEtcd,
            ],
            calm: Duration::from_secs(2),
        },
        ..PHASE
    }],
    rest: 0,
    // The clients of etcd and NATS pause between two attempts.
    holds: WHOLE_AGAIN,
};

/// An engine, NATS and a gateway are killed and a network is cut, one after another, for longer than a lease
/// (3 s). The gateways must report each fault, and agree again soon after its repair.
pub(crate) const REPLICAS: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[engines(
            6,
            "vllm",
            "aggregated",
            "--blocks 1500 --max-num-seqs 64 --jitter 0.05 --threads 1",
        )],
        gateways: 3,
        nats: true,
        config: "[server]\nthreads = 1\n",
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[ASKING],
        seconds: 30,
        changes: Changes::Each {
            faults: &[Fault::Engine, Fault::Nats, Fault::Gateway, Fault::NetworkToNats],
            away: Duration::from_secs(5),
        },
        ..PHASE
    }],
    rest: 0,
    holds: &[Hold::Happened(&[Happened::Complete]), Hold::Heals(5), Hold::NoneLost, Hold::NoBookings(5)],
};

/// Eight gateways and 120 engines, which are so slow that 40 requests a second keep one at each engine.
pub(crate) const LARGE: FleetSpec = FleetSpec {
    engines: &[engines(
        120,
        "vllm",
        "aggregated",
        "--blocks 1500 --max-num-seqs 64 --jitter 0.05 --itl-ms 60 --threads 1",
    )],
    gateways: 8,
    ..REPLICAS.fleet
};
