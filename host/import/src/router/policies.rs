//! Policies: what each slot runs.

use anyhow::bail;

use super::{Flavor, Import, arguments::Given, known_flag};
use crate::report::{Kind, Place, plain};

/// Content of a slot.
#[derive(Clone, Copy)]
struct Choice {
    kind: Kind,
    /// Key and value of the slot.
    runs: (&'static str, &'static str),
    /// Time that a session stays bound, seconds.
    session: Option<i64>,
    ours: &'static str,
}

/// Times that sessions stay bound where no flag gives it, seconds: vllm-router's, and that of
/// `max-idle-secs`.
const STICKY_SECONDS: i64 = 7_200;
const MANUAL_SECONDS: i64 = 4 * 3_600;
/// Time for policies that hash and therefore know no end of a session.
const HASHED_SECONDS: i64 = 3_600;

const LEAST_LOADED: (&str, &str) = ("builtin", "least-loaded");

/// Flags that choose a policy.
const POLICY_FLAGS: [&str; 4] = ["policy", "prefill-policy", "decode-policy", "routing-logic"];
/// Least likeness of an unknown flag to one of these that makes it an error, 0 to 1.
const MIN_LIKENESS: f64 = 0.7;

/// Translation of an unknown policy.
const UNKNOWN: Choice =
    choice(Kind::Missing, LEAST_LOADED, None, "The policy is not known: write one, or choose a built-in");

/// Policies by their name.
const CHOICES: &[(&str, Choice)] = &[
    ("random", choice(Kind::Translated, ("native", "random"), None, "The same rule")),
    (
        "round_robin",
        choice(
            Kind::Translated,
            ("native", "round-robin"),
            None,
            "The same rule, one counter for each model and leg",
        ),
    ),
    (
        "power_of_two",
        choice(Kind::Translated, ("native", "power-of-two"), None, "The same rule, by active requests"),
    ),
    (
        "cache_aware",
        choice(
            Kind::Approximated,
            ("builtin", "cache-aware"),
            None,
            "The same rule and thresholds; the match is counted in cached blocks of the prefix index, not in \
             characters of a tree, and of equal workers one is drawn instead of the first",
        ),
    ),
    (
        "prefixaware",
        choice(
            Kind::Approximated,
            ("builtin", "longest-prefix"),
            None,
            "The longest cached prefix, without a limit of load, by blocks of the prefix index instead of chunks \
             of characters; where nothing is cached, the fewest active requests instead of a worker at random",
        ),
    ),
    (
        "kv_aware",
        choice(
            Kind::Approximated,
            ("builtin", "kv-aware"),
            None,
            "A cost of tokens and blocks by the prefix index; the formula is NVIDIA Dynamo's (behaviour G). \
             The earlier rule of this name is the policy longest-prefix",
        ),
    ),
    ("consistent_hash", HASHED),
    ("consistent_hashing", HASHED),
    (
        "sticky_least_loaded",
        choice(
            Kind::Approximated,
            LEAST_LOADED,
            Some(STICKY_SECONDS),
            "A session (x-session-id) stays on its first worker, which has the fewest active requests, not \
             the fewest sessions; /finish_session is not needed",
        ),
    ),
    (
        "least_load",
        choice(
            Kind::Approximated,
            LEAST_LOADED,
            None,
            "By active requests; smg also weighs KV usage and throughput",
        ),
    ),
    (
        "prefix_hash",
        choice(
            Kind::Approximated,
            ("builtin", "cache-aware"),
            None,
            "Prompts with a common prefix go where it is cached, within thresholds of load, not by a hash",
        ),
    ),
    (
        "bucket",
        choice(Kind::Missing, LEAST_LOADED, None, "There are no buckets of prompt lengths: use kv-aware"),
    ),
];

/// Policies that hash a session.
const HASHED: Choice = choice(
    Kind::Approximated,
    LEAST_LOADED,
    Some(HASHED_SECONDS),
    "A session (x-session-id) is bound to its first worker instead of hashed; other headers and the user do \
     not name one. The policy session-affinity hashes (policies/session-affinity)",
);

const fn choice(
    kind: Kind,
    runs: (&'static str, &'static str),
    session: Option<i64>,
    ours: &'static str,
) -> Choice {
    Choice { kind, runs, session, ours }
}

