//! The scenarios over time, one row each.

use std::time::Duration;

use super::scenario::{
    Change, Changes, Engines, Figure, FleetSpec, Growth, Happened, Hold, Limit, Phase, Scenario, Source,
};
use crate::load::{
    Arrivals,
    Kind::{Leaves, LeavesAtHead, Malformed, Stream, Whole},
    Load, Prompt, STEADY,
};

pub(super) mod fairness;
pub(super) mod replicas;

const ONE_GATEWAY: FleetSpec = FleetSpec {
    engines: &[],
    gateways: 1,
    source: Source::Flags,
    nats: false,
    tls: false,
    config: "",
    policies: &[],
};
const PHASE: Phase = Phase {
    name: "load",
    loads: &[STEADY],
    times_peak: 0.0,
    seconds: 3_600,
    warm_up: 0,
    changes: Changes::None,
};

const fn engines(count: usize, dialect: &'static str, role: &'static str, flags: &'static str) -> Engines {
    Engines { count, dialect, role, flags, worker: "" }
}

const fn with(engines: Engines, worker: &'static str) -> Engines {
    Engines { worker, ..engines }
}

/// Counters of engines that are zero if nothing leaked.
const LEAKS: [(&str, &str); 4] = [
    ("sequences still running", "/running"),
    ("sequences still waiting", "/waiting"),
    ("handoffs used twice", "/handoffs/reused"),
    ("bootstrap rooms used twice", "/duplicate_rooms"),
];
const LEAKS_AND_DEAD: &[(&str, &str)] =
    &[LEAKS[0], LEAKS[1], LEAKS[2], LEAKS[3], ("engines that a bad handoff killed", "/dead")];
const LEAKS_AND_STRANDED: &[(&str, &str)] = &[
    LEAKS[0],
    LEAKS[1],
    LEAKS[2],
    LEAKS[3],
    ("handoffs stranded", "/stranded"),
    ("blocks pinned", "/pinned_blocks"),
];

const FAULTY: &str = "--room-wait-s 300 --overhead-ms 1 --prefill-ms-per-token 0.01 --itl-ms 1 --lease-s 6";

/// 10,000 requests while faults affect 5 % of all legs. When a request has ended, its hanging prefill may
/// continue (E1.2); the deadlines of engines limit it. When a decode engine fails before it pulls, the blocks
/// stay until their lease ends, because a handoff is dispatched only once.
pub(super) const FAULTS: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[
            with(engines(2, "vllm", "prefill", FAULTY), "handoff_lease_s=6"),
            with(engines(2, "vllm", "decode", FAULTY), "handoff_lease_s=6"),
            with(engines(2, "sglang", "prefill", FAULTY), "handoff_lease_s=6"),
            with(engines(2, "sglang", "decode", FAULTY), "handoff_lease_s=6"),
        ],
        config: "[timeouts]\nrequest = \"4s\"\nprefill_head = \"4s\"\nevent_idle = \"4s\"\n\
                 event_idle_max = \"4s\"\n[probe]\ninterval = \"300ms\"\n",
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[Load {
            arrivals: Arrivals::Clients(48),
            kinds: &[Stream, Whole],
            prompt: Prompt::Distinct(97),
            tokens: (6, 6),
            requests: 10_000,
            ..STEADY
        }],
        changes: Changes::EngineFaults(0.05),
        ..PHASE
    }],
    rest: 8,
    holds: &[
        Hold::Happened(&[Happened::Complete]),
        Hold::EveryFault,
        Hold::Errors(0.2),
        Hold::NoneLost,
        Hold::Slowest(20),
        // The wait covers the prefill of the last request that ended, and its lease (E4.3).
        Hold::NoBookings(4 + 6 + 2),
        Hold::HandoffsKept,
        Hold::EnginesZero(LEAKS_AND_DEAD),
    ],
};

const SLOW: &str =
    "--overhead-ms 20 --prefill-ms-per-token 0 --itl-ms 2 --jitter 0 --load-factor 1 --record 10000";

/// Measures how soon the decode engine notices that the client of a stream disconnected.
pub(super) const DISCONNECT_NOTICE: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[engines(1, "vllm", "prefill", SLOW), engines(1, "vllm", "decode", SLOW)],
        ..ONE_GATEWAY
    },
    phases: &[Phase { loads: &[LEAVING], ..PHASE }],
    rest: 1,
    holds: &[Hold::Happened(&[Happened::Left]), Hold::Noticed(100.0), Hold::NoneLost, Hold::NoBookings(5)],
};

const LEAVING: Load = Load {
    arrivals: Arrivals::Clients(40),
    kinds: &[Leaves { stream: true, within_ms: 250 }],
    prompt: Prompt::Distinct(u64::MAX),
    tokens: (400, 400),
    requests: 2_000,
    ..STEADY
};
const LEAVING_SOME_WHOLE: Load = Load {
    kinds: &[
        Leaves { stream: true, within_ms: 250 },
        Leaves { stream: true, within_ms: 250 },
        Leaves { stream: false, within_ms: 250 },
    ],
    ..LEAVING
};
const LEASED: &str = "--lease-s 5 --overhead-ms 20 --prefill-ms-per-token 0.05 --itl-ms 5";

/// Checks that committed handoffs are consumed when clients disconnect, on engines that count handoffs
/// strictly.
pub(super) const DISCONNECT_VLLM: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[engines(2, "vllm", "prefill", LEASED), engines(2, "vllm", "decode", LEASED)],
        ..ONE_GATEWAY
    },
    phases: &[Phase { loads: &[LEAVING_SOME_WHOLE], ..PHASE }],
    // Leases end after 5 s.
    rest: 6,
    holds: &[
        Hold::Happened(&[Happened::Left]),
        Hold::NoneLost,
        Hold::HandoffsPulled,
        Hold::EnginesZero(LEAKS_AND_STRANDED),
        Hold::NoBookings(10),
    ],
};

