//! Compares the record of a scenario with its requirements.

use std::{collections::BTreeMap, fmt::Display, time::Duration};

use super::{
    record::{PhaseRecord, Record},
    scenario::{Change, Figure, Growth, Happened, Hold, Limit},
};
use crate::{
    load::{Answer, End, latency_ms},
    metrics_text, sh,
    stats::{median, quantile, quantile_bounds, sorted},
    table::Checks,
};

/// Prints a row for each requirement, and figures that help to explain it.
pub(super) fn judge(holds: &[Hold], record: &Record, checks: &mut Checks) {
    for phase in &record.phases {
        let answers = || phase.counted.iter();
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| latency_ms(answers(), share));
        let shown = format!("{}: {p50:.1} / {p99:.1} / {p999:.1} ms", phase.counted.len());
        checks.show(&format!("{}: requests, p50 / p99 / p99.9", phase.name), shown);
    }
    for hold in holds {
        one(hold, record, checks);
    }
    for (leg, count) in
        record.metrics.iter().flat_map(|text| metrics_text::by_label(text, "pointsman_retries_total", "leg"))
    {
        checks.show(&format!("retries: {leg}"), count);
    }
    record.problems.iter().for_each(|problem| sh::status(&format!("neither end nor error: {problem}")));
}

fn one(hold: &Hold, record: &Record, checks: &mut Checks) {
    match hold {
        Hold::Happened(ends) => ends.iter().for_each(|end| happened(*end, record, checks)),
        Hold::NoneLost => lost(record, checks),
        Hold::Errors(share) => errors(*share, record, checks),
        Hold::ErrorsExplained(seconds) => explained(*seconds, record, checks),
        Hold::Slowest(limit) => {
            let slowest = record.answers().map(Answer::took).max().unwrap_or_default();
            let passed = slowest < Duration::from_secs(*limit);
            checks.check(&format!("slowest request (limit {limit} s)"), seconds(slowest), passed);
        }
        Hold::NoBookings(seconds) => bookings(*seconds, record, checks),
        Hold::EnginesZero(counters) => {
            counters.iter().for_each(|pointer| {
                checks.none(&format!("engines: {pointer}"), record.engines_sum(pointer));
            });
            checks.check("engines at the end", record.states.len(), !record.states.is_empty());
        }
        Hold::EveryFault => {
            let fired = record.fired.iter().flatten();
            fired.for_each(|(kind, count)| {
                checks.check(&format!("faults injected: {kind}"), count, *count > 0)
            });
            checks.check("faults were injected", record.fired.is_some(), record.fired.is_some());
        }
        Hold::HandoffsKept | Hold::HandoffsPulled => handoffs(hold, record, checks),
        Hold::Noticed(limit) => noticed(*limit, record, checks),
        Hold::Goodput(share) => {
            let Some((first, last)) = record.phases.first().zip(record.phases.last()) else { return };
            let (peak, goodput) = (goodput(first), goodput(last));
            let shown = format!("{goodput:.1}/s = {:.0} %", goodput / peak * 100.0);
            let what = format!("answers a second, of {peak:.1} at the peak (limit {:.0} %)", share * 100.0);
            checks.check(&what, shown, peak > 0.0 && goodput >= peak * share);
        }
        Hold::Refusals(status, limit) => refusals(*status, *limit, record, checks),
        Hold::Recovers(limit) => {
            let shown = record.recovered.map_or("never".to_owned(), seconds);
            let passed = record.recovered.is_some_and(|took| took <= Duration::from_secs(*limit));
            checks.check(&format!("recovery (limit {limit} s)"), shown, passed);
        }
        Hold::Growth(growth) => growth.judge(record, checks),
        Hold::Applied(share) => applied(*share, record, checks),
        Hold::NearSwaps(ratio) => near_swaps(*ratio, record, checks),
        Hold::Share(load, expected, error) => share_of(load, *expected, *error, record, checks),
        Hold::FirstTokens(load, ratio) => first_tokens(load, *ratio, record, checks),
        Hold::Heals(limit) => heals(*limit, record, checks),
    }
}