impl Import<'_> {
    /// Translates the policies of all legs.
    pub(super) fn policies(&mut self) -> anyhow::Result<()> {
        self.refuse_misspelt_policy()?;
        let splits = self.splits();
        let main = self.line.last("policy");
        let of = |flag: &str| self.line.last(flag).filter(|_| splits);
        let (prefill, decode) = (of("prefill-policy"), of("decode-policy"));
        if splits {
            self.slot("prefill", prefill.or(main), "prefill-policy")?;
            self.slot("decode", decode.or(main), "decode-policy")?;
            self.draft.always_remote(format!("{} prefills every prompt remotely", self.flavor.name()));
        }
        if !splits || self.line.has("worker-urls") {
            self.slot("aggregated", main, "policy")?;
        }
        if let Some(main) = main.filter(|main| !main.is_told.get()) {
            let ours = "left out: --prefill-policy and --decode-policy take its place";
            self.note_translation(main, Kind::Translated, ours);
        }
        Ok(())
    }

    /// Refuses an unknown flag that is like one that chooses a policy: the default rule would take its place.
    fn refuse_misspelt_policy(&self) -> anyhow::Result<()> {
        let unknown = |given: &&Given| given.original.is_none() && given.note.is_none();
        for given in self.line.given.iter().filter(unknown).filter(|given| known_flag(&given.name).is_none())
        {
            let likeness = |flag: &str| strsim::normalized_damerau_levenshtein(&given.name, flag);
            if let Some(near) = POLICY_FLAGS.into_iter().find(|flag| likeness(flag) >= MIN_LIKENESS) {
                bail!(
                    "{}: {} is not a flag of {}; did you mean --{near}?",
                    given.place,
                    given.flag(),
                    self.flavor.name()
                );
            }
        }
        Ok(())
    }

    /// Returns whether requests run on two workers.
    pub(super) fn splits(&self) -> bool {
        ["vllm-pd-disaggregation", "pd-disaggregation", "prefill", "decode"]
            .iter()
            .any(|flag| self.line.has(flag))
    }

    fn slot(&mut self, slot: &str, given: Option<&Given>, flag: &str) -> anyhow::Result<()> {
        let policy = given.map_or("cache_aware", Given::value).to_owned();
        let choice = self.choice(&policy)?;
        let table = format!("policies.slots.{slot}");
        let source = match given {
            Some(given) => plain(&given.shown()),
            None => self.default_source(flag),
        };
        self.draft.set(&table, choice.runs.0, choice.runs.1, &source);
        if policy == "cache_aware" {
            self.thresholds(&table)?;
        }
        if policy == "kv_aware" {
            self.kv_costs()?;
        }
        let mut kept = "";
        if let Some(seconds) = choice.session {
            let fits = self.draft.set("routing", "session_affinity", format!("{seconds}s"), source);
            kept = if fits { "" } else { ". The other leg gave another time, which is kept" };
        }
        if policy == "cache_aware" && self.flavor == Flavor::Vllm {
            kept = ". A session id, which newer versions of vllm-router follow first, does not count";
        }
        let ours = format!("slot {slot}: {}. {}{kept}", choice.runs.1, choice.ours);
        match given {
            Some(given) => self.note_translation(given, choice.kind, ours),
            None => self.report.add(choice.kind, Place::Default, "--policy cache_aware", ours),
        }
        Ok(())
    }

    fn choice(&self, policy: &str) -> anyhow::Result<Choice> {
        let known = CHOICES.iter().find(|(name, _)| *name == policy).map(|(_, choice)| *choice);
        Ok(match policy {
            "manual" => self.manual()?,
            "power_of_two" if self.flavor == Flavor::Sglang => Choice {
                kind: Kind::Approximated,
                ours: "By active requests; sglang-router compares tokens where its monitor knows them",
                ..known.unwrap_or(UNKNOWN)
            },
            _ => known.unwrap_or(UNKNOWN),
        })
    }

    /// Sessions by a routing key.
    fn manual(&self) -> anyhow::Result<Choice> {
        let idle = self.number("max-idle-secs", MANUAL_SECONDS)?.0.max(1);
        let random = self.line.last("assignment-mode").is_none_or(|mode| mode.value() == "random");
        let runs = if random { ("native", "random") } else { LEAST_LOADED };
        let ours =
            "A session is named in x-session-id instead of a routing key, and bound to its first worker";
        Ok(Choice { kind: Kind::Approximated, runs, session: Some(idle), ours })
    }

    fn thresholds(&mut self, table: &str) -> anyhow::Result<()> {
        let (share, share_source, share_flag) = self.fraction("cache-threshold", 0.3)?;
        let (difference, difference_source, difference_flag) = self.number("balance-abs-threshold", 64)?;
        let (ratio, ratio_source, ratio_flag) = self.fraction("balance-rel-threshold", 1.5)?;
        anyhow::ensure!((0.0..=1.0).contains(&share), "--cache-threshold: `{share}` is not between 0 and 1");
        let difference = difference.clamp(0, i64::from(u32::MAX));
        self.draft
            .table(&format!("{table}.settings"))
            .set("cache-threshold", share, share_source)
            .set("balance-abs-threshold", difference, difference_source)
            .set("balance-rel-threshold", ratio.max(1.0), ratio_source);
        for given in [share_flag, difference_flag].into_iter().flatten() {
            self.tell_once(given, Kind::Translated, "setting of cache-aware");
        }
        if let Some(given) = ratio_flag {
            let (kind, ours) = if ratio < 1.0 {
                (Kind::Approximated, "setting of cache-aware, at least 1: below it, loads are never balanced")
            } else {
                (Kind::Translated, "setting of cache-aware")
            };
            self.tell_once(given, kind, ours);
        }
        Ok(())
    }

    /// Factors of the cost, and its sessions.
    fn kv_costs(&mut self) -> anyhow::Result<()> {
        for (flag, key, default) in [
            ("router-temperature", "temperature", 0.0),
            ("kv-penalty-host", "host_cache_credit", 0.8),
            ("kv-penalty-disk", "disk_cache_credit", 0.3),
        ] {
            let (value, source, given) = self.fraction(flag, default)?;
            self.draft.set("routing.cost", key, value.max(0.0), source);
            if let Some(given) = given {
                self.tell_once(given, Kind::Translated, format!("routing.cost.{key}"));
            }
        }
        let flag = "kv-aware-session-affinity-ttl-secs";
        if let Some(given) = self.line.last(flag) {
            let seconds = self.number(flag, 0)?.0.max(0);
            self.draft.set("routing", "session_affinity", format!("{seconds}s"), given.flag());
            let ours = "routing.session_affinity: prefill is bound, too, and load does not end a binding";
            self.tell_once(given, Kind::Approximated, ours);
        }
        Ok(())
    }

    /// Reports a flag that several slots use.
    fn tell_once(&mut self, given: &Given, kind: Kind, ours: impl Into<String>) {
        if !given.is_told.get() {
            self.note_translation(given, kind, ours);
        }
    }
}
