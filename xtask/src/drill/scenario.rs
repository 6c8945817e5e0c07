//! Scenarios, as `xtask/drill/scenarios.toml` has them: a fleet, requests over time, changes during the
//! requests, and requirements.

use std::time::Duration;

use serde::Deserialize;

use crate::load::Load;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenarios {
    pub(super) row: Vec<Scenario>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) purpose: String,
    /// Time limit in `nightly`, minutes.
    pub(crate) minutes: u64,
    /// Duration of the last phase in `nightly`, minutes; `None` for the scenario's own.
    pub(crate) nightly: Option<u64>,
    /// Programs that the scenario needs besides those of the repository.
    #[serde(default)]
    pub(crate) needs: Vec<String>,
    #[serde(default)]
    pub(crate) fleet: FleetSpec,
    /// Phases in their order. `--minutes` replaces the duration of the last phase. Without phases, the
    /// scenario runs cases during a steady load.
    #[serde(default)]
    pub(super) phases: Vec<Phase>,
    /// Time without requests before engines are judged, seconds. Leases end during it.
    #[serde(default)]
    pub(super) rest: u64,
    #[serde(default)]
    pub(super) holds: Vec<Hold>,
}

/// Engines, gateways, and the servers between them.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct FleetSpec {
    /// Flags of `pointsman-sim`, for every engine.
    pub(crate) flags: String,
    pub(crate) engines: Vec<Engines>,
    pub(crate) gateways: usize,
    /// Way in which gateways find their engines.
    pub(crate) source: Source,
    /// Whether gateways exchange their load over the real NATS.
    pub(crate) nats: bool,
    /// Whether clients use TLS.
    pub(crate) tls: bool,
    /// Further configuration of each gateway, TOML.
    pub(crate) config: String,
    /// Policies to install in turn, as the names of their crates.
    pub(crate) policies: Vec<String>,
}

impl Default for FleetSpec {
    fn default() -> Self {
        Self {
            flags: String::new(),
            engines: Vec::new(),
            gateways: 1,
            source: Source::Flags,
            nats: false,
            tls: false,
            config: String::new(),
            policies: Vec::new(),
        }
    }
}

/// A group of equal engines.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Engines {
    pub(crate) count: usize,
    pub(crate) dialect: String,
    pub(crate) role: String,
    /// Further fields of the worker's description; may be empty.
    #[serde(default)]
    pub(crate) worker: String,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// Workers are given as `--worker` flags.
    Flags,
    /// Workers are in a file.
    File,
    /// Workers are registered in the real etcd.
    Etcd,
}

/// Requests for a time, and changes during that time.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Phase {
    pub(crate) name: String,
    /// Loads that each gateway gets.
    pub(crate) loads: Vec<Load>,
    /// Rate of the loads, as a multiple of the answers a second of the previous phase; 0 for the loads' own
    /// rates.
    pub(crate) times_peak: f64,
    /// Maximum duration, seconds. The phase ends earlier if all loads have ended.
    pub(crate) seconds: u64,
    /// Duration of the beginning that does not count, seconds.
    pub(crate) warm_up: u64,
    pub(crate) changes: Changes,
}

impl Default for Phase {
    fn default() -> Self {
        Self {
            name: "load".to_owned(),
            loads: vec![Load::default()],
            times_peak: 0.0,
            seconds: 3_600,
            warm_up: 0,
            changes: Changes::None,
        }
    }
}

/// Changes while requests run.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Changes {
    None,
    /// A share of all legs gets a fault of some kind. All kinds that the simulated engine has occur.
    EngineFaults(f64),
    /// The changes are made one after another, repeatedly.
    Cycle {
        #[serde(with = "humantime_serde")]
        every: Duration,
        steps: Vec<Change>,
    },
    /// Random faults are caused, also two at once, and repaired.
    Random {
        faults: Vec<Fault>,
        #[serde(with = "humantime_serde")]
        calm: Duration,
    },
    /// Each fault is caused, the gateways notice it, and it is repaired.
    Each {
        faults: Vec<Fault>,
        #[serde(with = "humantime_serde")]
        away: Duration,
    },
}

/// A change that is not a fault.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Change {
    /// The source leaves out an engine, a different one in each round.
    LeaveOut,
    /// The source lists all engines again.
    PutBack,
    /// The listener's certificate is replaced.
    Certificate,
    /// A setting is changed, and the file is read again.
    Config,
    /// An engine is killed, a different one in each round.
    KillEngine,
    /// The killed engine starts again.
    RestartEngine,
    /// The next policy is renamed into its place in the policy directory.
    Policy(String),
}

/// Something that fails.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    Engine,
    Nats,
    Etcd,
    Gateway,
    /// The last gateway's network connection to NATS.
    NetworkToNats,
    /// The last gateway's network connection to etcd.
    NetworkToEtcd,
}

/// A requirement for the end of a scenario. Times are in milliseconds unless stated otherwise.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Hold {
    /// Some requests ended in each of these ways.
    Happened(Vec<Happened>),
    /// Every answer has an end or one valid error, except the answers that a killed gateway cut off.
    NoneLost,
    /// At most this share of the requests ended with one valid error.
    Errors(f64),
    /// Every error ended within this number of seconds after an engine was killed.
    ErrorsExplained(u64),
    /// No request took longer than this, seconds.
    Slowest(u64),
    /// No booking is left after this number of seconds.
    NoBookings(u64),
    /// These counters of the engines are zero, as JSON pointers into `/sim/state`.
    EnginesZero(Vec<String>),
    /// Every kind of fault was injected.
    EveryFault,
    /// No committed handoff was lost.
    HandoffsKept,
    /// The engines pulled as many handoffs as were committed.
    HandoffsPulled,
    /// The engines noticed every disconnect of a client. The p99 of the time until then is below this.
    Noticed(f64),
    /// The answers a second of the last phase are at least this share of those of the first phase.
    Goodput(f64),
    /// Every request of the last phase ended with a whole answer or with this status. The p99 of the time of
    /// such refusals is below this.
    Refusals(u16, f64),
    /// A request takes at most twice as long as at the beginning, plus 50 ms, within this number of seconds.
    Recovers(u64),
    /// A figure of the gateway's process grows by no more than a limit between two parts of the last phase.
    Growth(Growth),
    /// At least this share of the changes was applied. One more may be missing.
    Applied(f64),
    /// The p99.9 of decisions near a swap of policies is at most this multiple of the p99.9 of other
    /// decisions.
    NearSwaps(f64),
    /// A load gets this share of the served tokens, with this largest deviation.
    Share(String, f64, f64),
    /// The p99 of a load's time to first token in the last phase is at most this multiple of that in the
    /// first phase.
    FirstTokens(String, f64),
    /// Everything works again within this number of seconds after each fault.
    Heals(u64),
}

/// A result that must occur.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Happened {
    Complete,
    Refused,
    Left,
}

/// Growth of a figure between the parts `[from, from + window]` and `[1 - window, 1]` of the last phase.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Growth {
    pub(crate) figure: Figure,
    pub(crate) from: f64,
    pub(crate) window: f64,
    pub(crate) limit: Limit,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Figure {
    Resident,
    Anonymous,
    Descriptors,
    Threads,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Limit {
    Share(f64),
    Count(f64),
}