fn errors(share: f64, record: &Record, checks: &mut Checks) {
    let (all, errors) = (record.answers().count(), count(record, |end| *end == End::OneError));
    let what = format!("requests that ended in one valid error (limit {:.0} %)", share * 100.0);
    checks.check(&what, errors, number(errors) <= number(all) * share);
}

fn bookings(seconds: u64, record: &Record, checks: &mut Checks) {
    for (number, booked) in (1..).zip(&record.booked) {
        checks.none(&format!("gateway {number}: bookings left after {seconds} s"), *booked);
    }
    checks.check("gateways at the end", record.booked.len(), !record.booked.is_empty());
}

fn handoffs(hold: &Hold, record: &Record, checks: &mut Checks) {
    let counted = |result| record.metric("pointsman_handoffs_total", &[("result", result)]);
    if matches!(hold, Hold::HandoffsPulled) {
        // Both engines of a pull count it.
        let (complete, pulled) = (counted("complete"), record.engines_sum("/handoffs/pulled") as f64 / 2.0);
        let passed = complete == pulled && complete > 0.0;
        return checks.check("handoffs committed, pulled", format!("{complete}, {pulled}"), passed);
    }
    for reason in ["lost_no_decode_worker", "lost_prefill_died"] {
        let lost = counted(reason);
        checks.check(&format!("committed handoffs: {reason}"), lost, lost == 0.0);
    }
}

fn share_of(load: &str, expected: f64, error: f64, record: &Record, checks: &mut Checks) {
    let complete =
        record.phases.iter().flat_map(|phase| &phase.counted).filter(|one| one.end == End::Complete);
    // An output token has the weight two. The weight of the short prompts is negligible.
    let cost = |answer: &Answer| 2.0 * f64::from(answer.tokens) + 8.0;
    let (mut own, mut all) = (0.0, 0.0);
    for answer in complete {
        all += cost(answer);
        own += if *answer.load == *load { cost(answer) } else { 0.0 };
    }
    let share = own / all;
    let shown = format!("{:.1} % (of {:.1} %)", share * 100.0, expected * 100.0);
    let what = format!("share of the tokens of `{load}` (limit ±{:.0} %)", error * 100.0);
    checks.check(&what, shown, (share - expected).abs() <= error);
}

fn first_tokens(load: &str, ratio: f64, record: &Record, checks: &mut Checks) {
    let p99 = |phase: &PhaseRecord| {
        let own = phase.counted.iter().filter(|answer| *answer.load == *load);
        let times = own.filter_map(|answer| Some(answer.ttft?.as_secs_f64() * 1e3));
        quantile(&sorted(times.collect()), 0.99)
    };
    let Some((first, last)) = record.phases.first().zip(record.phases.last()) else { return };
    let (before, after) = (p99(first), p99(last));
    let shown = format!("{before:.0} / {after:.0} ms = {:.2}", after / before);
    let what = format!("p99 TTFT of `{load}`, {} / {} (limit {ratio})", first.name, last.name);
    checks.check(&what, shown, after <= before * ratio);
}

fn count(record: &Record, fits: impl Fn(&End) -> bool) -> usize {
    record.answers().filter(|answer| fits(&answer.end)).count()
}

