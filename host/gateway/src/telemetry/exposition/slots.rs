//! Metrics of slots and their policies. The slots hold the counters, so a decision does not look up labels.

use std::{fmt, sync::Arc};

use pointsman_policy_runtime::{
    LaneStatus, ManagerStatus, MemoryStatus, PartStatus, PolicyManager, SlotStatus, Usage,
};
use pointsman_routing::{CALL_BUCKETS_US, CallStats, Lane, Learning, Slot, SlotKind};
use pointsman_workers::ModelName;

use super::families::{Distribution, Families, Labels};

pub(super) fn encode(out: &mut Families<'_>, policies: &PolicyManager, learning: &Learning) -> fmt::Result {
    let status = policies.status();
    encode_generations(out, &status)?;
    encode_memory(out, &status)?;
    encode_info(out, &status)?;
    encode_trials(out, &status)?;
    let reloads = status.reloads.iter().map(|count| {
        (vec![("result", count.result.to_string()), ("reason", count.reason.to_string())], count.count)
    });
    out.counters("pointsman_policy_reloads", "Number of policy reloads by result and reason", reloads)?;
    let refused = status.reloads.iter().filter(|count| count.result == "refused").map(|count| count.count);
    out.counter("pointsman_policy_refusals", "Number of refused policy files", refused.sum())?;
    encode_calls(out, policies)?;
    encode_learning(out, policies, learning)?;
    encode_usage(out, &policies.usage())
}

fn encode_usage(out: &mut Families<'_>, usage: &Usage) -> fmt::Result {
    out.gauge("pointsman_policy_instances", "Number of policy instances", usage.instances)?;
    let help = "Highest memory of one policy instance so far in bytes";
    out.gauge("pointsman_policy_memory_peak_bytes", help, usage.memory_peak_bytes)?;
    let lookups = [("hit", usage.cache_hits), ("miss", usage.cache_misses)];
    let lookups = lookups.map(|(result, count)| (vec![("result", result.to_owned())], count));
    out.counters(
        "pointsman_policy_compile_cache",
        "Number of lookups in the compile cache by result",
        lookups,
    )
}

fn encode_generations(out: &mut Families<'_>, status: &ManagerStatus) -> fmt::Result {
    let slots = || status.slots.iter().map(|slot| (of_status(slot), slot));
    let generations = slots().map(|(labels, slot)| (labels, slot.generation.0));
    out.gauges("pointsman_policy_generation", "Number of the slot's active generation", generations)?;
    let open = slots().map(|(labels, slot)| (labels, u64::from(slot.breaker_open)));
    let help = "1 if the native fallback serves because the slot's policy failed, else 0";
    out.gauges("pointsman_policy_breaker_open", help, open)?;
    let not_run = |slot: &SlotStatus| slot.refusals.iter().filter(|refusal| refusal.in_force).count() as u64;
    let help =
        "Number of policies that the slot should run and does not, because they were refused or rolled back";
    out.gauges("pointsman_policy_not_run", help, slots().map(|(labels, slot)| (labels, not_run(slot))))?;
    let rollbacks = slots().map(|(labels, slot)| (labels, slot.rollbacks));
    out.counters("pointsman_policy_rollbacks", "Number of automatic rollbacks", rollbacks)
}

fn encode_memory(out: &mut Families<'_>, status: &ManagerStatus) -> fmt::Result {
    let each = |value: fn(&MemoryStatus) -> usize| {
        let slots = status.slots.iter().filter_map(|slot| Some((of_status(slot), slot.memory.as_ref()?)));
        slots.map(move |(labels, memory)| (labels, u64::try_from(value(memory)).unwrap_or(u64::MAX)))
    };
    let help = "Number of keys that the slot's policies keep";
    out.gauges("pointsman_policy_state_entries", help, each(|memory| memory.entries))?;
    let help = "Size of the keys and values that the slot's policies keep in bytes";
    out.gauges("pointsman_policy_state_bytes", help, each(|memory| memory.bytes))
}

fn encode_info(out: &mut Families<'_>, status: &ManagerStatus) -> fmt::Result {
    let info = status.slots.iter().flat_map(|slot| {
        let one = |lane: Lane, policy: &str, version: Option<&String>, parts: &[PartStatus]| {
            let digests: Vec<String> = parts.iter().map(|part| part.digest.short()).collect();
            let mut labels = of_status(slot);
            labels.extend([
                ("lane", lane.to_string()),
                ("policy", policy.to_owned()),
                ("version", version.cloned().unwrap_or_default()),
                ("digest", digests.join("+")),
            ]);
            (labels, 1_u64)
        };
        let active = one(Lane::Active, &slot.policy, slot.version.as_ref(), &slot.parts);
        let trials = trials(slot)
            .map(|(lane, trial)| one(lane, &trial.policy, trial.version.as_ref(), &trial.parts))
            .collect::<Vec<_>>();
        std::iter::once(active).chain(trials)
    });
    out.gauges("pointsman_policy_info", "1 for each policy that a slot runs, described by the labels", info)
}

