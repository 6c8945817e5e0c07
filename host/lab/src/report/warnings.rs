//! Warnings for readers of a comparison.

use pointsman_workers::Role;

use super::{ArmReport, Comparison, PairDifference, Plan, RankBy, absent_facts, tied, too_few_seeds};
use crate::{fleet::Fleet, trace::Targets};

/// Returns the warnings.
pub(super) fn of(comparison: &Comparison, plan: &Plan<'_>) -> Vec<String> {
    let mut warnings = Vec::new();
    if comparison.skipped_lines > 0 {
        warnings.push(format!(
            "{} malformed lines of the trace were left out; without --skip-bad, an error names the first",
            comparison.skipped_lines
        ));
    }
    warnings.extend(plan.trace.notes.iter().cloned());
    warnings.extend(plan.fleet.assumption());
    let own = plan.trace.requests.iter().filter(|request| request.targets != Targets::default()).count();
    if own > 0 {
        warnings.push(format!(
            "{own} requests have latency targets of their own, which count instead of --slo-ttft-ms and --slo-itl-ms"
        ));
    }
    if comparison.seeds < plan.seeds {
        let (over, planned) = (comparison.seeds, plan.seeds);
        warnings.push(format!("interrupted: {over} of {planned} seeds were completed"));
    }
    for pair in &comparison.pairs {
        warnings.extend(equal(pair, comparison));
    }
    if comparison.seeds < 2 {
        warnings.push("one seed: differences may be chance; use --seeds 5".to_owned());
    } else if comparison.arms.iter().all(|arm| arm.figures.ttft_mean.plus_minus == Some(0.0)) {
        let advice = vary_runs(comparison);
        warnings.push(format!("all seeds gave equal runs, so the intervals say nothing: {advice}"));
    }
    warnings.extend(no_difference(comparison, plan.rank_by));
    warnings.extend(too_few_seeds(&comparison.ranking, plan.rank_by));
    for arm in &comparison.arms {
        warnings.extend(of_arm(arm));
        warnings.extend(idle_roles(arm, plan.fleet));
    }
    for arm in plan.arms {
        warnings.extend(absent_facts::of(arm, plan.trace, plan.fleet));
    }
    warnings
}

/// Says how the runs of the seeds become different.
pub(crate) fn vary_runs(comparison: &Comparison) -> &'static str {
    if comparison.jitter_ms > 0.0 {
        "the load is too small for requests to meet, so that moved arrivals change nothing; use a higher --speed"
    } else {
        "use --jitter-ms of `compare`, which moves arrivals at random"
    }
}

fn of_arm(arm: &ArmReport) -> Vec<String> {
    let mut warnings = Vec::new();
    let label = &arm.label;
    if arm.figures.fell_back.mean > 0.0 {
        let count = arm.figures.fell_back.mean;
        let reasons = arm.events.fallbacks.iter().map(|(reason, calls)| format!("{reason} {calls:.1}"));
        let reasons = reasons.collect::<Vec<_>>().join(", ");
        warnings.push(format!(
            "\"{label}\": its policy abstained or failed for {count:.1} requests a run, and the native fallback chose \
             (calls a run: {reasons}); `pointsman policy test` shows what it answers"
        ));
    }
    for (slot, decisions) in &arm.events.one_sided {
        warnings.push(format!(
            "\"{label}\": the last {decisions} decisions of its slot {slot} all chose one engine while others got \
             nothing; a policy balances when it reads the load (`active-requests`) and breaks ties by the call's seed"
        ));
    }
    // For a slot whose last decisions all chose one engine, that warning says more than the shares.
    let others = arm.workers.iter().filter(|one| !arm.events.one_sided.contains_key(&one.slot()));
    for one in others.filter(|one| one.one_gets_most()) {
        let (workers, role) = (one.workers.len(), one.role.as_str());
        warnings.push(format!(
            "\"{label}\": one of {workers} {role} workers served {:.0} % of the requests; more than {:.0} %, which is \
             (1 + 1/{workers}) / 2, counts as most of them. A policy that reads the load spreads them",
            one.busiest.mean * 100.0,
            one.most() * 100.0,
        ));
    }
    let (overloaded, runs) = (arm.events.overloaded_runs, arm.figures.span_s.values.len());
    if overloaded * 2 > runs {
        warnings.push(format!(
            "\"{label}\": the fleet does not keep up with the arrivals in {overloaded} of {runs} runs: requests wait \
             longer and longer for their first token, so that latencies grow with the trace; compare at less load \
             (--speed) or with more engines"
        ));
    }
    if arm.events.withdrawn_runs > 0 {
        let runs = arm.events.withdrawn_runs;
        warnings.push(format!(
            "\"{label}\": in {runs} runs its policies exceeded their CPU time again and again, and the rest went on \
             without them; `pointsman policy bench` measures their calls"
        ));
    }
    if arm.figures.stranded.mean > 0.0 {
        let count = arm.figures.stranded.mean;
        warnings.push(format!(
            "\"{label}\": {count:.1} handoffs a run kept their blocks until the lease ended, because no decode \
             engine read them; `lease_s` of [links] sets its length"
        ));
    }
    warnings.extend(lost_requests(arm));
    warnings
}