pub(super) const DISCONNECT_SGLANG: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[engines(2, "sglang", "prefill", LEASED), engines(2, "sglang", "decode", LEASED)],
        ..ONE_GATEWAY
    },
    holds: &[
        Hold::Happened(&[Happened::Left]),
        Hold::NoneLost,
        Hold::EnginesZero(LEAKS_AND_STRANDED),
        Hold::NoBookings(10),
    ],
    ..DISCONNECT_VLLM
};

/// Ten times as many requests as two engines with five places each can serve. Prompts take no time, because
/// an engine's other requests stop while it computes a prompt, and its capacity would then depend on whether
/// requests begin together. Requests are refused at once when the queue is full.
pub(super) const OVERLOAD: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[with(
            engines(
                2,
                "vllm",
                "aggregated",
                "--overhead-ms 0 --itl-ms 10 --prefill-ms-per-token 0 --jitter 0 --load-factor 1",
            ),
            "max_concurrency=5",
        )],
        config: "[queue]\nlimit = 20\ntimeout = '5s'\n[decisions]\nkeep = 1000\nbytes = 1048576\n",
        ..ONE_GATEWAY
    },
    phases: &[
        Phase {
            name: "peak",
            loads: &[Load { arrivals: Arrivals::Clients(20), tokens: (20, 20), ..STEADY }],
            seconds: 10,
            ..PHASE
        },
        Phase {
            name: "overload",
            loads: &[Load { tokens: (20, 20), ..STEADY }],
            times_peak: 10.0,
            seconds: 300,
            ..PHASE
        },
    ],
    rest: 0,
    holds: &[
        Hold::Goodput(0.9),
        Hold::Refusals(529, 5.0),
        Hold::Growth(Growth { figure: Figure::Anonymous, from: 0.2, window: 0.0, limit: Limit::Share(0.1) }),
        Hold::Recovers(5),
        Hold::NoBookings(5),
    ],
};

/// 1,000 reloads of two good policies in turn under 500 requests a second. Receipts fill their buffer during
/// the first tenth of the phase, so they do not count as growth.
pub(super) const RELOADS: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[engines(1, "vllm", "aggregated", "--overhead-ms 1 --prefill-ms-per-token 0 --itl-ms 1")],
        config: "[decisions]\nkeep = 6000\nbytes = 4194304\n",
        policies: &["policy-least-loaded", "policy-kv-aware"],
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[Load { arrivals: Arrivals::Paced(500.0, 16), ..STEADY }],
        seconds: 500,
        changes: Changes::Cycle { every: Duration::from_millis(500), steps: &[Change::Policy("aggregated")] },
        ..PHASE
    }],
    rest: 0,
    holds: &[
        Hold::Applied(0.99),
        Hold::Happened(&[Happened::Complete]),
        Hold::Errors(0.0),
        Hold::NoneLost,
        Hold::NearSwaps(1.2),
        Hold::Growth(Growth { figure: Figure::Resident, from: 0.1, window: 0.0, limit: Limit::Share(0.05) }),
    ],
};

/// A decode leg takes about 250 ms, so five engines with two places each serve 40 requests a second.
const SOAKED: &str = "--overhead-ms 10 --itl-ms 12 --prefill-ms-per-token 0";
/// Compares a figure of a soak between the second quarter, when buffers are full, and the last one.
const fn quarters(figure: Figure, limit: Limit) -> Hold {
    Hold::Growth(Growth { figure, from: 0.25, window: 0.25, limit })
}

/// Half of the load that the engines can serve, for hours, while everything changes.
pub(super) const SOAK: Scenario = Scenario {
    fleet: FleetSpec {
        engines: &[
            with(engines(5, "vllm", "decode", SOAKED), "max_concurrency=2"),
            engines(3, "vllm", "prefill", SOAKED),
        ],
        source: Source::File,
        tls: true,
        // Receipts get little memory, so that their buffers are full within the first quarter.
        config: "[decisions]\nkeep = 2000\nbytes = 2097152\n[probe]\ninterval = '500ms'\n\
                 [queue]\nlimit = 100\n[discovery]\ndrain = '5s'\nremoval_share = 1.0\n",
        policies: &["policy-least-loaded", "policy-kv-aware"],
        ..ONE_GATEWAY
    },
    phases: &[Phase {
        loads: &[Load {
            arrivals: Arrivals::Rate(20.0),
            kinds: &[
                Malformed,
                LeavesAtHead,
                LeavesAtHead,
                Whole,
                Whole,
                Whole,
                Whole,
                Whole,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
                Stream,
            ],
            prompt: Prompt::Conversation,
            tokens: (20, 20),
            renew: 200,
            ..STEADY
        }],
        seconds: 7_200,
        changes: Changes::Cycle {
            every: Duration::from_secs(5),
            steps: &[
                Change::LeaveOut,
                Change::Policy("decode"),
                Change::PutBack,
                Change::Certificate,
                Change::Config,
                Change::KillEngine,
                Change::RestartEngine,
                Change::Policy("decode"),
            ],
        },
        ..PHASE
    }],
    rest: 0,
    holds: &[
        Hold::Happened(&[Happened::Complete, Happened::Refused, Happened::Left]),
        Hold::ErrorsExplained(5),
        Hold::NoneLost,
        Hold::Applied(1.0),
        Hold::NoBookings(30),
        quarters(Figure::Anonymous, Limit::Share(0.05)),
        quarters(Figure::Descriptors, Limit::Count(5.0)),
        quarters(Figure::Threads, Limit::Count(0.0)),
    ],
};