fn encode_trials(out: &mut Families<'_>, status: &ManagerStatus) -> fmt::Result {
    let all = || {
        let slots = status.slots.iter();
        slots.flat_map(|slot| {
            trials(slot).map(move |(lane, trial)| (with_lane(of_status(slot), lane), lane, trial))
        })
    };
    let generations = all().map(|(labels, _, trial)| (labels, trial.generation.0));
    let help = "Number of the generation of a canary or shadow";
    out.gauges("pointsman_policy_trial_generation", help, generations)?;
    let shares = all().map(|(labels, _, trial)| (labels, trial.share));
    let help = "Share of requests, 0 to 1, that a canary or shadow takes part in";
    out.gauges("pointsman_policy_trial_share_ratio", help, shares)?;
    let shadows = status.slots.iter().flat_map(|slot| {
        let shadows = trials(slot).filter(|(lane, _)| *lane == Lane::Shadow);
        shadows.flat_map(|(_, trial)| {
            let LaneStatus { agree, disagree, failed, shed, .. } = trial;
            let counts = [("agree", *agree), ("disagree", *disagree), ("failed", *failed), ("shed", *shed)];
            counts.map(|(result, count)| {
                let mut labels = of_status(slot);
                labels.extend([("policy", trial.policy.to_string()), ("result", result.to_owned())]);
                (labels, count)
            })
        })
    });
    let help = "Number of decisions by whether the shadow would have decided the same; shed: it would have refused \
                the request";
    out.counters("pointsman_policy_shadow", help, shadows)
}

/// Writes the outcomes that learning policies got, and the results of the deliveries.
fn encode_learning(out: &mut Families<'_>, policies: &PolicyManager, learning: &Learning) -> fmt::Result {
    let counts = learning.counts().map(|(result, count)| (vec![("result", result.to_string())], count));
    let help = "Number of outcomes of decisions for policies that learn, by result";
    out.counters("pointsman_policy_outcomes", help, counts)?;
    let lanes = policies.slots().iter().flat_map(|slot| [(slot, Lane::Active), (slot, Lane::Canary)]);
    let batches = lanes.filter(|(slot, lane)| has_calls(slot.observed(*lane))).flat_map(|(slot, lane)| {
        let outcomes = slot.observed(lane).outcomes();
        outcomes
            .map(move |(outcome, count)| (with_outcome(of_slot(slot), lane, outcome), count))
            .collect::<Vec<_>>()
    });
    let help = "Number of batches of outcomes given to the slot's policies, by how the call ended";
    out.counters("pointsman_policy_observations", help, batches)
}

/// Writes the calls by outcome, and their durations.
fn encode_calls(out: &mut Families<'_>, policies: &PolicyManager) -> fmt::Result {
    let lanes = || {
        let each = |slot: &Arc<Slot>| Lane::ALL.map(|lane| (slot.clone(), lane));
        let lanes = policies.slots().iter().flat_map(each);
        lanes.filter(|(slot, lane)| *lane == Lane::Active || has_calls(slot.stats(*lane)))
    };
    let outcomes = lanes().flat_map(|(slot, lane)| {
        let outcomes = slot.stats(lane).outcomes();
        outcomes
            .map(|(outcome, count)| (with_outcome(of_slot(&slot), lane, outcome), count))
            .collect::<Vec<_>>()
    });
    let help = "Number of calls of the slot's policies by how they ended";
    out.counters("pointsman_policy_calls", help, outcomes)?;
    let times = lanes().map(|(slot, lane)| (with_lane(of_slot(&slot), lane), distribution(slot.stats(lane))));
    out.histograms("pointsman_policy_call_seconds", "Time of calls of the slot's policies in seconds", times)
}

fn distribution(stats: &CallStats) -> Distribution {
    let bounds = CALL_BUCKETS_US.iter().map(|micros| std::time::Duration::from_micros(*micros).as_secs_f64());
    let cumulative = stats.cumulative();
    let below = std::iter::once(0).chain(cumulative.iter().copied());
    let counts = cumulative.iter().zip(below).map(|(count, below)| count.saturating_sub(below));
    Distribution { sum: stats.time().as_secs_f64(), buckets: bounds.chain([f64::MAX]).zip(counts).collect() }
}

fn has_calls(stats: &CallStats) -> bool {
    stats.cumulative().last().is_some_and(|count| *count > 0)
}

fn trials(slot: &SlotStatus) -> impl Iterator<Item = (Lane, &LaneStatus)> {
    let canary = slot.canary.iter().map(|trial| (Lane::Canary, trial));
    canary.chain(slot.shadow.iter().map(|trial| (Lane::Shadow, trial)))
}

fn of_status(slot: &SlotStatus) -> Labels {
    labels(slot.slot, slot.model.as_deref())
}

fn of_slot(slot: &Slot) -> Labels {
    labels(slot.kind(), slot.model().map(ModelName::as_str))
}

/// Returns the labels of a slot. A slot for all models has no label `model`.
fn labels(kind: SlotKind, model: Option<&str>) -> Labels {
    let mut labels = vec![("slot", kind.to_string())];
    labels.extend(model.map(|model| ("model", model.to_owned())));
    labels
}

fn with_lane(mut labels: Labels, lane: Lane) -> Labels {
    labels.push(("lane", lane.to_string()));
    labels
}

fn with_outcome(labels: Labels, lane: Lane, outcome: &str) -> Labels {
    let mut labels = with_lane(labels, lane);
    labels.push(("outcome", outcome.to_owned()));
    labels
}
