//! Tests that scenarios which must fail do fail: with doubles of the programs that each misbehave in one way,
//! and with records that each miss one requirement.

use std::{
    collections::BTreeMap,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use http::StatusCode;
use serde_json::json;
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    choose,
    judge::judge,
    record::{PhaseRecord, Reading, Record},
    run::{Options, run},
    scenario::{Change, Figure, Growth, Happened, Hold, Limit, Scenario},
};
use crate::{
    load::{Answer, End},
    table::Checks,
};

/// Error of the double of the gateway and of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// A request stays booked.
    LostBooking,
    /// An engine holds the blocks of a handoff.
    StrandedHandoff,
    /// Some streams end without the mark of the end.
    NoEnd,
    /// Some streams end with bytes that are not an event.
    Garbage,
    /// Half of the requests get a valid error.
    Errors,
    /// One answer is late.
    Slow,
    /// Refusals are late.
    SlowRefusals,
}

const STREAM: &str = "data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n";

const SCENARIO: &str = r#"
name = "x"
purpose = ""
minutes = 1
holds = [
  { happened = ["complete"] },
  "none-lost",
  { errors = 0.2 },
  { slowest = 1 },
  { no-bookings = 0 },
  { engines-zero = ["/stranded"] },
]
fleet.engines = [{ count = 1, dialect = "vllm", role = "aggregated" }]
[[phases]]
seconds = 30
loads = [{ arrivals = { clients = 4 }, kinds = ["stream"], requests = 40 }]
"#;

#[tokio::test]
async fn a_scenario_fails_by_each_flaw_of_the_gateway_and_passes_without() {
    let whole: Scenario = toml::from_str(SCENARIO).unwrap();
    let refused = Scenario { holds: vec![Hold::Refusals(529, 50.0)], ..whole.clone() };
    for (scenario, flaw, failed) in [
        (&whole, Flaw::None, 0),
        (&whole, Flaw::LostBooking, 1),
        (&whole, Flaw::StrandedHandoff, 1),
        (&whole, Flaw::NoEnd, 1),
        (&whole, Flaw::Garbage, 1),
        (&whole, Flaw::Errors, 1),
        (&whole, Flaw::Slow, 1),
        // No request is refused, so the p99 of refusals is unknown.
        (&refused, Flaw::None, 2),
        (&refused, Flaw::SlowRefusals, 1),
    ] {
        let address = double(flaw).await;
        let dir = tempfile::tempdir().unwrap();
        let line = format!("{{\"listening\":\"{address}\",\"admin\":\"{address}\"}}");
        for program in ["pointsman", "pointsman-sim"] {
            script(&dir.path().join(program), &format!("echo '{line}'; exec sleep 600"));
        }
        let options = Options { minutes: None, scale: 1.0, seed: 1 };
        let mut checks = Checks::default();
        run(scenario, dir.path(), options, &mut checks).await.unwrap();
        let seen = checks.finish().map_err(|error| error.to_string());
        match failed {
            0 => assert_eq!(seen, Ok(()), "{flaw:?}"),
            _ => assert!(
                seen.clone().is_err_and(|text| text.starts_with(&failed.to_string())),
                "{flaw:?}: {seen:?}"
            ),
        }
    }
}

