//! What the slots ran during the exported requests: the beginning of a fleet file, and arms for `compare`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use pointsman_decision_log::{LoggedDecision, LoggedRequest};
use pointsman_embedded_policies::{by_name, default_of};
use pointsman_policy_runtime::FORMULA_SUFFIX;

use crate::fleet::assumed_blocks;

const OVERRIDE: &str = "decode-override";

/// Policies and workers of the slots during the exported requests.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Number of decisions, by lane, slot and rule.
    policies: BTreeMap<(&'static str, String, Ran), u64>,
    /// Number of decisions with something that an arm lacks, by lane, slot and that.
    omitted: BTreeMap<(&'static str, String, Omitted), u64>,
    /// Chosen workers, by slot.
    workers: BTreeMap<String, BTreeSet<(u64, u32)>>,
    /// Number of decisions for a worker, and of those that sessions made.
    decisions: u64,
    by_session: u64,
}

/// A policy with its settings, or a native mode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ran {
    name: String,
    digest: Option<String>,
    settings: Option<String>,
}

/// What a slot ran beside the policy of its arm.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Omitted {
    /// The name of the filter before the policy.
    Filter(String),
    /// Scorers with weights, and their picker.
    Scorers(String),
}

/// The arm of a lane.
pub(super) struct LaneArm {
    pub(super) lane: &'static str,
    pub(super) parts: Vec<String>,
    /// What the lane ran otherwise.
    pub(super) warnings: Vec<String>,
}

/// Number of decisions by part of an arm, of each slot of a lane.
type Parts<'a> = BTreeMap<&'a str, BTreeMap<String, u64>>;

impl Seen {
    pub(super) fn note(&mut self, request: &LoggedRequest) {
        for decision in &request.decisions {
            let lane = if decision.lane == "canary" { "canary" } else { "active" };
            if let Some(ran) = Ran::of(decision) {
                *self.policies.entry((lane, decision.slot.clone(), ran)).or_default() += 1;
            }
            self.note_omitted(lane, decision, &decision.filter, &decision.scorers);
            if let (Some(worker), Some(rank)) = (decision.worker, decision.rank) {
                self.decisions += 1;
                self.by_session += u64::from(decision.decider == "session");
                self.workers.entry(decision.slot.clone()).or_default().insert((worker, rank));
            }
            // The log does not contain the name of an override's shadow.
            if let Some(shadow) = decision.shadow.as_ref().filter(|_| decision.slot != OVERRIDE) {
                self.note_omitted("shadow", decision, &shadow.filter, &shadow.scorers);
                let name = shadow.policy.clone().unwrap_or_else(|| "kv".to_owned());
                let (digest, settings) = (shadow.digest.clone(), shadow.settings_digest.clone());
                let ran = Ran { name, digest, settings };
                *self.policies.entry(("shadow", decision.slot.clone(), ran)).or_default() += 1;
            }
        }
    }

    fn note_omitted(
        &mut self,
        lane: &'static str,
        decision: &LoggedDecision,
        filter: &Option<String>,
        scorers: &Option<String>,
    ) {
        let (filter, scorers) = (filter.clone().map(Omitted::Filter), scorers.clone().map(Omitted::Scorers));
        for omitted in filter.into_iter().chain(scorers) {
            *self.omitted.entry((lane, decision.slot.clone(), omitted)).or_default() += 1;
        }
    }

    /// Returns the fleet file of the simulation. The user has to complete it, because the log does not
    /// contain step times, cache sizes and the gateway's settings.
    pub(super) fn fleet(&self, block_tokens: u32) -> String {
        let mut text = format!(
            "Describe your engines in fleet.toml (docs/compare.md), beginning with:\n\n  block_tokens = {block_tokens}\n"
        );
        for role in ["aggregated", "prefill", "decode"] {
            let count = self.engines(role);
            if count > 0 {
                let blocks = assumed_blocks(block_tokens);
                let _ = write!(
                    text,
                    "  [[engines]]\n  role = \"{role}\"\n  count = {count}\n  blocks = {blocks}  # assumed: the log has no \
                     number of KV blocks\n"
                );
            }
        }
        text.push_str(
            "\nThe log does not contain these keys of the gateway: give fleet.toml its `[routing]` and `[queue]`, and the \
             engines their `max_concurrency`.\n",
        );
        text
    }

