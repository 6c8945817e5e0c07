//! Engines that misbehave in about eighty ways, on every leg, next to healthy engines. Requests must end in
//! time, with a whole answer or one error. No answer may reach another request, and a worker that recovers
//! must serve again.

use std::{collections::BTreeMap, path::Path, time::Duration};

use futures_util::future::try_join_all;

use crate::{
    fleet::{self, Fleet},
    metrics_text::sum_with,
    proc, sh,
    table::{Checks, columns},
};

mod cases;
mod group;
mod proxy;

use group::{Group, Row};

/// Maximum resident memory of the gateway, megabytes.
const MEMORY_MB: f64 = 700.0;

const CONFIG: &str = r#"
[timeouts]
request = "10s"
head = "1s"
prefill_head = "1s"
whole_head = "1s"
event_idle = "700ms"
abort = "500ms"
[probe]
interval = "300ms"
timeout = "300ms"
"#;

/// The legs: name in the table, and dialect and role of the worker that misbehaves.
const LEGS: [(&str, [&str; 2]); 6] = [
    ("aggregated (vLLM)", ["vllm", "aggregated"]),
    ("aggregated (SGLang)", ["sglang", "aggregated"]),
    ("prefill (vLLM)", ["vllm", "prefill"]),
    ("decode (vLLM)", ["vllm", "decode"]),
    ("prefill (SGLang)", ["sglang", "prefill"]),
    ("decode (SGLang)", ["sglang", "decode"]),
];

/// Kinds in which whole processes are stopped or killed.
const STOPPED: &str = "the process is stopped (SIGSTOP) and goes on";
const KILLED: &str = "the process is killed (SIGKILL) and restarts";
const OTHER_MODEL: &str = "the process restarts with another model";

/// Rows by kind and leg.
type Rows = BTreeMap<(usize, &'static str), (String, Row)>;

/// Runs the kinds whose names contain a text.
pub(super) async fn run(only: &str, bin: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-drill-").tempdir()?;
    let starting =
        (1..).zip(LEGS).map(|(number, (name, kind))| Group::start(bin, dir.path(), number, name, kind));
    let groups = try_join_all(starting).await?;
    let workers: Vec<String> = groups.iter().flat_map(|group| group.workers.clone()).collect();
    let fleet = fleet::gateway(bin, dir.path(), CONFIG, &workers).await?;
    let wanted = |name: &str| name.contains(only);
    let running = groups.into_iter().map(|group| run_group(group, &fleet, bin, dir.path(), &wanted));
    let rows: Rows = try_join_all(running).await?.into_iter().flatten().collect();
    report(&rows, checks);
    checks.none("bookings left", fleet.booked(Duration::from_secs(15)).await?);
    let metrics = fleet.metrics().await?;
    let lost = |result| sum_with(&metrics, "pointsman_handoffs_total", &[("result", result)]);
    let dropped = lost("lost_no_decode_worker");
    checks.check("committed handoffs that the gateway dropped", dropped, dropped == 0.0);
    checks.show("committed handoffs whose prefill engine was killed", lost("lost_prefill_died"));
    let peak = proc::peak_mb(fleet.gateway.pid())?;
    checks.check(&format!("peak memory (limit {MEMORY_MB} MB)"), format!("{peak:.0} MB"), peak <= MEMORY_MB);
    Ok(())
}

/// Runs all kinds on one leg, one after another.
async fn run_group(
    mut group: Group,
    fleet: &Fleet,
    bin: &Path,
    dir: &Path,
    wanted: &impl Fn(&str) -> bool,
) -> anyhow::Result<Rows> {
    let mut rows = Rows::new();
    let all = cases::all()?;
    let last = all.len();
    for (place, case) in all.iter().enumerate().filter(|(_, case)| wanted(&case.name)) {
        if group.has(case) {
            let row = group.run(fleet, case, place as u64).await?;
            note(&group, &case.name, &row);
            rows.insert((place, group.name), (case.name.clone(), row));
        }
    }
    if wanted(STOPPED) {
        let row = group.run_stopped(fleet).await?;
        rows.insert((last, group.name), (STOPPED.to_owned(), row));
    }
    if wanted(KILLED) {
        let row = group.run_killed(fleet, bin, dir).await?;
        rows.insert((last + 1, group.name), (KILLED.to_owned(), row));
    }
    // On other legs, a group needs two workers of the model.
    if wanted(OTHER_MODEL) && group.name.starts_with("aggregated") {
        let row = group.run_other_model(fleet, bin, dir).await?;
        rows.insert((last + 2, group.name), (OTHER_MODEL.to_owned(), row));
    }
    Ok(rows)
}

fn note(group: &Group, case: &str, row: &Row) {
    if !is_sound(row) {
        sh::status(&format!("{}: {case}: {row:?}", group.name));
    }
}

fn is_sound(row: &Row) -> bool {
    row.desyncs.is_empty() && row.errors <= row.errors_allowed && row.recovery.is_some()
}

/// Prints the table: one row for each kind, over all its legs.
fn report(rows: &Rows, checks: &mut Checks) {
    let head = ["case", "legs", "requests", "met it", "errors allowed/seen", "desyncs", "recovery", ""];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    let (mut failed, mut kinds) = (0, BTreeMap::<usize, Vec<_>>::new());
    for ((place, leg), (name, row)) in rows {
        kinds.entry(*place).or_default().push((*leg, name, row));
    }
    for legs in kinds.values() {
        let sum = |of: fn(&Row) -> u64| legs.iter().map(|(.., row)| of(row)).sum::<u64>();
        let bad: Vec<&str> = legs.iter().filter(|(.., row)| !is_sound(row)).map(|(leg, ..)| *leg).collect();
        let recovery = legs.iter().map(|(.., row)| row.recovery).collect::<Option<Vec<_>>>();
        let slowest = recovery.and_then(|all| all.into_iter().max());
        failed += bad.len();
        table.push(vec![
            legs.first().map(|(_, name, _)| (*name).clone()).unwrap_or_default(),
            legs.len().to_string(),
            sum(|row| row.requests).to_string(),
            sum(|row| row.hits).to_string(),
            format!("{}/{}", sum(|row| row.errors_allowed), sum(|row| row.errors)),
            sum(|row| row.desyncs.len() as u64).to_string(),
            slowest.map_or_else(|| "none".to_owned(), shown),
            if bad.is_empty() { "ok".to_owned() } else { format!("FAILED: {}", bad.join(", ")) },
        ]);
    }
    columns(&table).iter().for_each(|line| sh::print(line));
    checks.check("kinds of misbehaviour", kinds.len(), !kinds.is_empty());
    checks.none(&format!("of {} rows, those that fell short", rows.len()), failed as u64);
}

fn shown(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Row, Rows, report};
    use crate::table::Checks;

    #[test]
    fn a_desync_an_error_too_many_and_a_worker_that_stays_away_fall_short() {
        let passes = |row: Row| {
            let mut checks = Checks::default();
            report(&Rows::from([((0, "decode (vLLM)"), ("status 500".to_owned(), row))]), &mut checks);
            checks.finish().is_ok()
        };
        let good = Row { recovery: Some(Duration::ZERO), errors: 1, errors_allowed: 1, ..Row::default() };
        assert!(passes(good.clone()));
        assert!(!passes(Row { desyncs: vec!["half a stream".to_owned()], ..good.clone() }));
        assert!(!passes(Row { errors: 2, ..good.clone() }));
        assert!(!passes(Row { recovery: None, ..good }));
    }
}
