//! Two tenants, one of which sends twenty times as many requests.

use super::{
    super::scenario::{FleetSpec, Hold, Phase, Scenario},
    ONE_GATEWAY, PHASE, engines, with,
};
use crate::load::{Arrivals, Kind::Stream, Load, STEADY};

/// Two tenants, one of which sends twenty times as many requests. Both always have waiting requests, and get
/// tokens in proportion to their weights.
pub(in super::super) const EQUAL: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[with(
            engines(
                2,
                "vllm",
                "aggregated",
                "--overhead-ms 20 --itl-ms 5 --prefill-ms-per-token 0 --jitter 0 --load-factor 1",
            ),
            "max_concurrency=8",
        )],
        config: "[server]\ntenant_header = 'x-tenant'\n[auth]\ntrusted_proxies = ['127.0.0.0/8']\n\
                 [queue]\nlimit = 2000\ntimeout = '50s'\n\
                 [tenants.light]\nweight = 1.0\n[tenants.heavy]\nweight = 1.0\n",
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[tenant("light", 24, 20), tenant("heavy", 480, 60)],
        seconds: 30,
        warm_up: 3,
        ..PHASE
    }],
    rest: 0,
    holds: &[Hold::Errors(0.0), Hold::NoneLost, Hold::Share("light", 0.5, 0.05)],
};

pub(in super::super) const WEIGHTED: Scenario = Scenario {
    fleet: FleetSpec {
        config: "[server]\ntenant_header = 'x-tenant'\n[auth]\ntrusted_proxies = ['127.0.0.0/8']\n\
                 [queue]\nlimit = 2000\ntimeout = '50s'\n\
                 [tenants.light]\nweight = 3.0\n[tenants.heavy]\nweight = 1.0\n",
        ..EQUAL.fleet
    },
    holds: &[Hold::Errors(0.0), Hold::NoneLost, Hold::Share("light", 0.75, 0.05)],
    ..EQUAL
};

/// The light tenant sends less than its share, and the heavy one always has waiting requests. Each engine
/// runs one request at a time, so that only the wait for a place differs, not the speed of an engine.
pub(in super::super) const FIRST_TOKENS: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[with(
            engines(
                48,
                "vllm",
                "aggregated",
                "--overhead-ms 500 --itl-ms 5 --prefill-ms-per-token 0 --jitter 0 --load-factor 1",
            ),
            "max_concurrency=1",
        )],
        ..EQUAL.fleet
    },
    phases: &[
        Phase { name: "alone", loads: &[tenant("light", 10, 60)], seconds: 30, warm_up: 3, ..PHASE },
        Phase {
            name: "beside",
            loads: &[tenant("light", 10, 60), tenant("heavy", 200, 60)],
            seconds: 30,
            warm_up: 3,
            ..PHASE
        },
    ],
    holds: &[Hold::Errors(0.0), Hold::NoneLost, Hold::FirstTokens("light", 1.2)],
    ..EQUAL
};

/// Returns the clients of a tenant. A request has between a third of `tokens` and `tokens` output tokens.
const fn tenant(name: &'static str, clients: u32, tokens: u32) -> Load {
    Load {
        name,
        arrivals: Arrivals::Clients(clients),
        kinds: &[Stream],
        tokens: (tokens / 3, tokens),
        header: ("x-tenant", name),
        ..STEADY
    }
}