    /// Returns the number of workers with a role. A decode engine that computed whole requests was chosen in
    /// the slot `aggregated`, too.
    fn engines(&self, role: &str) -> usize {
        let of = |slot: &str| self.workers.get(slot).into_iter().flatten();
        let is_pair = |worker: &&(u64, u32)| {
            role == "aggregated" && of("prefill").chain(of("decode")).any(|other| other.0 == worker.0)
        };
        of(role).filter(|worker| !is_pair(worker)).count()
    }

    /// Says how many decisions no policy made, because sessions were bound.
    pub(super) fn sessions(&self) -> Option<String> {
        (self.by_session > 0).then(|| {
            format!(
                "{} of {} decisions came from sessions: the simulation has them only with the gateway's \
                 `session_affinity` in `[routing]` of fleet.toml",
                self.by_session, self.decisions
            )
        })
    }

    /// Returns one arm for each lane.
    pub(super) fn arms(&self) -> impl Iterator<Item = LaneArm> {
        let active: BTreeSet<&str> = self.parts("active").into_keys().collect();
        ["active", "canary", "shadow"].into_iter().filter_map(move |lane| {
            let ran = self.parts(lane);
            let parts = arm(&ran)?;
            let warnings = warning(lane, &parts, &ran, &active).into_iter();
            let warnings = warnings.chain(self.changes(lane)).chain(self.omissions(lane));
            let warnings = warnings.chain(self.omitted_settings(lane, &parts)).collect();
            Some(LaneArm { lane, parts, warnings })
        })
    }

    /// Names the filters and scorers of a lane, which its arm lacks: the log does not contain their settings.
    fn omissions(&self, lane: &'static str) -> impl Iterator<Item = String> + '_ {
        let omitted = self.omitted.iter().filter(move |((ran_in, ..), _)| *ran_in == lane);
        omitted.map(move |((_, slot, omitted), count)| match omitted {
            Omitted::Filter(filter) => format!(
                "{slot} {lane} had the filter {filter} before its policy ({count} decisions), and the arm has no filter: \
                 add it, as in --arm {lane}={}@'SETTINGS'+POLICY",
                part_of_policy(filter)
            ),
            Omitted::Scorers(scorers) => format!(
                "{slot} {lane} ranked by scorers ({count} decisions): {scorers}. An arm adds the costs of its scorers, \
                 each with weight 1 and without normalization, and picks the least: add the others, as in --arm \
                 {lane}=FIRST+SECOND, and compare weights and pickers on a gateway"
            ),
        })
    }

    /// Names the policies of a lane that had settings, which its arm lacks. `parts` are those of the arm.
    fn omitted_settings(&self, lane: &'static str, parts: &[String]) -> Vec<String> {
        let ran_in_lane = self.policies.iter().filter(|((ran_in, ..), _)| *ran_in == lane);
        let line = |((_, slot, ran), count): (&(&str, String, Ran), &u64)| {
            // The file of a formula has all of it.
            let digest = ran.settings.as_ref().filter(|_| ran.name != "formula")?;
            let digest: String = digest.chars().take(12).collect();
            let part = ran.part(lane, slot);
            let add = if parts == ["default"] {
                "the arm default takes no settings".to_owned()
            } else if parts.contains(&part) {
                let with = |other: &String| {
                    if *other == part { format!("{part}@'SETTINGS'") } else { other.clone() }
                };
                let arm = parts.iter().map(with).collect::<Vec<_>>().join("+");
                format!("the arm has none: add them, as in --arm {lane}={arm}")
            } else {
                "the arm does not have this policy".to_owned()
            };
            Some(format!(
                "{slot} {lane} ran {part} with settings (digest {digest}, {count} decisions), which the log does not \
                 contain, and {add}"
            ))
        };
        ran_in_lane.filter_map(line).collect()
    }

    /// Names the slots of a lane whose policy had several contents or settings. An arm has one of each.
    fn changes(&self, lane: &str) -> Vec<String> {
        let mut rules: BTreeMap<(&str, &str), Vec<(&Ran, u64)>> = BTreeMap::new();
        for ((_, slot, ran), count) in self.policies.iter().filter(|((ran_in, ..), _)| *ran_in == lane) {
            rules.entry((slot, &ran.name)).or_default().push((ran, *count));
        }
        let several = rules.into_iter().filter(|(_, rules)| rules.len() > 1);
        let line = |((slot, name), rules): ((&str, &str), Vec<(&Ran, u64)>)| {
            let number = rules.len();
            let rules = rules.iter().map(|(ran, count)| format!("{} ({count})", ran.content()));
            let rules = rules.collect::<Vec<_>>().join(", ");
            format!(
                "{slot} {lane} ran {name} with {number} contents or settings, and an arm has one: {rules}; export \
                 the time of one of them, with --since and --until"
            )
        };
        several.map(line).collect()
    }

    fn parts(&self, lane: &str) -> Parts<'_> {
        let mut parts = Parts::new();
        for ((_, slot, ran), count) in self.policies.iter().filter(|((ran_in, ..), _)| *ran_in == lane) {
            *parts.entry(slot).or_default().entry(ran.part(lane, slot)).or_default() += count;
        }
        parts
    }
}