/// Counts the requests that did not complete, by what became of them.
fn lost_requests(arm: &ArmReport) -> impl Iterator<Item = String> {
    let infinite = "they count as infinite in quantiles of TTFT and E2E, and means leave them out";
    let lost = [
        ("refused", arm.figures.shed.mean, infinite),
        ("without a worker", arm.figures.no_worker.mean, infinite),
        ("failed by their engines", arm.figures.failed.mean, infinite),
        (
            "too large for the KV blocks of every engine",
            arm.figures.too_large.mean,
            "no arm can serve them, and latencies leave them out; check `blocks` of the fleet file",
        ),
    ];
    let label = &arm.label;
    lost.into_iter().filter(|(_, count, _)| *count > 0.0).map(move |(what, count, latencies)| {
        format!("\"{label}\": {count:.1} requests a run were {what}; {latencies}")
    })
}

/// Names the roles whose engines served no request although others did. With a pair that is up, a
/// decode-override policy keeps a request on one worker; one that reads worker facts names the decode worker.
fn idle_roles(arm: &ArmReport, fleet: &Fleet) -> Vec<String> {
    let engines = |role: Role| {
        fleet.engines.iter().filter(|group| group.role == role).map(|group| group.count).sum::<u32>()
    };
    let is_idle = |role: &Role| {
        engines(*role) > 0 && !arm.workers.is_empty() && arm.workers.iter().all(|served| served.role != *role)
    };
    let has_pair = engines(Role::Prefill) > 0 && engines(Role::Decode) > 0;
    let idle = [Role::Aggregated, Role::Prefill, Role::Decode].into_iter().filter(is_idle);
    let warning = |role: Role| {
        let why = match role == Role::Aggregated && has_pair {
            true if fleet.routing.enforce_disagg => ": `enforce_disagg` excludes them",
            true => {
                ": while a prefill and a decode engine are up, only a decode-override policy that reads no worker facts, \
                 and `local_fallback`, send requests there"
            }
            false => "",
        };
        format!("\"{}\": its {} {} engines served no request{why}", arm.label, engines(role), role.as_str())
    };
    idle.map(warning).collect()
}

/// Says that two arms made equal decisions, and names the setting that had no effect.
fn equal(pair: &PairDifference, comparison: &Comparison) -> Option<String> {
    if pair.requests.mean > 0.0 {
        return None;
    }
    let (first, second) = (&pair.first, &pair.second);
    let parts = |label: &str| {
        comparison.arms.iter().find(|arm| arm.label == label).map_or("", |arm| arm.parts.as_str())
    };
    let (a, b) = (parts(first), parts(second));
    Some(if a != b && without_settings(a) == without_settings(b) {
        format!(
            "\"{first}\" and \"{second}\" made equal decisions: the setting had no effect here ({a} and {b})"
        )
    } else {
        format!(
            "\"{first}\" and \"{second}\" made equal decisions for every request: their difference had no \
             effect here"
        )
    })
}

/// Returns an arm such as `a@{"x": 1}+b` without its settings. The settings of a part are the JSON object
/// after its `@`, up to the closing brace.
fn without_settings(parts: &str) -> String {
    let mut names = String::new();
    let (mut depth, mut in_settings) = (0_u32, false);
    for letter in parts.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            '@' if depth == 0 => in_settings = true,
            '+' if depth == 0 => in_settings = false,
            _ => {}
        }
        if !in_settings {
            names.push(letter);
        }
    }
    names
}

/// Names the arms that do not differ measurably from the one with the best mean.
fn no_difference(comparison: &Comparison, rank_by: RankBy) -> Option<String> {
    let best = comparison.ranking.first()?;
    let arms: Vec<String> = tied(&comparison.ranking).map(|ranked| format!("\"{}\"", ranked.label)).collect();
    let (arms, figure, first) = (arms.join(", "), rank_by.name(), &best.label);
    (!arms.is_empty() && comparison.seeds > 1).then(|| {
        format!(
            "no difference found by {figure} between \"{first}\" and {arms}: the 95 % interval of the difference \
             includes 0"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_left_out_of_the_names_of_parts() {
        assert_eq!(without_settings(r#"a@{"x": {"y": "+"}}+./b.wasm@{}+c"#), "a+./b.wasm+c");
        assert_eq!(without_settings("round-robin"), "round-robin");
    }
}