fn number(count: usize) -> f64 {
    count as f64
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

fn happened(end: Happened, record: &Record, checks: &mut Checks) {
    let (what, fits): (_, fn(&End) -> bool) = match end {
        Happened::Complete => ("whole answers and complete streams", |end| *end == End::Complete),
        Happened::Refused => ("malformed bodies refused", |end| *end == End::Refused),
        Happened::Left => ("clients that disconnected", |end| matches!(end, End::Left(_))),
    };
    let count = count(record, fits);
    checks.check(what, count, count > 0);
}

/// Checks the number of requests that have neither an end nor an error. Requests that a killed gateway cut
/// off are shown separately.
fn lost(record: &Record, checks: &mut Checks) {
    let neither = record.answers().filter(|answer| answer.end == End::Neither);
    let killed = |answer: &&Answer| {
        record.gateway_kills.get(&answer.instance).is_some_and(|kill| answer.ended >= *kill)
    };
    let (killed, lost): (Vec<&Answer>, Vec<_>) = neither.partition(killed);
    checks.none("requests with neither end nor one valid error", lost.len() as u64);
    if !record.gateway_kills.is_empty() {
        checks.show("requests that a killed gateway took with it", killed.len());
    }
}

fn explained(limit: u64, record: &Record, checks: &mut Checks) {
    let limit = Duration::from_secs(limit);
    let explains = |answer: &&Answer| {
        record.engine_kills.iter().any(|kill| (*kill..*kill + limit).contains(&answer.ended))
    };
    let errors = record.answers().filter(|answer| answer.end == End::OneError);
    let (explained, others): (Vec<&Answer>, Vec<_>) = errors.partition(explains);
    checks.show(&format!("errors within {limit:?} after an engine was killed"), explained.len());
    checks.none("errors without such a reason", others.len() as u64);
}

fn noticed(limit: f64, record: &Record, checks: &mut Checks) {
    let left: Vec<&(String, u64)> = record
        .answers()
        .filter_map(|answer| match &answer.end {
            End::Left(left) => left.as_ref(),
            _ => None,
        })
        .collect();
    let took = |(id, at): &&(String, u64)| Some(record.disconnects.get(id)?.saturating_sub(*at));
    let took = sorted(left.iter().filter_map(took).map(|nanos| nanos as f64 / 1e6).collect());
    checks.check("clients that disconnected after the first token", left.len(), !left.is_empty());
    checks.none("of these, decode legs that were not stopped", (left.len() - took.len()) as u64);
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&took, share));
    let what = format!("disconnect to notice at the engine, p50 / p99 (limit {limit} ms)");
    checks.check(&what, format!("{p50:.1} / {p99:.1} ms"), p99 < limit);
}

/// Returns the number of complete answers a second.
pub(super) fn goodput(phase: &PhaseRecord) -> f64 {
    let served = phase.counted.iter().filter(|answer| answer.end == End::Complete).count();
    number(served) / phase.seconds
}

fn refusals(status: u16, limit: f64, record: &Record, checks: &mut Checks) {
    let Some(phase) = record.phases.last() else { return };
    let all = || phase.counted.iter().chain(&phase.others);
    let is_refusal = |answer: &&Answer| answer.status == status && answer.end == End::OneError;
    let refused = || all().filter(is_refusal);
    checks.check(&format!("requests refused with {status}"), refused().count(), refused().count() > 0);
    let took = sorted(refused().map(|answer| (answer.ended - answer.sent).as_secs_f64() * 1e3).collect());
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&took, share));
    let what = format!("refusals, p50 / p99 (limit {limit} ms)");
    checks.check(&what, format!("{p50:.2} / {p99:.2} ms"), p99 < limit);
    let others = all().filter(|answer| answer.failed() && !is_refusal(answer)).count();
    checks.none("requests with another end", others as u64);
}

impl Growth {
    fn judge(&self, record: &Record, checks: &mut Checks) {
        let readings = record.phases.last().map_or(&[][..], |phase| &phase.readings);
        let of = |from: f64, read: &dyn Fn(&super::record::Reading) -> f64| {
            let until = from + self.window.max(0.02);
            let inside = readings.iter().filter(|(at, _)| (from..=until).contains(at));
            median(inside.map(|(_, reading)| read(reading)).collect())
        };
        let last = 1.0 - self.window.max(0.02);
        let figure = |reading: &super::record::Reading| reading.figure(self.figure);
        let (before, after) = (of(self.from, &figure), of(last, &figure));
        let (grown, limit, shown) = match self.limit {
            Limit::Share(limit) => {
                let grown = after / before - 1.0;
                (grown, limit, format!("{before:.1} / {after:.1} MB = {:+.1} %", grown * 100.0))
            }
            Limit::Count(limit) => (after - before, limit, format!("{before:.0} / {after:.0}")),
        };
        let place = format!("from {:.0} % of the time to its end", self.from * 100.0);
        // A comparison with NaN is false, so the check fails if there are no readings.
        checks.check(&format!("{:?}, {place} (limit +{limit})", self.figure), shown, grown <= limit);
        if self.figure == Figure::Threads {
            let names = readings.iter().flat_map(|(_, reading)| reading.threads.keys());
            for name in names.collect::<std::collections::BTreeSet<_>>() {
                let named = |reading: &super::record::Reading| {
                    f64::from(reading.threads.get(name).copied().unwrap_or_default())
                };
                let (before, after) = (of(self.from, &named), of(last, &named));
                if before != after {
                    sh::print(&format!("threads `{name}`: {before} / {after}"));
                }
            }
        }
    }
}