/// Returns the parts of the arm that is nearest to what the slots ran: `default`, or the policy with most
/// decisions, and that of the override.
fn arm(ran: &Parts<'_>) -> Option<Vec<String>> {
    let most = |counts: &BTreeMap<String, u64>| {
        counts.iter().max_by_key(|(_, count)| **count).map(|(part, _)| part.clone())
    };
    let mut routes: BTreeMap<String, u64> = BTreeMap::new();
    for (part, count) in ran.iter().filter(|(slot, _)| **slot != OVERRIDE).flat_map(|(_, counts)| counts) {
        *routes.entry(part.clone()).or_default() += count;
    }
    let is_default =
        ran.iter().all(|(slot, counts)| most(counts).is_some_and(|part| part == default_of(slot)))
            && (!ran.contains_key("decode") || ran.contains_key(OVERRIDE));
    if is_default && routes.len() > 1 {
        return Some(vec!["default".to_owned()]);
    }
    let route = most(&routes)?;
    Some(std::iter::once(route).chain(ran.get(OVERRIDE).and_then(most)).collect())
}

/// Returns what a lane ran, if its arm does not run the same.
fn warning(lane: &str, parts: &[String], ran: &Parts<'_>, active: &BTreeSet<&str>) -> Option<String> {
    let of_slot = |slot: &str| match parts {
        [part] if part == "default" => default_of(slot).to_owned(),
        _ => parts.get(usize::from(slot == OVERRIDE)).cloned().unwrap_or_default(),
    };
    let is_whole = ran.iter().all(|(slot, counts)| counts.keys().all(|part| *part == of_slot(slot)));
    let only_active = active.iter().any(|slot| *slot != OVERRIDE && !ran.contains_key(slot));
    if is_whole && !only_active {
        return None;
    }
    let list = ran.iter().map(|(slot, counts)| {
        let mut counts: Vec<_> = counts.iter().collect();
        counts.sort_by_key(|(_, count)| Reverse(**count));
        let counts: Vec<_> = counts.iter().map(|(part, count)| format!("{part} ({count})")).collect();
        format!("{slot} {}", counts.join(" and "))
    });
    Some(format!(
        "the arm {lane}={} is not exactly what ran, because an arm has one policy for all slots; decisions of this lane: \
         {}",
        parts.join("+"),
        list.collect::<Vec<_>>().join(", ")
    ))
}

/// Returns the name of a built-in policy, or the file that a policy of one's own would have.
fn part_of_policy(name: &str) -> String {
    if by_name(name).is_some() { name.to_owned() } else { format!("./{name}.wasm") }
}

impl Ran {
    /// Returns what ran in the slot of a decision. The decision of a session or a pin does not tell the
    /// native mode of its slot.
    fn of(decision: &LoggedDecision) -> Option<Self> {
        let native = || match decision.decider.as_str() {
            "native" if decision.slot != OVERRIDE => decision.reason.clone(),
            _ => None,
        };
        let name = decision.policy.clone().or_else(native)?;
        let (digest, settings) = (decision.digest.clone(), decision.settings_digest.clone());
        Some(Self { name, digest, settings })
    }

    /// Returns the beginnings of the digests.
    fn content(&self) -> String {
        let short = |digest: &Option<String>| digest.iter().flat_map(|text| text.chars().take(12)).collect();
        let (digest, settings): (String, String) = (short(&self.digest), short(&self.settings));
        if settings.is_empty() { digest } else { format!("{digest} settings {settings}") }
    }

    /// Returns the policy as a part of `--arm`. The user has to name the file of a policy that is not built
    /// in, and of formulas, which the log does not contain.
    fn part(&self, lane: &str, slot: &str) -> String {
        if self.name == "formula" {
            let trial = if lane == "active" { String::new() } else { format!(".{lane}") };
            return format!("./{slot}{trial}{FORMULA_SUFFIX}");
        }
        if self.digest.is_some() { part_of_policy(&self.name) } else { self.name.clone() }
    }
}
