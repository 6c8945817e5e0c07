//! Families of slots and their policies. Counters live in the slots: a decision looks up no label.

use std::fmt::Write as _;

use pointsman_policy_runtime::{LaneStatus, ManagerStatus, MemoryStatus, SlotStatus, Usage};
use pointsman_routing::{CALL_BUCKETS_US, Digest, Lane, Slot, SlotKind};
use pointsman_workers::ModelName;

use super::{counter, family, gauge};
use crate::state::State;

pub(super) fn policies(out: &mut String, app: &State) {
    let status = app.policies.status();
    generations(out, &status);
    trials(out, &status);
    let reloads = status.reloads.iter();
    let reloads = reloads
        .map(|count| (format!("result=\"{}\",reason=\"{}\"", count.result, count.reason), count.count));
    counter(out, "pointsman_policy_reloads", "Reloads by how they ended", &reloads.collect::<Vec<_>>());
    calls(out, app);
    learning(out, app);
    usage(out, &app.policies.usage());
}

fn usage(out: &mut String, usage: &Usage) {
    let one = |value: u64| [(String::new(), value)];
    gauge(out, "pointsman_policy_instances", "Instances of all policies", &one(usage.instances));
    let peak = one(usage.memory_peak_bytes);
    gauge(out, "pointsman_policy_memory_peak_bytes", "Most memory that one instance ever had", &peak);
    let cache = [("hit", usage.cache_hits), ("miss", usage.cache_misses)];
    let cache = cache.map(|(result, count)| (format!("result=\"{result}\""), count));
    counter(out, "pointsman_policy_compile_cache", "Policies looked for in the disk cache", &cache);
}

fn generations(out: &mut String, status: &ManagerStatus) {
    let each = |value: &dyn Fn(&SlotStatus) -> u64| -> Vec<(String, u64)> {
        status.slots.iter().map(|slot| (of(slot), value(slot))).collect()
    };
    gauge(out, "pointsman_policy_generation", "The generation in force", &each(&|slot| slot.generation.0));
    let open = each(&|slot| u64::from(slot.breaker_open));
    gauge(out, "pointsman_policy_breaker_open", "Whether the fallback serves because a policy failed", &open);
    counter(out, "pointsman_policy_rollbacks", "Automatic rollbacks", &each(&|slot| slot.rollbacks));
    let remembered = |value: &dyn Fn(&MemoryStatus) -> usize| -> Vec<(String, u64)> {
        let slots = status.slots.iter().filter_map(|slot| Some((of(slot), slot.memory.as_ref()?)));
        slots.map(|(labels, state)| (labels, u64::try_from(value(state)).unwrap_or(u64::MAX))).collect()
    };
    let entries = remembered(&|state| state.entries);
    gauge(out, "pointsman_policy_state_entries", "Keys that a slot's policies remember", &entries);
    let bytes = remembered(&|state| state.bytes);
    gauge(
        out,
        "pointsman_policy_state_bytes",
        "Bytes that a slot's policies remember, as its quota counts",
        &bytes,
    );
    let mut info = Vec::new();
    for slot in &status.slots {
        let mut add = |mode: Lane, policy: &str, version: Option<&String>, digest: Option<Digest>| {
            let version = version.map_or("", String::as_str);
            let digest = digest.map(|digest| digest.short()).unwrap_or_default();
            let labels = format!(
                "{},mode=\"{mode}\",policy=\"{}\",version=\"{}\",digest=\"{digest}\"",
                of(slot),
                escaped(policy),
                escaped(version),
            );
            info.push((labels, 1));
        };
        add(Lane::Active, &slot.policy, slot.version.as_ref(), slot.digest);
        for (mode, lane) in lanes(slot) {
            add(mode, &lane.policy, lane.version.as_ref(), lane.digest);
        }
    }
    gauge(out, "pointsman_policy_info", "What a slot runs", &info);
}