fn applied(share: f64, record: &Record, checks: &mut Checks) {
    let mut changed = BTreeMap::<&str, (u64, f64)>::new();
    for (change, count) in &record.changes {
        let (what, metric, label) = match change {
            Change::Policy(_) => ("policies", "pointsman_policy_reloads_total", ("result", "installed")),
            Change::Certificate => ("certificates", "pointsman_tls_reloads_total", ("outcome", "applied")),
            other => {
                checks.show(&format!("changes: {other:?}"), count);
                continue;
            }
        };
        let row = changed.entry(what).or_insert_with(|| (0, record.metric(metric, &[label])));
        row.0 += count;
    }
    for (what, (changed, applied)) in changed {
        let wanted = (changed as f64 * share).min(changed as f64 - 1.0);
        let shown = format!("{applied} of {changed}");
        checks.check(
            &format!("{what} applied, of the changes (at least {wanted:.0})"),
            shown,
            applied >= wanted,
        );
    }
    checks.check("changes", record.changes.values().sum::<u64>(), !record.changes.is_empty());
}

fn near_swaps(limit: f64, record: &Record, checks: &mut Checks) {
    let delays = sorted(record.decisions.delays(&record.renames));
    checks.check("swaps seen in receipts", delays.len(), !delays.is_empty());
    let [p50, most] = [0.5, 1.0].map(|share| quantile(&delays, share) / 1e3);
    checks.show("rename to first decision, p50 / max", format!("{p50:.1} / {most:.1} ms"));
    let (near, rest) = record.decisions.near_a_swap();
    let row = |what: &str, all: &[f64], checks: &mut Checks| {
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| quantile(all, share));
        let shown = format!("{p50:.1} / {p99:.1} / {p999:.1} µs");
        checks.show(&format!("{} {what}, p50 / p99 / p99.9", all.len()), shown);
        p999
    };
    let ratio = row("decisions near a swap", &near, checks) / row("other decisions", &rest, checks);
    let what = format!("p99.9 near a swap over that of the others (limit {limit})");
    checks.check(&what, format!("{ratio:.2}"), ratio <= limit);
    let (low, high) = quantile_bounds(&rest, 0.999);
    checks.show("two standard deviations around the latter", format!("{low:.1} to {high:.1} µs"));
}

fn heals(limit: u64, record: &Record, checks: &mut Checks) {
    let spread = |times: &[f64]| {
        let times = sorted(times.to_vec());
        format!("{}: {:.2} / {:.2} s", times.len(), median(times.clone()), quantile(&times, 1.0))
    };
    for (fault, times) in &record.notices {
        // The gateway notices a silent network only when an answer to a ping is overdue.
        let limit = if fault == "NetworkToNats" { 30 } else { limit };
        let passed = times.iter().all(|took| *took <= limit as f64);
        checks.check(&format!("{fault}: noticed, p50 / max (limit {limit} s)"), spread(times), passed);
    }
    for (fault, times) in &record.heals {
        let passed = times.iter().all(|took| *took <= limit as f64);
        checks.check(&format!("{fault}: whole again, p50 / max (limit {limit} s)"), spread(times), passed);
    }
    checks.check("kinds of faults", record.heals.len(), !record.heals.is_empty());
    all_none("faults after which something was not whole or not noticed", &record.not_healed, checks);
}

fn all_none(what: &str, problems: &[impl Display], checks: &mut Checks) {
    checks.none(what, problems.len() as u64);
    problems.iter().for_each(|problem| sh::status(&problem.to_string()));
}