fn script(file: &Path, text: &str) {
    std::fs::write(file, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Starts a double of the gateway and of its engine; returns its address.
async fn double(flaw: Flaw) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let turns = Arc::new(AtomicUsize::new(0));
    let app = axum::Router::new().fallback(move |uri: http::Uri, body: String| async move {
        let (status, body) = answer(uri.path(), flaw, body.contains("\"stream\":true"), &turns).await;
        (StatusCode::from_u16(status).unwrap(), body)
    });
    let mut serving = JoinSet::new();
    serving.spawn(async move { axum::serve(listener, app).await.unwrap() });
    serving.detach_all();
    address
}

async fn answer(path: &str, flaw: Flaw, asks_stream: bool, turns: &AtomicUsize) -> (u16, String) {
    match path {
        "/workers" => {
            let booked = u32::from(flaw == Flaw::LostBooking);
            let ranks = json!([{ "active_requests": booked }]);
            (200, json!({ "workers": [{ "ineligible": null, "ranks": ranks }] }).to_string())
        }
        "/sim/state" => {
            let stranded = u32::from(flaw == Flaw::StrandedHandoff);
            (200, json!({ "running": 0, "waiting": 0, "stranded": stranded }).to_string())
        }
        "/metrics" => (200, "pointsman_client_connections 0\n".to_owned()),
        _ if !asks_stream => (200, json!({ "choices": [] }).to_string()),
        _ => {
            let turn = turns.fetch_add(1, Relaxed);
            let error = json!({ "error": { "code": "overloaded" } }).to_string();
            match flaw {
                Flaw::NoEnd if turn % 8 == 3 => (200, STREAM.replace("data: [DONE]\n\n", "")),
                Flaw::Garbage if turn % 8 == 3 => (200, STREAM.replace("data: [DONE]", "<html>")),
                Flaw::Errors if turn % 2 == 1 => (503, error),
                Flaw::Slow if turn == 3 => {
                    sleep(Duration::from_millis(1_200)).await;
                    (200, STREAM.to_owned())
                }
                Flaw::SlowRefusals if turn % 2 == 1 => {
                    sleep(Duration::from_millis(80)).await;
                    (529, error)
                }
                _ => (200, STREAM.to_owned()),
            }
        }
    }
}

fn answered(load: &str, end: End, took_ms: u64) -> Answer {
    let due = Instant::now();
    Answer {
        load: load.into(),
        instance: 1,
        due,
        sent: due,
        ended: due + Duration::from_millis(took_ms),
        ttft: Some(Duration::from_millis(took_ms)),
        tokens: 10,
        status: 200,
        end,
    }
}

fn phase(name: &str, counted: Vec<Answer>) -> PhaseRecord {
    let reading = |resident: f64| Reading {
        resident,
        anonymous: resident,
        descriptors: 20.0,
        threads: BTreeMap::from([("main".to_owned(), 1)]),
    };
    let readings = (0..=100).map(|at| (f64::from(at) / 100.0, reading(100.0))).collect();
    PhaseRecord { name: name.to_owned(), seconds: 10.0, counted, others: Vec::new(), readings }
}

/// Returns a record that meets every requirement of [`requirements`].
fn sound() -> Record {
    let left = End::Left(Some(("id".to_owned(), 1_000_000)));
    let answers = || {
        vec![
            answered("light", End::Complete, 10),
            answered("heavy", End::Complete, 10),
            answered("light", left.clone(), 10),
        ]
    };
    Record {
        phases: vec![phase("first", answers()), phase("last", answers())],
        changes: BTreeMap::from([(Change::Policy("decode".to_owned()), 100)]),
        heals: BTreeMap::from([("Nats".to_owned(), vec![1.0])]),
        fired: Some(BTreeMap::from([("refuse".to_owned(), 3)])),
        states: vec![json!({ "stranded": 0, "handoffs": { "pulled": 4 } })],
        disconnects: BTreeMap::from([("id".to_owned(), 2_000_000)]),
        metrics: vec![
            "pointsman_handoffs_total{result=\"complete\"} 2\n\
             pointsman_policy_reloads_total{result=\"installed\"} 99\n"
                .to_owned(),
        ],
        booked: vec![0],
        recovered: Some(Duration::from_secs(1)),
        ..Record::default()
    }
}

fn last(record: &mut Record) -> &mut PhaseRecord {
    record.phases.last_mut().unwrap()
}

fn grows(record: &mut Record, change: fn(&mut Reading)) {
    last(record).readings.iter_mut().skip(70).for_each(|(_, reading)| change(reading));
}

const fn growth(figure: Figure, limit: Limit) -> Hold {
    Hold::Growth(Growth { figure, from: 0.25, window: 0.25, limit })
}

/// Changes a record so that it misses a requirement.
type Shortfall = fn(&mut Record);

/// Returns each requirement, with a change of the record that misses it.
fn requirements() -> Vec<(Hold, Shortfall)> {
    vec![
        (Hold::Happened(vec![Happened::Complete, Happened::Left]), |record| record.phases.clear()),
        (Hold::NoneLost, |record| last(record).counted.push(answered("light", End::Neither, 1))),
        // A gateway that was killed later does not explain the loss.
        (Hold::NoneLost, |record| {
            record.gateway_kills.insert(1, Instant::now() + Duration::from_secs(60));
            last(record).others.push(answered("light", End::Neither, 1));
        }),
        (Hold::Errors(0.1), |record| last(record).counted.push(answered("light", End::OneError, 1))),
        (Hold::ErrorsExplained(5), |record| {
            record.engine_kills.push(Instant::now() + Duration::from_secs(60));
            last(record).counted.push(answered("light", End::OneError, 1));
        }),
        (Hold::Slowest(2), |record| last(record).counted.push(answered("light", End::Complete, 2_001))),
        (Hold::NoBookings(1), |record| record.booked.push(1)),
        (Hold::NoBookings(1), |record| record.booked.clear()),
        (Hold::EnginesZero(vec!["/stranded".to_owned()]), |record| record.states[0]["stranded"] = json!(1)),
        (Hold::EnginesZero(vec!["/stranded".to_owned()]), |record| record.states.clear()),
        (Hold::EveryFault, |record| {
            record.fired.as_mut().unwrap().insert("cut".to_owned(), 0);
        }),
        (Hold::HandoffsKept, |record| {
            record.metrics.push("pointsman_handoffs_total{result=\"lost_prefill_died\"} 1\n".to_owned());
        }),
        (Hold::HandoffsPulled, |record| record.states[0]["handoffs"]["pulled"] = json!(3)),
        (Hold::Noticed(100.0), |record| record.disconnects.clear()),
        (Hold::Noticed(100.0), |record| {
            record.disconnects.insert("id".to_owned(), 102_000_000);
        }),
        (Hold::Goodput(0.9), |record| last(record).seconds = 20.0),
        (Hold::Recovers(5), |record| record.recovered = None),
        (growth(Figure::Anonymous, Limit::Share(0.05)), |record| grows(record, |one| one.anonymous = 106.0)),
        (growth(Figure::Resident, Limit::Share(0.05)), |record| last(record).readings.clear()),
        (growth(Figure::Descriptors, Limit::Count(5.0)), |record| {
            grows(record, |one| one.descriptors = 26.0)
        }),
        (growth(Figure::Threads, Limit::Count(0.0)), |record| {
            grows(record, |one| {
                one.threads.insert("leaked".to_owned(), 1);
            });
        }),
        (Hold::Applied(1.0), |record| {
            record.changes.insert(Change::Policy("decode".to_owned()), 101);
        }),
        (Hold::Share("light".to_owned(), 0.5, 0.05), |record| {
            last(record).counted.push(answered("heavy", End::Complete, 1));
        }),
        (Hold::FirstTokens("light".to_owned(), 1.2), |record| {
            last(record).counted.push(answered("light", End::Complete, 13));
        }),
        (Hold::Heals(5), |record| record.heals.entry("Nats".to_owned()).or_default().push(5.1)),
        (Hold::Heals(5), |record| record.not_healed.push("Nats".to_owned())),
        (Hold::Heals(5), |record| record.notices.entry("Nats".to_owned()).or_default().push(5.1)),
    ]
}

fn passes(hold: &Hold, record: &Record) -> bool {
    let mut checks = Checks::default();
    judge(std::slice::from_ref(hold), record, &mut checks);
    checks.finish().is_ok()
}

#[test]
fn each_requirement_is_missed_by_a_record_that_falls_short_of_it() {
    for (hold, change) in requirements() {
        let mut record = sound();
        assert!(passes(&hold, &record), "{hold:?}");
        change(&mut record);
        assert!(!passes(&hold, &record), "{hold:?}");
    }
}

#[test]
fn what_a_killed_gateway_or_engine_explains_is_not_lost() {
    let mut record = sound();
    record.gateway_kills.insert(1, Instant::now());
    record.engine_kills.push(Instant::now());
    last(&mut record).counted.push(answered("light", End::Neither, 10));
    last(&mut record).counted.push(answered("light", End::OneError, 10));
    assert!(passes(&Hold::NoneLost, &record) && passes(&Hold::ErrorsExplained(5), &record));
}

#[test]
fn scenarios_are_chosen_by_name_or_by_its_beginning() {
    let chosen = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        choose(&names).map(|rows| rows.into_iter().map(|row| row.name).collect::<Vec<_>>())
    };
    assert_eq!(chosen(&["engines"]).unwrap(), ["engines"]);
    let all = ["disconnect-notice", "disconnect-vllm", "disconnect-sglang"];
    assert_eq!(chosen(&["disconnect"]).unwrap(), all);
    assert!(chosen(&["disc"]).unwrap_err().to_string().starts_with("no scenario is called `disc`: expected"));
}
