//! What a scenario is made of: a fleet, requests over time, what changes meanwhile, and what must hold.

use std::time::Duration;

use crate::load::Load;

/// A scenario over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) fleet: FleetSpec,
    /// Phases in turn. `--minutes` replaces the time of the last one.
    pub(crate) phases: &'static [Phase],
    /// Time without requests before engines are judged, seconds: leases end in it.
    pub(crate) rest: u64,
    pub(crate) holds: &'static [Hold],
}

/// Engines, gateways, and what is between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FleetSpec {
    pub(crate) engines: &'static [Engines],
    pub(crate) gateways: usize,
    /// How gateways find their engines.
    pub(crate) source: Source,
    /// Gateways tell each other their load over the real NATS.
    pub(crate) nats: bool,
    /// Clients speak TLS.
    pub(crate) tls: bool,
    /// TOML of each gateway.
    pub(crate) config: &'static str,
    /// Policies that are installed in turn, by the names of their crates.
    pub(crate) policies: &'static [&'static str],
}

/// Equal engines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engines {
    pub(crate) count: usize,
    pub(crate) dialect: &'static str,
    pub(crate) role: &'static str,
    /// Flags of `pointsman-sim`.
    pub(crate) flags: &'static str,
    /// Fields of the worker; empty for none.
    pub(crate) worker: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `--worker` flags.
    Flags,
    /// A file of workers.
    File,
    /// The real etcd.
    Etcd,
}

/// Requests for a time, and what changes meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    /// One set of these for each gateway.
    pub(crate) loads: &'static [Load],
    /// Factor on the rate of the loads: multiples of the answers a second of the phase before. 0: none.
    pub(crate) times_peak: f64,
    /// Seconds at most; it ends sooner when all loads are over.
    pub(crate) seconds: u64,
    /// Seconds at the beginning that do not count.
    pub(crate) warm_up: u64,
    pub(crate) changes: Changes,
}

/// What changes while requests run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Changes {
    None,
    /// A share of all legs meets a fault of every kind that the simulated engine has.
    EngineFaults(f64),
    /// One change after the other, again and again.
    Cycle {
        every: Duration,
        steps: &'static [Change],
    },
    /// Something is taken away at random, also two at once, and brought back.
    Random {
        faults: &'static [Fault],
        calm: Duration,
    },
    /// Each is taken away for a time, its absence is noticed, and it is brought back.
    Each {
        faults: &'static [Fault],
        away: Duration,
    },
}

/// A change that is no fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Change {
    /// The source leaves out an engine, another one in each round.
    LeaveOut,
    /// The source names all engines.
    PutBack,
    /// The listener's certificate is replaced.
    Certificate,
    /// A setting is changed, and the file is read again.
    Config,
    /// An engine is killed, another one in each round.
    KillEngine,
    /// The killed engine starts again.
    RestartEngine,
    /// The next policy is renamed into place.
    Policy(&'static str),
}

/// Something that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Engine,
    Nats,
    Etcd,
    Gateway,
    /// The last gateway's network to NATS.
    NetworkToNats,
    /// The last gateway's network to etcd.
    NetworkToEtcd,
}

/// What must hold at the end. Times are milliseconds where the name does not say otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hold {
    /// Some requests ended in each of these ways.
    Happened(&'static [Happened]),
    /// No answer has neither an end nor one valid error, except those that a killed gateway took with it.
    NoneLost,
    /// At most this share of the requests ended with one valid error.
    Errors(f64),
    /// Every error ended within so many seconds after an engine was killed.
    ErrorsExplained(u64),
    /// No request took longer, seconds.
    Slowest(u64),
    /// No booking is left after so many seconds.
    NoBookings(u64),
    /// These counters of the engines are zero: name and JSON pointer.
    EnginesZero(&'static [(&'static str, &'static str)]),
    /// Every kind of fault was injected.
    EveryFault,
    /// No committed handoff was lost.
    HandoffsKept,
    /// Engines pulled as many handoffs as were committed.
    HandoffsPulled,
    /// p99 from a client's disconnect to its engine's notice, and every engine noticed.
    Noticed(f64),
    /// Answers a second of the last phase, as a share of those of the first.
    Goodput(f64),
    /// Requests of the last phase ended whole or with this status, which is answered with this p99.
    Refusals(u16, f64),
    /// Seconds until a request takes at most twice as long as in the beginning, and 50 ms.
    Recovers(u64),
    /// A figure of the gateway's process grows by no more than a limit, between two parts of the last phase.
    Growth(Growth),
    /// At least this share of the changes was applied; one may be missing.
    Applied(f64),
    /// p99.9 of decisions near a swap of policies, as a multiple of that of the others.
    NearSwaps(f64),
    /// Share of the served tokens of a load, and the largest deviation.
    Share(&'static str, f64, f64),
    /// p99 of the time to the first token of a load, last phase over first.
    FirstTokens(&'static str, f64),
    /// Seconds until everything is whole again after each fault.
    Heals(u64),
}

/// An end that has to occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happened {
    Complete,
    Refused,
    Left,
}

/// Growth of a figure from `[from, from + window]` to `[1 - window, 1]` of the last phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub(crate) figure: Figure,
    pub(crate) from: f64,
    pub(crate) window: f64,
    pub(crate) limit: Limit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    Resident,
    Anonymous,
    Descriptors,
    Threads,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    Share(f64),
    Count(f64),
}