fn trials(out: &mut String, status: &ManagerStatus) {
    let all = || status.slots.iter().flat_map(|slot| lanes(slot).map(move |(mode, lane)| (slot, mode, lane)));
    let generation =
        all().map(|(slot, mode, lane)| (format!("{},mode=\"{mode}\"", of(slot)), lane.generation.0));
    gauge(
        out,
        "pointsman_policy_trial_generation",
        "The generation of a canary or shadow",
        &generation.collect::<Vec<_>>(),
    );
    let ppm = |share: f64| (share * 1e6).round() as u64;
    let share = all().map(|(slot, mode, lane)| (format!("{},mode=\"{mode}\"", of(slot)), ppm(lane.share)));
    gauge(
        out,
        "pointsman_policy_trial_share_ppm",
        "Share of requests that a canary or shadow takes part in",
        &share.collect::<Vec<_>>(),
    );
    let shadows = all().filter(|(_, mode, _)| *mode == Lane::Shadow);
    let shadows = shadows.flat_map(|(slot, _, lane)| {
        let counts = [("agree", lane.agree), ("disagree", lane.disagree), ("failed", lane.failed)];
        counts.map(|(result, count)| {
            let policy = escaped(&lane.policy);
            (format!("{},policy=\"{policy}\",result=\"{result}\"", of(slot)), count)
        })
    });
    let shadows = shadows.collect::<Vec<_>>();
    counter(
        out,
        "pointsman_policy_shadow",
        "Decisions by whether the shadow would have made the same",
        &shadows,
    );
}

/// What learners are told, and how that ends.
fn learning(out: &mut String, app: &State) {
    let counts = app.learning.counts().map(|(result, count)| (format!("result=\"{result}\""), count));
    counter(out, "pointsman_policy_outcomes", "Outcomes of decisions for policies that learn", &counts);
    let mut batches = Vec::new();
    for slot in app.policies.slots() {
        for mode in [Lane::Active, Lane::Canary] {
            let stats = slot.observed(mode);
            if stats.cumulative().last().is_some_and(|count| *count > 0) {
                let line = |(outcome, count): (&str, u64)| {
                    (format!("{},mode=\"{mode}\",outcome=\"{outcome}\"", of_slot(slot)), count)
                };
                batches.extend(stats.outcomes().map(line));
            }
        }
    }
    let help = "Batches of outcomes that a slot's policies were given, by how it ended";
    counter(out, "pointsman_policy_observations", help, &batches);
}

/// Calls by outcome, and their times.
fn calls(out: &mut String, app: &State) {
    let lanes = || {
        let each = |slot: &std::sync::Arc<Slot>| Lane::ALL.map(|mode| (slot.clone(), mode));
        app.policies.slots().iter().flat_map(each).filter(|(slot, mode)| {
            *mode == Lane::Active || slot.stats(*mode).cumulative().last().is_some_and(|count| *count > 0)
        })
    };
    let mut outcomes = Vec::new();
    for (slot, mode) in lanes() {
        for (outcome, count) in slot.stats(mode).outcomes() {
            outcomes.push((format!("{},mode=\"{mode}\",outcome=\"{outcome}\"", of_slot(&slot)), count));
        }
    }
    counter(out, "pointsman_policy_calls", "Times a slot's policies were asked, by how it ended", &outcomes);
    let name = "pointsman_policy_call_seconds";
    family(out, name, "histogram", "Time of asking a slot's policies", "", &[]);
    for (slot, mode) in lanes() {
        let (stats, labels) = (slot.stats(mode), format!("{},mode=\"{mode}\"", of_slot(&slot)));
        let cumulative = stats.cumulative();
        for (bound, count) in CALL_BUCKETS_US.iter().zip(&cumulative) {
            let seconds = *bound as f64 / 1e6;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{seconds}\"}} {count}");
        }
        let count = cumulative.last().copied().unwrap_or(0);
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_count{{{labels}}} {count}");
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", stats.time().as_secs_f64());
    }
}

fn lanes(slot: &SlotStatus) -> impl Iterator<Item = (Lane, &LaneStatus)> {
    let canary = slot.canary.iter().map(|lane| (Lane::Canary, lane));
    canary.chain(slot.shadow.iter().map(|lane| (Lane::Shadow, lane)))
}

fn of(slot: &SlotStatus) -> String {
    labels(slot.slot, slot.model.as_deref())
}

fn of_slot(slot: &Slot) -> String {
    labels(slot.kind(), slot.model().map(ModelName::as_str))
}

/// A slot of all models has no label `model`.
fn labels(kind: SlotKind, model: Option<&str>) -> String {
    let model = model.map(|model| format!(",model=\"{}\"", escaped(model))).unwrap_or_default();
    format!("slot=\"{kind}\"{model}")
}

/// A label's value: names of policies and models are not ours.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
